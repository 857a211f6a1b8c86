"""Memory that small chunk files are read into: large blocks, each divided into pieces of one size.

A mapping a file of some kilobytes costs a call of the system, a page fault and an entry in tables of which the kernel
allows 65,530; a read costs one call and no entry.
"""

import threading
import weakref
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from diskreplay.kernels.huge_pages import CACHE_LINE, LARGE_PAGE, zeros

BLOCK_BYTES = 2 * LARGE_PAGE


class Piece:
    """Memory for one chunk, reused when the last reference to it, or to an array over it, is gone."""

    __slots__ = ("__weakref__", "_memory", "address", "nbytes")

    def __init__(self, memory: object, address: int, nbytes: int) -> None:
        self._memory = memory  # of the whole block: it stays as long as any piece of it
        self.address = address
        self.nbytes = nbytes

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
        memory = np.empty(nbytes, np.uint8)
    except MemoryError:
        return None
    return Piece(memory, memory.ctypes.data, nbytes)


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
