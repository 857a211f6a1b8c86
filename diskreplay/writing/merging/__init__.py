"""Merges and compresses sealed segments, in a call of `Store.compact` or in a child process in the background."""
