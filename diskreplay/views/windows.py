"""Windows of steps: functions that find the windows of a batch's ids, and memory-map the rows that will be copied."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diskreplay.errors import FormatError, InvalidIndex
from diskreplay.ids import POSITION_BITS, Ints, locate
from diskreplay.kernels import gathering as cols
from diskreplay.kernels.huge_pages import whole_pages
from diskreplay.kernels.table import get_kernel
from diskreplay.reading import chunk_budget
from diskreplay.reading.chunk_budget import DECOMPRESSED
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema
from diskreplay.views.arguments import frame_stack_depths
from diskreplay.views.base import NO_PAGES, Leaf, Pages, Path

# The number of attempts to map chunks into memory and use them. Another thread may unmap the chunks before they are
# used: to make room for its own chunks, or because the system refuses more mappings.
ATTEMPTS = 8


# `TIME` is the field on request with each step's time of publication, computed from the store's leaf `TIME_SOURCE`.
TIME, TIME_SOURCE = Leaf(("time",), np.dtype("float64")), "time"


TO_THE_END = -1
"""A number of steps that means all steps to the end of the episode."""


class Bounds(NamedTuple):
    """Arguments of `find_windows`: windows have `n` steps (or TO_THE_END), and stacks have `stack` frames.

    In an open episode, an observation must follow each window. With `whole`, a step must follow.
    """

    n: int
    stack: int = 1
    whole: bool = False


class Copy(NamedTuple):
    """Tells which rows of a leaf to copy for each window: `length` successive rows of the window's lane.

    `begin` and `stop` are indices of lines of `Windows.table`, such as `gathering.ROW`. A line has a row number for
    each window. The first copied row is `offset` rows after the row in the line `begin`. The row in the line `stop` and
    all later rows are copied as zeros. `target` is the position in `Block.arrays` of the array that receives the rows.
    """

    leaf: str
    begin: int
    stop: int
    offset: int
    length: int
    target: int


class StepField(NamedTuple):
    """A field of a batch with `stack` frames for each step; `source` is the field's leaf in the store."""

    path: Path
    source: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stack: int

    @property
    def leaf(self) -> Leaf:
        """The leaf of the batch: a step's value has the shape (stack, *shape), or only `shape` if `stack` is 1."""
        return Leaf(self.path, self.dtype, (self.stack, *self.shape) if self.stack > 1 else self.shape)

    def copy(self, target: int) -> Copy:
        return Copy(self.source, cols.ROW, cols.AFTER, 1 - self.stack, self.stack, target)


def step_fields(schema: Schema, frame_stack: int | Mapping[str, int] = 1) -> dict[str, list[StepField]]:
    """Return, by name, the fields of a batch that have a value for each step; a field is a list of its leaves."""
    paths: dict[str, dict[Path, str]] = {}
    for source in schema.leaves:
        part = tuple(source.split("/"))
        if part[0] != "episode":
            # A batch has extra fields at its root: "value", not "extra/value".
            path = part[1:] if part[0] == "extra" else part
            paths.setdefault(path[0], {})[path] = source
    depths = frame_stack_depths(frame_stack, paths["obs"])
    return {
        name: [
            StepField(path, source, schema.leaves[source].dtype, schema.leaves[source].shape, depths.get(path, 1))
            for path, source in below.items()
        ]
        for name, below in paths.items()
    }


class Windows:
    """The windows of `size` ids, as int64 arrays (size,); `kernels.gathering` explains each array."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = np.empty((cols.WINDOW_ROWS + 1, size), np.int64)
        self.table = self.memory[: cols.WINDOW_ROWS]
        self.ends, self.behind = self.memory[cols.WINDOW_ROWS].view(np.uint8)[: 2 * size].reshape(2, size)
        (
            self.slot, self.lane, self.row, self.floor, self.after, self.obs_stop, self.step_stop, self.k,
            self.frames_stop, self.own, self.own_stop,
        ) = self.table[: cols.FOLDER]  # fmt: skip

    def find(self, snapshot: Snapshot, ids: Ints, n: int, stack: int, whole: bool) -> int:
        """Find the window of each id; return the position in `ids` of the first id without a window, or -1."""
        find = get_kernel("find_windows")
        for _ in range(1 + ATTEMPTS):
            _held, ((done, _arrays),) = snapshot.tables.lines(["done"])
            where = snapshot.record, done.ctypes.data
            bad: int = find(ids, n, stack, whole, *where, self.table, self.ends, self.behind)
            if bad < 0 or not map_flags(snapshot, ids, n or 1, stack):
                break
        return bad

    def find_steps(self, snapshot: Snapshot, ids: Ints) -> int:
        """Find the one-row window of each id; return the position in `ids` of the first id that is no step's id, or -1.

        Sets `ends` to the flags of the row, and `own_stop` to the number of rows of the lane. Sets `behind` to the
        flags of the next row, or to 0 if the lane has no next row.
        """
        return self.find(snapshot, ids, 0, 1, False)

    def select(self, which: Ints) -> "Windows":
        kept = Windows(len(which))
        kept.table[:] = self.table.take(which, axis=1)  # an index of arrays would take several times as long
        kept.ends[:], kept.behind[:] = self.ends[which], self.behind[which]
        return kept

    def rows(self, copy: Copy) -> tuple[Ints, Ints, Ints, Ints]:
        """Return, for each window, its slot, its lane, and the first and the last row that `copy` reads.

        A slot is the index of a segment in the snapshot. Windows from which no row is read are left out.
        """
        begin, stop = self.table[copy.begin] + copy.offset, self.table[copy.stop]
        first = np.maximum(begin, self.floor)
        last = np.minimum(np.maximum(first, begin + copy.length - 1), stop - 1)
        real = last >= first
        return self.slot[real], self.lane[real], first[real], last[real]


def map_flags(snapshot: Snapshot, ids: Ints, n: int, stack: int) -> bool:
    """Map the flags of all rows that the windows of these ids may reach; return False if the snapshot lacks an id."""
    known, slot, _, lane, row = locate(ids, snapshot.origin, snapshot.lanes)
    if not known.all():
        return False
    last = snapshot.committed_rows(slot, lane) - 1
    if (row > last).any():
        return False
    until = last if n < 0 else np.minimum(row + n, last)
    snapshot.leaf("done").ensure(slot, lane, np.maximum(row - stack + 1, 0), until)
    return True


def map_rows(snapshot: Snapshot, windows: Windows, copies: Sequence[Copy], since: int) -> None:
    """Map all rows that the `Copy` objects in `copies` read for these windows.

    Chunks that were used at `since` (see `chunk_budget.now`) or later are not unmapped to make room.
    """
    reached: dict[str, list[tuple[Ints, ...]]] = {}
    found: dict[tuple[int, ...], tuple[Ints, ...]] = {}  # {where: rows}: most copies read the same rows
    for copy in copies:
        where = copy[1:-1]
        if where not in found:
            found[where] = windows.rows(copy)
        reached.setdefault(copy.leaf, []).append(found[where])
    for leaf, each in reached.items():
        slot, lane, first, last = map(np.concatenate, zip(*each, strict=True))
        snapshot.leaf(leaf).ensure(slot, lane, first, last, since)


def windows_of(snapshot: Snapshot, ids: Ints, bounds: Bounds, view: Any) -> Windows:
    windows = Windows(len(ids))
    bad = windows.find(snapshot, ids, *bounds)
    if bad >= 0:
        raise refuse(snapshot, int(ids[bad]), view)
    return windows


def missing_chunk(snapshot: Snapshot, leaf: str, slot: int, lane: int, row: int) -> FormatError:
    return FormatError(
        f"segment {slot + snapshot.origin} has no chunk of {leaf} for row {row} of lane {lane}; "
        "run `diskreplay verify` on the store"
    )


def refuse_evicted(snapshot: Snapshot, ids: Ints) -> None:
    evicted = snapshot.evicted(ids)
    if evicted.any():
        raise InvalidIndex(f"id {ids[np.argmax(evicted)]} is not in the store: its episode was evicted or discarded")


def refuse(snapshot: Snapshot, step_id: int, view: Any) -> InvalidIndex:
    if step_id < 0 or (step_id >> POSITION_BITS) - snapshot.origin >= len(snapshot.lanes):
        return InvalidIndex(f"id {step_id} never existed")
    known, slot, _, lane, row = (column[0] for column in locate(np.array([step_id]), snapshot.origin, snapshot.lanes))
    if not known or snapshot.evicted(np.array([step_id]))[0]:
        return InvalidIndex(f"id {step_id} is not in the store: it was evicted, or never existed")
    if row < snapshot.oldest[snapshot.lane_base[slot] + lane]:
        return InvalidIndex(
            f"id {step_id} is hidden by the capacity or the max_age_s of the store: batches do not show it; read it "
            "from its episode in store.episodes"
        )
    if row >= snapshot.committed[snapshot.lane_base[slot] + lane]:
        return InvalidIndex(f"id {step_id} never existed, or is newer than this snapshot; call refresh() first")
    return InvalidIndex(
        f"id {step_id} cannot be sampled as {view}: its window is not complete yet, the episode ended without a final "
        "observation at this step, or the id is not a step's"
    )


def wide_pages(snapshot: Snapshot, windows: Windows, copies: Sequence[Copy]) -> Pages:
    """Map into memory the rows of wide leaves that `copies` read, and return the memory pages of these rows.

    A leaf is wide if its rows have at least `WIDE_ROW` bytes. Narrow leaves are left out: the system reads ahead around
    each page fault, so that all pages of such a leaf are soon in memory. Decompressed chunks are always in memory, and
    are left out, too.
    """
    wide = [copy for copy in copies if snapshot.leaf(copy.leaf).wide]
    if not wide:
        return NO_PAGES
    with snapshot.tables.lock:  # other threads cannot unmap chunks to make room while the lock is held
        map_rows(snapshot, windows, wide, chunk_budget.now())
        return merged_pages([_ranges(snapshot, copy.leaf, *windows.rows(copy)) for copy in wide])


def merged_pages(found: Sequence[Pages]) -> Pages:
    """Return the memory pages that contain these ranges of bytes, each page once."""
    if not found:
        return NO_PAGES
    starts, sizes = (np.concatenate(arrays) for arrays in ([p.starts for p in found], [p.sizes for p in found]))
    return Pages(*whole_pages(starts, sizes), tuple(held for pages in found for held in pages.held))


def _ranges(snapshot: Snapshot, leaf: str, slot: Ints, lane: Ints, first: Ints, last: Ints) -> Pages:
    """Return, for each window, the ranges of memory that hold rows `first` to `last` of a leaf.

    Rows in several chunks have a range in each chunk. The caller holds `snapshot.tables.lock`.
    """
    table = snapshot.leaf(leaf)
    # The result refers only to `holder`, and `holder` keeps only chunks of this leaf mapped. So chunks of other leaves
    # are unmapped as soon as they are released.
    held, first_chunk, bases = table.holder, table.first_chunk, table.bases
    folder, line, before = snapshot.tables.find(slot, lane)
    shift, first, last = table.shift[folder], before + first, before + last
    starts, sizes = [], []
    for further in range(int(((last >> shift) - (first >> shift)).max(initial=-1)) + 1):
        chunk = (first >> shift) + further
        begin, end = np.maximum(first, chunk << shift), np.minimum(last + 1, (chunk + 1) << shift)
        inside = begin & ((1 << shift) - 1)
        place = first_chunk[folder] + np.minimum(chunk, last >> shift)
        starts.append(bases[place] + ((line << shift) + inside) * table.row_bytes)
        # The size is 0 if the window ends in an earlier chunk, if the chunk is decompressed, or if another thread has
        # released the chunk.
        is_mapped = (bases[place] != 0) & (table.how[place] != DECOMPRESSED)
        sizes.append(np.where(is_mapped, np.maximum(end - begin, 0), 0) * table.row_bytes)
    return Pages(np.concatenate(starts or [first]), np.concatenate(sizes or [first]), (held,))
