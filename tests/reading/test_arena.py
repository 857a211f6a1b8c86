"""Memory for small chunks: pieces that nobody else has, blocks that are given back."""

import os
import threading

import numpy as np
import pytest

from diskreplay.kernels import huge_pages
from diskreplay.reading.chunk_budget import BLOCK_BYTES, Arena, _piece_bytes

PLENTY = 64 * BLOCK_BYTES


def filled(arena, nbytes, value):
    piece = arena.allocate(nbytes, PLENTY)
    np.asarray(piece)[:] = value
    return piece


def test_pieces_are_apart_and_as_large_as_asked_for():
    arena = Arena()
    sizes = [1, 63, 64, 65, 1000, 4096, 5000, 1 << 18, BLOCK_BYTES]
    pieces = [filled(arena, nbytes, number) for number, nbytes in enumerate(sizes * 3)]
    for number, piece in enumerate(pieces):
        assert piece.nbytes == len(np.asarray(piece))
        assert (np.asarray(piece) == number).all()
        assert piece.address % 64 == 0


@pytest.mark.parametrize("nbytes", [1, 64, 65, 129, 1000, 1024, 1025, 4097, 5121, 200_000, 1 << 18])
def test_a_piece_takes_a_quarter_more_than_asked_for_at_most(nbytes):
    size = _piece_bytes(nbytes)
    assert nbytes <= size < nbytes + max(64, nbytes / 4 + 1)


def test_memory_is_used_again_only_when_the_last_array_over_it_is_gone():
    arena = Arena()
    kept = filled(arena, 4096, 7).array("int16", (64, 32))[3:5]
    others = [filled(arena, 4096, number % 5) for number in range(3 * BLOCK_BYTES // 4096)]
    assert (kept == 7 * 257).all()
    assert not kept.flags.writeable
    del others
    blocks = arena.nbytes
    assert blocks == BLOCK_BYTES  # the others were given back
    again = [filled(arena, 4096, 1) for _ in range(BLOCK_BYTES // 4096 - 1)]
    assert arena.nbytes == blocks
    assert (kept == 7 * 257).all()
    del kept, again
    assert arena.nbytes == 0


def test_there_is_never_more_than_the_caller_allows():
    arena = Arena()
    pieces = []
    while (piece := arena.allocate(1 << 18, 2 * BLOCK_BYTES)) is not None:
        pieces.append(piece)
    assert len(pieces) == 2 * BLOCK_BYTES >> 18
    assert arena.nbytes == 2 * BLOCK_BYTES
    assert arena.allocate(64, 2 * BLOCK_BYTES) is None
    pieces.pop()
    assert arena.allocate(1 << 18, 2 * BLOCK_BYTES) is not None


def test_spare_blocks_stay_and_leave_for_pieces_of_another_size():
    arena = Arena()
    arena.spare = 2 * BLOCK_BYTES
    pieces = [arena.allocate(1 << 20, PLENTY) for _ in range(3 * BLOCK_BYTES >> 20)]
    first = {piece.address for piece in pieces}
    assert arena.nbytes == 3 * BLOCK_BYTES
    del pieces
    assert arena.nbytes == 2 * BLOCK_BYTES
    assert arena.allocate(1 << 20, 2 * BLOCK_BYTES).address in first
    other = [arena.allocate(1 << 18, 2 * BLOCK_BYTES) for _ in range(2 * BLOCK_BYTES >> 18)]
    assert None not in other
    assert arena.nbytes == 2 * BLOCK_BYTES
    assert arena.allocate(1 << 20, 2 * BLOCK_BYTES) is None
    del other
    arena.keep_no_spare()
    assert arena.nbytes == 0


def test_no_memory_of_the_system_is_no_piece(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(huge_pages.mmap, "mmap", refuse)
    assert Arena().allocate(64, PLENTY) is None


def test_what_is_returned_after_a_new_start_is_not_given_out():
    arena = Arena()
    old = filled(arena, 4096, 1)
    arena.reset_after_fork()
    new = filled(arena, 4096, 2)
    del old
    assert arena.nbytes == BLOCK_BYTES
    third = filled(arena, 4096, 3)
    assert (np.asarray(new) == 2).all()
    assert third.address != new.address


def test_threads_that_take_and_return_never_share_a_piece():
    arena, wrong = Arena(), []

    def work(value):
        rng, kept = np.random.default_rng(value), []
        for _ in range(3000):
            nbytes = int(rng.choice([100, 4096, 30_000]))
            kept.append(filled(arena, nbytes, value))
            if len(kept) > 40:
                piece = kept.pop(int(rng.integers(len(kept))))
                if not (np.asarray(piece) == value).all():
                    wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert arena.nbytes == 0


def test_a_forked_child_has_its_own_memory():
    arena = Arena()
    piece = filled(arena, 4096, 1)
    child = os.fork()
    if not child:
        np.asarray(piece)[:] = 2
        os._exit(int((np.asarray(piece) != 2).any()))
    assert os.waitpid(child, 0)[1] == 0
    assert (np.asarray(piece) == 1).all()
