"""The budget of memory for chunks, shared by all stores of a process.

When the budget is used up, the least recently used chunks are released.

A chunk is a part of a field's array. A compressed array is a zarr shard: its inner chunks are decompressed one by one.

Small chunk files are read into memory and not mapped. A mapping costs a system call, a page fault and one of the 65,530
mappings that the kernel allows a process.
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
    """Memory for a chunk or for several inner chunks.

    The memory is reused when no `Piece` and no array refers to it.
    """

    __slots__ = ("__weakref__", "_memory", "address", "nbytes")

    def __init__(self, memory: object, address: int, nbytes: int) -> None:
        self._memory = memory  # each piece keeps the memory of its block alive
        self.address = address
        self.nbytes = nbytes

    @classmethod
    def of(cls, memory: NDArray[np.uint8]) -> "Piece":
        return cls(memory, memory.ctypes.data, memory.nbytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def array(self, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        array = np.asarray(self).view(dtype).reshape(shape)
        array.flags.writeable = False
        return array

    def will_need(self, start: int, nbytes: int) -> None:
        """Do nothing, because a piece is in memory; the same method of `Mapping` requests pages from the disk."""


def lone_piece(nbytes: int) -> Piece | None:
    try:
        return Piece.of(np.empty(nbytes, np.uint8))
    except MemoryError:
        return None


@lru_cache(maxsize=8)
def zeros_piece(nbytes: int) -> Piece:
    """Return a piece of zeros that all callers share; no caller may write to it."""
    memory = np.zeros(nbytes, np.uint8)
    return Piece(memory, memory.ctypes.data, nbytes)


class _Block:
    """Anonymous memory of `BLOCK_BYTES` bytes, divided into pieces of ``piece_bytes`` bytes."""

    def __init__(self, piece_bytes: int) -> None:
        (self.memory,) = zeros((BLOCK_BYTES, np.uint8))
        self._start = self.memory.ctypes.data
        self.piece_bytes = piece_bytes
        self.count = BLOCK_BYTES // piece_bytes
        # The numbers of the unused pieces. They are in descending order at first, so that `pop` takes piece 0 first.
        self.free = list(range(self.count - 1, -1, -1))

    def address(self, number: int) -> int:
        return self._start + number * self.piece_bytes


class Arena:
    """Allocates each `Piece` of memory for chunks from a `_Block`.

    A block is empty if none of its pieces is in use. An empty block is returned to the system if all blocks together
    take more than ``spare`` bytes. Other empty blocks are kept for reuse. A new block is slower, because the system
    first clears its memory.

    Concurrency: any thread may allocate pieces. Any thread may drop the last reference to a piece, even during a call
    of `allocate`.
    """

    def __init__(self) -> None:
        self.spare = 0
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Forget all blocks in a forked child: another thread may have been changing the blocks during the fork."""
        self._lock = threading.Lock()
        self._returned: deque[tuple[_Block, int]] = deque()
        self._blocks: dict[int, list[_Block]] = {}  # {size of the pieces: blocks}

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._blocks.values())) * BLOCK_BYTES

    def allocate(self, nbytes: int, most: int) -> Piece | None:
        """Return a piece of ``nbytes`` bytes, at most `BLOCK_BYTES`; None if there is no room for it.

        A piece that fits into no present block needs a new block. There is no room if the new block would bring the
        total of all blocks above ``most`` bytes, or if the system has no memory for the block.
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
                blocks.append(blocks.pop(place))  # the next call searches this block first
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
        """Return every empty block to the system, and from now on also each block that becomes empty.

        A finalizer may call this method.
        """
        self.spare = 0
        # If the lock is taken, empty blocks stay until `allocate` reaches its bound ``most``.
        if self._lock.acquire(blocking=False):
            try:
                while self._drop_unused():
                    pass
            finally:
                self._lock.release()

    def _give_back(self, block: _Block, number: int) -> None:
        self._returned.append((block, number))
        self._try_reclaim()

    def _try_reclaim(self) -> None:
        """Call `_reclaim` unless the lock is taken.

        This never waits for the lock, because a finalizer may run in the thread that holds the lock. The holder of the
        lock, or a later call, then reclaims the pieces.
        """
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
            # In a forked child, `blocks` does not have the parent's blocks.
            if len(block.free) == block.count and self.nbytes > self.spare and block in blocks:
                blocks.remove(block)

    def _drop_unused(self) -> bool:
        for blocks in self._blocks.values():
            for block in blocks:
                if len(block.free) == block.count:
                    blocks.remove(block)
                    return True
        return False


def _piece_bytes(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to 1, 1.25, 1.5 or 1.75 times a power of two, and to a multiple of a cache line."""
    step = max(CACHE_LINE, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


# Ways to keep a chunk in memory. MAPPED: the chunk file is mapped. READ: the chunk file was read into memory.
# DECOMPRESSED: the chunk was decompressed into memory, or copied from another pack. IN_PACK: all chunks of the pack are
# mapped at once.
MAPPED, READ, DECOMPRESSED, IN_PACK = range(4)

# The kernel allows a process 65,530 mappings. The trainer itself needs some of these mappings.
MOST_MAPPINGS = 30_000

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""The machine's memory in bytes."""

# The maximum number of bytes of chunks read into memory, and also the maximum number of bytes of decompressed chunks.
_SHARE = MEMORY // 16

MOST_READ = min(1 << 30, _SHARE)

# Two bounds of the bytes of all decompressed chunks: see `allocate_inner`. The low bound is quicker for a large field:
# recently used memory is reused, and the system has to clear new memory.
MOST_DECOMPRESSED = _SHARE
LEAST_DECOMPRESSED = min(64 << 20, MOST_DECOMPRESSED)

# Decompressed inner chunks lie one after another in pieces of this many bytes. A larger inner chunk has a piece of its
# own. If the pieces had several sizes, blocks for one size would often be dropped to make blocks for another size.
_PIECE_BYTES = 1 << 20

# `_release` releases a fraction 1 / _LEAVING of the chunks. Each call compares all chunks, so it would be slow to
# release them one by one.
_LEAVING = 8


class Chunks(Protocol):
    """The chunks of one array: the part of `ChunkTable` that this module uses.

    ``bases``, ``used`` and ``how`` have one value per chunk. The place of a chunk is its index in these arrays.
    """

    bases: NDArray[np.int64]
    used: NDArray[np.int64]
    how: NDArray[np.uint8]
    holder: dict[int, Any]

    @property
    def lock(self) -> Any: ...

    def release(self, places: NDArray[np.int64]) -> None:
        """Release the chunks at these places; the caller holds ``lock``."""


class StoreChunks(Protocol):
    """The chunks of all arrays of a store: the part of `ChunkTables` that this module uses."""

    lock: Any

    @property
    def leaves(self) -> Mapping[str, Chunks]: ...

    def reset_after_fork(self) -> None: ...


_uses = itertools.count(1)
_arena, _decompressed = Arena(), Arena()
_kept: "deque[_Kept]" = deque()
# The sizes of decompressed pieces that are not from an `Arena`. When a piece is freed, its size is appended as a
# negative number.
_counts: deque[int] = deque()
# {bytes of an inner chunk: (a piece with room for more of these inner chunks, the number of inner chunks in the piece)}
_begun: "dict[int, tuple[Piece, int]]" = {}
os.register_at_fork(after_in_child=lambda: _reset_after_fork())

_alive: "weakref.WeakSet[StoreChunks]" = fork_listeners(lambda tables: tables.reset_after_fork())


def _reset_after_fork() -> None:
    _begun.clear()
    for arena in (_arena, _decompressed):
        arena.reset_after_fork()


def share(tables: StoreChunks) -> None:
    """Register a store's chunks: other stores may release some of them, and a forked child releases all of them."""
    _alive.add(tables)
    weakref.finalize(tables, _keep_no_spare).atexit = False


def _keep_no_spare() -> None:
    if not list(_alive):  # `_alive` no longer has the tables that are being finalized
        _begun.clear()
        _decompressed.keep_no_spare()


def now() -> int:
    """Return a number that is larger than every number returned before; it stands for the present time."""
    return next(_uses)


def make_room(before: int) -> None:
    """Release mapped chunks until there is room for a mapping.

    Only chunks that were last used before ``before`` are released. If no such chunk is left, there may be no room.
    """
    while count_mappings() >= MOST_MAPPINGS:
        if not _release(MAPPED, before):
            return


def allocate(nbytes: int, before: int) -> Piece | None:
    """Return memory to read a chunk of ``nbytes`` bytes into, or None if the chunk must be mapped instead.

    If the budget is used up, chunks that were read are released: see `_release`. ``before`` is a number that `now`
    returned.
    """
    piece = _arena.allocate(nbytes, MOST_READ)
    if piece is None and _release(READ, before):
        piece = _arena.allocate(nbytes, MOST_READ)
    return piece


def allocate_beyond_budget(nbytes: int, before: int) -> Piece | None:
    """Return memory beyond the budget, for a chunk that the system refuses to map; None if no memory is left."""
    _release(READ, before)
    return lone_piece(nbytes)


class Room(NamedTuple):
    """A part of ``piece``: memory for ``chunks`` inner chunks of one size, one after another."""

    chunks: int
    piece: Piece
    start: int  # the first byte of the part in `piece`


def allocate_inner(count: int, inner_bytes: int, before: int, *, of: int, grows: bool) -> list[Room]:
    """Return memory for ``count`` inner chunks of ``inner_bytes`` bytes; release older decompressed chunks if needed.

    A call takes new memory until all decompressed chunks together take `LEAST_DECOMPRESSED` bytes, or twice
    ``count * inner_bytes`` if this is more. If ``grows`` is True, each call may add one block, up to
    `MOST_DECOMPRESSED` bytes in all. This holds only for a field of at most twice `MOST_DECOMPRESSED` bytes: ``of`` is
    its decompressed size. A call exceeds these bounds only if no chunk can be released.

    Raises
    ------
    MemoryError
        The system has no memory for the inner chunks.
    """
    nbytes, most = max(_PIECE_BYTES, inner_bytes), max(LEAST_DECOMPRESSED, 2 * count * inner_bytes)
    if grows and of <= 2 * MOST_DECOMPRESSED:
        most = max(most, _decompressed.nbytes + BLOCK_BYTES)
    most = min(most, MOST_DECOMPRESSED)
    _decompressed.spare = max(_decompressed.spare, most)
    found, fits = list[Room](), nbytes // inner_bytes
    piece, used = _begun.pop(inner_bytes, (None, 0))  # no other thread can take this piece now
    while count:
        while piece is None:
            piece, used = _decompressed_piece(nbytes, most), 0
            if piece is None and most == sys.maxsize:
                raise MemoryError(
                    f"no memory for {count} decompressed chunks of {inner_bytes} bytes each; end other processes"
                )
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
    """Release decompressed chunks until ``nbytes`` more bytes fit.

    Only chunks that were last used before ``before`` are released. If no such chunk is left, the bytes may not fit.
    """
    while _counted() + _decompressed.nbytes + nbytes > MOST_DECOMPRESSED and _release_decompressed(nbytes, before):
        pass


def _decompressed_piece(nbytes: int, most: int) -> Piece | None:
    counted = _counted()
    if nbytes <= BLOCK_BYTES:
        return _decompressed.allocate(nbytes, most - counted)
    return lone_piece(nbytes) if counted + _decompressed.nbytes + nbytes <= most else None


def _release_decompressed(nbytes: int, before: int) -> bool:
    """Release about ``nbytes`` bytes of inner chunks; return False if no chunk to release was found.

    Only chunks that were last used before ``before`` are released.
    """
    leaving: dict[Chunks, list[_Kept]] = {}
    for _ in range(len(_kept)):
        if nbytes <= 0 or not _kept:
            break
        kept = _kept.popleft()
        table, piece = kept.table(), kept.piece()
        if table is None or piece is None:
            continue
        if (table.used[kept.places] >= before).any():
            _kept.append(kept)
        else:
            leaving.setdefault(table, []).append(kept)
            nbytes -= kept.nbytes
    for table, some in leaving.items():
        _release_kept(table, some)
    # `_kept` lists a chunk only for the table that decompressed it. `_release` also finds the chunks of tables that
    # were copied from this table.
    return bool(leaving) or _release(DECOMPRESSED, before)


def keep(table: Chunks, places: NDArray[np.int64], piece: Piece, nbytes: int, *, is_lone: bool) -> None:
    """Record that the chunks at ``places`` of a table were decompressed into ``nbytes`` bytes of a piece.

    ``is_lone`` is True if the piece is not from an `Arena`: `_counted` counts such pieces.
    """
    if is_lone:
        _counts.append(piece.nbytes)
        weakref.finalize(piece, _counts.append, -piece.nbytes).atexit = False
    with suppress(IndexError):
        while _kept[0].piece() is None:  # the store of these chunks was closed
            _kept.popleft()
    _kept.append(_Kept(weakref.ref(table), places, weakref.ref(piece), nbytes))


class _Kept(NamedTuple):
    table: "weakref.ref[Chunks]"
    places: NDArray[np.int64]
    piece: weakref.ref[Piece]
    nbytes: int


def _release_kept(table: Chunks, leaving: list[_Kept]) -> None:
    """Release the chunks of ``leaving`` that are still in their pieces, unless another thread uses the table."""
    try:
        lock = table.lock
    except ReferenceError:  # the store's last snapshot is gone, and its tables will soon be freed
        return
    if lock.acquire(blocking=False):
        try:
            there = [p for kept in leaving for p in kept.places.tolist() if table.holder.get(p) is kept.piece()]
            table.release(np.array(there, np.int64))
        finally:
            lock.release()


def _counted() -> int:
    """Return the number of bytes of all decompressed pieces that are not from an `Arena`.

    Any thread may drop a piece during the call.
    """
    while len(_counts) > 1:
        _counts.append(_counts.popleft() + _counts.popleft())
    return _counts[0] if _counts else 0


def _release(how: int, before: int = sys.maxsize) -> bool:
    """Release the least recently used eighth of some chunks; return whether there were any chunks to release.

    These are the chunks that are kept in the way ``how``, such as `MAPPED`, and were last used before ``before``.
    """
    with ExitStack() as held:
        stores = _not_busy(held)  # this list keeps the objects alive if another thread drops them
        tables = [table for each in stores for table in each.leaves.values()]
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
    """Return the chunks of all stores that no other thread has locked, and lock them until ``held`` is closed."""
    found = []
    for tables in each_of(_alive):
        if tables.lock.acquire(blocking=False):
            held.callback(tables.lock.release)
            found.append(tables)
    return found


relieved_by(lambda: _release(MAPPED))
