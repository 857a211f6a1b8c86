"""Positions in lanes, up to which rollouts were given."""

import numpy as np

from diskreplay.views.rollout_cursor import Positions


def test_positions_go_forwards_and_know_only_their_lanes() -> None:
    positions = Positions().advanced(np.array([5, 9]), np.array([50, 90]))
    positions = positions.advanced(np.array([1, 5, 9]), np.array([10, 40, 95]))
    assert positions.of(np.array([0, 1, 5, 9, 12])).tolist() == [0, 10, 50, 95, 0]
