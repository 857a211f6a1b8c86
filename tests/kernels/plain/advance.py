"""Plain twins of the kernels of `kernels.advance`."""

from diskreplay.ids import Ints
from diskreplay.kernels import advancing, following as live, frozen, hiding, jit, packed
from diskreplay.kernels.following import DONE, follow_plain
from tests.kernels.plain.freeze import freeze_plain


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
