"""What all stores of a process may keep of chunks, mapped or read into memory, and which of them leave for others."""

import itertools
import os
import sys
import weakref
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.format.mapping import count_mappings, relieved_by
from diskreplay.store.forks import each_of, told_of_forks
from diskreplay.store.reading.arena import Arena, Piece, lone_piece

if TYPE_CHECKING:
    from diskreplay.store.reading.chunk_table import ChunkTable, ChunkTables

# The kernel allows 65,530, and the trainer has others.
MOST_MAPPINGS = 30_000

# Bytes in which chunks are kept that were read and not mapped. Beside the page cache, so bounded by what there is too.
MOST_READ = min(1 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16)

# What leaves at once: finding what was not used for longest means looking at all.
_LEAVING = 8

_uses = itertools.count(1)
_arena = Arena()
_kept: "deque[_Kept]" = deque()
_counts: deque[int] = deque()  # bytes that came and went of pieces that are not the arena's
os.register_at_fork(after_in_child=lambda: _arena.reset_after_fork())

_alive: "weakref.WeakSet[ChunkTables]" = told_of_forks(lambda tables: tables.reset_after_fork())


def share(tables: "ChunkTables") -> None:
    """Have tables give up chunks when others need the room, and start anew in a forked child."""
    _alive.add(tables)


def now() -> int:
    """Return the number of this use."""
    return next(_uses)


def make_room(before: int) -> None:
    """See that one more chunk can be mapped, as far as chunks that were asked for before a use can leave for it."""
    while count_mappings() >= MOST_MAPPINGS:
        if not _release(read=False, before=before):
            return


def allocate(nbytes: int, before: int) -> Piece | None:
    """Return memory for a chunk, for which others leave as above where there is no more; None: it must be mapped."""
    piece = _arena.allocate(nbytes, MOST_READ)
    if piece is None and _release(read=True, before=before):
        piece = _arena.allocate(nbytes, MOST_READ)
    return piece


def allocate_beyond_budget(nbytes: int, before: int) -> Piece | None:
    """Return memory for a chunk that the system refuses to map, beyond what is kept otherwise; None: there is none.

    Others that were read leave first, so only what is asked for at once takes more than the budget.
    """
    _release(read=True, before=before)
    return lone_piece(nbytes)


def make_room_for(nbytes: int, before: int) -> None:
    """See that so much memory can be taken that is not the arena's, as far as chunks can leave for it as above."""
    while _kept and _kept[0].use < before and _counted() + nbytes > MOST_READ:
        _kept.popleft().release()
    while _counted() + nbytes > MOST_READ:  # of tables that are copies of those that it was kept for
        if not _release(read=True, before=before):
            return


def keep(table: "ChunkTable", places: NDArray[np.int64], piece: Piece) -> None:
    """Count the memory of a piece that is not the arena's, as long as it is there; chunks of a table are in it."""
    _counts.append(piece.nbytes)
    weakref.finalize(piece, _counts.append, -piece.nbytes).atexit = False
    _kept.append(_Kept(weakref.ref(table), places, weakref.ref(piece), now()))


class _Kept(NamedTuple):
    """Chunks that came together, and leave together: the first ones first."""

    table: "weakref.ref[ChunkTable]"
    places: NDArray[np.int64]
    piece: weakref.ref[Piece]
    use: int

    def release(self) -> None:
        """Release them, but for those that were opened anew, and those of a table that another thread uses."""
        table, piece = self.table(), self.piece()
        if table is None or piece is None:
            return
        try:
            lock = table.lock
        except ReferenceError:  # the last snapshot of the store is gone, and with it all tables soon
            return
        if lock.acquire(blocking=False):
            try:
                there = [place for place in self.places.tolist() if table.holder.get(place) is piece]
                table.release(np.array(there, np.int64))
            finally:
                lock.release()


def _counted() -> int:
    """Return the bytes of pieces that are not the arena's. A piece may end in any thread, in the middle of this."""
    while len(_counts) > 1:
        _counts.append(_counts.popleft() + _counts.popleft())
    return _counts[0] if _counts else 0


def _release(*, read: bool, before: int = sys.maxsize) -> bool:
    """Release the chunks that were asked for longest ago, of those that were read or mapped; False: there are none."""
    with ExitStack() as held:
        tables = [table for each in _not_busy(held) for table in each.leaves.values()]
        places = [np.flatnonzero((table.bases != 0) & (table.how == read) & (table.used < before)) for table in tables]
        counts = [len(there) for there in places]
        total = sum(counts)
        if not total:
            return False
        used = np.concatenate([table.used[there] for table, there in zip(tables, places, strict=True)])
        count = -(-total // _LEAVING)
        leaving = np.zeros(total, np.bool_)
        leaving[np.argpartition(used, count - 1)[:count]] = True
        for table, there, chosen in zip(tables, places, np.split(leaving, np.cumsum(counts)[:-1]), strict=True):
            if chosen.any():
                table.release(there[chosen])
        return True


def _not_busy(held: ExitStack) -> "list[ChunkTables]":
    """Lock, until ``held`` ends, all tables in which no other thread is in the middle of mapping or reading rows."""
    found = []
    for tables in each_of(_alive):
        if tables.lock.acquire(blocking=False):
            held.callback(tables.lock.release)
            found.append(tables)
    return found


relieved_by(lambda: _release(read=False))
