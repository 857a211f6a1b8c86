"""Where the rows of each field are in memory: chunk files mapped when they are first needed, addresses in arrays."""

import itertools
import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, SegmentGone
from diskreplay.folders import shown_paths
from diskreplay.format.mapping import (
    MADV_HUGEPAGE,
    MADV_RANDOM,
    Mapping,
    MappingRefused,
    count_mappings,
    map_file,
    refuse_links,
    relieved_by,
)
from diskreplay.format.root import Root
from diskreplay.format.segment import SegmentInfo, chunk_nbytes, chunk_path, row_bytes
from diskreplay.store.forks import each_of, told_of_forks

# Of all stores of this process together: the kernel allows 65,530, and the trainer has others.
MOST_MAPPINGS = 30_000

# Bytes. Rows as wide as this are read from disk page by page, by those who know which are needed: what lies around them
# is not wanted. Of narrower ones, whatever the system reads at a fault soon serves another.
WIDE_ROW = 1024


# Of so many rows a lane, on average, it is quicker to copy lane by lane.
_ROWS_A_LANE = 64


class LeafTable:
    """The chunks of one array in all segments.

    ``first_chunk``, ``chunks`` and ``shift`` are by slot, ``bases`` holds the address of each mapped chunk and 0 for
    the others. Raw addresses may be used while ``holder`` is referenced.

    Concurrency: any thread. Arrays grow by replacement and never change what they say, but for an address filled in.
    """

    def __init__(self, tables: "Tables", leaf: str) -> None:
        root = tables.root
        # No cycle: old tables, and what only they keep mapped, go with the last snapshot and not with the collector.
        self._tables: Tables = weakref.proxy(tables)
        self.leaf = leaf
        array = root.blueprint.arrays[leaf]
        self.dtype, self.shape = array.dtype, array.shape
        self.row_bytes = row_bytes(root, leaf)
        self.wide = self.row_bytes >= WIDE_ROW
        self.first_chunk = np.zeros(0, np.int64)
        self.chunks = np.zeros(0, np.int64)
        self.shift = np.zeros(0, np.int64)
        self.bases = np.zeros(0, np.int64)
        self.holder: dict[int, Mapping] = {}

    def add_slots(self, infos: list[SegmentInfo | None]) -> None:
        """Add segments with room for one chunk each; see `Tables.add_slots`."""
        shifts = [0 if info is None else info.chunk_rows[self.leaf].bit_length() - 1 for info in infos]
        start = len(self.bases)
        self.shift = np.concatenate([self.shift, np.array(shifts, np.int64)])
        self.first_chunk = np.concatenate([self.first_chunk, start + np.arange(len(infos))])
        self.chunks = np.concatenate([self.chunks, np.ones(len(infos), np.int64)])
        self.bases = np.concatenate([self.bases, np.zeros(len(infos), np.int64)])

    def ensure(self, slot: NDArray[np.int64], first_row: NDArray[np.int64], last_row: NDArray[np.int64]) -> None:
        """Map every chunk that holds any of the rows ``first_row[i]`` to ``last_row[i]`` of ``slot[i]``.

        Raises
        ------
        SegmentGone
            A segment has been evicted.
        FormatError
            A chunk is missing or has the wrong size.
        """
        shift = self.shift[slot]
        first, last = first_row >> shift, last_row >> shift
        if (last < self.chunks[slot]).all():
            at = self.first_chunk[slot]
            if self.bases[at + first].all() and self.bases[at + last].all() and int((last - first).max(initial=0)) < 2:
                return
        with self._tables.lock:
            self._map(slot, first, last)

    def _map(self, slot: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]) -> None:
        wanted = {
            (s, chunk)
            for s, a, b in zip(slot.tolist(), first.tolist(), last.tolist(), strict=True)
            for chunk in range(a, b + 1)
        }
        missing = [key for key in sorted(wanted) if key[1] >= self.chunks[key[0]] or not self.bases[self._place(*key)]]
        if not missing:
            return
        if self._tables.make_room(len(missing)):
            missing = sorted(wanted)
        try:
            self._map_chunks(missing)
        except MappingRefused:  # though other tables have let go of theirs
            self._tables.forget()
            self._map_chunks(sorted(wanted))

    def _map_chunks(self, missing: list[tuple[int, int]]) -> None:
        for s, chunk in missing:
            self._extend(s, chunk + 1)
            place = self._place(s, chunk)
            mapping = self._tables.map(s, self.leaf, chunk)
            # What is read from disk through a narrow mapping comes in the largest pages there are: thousands of small
            # ones are more than the processor has room for, which takes a quarter of a small batch's time.
            mapping.advise(MADV_RANDOM if self.wide else MADV_HUGEPAGE)
            self.holder[place] = mapping
            self.bases[place] = mapping.address

    def _place(self, slot: int, chunk: int) -> int:
        return int(self.first_chunk[slot]) + chunk

    def _extend(self, slot: int, chunks: int) -> None:
        """Give a slot room for more chunks, at the end: its old places are left to whoever still reads them."""
        have = int(self.chunks[slot])
        if chunks <= have:
            return
        room = max(chunks, 2 * have)
        old = int(self.first_chunk[slot])
        start = len(self.bases)
        self.bases = np.concatenate([self.bases, self.bases[old : old + have], np.zeros(room - have, np.int64)])
        # A new dict: whoever uses the old places holds the old one, and only new places are let go with their slot.
        moved = range(old, old + have)
        self.holder = {start + (p - old) if p in moved else p: mapping for p, mapping in self.holder.items()}
        # Replaced, not changed in place: a reader may hold the arrays. The start first, then the longer length.
        first_chunk, counts = self.first_chunk.copy(), self.chunks.copy()
        first_chunk[slot], counts[slot] = start, room
        self.first_chunk, self.chunks = first_chunk, counts

    def addresses(self) -> tuple[Any, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return ``holder``, ``chunks``, ``first_chunk`` and ``bases`` as of one moment.

        Another thread may be mapping chunks, so the order of reading matters: the holder first, which keeps alive what
        ``bases`` names; then the length of a slot's chunks, their start, the addresses, against the order in which a
        table that grows replaces them, so that what is read later reaches at least as far.
        """
        return self.holder, self.chunks, self.first_chunk, self.bases

    def forget(self) -> None:
        """Let go of every mapping; those in use stay until their user lets go of ``holder``."""
        self.bases, self.holder = np.zeros_like(self.bases), {}

    def rows(self, slot: int, lanes: int, lane: int, first: int, stop: int) -> NDArray[Any]:
        """Return the rows ``[first, stop)`` of a lane, ``(stop - first, *shape)``; a view where one chunk has them."""
        if stop <= first:
            return np.zeros((0, *self.shape), self.dtype)
        # One thread at a time: another's chunks may need the room that these have just taken.
        with self._tables.lock:
            self.ensure(np.array([slot]), np.array([first]), np.array([stop - 1]))
            parts = self._blocks(slot, lanes, lane, first, stop)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def rows_of_lanes(
        self, slot: int, lanes: int, lane: NDArray[np.int64], first: NDArray[np.int64], stop: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Return the rows ``[first[i], stop[i])`` of each ``lane[i]``, one lane after another."""
        if len(lane) == 1:
            return self.rows(slot, lanes, int(lane[0]), int(first[0]), int(stop[0]))
        filled = first < stop
        lane, first, stop = lane[filled], first[filled], stop[filled]
        count = stop - first
        if not len(count):
            return np.zeros((0, *self.shape), self.dtype)
        with self._tables.lock:
            self.ensure(np.full(len(lane), slot), first, stop - 1)
            if int(count.sum()) > _ROWS_A_LANE * len(lane):
                bounds = zip(lane.tolist(), first.tolist(), stop.tolist(), strict=True)
                return np.concatenate([part for bound in bounds for part in self._blocks(slot, lanes, *bound)])
            row = np.repeat(stop - np.cumsum(count), count) + np.arange(count.sum())
            return self.values(slot, lanes, np.repeat(lane, count), row)

    def values(self, slot: int, lanes: int, lane: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[Any]:
        """Return the value at each row of each lane of a segment."""
        out = np.empty((len(row), *self.shape), self.dtype)
        with self._tables.lock:
            self.ensure(np.full(len(row), slot), row, row)
            chunk, within = row >> self.shift[slot], row & ((1 << self.shift[slot]) - 1)
            for number in np.unique(chunk).tolist():
                here = chunk == number
                mapping = self.holder[self._place(slot, number)]
                block = mapping.array(self.dtype, (lanes, 1 << int(self.shift[slot]), *self.shape))
                out[here] = block[lane[here], within[here]]
        return out

    def _blocks(self, slot: int, lanes: int, lane: int, first: int, stop: int) -> list[NDArray[Any]]:
        shift = int(self.shift[slot])
        parts = []
        for chunk in range(first >> shift, ((stop - 1) >> shift) + 1):
            mapping = self.holder[self._place(slot, chunk)]
            block = mapping.array(self.dtype, (lanes, 1 << shift, *self.shape))
            start, end = max(first - (chunk << shift), 0), min(stop - (chunk << shift), 1 << shift)
            if self.wide:
                mapping.will_need(((lane << shift) + start) * self.row_bytes, (end - start) * self.row_bytes)
            parts.append(block[lane, start:end])
        return parts


def _map_anew(tables: "Tables") -> None:
    """Let go of all in a forked child: what is evicted must not stay on disk because a child has it mapped."""
    tables.lock = threading.RLock()  # another thread may have held it
    tables.forget()


_alive = told_of_forks(_map_anew)
_uses = itertools.count()


def _forget_all() -> None:
    """Let go of all mappings but those of tables that are in use."""
    for tables in each_of(_alive):
        tables.forget_if_idle()


relieved_by(_forget_all)


class Tables:
    """The tables of all arrays of a store. All those of a process share the number of mappings that they may hold.

    Old snapshots keep the tables they were made with, so what they have mapped stays mapped after an eviction.
    """

    def __init__(self, root: Root) -> None:
        self.root = root
        self.lock = threading.RLock()
        self._used = 0
        _alive.add(self)
        self.infos: list[SegmentInfo | None] = []
        self.leaves = {leaf: LeafTable(self, leaf) for leaf in root.blueprint.arrays}

    def make_room(self, count: int) -> bool:
        """See that so many more chunks can be mapped; tell whether all mappings of these tables had to go for that.

        First go those of the tables for which nothing had to be mapped for the longest time. The caller holds the lock.
        """
        self._used = next(_uses)
        if count_mappings() + count <= MOST_MAPPINGS:
            return False
        for tables in sorted(each_of(_alive), key=lambda tables: tables._used):
            if tables is not self:
                tables.forget_if_idle()
                if count_mappings() + count <= MOST_MAPPINGS:
                    return False
        self.forget()
        return True

    def forget_if_idle(self) -> None:
        """Let go of every mapping, unless a thread, perhaps this one, is in the middle of mapping or reading rows."""
        # Held by this thread, it could be taken once more.
        if not self.lock._is_owned() and self.lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                self.forget()
            finally:
                self.lock.release()

    def add_slots(self, infos: list[SegmentInfo | None]) -> None:
        """Add segments in the order of their numbers; None where one was evicted already."""
        with self.lock:
            self.infos.extend(infos)
            for table in self.leaves.values():
                table.add_slots(infos)

    def forget(self) -> None:
        """Let go of every mapping."""
        for table in self.leaves.values():
            table.forget()

    def without(self, slots: list[int]) -> "Tables":
        """Return tables in which these slots are empty; everything else stays mapped."""
        new = Tables(self.root)
        with self.lock:
            new.infos = list(self.infos)
            for slot in slots:
                new.infos[slot] = None
            for leaf, table in self.leaves.items():
                copy = new.leaves[leaf]
                copy.shift, copy.chunks = table.shift, table.chunks
                copy.first_chunk, copy.bases = table.first_chunk, table.bases.copy()
                copy.holder = dict(table.holder)
                for slot in slots:
                    for place in range(int(copy.first_chunk[slot]), int(copy.first_chunk[slot] + copy.chunks[slot])):
                        copy.bases[place] = 0
                        copy.holder.pop(place, None)
        return new

    def map(self, slot: int, leaf: str, chunk: int) -> Mapping:
        """Map one chunk file; see `LeafTable.ensure`."""
        info = self.infos[slot]
        if info is None:
            raise SegmentGone("the segment of these steps was evicted or set aside; draw again")
        with shown_paths():
            return self._map(info, leaf, chunk)

    def _map(self, info: SegmentInfo, leaf: str, chunk: int) -> Mapping:
        path = chunk_path(self.root, info, leaf, chunk)
        parts = leaf.split("/")
        refuse_links(info.path, ("/".join(parts[: i + 1]) for i in range(len(parts))))
        try:
            return map_file(path, chunk_nbytes(self.root, info, leaf))
        except FileNotFoundError:
            if not info.path.exists():
                raise SegmentGone(f"segment {info.number} was evicted or set aside; refresh and draw again") from None
            raise FormatError(f"{path} is missing; the store is damaged, restore this file") from None
