"""Segments that may still grow: their counters, and what of their lanes was followed."""

import os
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.format import layout
from diskreplay.format.marks import map_trusted
from diskreplay.format.metadata import identify
from diskreplay.format.root import Root
from diskreplay.format.segment import read_segment
from diskreplay.ids import Ints
from diskreplay.kernels import following as rows, frozen
from diskreplay.kernels.table import Kernel
from diskreplay.store.reading.chunk_table import ChunkTables, Held, unseen
from diskreplay.store.reading.episode_log import EpisodeLog

# New rows of a lane from which on they are read as those of a sealed segment are.
MANY_ROWS = 4096

_NO_TIMES = (np.zeros(0, np.int64),) * 4


class LiveSegment:
    """The counters of a segment that may still grow. Used by one thread.

    ``folder`` is the inode of its folder: another one means that repair has replaced the segment.
    """

    def __init__(self, root: Root, number: int) -> None:
        self.metadata = str(root.segment_path(number) / layout.METADATA)
        self.folder = os.stat(root.segment_path(number)).st_ino
        self.info, self.checked_rows = read_segment(root, number), 0
        self.observed, self.committed = map_trusted(self.info)

    def read(self, before: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows that are committed and those whose observation is there; ``before`` were committed before."""
        # `observed` first: one past a `committed` that was read after it means the observation after those very rows.
        observed = self.observed.copy()
        committed = self.committed.copy()
        lanes = len(committed)
        if (
            (committed < before).any()
            or (observed > committed + 1).any()
            or int(committed.max()) > layout.POSITION_MASK // lanes
        ):
            raise FormatError(f"{self.info.path}: committed or observed is damaged; restore the segment")
        return committed, np.maximum(observed, committed)

    def may_be_sealed(self) -> bool:
        """Whether the attributes were replaced (or are gone)."""
        return identify(self.metadata) != self.info.document


class LiveLanes:
    """The lanes of segments that may still grow, and how they are followed. Used by one thread.

    ``kernel`` is `kernels.follow` or its plain twin; it writes the lines of episodes that end behind ``log``.
    ``origin`` is the number of the first slot's segment. ``segments`` are by slot; after a change, `list_segments` is
    called. ``growing``, ``(n, 8)`` int64, is the table of them, see `kernels.following`. ``open_steps`` are the steps
    of the open episodes of all lanes. ``leaves`` are the arrays that are read: flags, and times where they are of use.
    """

    def __init__(self, kernel: Kernel, log: EpisodeLog, origin: int, leaves: Sequence[str]) -> None:
        self.segments: dict[int, LiveSegment] = {}
        self.kernel, self._log, self._origin = kernel, log, origin
        self.open_steps = 0
        self._numbers = np.zeros(rows.FOUND, np.int64)
        self._found = self._numbers.data  # the same as Python's own numbers
        self._leaves = leaves

    def list_segments(self, lanes: Ints, lane_base: Ints, clocks: Ints, tables: ChunkTables) -> None:
        """Make the table of segments.

        ``lanes``, ``(5, n)`` int64, is what is known of all lanes, see `kernels.following`; ``lane_base``, ``(slots,)``
        int64, where the lanes of each segment are among those of all; ``clocks``, ``(slots,)`` int64, what is added to
        the times of each; ``tables`` is where their rows are.
        """
        self._lanes, self._tables = lanes, tables
        self.growing = np.zeros((len(self.segments), rows.GROWING_COLUMNS), np.int64)
        for line, slot in zip(self.growing, sorted(self.segments), strict=True):
            live = self.segments[slot]
            line[rows.SLOT], line[rows.LANES], line[rows.PLACE] = slot, len(live.info.lanes), lane_base[slot]
            line[rows.OBSERVED_AT], line[rows.COMMITTED_AT] = live.observed.ctypes.data, live.committed.ctypes.data
            line[rows.CHECKED], line[rows.CLOCK] = live.checked_rows, clocks[slot]
            line[rows.FOLDER] = tables.folders[slot]
        self._held: Callable[[], Held | None] = unseen  # what it was when the tables were read

    def set_checked(self, slot: int, checked: int) -> None:
        """Note up to which row all chunks of a segment were found whole."""
        self.segments[slot].checked_rows = checked
        self.growing[self.growing[:, rows.SLOT] == slot, rows.CHECKED] = checked

    def follow(
        self, changed: bool, add_ended: Callable[[int, int], None], prepare: Callable[[int, bool], None]
    ) -> bool:
        """Follow what lanes have published; return whether that, or anything else, has changed.

        ``changed``: something else has. ``add_ended`` is given where the lines of ended episodes end, and how many
        steps all of the log have then. ``prepare`` is given the slot of a segment whose rows cannot be followed yet,
        and whether it seems damaged.
        """
        found = self._found
        found[rows.CHANGED] = changed
        while True:
            held = self._tables.held  # see `ChunkTables.addresses`
            if held is not self._held() or self._log.table is not self._table:
                held = self._prepare()
            status = self.kernel(*self._arguments)
            if found[rows.ENDED] > self._size:
                add_ended(found[rows.ENDED], found[rows.ENDED_STEPS])
                self._note_log_end()
            if status == rows.DONE:
                break
            if status == rows.FULL:
                self._held = unseen  # for more room behind the log
            slot = int(self.growing[found[rows.LEFT], rows.SLOT])
            prepare(slot, status == rows.DAMAGED)
            found[rows.CHANGED] = True
        if not found[rows.CHANGED]:
            return False
        self.open_steps = found[rows.OPEN_STEPS]
        return True

    def _prepare(self) -> Held:
        """Collect the arguments of the kernel, which stay the same until one of these is replaced.

        Returns what keeps the chunks mapped whose addresses these have now.
        """
        ended = self._log.reserve(2 * MANY_ROWS)
        held, (flags, *times) = self._tables.addresses(self._leaves)
        every = *flags, *(times[0] if times else _NO_TIMES)
        self._arguments = (self.growing, *every, self._origin, self._lanes, ended, self._numbers)
        self._note_log_end()
        self._found[rows.OPEN_STEPS] = self._count_open()
        self._held = weakref.ref(held)
        return held

    def _count_open(self) -> int:
        """Count the steps of open episodes: what else changed them has changed the log, or listed the segments."""
        place = frozen.places_of(self.growing[:, rows.PLACE], self.growing[:, rows.LANES])
        start = self._lanes[rows.OPEN_START, place]
        return int((self._lanes[rows.COMMITTED, place] - start)[start >= 0].sum())

    def _note_log_end(self) -> None:
        """Note where the log ends: what ends next is written behind it, while there is room in the same array."""
        self._table, self._size = self._log.table, len(self._log)
        self._found[rows.ENDED], self._found[rows.ENDED_STEPS] = self._size, self._log.steps
