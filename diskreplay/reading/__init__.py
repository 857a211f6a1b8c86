"""Reading: follows the files of a store, and gives readers snapshots, episodes and rows in memory.

`follower` takes a new snapshot at each refresh. `known_segments` and `followed_rows` hold the segments and rows read so
far. `live_lanes` holds the lanes that may still grow. `snapshot` and `episodes` have the classes that readers use;
objects of these classes never change. `chunk_table` maps the files that have the rows, within the bounds of
`chunk_budget`. The store, views, sampling, repair, backups and commands use this package. It never writes files. The
package `segments` defines the format of the files.
"""
