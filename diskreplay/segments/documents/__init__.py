"""The metadata files of a store: root, metadata of arrays and segments, notes, limiters, saved states, evictions."""
