"""Power cuts of real file systems cost no more than the last interval, however short the segments are."""

import pytest

from tests.crash.power_cuts import KINDS, SEGMENT_STEPS, cut_power
from tests.tiers import whole_or_part

# Beside the interval, the time that the disk takes for a mark: a second, or more where the machine is saturated.
MOST_EXCESS_S = whole_or_part(1, 5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("segment_steps", SEGMENT_STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_power_cut_costs_no_step_that_is_older_than_the_interval(kind: str, segment_steps: int | None) -> None:
    for _ in range(whole_or_part(30, 1)):
        cut = cut_power(kind, segment_steps, 4.0)
        assert cut.appended > cut.lost
        assert cut.excess_s <= MOST_EXCESS_S, cut
