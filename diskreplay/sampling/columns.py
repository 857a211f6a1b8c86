"""Episodes as columns: what sampling needs to know of them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

OPEN = 128


class Columns(NamedTuple):
    """Columns of episodes, arrays of one length; see the snapshot for their meaning."""

    first: NDArray[np.int64]
    stride: NDArray[np.int64]
    steps: NDArray[np.int64]
    end: NDArray[np.uint8]
    obs_rows: NDArray[np.int64]

    @classmethod
    def of(cls, episodes: Any, start: int = 0) -> "Columns":
        """Take the columns from `start` on."""
        return cls(*(getattr(episodes, name)[start:] for name in cls._fields))

    def select(self, where: NDArray[np.bool_]) -> "Columns":
        """Keep the episodes at which `where` is true."""
        return Columns(*(getattr(self, name)[where] for name in self._fields))
