"""The plain twin of `follow`: a store follows with it where numba is missing."""

from diskreplay.kernels.following import follow_plain as follow_plain
