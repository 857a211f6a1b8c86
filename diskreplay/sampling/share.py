"""Which ids are one rank's among several."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import mixed


class Share(NamedTuple):
    """The ids of one rank among `world_size`: by a hash, so that shares are even whatever lanes and windows they have.

    No two ranks share an id, each has one, and it stays there while the store grows.
    """

    rank: int = 0
    world_size: int = 1

    def contains(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which ids are in it."""
        found: NDArray[np.bool_] = mixed(ids.astype(np.uint64)) % np.uint64(self.world_size) == self.rank
        return found


EVERY_ID = Share()
