"""What a sampler has done, in numbers."""

from collections import Counter
from collections.abc import Mapping


class Statistics:
    """Counts of one sampler, under its lock; `batches` and `steps` were delivered by the run that is resumed."""

    def __init__(self, batches: int = 0, steps: int = 0) -> None:
        self.resume(batches, steps)
        self._planning = 0.0
        self._elsewhere = 0.0
        self._kept: Counter[str] = Counter()

    def resume(self, batches: int, steps: int) -> None:
        """Count on from the counts of another run."""
        self.batches = batches
        self._steps = steps
        self._steps_before = steps
        self._first: float | None = None
        self._last = 0.0

    def count(self, steps: int, started: float, planned: float, delivered: float) -> None:
        """Add a batch; the times are readings of one clock in seconds."""
        if self._first is None:
            self._first = self._last = started
        self.batches += 1
        self._steps += steps
        self._planning += planned - started
        self._elsewhere += started - self._last
        self._last = delivered

    def keep(self, seconds: Mapping[str, float]) -> None:
        """Add to what `report` is given later."""
        self._kept.update(seconds)

    def state_dict(self) -> dict[str, int]:
        """Return the counts that a resumed run starts from."""
        return {"batches": self.batches, "steps": self._steps}

    def report(self, stored_steps: int, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return all of it, and the `seconds` of where batches are made; see `Sampler.stats`."""
        elapsed = self._last - self._first if self._first is not None else 0.0
        return {
            "batches": self.batches,
            "steps": self._steps,
            "steps_per_second": (self._steps - self._steps_before) / elapsed if elapsed > 0 else 0.0,
            "replay_ratio": self._steps / stored_steps if stored_steps else 0.0,
            "seconds_planning": self._planning,
            "seconds_elsewhere": self._elsewhere,
            **{name: spent + self._kept[name] for name, spent in seconds.items()},
        }
