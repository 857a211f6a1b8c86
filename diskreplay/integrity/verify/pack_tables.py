"""Reads the two tables of a pack, and finds segments and packs that newer packs supersede."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.integrity.verify.files import Files
from diskreplay.segments.documents import layout

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tables:
    """The two tables of a pack, with the columns of `layout.PACK_COLUMNS`.

    ``members`` has a line for each segment that was merged into the pack. ``runs`` has a line for each lane of these
    segments, in the same order.
    """

    members: Ints
    runs: Ints

    @property
    def numbers(self) -> list[int]:
        found: list[int] = self.members[:, 0].tolist()
        return found

    @property
    def first_rows(self) -> Ints:
        """Each merged lane's first row in the pack."""
        return self.runs[:, 0]

    @property
    def stops(self) -> Ints:
        """The row after each merged lane's last row in the pack."""
        return self.runs[:, 0] + self.runs[:, 1]

    @cached_property
    def between(self) -> list[tuple[int, int]]:
        """The unused rows between lanes, as (first, stop).

        In a compressed pack, each lane begins a new inner chunk.
        """
        bounds = np.stack([self.stops[:-1], self.first_rows[1:]], axis=1)
        found: list[list[int]] = bounds[bounds[:, 0] < bounds[:, 1]].tolist()
        return [(first, stop) for first, stop in found]

    @property
    def content(self) -> bytes:
        """The bytes of both tables; the file ``durable/tables`` must be a copy of these bytes."""
        return self.members.astype("<i8").tobytes() + self.runs.astype("<i8").tobytes()

    @cached_property
    def first_line(self) -> dict[int, tuple[int, int]]:
        """{number of a merged segment: (line of its first lane in ``runs``, its number of lanes)}."""
        lanes = self.members[:, 1].tolist()
        lines = np.cumsum([0, *lanes])[:-1].tolist()
        return {number: (line, count) for number, line, count in zip(self.numbers, lines, lanes, strict=True)}


def read_tables(files: Files, where: str, packed: tuple[int, int], checksums: Mapping[str, int]) -> Tables | None:
    found = []
    for path, lines, columns in zip(layout.PACK_TABLES, packed, layout.PACK_COLUMNS, strict=True):
        name, nbytes = f"{path}/c.0.0", 8 * lines * len(columns)
        is_there = files.is_folder(f"{where}/{path}")
        data = files.read(f"{where}/{name}", layout.MAX_TABLE_BYTES, nbytes) if is_there else None
        if data is not None and crc32c(data) == checksums.get(name):
            found.append(np.frombuffer(data, "<i8").reshape(lines, len(columns)))
    return Tables(*found) if len(found) == len(layout.PACK_TABLES) else None


def find_superseded(packs: Mapping[int, Tables]) -> set[int]:
    """Return the numbers of segments and packs that readers ignore, because their rows are in newer packs."""
    found: set[int] = set()
    for number in sorted(packs, reverse=True):
        if number in found:
            continue
        members = {*packs[number].numbers}
        found |= {other for other, tables in packs.items() if other < number and not members.isdisjoint(tables.numbers)}
        found |= members
    return found


def find_torn(packs: Mapping[int, Tables], superseded: Iterable[int]) -> dict[int, int]:
    """Find superseded packs that have a segment which no current pack has.

    Returns {number of a found pack: number of a current pack that has some of its segments}.
    """
    superseded = set(superseded)
    counted = {number: {*tables.numbers} for number, tables in packs.items() if number not in superseded}
    torn = {}
    for number in sorted(packs.keys() & superseded):
        own = {*packs[number].numbers}
        if not own <= set[int]().union(*counted.values()):
            # A damaged table of another pack may list this pack instead of its segments.
            own.add(number)
            torn[number] = next(other for other, members in counted.items() if not own.isdisjoint(members))
    return torn
