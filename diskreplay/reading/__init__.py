"""Reading: follows the files of a store, and makes snapshots, episodes and chunks of what it found.

`follower` refreshes. `known_segments` and `followed_rows` have what it took in, `live_lanes` what may still grow.
`snapshot` and `episodes` are what readers get; they never change. `chunk_table` maps the rows, within the bounds of
`chunk_budget`. The store, views, sampling, repair, backups and commands use this package. It writes nothing, and asks
`segments` where rows lie.
"""
