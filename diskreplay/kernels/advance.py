"""Make the next snapshot of a store in one call: see `advancing`.

Each call from Python costs as much as following a step, hiding one, or making the record.
"""

from . import advancing, following as live, hiding, jit, packed
from .follow import follow
from .following import Ints
from .freeze import freeze


@jit.kernel("int", "ints2", "int", "out_ints", "out_ints", "int", "ints", "out_ints", "out_ints")
def advance(
    tables: Ints, origin: int, found: Ints, hidden: Ints, until: int, oldest: Ints, newer: Ints, record: Ints
) -> int:
    """Follow lanes, and write the record of a snapshot if found[CHANGED]; see `follow` and `advancing` for the result.

    For `tables` see `advancing.GROWING`: HEAD is what the record begins with. `oldest` is the first row of each lane
    that is not hidden: none of an episode that began at hidden[REACHED] or later. `until` and `newer` are there for
    `advance_hiding`, which is called alike.
    """
    growing, rows = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
    status = follow_tables(tables, origin, found)
    if status == live.DONE and found[live.CHANGED] != 0:
        freeze(growing, rows, oldest, hidden[hiding.REACHED], packed.ints(tables, advancing.HEAD), record)
    return status


@jit.inner
def follow_tables(tables: Ints, origin: int, found: Ints) -> int:
    """Call `follow` with the arrays of a record."""
    return follow(
        packed.ints2(tables, advancing.GROWING), packed.ints(tables, advancing.FIRST_CHUNK),
        packed.ints(tables, advancing.CHUNKS), packed.ints(tables, advancing.SHIFT),
        packed.ints(tables, advancing.BASES), packed.ints(tables, advancing.FIRST_TIMES),
        packed.ints(tables, advancing.TIME_CHUNKS), packed.ints(tables, advancing.TIME_SHIFT),
        packed.ints(tables, advancing.TIMES), origin, packed.ints2(tables, advancing.ROWS),
        packed.ints2(tables, advancing.ENDED), found,
    )  # fmt: skip
