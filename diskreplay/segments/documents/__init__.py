"""The documents of a store: its root, metadata of arrays and segments, notes, limiters, states, evictions."""
