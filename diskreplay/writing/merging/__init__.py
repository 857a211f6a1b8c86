"""Merging and compressing sealed segments, in the background, in a process of its own, or at once."""
