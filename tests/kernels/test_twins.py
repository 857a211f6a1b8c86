"""Every kernel does what its plain twin does."""

import ctypes
import subprocess
import sys
from inspect import isfunction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay
from diskreplay.ids import POSITION_BITS
from diskreplay.kernels import following, frozen, gathering as cols
from diskreplay.kernels.cache import is_disabled
from diskreplay.kernels.copying import COUNT as RUN_COUNT, FIELD, ITEM, LANE, NEWEST_ROWS, ROW, RUN_COLUMNS, SLOT
from diskreplay.kernels.gathering import MANY_SLOTS
from diskreplay.kernels.packed import pack
from diskreplay.kernels.runs import BEFORE, BLOCK_ROWS, COARSE_BITS, FIRST, STRIDE
from diskreplay.kernels.table import get_kernel
from diskreplay.reading.snapshot import SegmentTable
from tests.kernels.pairs import KERNELS
from tests.kernels.plain.advance import freeze_plain
from tests.kernels.plain.frozen import Frozen
from tests.views.fakes import Snapshot
from tests.views.strategies import snapshots

ROOT = Path(diskreplay.__file__).parents[1]
seeds = st.integers(0, 2**32 - 1)


def both(name: str, inputs: tuple[Any, ...], outputs: tuple[np.ndarray, ...]) -> list[tuple[Any, ...]]:
    """Call a kernel and its twin on copies of the outputs; return each one's result and outputs."""
    found = []
    for function in KERNELS[name]:
        own = tuple(array.copy() for array in outputs)
        found.append((function(*inputs, *own), *own))
    return found


def test_every_kernel_has_a_twin() -> None:
    assert set(KERNELS) == {
        "advance", "advance_hiding", "advise", "copy_runs", "discounted", "draw", "fill_grid", "find_runs",
        "find_windows", "follow", "freeze", "gae", "gather", "hide_oldest", "ids_at", "initial_priorities",
        "largest_given", "locate", "nstep", "powers", "random_ids", "starts", "stream", "sumtree_find", "sumtree_set",
        "sync_priorities", "update", "weights", "write_lanes",
    }  # fmt: skip
    for fast, plain in KERNELS.values():
        assert isfunction(fast) == is_disabled()
        assert isfunction(plain)


def table_arrays(snapshot: Snapshot, leaf: str, mapped: float, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Return the arrays of a leaf's table, that share of its chunks mapped."""
    table = snapshot.leaf(leaf)
    bases = np.array([block.ctypes.data if rng.random() < mapped else 0 for block in table.holder], np.int64)
    return table.first_chunk, table.chunks, table.shift, bases


def with_gone(record: np.ndarray, count: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a record with so many more segments, which are gone; and what it has addresses of."""
    longer, kept, slots = record.copy(), [], int(record[frozen.SLOTS])
    nowhere = {frozen.LANES: 0, frozen.LANE_BASE: 1 << 50, frozen.LIVE_BASE: -1, frozen.FOLDERS: -1}
    for column, value in nowhere.items():
        there = np.ctypeslib.as_array(ctypes.cast(int(record[column]), ctypes.POINTER(ctypes.c_int64)), (slots,))
        kept.append(np.append(there, np.full(count, value)))
        longer[column] = kept[-1].ctypes.data
    longer[frozen.SLOTS] += count
    return longer, kept


@pytest.mark.slow
@given(
    snapshots(), st.integers(1, 9) | st.just(-1), st.integers(1, 5), st.booleans(), st.sampled_from((1.0, 0.8)),
    st.sampled_from((0, 2 * MANY_SLOTS)), seeds,
)  # fmt: skip
def test_find_windows(snapshot: Snapshot, n: int, stack: int, whole: bool, mapped: float, gone: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = table_arrays(snapshot, "done", mapped, rng)
    record, _kept = with_gone(snapshot.record, gone)
    behind = int(record[frozen.ORIGIN] + record[frozen.SLOTS]) << POSITION_BITS
    candidates = [*snapshot.model, 0, -1, 1 << 62, *(i + 1 for i in snapshot.model), behind, behind - 1]
    ids = rng.choice(np.array(candidates, np.int64), 20)
    line = cols.table_line(*arrays, 1)
    inputs = (n, stack, whole, record, line.ctypes.data)
    # One by one, so that the ids behind the first bad one are compared too.
    for step_id in ids:
        out = np.zeros((cols.WINDOW_ROWS, 1), np.int64), *np.zeros((2, 1), np.uint8)
        fast, plain = both("find_windows", (np.array([step_id]), *inputs), out)
        assert fast[0] == plain[0]
        if fast[0] < 0:
            np.testing.assert_array_equal(fast[1], plain[1])
            np.testing.assert_array_equal(fast[2], plain[2])
    out = np.zeros((cols.WINDOW_ROWS, len(ids)), np.int64), *np.zeros((2, len(ids)), np.uint8)
    fast, plain = both("find_windows", (ids, *inputs), out)
    assert fast[0] == plain[0]


@given(snapshots(), st.sampled_from((1.0, 0.8)), st.sampled_from((0, 2 * MANY_SLOTS)), seeds)
def test_find_steps(snapshot: Snapshot, mapped: float, gone: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = table_arrays(snapshot, "done", mapped, rng)
    line = cols.table_line(*arrays, 1)
    record, _kept = with_gone(snapshot.record, gone)
    behind = int(record[frozen.ORIGIN] + record[frozen.SLOTS]) << POSITION_BITS
    candidates = [*snapshot.model, 0, -1, 1 << 62, *(i + 1 for i in snapshot.model), behind, behind - 1]
    ids = rng.choice(np.array(candidates, np.int64), 20)
    written = [
        cols.SLOT,
        cols.LANE,
        cols.ROW,
        cols.FLOOR,
        cols.AFTER,
        cols.OWN_STOP,
        *range(cols.FOLDER, cols.BEFORE + 1),
    ]
    for some in [*ids[:, None], ids]:  # one by one too: the ids behind the first bad one are compared there
        flags = np.zeros(len(some), np.uint8)
        out = np.zeros((cols.WINDOW_ROWS, len(some)), np.int64), flags, flags
        fast, plain = both("find_windows", (some, 0, 1, 0, record, line.ctypes.data), out)
        assert fast[0] == plain[0]
        if fast[0] < 0:
            np.testing.assert_array_equal(fast[1][written], plain[1][written])
            np.testing.assert_array_equal(fast[2:], plain[2:])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(0, 3),
    seeds,
)
def test_initial_priorities(segments: list[tuple[int, int, int]], origin: int, seed: int) -> None:
    """Segments of so many lanes and, as a power of two, rows a chunk; below 0 they have no such array.

    Where the third number is not 0, the lanes stand one behind the other, so many rows apart.
    """
    rng = np.random.default_rng(seed)
    lanes, shift, apart = np.array(segments, np.int64).T.copy()
    chunks = rng.integers(0, 4, len(lanes))
    lane_base = np.cumsum(lanes) - lanes
    lane = np.arange(lanes.sum()) - np.repeat(lane_base, lanes)
    first_rows = np.where(np.repeat(apart, lanes) > 0, lane * np.repeat(apart, lanes), frozen.OWN_FOLDER)
    folders = rng.permutation(len(lanes))
    first_chunk = np.cumsum(chunks) - chunks
    odd = (0.0, -1.0, np.nan, np.inf, 5e-324, np.finfo(np.float64).max)
    blocks = [
        np.where(rng.random((lanes.max(), 1 << max(rows, 0))) < 0.3, rng.choice(odd), rng.random())
        for rows, count in zip(shift.tolist(), chunks.tolist(), strict=True)
        for _ in range(count)
    ]
    bases = np.array([block.ctypes.data if rng.random() < 0.95 else 0 for block in blocks], np.int64)
    slot = rng.integers(-1, len(lanes) + 1, 30)
    ids = (slot + origin << 35) + rng.integers(0, 20, 30)
    inputs = (origin, lanes, pack(lane_base, folders, first_rows, first_chunk, chunks, shift, bases))
    for step_id in ids:  # one by one, so that those behind one that is not mapped are compared too
        fast, plain = both("initial_priorities", (np.array([step_id]), *inputs), (np.zeros(1),))
        assert fast[0] == plain[0]
        if fast[0] < 0:
            np.testing.assert_array_equal(fast[1], plain[1])
    fast, plain = both("initial_priorities", (ids, *inputs), (np.zeros(len(ids)),))
    assert fast[0] == plain[0]


def segments_of(
    lanes: np.ndarray, growing: np.ndarray | None = None, first_rows: np.ndarray | None = None
) -> SegmentTable:
    """Return a table of segments with so many lanes, in folders of their own unless first rows are given."""
    if growing is None:
        growing = np.zeros((0, following.GROWING_COLUMNS), np.int64)
    columns: dict[str, Any] = dict.fromkeys(("schema", "tables", "clocks", "sealed", "evictions", "generation"))
    columns["folders"] = np.arange(len(lanes))
    columns["first_rows"] = np.full(lanes.sum(), frozen.OWN_FOLDER) if first_rows is None else first_rows
    return SegmentTable.of(growing, origin=0, lanes=lanes, lane_base=np.cumsum(lanes) - lanes, **columns)


def record_of(table: SegmentTable) -> np.ndarray:
    """Return the record of a snapshot in which nothing is known of lanes."""
    record, rows = np.empty(frozen.HEAD, np.int64), np.zeros((following.LANE_ROWS, len(table.first_rows)), np.int64)
    freeze_plain(np.zeros((0, following.GROWING_COLUMNS), np.int64), rows, rows[0], 0, table.head, record)
    return record


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8), seeds)
def test_freeze(segments: list[tuple[int, bool]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    lanes, grows = np.array(segments, np.int64).reshape(-1, 2).T
    slots = np.flatnonzero((grows > 0) & (lanes > 0))
    growing = rng.integers(0, 99, (len(slots), following.GROWING_COLUMNS))
    growing[:, following.SLOT], growing[:, following.LANES] = slots, lanes[slots]
    growing[:, following.PLACE] = (np.cumsum(lanes) - lanes)[slots]
    table = segments_of(lanes, growing)
    rows, oldest = rng.integers(-1, 9, (following.LANE_ROWS, lanes.sum())), rng.integers(0, 9, lanes.sum())
    record = np.empty(frozen.HEAD + following.LANE_ROWS * len(table.live_places), np.int64)
    fast, plain = both("freeze", (growing, rows, oldest, 7, table.head), (record,))
    for column in set(range(len(record))) - {frozen.LIVE}:
        assert fast[1][column] == plain[1][column]
    for _, found in fast, plain:
        assert found[frozen.LIVE] == found.ctypes.data + 8 * frozen.HEAD
        seen = Frozen.of(found)
        np.testing.assert_array_equal(seen.live, rows[:, table.live_places])
        np.testing.assert_array_equal(seen.oldest, oldest)
        rows_then = rows.copy()
        rows[:, table.live_places] = 77  # what is followed later
        for slot, width in enumerate(lanes.tolist()):
            for lane in range(width):
                place = table.lane_base[slot] + lane
                assert seen.rows_of(following.OBSERVED, slot, lane) == rows_then[following.OBSERVED, place]
        rows[:] = rows_then


class Line(NamedTuple):
    """A leaf that is copied from rows OWN on, as far as OWN_STOP: first_chunk, chunks, shift and bases of its table."""

    table: tuple[np.ndarray, ...]
    row_bytes: int
    offset: int
    length: int


def gather_both(
    lanes: np.ndarray,
    places: dict[int, Any],
    lines: list[Line],
    streamed: int = 0,
    begin: int = 0,
    first_rows: np.ndarray | None = None,
) -> list[tuple[Any, ...]]:
    """Gather rows of windows that are given by a kernel and its twin; return what they returned, and each array."""
    found = []
    items = len(places[cols.SLOT])
    memory = np.zeros((cols.WINDOW_ROWS + 1, items), np.int64)
    for row, values in places.items():
        memory[row] = values
    no_rows, table = np.zeros(0, np.int64), segments_of(lanes, first_rows=first_rows)
    for kernel in KERNELS["gather"]:
        record = np.zeros(cols.HEAD + len(lines) * cols.COLUMNS, np.int64)
        sources = np.empty((len(lines), items), np.int64)
        record[[cols.WINDOWS, cols.ITEMS, cols.SOURCES]] = memory.ctypes.data, items, sources.ctypes.data
        record[[cols.LINES, cols.COPIED, cols.STREAMED]] = len(lines), len(lines), streamed
        record[cols.REWARD : cols.WEIGHT + 1] = -1
        outs = [np.full((items, line.length * line.row_bytes), 0xAB, np.uint8) for line in lines]
        for target, (line, at) in enumerate(zip(lines, range(cols.HEAD, len(record), cols.COLUMNS), strict=True)):
            record[at : at + cols.ROW_BYTES + 1] = cols.table_line(*line.table, line.row_bytes)
            bounds = cols.OWN, cols.OWN_STOP, line.offset, line.length, target
            record[at + cols.BEGIN : at + cols.TARGET + 1] = bounds
        addresses = np.array([*(out.ctypes.data for out in outs), 0], np.int64)
        found.append((kernel(no_rows, addresses, record_of(table), record, begin, items), *outs))
    return found


@pytest.mark.slow
@given(st.sampled_from((1.0, 0.8)), snapshots(), st.booleans(), seeds)
def test_gather(mapped: float, snapshot: Snapshot, streamed: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lines = []
    for leaf in rng.choice(("obs/image", "reward", "action/0"), rng.integers(1, 4)).tolist():
        length, offset = int(rng.integers(1, 7)), int(rng.integers(-4, 3))
        lines.append(Line(table_arrays(snapshot, leaf, mapped, rng), snapshot.leaf(leaf).row_bytes, offset, length))
    size, slots = 6, len(snapshot.lanes)
    slot = rng.integers(0, slots, size) if rng.random() < 0.9 else rng.integers(-1, slots + 1, size)
    lane = rng.integers(0, np.maximum(snapshot.lanes[np.clip(slot, 0, slots - 1)], 1) + (rng.random() < 0.1))
    row = rng.integers(0, 20, size)
    floor = row - rng.integers(0, 4, size)
    floor = floor if rng.random() < 0.1 else np.maximum(floor, 0)
    own_stop = row + rng.integers(-3, 8, size)
    places = {cols.SLOT: slot, cols.LANE: lane, cols.FLOOR: floor, cols.OWN: row, cols.OWN_STOP: own_stop}
    begin = int(rng.integers(0, 3))
    fast, plain = gather_both(snapshot.lanes, places, lines, int(streamed), begin, snapshot.first_rows)
    assert fast[0] == plain[0]
    if fast[0] < 0:
        for one, other in zip(fast[1:], plain[1:], strict=True):
            np.testing.assert_array_equal(one[begin:], other[begin:])
            assert (one[:begin] == 0xAB).all()


@given(snapshots(), st.sampled_from((0.0, 0.0, 0.1)), seeds)
def test_find_runs(snapshot: Snapshot, strange: float, seed: int) -> None:
    """A column has successive ids of a lane, ids of several lanes one after the other, or ids that are not visible."""
    rng = np.random.default_rng(seed)
    steps, columns = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    grid = np.zeros((steps, columns), np.int64)
    steps_of = sorted(snapshot.model)
    for t, c in np.ndindex(grid.shape):
        slot = (int(grid[t - 1, c]) >> POSITION_BITS) - snapshot.origin
        if rng.random() < strange or not steps_of:
            grid[t, c] = rng.choice([-1, 1 << 62, 0, *(step + 1 for step in steps_of[-3:])])
        elif t == 0 or rng.random() < 0.2 or not 0 <= slot < len(snapshot.lanes):
            grid[t, c] = rng.choice(steps_of)
        else:
            grid[t, c] = grid[t - 1, c] + snapshot.lanes[slot]
    found = []
    for kernel in KERNELS["find_runs"]:
        runs = np.full((grid.size, RUN_COLUMNS), -7, np.int64)
        found.append((kernel(grid, snapshot.record, runs, np.zeros((NEWEST_ROWS, columns), np.int64)), runs))
    (fast_count, fast), (plain_count, plain) = found
    assert (fast_count < 0) == (plain_count < 0)
    if fast_count < 0:
        assert Frozen.of(snapshot.record).visible_row(int(grid.flat[-1 - fast_count])) is None
    else:
        assert fast_count == plain_count
        np.testing.assert_array_equal(fast[:fast_count], plain[:fast_count])


LEAVES = ("obs/image", "reward", "action/0", "done")


@given(snapshots(), st.lists(st.sampled_from(LEAVES), max_size=3), st.sampled_from((1.0, 0.9)), seeds)
def test_copy_runs(snapshot: Snapshot, leaves: list[str], mapped: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = np.flatnonzero(snapshot.lanes)
    runs, columns, steps = int(rng.integers(0, 6)), 7, 5
    if not len(slots):
        runs = 0
    table = np.zeros((runs, RUN_COLUMNS), np.int64)
    if runs:
        table[:, SLOT] = rng.choice(slots, runs)
        table[:, LANE] = rng.integers(0, snapshot.lanes[table[:, SLOT]])
        table[:, ROW], table[:, RUN_COUNT] = rng.integers(0, 20, runs), rng.integers(0, steps + 1, runs)
        table[:, ITEM] = rng.permutation(columns)[:runs]  # a column each
    widths, begin = [snapshot.leaf(leaf).row_bytes for leaf in leaves], int(rng.integers(0, runs + 1))
    arrays = [table_arrays(snapshot, leaf, mapped, rng) for leaf in leaves]
    lines = [cols.table_line(*kept, width) for kept, width in zip(arrays, widths, strict=True)]
    found = []
    for kernel in KERNELS["copy_runs"]:
        copies = [np.full((steps * columns, width), 0xAB, np.uint8) for width in widths]
        out = np.array([copy.ctypes.data for copy in copies], np.int64)
        where = np.array(lines, np.int64).reshape(-1, cols.ROW_BYTES + 1), out, table, columns
        found.append((kernel(snapshot.record, *where, begin, runs), copies))
    (fast_bad, fast), (plain_bad, plain) = found
    assert fast_bad == plain_bad
    if fast_bad < 0:
        for one, other in zip(fast, plain, strict=True):
            np.testing.assert_array_equal(one, other)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 9), st.integers(0, 9))), st.integers(1, 5))
def test_fill_grid(runs: list[tuple[int, int, int]], steps: int) -> None:
    runs.append((5, 3, -sum(count for *_, count in runs) % steps))  # ids for whole columns
    table = np.ascontiguousarray(np.array(runs, np.int64).T)
    fast, plain = both("fill_grid", (table,), (np.zeros((steps, int(table[2].sum()) // steps), np.int64),))
    np.testing.assert_array_equal(fast[1], plain[1])


@given(st.integers(1, 5), st.lists(st.sampled_from((1, 4, 8, 12, 64, 192, 200)), min_size=1, max_size=3), seeds)
def test_write_lanes(count: int, widths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    lanes, rows, found = np.sort(rng.choice(9, count, replace=False)), rng.integers(5, 20, count), []
    shifts = rng.integers(0, 4, len(widths)).tolist()
    picked = rng.choice(7, count)
    values = [rng.integers(0, 256, (7, width), np.uint8) for width in widths]
    for kernel in KERNELS["write_lanes"]:
        heads, bases, files = [], [], []
        for width, shift, value in zip(widths, shifts, values, strict=True):
            first, last = int(rows.min()) >> shift, int(rows.max()) >> shift
            chunks = np.full((last - first + 1, 9 << shift, width), 0xAB, np.uint8)
            heads += first, shift, width, value.ctypes.data, FIELD * len(widths) + len(bases)
            used = set((rows >> shift).tolist())
            bases += [chunk.ctypes.data * (number in used) for number, chunk in enumerate(chunks, first)]
            files.append(chunks)
        kernel(lanes, rows, picked, np.array(heads + bases), len(widths))
        found.append(files)
    for shift, value, fast, plain in zip(shifts, values, *found, strict=True):
        np.testing.assert_array_equal(fast, plain)
        chunk, inside = (rows >> shift) - (rows.min() >> shift), (lanes << shift) + (rows & ((1 << shift) - 1))
        np.testing.assert_array_equal(fast[chunk, inside], value[picked])


@given(st.lists(st.sampled_from(("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")), min_size=1), seeds)
def test_sums_of_every_kind_of_number(dtypes: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, chunk = 5, 8
    k = rng.integers(1, 20, size)
    lanes, memory = np.array([1]), np.zeros((cols.WINDOW_ROWS + 1, size), np.int64)
    memory[cols.K], memory[cols.ROW] = k, rng.integers(0, 20, size)
    memory[cols.FLOOR], memory[cols.AFTER] = memory[cols.ROW], memory[cols.ROW] + k
    # Perhaps one of discounts, behind at least one that is summed.
    summed = len(dtypes) - int(len(dtypes) > 1 and rng.random() < 0.5)
    values = [np.frombuffer(rng.bytes(8 * 40), dtype)[:40].copy() for dtype in dtypes]
    with np.errstate(all="ignore"):
        values = [
            np.nan_to_num(array, nan=1, posinf=2, neginf=3) if array.dtype.kind == "f" else array for array in values
        ]
        values = [np.clip(array, -1e30, 1e30) if array.dtype == "f8" else array for array in values]
    found = []
    for kernel in KERNELS["gather"]:
        record = np.zeros(cols.HEAD + len(dtypes) * cols.COLUMNS, np.int64)
        none, segments = np.zeros(1, np.int64), segments_of(lanes)
        sources = np.empty((len(dtypes), size), np.int64)
        record[[cols.WINDOWS, cols.ITEMS, cols.SOURCES]] = memory.ctypes.data, size, sources.ctypes.data
        record[[cols.LINES, cols.SUMMED, cols.GAMMA]] = len(dtypes), summed, np.float64(0.9).view(np.int64)
        record[cols.REWARD : cols.WEIGHT + 1] = 0, 1, 2, 3, -1, -1, -1
        keep = []
        for at, array in zip(range(cols.HEAD, len(record), cols.COLUMNS), values, strict=True):
            bases = np.arange(array.ctypes.data, array.ctypes.data + array.nbytes, chunk * array.itemsize)
            table = none, np.array([len(bases)]), np.array([3]), bases
            keep.append(table)
            record[at : at + cols.ROW_BYTES + 1] = cols.table_line(*table, array.itemsize)
            record[at + cols.BEGIN], record[at + cols.STOP] = cols.ROW, cols.AFTER
            record[at + cols.KIND] = cols.KINDS.index(array.dtype.kind)
            record[at + cols.FACTOR] = np.float64(0.3).view(np.int64)
        outs = [np.zeros(size, dtype) for dtype in ("f4", "f4", "?", "?")]
        addresses = np.array([*(out.ctypes.data for out in outs), 0], np.int64)
        assert kernel(np.zeros(0, np.int64), addresses, record_of(segments), record, 0, size) == -1
        found.append(outs)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("count", [0, 1, 31, 128, 129, 1000])
@given(st.integers(0, 63), st.integers(0, 63))
def test_stream(count: int, to: int, origin: int) -> None:
    source = np.random.default_rng(count).integers(0, 256, 1064, np.uint8)
    found = []
    for function in KERNELS["stream"]:
        target = np.zeros(1100, np.uint8)
        function(target.ctypes.data + to, source.ctypes.data + origin, count)
        found.append(target)
    np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(found[0][to : to + count], source[origin : origin + count])


@pytest.mark.parametrize("streamed", [0, 1])
@pytest.mark.parametrize("shift", [9, 5])
def test_gather_of_a_large_batch(streamed: int, shift: int) -> None:
    count = 350
    block = np.random.default_rng(0).integers(0, 256, (1, 512, 3000), np.uint8)
    items = np.arange(8)
    bases = block.ctypes.data + np.arange(0, 512, 1 << shift) * 3000
    table = np.array([0]), np.array([len(bases)]), np.array([shift]), bases
    zeros = np.zeros(8, np.int64)
    places = {cols.SLOT: zeros, cols.LANE: zeros, cols.OWN: items, cols.FLOOR: items + 1, cols.OWN_STOP: zeros + 400}
    fast, plain = gather_both(np.array([1]), places, [Line(table, 3000, 0, count)], streamed)
    assert fast[0] == plain[0] == -1
    np.testing.assert_array_equal(fast[1], plain[1])


def test_gather_forms_no_address_of_a_row_before_the_first_or_behind_the_last_chunk() -> None:
    block = np.arange(64, dtype=np.uint8).reshape(2, 4, 8)
    one = np.array([0])
    line = Line((one, np.array([1]), np.array([2]), np.array([block.ctypes.data])), 8, 0, 1)
    for row, floor, lane, good in (
        (-1, -1, 0, False),
        (4, 0, 0, False),
        (0, 0, 2, False),
        (0, 0, -1, False),
        (3, 0, 1, True),
    ):
        places = {cols.SLOT: one, cols.LANE: [lane], cols.OWN: [row], cols.FLOOR: [floor], cols.OWN_STOP: [9]}
        fast, plain = gather_both(np.array([2]), places, [line])
        assert fast[0] == plain[0] == (-1 if good else 0)
        np.testing.assert_array_equal(fast[1][0], block[1, 3] if good else 0xAB)


@given(st.integers(1, 30), st.integers(1, 12), st.sampled_from((0.0, 0.9, 0.99, 1.0)), seeds)
def test_nstep(size: int, width: int, gamma: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = rng.integers(1, 2 * width + 2, size)
    r = rng.standard_normal((size, 2 * width)) * 10.0 ** rng.integers(-3, 30)
    fast, plain = both("nstep", (r, k, gamma), (np.zeros(size, np.float32),))
    for one, other in zip(fast, plain, strict=True):
        np.testing.assert_array_equal(one, other)


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(-3, 3), st.sampled_from((0.0, 0.9, 1.0)), seeds)
def test_discounted(steps: list[int], more: int, gamma: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Of rewards that are too few the first are summed.
    r = rng.standard_normal(max(sum(steps) + more, 0)) * 10.0 ** rng.integers(-3, 30)
    inputs = r, np.array(steps, np.int64), rng.standard_normal(len(steps)), gamma
    fast, plain = both("discounted", inputs, (np.zeros(len(r)),))
    np.testing.assert_array_equal(fast[1], plain[1])


def coarse_of(before: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return what `ids_at` is given of many runs: of all that make up whole parts, or of fewer."""
    parts = (len(before) - 1) >> COARSE_BITS
    return before[:-1][:: 1 << COARSE_BITS][: int(rng.integers(0, parts + 1))].copy()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 10), seeds)
def test_ids_at(counts: list[int], times: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = counts * times
    low = int(rng.integers(0, len(counts)))
    before = np.concatenate([[0], np.cumsum(counts)])
    first, stride = rng.integers(0, 1000, len(counts)), rng.integers(1, 5, len(counts))
    size = before[-1] - before[low]
    ids = [first[i] + stride[i] * j for i in range(low, len(counts)) for j in range(counts[i])]
    positions = np.arange(size) + rng.random(size)
    block = np.zeros((BLOCK_ROWS, len(before)), np.int64)
    block[FIRST, :-1], block[STRIDE, :-1], block[BEFORE] = first, stride, before
    record = pack(np.zeros(0, np.int64), block, coarse_of(before, rng))
    fast, plain = both("ids_at", (positions, low, len(counts), record), (np.zeros((2, size), np.int64),))
    assert fast[1][0].tolist() == plain[1][0].tolist() == ids


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40).filter(any), st.integers(1, 10), st.integers(0, 2**63 - 1))
def test_random_ids(counts: list[int], times: int, key: int) -> None:
    counts = counts * times
    before = np.concatenate([[0], np.cumsum(counts)])
    block = np.zeros((BLOCK_ROWS, len(before)), np.int64)
    block[FIRST, :-1], block[STRIDE, :-1], block[BEFORE] = 100 * np.arange(len(counts)), 3, before
    low = int(np.flatnonzero(counts)[0])
    record = pack(np.zeros(0, np.int64), block, coarse_of(before, np.random.default_rng(key)))
    fast, plain = both("random_ids", (key, low, len(counts), record), (np.zeros((2, 64), np.int64),))
    assert fast[1][0].tolist() == plain[1][0].tolist()
    assert set(fast[1][0].tolist()) <= {100 * i + 3 * j for i in range(low, len(counts)) for j in range(counts[i])}


def test_random_numbers_are_those_of_splitmix64() -> None:
    # The first three from the state 1234567, as published with Vigna's reference code.
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    block = np.zeros((BLOCK_ROWS, 2), np.int64)
    block[STRIDE, 0], block[BEFORE, 1] = 1, 1 << 53
    for pick in KERNELS["random_ids"]:
        memory = np.zeros((2, 3), np.int64)
        pick(1234567, 0, 1, pack(np.zeros(0, np.int64), block, np.zeros(0, np.int64)), memory)
        assert memory[0].tolist() == [number >> 11 for number in wanted]


@pytest.mark.skipif(is_disabled(), reason="NUMBA_DISABLE_JIT is set: nothing is compiled")
def test_read_only_inputs_need_no_second_compilation() -> None:
    fast = KERNELS["ids_at"][0]
    positions, memory, block = np.zeros(3), np.zeros((2, 3), np.int64), np.zeros((BLOCK_ROWS, 4), np.int64)
    record = pack(np.zeros(0, np.int64), block, np.zeros(0, np.int64))
    for array in positions, record:
        array.flags.writeable = False
    fast(positions, 0, 3, record, memory)
    assert len(fast.signatures) == 1


def run_python(code: str, **environment: str) -> str:
    environment = {"PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_only_kernels_that_are_asked_for_are_loaded() -> None:
    code = (
        "import sys; from diskreplay.kernels.table import get_kernel; get_kernel('gather'); get_kernel('ids_at'); "
        "print([name for name in ('priorities', 'sumtree', 'returns') "
        "if f'diskreplay.kernels.{name}' in sys.modules])"
    )
    assert run_python(code) == "[]"


@pytest.mark.slow(turns=4)
def test_without_numba_a_store_is_written_and_read_and_a_sampler_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["numba"] = None
import numpy as np
import diskreplay as dr
from tests.testing.support import append_numbered, serial_schema
with dr.create({str(tmp_path / "store")!r}, serial_schema(), capacity=20) as store:
    with store.writer() as writer:
        for first in range(0, 40, 4):
            append_numbered(writer, range(first, first + 4))
    store.refresh()
    print([int(serial) for episode in store.episodes for serial in episode["serial"]] == list(range(20, 40)))
    try:
        dr.Sampler(store, dr.Transitions())
    except ImportError as error:
        print('pip install "diskreplay[torch]"' in str(error))
"""
    assert run_python(code).split() == ["True", "True"]


def test_a_process_that_is_forked_while_a_thread_compiles_can_compile_too() -> None:
    code = """
import gc, os, threading, time
from diskreplay.kernels import cache
begun = threading.Event()
def compile_slowly():
    with cache.compiling, cache._no_garbage_collection():
        begun.set()
        time.sleep(0.3)
threading.Thread(target=compile_slowly).start()
begun.wait()
child = os.fork()
if not child:
    os._exit(0 if cache.compiling.acquire(timeout=60) and gc.isenabled() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code) == "0"


def test_a_process_that_is_forked_while_a_thread_imports_kernels_can_compile_too() -> None:
    code = """
import os, signal, threading, time
from diskreplay.kernels import cache, table
begun, find_module = threading.Event(), cache.import_module
def import_slowly(name):
    if not begun.is_set():
        begun.set()
        time.sleep(0.3)  # for a fork to come, or to wait for the end of this
    return find_module(name)
cache.import_module = import_slowly
threading.Thread(target=table.get_kernel, args=("weights",)).start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(300)
    table.get_kernel("advise")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code) == "0"


def test_making_a_view_loads_no_compiled_code() -> None:
    code = "import sys, diskreplay; diskreplay.Transitions(n_step=3); print({'numba', 'torch'} & set(sys.modules))"
    assert run_python(code) == "set()"


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_the_chosen_kernel_is_the_compiled_one(name: str) -> None:
    assert get_kernel(name) is KERNELS[name][0]
