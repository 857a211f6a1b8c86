"""The parts that all formats of data sets share. Only formats and the command line import them.

A format reads a `Source` (`importing`), which yields `EpisodeData` (`episode_data`), and writes them by a `Format`
(`exporting`). The two drivers handle progress, resuming, interruption and errors. They name the data that a format
lacks.

`foreign`, `hdf5_files`, `zarr_documents` and `inert_pickle` check foreign files before a value is decoded. `lanes`
splits flat buffers into episodes. `field_trees` makes schemas from arrays and spaces from schemas. `threads` reads
ahead and writes behind. `description` is the document of the formats npz and parquet.
"""
