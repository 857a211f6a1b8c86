"""The plain twin of `hide_oldest`: a store hides with it where numba is missing."""

from diskreplay.kernels.hiding import hide_oldest_plain as hide_oldest_plain
