"""The files of a store: its schema, layout, commit counters and durability. The only package that knows zarr."""
