"""Plain twins of the kernels of `kernels.starts`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import EpisodeTable
from diskreplay.kernels.runs import (
    BEFORE,
    Starts,
    TimedRuns,
    Visible,
    joined,
    keep,
    open_episodes,
    starting_runs,
    without_hidden,
)
from tests.kernels.plain.frozen import Frozen


def starts_plain(
    lines: NDArray[np.int64],
    opened: int,
    rule: NDArray[np.int64],
    snapshot: NDArray[np.int64],
    partly: NDArray[np.int64],
    at: int,
    block: NDArray[np.int64],
) -> int:
    """Do what the kernel `starts` does."""
    starts, seen = Starts(*rule.tolist()), Frozen.of(snapshot)
    visible = Visible(seen.reached, seen.origin, seen.lanes, seen.lane_base, seen.oldest)
    left = without_hidden(TimedRuns(*partly), visible._replace(reached=1).least_ids(partly[0]))
    partly[:] = np.stack(left)
    episodes = [EpisodeTable(lines), *([open_episodes(seen.origin, seen.growing, seen.live)] if opened else [])]
    runs = joined([keep(left, left.count > 0), starting_runs(starts, EpisodeTable.concatenate(episodes), visible)])
    end = at + len(runs.first)
    block[:BEFORE, at:end] = np.stack(runs)
    block[BEFORE, at + 1 : end + 1] = block[BEFORE, at] + np.cumsum(runs.count)
    return end if left.count.all() else ~end
