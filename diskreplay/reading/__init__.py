"""Reading: follows the files of a store, and makes snapshots, episodes and chunks.

`follower` refreshes. `known_segments` and `followed_rows` hold the segments and rows read so far, and `live_lanes` the
lanes that may still grow. Readers get `snapshot` and `episodes`, which never change. `chunk_table` maps the rows,
within the bounds of `chunk_budget`. The store, views, sampling, repair, backups and commands use this package. It
writes nothing, and asks `segments` where rows lie.
"""
