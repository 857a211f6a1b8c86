"""Retention: which steps a store evicts, by size, by age, and by hand.

`policy` says which segments are due. `retention` makes and removes segments under the lock of the store. Writers, the
store and repair use this package; readers only follow what it counts.
"""
