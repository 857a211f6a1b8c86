"""Reading: follows the files of a store, and gives readers snapshots, episodes and rows in memory.

`follower` takes a new snapshot at each refresh. `known_segments` and `followed_rows` hold the segments and rows read so
far, and `live_lanes` the lanes that may still grow. `snapshot` and `episodes` have the classes that readers use; their
objects never change. `chunk_table` maps the files with rows, within the bounds of `chunk_budget`. The store, views,
sampling, repair, backups and commands use this package. It never writes files. Their
format is defined in the package `segments`.
"""
