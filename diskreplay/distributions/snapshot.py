"""What populations and distributions need of a snapshot: they know nothing of stores."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import EpisodeTable, Ints
from diskreplay.kernels.runs import Visible


class Snapshot(Protocol):
    """A frozen set of steps; see `store.snapshot.Snapshot`."""

    reached: int
    record: Ints  # what kernels read of it; see `kernels.frozen`
    log: EpisodeTable  # the ended episodes in the order in which they were found
    oldest: Ints  # the first row of each lane that is not hidden

    def __len__(self) -> int:
        """Return the number of visible steps."""

    @property
    def generation(self) -> int:
        """Changes when positions in ``log`` do."""

    @property
    def origin(self) -> int:
        """The number of the first segment."""

    @property
    def lanes(self) -> Ints:
        """The lanes of each segment, 0 where it is gone."""

    @property
    def segments(self) -> object:
        """The same object in all snapshots between which no segment came, was sealed or went."""

    @property
    def open(self) -> EpisodeTable:
        """The other episodes."""

    @property
    def visible(self) -> Visible:
        """What is hidden of each lane."""

    def least_ids(self, ids: Ints) -> Ints:
        """Return the least id that is not hidden in the lane of each of these."""

    def holds(self, ids: Ints) -> NDArray[np.bool_]:
        """Tell which ids are those of visible steps."""

    @property
    def has_priorities(self) -> bool:
        """Whether any step may have been appended with a priority."""

    def times(self, ids: Ints) -> Ints:
        """Return when each step was published."""

    def episode_values(self, leaf: str, ids: Ints) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the value of an episode field for the ended episode of each step, and which have one."""
