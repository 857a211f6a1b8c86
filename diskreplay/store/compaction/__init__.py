"""Compaction: merges sealed segments into packs."""
