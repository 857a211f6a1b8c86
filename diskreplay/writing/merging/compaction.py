"""Merges segments into packs: selects the segments for each pack, and makes one pack after another."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from diskreplay.errors import SegmentGone
from diskreplay.retention.policy import disk_usage
from diskreplay.retention.retention import Retention
from diskreplay.segments import packing
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import EvictionEntries
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters, read_lane_counter
from diskreplay.segments.files.machine import boot_id
from diskreplay.segments.files.numbers import live_numbers
from diskreplay.segments.packing import EvictedBySegment, Unfit, build_pack, is_compressed, most_bytes, most_rows
from diskreplay.segments.packs import current_numbers
from diskreplay.segments.segment import DAMAGE, SegmentInfo, read_segment
from diskreplay.writing.merging.background import LEAST_SEGMENTS, MUCH_BYTES

Progress = Callable[[int, int], None]

# A pack has at most 1 / SHARE of the steps and bytes that the store's limits allow, as a pack is evicted as a whole.
SHARE = 16
# A segment with more than 1 / _ENOUGH of a pack's rows is only merged to compress it: otherwise a copy would gain
# little.
_ENOUGH = 2
# This many segments of about the same length are merged. Fewer segments are merged only if they fill a pack.
_MANY = 64
# A call of `run_due` begins no more packs after this many seconds, as other stores wait for their turn.
_TURN_S = 30.0


def _at_once() -> None: ...


class Compacted(NamedTuple):
    segments: int = 0
    steps: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


class Merged(NamedTuple):
    pack: SegmentInfo
    numbers: list[int]


class Candidate(NamedTuple):
    info: SegmentInfo
    rows: int

    @property
    def values(self) -> int:
        return sum(self.info.values)


class Compaction:
    """Compacts one store. Not thread-safe.

    One process at a time can compact a store; other processes get StoreLocked.
    """

    def __init__(
        self,
        root: Root,
        counters: StoreCounters,
        retention: Retention,
        level: int | None,
        *,
        only_compress: bool = False,
    ) -> None:
        """Prepare compaction with a compression level (None: no compression).

        With ``only_compress``, segments and packs that have nothing to compress are left as they are.
        """
        self._root, self._counters, self._retention, self._level = root, counters, retention, level
        self._only_compress = only_compress

    def run(self, progress: Progress | None = None) -> Compacted:
        groups = self.groups(self.candidates())
        sizes = {one.info.number: disk_usage(one.info.path)[0] for group in groups for one in group}
        done, made = 0, list[Compacted]()
        for group in groups:
            if (merged := self.merge(group)) is not None:
                before = sum(sizes[number] for number in merged.numbers)
                steps, after = merged.pack.steps or 0, disk_usage(merged.pack.path)[0]
                made.append(Compacted(len(merged.numbers), steps, before, after))
            done += sum(sizes[one.info.number] for one in group)
            if progress is not None:
                progress(done, sum(sizes.values()))
        return Compacted(*map(sum, zip(*made, strict=True)))

    def plan(self) -> Compacted:
        """Return the result that `run` would return now, except ``bytes_after``, which is 0."""
        every = [one.info for group in self.groups(self.candidates()) for one in group]
        steps = sum(info.steps or 0 for info in every)
        return Compacted(len(every), steps, sum(disk_usage(info.path)[0] for info in every), 0)

    def run_due(self, pace: Callable[[], None]) -> bool:
        """Merge or compress segments if many are due; return whether any segments were merged.

        Only segments of about the same length are merged with each other. So each step is copied only a few times,
        mostly to a pack that is about `_MANY` times as long. ``pace`` is called often during the work: it can pause the
        work, or end it by raising.
        """
        kinds: dict[tuple[int, bool], list[Candidate]] = {}
        for one in self.candidates(pace):
            kind = one.rows.bit_length() // (_MANY.bit_length() - 1), self._compresses(one.info)
            kinds.setdefault(kind, []).append(one)
        due = [
            group
            for (_, is_new), candidates in sorted(kinds.items())
            for group in self.groups(candidates)
            if self._pays(group, is_new=is_new)
        ]
        # One call makes several packs, because the search for candidates among many segments takes long.
        until, has_merged = time.monotonic() + _TURN_S, False
        for group in due:
            has_merged = self.merge(group, pace) is not None or has_merged
            if time.monotonic() > until:
                break
        return has_merged

    def _pays(self, group: Sequence[Candidate], *, is_new: bool) -> bool:
        rows = sum(one.rows for one in group)
        is_full = len(group) >= LEAST_SEGMENTS and rows > self._most_rows() // _ENOUGH
        is_much = is_new and rows * self._root.step_bytes >= MUCH_BYTES
        return len(group) >= _MANY or is_full or is_much

    def candidates(self, pace: Callable[[], None] = _at_once) -> list[Candidate]:
        infos = []
        words = self._counters.read()
        for number in live_numbers(self._root, words):
            pace()
            try:
                info = read_segment(self._root, number)
            except DAMAGE:
                continue  # the segment is gone, or damaged and left to `diskreplay repair`
            if info.sealed and not info.claimed and not info.came_before(int(words[layout.HORIZON])):
                infos.append(info)
        current = {*current_numbers(self._root)} if infos else set[int]()
        found = []
        for info in infos:
            # Without a compression level, packs that an earlier call has compressed are left as they are.
            is_wanted = self._compresses(info) or not (self._only_compress or (info.compressed and self._level is None))
            if info.number in current and is_wanted:
                try:
                    rows = int(read_lane_counter(f"{info.path}/{layout.COMMITTED}", len(info.lanes)).sum())
                except DAMAGE:
                    continue
                found.append(Candidate(info, rows))
                pace()
        return sorted(found, key=lambda one: (one.info.bounds[1], one.info.number))

    def groups(self, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        """Return one list of segments for each pack to make, in the order of ``candidates``.

        A pack has at least two segments, or one segment that has to be compressed. Segments of this boot are not merged
        with segments of older boots, as new segments take their clock from a segment of this boot.
        """
        most, most_values = self._most_rows(), self._most_values()
        groups: list[list[Candidate]] = []
        for of_this_boot in (False, True):
            group, rows, values = list[Candidate](), 0, 0
            for one in candidates:
                is_open = one.rows <= most if self._compresses(one.info) else one.rows <= most // _ENOUGH
                is_open &= one.values <= most_values
                if (one.info.clock.boot == boot_id()) != of_this_boot or not is_open:
                    continue
                if rows + one.rows > most or values + one.values > most_values:
                    groups.append(group)
                    group, rows, values = [], 0, 0
                group.append(one)
                rows += one.rows
                values += one.values
            groups.append(group)
        return [group for group in groups if len(group) > 1 or any(self._compresses(one.info) for one in group)]

    def _compresses(self, info: SegmentInfo) -> bool:
        wide = {leaf for leaf, array in info.arrays.items() if is_compressed(array)}
        return self._level is not None and bool(wide - info.compressed.keys())

    def _most_rows(self) -> int:
        limits, most = self._root.limits, most_rows(self._root, self._level)
        if limits.capacity is not None:
            most = min(most, limits.capacity // SHARE)
        if limits.capacity_bytes is not None:
            most = min(most, limits.capacity_bytes // SHARE // self._root.step_bytes)
        return most

    def _most_values(self) -> int:
        limit, most = self._root.limits.capacity_bytes, packing.most_values(self._root)
        if limit is None or not self._root.value_bytes:
            return most
        return min(most, limit // SHARE // self._root.value_bytes)

    def merge(self, group: Sequence[Candidate], pace: Callable[[], None] = _at_once) -> Merged | None:
        """Make a pack of these segments and return it; segments that are gone or damaged are skipped.

        Returns None if the segments that are left need no pack.
        """
        left = list(group)
        while len(left) > 1 or any(self._compresses(one.info) for one in left):
            try:
                return self._merge(left, pace)
            except Unfit as error:
                left = [one for one in left if one.info.number != error.number]
            except SegmentGone:
                left = [one for one in left if self._is_there(one.info)]
        return None

    def _is_there(self, info: SegmentInfo) -> bool:
        try:
            return read_segment(self._root, info.number).document == info.document
        except DAMAGE:
            return False

    def _merge(self, group: Sequence[Candidate], pace: Callable[[], None]) -> Merged:
        infos = [one.info for one in group]
        nbytes = most_bytes(self._root, sum(one.rows for one in group), sum(one.values for one in group))
        with self._retention.making_pack(nbytes) as building:
            draft = build_pack(self._root, building, infos, self._evicted(), self._level, pace)
            pack = self._retention.place_pack(draft, infos, pace)
        return Merged(pack, [info.number for info in infos])

    def _evicted(self) -> EvictedBySegment:
        evicted: dict[int, list[tuple[int, int]]] = {}
        for first, steps in EvictionEntries(self._root).new(self._counters.peek(layout.EVICTION_ENTRIES)).tolist():
            entry = first & layout.POSITION_MASK, steps
            evicted.setdefault(first >> layout.POSITION_BITS, []).append(entry)
        return evicted
