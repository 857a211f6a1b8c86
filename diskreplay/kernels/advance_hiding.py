"""Make the next snapshot of a store that hides what it keeps no longer, in one call: see `advancing`."""

import numpy as np

from diskreplay.ids import EPISODE_COLUMNS

from . import advancing, following as live, hiding, jit, packed
from .advance import follow_tables
from .following import Ints
from .freeze import freeze
from .hide_oldest import hide_oldest


@jit.kernel("int", "ints2", "int", "out_ints", "out_ints", "int", "ints", "out_ints", "out_ints")
def advance_hiding(
    tables: Ints, origin: int, found: Ints, hidden: Ints, until: int, oldest: Ints, newer: Ints, record: Ints
) -> int:
    """Do what `advance` does, and hide what is more than hidden[CAPACITY] steps, or was published before `until`.

    Where anything was hidden, bit HIDDEN of found[CHANGED] is set, and `newer` comes in place of `oldest`.
    """
    growing, rows = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
    by_place, head = packed.ints2(tables, advancing.BY_PLACE), packed.ints(tables, advancing.HEAD)
    status = follow_tables(tables, origin, found)
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
        lines = jit.ints2_at(tables[advancing.ENDED, packed.ADDRESS], found[live.ENDED], EPISODE_COLUMNS)
        status = hide_oldest(
            lines, growing, rows, origin, packed.ints(tables, advancing.LANES),
            packed.ints(tables, advancing.LANE_BASE), packed.ints(tables, advancing.CLOCKS),
            packed.ints(tables, advancing.FOLDERS), packed.ints(tables, advancing.FIRST_ROWS),
            packed.ints(tables, advancing.FIRST_TIMES), packed.ints(tables, advancing.TIME_CHUNKS),
            packed.ints(tables, advancing.TIME_SHIFT), packed.ints(tables, advancing.TIMES),
            packed.ints2(tables, advancing.HEAP), by_place, packed.ints(tables, advancing.FOLLOWING), hidden,
        )  # fmt: skip
        if status != hiding.DONE:
            return advancing.UNMAPPED
        hidden[hiding.PAST] = hidden[hiding.UNTIL]
    if hidden[hiding.LAST] >= 0:
        # Steps of one call have the same time, and some of them may be left.
        hidden[hiding.PAST] = max(hidden[hiding.PAST], hidden[hiding.LAST])
        hidden[hiding.BEHIND] = max(hidden[hiding.BEHIND], hidden[hiding.LAST] + 1)
        hidden[hiding.REACHED] = max(hidden[hiding.REACHED], hidden[hiding.PAST], hidden[hiding.BEHIND])
        hidden[hiding.LAST] = -1
        found[live.CHANGED] |= live.HIDDEN
        for place in range(newer.size):
            newer[np.uint64(place)] = by_place[hiding.OLDEST, np.uint64(place)]
        freeze(growing, rows, newer, hidden[hiding.REACHED], head, record)
    elif found[live.CHANGED] != 0:
        freeze(growing, rows, oldest, hidden[hiding.REACHED], head, record)
    return live.DONE
