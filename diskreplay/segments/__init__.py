"""Segments on disk: live rows and their marks, sealed rows, packs, and their documents.

`files` has the tools of every write to disk: durable commits, locks, mappings, copies. `documents` has the metadata of
the root and of segments. `damage` finds damaged files and sets them aside. Reading, writing, retention, integrity and
the store use this package. Nothing else knows zarr.
"""
