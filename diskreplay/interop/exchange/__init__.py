"""Code shared by the modules of all data set formats. Only these modules and the command line import this package.

The reader of a format returns a `Source` (in `importing`), and the writer of a format is a `Format` (in `exporting`).
Readers and writers represent an episode as `EpisodeData` (in `episode_data`). The functions `import_into` and
`export_from` handle progress, resuming, interruption and errors, and report the data that a format cannot hold.

`foreign`, `hdf5_files`, `zarr_documents` and `inert_pickle` check untrusted files before any value is decoded. `lanes`
finds the episodes in buffers of transitions. `field_trees` makes schemas from arrays and spaces from schemas. `threads`
reads and writes episodes in a thread. `description` reads and writes `dataset.json` of the formats npz and parquet.
"""
