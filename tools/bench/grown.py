"""Open and draw from a large store that merged its many segments by itself, and a small one made in the same way."""

import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import fill, read_files
from tools.bench.fresh import measure
from tools.bench.harness import Contestant, Report, Table, Target, draw, in_turn, number, ratios, timed, timing_table
from tools.bench.many_segments import FIELDS
from tools.bench.open_time import NARROW, PARTS
from tools.bench.reader_memory import SMALL_STEPS


class Size(NamedTuple):
    """Steps of both stores, of their segments and episodes; batches of a round; processes that open the large one."""

    steps: int
    small_steps: int
    segment_steps: int
    episode_steps: int
    batches: int
    processes: int
    batch_size: int = 256


FULL, TINY = Size(10**8, 10**6, 1000, 100, 300, 3), Size(4000, 400, 40, 10, 3, 1, 16)

KINDS = {"Uniform": "uniform", "Prioritized": "by priority, and updated"}
MOST_MIB, MOST_BYTES = 100 * 10**6 / 2**20, 24


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Write both stores, open the large one in fresh processes, and draw from both in turn; there is no peer."""
    del peers
    stores = {steps: folder / f"{steps}" for steps in (size.small_steps, size.steps)}
    written = [_fill(path, steps, size) for steps, path in stores.items()]
    fill(folder / "base", SMALL_STEPS, 10, 10)
    large = stores[size.steps]
    opened = [_opening(large) for _ in range(size.processes + 1)][1:]
    taken = {
        name: _reading(large, name, size.processes) - _reading(folder / "base", name, size.processes) for name in KINDS
    }
    read_files(folder)
    seconds = {what: _in_turn(stores, size, rounds, name) for name, what in KINDS.items()}
    small, big = (f"{steps:,} steps" for steps in stores)
    targets = [
        Target("opened, and a first batch drawn", float(np.median(opened)), 2.0, "s"),
        *(
            Target(f"a batch, {what}: beside {small}", float(np.median(ratios(each, small, big))), 2.0, "times")
            for what, each in seconds.items()
        ),
        Target("memory of a reader that draws uniformly", taken["Uniform"] / 2**20, MOST_MIB, "MiB"),
        Target("memory of one with priorities", taken["Prioritized"] / size.steps, MOST_BYTES, "bytes a step"),
    ]
    header = ["", "segments made", "at the end of writing", "when nothing was left to merge", "steps a second"]
    return Report(
        "A store that grew large",
        [
            Table(header, [[small, *written[0]], [big, *written[1]]]),
            *(timing_table(each, f"a batch of {size.batch_size}, {what}") for what, each in seconds.items()),
        ],
        targets,
        [
            f"Episodes of {size.episode_steps} steps (obs float32 (1,), action uint8, reward float32), "
            f"{size.segment_steps:,} steps a segment, written by one process, which merges segments in the background.",
            f"Opened with mode r by {size.processes} processes of their own that have loaded their kernels, in the "
            "page cache; with the time of len, num_episodes and a first uniform batch.",
            "Memory: RssAnon after a first batch of 5-step transitions (and, by priority, an update of them), less "
            f"what the reader of a store of {SMALL_STEPS} steps takes; the page cache is left out.",
            "Batches of 5-step transitions from both stores in turn, no prefetch. All files were read before: a "
            "virtual machine has to find memory that it did not touch for minutes.",
        ],
    )


def _fill(path: Path, steps: int, size: Size) -> list[str]:
    """Write a store; return the numbers of segments made, left at the end, and left later; and steps/s."""
    obs = np.arange(size.episode_steps + 1, dtype=np.float32)[:, None]
    action, reward = np.zeros(size.episode_steps, np.uint8), np.ones(size.episode_steps, np.float32)
    with dr.create(path, NARROW, segment_steps=size.segment_steps) as store:
        begun = time.perf_counter()
        with store.writer() as writer:
            for _ in range(steps // size.episode_steps):
                writer.append_episode(obs, action, reward, terminated=True)
        taken, there = time.perf_counter() - begun, _segments(path)
        while merging := [thread for thread in threading.enumerate() if thread.name == "diskreplay-compaction"]:
            merging[0].join()
    return [f"{steps // size.segment_steps:,}", f"{there:,}", f"{_segments(path):,}", number(steps / taken)]


def _segments(path: Path) -> int:
    return sum(entry.is_dir() for entry in (path / "segments").iterdir())


def _opening(path: Path) -> float:
    answer = measure("starting", path)
    return sum(answer[part] for part in PARTS)


def _reading(path: Path, distribution: str, processes: int) -> float:
    return float(np.median([measure("reading", path, distribution)["sample"] for _ in range(processes)]))


def _in_turn(stores: dict[int, Path], size: Size, rounds: int, distribution: str) -> dict[str, list[Any]]:
    errors = np.random.default_rng(0).exponential(size=(size.batches, size.batch_size)).astype(np.float32)
    with ExitStack() as opened:
        contestants = []
        for steps, path in stores.items():
            store, drawn_by = opened.enter_context(dr.open(path)), getattr(dr, distribution)()
            sampler = dr.Sampler(store, dr.Transitions(n_step=5), drawn_by, batch_size=size.batch_size, seed=0)
            job = partial(_drawn, opened.enter_context(sampler))
            contestants.append(Contestant(f"{steps:,} steps", partial(timed, job, [(row,) for row in errors])))
        return in_turn(contestants, rounds)


def _drawn(sampler: dr.Sampler, td_error: Any) -> None:
    batch = draw(sampler.sample, FIELDS)
    if sampler.distribution.weighted:
        sampler.update_priorities(batch.index, td_error)
