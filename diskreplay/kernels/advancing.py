"""The tables of `advance` and `advance_hiding`, which make the next snapshot of a store.

If a kernel needs chunks that are not mapped, the kernel returns a status, and the caller maps these chunks and repeats
the call.
"""

UNREADY, UNMAPPED = range(5, 7)
"""Results of `advance_hiding`, in addition to the results of `follow`. UNREADY: the caller must first make the arrays
that `hide_oldest` reads. UNMAPPED: the caller must first map the time of a step; found[NEEDED] of `hiding` is the
step's id."""

# Lines of the record `tables`. A line describes one array; see `packed`.
# - GROWING, ROWS: the tables `growing` and `lanes` of `following`.
# - FIRST_CHUNK to BASES: the chunk table of the flags, see `following.Chunks`.
# - FIRST_TIMES to TIMES: the chunk table of the times. If the array TIMES is empty, all times are 0.
# - ENDED: the log, a table with one line for each ended episode and the columns of `ids.EpisodeTable`.
# - HEAD: the head of the next snapshot's record, see `frozen`.
# - FOUND, HIDDEN: the arrays `found` of `following` and of `hiding`.
# Only `advance_hiding` reads the arrays from LANES on.
# - LANES, LANE_BASE, FOLDERS, FIRST_ROWS: the arrays of the same names in `frozen`.
# - CLOCKS: for each segment, the number to add to its times to get nanoseconds since the epoch.
# - HEAP, BY_PLACE: the tables that the module `hiding` calls `heap` and `by_place`.
# - FOLLOWING: for each line of the log, the line of the next ended episode in the same lane, or -1.
(
    GROWING, FIRST_CHUNK, CHUNKS, SHIFT, BASES, FIRST_TIMES, TIME_CHUNKS, TIME_SHIFT, TIMES, ROWS, ENDED, HEAD,
    FOUND, HIDDEN, LANES, LANE_BASE, CLOCKS, FOLDERS, FIRST_ROWS, HEAP, BY_PLACE, FOLLOWING,
) = range(22)  # fmt: skip
