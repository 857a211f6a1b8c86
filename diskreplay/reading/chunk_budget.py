"""What all stores of a process may keep of chunks, mapped or read into memory, and which of them leave for others.

Small chunk files are read into large blocks of memory, each divided into pieces of one size. A mapping a file of some
kilobytes costs a call of the system, a page fault and an entry in tables of which the kernel allows 65,530; a read
costs one call and no entry.
"""

import itertools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from diskreplay.kernels.huge_pages import CACHE_LINE, LARGE_PAGE, zeros
from diskreplay.segments.files.mapping import count_mappings, relieved_by
from diskreplay.workers import each_of, fork_listeners

BLOCK_BYTES = 2 * LARGE_PAGE


class Piece:
    """Memory for one chunk, reused when the last reference to it, or to an array over it, is gone."""

    __slots__ = ("__weakref__", "_memory", "address", "nbytes")

    def __init__(self, memory: object, address: int, nbytes: int) -> None:
        self._memory = memory  # of the whole block: it stays as long as any piece of it
        self.address = address
        self.nbytes = nbytes

    @classmethod
    def of(cls, memory: NDArray[np.uint8]) -> "Piece":
        """Return a piece that is no part of a block."""
        return cls(memory, memory.ctypes.data, memory.nbytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def array(self, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the chunk as an array that keeps this piece alive; not to be written to."""
        array = np.asarray(self).view(dtype).reshape(shape)
        array.flags.writeable = False
        return array

    def will_need(self, start: int, nbytes: int) -> None:
        """Do nothing: what was read is in memory."""


def lone_piece(nbytes: int) -> Piece | None:
    """Return a piece that is no part of a block, or None where the system has no memory for it."""
    try:
        return Piece.of(np.empty(nbytes, np.uint8))
    except MemoryError:
        return None


@lru_cache(maxsize=8)
def zeros_piece(nbytes: int) -> Piece:
    """Return a piece of zeros, the same one each time; not to be written to."""
    memory = np.zeros(nbytes, np.uint8)
    return Piece(memory, memory.ctypes.data, nbytes)


class _Block:
    """Anonymous memory in pieces of one size."""

    def __init__(self, piece_bytes: int) -> None:
        (self.memory,) = zeros((BLOCK_BYTES, np.uint8))
        self._start = self.memory.ctypes.data
        self.piece_bytes = piece_bytes
        self.count = BLOCK_BYTES // piece_bytes
        self.free = list(range(self.count - 1, -1, -1))  # the first is the last: pages are taken in order

    def address(self, number: int) -> int:
        """Return where a piece begins."""
        return self._start + number * self.piece_bytes


class Arena:
    """Pieces of memory for chunks, out of blocks that are given back to the system when nothing is left in them.

    As long as all blocks take no more than ``spare`` bytes, they are kept: for fresh memory the system has to find and
    to clear some, which may take longer than what is done with it.

    Concurrency: any thread may allocate pieces, and drop the last reference to one, also in the middle of `allocate`.
    """

    def __init__(self) -> None:
        self.spare = 0
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Take from new blocks only, in a forked child: another thread may have been in the middle of a change."""
        self._lock = threading.Lock()
        self._returned: deque[tuple[_Block, int]] = deque()
        self._blocks: dict[int, list[_Block]] = {}  # by size of their pieces

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(map(len, self._blocks.values())) * BLOCK_BYTES

    def allocate(self, nbytes: int, most: int) -> Piece | None:
        """Return memory for so many bytes, `BLOCK_BYTES` at most, or None where all blocks would take more than `most`.

        None also where the system has no memory for another block.
        """
        size = _piece_bytes(nbytes)
        with self._lock:
            self._reclaim()
            block = self._block_with_room(size, most)
            if block is None:
                return None
            number = block.free.pop()
        piece = Piece(block.memory, block.address(number), nbytes)
        weakref.finalize(piece, self._give_back, block, number).atexit = False
        self._try_reclaim()
        return piece

    def _block_with_room(self, size: int, most: int) -> _Block | None:
        blocks = self._blocks.get(size, [])
        for place in range(len(blocks) - 1, -1, -1):
            if blocks[place].free:
                blocks.append(blocks.pop(place))  # the next is looked for here first
                return blocks[-1]
        while self.nbytes + BLOCK_BYTES > most:
            if not self._drop_unused():
                return None
        try:
            blocks.append(_Block(size))
        except (OSError, MemoryError):
            return None
        self._blocks[size] = blocks
        return blocks[-1]

    def keep_no_spare(self) -> None:
        """Give back what is kept though nothing is in it, from now on; a finalizer may call this."""
        self.spare = 0
        if self._lock.acquire(blocking=False):  # else it is left until another is given back
            try:
                while self._drop_unused():
                    pass
            finally:
                self._lock.release()

    def _give_back(self, block: _Block, number: int) -> None:
        self._returned.append((block, number))
        self._try_reclaim()

    def _try_reclaim(self) -> None:
        """Take back what was returned, or leave that to whoever holds the lock, perhaps further up in this thread."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._reclaim()
            finally:
                self._lock.release()

    def _reclaim(self) -> None:
        while self._returned:
            block, number = self._returned.popleft()
            block.free.append(number)
            blocks = self._blocks.get(block.piece_bytes, [])
            # It is not among them in a child that has started anew.
            if len(block.free) == block.count and self.nbytes > self.spare and block in blocks:
                blocks.remove(block)

    def _drop_unused(self) -> bool:
        """Give a block in which nothing is left back to the system; False: there is none."""
        for blocks in self._blocks.values():
            for block in blocks:
                if len(block.free) == block.count:
                    blocks.remove(block)
                    return True
        return False


def _piece_bytes(nbytes: int) -> int:
    """Round up to whole cache lines, and to four sizes between each power of two and the next."""
    step = max(CACHE_LINE, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


# How a chunk is held: mapped, read or decompressed into memory (or copied from another pack), or as a part of a pack
# that is mapped as a whole.
MAPPED, READ, DECOMPRESSED, IN_PACK = range(4)

# The kernel allows 65,530, and the trainer has others.
MOST_MAPPINGS = 30_000

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Bytes that the machine has."""

# What is kept beside the page cache is bounded by what there is.
_SHARE = MEMORY // 16

# Bytes in which chunks are kept that were read and not mapped.
MOST_READ = min(1 << 30, _SHARE)

# Bytes in which inner chunks are kept that were decompressed: of fields of which at least half fits, as much as memory
# allows, of others a little. To decompress one again, into memory that was just used, is quicker there than to have the
# system find and clear fresh memory.
MOST_DECOMPRESSED = _SHARE
LEAST_DECOMPRESSED = min(64 << 20, MOST_DECOMPRESSED)

# Inner chunks that are decompressed lie in pieces of so many bytes, one behind the other, or a larger one in its own.
# All are of one size, or blocks with pieces of another would leave.
_PIECE_BYTES = 1 << 20

# What leaves at once: finding what was not used for longest means looking at all.
_LEAVING = 8


class Chunks(Protocol):
    """The chunks of one array: see `ChunkTable`, which is one."""

    bases: NDArray[np.int64]
    used: NDArray[np.int64]
    how: NDArray[np.uint8]
    holder: dict[int, Any]

    @property
    def lock(self) -> Any:
        """That of all arrays of the store."""

    def release(self, places: NDArray[np.int64]) -> None:
        """Release the chunks at these places, under the lock."""


class StoreChunks(Protocol):
    """The chunks of all arrays of a store: see `ChunkTables`, which is one."""

    lock: Any

    @property
    def leaves(self) -> Mapping[str, Chunks]:
        """Those of each array."""

    def reset_after_fork(self) -> None:
        """Release all in a forked child."""


_uses = itertools.count(1)
_arena, _decompressed = Arena(), Arena()
_kept: "deque[_Kept]" = deque()
_counts: deque[int] = deque()  # bytes that came and went of pieces that are no arena's
_begun: "dict[int, tuple[Piece, int]]" = {}  # pieces with room for more inner chunks of a size, and how many are in it
os.register_at_fork(after_in_child=lambda: _reset_after_fork())

_alive: "weakref.WeakSet[StoreChunks]" = fork_listeners(lambda tables: tables.reset_after_fork())


def _reset_after_fork() -> None:
    _begun.clear()
    for arena in (_arena, _decompressed):
        arena.reset_after_fork()


def share(tables: StoreChunks) -> None:
    """Have tables give up chunks when others need the room, and start anew in a forked child."""
    _alive.add(tables)
    weakref.finalize(tables, _keep_no_spare).atexit = False


def _keep_no_spare() -> None:
    if not list(_alive):  # it knows already that these tables are gone
        _begun.clear()
        _decompressed.keep_no_spare()


def now() -> int:
    """Return the number of this use."""
    return next(_uses)


def make_room(before: int) -> None:
    """See that one more chunk can be mapped, as far as chunks that were asked for before a use can leave for it."""
    while count_mappings() >= MOST_MAPPINGS:
        if not _release(MAPPED, before):
            return


def allocate(nbytes: int, before: int) -> Piece | None:
    """Return memory for a chunk, for which others leave as above where there is no more; None: it must be mapped."""
    piece = _arena.allocate(nbytes, MOST_READ)
    if piece is None and _release(READ, before):
        piece = _arena.allocate(nbytes, MOST_READ)
    return piece


def allocate_beyond_budget(nbytes: int, before: int) -> Piece | None:
    """Return memory for a chunk that the system refuses to map, beyond what is kept otherwise; None: there is none.

    Others that were read leave first, so only what is asked for at once takes more than the budget.
    """
    _release(READ, before)
    return lone_piece(nbytes)


class Room(NamedTuple):
    """Memory for some inner chunks of a size: how many, and where in a piece."""

    chunks: int
    piece: Piece
    start: int  # in bytes


def allocate_inner(count: int, inner_bytes: int, before: int, *, of: int, grows: bool) -> list[Room]:
    """Return memory for so many inner chunks, for which others leave as above.

    ``of`` so many bytes are all of the field. With ``grows``, a little more memory is taken than before, if it pays.
    Where more is needed at once than is kept otherwise, twice that is kept. Raises MemoryError.
    """
    nbytes, most = max(_PIECE_BYTES, inner_bytes), max(LEAST_DECOMPRESSED, 2 * count * inner_bytes)
    if grows and of <= 2 * MOST_DECOMPRESSED:
        most = max(most, _decompressed.nbytes + BLOCK_BYTES)
    most = min(most, MOST_DECOMPRESSED)
    _decompressed.spare = max(_decompressed.spare, most)
    found, fits = list[Room](), nbytes // inner_bytes
    piece, used = _begun.pop(inner_bytes, (None, 0))  # nobody else has it now
    while count:
        while piece is None:
            piece, used = _decompressed_piece(nbytes, most), 0
            if piece is None and most == sys.maxsize:
                raise MemoryError(f"no memory to decompress {count} inner chunks of {inner_bytes} bytes into")
            if piece is None and not _release_decompressed(count * inner_bytes, before):
                most = sys.maxsize
        some = min(count, fits - used)
        found.append(Room(some, piece, used * inner_bytes))
        count, used = count - some, used + some
        if used == fits:
            piece, used = None, 0
    if piece is not None:
        _begun[inner_bytes] = piece, used
    return found


def make_room_decompressed(nbytes: int, before: int) -> None:
    """Release what was decompressed, as above, until so many bytes more are no more than are kept of it."""
    while _counted() + _decompressed.nbytes + nbytes > MOST_DECOMPRESSED and _release_decompressed(nbytes, before):
        pass


def _decompressed_piece(nbytes: int, most: int) -> Piece | None:
    counted = _counted()
    if nbytes <= BLOCK_BYTES:
        return _decompressed.allocate(nbytes, most - counted)
    return lone_piece(nbytes) if counted + _decompressed.nbytes + nbytes <= most else None


def _release_decompressed(nbytes: int, before: int) -> bool:
    """Release about so many bytes of inner chunks as above; False: there are none."""
    leaving: dict[Chunks, list[_Kept]] = {}
    for _ in range(len(_kept)):
        if nbytes <= 0 or not _kept:
            break
        kept = _kept.popleft()
        table, piece = kept.table(), kept.piece()
        if table is None or piece is None:
            continue
        if (table.used[kept.places] >= before).any():
            _kept.append(kept)  # some are needed now
        else:
            leaving.setdefault(table, []).append(kept)
            nbytes -= kept.nbytes
    for table, some in leaving.items():
        _release_kept(table, some)
    return bool(leaving) or _release(DECOMPRESSED, before)  # of tables that are copies of those that they were kept for


def keep(table: Chunks, places: NDArray[np.int64], piece: Piece, nbytes: int, *, is_lone: bool) -> None:
    """Note what is decompressed in so many bytes of a piece, whose memory counts, while it is there, if it is lone."""
    if is_lone:
        _counts.append(piece.nbytes)
        weakref.finalize(piece, _counts.append, -piece.nbytes).atexit = False
    with suppress(IndexError):
        while _kept[0].piece() is None:  # of a store that was closed
            _kept.popleft()
    _kept.append(_Kept(weakref.ref(table), places, weakref.ref(piece), nbytes))


class _Kept(NamedTuple):
    """Chunks that came together, and leave together: the first ones first, but for those that are needed."""

    table: "weakref.ref[Chunks]"
    places: NDArray[np.int64]
    piece: weakref.ref[Piece]
    nbytes: int


def _release_kept(table: Chunks, leaving: list[_Kept]) -> None:
    """Release chunks, but for those that were opened anew, and those of a table that another thread uses."""
    try:
        lock = table.lock
    except ReferenceError:  # the last snapshot of the store is gone, and with it all tables soon
        return
    if lock.acquire(blocking=False):
        try:
            there = [p for kept in leaving for p in kept.places.tolist() if table.holder.get(p) is kept.piece()]
            table.release(np.array(there, np.int64))
        finally:
            lock.release()


def _counted() -> int:
    """Return the bytes of pieces that are no arena's. A piece may end in any thread, in the middle of this."""
    while len(_counts) > 1:
        _counts.append(_counts.popleft() + _counts.popleft())
    return _counts[0] if _counts else 0


def _release(how: int, before: int = sys.maxsize) -> bool:
    """Release the chunks that were asked for longest ago, of those that are held so; False: there are none."""
    with ExitStack() as held:
        tables = [table for each in _not_busy(held) for table in each.leaves.values()]
        places = [np.flatnonzero((table.bases != 0) & (table.how == how) & (table.used < before)) for table in tables]
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


def _not_busy(held: ExitStack) -> list[StoreChunks]:
    """Lock, until ``held`` ends, all tables in which no other thread is in the middle of mapping or reading rows."""
    found = []
    for tables in each_of(_alive):
        if tables.lock.acquire(blocking=False):
            held.callback(tables.lock.release)
            found.append(tables)
    return found


relieved_by(lambda: _release(MAPPED))
