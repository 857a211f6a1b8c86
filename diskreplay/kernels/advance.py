"""Make the next snapshot of a store in one call: see `advancing`.

Each call from Python costs as much as following a step, hiding one, or making the record.
"""

from diskreplay.kernels import following as live, hiding, jit
from diskreplay.kernels.follow import follow
from diskreplay.kernels.following import Ints
from diskreplay.kernels.freeze import freeze

_follow, _freeze = jit.apart(follow), jit.apart(freeze)


@jit.kernel(
    "int", "ints2", *["ints"] * 8, "int", "out_ints2", "out_ints2", "out_ints", "ints", "out_ints", "int", "ints",
    "out_ints", "out_ints",
)  # fmt: skip
def advance(
    growing: Ints, first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, first_times: Ints, time_chunks: Ints,
    time_shift: Ints, times: Ints, origin: int, rows: Ints, ended: Ints, found: Ints, head: Ints, hidden: Ints,
    until: int, oldest: Ints, newer: Ints, record: Ints,
) -> int:  # fmt: skip
    """Follow lanes, and write the record of a snapshot if found[CHANGED]; see `follow` and `advancing` for the result.

    `head` is what the record begins with, `oldest` the first row of each lane that is not hidden: none of an episode
    that began at hidden[REACHED] or later. `until` and `newer` are there for `advance_hiding`, which is called alike.
    """
    status = _follow(
        growing, first_chunk, chunks, shift, bases, first_times, time_chunks, time_shift, times, origin, rows, ended,
        found,
    )  # fmt: skip
    if status == live.DONE and found[live.CHANGED] != 0:
        _freeze(growing, rows, oldest, hidden[hiding.REACHED], head, record)
    return status
