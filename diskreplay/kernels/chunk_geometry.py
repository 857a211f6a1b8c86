"""How the rows of a segment are divided into chunks, as one number of a table: its ``shift``. It needs no numba.

The low bits are the binary logarithm of a chunk's rows. Most segments have every lane in each chunk: lane after lane,
so many rows of each. In a pack each lane has chunks of its own, and the other bits say how many places a lane has in
the table: row ``t`` of lane ``l`` is at place ``l * places + (t >> bits)``, and the address of a place is that of the
first row of its lane that it holds.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

BITS = 255
"""What of a number is the binary logarithm of the rows of a chunk."""

PLACES = 8
"""From which bit on it has the places of a lane; 0 where a chunk has rows of every lane."""

WHOLE_LANE = 40
"""The logarithm where each lane is in one chunk: no lane has so many rows."""


def apart(bits: int, places: Ints) -> Ints:
    """Return the numbers of segments whose lanes have so many chunks of ``2 ** bits`` rows each, of their own."""
    return places << PLACES | bits
