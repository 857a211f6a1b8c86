"""What a sampler has done, in numbers."""


class Statistics:
    """Counts of one sampler, under its lock."""

    def __init__(self) -> None:
        self.batches = 0
        self._steps = 0
        self._planning = 0.0
        self._gathering = 0.0
        self._first: float | None = None
        self._last = 0.0

    def count(self, steps: int, started: float, planned: float, delivered: float) -> None:
        """Add a batch; the times are readings of one clock in seconds."""
        if self._first is None:
            self._first = started
        self.batches += 1
        self._steps += steps
        self._planning += planned - started
        self._gathering += delivered - planned
        self._last = delivered

    def report(self, stored_steps: int, copying: float) -> dict[str, float]:
        """Return all of it; see `Sampler.stats`."""
        elapsed = self._last - self._first if self._first is not None else 0.0
        return {
            "batches": self.batches,
            "steps": self._steps,
            "steps_per_second": self._steps / elapsed if elapsed > 0 else 0.0,
            "replay_ratio": self._steps / stored_steps if stored_steps else 0.0,
            "seconds_planning": self._planning,
            "seconds_gathering": self._gathering - copying,
            "seconds_copying": copying,
        }
