"""The parts that all formats of data sets share. Formats and the command line import them, and nothing else does.

A format reads a `Source` (`importing`), which yields `EpisodeData` (`episode_data`), and writes them by a `Format`
(`exporting`). The two drivers do progress, resuming, interruption, errors, and the names of data that a format lacks.

`foreign`, `hdf5_files`, `zarr_documents` and `inert_pickle` check files of others before a value is decoded. `lanes`
splits flat buffers into episodes, `field_trees` makes schemas of arrays and spaces of schemas, `threads` reads ahead
and writes behind, and `description` is the document of the formats npz and parquet.
"""
