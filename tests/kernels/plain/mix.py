"""Plain twins of the kernels of `kernels.mix`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import mixed


def fractions(key: int, count: int) -> NDArray[np.float64]:
    """Return what `fraction` does for each of the first `count` numbers."""
    state = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53
