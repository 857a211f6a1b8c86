"""How the next snapshot of a store is made: the tables of `advance` and `advance_hiding`, and their plain twins.

Both follow lanes and then make the record of a snapshot, if anything has changed. `advance_hiding` hides in between
what is more than a store keeps. Whatever it needs meanwhile, it says so and is called again.
"""

from diskreplay.kernels import following as live, hiding
from diskreplay.kernels.following import DONE, Ints, follow_plain
from diskreplay.kernels.frozen import freeze_plain
from diskreplay.kernels.hiding import hide_oldest_plain

UNREADY, UNMAPPED = range(5, 7)
"""What `advance_hiding` returns beside the results of `follow`: the arrays of `hide_oldest` were not made yet; the time
of step NEEDED is not mapped."""


def advance_plain(
    growing: Ints, first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, first_times: Ints, time_chunks: Ints,
    time_shift: Ints, times: Ints, origin: int, rows: Ints, ended: Ints, found: Ints, head: Ints, hidden: Ints,
    until: int, oldest: Ints, newer: Ints, record: Ints,
) -> int:  # fmt: skip
    """Do what `advance` does."""
    tables = (first_chunk, chunks, shift, bases), (first_times, time_chunks, time_shift, times)
    status = follow_plain(growing, *tables[0], *tables[1], origin, rows, ended, found)
    if status == DONE and found[live.CHANGED]:
        freeze_plain(growing, rows, oldest, hidden[hiding.REACHED], head, record)
    return status


def advance_hiding_plain(
    growing: Ints, first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, first_times: Ints, time_chunks: Ints,
    time_shift: Ints, times: Ints, origin: int, rows: Ints, ended: Ints, found: Ints, head: Ints, hidden: Ints,
    lanes: Ints, lane_base: Ints, clocks: Ints, folders: Ints, first_rows: Ints, heap: Ints, by_place: Ints,
    following: Ints, until: int, oldest: Ints, newer: Ints, record: Ints,
) -> int:  # fmt: skip
    """Do what `advance_hiding` does."""
    tables = (first_chunk, chunks, shift, bases), (first_times, time_chunks, time_shift, times)
    status = follow_plain(growing, *tables[0], *tables[1], origin, rows, ended, found)
    if status != DONE:
        return status
    kept = hidden[hiding.CAPACITY]
    steps = int(found[live.ENDED_STEPS] + found[live.OPEN_STEPS] - hidden[hiding.HIDDEN])
    hidden[hiding.COUNT] = steps - kept if kept >= 0 else 0
    hidden[hiding.UNTIL] = max(until, hidden[hiding.PAST])
    # Or it goes on with what it has begun, before the time of a step was mapped.
    if hidden[hiding.COUNT] > 0 or until > hidden[hiding.PAST] or hidden[hiding.LAST] >= 0:
        if not hidden[hiding.READY]:
            return UNREADY
        segments = origin, lanes, lane_base, clocks, folders, first_rows
        lines = ended[: found[live.ENDED]]
        if hide_oldest_plain(lines, growing, rows, *segments, *tables[1], heap, by_place, following, hidden):
            return UNMAPPED
        hidden[hiding.PAST] = hidden[hiding.UNTIL]
    if hidden[hiding.LAST] >= 0:
        hidden[hiding.PAST] = max(hidden[hiding.PAST], hidden[hiding.LAST] + 1)
        hidden[hiding.REACHED] = max(hidden[hiding.REACHED], hidden[hiding.PAST])
        hidden[hiding.LAST], found[live.CHANGED] = -1, found[live.CHANGED] | live.HIDDEN
        newer[:] = by_place[hiding.OLDEST]
        freeze_plain(growing, rows, newer, hidden[hiding.REACHED], head, record)
    elif found[live.CHANGED]:
        freeze_plain(growing, rows, oldest, hidden[hiding.REACHED], head, record)
    return DONE
