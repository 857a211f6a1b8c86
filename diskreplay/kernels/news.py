"""Whether lanes that grow have published anything since they were followed; see `kernels.follow`."""

import numpy as np

from diskreplay.kernels import jit
from diskreplay.kernels.following import (
    COMMITTED,
    COMMITTED_AT,
    OBSERVED,
    OBSERVED_AT,
    PLACE,
    Ints,
    has_news_plain as has_news_plain,
)

if jit.COMPILED:
    from diskreplay.kernels.jit import load_shared


@jit.kernel("int", "ints2", "ints2")
def has_news(growing: Ints, lanes: Ints) -> int:
    """Return 1 where the counters of a lane are not those that `follow` has noted, else 0."""
    for which in range(growing.shape[1]):
        column = np.uint64(which)
        at = np.uint64(growing[PLACE, column])
        observed, committed = load_shared(growing[OBSERVED_AT, column]), load_shared(growing[COMMITTED_AT, column])
        if committed != lanes[COMMITTED, at] or max(observed, committed) != lanes[OBSERVED, at]:
            return 1
    return 0
