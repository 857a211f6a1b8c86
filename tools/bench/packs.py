"""Draw from compacted stores of many short segments, and open them, compared with a store of one segment."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import SCHEMA, append_whole, drop, episodes, fill
from tools.bench.fresh import measure
from tools.bench.harness import Contestant, Report, Table, Target, draw, in_turn, number, timed, timing_table
from tools.bench.many_segments import FIELDS, fill_segments


class Size(NamedTuple):
    """Segments, steps of each, batches drawn in a round, and processes that open each store."""

    segments: int
    episode_steps: int
    batches: int
    processes: int
    batch_size: int = 256


FULL, TINY = Size(10_000, 200, 1000, 7), Size(5, 20, 5, 2, 16)

ONE, EPISODES, RUNS = "1 segment", "a segment an episode, compacted", "a segment a run, compacted"


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw from all stores in turn, then open all in fresh processes; there is no peer."""
    del peers
    steps = size.segments * size.episode_steps
    fill(folder / ONE, steps, size.episode_steps, size.episode_steps)
    fill_segments(folder / EPISODES, steps, size.episode_steps)
    fill_runs(folder / RUNS, steps, size.episode_steps)
    before = {name: _files(folder / name) for name in (ONE, EPISODES, RUNS)}
    for name in (EPISODES, RUNS):
        with dr.open(folder / name, "a") as store:
            store.compact()
    for name in before:
        drop(folder / name)  # as for a trainer that starts later
    with ExitStack() as opened:
        contestants = []
        for name in before:
            store = opened.enter_context(dr.open(folder / name))
            sampler = opened.enter_context(dr.Sampler(store, dr.Transitions(), batch_size=size.batch_size, seed=0))
            for _ in range(size.batches):
                sampler.sample()
            contestants.append(
                Contestant(name, partial(timed, partial(draw, sampler.sample, FIELDS), [()] * size.batches))
            )
        seconds = in_turn(contestants, rounds)
    opening = {
        name: [measure("opening", folder / name)["open"] for _ in range(size.processes + 1)][1:] for name in before
    }
    files = {name: _files(folder / name) for name in before}
    rows = [
        [name, number(np.median(times) * 1e3), number(np.max(times) * 1e3), str(before[name]), str(files[name])]
        for name, times in opening.items()
    ]
    targets = []
    for name in (EPISODES, RUNS):
        paired = [np.median(many) / np.median(one) for many, one in zip(seconds[name], seconds[ONE], strict=True)]
        targets += [
            Target(f"{name}: a batch beside one segment", float(np.median(paired)), 1.3, "times"),
            Target(f"{name}: opened", float(np.median(opening[name])), 0.5, "s"),
            Target(f"{name}: files", float(files[name]), 200.0, "files"),
        ]
    return Report(
        "Packs",
        [
            timing_table(seconds, f"{size.batch_size} transitions of {steps:,} steps"),
            Table(["open", "median ms", "most", "files before", "files now"], rows),
        ],
        targets,
        [
            f"{size.segments:,} segments of {size.episode_steps} steps each, of CartPole's shape, made with "
            'compaction="manual" and merged by one call of Store.compact. A run is a writer of its own. Uniform, '
            "1-step, no prefetch.",
            "In the page cache; the rounds are after each chunk was read once. "
            f"Opened with mode r in {size.processes} processes of their own.",
        ],
    )


def fill_runs(path: Path, steps: int, run_steps: int, compaction: str = "manual") -> None:
    """Make a store with a writer, and thus a segment, for each run of one episode."""
    with dr.create(path, SCHEMA, compaction=compaction) as store:
        for episode in episodes(steps, run_steps, run_steps):
            with store.writer() as writer:
                append_whole(writer, episode)


def _files(path: Path) -> int:
    return sum(file.is_file() for file in path.rglob("*"))
