"""Retention: which steps a store evicts, by size, by age, and by hand."""
