"""What kernels read of a snapshot: one record of int64, since each argument of a kernel costs about 50 ns.

It has numbers and addresses of arrays, which the snapshot keeps alive, and behind them what was followed of the lanes
that may still grow: the rows of `following`, a column a lane. Sealed lanes never change, so all snapshots share theirs.
Here are the columns.
"""

# Of each segment by slot: its lanes, 0 where it is gone; the place of the first of them among all lanes; its first
# column among lanes that may grow, -1 where it is sealed. The number of the first slot's segment, and how many there
# are.
ORIGIN, SLOTS, LANES, LANE_BASE, LIVE_BASE = range(5)
# Nothing is hidden of an episode that began at this time or later.
REACHED = 5
# Segments that may grow: lines of slot, lanes and first column.
GROWING, GROWING_COUNT = 6, 7
# How many lanes may grow, and how many there are; then by place: the first row that is not hidden, rows of `following`.
LIVE_LANES, ALL_LANES, OLDEST, ROWS = range(8, 12)
# By slot, in which folder of the tables of chunks its rows are, how many folders there are, and by place, at which row
# of a pack a lane begins, or OWN_FOLDER: it is in its segment's own folder, where it has a line of each chunk.
FOLDERS, FOLDER_COUNT, FIRST_ROWS = range(12, 15)
# The lowest slot of a segment that may grow; as many as there are slots where none may.
FIRST_GROWING = 15
# The address of what is behind the head.
LIVE = 16
HEAD = 17

OWN_FOLDER = -1

GROWING_COLUMNS = 3
