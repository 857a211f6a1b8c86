"""A gather plan lists which rows of which leaves a batch needs. One kernel executes the plans of all views."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, SegmentGone
from diskreplay.ids import CUT, FIRST, NO_STEP, POSITION_BITS, TERMINATED, TRUNCATED, Ints
from diskreplay.kernels import gathering as cols
from diskreplay.kernels.table import Kernel, get_kernel
from diskreplay.reading import chunk_budget
from diskreplay.reading.chunk_table import MappingGuard, TableLine, no_reference
from diskreplay.reading.snapshot import LaneMap, Snapshot
from diskreplay.views.base import NO_PAGES, Block, CopyThreads, Leaf, Pages, copying
from diskreplay.views.windows import (
    ATTEMPTS,
    TIME_SOURCE,
    Bounds,
    Copy,
    Windows,
    map_flags,
    map_rows,
    missing_chunk,
    refuse,
    wide_pages,
)

LONGEST = 1 << 40
"""A number that is greater than the number of steps of any window."""

_NO_IDS = np.zeros(0, np.int64)
_CONTIGUOUS = _NO_IDS.strides


class EarlierParts:
    """Completes frame stacks at the start of an episode that continues an episode cut for its length.

    The cut episode is called an earlier part. It may be in an earlier segment, and the kernel reads only one segment
    for each window. In place of frames of an earlier segment, the kernel repeats the lane's first frame in the window's
    segment. `copies` are the `Copy` objects that read observations of rows before a window. Not thread-safe.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._depth = -min(copy.offset for copy in copies)
        self._lanes = LaneMap()

    def fill(self, snapshot: Snapshot, windows: Windows, block: Block) -> None:
        """Replace repeated frames in the stacks of a block by frames of earlier parts that the store still has."""
        # Only an episode that begins in row 0 of a lane can continue an episode of an earlier segment.
        for item in np.flatnonzero((windows.floor == 0) & (windows.row < self._depth)).tolist():
            slot, lane, row = windows.table[:3, item].tolist()
            try:
                places = self._rows_before(snapshot, slot, lane, self._depth - row)
                if places.shape[1]:
                    self._copy(snapshot, places, windows.table[:, item], item, block)
            except SegmentGone:  # the earlier segment was deleted after the snapshot was taken
                continue

    def _copy(self, snapshot: Snapshot, places: Ints, window: Ints, item: int, block: Block) -> None:
        for copy in self._copies:
            missing = -int(window[copy.begin] + copy.offset)
            table, stacks = snapshot.leaf(copy.leaf), block.arrays[copy.target][item]
            if missing > 0 and window[copy.stop] and stacks.size:
                frames = stacks.reshape(-1, *table.shape)
                back = np.arange(missing, max(missing - len(frames), 0), -1)
                frames[: len(back)] = table.values(*places[:, np.minimum(back, places.shape[1]) - 1])

    def _rows_before(self, snapshot: Snapshot, slot: int, lane: int, count: int) -> Ints:
        """Return slots, lanes and rows, (3, n), of up to `count` steps before the first row of a lane, newest first.

        If the lane's first row continues an episode that was cut in an earlier segment, these are the steps of the
        episode's earlier parts. Otherwise, n is 0.
        """
        found = [np.zeros((3, 0), np.int64)]
        done = snapshot.leaf("done")
        while count > 0 and done.rows(slot, lane, 0, 1)[0] & (FIRST | CUT) == FIRST | CUT:
            place = self._place_before(snapshot, slot, lane)
            if place < 0:
                break
            slot = int(self._lanes.slot[place])
            lane, stop = place - int(snapshot.lane_base[slot]), int(snapshot.committed[place])
            first = max(stop - 1 - count, 0)
            flags = done.rows(slot, lane, first, stop)
            # If the writer received the observation after the last step, a row without a step holds it.
            is_cut = flags[-1] & (CUT if flags[-1] & NO_STEP else TERMINATED | TRUNCATED) in (CUT, 0)
            last = stop - 1 - int(flags[-1] & NO_STEP != 0)
            last_id = (slot + snapshot.origin) << POSITION_BITS | last * int(snapshot.lanes[slot]) + lane
            if not is_cut or snapshot.evicted(np.array([last_id]))[0]:
                break
            first += int(np.flatnonzero(flags[: last + 1 - first] & FIRST).max(initial=0))
            rows = np.arange(last, first - 1, -1)
            found.append(np.stack([np.full_like(rows, slot), np.full_like(rows, lane), rows]))
            count -= len(rows)
            if first > 0:
                break
        return np.concatenate(found, axis=1)

    def _place_before(self, snapshot: Snapshot, slot: int, lane: int) -> int:
        """Return the lane's place (see `LaneMap`) in the previous segment that has rows of the lane, or -1.

        The result is also -1 if a segment between that segment and `slot` is gone: the gone segment may have had rows
        of the lane.
        """
        self._lanes.update(snapshot)
        place = int(self._lanes.previous[snapshot.lane_base[slot] + lane])
        while place >= 0 and not snapshot.committed[place]:
            place = int(self._lanes.previous[place])
        if place < 0:
            return -1
        first = int(self._lanes.slot[place])
        missing = first + np.flatnonzero(snapshot.lanes[first:slot] == 0)
        # A pack has a segment's number and no lanes, but is not a missing segment.
        packs = [pack.info.number - snapshot.origin for pack in list(snapshot.tables.packs.values())]
        return place if np.isin(missing, packs).all() else -1


class GatherPlan:
    """Gathers the leaves of a batch, and sums rewards over windows, in one kernel call. Not thread-safe.

    If the array for `TIME_SOURCE` has the dtype float64, its values become seconds since the epoch. `_record` has the
    numbers and addresses that the kernel reads (see `kernels.gathering`). It is made once and changed in place. The
    plan keeps the arrays at these addresses alive. Each change of `_record` ends with the assignment of an attribute:
    if an interrupt prevents this assignment, the next call makes the change again.

    Error messages name `view`. `bounds` has the arguments with which `gather` finds windows; None for a plan that only
    copies rows of given windows. `summands` are path, dtype and weight of the scalar fields whose weighted sum is the
    reward. Rewards are summed over each window. Each step multiplies all later rewards by `gamma` and by the step's
    value of the scalar field `discount`, if given. `computed` maps names in `gathering.COMPUTED` to positions in
    `Block.arrays`. A field that the batch lacks has the position -1, or no entry in `computed`.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        view: Any = None,
        bounds: Bounds | None = None,
        summands: Sequence[tuple[str, np.dtype[Any], Any]] = (),
        gamma: float = 1.0,
        discount: tuple[str, np.dtype[Any]] | None = None,
        computed: Mapping[str, int] | None = None,
    ) -> None:
        self._view, self._bounds, self._given = view, bounds, copies
        read = [*summands, (*discount, gamma)] if discount and summands else summands
        self._copies = [*copies, *(Copy(leaf, cols.ROW, cols.AFTER, 0, LONGEST, -1) for leaf, _, _ in read)]
        self._leaves = list(dict.fromkeys([*(["done"] if bounds else []), *(copy.leaf for copy in self._copies)]))
        self._record = np.zeros(cols.HEAD + len(self._copies) * cols.COLUMNS, np.int64)
        lines = self._record[cols.HEAD :].reshape(-1, cols.COLUMNS)
        for line, copy in zip(lines, self._copies, strict=True):
            line[cols.BEGIN : cols.TARGET + 1] = copy[1:]
        for line, (_, dtype, weight) in zip(lines[len(copies) :], read, strict=True):
            line[[cols.KIND, cols.FACTOR]] = cols.kind_and_factor(dtype, weight)
        self._record[[cols.FINDS, cols.N, cols.STACK, cols.WHOLE]] = bounds is not None, *(bounds or Bounds(0))
        counts = len(lines), len(copies), len(copies) + len(summands)
        self._record[[cols.LINES, cols.COPIED, cols.SUMMED]] = counts
        self._record[cols.GAMMA] = np.float64(gamma).view(np.int64)
        wanted = computed or {}
        self._record[cols.REWARD : cols.WEIGHT + 1] = [wanted.get(name, -1) for name in cols.COMPUTED]
        self._time = next((copy.target for copy in copies if copy.leaf == TIME_SOURCE), -1)
        deep = [copy for copy in copies if copy.offset < 0 and copy.leaf.split("/")[0] == "obs"]
        self._earlier = EarlierParts(deep) if deep else None
        self.windows = Windows(0)
        self._size = self._nbytes = -1  # the size of the last block, in items and in bytes
        self._kernel: Kernel
        self._scratch: Block | None = None
        self._lengths: Sequence[int] | None = None
        self._sources = np.zeros(0, np.int64)
        self._seen: list[TableLine] = []
        # A weak reference to the guard that keeps the chunks of `_seen` mapped.
        self._held: Callable[[], MappingGuard | None] = no_reference

    def gather(self, snapshot: Snapshot, ids: Ints, block: Block, threads: CopyThreads | None = None) -> None:
        """Find the windows of these ids, and write the windows' rows and sums of rewards to the arrays of a block.

        Raises InvalidIndex if an id has no window, and FormatError if a chunk is missing.
        """
        if ids.strides != _CONTIGUOUS:  # the kernel would read other ids, without an error
            ids = np.ascontiguousarray(ids, np.int64).reshape(len(ids))
        if block.size != self._size or block.nbytes != self._nbytes:
            self._resize(block)
        # The addresses in `_record` stay valid while the chunk tables have the same guard.
        held: MappingGuard | None = snapshot.segments.tables.held
        if held is not self._held():
            held = self._bind_tables(snapshot)
        # Nearly always all rows are mapped, so they are not checked before the call. If a row is not mapped, the kernel
        # returns the number of the item that it could not copy.
        for attempt in range(ATTEMPTS):
            if threads is None or block.nbytes < threads.least:
                bad = self._kernel(ids, block.addresses, snapshot.record, self._record, 0, self.windows.size)
            else:
                arguments = ids, block.addresses, snapshot.record, self._record
                work = copying((self, snapshot, held, *block.arrays), self._kernel, *arguments)
                bad = threads.copy(threads.parts(block.nbytes), self.windows.size, work)
            if bad < 0:
                if self._earlier is not None:
                    self._earlier.fill(snapshot, self.windows, block)
                if self._time >= 0 and block.arrays[self._time].dtype.kind == "f":
                    self._to_seconds(snapshot, block.arrays[self._time])
                return
            # The first retry releases the chunks that `held` keeps mapped, and then maps chunks. Later retries release
            # these chunks only after they have mapped chunks, to avoid thrashing.
            if attempt == 0:
                held = None
            held = self._map(snapshot, ids)
        raise self._missing(snapshot, bad)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Map the wide rows of these ids into memory, and return their memory pages; see `wide_pages`. Thread-safe.

        Only rows inside the windows are mapped, even if a `Copy` has more rows than a window.
        """
        windows = Windows(len(ids))
        if self._bounds is None or windows.find(snapshot, ids, *self._bounds) >= 0:
            return NO_PAGES  # `gather` raises an error for these ids
        return wide_pages(snapshot, windows, self._reached(self._given))

    def _reached(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        """Return `Copy` objects with all rows that `copies` may read; a plan that shortens windows overrides this."""
        return copies

    def _to_seconds(self, snapshot: Snapshot, times: NDArray[np.float64]) -> None:
        """Convert values of `TIME_SOURCE`, (n,) or (n, length), in place to seconds since the epoch; padding is 0."""
        raw = times.view(np.int64)
        wall = snapshot.clocks[self.windows.slot].reshape(-1, *[1] * (times.ndim - 1))
        times[...] = np.where(raw == 0, 0.0, (raw + wall) / 1e9)

    def copy(self, snapshot: Snapshot, windows: Windows, block: Block, threads: CopyThreads | None = None) -> None:
        """Copy the rows of given windows into the first items of a block; raises the same errors as `gather`."""
        self._use(windows)
        self.gather(snapshot, _NO_IDS, block, threads)

    def rows(self, snapshot: Snapshot, windows: Windows) -> list[NDArray[Any]]:
        """Return an array for each `Copy` of the plan, with the rows of given windows: (items, length, *shape).

        The arrays are valid until the next call.
        """
        if self._scratch is None or self._scratch.size < windows.size:
            tables = [snapshot.leaf(copy.leaf) for copy in self._copies]
            pairs = zip(self._copies, tables, strict=True)
            leaves = [Leaf((copy.leaf,), table.dtype, (copy.length, *table.shape)) for copy, table in pairs]
            self._scratch = Block(leaves, windows.size)
        self.copy(snapshot, windows, self._scratch)
        return [array[: windows.size] for array in self._scratch.arrays]

    def set_lengths(self, lengths: int | Sequence[int]) -> None:
        """Set the number of rows to copy for each window: one number, or one number for each `Copy` of the plan.

        The plan must not have summands.
        """
        every = [lengths] * len(self._copies) if isinstance(lengths, int) else lengths
        if every != self._lengths:
            self._lengths = self._scratch = None
            self._copies = [copy._replace(length=length) for copy, length in zip(self._copies, every, strict=True)]
            self._record[cols.HEAD + cols.LENGTH :: cols.COLUMNS] = every
            self._lengths = every

    def _resize(self, block: Block) -> None:
        before, self._size = self._size, -1
        if self._bounds is not None and block.size != before:
            self._use(Windows(block.size))
        self._record[cols.STREAMED] = block.nbytes >= cols.LARGE_BATCH
        self._size, self._nbytes = block.size, block.nbytes

    def _use(self, windows: Windows) -> None:
        if len(self._sources) < len(self._copies) * windows.size:
            self._record[cols.SOURCES] = 0
            self._sources = np.empty(len(self._copies) * windows.size, np.int64)
        if not self._record[cols.SOURCES]:
            self._record[cols.SOURCES] = self._sources.ctypes.data
        self._record[cols.WINDOWS], self._record[cols.ITEMS] = windows.memory.ctypes.data, windows.size
        self._kernel, self.windows = get_kernel("gather"), windows

    def _bind_tables(self, snapshot: Snapshot) -> MappingGuard:
        """Write the addresses of a snapshot's chunk tables to `_record`; return the guard that keeps chunks mapped."""
        places = {leaf: [cols.FLAGS] if leaf == "done" else [] for leaf in self._leaves}
        for number, copy in enumerate(self._copies):
            places[copy.leaf].append(cols.HEAD + number * cols.COLUMNS)
        self._held = no_reference  # so that the next `gather` repeats this call if an interrupt ends it
        held, self._seen = snapshot.tables.lines(self._leaves)
        for leaf, (line, _) in zip(self._leaves, self._seen, strict=True):
            for place in places[leaf]:
                self._record[place : place + len(line)] = line
        self._held = weakref.ref(held)
        return held

    def _map(self, snapshot: Snapshot, ids: Ints) -> MappingGuard:
        """Map all rows that the windows of these ids need; return the guard that keeps these rows mapped."""
        with snapshot.tables.lock:  # other threads cannot unmap chunks to make room while the lock is held
            since = chunk_budget.now()
            if self._bounds is not None:
                n, stack, _ = self._bounds
                # This call also counts as a use of flags that are already mapped, so that `map_rows` does not unmap
                # them.
                map_flags(snapshot, ids, n, stack)
                bad = self.windows.find(snapshot, ids, *self._bounds)
                if bad >= 0:
                    raise refuse(snapshot, int(ids[bad]), self._view)
            map_rows(snapshot, self.windows, self._reached(self._copies), since)
            return self._bind_tables(snapshot)

    def _missing(self, snapshot: Snapshot, bad: int) -> FormatError:
        failed = int(self._record[cols.FAILED])
        copy = self._copies[failed] if failed >= 0 else Copy("done", cols.ROW, cols.AFTER, 0, 1, -1)
        row = self.windows.table[copy.begin, bad]
        return missing_chunk(snapshot, copy.leaf, self.windows.slot[bad], self.windows.lane[bad], row)


def row_plan(leaves: Sequence[str], begin: int = cols.ROW, stop: int = cols.AFTER) -> GatherPlan:
    """Return a plan that copies one row of each leaf for each given window; for `begin` and `stop` see `Copy`."""
    return GatherPlan([Copy(leaf, begin, stop, 0, 1, target) for target, leaf in enumerate(leaves)])


class RandomSteps(GatherPlan):
    """A gather plan that draws each window's number of steps from `least` to `bounds.n`, with equal probabilities.

    The plan finds every window with `bounds.n` steps and then shortens it to the drawn number. A call of `gather` draws
    only if `seed` was called since the previous call of `gather`. Otherwise every window has `bounds.n` steps.
    """

    def __init__(
        self,
        least: int,
        copies: Sequence[Copy],
        view: Any,
        bounds: Bounds,
        summands: Sequence[tuple[str, np.dtype[Any], Any]],
        gamma: float,
        discount: tuple[str, np.dtype[Any]] | None,
        computed: Mapping[str, int],
    ) -> None:
        super().__init__(copies, view, bounds, summands, gamma, discount, computed)
        self._least, self._most = least, bounds.n
        self._entropy: int | None = None
        self._limits = np.zeros(0, np.int64)

    def seed(self, entropy: int | None) -> None:
        self._entropy = entropy

    def gather(self, snapshot: Snapshot, ids: Ints, block: Block, threads: CopyThreads | None = None) -> None:
        entropy, self._entropy = self._entropy, None
        self._record[cols.LIMITS] = 0
        if entropy is not None:
            generator = np.random.Generator(np.random.PCG64(entropy))
            limits = generator.integers(self._least, self._most, len(ids), endpoint=True)
            self._record[cols.LIMITS], self._limits = limits.ctypes.data, limits
        super().gather(snapshot, ids, block, threads)

    def _reached(self, copies: Sequence[Copy]) -> list[Copy]:
        """Return `Copy` objects with all rows that `copies` may read, for every number of steps that may be drawn."""
        found = []
        for copy in copies:
            if copy.begin == cols.AFTER:
                length = copy.length + self._most - 1
                copy = Copy(copy.leaf, cols.ROW, cols.FRAMES_STOP, copy.offset + 1, length, copy.target)
            found.append(copy)
        return found
