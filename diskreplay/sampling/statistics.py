"""What a sampler has done, in numbers."""

from collections import Counter
from collections.abc import Mapping
from copy import copy


class Statistics:
    """Counts of one sampler, which adds to them under its lock.

    ``batches`` and ``steps`` were delivered, by the run that is resumed too; ``planning`` and ``elsewhere`` are seconds
    in which batches were planned, and between the calls. The first batch was asked for at ``first``, the last one was
    delivered at ``last``: readings of one clock in seconds, 0 before.
    """

    def __init__(self) -> None:
        self.planning = self.elsewhere = 0.0
        self.first = self.last = 0.0
        self.batches = self.steps = self._steps_before = 0
        self._kept: Counter[str] = Counter()

    def resumed(self, batches: int, steps: int) -> "Statistics":
        """Return statistics that count on from the counts of another run."""
        new = copy(self)
        new.batches, new.steps, new._steps_before, new.first, new.last = batches, steps, steps, 0.0, 0.0
        return new

    def keep(self, seconds: Mapping[str, float]) -> None:
        """Add to what `report` is given later."""
        self._kept.update(seconds)

    def state_dict(self) -> dict[str, int]:
        """Return the counts that a resumed run starts from."""
        return {"batches": self.batches, "steps": self.steps}

    def report(self, stored_steps: int, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return all of it, and the `seconds` of where batches are made; see `Sampler.stats`."""
        elapsed = self.last - self.first
        return {
            "batches": self.batches,
            "steps": self.steps,
            "steps_per_second": (self.steps - self._steps_before) / elapsed if elapsed > 0 else 0.0,
            "replay_ratio": self.steps / stored_steps if stored_steps else 0.0,
            "seconds_planning": self.planning,
            "seconds_elsewhere": self.elsewhere,
            **{name: spent + self._kept[name] for name, spent in seconds.items()},
        }
