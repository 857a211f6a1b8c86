"""Segments on disk: live rows and their marks, sealed rows, packs, and the documents beside them.

`files` has what every write to a disk needs: durable commits, locks, mappings, copies. `documents` has what the root
and a segment say about themselves. `damage` finds damaged files and sets them aside. Reading, writing, retention,
integrity and the store use this package. Nothing else knows zarr.
"""
