"""Make the next snapshot of a store that hides what it keeps no longer, in one call: see `advancing`."""

from diskreplay.ids import Ints

from . import advancing, following as live, frozen, hiding, jit, packed
from .freeze import freeze

if jit.IS_COMPILED:
    from .follow import follow
    from .hide_oldest import hide_oldest
else:
    from .following import follow_plain as follow
    from .hiding import hide_oldest_plain as hide_oldest


@jit.kernel("int", "ints2", "int", "out_ints", "out_ints")
def advance_hiding(tables: Ints, until: int, newer: Ints, record: Ints) -> int:
    """Do what `advance` does, and hide what is more than hidden[CAPACITY] steps, or was published before `until`.

    Where anything was hidden, bit HIDDEN of found[CHANGED] is set, and `newer` comes in place of the first rows before.
    """
    head, found = packed.ints(tables, advancing.HEAD), packed.ints(tables, advancing.FOUND)
    hidden, origin = packed.ints(tables, advancing.HIDDEN), head[frozen.ORIGIN]
    status = follow(tables, origin, found)
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
        if hide_oldest(tables, origin, found[live.ENDED], hidden) != hiding.DONE:
            return advancing.UNMAPPED
        hidden[hiding.PAST] = hidden[hiding.UNTIL]
    if hidden[hiding.LAST] >= 0:
        # Steps of one call have the same time, and some of them may be left.
        hidden[hiding.PAST] = max(hidden[hiding.PAST], hidden[hiding.LAST])
        hidden[hiding.BEHIND] = max(hidden[hiding.BEHIND], hidden[hiding.LAST] + 1)
        hidden[hiding.REACHED] = max(hidden[hiding.REACHED], hidden[hiding.PAST], hidden[hiding.BEHIND])
        hidden[hiding.LAST] = -1
        found[live.CHANGED] |= live.HIDDEN
        source = tables[advancing.BY_PLACE, packed.ADDRESS] + 8 * hiding.OLDEST * newer.size
        jit.copy_bytes(newer.ctypes.data, source, 8 * newer.size)
        hidden[hiding.OLDEST_AT] = newer.ctypes.data
    if found[live.CHANGED] != 0:
        growing, rows = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
        oldest = jit.ints_at(hidden[hiding.OLDEST_AT], rows.shape[1])
        freeze(growing, rows, oldest, hidden[hiding.REACHED], head, record)
    return live.DONE
