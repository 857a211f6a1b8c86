"""Reads and writes the files of segments and packs: rows, marks and metadata.

`files` has the low-level file operations: durable writes, locks, mappings, copies. `documents` reads and writes the
metadata of the root and of segments. `damage` finds damaged files and moves them to quarantine.
"""
