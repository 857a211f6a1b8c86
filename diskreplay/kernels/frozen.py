"""The record of a snapshot for kernels: one array of int64, since each argument of a kernel costs about 50 ns.

Its head has numbers, and addresses of arrays that the snapshot keeps alive. After the head it has the rows of
`following` for the lanes that may still grow, a column per lane. Sealed lanes never change, so all snapshots share
their rows. This module names the columns of the head.
"""

# ORIGIN is the number of the first slot's segment, SLOTS the number of slots. The others are arrays by slot. LANES is
# the segment's number of lanes, 0 if it is gone. LANE_BASE is the place of its first lane among all lanes. LIVE_BASE is
# its first column among the lanes that may grow, -1 if it is sealed.
ORIGIN, SLOTS, LANES, LANE_BASE, LIVE_BASE = range(5)
# No step is hidden of an episode that began at this time or later.
REACHED = 5
# Segments that may grow: lines of slot, lanes and first column.
GROWING, GROWING_COUNT = 6, 7
# The numbers of lanes that may grow, and of all lanes. Then arrays by place: the first visible row, and the rows of
# `following`.
LIVE_LANES, ALL_LANES, OLDEST, ROWS = range(8, 12)
# By slot, the folder of its rows in the tables of chunks; the number of folders; and by place, the first row of a lane
# in its pack. OWN_FOLDER: the lane is in its segment's own folder, where it has a line of each chunk.
FOLDERS, FOLDER_COUNT, FIRST_ROWS = range(12, 15)
# The lowest slot of a segment that may grow; the number of slots if none may.
FIRST_GROWING = 15
# The address of the rows after the head.
LIVE = 16
HEAD = 17

OWN_FOLDER = -1

GROWING_COLUMNS = 3
