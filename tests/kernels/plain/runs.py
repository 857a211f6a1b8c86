"""Plain twins of the kernels of `kernels.runs`."""

import numpy as np

from diskreplay.ids import OBSERVATION_ONLY, OPEN, TERMINATED, EpisodeTable, Ints
from diskreplay.kernels import packed
from diskreplay.kernels.runs import (
    ALL_STEPS,
    ALL_VISIBLE,
    BEFORE,
    BLOCK,
    DROPPED,
    FIRST_ONLY,
    LINES,
    MOVED_BACK,
    PADDED,
    RULE,
    RUNS_AND_OPEN,
    Starts,
    TimedRuns,
    Visible,
    joined,
    keep,
    open_episodes,
    without_hidden,
)
from tests.kernels.plain.frozen import Frozen


def starts_plain(given: Ints, kind: int, snapshot: Ints, record: Ints, at: int) -> int:
    """Do what the kernel `starts` does."""
    starts, seen = Starts(*packed.ints(record, RULE).tolist()), Frozen.of(snapshot)
    visible = Visible(seen.reached, seen.origin, seen.lanes, seen.lane_base, seen.oldest)
    parts, is_whole = list[TimedRuns](), True
    if kind == LINES:
        parts.append(starting_runs(starts, EpisodeTable(given), visible))
    else:
        left = without_hidden(TimedRuns(*given), visible._replace(reached=1).least_ids(given[0]))
        given[:], is_whole = np.stack(left), bool(left.count.all())
        parts.append(keep(left, left.count > 0))
    if kind == RUNS_AND_OPEN:
        parts.append(starting_runs(starts, open_episodes(seen.origin, seen.growing, seen.live), visible))
    runs, block = joined(parts), packed.ints2(record, BLOCK)
    end = at + len(runs.first)
    block[:BEFORE, at:end] = np.stack(runs)
    block[BEFORE, at + 1 : end + 1] = block[BEFORE, at] + np.cumsum(runs.count)
    return end if is_whole else ~end


def fill_grid_plain(runs: Ints, grid: Ints) -> None:
    """Do what `fill_grid` does, with the ids of all runs in one array."""
    ids = [np.arange(count) * stride + first for first, stride, count in runs.T.tolist()]
    grid[:] = np.concatenate([np.zeros(0, np.int64), *ids]).reshape(grid.shape[::-1]).T


def starting_runs(starts: Starts, episodes: EpisodeTable, visible: Visible = ALL_VISIBLE) -> TimedRuns:
    """Return the ids at which samples of these episodes start: one run an episode, or two where one is moved."""
    first, stride, steps, obs_rows, end, time = episodes.lines.T
    is_open = (end & OPEN) != 0
    beyond = np.where(starts.observed, obs_rows, steps) - starts.open_rows
    of_open = np.where((beyond >= 0) & (starts.open_rows > 0), beyond // starts.step + 1, 0)
    # Without a final observation the last step has nothing to bootstrap from, unless it terminated.
    unfollowed = np.where((end & OBSERVATION_ONLY) != 0, starts.followed, 1)
    total = steps - np.where((end & TERMINATED) != 0, 0, unfollowed)
    missing = total - starts.length
    whole, rest = np.divmod(np.maximum(missing, 0), starts.step)
    whole = np.where(missing < 0, 0, whole + 1)
    # One more sample has some of its steps in the episode.
    partial = (rest > 0) & (starts.step < starts.length + rest)
    of_ended = {
        PADDED: whole + (partial | (missing < 0)),
        MOVED_BACK: whole + (missing < 0),
        DROPPED: whole,
        FIRST_ONLY: np.ones_like(steps),
        ALL_STEPS: steps,
    }[starts.last]
    if starts.last != ALL_STEPS:
        of_ended = np.where(total > 0, of_ended, 0)
    moves = ~is_open & partial & (starts.last == MOVED_BACK)
    begin = np.where(is_open, 0, rest) if starts.from_end else np.zeros_like(steps)
    regular = TimedRuns(first + begin * stride, stride * starts.step, np.where(is_open, of_open, of_ended), time)
    moved = TimedRuns(first + (0 if starts.from_end else missing) * stride, stride, moves.astype(np.int64), time)
    # The one behind the other, episode by episode.
    pairs = zip(*((moved, regular) if starts.from_end else (regular, moved)), strict=True)
    both = TimedRuns(*(np.stack(columns, axis=1).reshape(-1) for columns in pairs))
    least = np.where(both.time < visible.reached, visible.least_ids(both.first), starts.since)
    runs = without_hidden(both, np.maximum(least, starts.since))
    return keep(runs, runs.count > 0)
