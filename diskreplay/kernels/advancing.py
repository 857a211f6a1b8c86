"""The tables of `advance` and `advance_hiding`, which make the next snapshot of a store.

Both follow lanes, and then write the record of a snapshot if anything has changed. In between, `advance_hiding` hides
the steps beyond the store's limits. If it needs more memory mapped, it returns a status and is called again. A store
without numba calls both as plain Python, with `follow_plain` and `hide_oldest_plain`.
"""

UNREADY, UNMAPPED = range(5, 7)
"""Results of `advance_hiding`, in addition to the results of `follow`. UNREADY: the arrays of `hide_oldest` do not
exist yet. UNMAPPED: the time of step NEEDED is not mapped."""

# Lines of the record `tables`, an array each; see `packed`.
# GROWING and ROWS are `growing` and `lanes` of `following`, ENDED the log of ended episodes, and HEAD the head of a
# snapshot's record. FIRST_CHUNK to BASES are the table of flags, FIRST_TIMES to TIMES the table of times; if TIMES is
# empty, times are 0. FOUND are the numbers of `following`, HIDDEN the numbers of `hiding`.
# `advance_hiding` reads the rest, too. LANES to FIRST_ROWS are arrays by slot and by place, see `frozen`; CLOCKS is
# added to the times of each segment. HEAP and BY_PLACE are the tables of `hiding`. FOLLOWING has the next line of the
# log in the same lane.
(
    GROWING, FIRST_CHUNK, CHUNKS, SHIFT, BASES, FIRST_TIMES, TIME_CHUNKS, TIME_SHIFT, TIMES, ROWS, ENDED, HEAD,
    FOUND, HIDDEN, LANES, LANE_BASE, CLOCKS, FOLDERS, FIRST_ROWS, HEAP, BY_PLACE, FOLLOWING,
) = range(22)  # fmt: skip
