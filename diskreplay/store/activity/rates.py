"""How fast a number changes, over the looks of the last seconds."""

from collections import deque


class Rate:
    """The change of a number a second, over a window of looks. Not thread-safe.

    Parameters
    ----------
    window_s : float
        Seconds that are looked back; the look before is always one of them.
    least_s : float
        Seconds between the looks that a rate needs.
    """

    def __init__(self, window_s: float, least_s: float = 0.0) -> None:
        self._window_s, self._least_s = window_s, least_s
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, time: float, value: float) -> float | None:
        """Take in a number and when it was read, in seconds; return its change a second, None after too few."""
        self._seen.append((time, value))
        while len(self._seen) > 2 and self._seen[1][0] <= time - self._window_s:
            self._seen.popleft()
        before, was = self._seen[0]
        return (value - was) / (time - before) if time > before and time - before >= self._least_s else None
