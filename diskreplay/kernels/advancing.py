"""How the next snapshot of a store is made: the tables of `advance` and `advance_hiding`.

Both follow lanes and then make the record of a snapshot, if anything has changed. `advance_hiding` hides in between
what is more than a store keeps. Whatever it needs meanwhile, it says so and is called again. A store without numba
calls both undecorated, with `follow_plain` and `hide_oldest_plain` in place of `follow` and `hide_oldest`.
"""

UNREADY, UNMAPPED = range(5, 7)
"""What `advance_hiding` returns beside the results of `follow`: the arrays of `hide_oldest` were not made yet; the time
of step NEEDED is not mapped."""

# The record of what `advance` reads, see `packed`, and what `advance_hiding` reads as well: `growing`, `lanes`, the log
# of ended episodes and the head of a snapshot's record; the table of flags and that of times, see `packed`. With no
# TIMES, times are 0. FOUND are the numbers of `following`, HIDDEN those of `hiding`. Then by slot and by place, see
# `frozen`, but for what is added to the times of each segment; and the tables of `hiding`. FOLLOWING says which line of
# the log comes behind another in its lane.
(
    GROWING, FIRST_CHUNK, CHUNKS, SHIFT, BASES, FIRST_TIMES, TIME_CHUNKS, TIME_SHIFT, TIMES, ROWS, ENDED, HEAD,
    FOUND, HIDDEN, LANES, LANE_BASE, CLOCKS, FOLDERS, FIRST_ROWS, HEAP, BY_PLACE, FOLLOWING,
) = range(22)  # fmt: skip
