"""The kernel that looks back to an episode's start does what its plain twin and the model do."""

from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from diskreplay.ids import POSITION_BITS, POSITION_MASK
from tests.kernels.pairs import KERNELS
from tests.views.fakes import FLAT_SCHEMA, Segment, Snapshot, episode
from tests.views.strategies import snapshots

FUNCTIONS = KERNELS["episode_offset"]
seeds = st.integers(0, 2**32 - 1)


def arguments(snapshot: Snapshot, mapped: float, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Return what both are given of the flags, that share of the chunks mapped."""
    done = snapshot.leaf("done")
    bases = np.array([block.ctypes.data if rng.random() < mapped else 0 for block in done.holder], np.int64)
    return done.first_chunk, done.chunks, done.shift, snapshot.lanes, bases


def call(function: Any, rows: tuple[np.ndarray, ...], table: tuple[np.ndarray, ...]) -> tuple[int, list[int], Any]:
    before, flags = np.full(len(rows[0]), -7), np.full(len(rows[0]), 255, np.uint8)
    return function(*rows, *table, before, flags), before.tolist(), flags.tolist()


def places(snapshot: Snapshot, ids: list[int]) -> tuple[np.ndarray, ...]:
    slot = (np.array(ids, np.int64) >> POSITION_BITS) - snapshot.origin
    row, lane = np.divmod(np.array(ids, np.int64) & POSITION_MASK, np.maximum(snapshot.lanes[slot], 1))
    return slot, lane, row


@given(snapshots(FLAT_SCHEMA), seeds)
def test_the_steps_before_each_step_are_counted(snapshot: Snapshot, seed: int) -> None:
    table = arguments(snapshot, 1.0, np.random.default_rng(seed))
    ids = list(snapshot.model)
    for function in FUNCTIONS:
        bad, before, flags = call(function, places(snapshot, ids), table)
        assert bad == -1
        assert before == [t for _, t in snapshot.model.values()]
        assert all(flag & 4 for flag in flags)


@given(snapshots(FLAT_SCHEMA), st.sampled_from((1.0, 0.7)), seeds)
def test_the_kernel_does_what_its_twin_does(snapshot: Snapshot, mapped: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = arguments(snapshot, mapped, rng)
    slots = len(snapshot.lanes)
    # Rows, lanes and slots that are none are among them.
    for slot in range(-1, slots + 1):
        lanes = int(snapshot.lanes[slot]) if 0 <= slot < slots else 1
        for lane in range(-1, lanes + 1):
            for row in rng.integers(-2, 40, 4):
                rows = np.array([slot]), np.array([lane]), np.array([row])
                fast, plain = (call(function, rows, table) for function in FUNCTIONS)
                assert fast == plain


def test_the_first_item_without_a_start_is_returned() -> None:
    rng = np.random.default_rng(0)
    snapshot = Snapshot(FLAT_SCHEMA, [Segment([[episode(FLAT_SCHEMA, 9, "terminated", True, rng)]], chunk_rows=4)])
    first, chunks, shift, lanes, bases = arguments(snapshot, 1.0, rng)
    zeros = np.zeros(3, np.int64)
    bases[1] = 0
    for function in FUNCTIONS:
        table = first, chunks, shift, lanes, bases
        assert call(function, (zeros, zeros, np.array([3, 2, 8])), table) == (2, [3, 2, -7], [4, 4, 255])
    snapshot.leaf("done").holder[0][0, 0] = 0
    for function in FUNCTIONS:
        assert call(function, (zeros, zeros, np.array([3, 2, 8])), table)[0] == 0
