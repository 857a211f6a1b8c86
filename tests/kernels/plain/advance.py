"""Plain twins of the kernels of `kernels.advance`."""

from diskreplay.ids import Ints
from diskreplay.kernels import advancing, following as live, hiding, packed
from diskreplay.kernels.following import DONE, follow_plain
from diskreplay.kernels.frozen import freeze_plain


def frozen(tables: Ints, oldest: Ints, hidden: Ints, record: Ints) -> None:
    """Write the record of a snapshot."""
    growing, rows = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
    freeze_plain(growing, rows, oldest, hidden[hiding.REACHED], packed.ints(tables, advancing.HEAD), record)


def advance_plain(
    tables: Ints, origin: int, found: Ints, hidden: Ints, until: int, oldest: Ints, newer: Ints, record: Ints
) -> int:
    """Do what `advance` does."""
    status = follow_plain(tables, origin, found)
    if status == DONE and found[live.CHANGED]:
        frozen(tables, oldest, hidden, record)
    return status
