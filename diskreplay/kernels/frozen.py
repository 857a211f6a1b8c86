"""The record of a snapshot for kernels: one array of int64, since each argument of a kernel costs about 50 ns.

The head of the record has numbers, and addresses of arrays that the snapshot keeps alive. The table LIVE follows the
head. It has a column for each lane that may still grow, and the rows COMMITTED to OPEN_TIME of `following`. Lanes of
sealed segments never change, so all snapshots share one table with the columns of these lanes. The constants of this
module are indices of the head.
"""

# A slot is the number of a segment minus ORIGIN, the number of the first segment.
# A place is the number of a lane among the lanes of all segments.
# LANES, LANE_BASE and LIVE_BASE are addresses of arrays with a number per slot:
# - LANES: the segment's number of lanes, 0 if the segment is gone.
# - LANE_BASE: the place of the segment's first lane.
# - LIVE_BASE: the column of the segment's first lane in the table LIVE, -1 if the segment is sealed.
ORIGIN, SLOTS, LANES, LANE_BASE, LIVE_BASE = range(5)
# Episodes that began at this time or later have no hidden steps.
REACHED = 5
# GROWING is the address of a table with GROWING_COUNT lines, one for each segment that may grow. A line has the
# segment's slot, the segment's number of lanes, and the column of the segment's first lane in the table LIVE.
GROWING, GROWING_COUNT = 6, 7
# - LIVE_LANES: the number of lanes that may grow.
# - OLDEST: the address of an array with the first visible row of each lane, in the order of places.
# - ROWS: the address of a table with a column for each lane, in the order of places; its rows are COMMITTED to
#   OPEN_TIME of `following`.
LIVE_LANES, ALL_LANES, OLDEST, ROWS = range(8, 12)
# - FOLDERS: the address of an array with each segment's folder number, in the order of slots; see `following.Chunks`.
# - FIRST_ROWS: the address of an array with a value per lane, in the order of places. If the lane's segment was merged
#   into a pack, the value is the row of the pack at which the lane begins. Otherwise the segment has its own folder,
#   and the value is OWN_FOLDER. A chunk of this folder has a line for every lane of the segment.
FOLDERS, FOLDER_COUNT, FIRST_ROWS = range(12, 15)
# The lowest slot of a segment that may grow, or the number of slots if all segments are sealed.
FIRST_GROWING = 15
LIVE = 16
HEAD = 17

OWN_FOLDER = -1

GROWING_COLUMNS = 3
