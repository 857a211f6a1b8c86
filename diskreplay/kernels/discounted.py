"""Discounted sums of the rewards so far: R_t = r_t + gamma * R_{t-1}, in float64."""

from diskreplay.ids import Floats, Ints

from . import jit


@jit.kernel("none", "floats", "ints", "floats", "float", "out_floats")
def discounted(r: Floats, count: Ints, before: Floats, gamma: float, out: Floats) -> None:
    """Write R of each step of runs that lie one behind the other: `count` steps each, with R `before` the first."""
    t = 0
    for run in range(count.size):
        total = before[run]
        for _ in range(min(count[run], r.size - t)):
            total = r[t] + gamma * total
            out[t] = total
            t += 1
