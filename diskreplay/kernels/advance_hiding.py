"""Make the next snapshot of a store that hides what it keeps no longer, in one call: see `advancing`."""

import numpy as np

from diskreplay.ids import EPISODE_COLUMNS
from diskreplay.kernels import advancing, following as live, hiding, jit
from diskreplay.kernels.follow import follow
from diskreplay.kernels.following import Ints
from diskreplay.kernels.freeze import freeze
from diskreplay.kernels.hide_oldest import hide_oldest

_follow, _hide_oldest, _freeze = jit.apart(follow), jit.apart(hide_oldest), jit.apart(freeze)


@jit.kernel(
    "int", "ints2", *["ints"] * 8, "int", "out_ints2", "out_ints2", "out_ints", "ints", "out_ints", *["ints"] * 5,
    "out_ints2", "out_ints2", "out_ints", "int", "ints", "out_ints", "out_ints",
)  # fmt: skip
def advance_hiding(
    growing: Ints, first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, first_times: Ints, time_chunks: Ints,
    time_shift: Ints, times: Ints, origin: int, rows: Ints, ended: Ints, found: Ints, head: Ints, hidden: Ints,
    lanes: Ints, lane_base: Ints, clocks: Ints, folders: Ints, first_rows: Ints, heap: Ints, by_place: Ints,
    following: Ints, until: int, oldest: Ints, newer: Ints, record: Ints,
) -> int:  # fmt: skip
    """Do what `advance` does, and hide what is more than hidden[CAPACITY] steps, or was published before `until`.

    Where anything was hidden, bit HIDDEN of found[CHANGED] is set, and `newer` comes in place of `oldest`.
    """
    status = _follow(
        growing, first_chunk, chunks, shift, bases, first_times, time_chunks, time_shift, times, origin, rows, ended,
        found,
    )  # fmt: skip
    if status != live.DONE:
        return status
    kept = hidden[hiding.CAPACITY]
    steps = found[live.ENDED_STEPS] + found[live.OPEN_STEPS] - hidden[hiding.HIDDEN]
    hidden[hiding.COUNT] = steps - kept if kept >= 0 else 0
    hidden[hiding.UNTIL] = max(until, hidden[hiding.PAST])
    # Or it goes on with what it has begun, before the time of a step was mapped.
    if hidden[hiding.COUNT] > 0 or until > hidden[hiding.PAST] or hidden[hiding.LAST] >= 0:
        if hidden[hiding.READY] == 0:
            return advancing.UNREADY
        lines = jit.ints2_at(ended.ctypes.data, found[live.ENDED], EPISODE_COLUMNS)
        status = _hide_oldest(
            lines, growing, rows, origin, lanes, lane_base, clocks, folders, first_rows, first_times, time_chunks,
            time_shift, times, heap, by_place, following, hidden,
        )  # fmt: skip
        if status != hiding.DONE:
            return advancing.UNMAPPED
        hidden[hiding.PAST] = hidden[hiding.UNTIL]
    if hidden[hiding.LAST] >= 0:
        # Steps of one writer have different times, and of two the same only by accident.
        hidden[hiding.PAST] = max(hidden[hiding.PAST], hidden[hiding.LAST] + 1)
        hidden[hiding.REACHED] = max(hidden[hiding.REACHED], hidden[hiding.PAST])
        hidden[hiding.LAST] = -1
        found[live.CHANGED] |= live.HIDDEN
        for place in range(newer.size):
            newer[np.uint64(place)] = by_place[hiding.OLDEST, np.uint64(place)]
        _freeze(growing, rows, newer, hidden[hiding.REACHED], head, record)
    elif found[live.CHANGED] != 0:
        _freeze(growing, rows, oldest, hidden[hiding.REACHED], head, record)
    return live.DONE
