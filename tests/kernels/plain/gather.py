"""Plain twins of the kernels of `kernels.gather`."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import TERMINATED, TRUNCATED, Ints
from diskreplay.kernels.gathering import (
    AFTER,
    BEGIN,
    COLUMNS,
    COPIED,
    FACTOR,
    FAILED,
    FINDS,
    FLAGS,
    FLOOR,
    FOLDER,
    FRAMES_STOP,
    GAMMA,
    HEAD,
    INDEX,
    ITEMS,
    KIND,
    KINDS,
    LANE,
    LENGTH,
    LIMITS,
    LINES,
    OBS_STOP,
    OFFSET,
    REWARD,
    ROW,
    ROW_BYTES,
    SLOT,
    STACK,
    STEP_STOP,
    STOP,
    SUMMED,
    TARGET,
    WEIGHT,
    WHOLE,
    WINDOW_ROWS,
    WINDOWS,
    K,
    N,
)
from tests.kernels.plain.frozen import Frozen, array_at
from tests.kernels.plain.gathering import find_windows_plain, row_address, table_at
from tests.kernels.plain.returns import sum_windows


def gather_plain(ids: Ints, addresses: Ints, snapshot: Ints, record: Ints, begin: int, until: int) -> int:
    """Do what `gather` does with the plain kernels, leaf after leaf and row after row."""
    head, items = record.tolist(), int(record[ITEMS])
    windows = array_at(head[WINDOWS], WINDOW_ROWS * items).reshape(WINDOW_ROWS, items)
    ends = array_at(head[WINDOWS] + windows.nbytes, items, np.uint8)
    seen = Frozen.of(snapshot)
    lanes = seen.lanes
    some = slice(begin, until)
    record[FAILED] = bad = -1
    if head[FINDS]:
        bounds, flags = (head[N], head[STACK], head[WHOLE]), record.ctypes.data + 8 * FLAGS
        bad = find_windows_plain(ids[some], *bounds, snapshot, flags, windows[:, some], ends[some], ends[some])
    else:
        slot, lane = windows[SLOT, some], windows[LANE, some]
        width = np.append(lanes, 0)[np.where((slot >= 0) & (slot < len(lanes)), slot, len(lanes))]
        misplaced = (lane < 0) | (lane >= width)
        for i in np.flatnonzero(~misplaced):  # a lane in a pack has rows below 0, as many as come before it
            misplaced[i] = seen.folder(int(slot[i]), int(lane[i]))[2] + windows[FLOOR, some][i] < 0
        bad = int(misplaced.argmax()) if misplaced.any() else -1
    if bad >= 0:
        return begin + bad
    for i in range(begin, until):
        windows[FOLDER:, i] = seen.folder(int(windows[SLOT, i]), int(windows[LANE, i]))
    if head[LIMITS]:
        _shorten(windows[:, some], ends[some], array_at(head[LIMITS], items)[some])
    r: Any = 0.0
    gammas: Any = float(np.int64(head[GAMMA]).view(np.float64))
    for number in range(head[LINES]):
        line = head[HEAD + number * COLUMNS :][:COLUMNS]
        is_copied = number < head[COPIED]
        offset, length = (line[OFFSET], line[LENGTH]) if is_copied else (0, int(windows[K, some].max(initial=0)))
        row, stop = windows[line[BEGIN]] + offset, windows[line[STOP]]
        out = np.empty((items, length * line[ROW_BYTES]), np.uint8)
        if is_copied:
            out = array_at(int(addresses[line[TARGET]]), out.size, np.uint8).reshape(out.shape)
        bad = _copy_plain(windows, line, row, stop, begin, until, out)
        if bad >= 0:
            record[FAILED] = min(number, head[COPIED])
            return bad
        if not is_copied:
            dtype = np.dtype(f"{KINDS[line[KIND]]}{line[ROW_BYTES]}")
            weighed = out[some].view(dtype).astype(np.float64) * np.int64(line[FACTOR]).view(np.float64)
            if number < head[SUMMED]:
                r = r + weighed
            else:
                gammas = weighed
    size = until - begin
    dtypes = (np.float32, np.float32, np.bool_, np.bool_, np.int64, np.int64, np.float32)
    outs = [
        np.empty(size, dtype) if place < 0 else array_at(int(addresses[place]), items, dtype)[some]
        for place, dtype in zip(head[REWARD : WEIGHT + 1], dtypes, strict=True)
    ]
    if head[COPIED] < head[LINES]:
        sum_windows(r, windows[K, some], ends[some], np.broadcast_to(gammas, r.shape), *outs[:4])
    for out, place, values in zip(outs[4:], head[INDEX:], (ids[some], windows[K, some], 1.0), strict=False):
        if place >= 0:
            out[:] = values
    return -1


def _shorten(windows: Ints, ends: NDArray[np.uint8], n: Ints) -> None:
    short = n < windows[K]
    windows[K, short] = n[short]
    windows[AFTER, short] = windows[ROW, short] + n[short]
    for row in (OBS_STOP, STEP_STOP, FRAMES_STOP):
        windows[row, short] = windows[AFTER, short] + 1
    ends[short] &= np.uint8(~(TERMINATED | TRUNCATED) & 0xFF)


def _copy_plain(
    windows: Ints, line: list[int], row: Ints, stop: Ints, begin: int, until: int, out: NDArray[np.uint8]
) -> int:
    """Copy rows row, row + 1, ... of each item of a leaf, as many as there is room for; return as the kernel does."""
    table = table_at(line)
    row_bytes = line[ROW_BYTES]
    for i in range(begin, until):
        for j in range(out.shape[1] // max(row_bytes, 1)):
            target = out[i, j * row_bytes : (j + 1) * row_bytes]
            r = max(int(row[i]) + j, int(windows[FLOOR, i]))
            if r >= stop[i]:
                target[:] = 0
                continue
            folder, beside, before = windows[FOLDER:, i].tolist()
            source = row_address((folder, beside, before), r, *table, row_bytes)
            if source == 0:
                return i
            target[:] = np.frombuffer(ctypes.string_at(source, row_bytes), np.uint8)
    return -1
