"""Merging and compressing sealed segments, by a call or in the background by a process of its own."""
