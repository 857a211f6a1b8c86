"""The packs that retention has read or made, and the segments beside them whose rows they have."""

from collections.abc import Mapping
from typing import NamedTuple

from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import Identity, identify
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.numbers import listed_numbers
from diskreplay.segments.packs import read_tables
from diskreplay.segments.segment import SegmentInfo


class Pack(NamedTuple):
    """A pack: its document as it was read, and the numbers of the segments that are in it."""

    document: Identity
    members: set[int]

    @classmethod
    def of(cls, info: SegmentInfo) -> "Pack":
        """Read the table of a pack."""
        return cls(info.document, {*read_tables(info).numbers.tolist()})


class KnownPacks:
    """Packs by number; a pack that was set aside or replaced since it was read does not count.

    Concurrency: any thread.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._packs: dict[int, Pack] = {}

    def add(self, packs: Mapping[int, Pack]) -> None:
        """Add packs that were read or made."""
        self._packs |= packs

    @property
    def least_member(self) -> int:
        """The lowest number of a segment in a pack, `layout.MAX_SEGMENTS` without any."""
        return min((min(pack.members) for pack in list(self._packs.values())), default=layout.MAX_SEGMENTS)

    def find_merged(self, end: int) -> list[tuple[int, int]]:
        """Return the segments and packs whose rows are in packs below number ``end``, each with the number of its pack.

        Packs that are gone or were replaced are forgotten.
        """
        known = list(self._packs)
        there = {*listed_numbers(self._root)} if known else set[int]()
        for number in known:
            if number not in there or not self.is_same(number):
                self._packs.pop(number, None)
        packs, merged = dict(self._packs), dict[int, int]()  # a copy: other threads add packs
        for number, pack in sorted(packs.items()):
            if number >= end:
                continue  # readers do not know it yet
            older = {n for n, other in packs.items() if n < number and other.members <= pack.members}
            merged |= dict.fromkeys((member for member in pack.members & there | older if member < number), number)
        return sorted(merged.items())

    def is_same(self, number: int) -> bool:
        """Whether a pack is the one that was read."""
        known = self._packs.get(number)  # another thread may have found that it is gone
        return known is not None and identify(self._root.segment_path(number) / layout.METADATA) == known.document
