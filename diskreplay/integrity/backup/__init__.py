"""Backups: a consistent copy of a store that is being written."""
