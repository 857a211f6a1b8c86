"""Retention: which steps a store evicts, by size, by age, and by hand.

`policy` decides which segments are due for removal. `retention` makes and removes segments under the store lock.
Writers, the store and repair use this package. Readers only follow the counters that this package sets.
"""
