"""The counts of rate limiters: an array has the number of drawn steps; inserted steps are counted in the segments."""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.folders import is_folder
from diskreplay.ids import NO_STEP
from diskreplay.segments.damage.quarantine import claimed_steps, read_quarantine
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import EvictionEntries, evicted_by_removals, evicted_in
from diskreplay.segments.documents.metadata import dump, shaped
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import Counters, open_counters, read_lane_counter
from diskreplay.segments.files.durable import drafted, sync_folder, sync_tree
from diskreplay.segments.files.locks import held_lock, make_lock
from diskreplay.segments.files.numbers import segment_numbers
from diskreplay.segments.marks import map_trusted
from diskreplay.segments.packs import merged_into, read_tables
from diskreplay.segments.rebuild import read_shown
from diskreplay.segments.segment import SegmentInfo

SLOTS = layout.LIMITER_SLOTS
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

# The maximum number of attempts to count steps, and the pause between two attempts. Steps are counted again if their
# number has decreased, or if a segment was deleted during the count.
_ATTEMPTS, _PAUSE_S = 20, 0.0005

_ROWS_AT_ONCE = 1 << 20


def is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and name != layout.METADATA


def open_slots(root: Root, name: str) -> Counters:
    """Open a limiter's array of slots, (64,) int64, for writing; a missing array is created as zeros.

    The sum of the slots is the number of steps drawn. A process adds to a slot while it holds the lock at `slots_lock`,
    and slots never decrease. Raises StorageFull if the disk has no room, FormatError if the limiter's folder or array
    is damaged.
    """
    folder = root.folder / layout.LIMITERS / name
    if folder.is_symlink():
        raise FormatError(f"{folder} is a symbolic link; a store has none, remove it")
    if not folder.exists():
        _create(root, name)
    slots = open_counters(str(folder / "c.0"), SLOTS)
    if (slots.copy() < 0).any():
        raise FormatError(f"{folder} holds impossible counts; delete the folder to start again")
    return slots


def limiter_names(root: Root) -> list[str]:
    return named_folders(root.folder / layout.LIMITERS)


def named_folders(folder: Path) -> list[str]:
    if not is_folder(folder):
        return []
    return sorted(name for name in os.listdir(folder) if is_name(name) and is_folder(folder / name))


def steps_drawn(root: Root, name: str) -> int:
    """Return the number of steps drawn under a limiter; FileNotFoundError if the limiter is gone."""
    return int(read_lane_counter(str(root.folder / layout.LIMITERS / name), SLOTS).sum())


def slots_lock(root: Root, name: str) -> str:
    """Return the path of the lock that a process holds while it inserts or draws steps under a limiter."""
    return str(root.folder / layout.LIMITERS / name / layout.LOCK)


def _create(root: Root, name: str) -> None:
    """Make a limiter's array; other processes see the complete array or none."""
    target, building = root.folder / layout.LIMITERS / name, root.counters_folder / f"new-limiter-{name}"
    document = shaped(root.array_document(), [SLOTS], [SLOTS]) | {"dimension_names": ["slot"]}
    with held_lock(root.lock_path):  # other processes remove unfinished folders under this lock
        if target.exists():
            return
        with drafted(building):
            building.mkdir()
            (building / layout.METADATA).write_bytes(dump(document))
            (building / "c.0").write_bytes(bytes(SLOTS * 8))
            make_lock(building / layout.LOCK)
            # Without a sync, a power loss could leave an empty file, which counts as damage.
            sync_tree(building)
            os.rename(building, target)
            sync_folder(target.parent)


class Inserted(NamedTuple):
    """Two numbers of steps: ``ever`` counts all committed steps, ``held`` counts only steps that are still in segments.

    ``held`` leaves out deleted, evicted, lost and quarantined steps.
    """

    ever: int
    held: int


class SegmentCount(NamedTuple):
    """The steps committed to a segment or pack, and how many of them were evicted by hand or lost to damage.

    ``members`` has the numbers of the segments in a pack; for a segment that is no pack, only its own number.
    """

    inserted: int
    evicted: int
    lost: int
    members: tuple[int, ...]


RowsOf = Callable[[int], NDArray[np.int64] | None]
"""A function of a segment's number: it returns how many rows of each lane to count; None: all committed rows."""


def _all_rows(number: int) -> None:
    return None


class StepCounter:
    """Counts the steps of a store. A call reads only the rows that are new since the previous call. Not thread-safe.

    Steps count when they are committed, even if they are hidden by a capacity, evicted by hand or lost to damage. The
    store's counter of evicted steps includes the steps of deleted segments.
    """

    def __init__(self, root: Root) -> None:
        self._root, self._counters = root, root.counters()
        self._raw = b""
        self._ever = self._evicted = self._aside = 0
        self._rows_of: RowsOf = _all_rows
        self._changes = -1  # no valid value, so the first call of `read` counts all segments

    def _begin(self) -> None:
        self._next = -1
        self._sealed: dict[int, int] = {}
        self._growing: dict[int, _Growing] = {}
        self._aside = 0
        self._entries = EvictionEntries(self._root)
        self._by_hand: dict[int, int] = {}
        self._lost: dict[int, int] = {}
        self._packs: dict[int, dict[int, int]] = {}  # by pack: the number of steps of each segment in it
        self._writers: dict[int, int] = {}

    def read(self, look: Callable[[], RowsOf] = lambda: _all_rows) -> Inserted:
        """Count the new steps, and return the totals.

        ``look`` returns a `RowsOf`, a function that says how many rows of each lane to count. ``look`` is called again
        if segments were made or deleted meanwhile, because the earlier `RowsOf` does not know a new pack.
        """
        for _ in range(_ATTEMPTS):
            raw = self._counters.raw()
            rows_of = self._rows_of = look()
            words = self._counters.read()
            if raw != self._raw:
                # The counter of evicted steps is read before the segments, so that a segment deleted in between is not
                # counted twice.
                counted = int(words[layout.STEPS_EVICTED])
                self._evicted = max(counted, evicted_by_removals(self._root))
                is_rearranged = bool(words[layout.CHANGES] != self._changes)
                if is_rearranged:
                    self._changes = int(words[layout.CHANGES])
                    self._begin()
                if is_rearranged or self._evicted > counted:  # a removed segment may have been in quarantine
                    self._aside = sum(e.inserted for e in read_quarantine(self._root.folder) if e.segment is not None)
                self._read_segments(int(words[layout.NEXT_SEGMENT]))
                self._read_evictions(int(words[layout.EVICTION_ENTRIES]))
                if evicted_by_removals(self._root) <= self._evicted:
                    self._raw = raw
            held = sum(self._sealed.values()) + sum(
                segment.count(rows_of(number)) for number, segment in self._growing.items()
            )
            ever = held + self._evicted + self._aside
            if ever >= self._ever and self._raw == raw == self._counters.raw():
                break
            # Count again: a segment that was moved away or merged meanwhile may be missing in the count.
            time.sleep(_PAUSE_S)
        self._ever = max(self._ever, ever)
        return Inserted(self._ever, max(0, held - sum(self._by_hand.values()) - sum(self._lost.values())))

    def by_segment(self) -> dict[int, int]:
        """Return {number: steps ever committed} of existing and merged segments, as `read` last counted them."""
        steps = {**self._sealed, **{number: segment.steps for number, segment in self._growing.items()}}
        for pack, members in self._packs.items():
            steps.pop(pack, None)
            steps |= members
        return steps

    @property
    def deleted(self) -> int:
        return self._evicted

    @property
    def aside(self) -> int:
        """The number of quarantined steps that no other part of the store counts, as of the last call of `read`."""
        return self._aside

    def segments(self) -> dict[int, SegmentCount]:
        found = {}
        for number, steps in self._sealed.items():
            members = tuple(self._packs.get(number, (number,)))
            evicted = sum(self._by_hand.get(member, 0) for member in members)
            found[number] = SegmentCount(steps, min(evicted, steps), self._lost.get(number, 0), members)
        for number, segment in self._growing.items():
            evicted = segment.evicted() if number in self._by_hand else 0
            found[number] = SegmentCount(segment.steps, evicted, self._lost.get(number, 0), (number,))
        return found

    def writers(self) -> dict[int, int]:
        return dict(self._writers)

    def growing(self) -> list[SegmentInfo]:
        return [segment.info for segment in self._growing.values()]

    def _read_segments(self, end: int) -> None:
        for number in [n for n in self._sealed if not self._root.segment_path(n).exists()]:
            del self._sealed[number]
        new = segment_numbers(self._root, max(0, self._next), end)
        for number in sorted({*self._growing, *new}):
            try:
                info = read_shown(self._root, number)
                self._lost[number] = info.lost.steps
                self._writers[number] = info.writer
                if info.packed is not None and number not in self._packs:
                    tables = read_tables(info)
                    members = tables.numbers.tolist()
                    self._packs[number] = dict(zip(members, tables.steps.tolist(), strict=True))
                    self._writers.update(zip(members, tables.writers.tolist(), strict=True))
                if info.steps is not None and self._rows_of(number) is None:
                    self._sealed[number] = info.steps
                    self._growing.pop(number, None)
                elif number not in self._growing:
                    self._growing[number] = _Growing(info)
            except (FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._growing.pop(number, None)
                # the segment is damaged; its steps still count as inserted
                if self._root.segment_path(number).exists():
                    self._sealed[number] = claimed_steps(self._root.segment_path(number)) or 0
        self._forget_merged()
        there = {*self._sealed, *self._growing}
        self._lost = {number: steps for number, steps in self._lost.items() if steps and number in there}
        counted = self.by_segment()
        self._writers = {number: writer for number, writer in self._writers.items() if number in counted}
        self._next = end

    def _forget_merged(self) -> None:
        self._packs = {number: members for number, members in self._packs.items() if number in self._sealed}
        for number in merged_into(self._packs):
            self._packs.pop(number, None)
            self._sealed.pop(number, None)
            self._growing.pop(number, None)

    def _read_evictions(self, count: int) -> None:
        for number, steps in self._entries.steps_by_segment(count).items():
            self._by_hand[number] = self._by_hand.get(number, 0) + steps
        there = self._sealed.keys() | self._growing.keys() | set[int]().union(*self._packs.values())
        self._by_hand = {number: steps for number, steps in self._by_hand.items() if number in there}


class _Growing:
    """An unsealed segment, and the number of its steps. The flags of each row are read only once."""

    def __init__(self, info: SegmentInfo) -> None:
        self.info = info
        self._chunk_rows = info.chunk_rows[layout.DONE]
        _, self._committed = map_trusted(info)
        self._rows = np.zeros(len(info.lanes), np.int64)
        self.steps = -info.lost.surplus
        self._flags: dict[int, NDArray[np.uint8]] = {}

    def count(self, rows: NDArray[np.int64] | None) -> int:
        """Read the flags of new rows, up to a missing or damaged file, and return the segment's number of steps.

        ``rows`` has the maximum number of rows of each lane to count; None: all committed rows.
        """
        with suppress(FormatError, OSError):
            self._read_new(rows)
        return self.steps

    def evicted(self) -> int:
        """Return the number of counted steps that were evicted by hand.

        Only episodes of sealed segments are evicted, so the result is 0, except for a copy that was made before the
        original was sealed.
        """
        lanes = len(self._rows)
        entries = [
            (*divmod(position, lanes), steps) for position, steps in evicted_in(self.info.root, self.info.number)
        ]
        return sum(max(0, min(steps, int(self._rows[lane]) - row)) for row, lane, steps in entries)

    def _read_new(self, rows: NDArray[np.int64] | None) -> None:
        committed = np.maximum(self._rows, self._committed if rows is None else np.minimum(self._committed, rows))
        for lane in np.flatnonzero(committed != self._rows).tolist():
            new = int(self._rows[lane]), int(committed[lane])
            for chunk, inside, count in layout.split_range(*new, self._chunk_rows, _ROWS_AT_ONCE):
                flags = self._chunk(chunk)[lane, inside : inside + count]
                self.steps += int(np.count_nonzero(flags & NO_STEP == 0))
                self._rows[lane] += count

    def _chunk(self, chunk: int) -> NDArray[np.uint8]:
        if chunk not in self._flags:
            self._flags.clear()  # one chunk is enough: all lanes are near the same row
            self._flags[chunk] = self.info.map_numbers(layout.DONE, chunk)
        return self._flags[chunk]
