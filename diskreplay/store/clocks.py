"""Wall time of the times of rows."""

from collections.abc import Iterable

from diskreplay.format.segment import SegmentInfo


class Clocks:
    """From the epoch to each boot in which segments were written, in nanoseconds.

    All segments of a boot share what the one with the lowest number says, so that their times can be compared to the
    nanosecond, whatever was done to the wall clock in between. Segments that are gone since still count.

    Concurrency: any thread; one adds at a time.
    """

    def __init__(self) -> None:
        self._walls: dict[str, tuple[int, int]] = {}

    def add(self, infos: Iterable[SegmentInfo | None]) -> None:
        """Take in segments, in any order; None stands for one that is gone."""
        for info in infos:
            if info is not None:
                entry = info.number, info.clock.wall
                self._walls[info.clock.boot] = min(entry, self._walls.get(info.clock.boot, entry))

    def wall(self, boot: str) -> int:
        """Return the nanoseconds from the epoch to a boot in which one of the segments was written."""
        return self._walls[boot][1]
