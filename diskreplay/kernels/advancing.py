"""How the next snapshot of a store is made: the tables of `advance` and `advance_hiding`, and their plain twins.

Both follow lanes and then make the record of a snapshot, if anything has changed. `advance_hiding` hides in between
what is more than a store keeps. Whatever it needs meanwhile, it says so and is called again.
"""

from collections.abc import Callable

from . import following as live, hiding
from .following import DONE, Ints, follow_plain
from .frozen import freeze_plain
from .hiding import hide_oldest_plain
from .packed import pack

UNREADY, UNMAPPED = range(5, 7)
"""What `advance_hiding` returns beside the results of `follow`: the arrays of `hide_oldest` were not made yet; the time
of step NEEDED is not mapped."""


# The record of what `advance` reads, see `packed`, and what `advance_hiding` reads as well.
(
    GROWING, FIRST_CHUNK, CHUNKS, SHIFT, BASES, FIRST_TIMES, TIME_CHUNKS, TIME_SHIFT, TIMES, ROWS, ENDED, HEAD,
    LANES, LANE_BASE, CLOCKS, FOLDERS, FIRST_ROWS, HEAP, BY_PLACE, FOLLOWING,
) = range(20)  # fmt: skip

Arrays = tuple[Ints, ...]


def tables_of(kernel: Callable[..., int], arrays: Arrays) -> Ints | Arrays:
    """Return the arrays as a kernel takes them: their record, or as they are for a plain twin."""
    return arrays if kernel in (advance_plain, advance_hiding_plain) else pack(*arrays)


def _follow(arrays: Arrays, origin: int, found: Ints) -> int:
    before, (rows, ended) = arrays[:ROWS], arrays[ROWS:HEAD]
    return follow_plain(*before, origin, rows, ended, found)  # type: ignore[call-arg, arg-type]


def advance_plain(
    arrays: Arrays, origin: int, found: Ints, hidden: Ints, until: int, oldest: Ints, newer: Ints, record: Ints
) -> int:
    """Do what `advance` does."""
    status = _follow(arrays, origin, found)
    if status == DONE and found[live.CHANGED]:
        freeze_plain(arrays[GROWING], arrays[ROWS], oldest, hidden[hiding.REACHED], arrays[HEAD], record)
    return status


def advance_hiding_plain(
    arrays: Arrays, origin: int, found: Ints, hidden: Ints, until: int, oldest: Ints, newer: Ints, record: Ints
) -> int:
    """Do what `advance_hiding` does."""
    growing, times, rows, ended = arrays[GROWING], arrays[FIRST_TIMES:ROWS], arrays[ROWS], arrays[ENDED]
    status = _follow(arrays, origin, found)
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
        lines, (heap, by_place, following) = ended[: found[live.ENDED]], arrays[HEAP:]
        segments = *arrays[LANES:HEAP], *times, heap, by_place, following
        if hide_oldest_plain(lines, growing, rows, origin, *segments, hidden):  # type: ignore[call-arg]
            return UNMAPPED
        hidden[hiding.PAST] = hidden[hiding.UNTIL]
    if hidden[hiding.LAST] >= 0:
        hidden[hiding.PAST] = max(hidden[hiding.PAST], hidden[hiding.LAST])
        hidden[hiding.BEHIND] = max(hidden[hiding.BEHIND], hidden[hiding.LAST] + 1)
        hidden[hiding.REACHED] = max(hidden[hiding.REACHED], hidden[hiding.PAST], hidden[hiding.BEHIND])
        hidden[hiding.LAST], found[live.CHANGED] = -1, found[live.CHANGED] | live.HIDDEN
        newer[:] = arrays[BY_PLACE][hiding.OLDEST]
        freeze_plain(growing, rows, newer, hidden[hiding.REACHED], arrays[HEAD], record)
    elif found[live.CHANGED]:
        freeze_plain(growing, rows, oldest, hidden[hiding.REACHED], arrays[HEAD], record)
    return DONE
