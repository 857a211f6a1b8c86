"""Plain twins of the kernels of `kernels.gathering`."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import (
    CUT,
    FIRST,
    NO_STEP,
    OBSERVATION_ONLY,
    POSITION_BITS,
    POSITION_MASK,
    TERMINATED,
    TRUNCATED,
    Ints,
)
from diskreplay.kernels.following import COMMITTED, OBSERVED
from diskreplay.kernels.gathering import (
    BASES,
    BASES_SIZE,
    BEFORE,
    CHUNKS,
    FIRST_CHUNK,
    FOLDER,
    FOLDERS,
    OWN,
    OWN_STOP,
    ROW_BYTES,
    SHIFT,
)
from tests.kernels.plain.frozen import Frozen, array_at


def row_address(
    where: tuple[int, int, int],
    row: int,
    first_chunk: Ints,
    chunks: Ints,
    shift: Ints,
    bases: Ints,
    row_bytes: int,
) -> int:
    """Return where a row of a lane lies, or 0 when its chunk does not exist or is not mapped.

    `where` is the folder, the line and how many rows come before the lane's.
    """
    folder, line, before = where
    if not (0 <= folder < len(chunks) and before + row >= 0):
        return 0
    chunk, inside = divmod(before + row, 1 << int(shift[folder]))
    index = int(first_chunk[folder]) + chunk
    if chunk >= chunks[folder] or not 0 <= index < len(bases) or bases[index] == 0:
        return 0
    return int(bases[index]) + ((line << int(shift[folder])) + inside) * row_bytes


def table_at(columns: list[int]) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the arrays of a table that a line names."""
    first_chunk, chunks, shift = (array_at(columns[at], columns[FOLDERS]) for at in (FIRST_CHUNK, CHUNKS, SHIFT))
    return first_chunk, chunks, shift, array_at(columns[BASES], columns[BASES_SIZE])


def find_windows_plain(
    ids: Ints,
    n: int,
    stack: int,
    whole: int,
    record: Ints,
    line: int,
    windows: Ints,
    ends: NDArray[np.uint8],
    flags_behind: NDArray[np.uint8],
) -> int:
    """Do what `find_windows` does: find the whole episode around each step first, then cut the window out of it."""
    table = table_at(array_at(line, ROW_BYTES + 1).tolist())
    if n == 0:
        return _find_steps(ids, record, table, windows, ends, flags_behind)
    seen = Frozen.of(record)
    lanes = seen.lanes
    for i, step_id in enumerate(ids.tolist()):
        slot, position = (step_id >> POSITION_BITS) - seen.origin, step_id & POSITION_MASK
        if not 0 <= slot < len(lanes) or lanes[slot] <= 0:
            return i
        row, lane = divmod(position, int(lanes[slot]))
        kept = int(seen.oldest[seen.lane_base[slot] + lane])
        if row < kept:
            return i
        stop = seen.rows_of(COMMITTED, slot, lane)
        first, newest = max(0, row - stack + 1), stop if n < 0 else min(stop, row + n + 1)
        flags: dict[int, int] = {}
        for r in range(first, max(newest, row + 1)):
            address = row_address(seen.folder(slot, lane), r, *table, 1)
            if r < stop and address:
                flags[r] = ctypes.string_at(address, 1)[0]
        if row not in flags or flags[row] & NO_STEP:
            return i
        floor = row
        while floor > first and not flags[floor] & FIRST:
            floor -= 1
            if floor not in flags:
                return i

        steps = [row]  # the episode's steps from `row` on, as far as they are needed
        while not flags[steps[-1]] & (TERMINATED | TRUNCATED):
            r = steps[-1] + 1
            if r not in flags or flags[r] & (NO_STEP | FIRST) or (n > 0 and len(steps) == n + 1):
                break
            steps.append(r)
        behind = steps[-1] + 1
        if behind < newest and behind not in flags:
            return i
        longer = 0 < n < len(steps)
        over = flags.get(behind, 0) if behind < stop else None
        if longer:
            end, k, final = 0, n, True
        elif flags[steps[-1]] & (TERMINATED | TRUNCATED):
            end, k, final = flags[steps[-1]] & 3, len(steps), bool((over or 0) & OBSERVATION_ONLY)
        elif over is None and seen.live_base[slot] >= 0:
            if n != len(steps) or whole or behind >= seen.rows_of(OBSERVED, slot, lane):
                return i
            end, k, final = 0, n, True
        elif over is not None and over & NO_STEP:
            end = (over & 3) | (TRUNCATED if over & CUT else 0)
            k, final = len(steps), bool(over & OBSERVATION_ONLY)
        else:
            end, k, final = TRUNCATED, len(steps), False
        if end and not end & TERMINATED and not final:
            end, k, final = 0, k - 1, True
        if k == 0:
            return i
        after = row + k
        stops = after + 1 if final else 0, after + 1 if after in steps else 0
        windows[:OWN, i] = slot, lane, row, floor, after, *stops, k, after + final
        windows[OWN_STOP:, i] = stop, *seen.folder(slot, lane)
        ends[i] = end | (flags[row] & (FIRST | CUT))
    return -1


def _find_steps(
    ids: Ints,
    record: Ints,
    table: tuple[Ints, Ints, Ints, Ints],
    windows: Ints,
    own: NDArray[np.uint8],
    behind: NDArray[np.uint8],
) -> int:
    """Do what `find_windows` does for windows of one row, id by id."""
    seen = Frozen.of(record)
    for i, step_id in enumerate(ids.tolist()):
        place = seen.visible_row(step_id)
        if place is None:
            return i
        slot, lane, row = place
        stop = seen.rows_of(COMMITTED, slot, lane)
        found = []
        for r in range(row, min(row + 2, stop)):
            address = row_address(seen.folder(slot, lane), r, *table, 1)
            if not address:
                return i
            found.append(ctypes.string_at(address, 1)[0])
        if found[0] & NO_STEP:
            return i
        windows[:5, i], windows[OWN_STOP, i] = (slot, lane, row, row, row + 1), stop
        windows[FOLDER : BEFORE + 1, i] = seen.folder(slot, lane)
        own[i], behind[i] = (*found, 0)[:2]
    return -1
