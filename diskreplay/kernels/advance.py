"""Make the next snapshot of a store in one call; see `advancing`.

A call from Python takes about as long as the work for one new step. So one call reads the new flags, hides the oldest
steps, and writes the record of the snapshot.
"""

from diskreplay.ids import Ints

from . import advancing, following as live, frozen, hiding, jit, packed

if jit.IS_COMPILED:
    from .following import follow
    from .hiding import hide_oldest
else:
    from .following import follow_plain as follow
    from .hiding import hide_oldest_plain as hide_oldest


@jit.kernel("none", "ints2", "ints2", "ints", "int", "ints", "out_ints")
def freeze(growing: Ints, rows: Ints, oldest: Ints, reached: int, head: Ints, record: Ints) -> None:
    """Write the record of a snapshot, see `frozen`: its head, and the columns of `rows` for the lanes that may grow.

    `head` has all numbers of the head except REACHED, ALL_LANES, OLDEST, ROWS and LIVE. `growing` and `rows` are the
    tables `growing` and `lanes` of `following`.
    """
    for column in range(frozen.HEAD):
        record[column] = head[column]
    record[frozen.REACHED], record[frozen.ALL_LANES] = reached, rows.shape[1]
    record[frozen.OLDEST], record[frozen.ROWS] = oldest.ctypes.data, rows.ctypes.data
    record[frozen.LIVE] = record.ctypes.data + 8 * frozen.HEAD
    at = record[frozen.LIVE]
    for which in range(growing.shape[0]):
        place, count = growing[which, live.PLACE], 8 * growing[which, live.LANES]
        for row in range(live.LANE_ROWS):
            source = record[frozen.ROWS] + 8 * (row * rows.shape[1] + place)
            jit.copy_bytes(at + 8 * row * head[frozen.LIVE_LANES], source, count)
        at += count


@jit.inner
def _freeze_lanes(tables: Ints, hidden: Ints, head: Ints, record: Ints) -> None:
    growing, rows = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
    oldest = jit.ints_at(hidden[hiding.OLDEST_AT], rows.shape[1])
    freeze(growing, rows, oldest, hidden[hiding.REACHED], head, record)


@jit.kernel("int", "ints2", "int", "out_ints", "out_ints")
def advance(tables: Ints, until: int, newer: Ints, record: Ints) -> int:
    """Call `follow` and return its result; if that is DONE and CHANGED is not 0, write the `record` of a new snapshot.

    For `tables` see `advancing.GROWING`. `until` and `newer` are ignored; `advance` takes them only because
    `advance_hiding` has the same parameters.
    """
    head, found = packed.ints(tables, advancing.HEAD), packed.ints(tables, advancing.FOUND)
    hidden, status = packed.ints(tables, advancing.HIDDEN), follow(tables, head[frozen.ORIGIN], found)
    if status == live.DONE and found[live.CHANGED] != 0:
        _freeze_lanes(tables, hidden, head, record)
    return status


@jit.kernel("int", "ints2", "int", "out_ints", "out_ints")
def advance_hiding(tables: Ints, until: int, newer: Ints, record: Ints) -> int:
    """Do what `advance` does, and hide steps that were published before `until` or that exceed the store's capacity.

    The array HIDDEN of `tables` has the number CAPACITY: the oldest steps are hidden until at most CAPACITY steps are
    visible. If any step was hidden, `newer` gets the first visible row of each lane, and the bit `following.HIDDEN` of
    CHANGED is set. For the result see `following.DONE` and `advancing.UNREADY`.
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
    # hidden[LAST] is not -1 if an earlier call hid steps and then returned UNMAPPED.
    if hidden[hiding.COUNT] > 0 or until > hidden[hiding.PAST] or hidden[hiding.LAST] >= 0:
        if hidden[hiding.READY] == 0:
            return advancing.UNREADY
        if hide_oldest(tables, origin, found[live.ENDED], hidden) != hiding.DONE:
            return advancing.UNMAPPED
        hidden[hiding.PAST] = hidden[hiding.UNTIL]
        hidden[hiding.HIDDEN_BEFORE] = max(hidden[hiding.HIDDEN_BEFORE], hidden[hiding.PAST])
    if hidden[hiding.LAST] >= 0:
        hiding.note_last(hidden)
        found[live.CHANGED] |= live.HIDDEN
        source = tables[advancing.BY_PLACE, packed.ADDRESS] + 8 * hiding.OLDEST * newer.size
        jit.copy_bytes(newer.ctypes.data, source, 8 * newer.size)
        hidden[hiding.OLDEST_AT] = newer.ctypes.data
    if found[live.CHANGED] != 0:
        _freeze_lanes(tables, hidden, head, record)
    return live.DONE
