"""Make the next snapshot of a store in one call: see `advancing`.

Each call from Python costs as much as following a step, hiding one, or making the record.
"""

from diskreplay.ids import Ints

from . import advancing, following as live, frozen, hiding, jit, packed
from .freeze import freeze

if jit.IS_COMPILED:
    from .follow import follow
else:
    from .following import follow_plain as follow


@jit.kernel("int", "ints2", "int", "out_ints", "out_ints")
def advance(tables: Ints, until: int, newer: Ints, record: Ints) -> int:
    """Follow lanes, and write the record of a snapshot if found[CHANGED]; see `follow` and `advancing` for the result.

    For `tables` see `advancing.GROWING`. `until` and `newer` are there for `advance_hiding`, which is called alike.
    """
    head, found = packed.ints(tables, advancing.HEAD), packed.ints(tables, advancing.FOUND)
    hidden, status = packed.ints(tables, advancing.HIDDEN), follow(tables, head[frozen.ORIGIN], found)
    if status == live.DONE and found[live.CHANGED] != 0:
        growing, rows = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
        oldest = jit.ints_at(hidden[hiding.OLDEST_AT], rows.shape[1])
        freeze(growing, rows, oldest, hidden[hiding.REACHED], head, record)
    return status
