"""The field `time` of batches, which is there on request: when each step was published."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS
from diskreplay.store.snapshot import Snapshot
from diskreplay.views.base import Ints, Leaf, Path

SOURCE = "time"
PATH: Path = ("time",)
LEAF = Leaf(PATH, np.dtype("float64"))


def to_seconds(snapshot: Snapshot, ids: Ints, times: NDArray[np.float64]) -> None:
    """Make seconds since the epoch of the rows of `SOURCE` that were copied there, (n,) or (n, length).

    Zeros, which stand for padding, stay zeros. `ids` are those of the items, (n,).
    """
    raw = times.view(np.int64)
    wall = snapshot.clocks[(ids >> POSITION_BITS) - snapshot.origin].reshape(-1, *[1] * (times.ndim - 1))
    times[...] = np.where(raw == 0, 0.0, (raw + wall) / 1e9)
