"""Make the next snapshot of a store in one call: see `advancing`.

Each call from Python costs as much as following a step, hiding one, or making the record.
"""

from . import advancing, following as live, hiding, jit, packed
from .following import Ints
from .freeze import freeze

if jit.IS_COMPILED:
    from .follow import follow
else:
    from .following import follow_plain as follow


@jit.kernel("int", "ints2", "int", "out_ints", "out_ints", "int", "ints", "out_ints", "out_ints")
def advance(
    tables: Ints, origin: int, found: Ints, hidden: Ints, until: int, oldest: Ints, newer: Ints, record: Ints
) -> int:
    """Follow lanes, and write the record of a snapshot if found[CHANGED]; see `follow` and `advancing` for the result.

    For `tables` see `advancing.GROWING`: HEAD is what the record begins with. `oldest` is the first row of each lane
    that is not hidden: none of an episode that began at hidden[REACHED] or later. `until` and `newer` are there for
    `advance_hiding`, which is called alike.
    """
    status = follow(tables, origin, found)
    if status == live.DONE and found[live.CHANGED] != 0:
        growing, rows = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
        freeze(growing, rows, oldest, hidden[hiding.REACHED], packed.ints(tables, advancing.HEAD), record)
    return status
