"""Segments that may still grow: their counters, and what of their lanes was followed."""

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.format import layout
from diskreplay.format.root import Root
from diskreplay.format.segment import read_segment
from diskreplay.format.trust import map_trusted
from diskreplay.ids import EPISODE_COLUMNS, EpisodeTable
from diskreplay.kernels import following as rows
from diskreplay.kernels.table import Kernel
from diskreplay.store.tables import LeafTable

# New rows of a lane from which on they are read as those of a sealed segment are.
MANY_ROWS = 4096

_NONE = np.zeros(0, np.int64)


class LiveSegment:
    """The counters of a segment that may still grow. Used by one thread.

    ``folder`` is the inode of its folder: another one means that repair has replaced the segment.
    """

    def __init__(self, root: Root, number: int) -> None:
        self.metadata = str(root.segment_path(number) / layout.METADATA)
        self.folder = os.stat(root.segment_path(number)).st_ino
        # Before the document is read: one that replaces it meanwhile is then seen as news.
        self.inode = os.stat(self.metadata).st_ino
        self.info, self.checked_rows = read_segment(root, number), 0
        self.observed, self.committed = map_trusted(root, self.info)

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
        try:
            inode = os.stat(self.metadata).st_ino
        except FileNotFoundError:
            return True
        changed, self.inode = inode != self.inode, inode
        return changed


class LiveLanes:
    """The lanes of segments that may still grow, and how they are followed. Used by one thread.

    Attributes
    ----------
    segments : dict of int to LiveSegment
        By slot; `list` is called when it has changed.
    kernel, has_news : callable
        `kernels.follow` and `kernels.news.has_news`, or their plain twins.
    growing : (8, n) int64
        The lanes; see `kernels.following`.
    open : EpisodeTable
        The open episodes of all lanes.
    open_steps : int
        Their steps.
    """

    def __init__(self, kernel: Kernel, has_news: Kernel) -> None:
        self.segments: dict[int, LiveSegment] = {}
        self.kernel, self.has_news = kernel, has_news
        self.open = EpisodeTable.concatenate([])
        self.open_steps = 0
        self._found = np.zeros(rows.FOUND, np.int64)
        self.growing = np.zeros((rows.GROWING_ROWS, 0), np.int64)

    def list(self, lane_base: NDArray[np.int64], clocks: NDArray[np.int64]) -> None:
        """Make the table of lanes.

        Parameters
        ----------
        lane_base : (slots,) int64
            Where the lanes of each segment are among those of all.
        clocks : (slots,) int64
            What is added to the times of each segment.
        """
        columns = [np.zeros((rows.GROWING_ROWS, 0), np.int64)]
        for slot in sorted(self.segments):
            live = self.segments[slot]
            lanes = len(live.info.lanes)
            column = np.empty((rows.GROWING_ROWS, lanes), np.int64)
            lane = column[rows.LANE] = np.arange(lanes)
            column[rows.PLACE] = lane_base[slot] + lane
            column[rows.SLOT], column[rows.LANES], column[rows.CHECKED] = slot, lanes, live.checked_rows
            column[rows.CLOCK] = clocks[slot]
            column[rows.OBSERVED_AT] = live.observed.ctypes.data + 8 * lane
            column[rows.COMMITTED_AT] = live.committed.ctypes.data + 8 * lane
            columns.append(column)
        self.growing = np.concatenate(columns, axis=1)

    def set_checked(self, slot: int, checked: int) -> None:
        """Note up to which row all chunks of a segment were found whole."""
        self.segments[slot].checked_rows = checked
        self.growing[rows.CHECKED, self.growing[rows.SLOT] == slot] = checked

    def follow(
        self,
        tables: Callable[[], tuple[LeafTable, LeafTable | None]],
        origin: int,
        lanes: NDArray[np.int64],
        changed: bool,
        room: Callable[[int], NDArray[np.int64]],
        take: Callable[[int], None],
        attend: Callable[[int, bool], bool],
    ) -> bool:
        """Take in what lanes have published; tell whether that, or what came before, was anything.

        Parameters
        ----------
        tables : callable
            Returns the tables of flags and of times; None: times are of no use.
        origin : int
            The number of the first slot's segment.
        lanes : (5, n) int64
            What is known of all lanes; see `kernels.following`.
        changed : bool
            Whether something else has changed.
        room : callable
            Returns so many lines at least for episodes that end.
        take : callable
            Is told how many of these are filled.
        attend : callable
            Is given the slot of a segment whose rows cannot be followed yet, and whether it seems damaged; returns
            whether something has changed by that.
        """
        if not changed and not self.has_news(self.growing, lanes):
            return False
        found = self._found
        found[:] = 0
        found[rows.CHANGED] = changed
        while True:
            growing, (flags, times), ended = self.growing, tables(), room(2 * MANY_ROWS)
            found[rows.LEFT] = growing.shape[1] - 1
            opened = np.empty((growing.shape[1], EPISODE_COLUMNS), np.int64)
            _held, chunks, first_chunk, bases = flags.addresses()
            table = first_chunk, chunks, flags.shift, bases
            _held_too, table_of_times = None, (_NONE,) * 4
            if times is not None:
                _held_too, chunks, first_chunk, bases = times.addresses()
                table_of_times = first_chunk, chunks, times.shift, bases
            status = self.kernel(growing, *table, *table_of_times, origin, lanes, ended, opened, found)
            if count := int(found[rows.ENDED]):
                take(count)
                found[rows.ENDED] = 0
            if status == rows.DONE:
                break
            found[rows.CHANGED] |= attend(int(growing[rows.SLOT, found[rows.LEFT]]), status == rows.DAMAGED)
        if not found[rows.CHANGED]:
            return False
        self.open, self.open_steps = EpisodeTable(opened[: found[rows.OPENED]]), int(found[rows.OPEN_STEPS])
        return True
