"""How much memory of its own a reader takes, beside the page cache."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.bench.data import fill
from tools.bench.fresh import measure
from tools.bench.harness import Report, Table, Target, number


class Size(NamedTuple):
    """Steps in the store, steps of each episode in each of the stores compared, processes for each."""

    steps: int
    episode_steps: tuple[int, ...]
    processes: int


FULL, TINY = Size(1_000_000, (50, 10), 3), Size(2000, (50,), 1)
SMALL_STEPS = 100


def _median(path: Path, processes: int, what: str) -> float:
    return float(np.median([measure("reading", path)[what] for _ in range(processes)]))


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Compare readers of stores with many steps to a reader of a small one; there is no peer."""
    del rounds, peers
    fill(folder / "small", SMALL_STEPS, 10, 10)
    base = {what: _median(folder / "small", size.processes, what) for what in ("open", "sample")}
    rows, targets = [["few", str(SMALL_STEPS // 10), *(number(base[what] / 2**20) for what in base), "", ""]], []
    for length in size.episode_steps:
        store = folder / f"of {length}"
        fill(store, size.steps, length, length)
        taken = {what: _median(store, size.processes, what) for what in base}
        each = {what: (taken[what] - base[what]) / size.steps for what in base}
        cells = [number(taken[what] / 2**20) for what in base] + [number(each[what]) for what in base]
        rows.append([f"{size.steps:,}", f"{size.steps // length:,}", *cells])
        targets.append(Target(f"after a first batch, episodes of {length} steps", each["sample"], 24, "bytes a step"))
    header = [
        "steps",
        "episodes",
        "opened, MiB",
        "and sampled, MiB",
        "opened, bytes a step",
        "and sampled, bytes a step",
    ]
    return Report(
        "Memory of a reader",
        [Table(header, rows)],
        targets,
        [
            "RssAnon of /proc/self/status in a fresh process: what it held after dr.open, and after a first batch of "
            "256 5-step transitions, less what it held when torch and the compiled kernels were loaded. The page "
            "cache, whose pages count as RssFile where they are mapped, is left out.",
            "Bytes a step: less what the reader of the small store takes, which is what torch and the sampler take "
            f"at the first batch. Median of {size.processes} processes.",
            "A reader keeps columns of numbers for each episode and nothing for a step, so short episodes cost more "
            "a step.",
        ],
    )
