"""Where folders have the values of episodes: at the places of the rows that were published with them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import EPISODE_VALUES, POSITION_BITS, Ints
from diskreplay.segments.packs import PackTables
from diskreplay.segments.segment import SegmentInfo

Flags = Callable[[int, int, int], Iterable[NDArray[np.uint8]]]
"""Returns the flags of a line of a folder from one row to before another, in parts."""


class ValueRows:
    """The rows with `EPISODE_VALUES` of each line of a folder, as far as they are known.

    Concurrency: any thread. What is known is replaced, under the lock that `find` is given.
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

    def find(self, flags: Flags, lock: AbstractContextManager[Any], line: Ints, row: Ints, stop: Ints) -> Ints:
        """Return the place of the values of some rows, each of which has them, in the arrays of episode fields.

        What is not known yet of a line is read from its ``flags`` up to the row ``stop``.
        """
        rows, valued = self._known
        if (row >= rows[line]).any():
            rows, valued = self._extend(flags, lock, line, stop)
        begin = line << POSITION_BITS
        found = np.searchsorted(valued, begin | row) - np.searchsorted(valued, begin)
        if len(self._lost):
            upto, before = (self._lost_values[np.searchsorted(self._lost, at)] for at in (begin | row, begin))
            found += upto - before
        return found

    def _extend(self, flags: Flags, lock: AbstractContextManager[Any], line: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """Read the flags of lines up to these rows; of a pack, all."""
        with lock:
            known, valued = self._known
            rows, more = known.copy(), [valued]
            np.maximum.at(rows, line, np.maximum(stop, self._least))
            for at in np.flatnonzero(rows > known).tolist():
                first = int(known[at])
                for part in flags(at, first, int(rows[at])):
                    more.append((np.flatnonzero(part & EPISODE_VALUES) + first) | at << POSITION_BITS)
                    first += len(part)
            self._known = rows, np.sort(np.concatenate(more))
            return self._known
