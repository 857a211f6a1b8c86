"""Where folders have the values of episodes: at the places of the rows that were published with them."""

from typing import TYPE_CHECKING

import numpy as np

from diskreplay.format import layout
from diskreplay.format.packs import PackTables
from diskreplay.format.segment import SegmentInfo
from diskreplay.ids import EPISODE_VALUES, POSITION_BITS, Ints

if TYPE_CHECKING:
    from diskreplay.store.reading.chunk_table import ChunkTables


class ValueRows:
    """The rows with `EPISODE_VALUES` of each line of a folder, as far as they are known.

    Concurrency: any thread. What is known is replaced, under the lock of all tables.
    """

    def __init__(self, info: SegmentInfo, pack: PackTables | None) -> None:
        lanes = len(info.lanes)
        self._least = 0 if pack is None else int((pack.first_rows + pack.rows)[-1])
        self._known: tuple[Ints, Ints] = np.zeros(lanes, np.int64), np.zeros(0, np.int64)
        # The values of lost rows have their places, and no flags.
        row, lane = np.divmod(np.array([position for position, _ in info.lost.ranges], np.int64), lanes)
        lost = lane << POSITION_BITS | row
        order = np.argsort(lost)
        self._lost = lost[order]
        self._lost_values = np.append(0, np.cumsum(np.array(info.lost.values, np.int64)[order]))

    def find(self, tables: "ChunkTables", folder: int, line: Ints, row: Ints, stop: Ints) -> Ints:
        """Return the place of the values of some rows, each of which has them, in the arrays of episode fields.

        What is not known yet of a line is read up to the row ``stop``, from this folder of the tables.
        """
        rows, valued = self._known
        if (row >= rows[line]).any():
            rows, valued = self._extend(tables, folder, line, stop)
        begin = line << POSITION_BITS
        found = np.searchsorted(valued, begin | row) - np.searchsorted(valued, begin)
        if len(self._lost):
            upto, before = (self._lost_values[np.searchsorted(self._lost, at)] for at in (begin | row, begin))
            found += upto - before
        return found

    def _extend(self, tables: "ChunkTables", folder: int, line: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """Read the flags of lines up to these rows; of a pack, all."""
        done = tables.leaves[layout.DONE]
        with tables.lock:
            known, valued = self._known
            rows, more = known.copy(), [valued]
            np.maximum.at(rows, line, np.maximum(stop, self._least))
            for at in np.flatnonzero(rows > known).tolist():
                first = int(known[at])
                for flags in done.rows_in(folder, at, first, int(rows[at])):
                    more.append((np.flatnonzero(flags & EPISODE_VALUES) + first) | at << POSITION_BITS)
                    first += len(flags)
            self._known = rows, np.sort(np.concatenate(more))
            return self._known
