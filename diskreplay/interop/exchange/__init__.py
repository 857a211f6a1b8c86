"""The parts that all formats of data sets share. Only formats and the command line import them.

The reader of a format returns a `Source` (`importing`), and its writer is a `Format` (`exporting`). Both represent an
episode as `EpisodeData` (`episode_data`). The drivers `import_into` and `export_from` handle progress, resuming,
interruption and errors, and report the data that a format cannot hold.

`foreign`, `hdf5_files`, `zarr_documents` and `inert_pickle` check foreign files before a value is decoded. `lanes`
splits flat buffers into episodes. `field_trees` makes schemas from arrays and spaces from schemas. `threads` reads
ahead and writes behind. `description` is the document of the formats npz and parquet.
"""
