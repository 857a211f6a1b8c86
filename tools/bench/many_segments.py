"""Draw from a store with a segment for each episode, and open it, compared with a store of a single segment."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import SCHEMA, append_whole, episodes, fill
from tools.bench.fresh import measure
from tools.bench.harness import Contestant, Report, Seconds, Table, Target, draw, in_turn, number, timed, timing_table


class Size(NamedTuple):
    """Segments of one episode, steps of each, batches drawn in a round, and processes that open each store."""

    segments: int
    episode_steps: int
    batches: int
    processes: int
    batch_size: int = 256


FULL, TINY = Size(10_000, 200, 1000, 7), Size(5, 20, 5, 2, 16)

ONE, MANY = "1 segment", "a segment an episode"
FIELDS = ("obs", "action", "reward", "next_obs", "discount")


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw from both stores in turn, then open both in fresh processes; there is no peer."""
    del peers
    steps = size.segments * size.episode_steps
    fill(folder / ONE, steps, size.episode_steps, size.episode_steps)
    fill_segments(folder / MANY, steps, size.episode_steps)
    with ExitStack() as opened:
        contestants, first = [], {}
        for name in (ONE, MANY):
            store = opened.enter_context(dr.open(folder / name))
            sampler = opened.enter_context(dr.Sampler(store, dr.Transitions(), batch_size=size.batch_size, seed=0))
            job = partial(timed, partial(draw, sampler.sample, FIELDS), [()] * size.batches)
            first[f"{name}, the first {size.batches:,} batches of the process"] = [job()]
            contestants.append(Contestant(name, job))
        seconds = in_turn(contestants, rounds)
    opening = {
        name: [measure("opening", folder / name)["open"] for _ in range(size.processes + 1)][1:] for name in (ONE, MANY)
    }
    rows = [[name, number(np.median(each) * 1e3), number(np.max(each) * 1e3)] for name, each in opening.items()]
    one, many = (np.concatenate(seconds[name]) for name in (ONE, MANY))
    return Report(
        "Many segments",
        [
            timing_table(seconds | first, f"{size.batch_size} transitions of {steps:,} steps"),
            Table(["open", "median ms", "most"], rows),
        ],
        [
            Target("a batch, median, beside one segment", _ratio(many, one, 50), 3.0, "times"),
            Target("a batch, 99th percentile, beside one segment", _ratio(many, one, 99), 3.0, "times"),
            Target(f"open {size.segments:,} segments", float(np.median(opening[MANY])), 1.5, "s"),
        ],
        [
            f"{size.segments:,} segments of {size.episode_steps} steps each, of CartPole's shape: four chunk files a "
            "segment that a batch may need, more than a process may map. Uniform, 1-step, no prefetch.",
            "Sealed, in the page cache. The first batches read each chunk once; the rounds are after that.",
            f"Opened with mode r in {size.processes} processes of their own.",
        ],
    )


def fill_segments(path: Path, steps: int, episode_steps: int) -> None:
    """Make a store with a segment for each episode."""
    with dr.create(path, SCHEMA, segment_steps="episode", compaction="manual") as store, store.writer() as writer:
        for episode in episodes(steps, episode_steps, episode_steps):
            append_whole(writer, episode)


def _ratio(ours: Seconds, other: Seconds, percentile: int) -> float:
    return float(np.percentile(ours, percentile) / np.percentile(other, percentile))
