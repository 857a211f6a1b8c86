"""Reads and writes the files of segments and packs: rows, marks and metadata.

This package has three subpackages. `files` has the low-level file operations: durable writes, locks, mappings, copies.
`documents` reads and writes the metadata of the root and of segments. `damage` finds damaged files and moves them to
quarantine. The packages for reading, writing, retention, integrity and the store use this package.
"""
