"""What a capacity hides, where a segment turns out to be gone while it is hidden."""

import numpy as np

from diskreplay.ids import POSITION_BITS, EpisodeTable
from diskreplay.kernels import hiding
from diskreplay.reading.live_lanes import CapacityFrontier, Segments

NONE = np.zeros(0, np.int64)


def episodes(*lines):
    return EpisodeTable(np.array(lines, np.int64))


def test_what_was_hidden_before_a_segment_was_dropped_stays_hidden():
    frontier = CapacityFrontier(10, hides=True)
    frontier.add_lanes(2)
    segments = Segments(0, np.ones(2, np.int64), np.arange(2), *[np.zeros(2, np.int64)] * 3)
    assert frontier.arrays(segments, 100)[-2].shape == (hiding.PLACE_ROWS, 0)
    frontier.make_ready()
    *_, by_place, following = frontier.arrays(segments, 100)
    assert len(following) == 100
    # The kernel hides four steps of lane 0, and asks for the time of a step of lane 1, whose segment is gone.
    by_place[hiding.OLDEST, 0] = 4
    frontier.found[hiding.HIDDEN], frontier.found[hiding.LAST] = 4, 1003
    log = episodes([0, 1, 8, 8, 1, 1000], [1 << POSITION_BITS, 1, 6, 6, 1, 2000])
    frontier.drop(np.array([False, True]), log, np.arange(2), np.full(2, -1))
    assert frontier.oldest.tolist() == [4, hiding.NEVER]
    assert frontier.found[hiding.HIDDEN] == 4 + 6
    assert frontier.found[hiding.LAST] == -1
    assert frontier.found[hiding.HIDDEN_BEFORE] == 1004
    assert frontier.found[hiding.REACHED] == 2001
    assert by_place[hiding.OLDEST].tolist() == [4, hiding.NEVER]
