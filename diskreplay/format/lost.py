"""Rows of a sealed segment that were lost to damage: what its attributes say of them.

Repair puts zeros in their place and flags that make one episode of each range, so that whoever reads the flags finds
episodes everywhere. Readers leave these episodes out.
"""

from dataclasses import dataclass
from typing import Any

from diskreplay.format import layout


@dataclass(frozen=True)
class Lost:
    """Which rows of a segment were lost, and how many steps had been in them.

    ``ranges`` are the position of the first row, and how many rows of its lane, in order of positions. ``steps`` were
    lost; episodes that had been evicted by hand are not among them: they stay evicted ones.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    steps: int = 0

    def attributes(self) -> dict[str, Any]:
        """Return what stands in the segment's zarr.json: nothing where nothing was lost."""
        return {"lost": [list(entry) for entry in self.ranges], "steps_lost": self.steps} if self.ranges else {}

    @property
    def surplus(self) -> int:
        """How many more rows stand in for what was lost than steps were: to flags, each of these rows is a step."""
        return sum(rows for _, rows in self.ranges) - self.steps

    def holds(self, position: int, lanes: int) -> bool:
        """Tell whether a row is one of those that were lost."""
        row, lane = divmod(position, lanes)
        return any(
            first % lanes == lane and first // lanes <= row < first // lanes + rows for first, rows in self.ranges
        )


NOTHING_LOST = Lost()


def parse_lost(attributes: Any, lanes: int) -> Lost:
    """Return what the attributes of a segment say was lost: of a sealed one, or of one that is to be sealed anew.

    Raises TypeError or ValueError, which name what cannot be: rows beyond every segment, twice or in another order,
    more steps than rows.
    """
    given, steps = attributes.get("lost", []), attributes.get("steps_lost", 0)
    ends: dict[int, int] = {}  # by lane
    before = -1
    for position, rows in given:
        if not (_is_whole(position) and _is_whole(rows)):
            raise TypeError(f"lost names {position!r:.40} and {rows!r:.40}")
        row, lane = divmod(position, lanes)
        if position <= before or row < ends.get(lane, 0) or rows < 1 or (row + rows) * lanes > layout.POSITION_MASK:
            raise ValueError(f"lost names {rows} rows from position {position} on")
        before, ends[lane] = position, row + rows
    most = sum(rows for _, rows in given)
    if not _is_whole(steps) or steps > min(attributes.get("steps", most), most):
        raise ValueError(f"steps_lost is {steps!r:.40}")
    return Lost(tuple((position, rows) for position, rows in given), steps)


def parse_claimed(attributes: Any, lanes: int) -> tuple[int, ...] | None:
    """Return how many rows of each lane a sealed segment keeps where nothing proves the last of them, else None.

    Raises ValueError where they cannot be.
    """
    if (rows := attributes.get("claimed")) is None:
        return None
    if not isinstance(rows, list) or len(rows) != lanes or not all(map(_is_whole, rows)):
        raise ValueError("claimed is no list of rows")
    if max(rows) > layout.POSITION_MASK // lanes:
        raise ValueError("claimed has more rows than there can be")
    return tuple(rows)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
