"""Merging and compressing sealed segments, in a call of `Store.compact` or in the background by another process."""
