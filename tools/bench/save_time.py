"""Save the state of a prioritized sampler."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.segments.documents import state_files
from tools.bench.data import fill
from tools.bench.harness import Report, Table, Target, number


class Size(NamedTuple):
    """Steps in the store, lengths of episodes, saves."""

    steps: int
    shortest: int
    longest: int
    saves: int


FULL, TINY = Size(1_000_000, 10, 500, 20), Size(300, 3, 20, 2)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Save again and again, with syncs and without, and write a plain file of the same size; no peer saves."""
    del rounds, peers
    fill(folder / "store", size.steps, size.shortest, size.longest)
    with (
        dr.open(folder / "store", "a") as store,
        dr.Sampler(store, dr.Transitions(), dr.Prioritized(), seed=0) as sampler,
    ):
        batch = sampler.sample()
        sampler.update_priorities(batch.index, batch.reward)
        sampler.save("bench")
        saved = sum(file.stat().st_size for file in (store.path / "samplers/bench").rglob("*") if file.is_file())
        jobs: dict[str, Callable[[], object]] = {
            "sampler.save": partial(sampler.save, "bench"),
            "sampler.save, sync aside": partial(_without_syncs, sampler),
            "a plain file, sync aside": partial((folder / "plain").write_bytes, bytes(saved)),
        }
        seconds = {name: np.empty(size.saves) for name in jobs}
        for i in range(size.saves):
            for name, job in jobs.items():
                started = perf_counter()
                job()
                seconds[name][i] = perf_counter() - started
    a_step = saved / size.steps
    return Report(
        "Save priorities",
        [Table(["", "median ms", "p90 ms", "least", "most"], [_row(name, taken) for name, taken in seconds.items()])],
        [
            Target("a save, sync aside, median", float(np.median(seconds["sampler.save, sync aside"])) * 1e3, 50, "ms"),
            Target("what is saved", a_step, 9, "bytes a step"),
        ],
        [
            f"{size.steps:,} steps in episodes of {size.shortest} to {size.longest}, all with a priority; {saved:,} "
            "bytes with the episodes and metadata.",
            "A save is written, synced, and takes the place of the one before it.",
        ],
    )


def _without_syncs(sampler: dr.Sampler) -> None:
    with mock.patch.multiple(state_files, sync_tree=mock.DEFAULT, sync_file=mock.DEFAULT, sync_folder=mock.DEFAULT):
        sampler.save("bench")


def _row(name: str, taken: NDArray[np.float64]) -> list[str]:
    return [name, *(number(float(f(taken)) * 1e3) for f in (np.median, _p90, np.min, np.max))]


def _p90(taken: NDArray[np.float64]) -> float:
    return float(np.percentile(taken, 90))
