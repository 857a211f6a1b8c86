"""How the oldest steps of a store are hidden: the tables of `hide_oldest`."""

from .runs import NEVER as NEVER

# Columns of the heap, a line a lane of a segment that has a step left: when its oldest one was published, the id and
# the row of that, and the lane's place among all lanes. The second half of the lines is the ring of `hide_oldest`.
WHEN, ID, ROW, PLACE = range(4)
HEAP_COLUMNS = 4

# Rows of `by_place`, one column a lane: its first row that is not hidden; the lines of the log with the oldest and the
# newest of its ended episodes that are not hidden whole, -1: none; whether it is in the heap.
OLDEST, LINE, TAIL, LISTED = range(4)
PLACE_ROWS = 4

# What `found` holds: lines of the log that are in chains, entries of the heap; how many steps to hide, and before which
# time all are; how many were, and when the last of them was published; the id of the step whose time is not mapped.
# Then what `advance_hiding` knows: how many steps are left at most, or -1; before which time all are hidden by now, and
# none of an episode that began at REACHED or later, as `advance` knows, too; whether the arrays of `hide_oldest` were
# made; the time behind the last step that is hidden: steps of one call have one time, and some of them may be left.
# The first line of the ring that is in use, and how many are. The address of the first rows that are not hidden.
(
    SEEN, SIZE, COUNT, UNTIL, HIDDEN, LAST, NEEDED, CAPACITY, PAST, REACHED, READY, BEHIND, FRONT, WAITING, OLDEST_AT,
) = range(15)  # fmt: skip
FOUND = 15

DONE, UNMAPPED = range(2)
"""What `hide_oldest` returns: all is done; the time of step NEEDED is not mapped, and it is to be called again."""
