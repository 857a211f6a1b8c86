"""Lanes of flat buffers: the order of rings, where episodes end, and which lane each was in."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from diskreplay.interop.exchange import lanes
from diskreplay.interop.exchange.lanes import LaneFiller, Piece, breaks, pieces, ring_order


def test_the_oldest_row_of_a_ring_is_the_next_to_be_written() -> None:
    np.testing.assert_array_equal(ring_order(4, 3, is_full=False), [0, 1, 2])
    np.testing.assert_array_equal(ring_order(4, 1, is_full=True), [1, 2, 3, 0])


def test_a_lane_breaks_where_a_step_does_not_lead_to_the_next_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    obs = np.zeros((6, 2, 3), np.float32)
    obs[:, 0, 0], obs[:, 1, 0] = range(6), range(10, 16)
    obs[2, 0, 1] = np.nan  # a NaN that stays is the same
    next_obs = np.roll(obs, -1, 0)
    next_obs[3, 1, 2] = 1
    expected = np.zeros((6, 2), bool)
    expected[3, 1] = True
    for block_bytes in (1, 100, 8 << 20):
        monkeypatch.setattr(lanes, "_BLOCK_BYTES", block_bytes)
        np.testing.assert_array_equal(breaks([obs], [next_obs], np.arange(6)), expected)
    rolled = ring_order(6, 2, is_full=True)
    np.testing.assert_array_equal(
        breaks([np.roll(obs, 2, 0)] * 2, [np.roll(next_obs, 2, 0)] * 2, rolled), expected, "in the order of time"
    )
    assert breaks([obs], [next_obs], rolled[:0]).shape == (0, 2)


def test_pieces_end_with_episodes_and_with_their_lane() -> None:
    ended = np.array([[0, 1], [1, 0], [0, 1]], bool)
    assert pieces(ended) == [Piece(0, 0, 2), Piece(1, 0, 1), Piece(1, 1, 3), Piece(0, 2, 3)]
    assert pieces(ended[:0]) == []


@given(ended=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=12))
def test_each_piece_goes_back_to_its_lane(ended: list[list[bool]]) -> None:
    found = pieces(np.array(ended, bool).reshape(-1, 3))
    filler = LaneFiller(3)
    assert [filler.place(len(piece)) for piece in found] == found
    assert filler.lengths == [len(ended)] * 3
