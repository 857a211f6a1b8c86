"""Open a store in a fresh process and draw a first batch, compared with a plain read of the same files."""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import fill
from tools.bench.fresh import measure
from tools.bench.harness import Report, Table, Target, number
from tools.bench.many_segments import fill_segments


class Size(NamedTuple):
    """Steps in a store, steps of each episode, processes that open it; steps of a large one; groups of one episode."""

    steps: int
    episode_steps: int
    processes: int
    large_steps: int
    groups: int


FULL, TINY = Size(1_000_000, 50, 11, 10**8, 10_000), Size(300, 10, 2, 1000, 3)

NARROW = dr.Schema(obs=dr.Field((1,), "float32"), action=dr.Field((), "uint8"))
LARGE_EPISODE, GROUP_EPISODE = 100, 200
PARTS = ("open", "len", "num_episodes", "sampler", "sample")


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Open each store in one process after another; there is no peer, and rounds are processes here."""
    del rounds, peers
    rows, totals = [], {}
    for name, steps, make in (
        ("1", size.steps, lambda path: fill(path, size.steps, size.episode_steps, size.episode_steps)),
        ("one large segment", size.large_steps, lambda path: _fill_large(path, size.large_steps)),
        (
            "a group an episode",
            size.groups * GROUP_EPISODE,
            lambda path: fill_segments(path, size.groups * GROUP_EPISODE, GROUP_EPISODE),
        ),
    ):
        path = folder / "store"
        make(path)
        answers = [measure("starting", path) for _ in range(size.processes + 1)][1:]
        shutil.rmtree(path)
        if answers[0]["steps"] != steps:
            raise RuntimeError(f"the store has {answers[0]['steps']} steps, not {steps}")
        parts = [np.median([answer[part] for answer in answers]) * 1e3 for part in PARTS]
        total = np.array([sum(answer[part] for part in PARTS) for answer in answers])
        limit = np.array([answer["limit"] for answer in answers])
        totals[name] = float(np.median(total))
        what = f"{steps:,} steps, {int(answers[0]['episodes']):,} episodes, {int(answers[0]['segments']):,} segments"
        cells = [*parts, np.median(total) * 1e3, np.percentile(total, 90) * 1e3, np.median(limit) * 1e3]
        rows.append([what, *map(number, cells), number(np.median(total / limit))])
    header = ["median ms", *PARTS, "all", "p90 of all", "its files read", "times that"]
    return Report(
        "Open a store",
        [Table(header, rows)],
        [
            Target("all, 1,000,000 steps", totals["1"], 0.5, "s"),
            Target("all, 100,000,000 steps", totals["one large segment"], 2.0, "s"),
        ],
        [
            f"Sealed, in the page cache; {size.processes} processes a row, each opens the store once, with mode r, and "
            "draws a first batch of 256 transitions, uniformly. The time of imports and of loading kernels is not in "
            "it (see import.md and compile.md).",
            "Its files read: in the same process, just before, numpy.fromfile of each segment's zarr.json, committed "
            "and flags, and one count of the flags that are not 0. The ratio is the median of those of each process.",
            "The large store has obs float32 (1,), action uint8 and reward float32, episodes of 100 steps.",
        ],
    )


def _fill_large(path: Path, steps: int) -> None:
    obs = np.zeros((LARGE_EPISODE + 1, 1), np.float32)
    action, reward = np.zeros(LARGE_EPISODE, np.uint8), np.zeros(LARGE_EPISODE, np.float32)
    with dr.create(path, NARROW) as store, store.writer() as writer:
        for _ in range(steps // LARGE_EPISODE):
            writer.append_episode(obs, action, reward, terminated=True)
