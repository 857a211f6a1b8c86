"""Plain twins of the kernels of `kernels.advance`."""

from diskreplay.ids import Ints, places_of
from diskreplay.kernels import advancing, following, following as live, frozen, hiding, jit, packed
from diskreplay.kernels.following import DONE, follow_plain
from diskreplay.kernels.frozen import ALL_LANES, HEAD, LIVE, OLDEST, REACHED, ROWS
from diskreplay.kernels.hiding import hide_oldest_plain


def freeze_plain(growing: Ints, rows: Ints, oldest: Ints, reached: int, head: Ints, record: Ints) -> None:
    """Do what `freeze` does."""
    record[:HEAD] = head
    record[[REACHED, ALL_LANES, OLDEST, ROWS]] = reached, rows.shape[1], oldest.ctypes.data, rows.ctypes.data
    record[LIVE] = record.ctypes.data + 8 * HEAD
    live = record[HEAD:].reshape(following.LANE_ROWS, -1)
    live[:] = rows[:, places_of(growing[:, following.PLACE], growing[:, following.LANES])]


def freeze_lanes(tables: Ints, record: Ints) -> None:
    """Write the record of a snapshot."""
    growing, rows = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
    head, hidden = packed.ints(tables, advancing.HEAD), packed.ints(tables, advancing.HIDDEN)
    oldest = jit.ints_at(hidden[hiding.OLDEST_AT], rows.shape[1])
    freeze_plain(growing, rows, oldest, hidden[hiding.REACHED], head, record)


def advance_plain(tables: Ints, until: int, newer: Ints, record: Ints) -> int:
    """Do what `advance` does."""
    origin, found = int(packed.ints(tables, advancing.HEAD)[frozen.ORIGIN]), packed.ints(tables, advancing.FOUND)
    status = follow_plain(tables, origin, found)
    if status == DONE and found[live.CHANGED]:
        freeze_lanes(tables, record)
    return status


def advance_hiding_plain(tables: Ints, until: int, newer: Ints, record: Ints) -> int:
    """Do what `advance_hiding` does."""
    origin = int(packed.ints(tables, advancing.HEAD)[frozen.ORIGIN])
    found, hidden = packed.ints(tables, advancing.FOUND), packed.ints(tables, advancing.HIDDEN)
    status = follow_plain(tables, origin, found)
    if status != DONE:
        return status
    kept = hidden[hiding.CAPACITY]
    steps = int(found[live.ENDED_STEPS] + found[live.OPEN_STEPS] - hidden[hiding.HIDDEN])
    hidden[hiding.COUNT] = steps - kept if kept >= 0 else 0
    hidden[hiding.UNTIL] = max(until, hidden[hiding.PAST])
    # Or it goes on with what it has begun, before the time of a step was mapped.
    if hidden[hiding.COUNT] > 0 or until > hidden[hiding.PAST] or hidden[hiding.LAST] >= 0:
        if not hidden[hiding.READY]:
            return advancing.UNREADY
        if hide_oldest_plain(tables, origin, int(found[live.ENDED]), hidden):
            return advancing.UNMAPPED
        hidden[hiding.PAST] = hidden[hiding.UNTIL]
        hidden[hiding.HIDDEN_BEFORE] = max(hidden[hiding.HIDDEN_BEFORE], hidden[hiding.UNTIL])
    if hidden[hiding.LAST] >= 0:
        hidden[hiding.PAST] = max(hidden[hiding.PAST], hidden[hiding.LAST])
        hidden[hiding.HIDDEN_BEFORE] = max(hidden[hiding.HIDDEN_BEFORE], hidden[hiding.LAST] + 1)
        hidden[hiding.REACHED] = max(hidden[hiding.REACHED], hidden[hiding.HIDDEN_BEFORE])
        hidden[hiding.LAST], found[live.CHANGED] = -1, found[live.CHANGED] | live.HIDDEN
        newer[:] = packed.ints2(tables, advancing.BY_PLACE)[hiding.OLDEST]
        hidden[hiding.OLDEST_AT] = newer.ctypes.data
    if found[live.CHANGED]:
        freeze_lanes(tables, record)
    return DONE
