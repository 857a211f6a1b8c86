"""The record of a snapshot for kernels: one array of int64, since each argument of a kernel costs about 50 ns.

Its head has numbers, and addresses of arrays that the snapshot keeps alive. After the head comes a table of the lanes
that may still grow: the rows that `following` names, with a column per lane. Lanes of sealed segments never change, so
all snapshots share one table of them. This module names the columns of the head.
"""

# A slot is the number of a segment minus ORIGIN, the number of the first segment. SLOTS is the number of slots. The
# others are addresses of arrays by slot. LANES: the segment's number of lanes, 0 if the segment is gone. LANE_BASE: the
# place of its first lane among all lanes. LIVE_BASE: its first column among the lanes that may grow, -1 if it is
# sealed.
ORIGIN, SLOTS, LANES, LANE_BASE, LIVE_BASE = range(5)
# A time; episodes that began then or later have no hidden steps. Hidden steps are beyond the store's limits.
REACHED = 5
# The address of a table of the segments that may grow, with a slot, a number of lanes and a first column in each line,
# and the number of these lines.
GROWING, GROWING_COUNT = 6, 7
# The number of lanes that may grow, and the number of all lanes. Then the addresses of arrays by place, which is a
# lane's place among all lanes: the first visible row, and the rows that `following` names.
LIVE_LANES, ALL_LANES, OLDEST, ROWS = range(8, 12)
# FOLDERS: by slot, the number that the folder with the segment's rows has in the tables of chunks. FOLDER_COUNT: the
# number of folders. FIRST_ROWS: by place, the first row of the lane in its pack. It is OWN_FOLDER if the lane is in the
# folder of its own segment, where each chunk has a line per lane.
FOLDERS, FOLDER_COUNT, FIRST_ROWS = range(12, 15)
# The lowest slot of a segment that may grow, or the number of slots if all segments are sealed.
FIRST_GROWING = 15
# The address of the rows after the head.
LIVE = 16
HEAD = 17

OWN_FOLDER = -1

GROWING_COLUMNS = 3
