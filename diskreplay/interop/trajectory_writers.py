"""Writers for any number of trajectories that are collected at the same time."""

from collections.abc import Hashable
from typing import Any

import diskreplay as dr
from diskreplay.closing import Kept

# The maximum number of open trajectories. If one more trajectory begins, the trajectory with the oldest last step is
# cut, since its collector has probably stopped.
MAX_TRAJECTORIES = 256


class TrajectoryWriters:
    """One writer for each open trajectory. A later trajectory reuses the writer of an ended trajectory.

    New writers are added to ``kept``. The owner closes the objects in this list.
    """

    def __init__(self, kept: Kept, durability: float | str) -> None:
        self._kept = kept
        self._durability: Any = durability
        self._writers: list[dr.Writer] = []
        self._free: list[dr.Writer] = []
        self._open: dict[Hashable, dr.Writer] = {}  # the trajectory with the oldest last step is first

    def of(self, store: dr.Store, trajectory: Hashable) -> dr.Writer:
        """Return the writer of a trajectory."""
        writer = self._open.pop(trajectory, None)
        if writer is None and self._free:
            writer = self._free.pop()
        elif writer is None and len(self._open) == MAX_TRAJECTORIES:
            writer = self._open.pop(next(iter(self._open)))
            writer.end_episode()
        elif writer is None:
            writer = store.writer(durability=self._durability)
            writer.leave_at_exit()
            self._kept.append(writer)
            self._writers.append(writer)
        self._open[trajectory] = writer
        return writer

    def ended(self, trajectory: Hashable) -> None:
        self._free.append(self._open.pop(trajectory))

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Close the writers, which cuts the open trajectories. Later trajectories get new writers."""
        for writer in self._writers:
            self._kept.remove(writer)
            writer.close()
        self._writers, self._free, self._open = [], [], {}
