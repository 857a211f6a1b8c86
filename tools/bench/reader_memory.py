"""Measure the private memory of a reader, apart from the page cache."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.bench.data import fill
from tools.bench.fresh import measure
from tools.bench.harness import Report, Table, Target, number


class Case(NamedTuple):
    """A distribution, the steps in the store, and the lengths of its shortest and longest episode."""

    distribution: str
    steps: int
    shortest: int
    longest: int

    def __str__(self) -> str:
        length = f"{self.shortest}" if self.shortest == self.longest else f"{self.shortest} to {self.longest}"
        return f"{self.distribution}, {self.steps:,} steps in episodes of {length}"


class Size(NamedTuple):
    """The compared readers, and the number of processes for each."""

    cases: tuple[Case, ...]
    processes: int


# The second size is just above a power of two: tables that double their size would be half empty.
FULL = Size(
    (
        Case("Prioritized", 1_000_000, 10, 500),
        Case("Prioritized", 1_100_000, 10, 500),
        Case("Uniform", 1_000_000, 50, 50),
        Case("Uniform", 1_000_000, 10, 10),
    ),
    3,
)
TINY = Size((Case("Prioritized", 2000, 10, 50),), 1)
SMALL_STEPS = 100
MOST_BYTES = 24


def _median(path: Path, distribution: str, processes: int) -> dict[str, float]:
    found = [measure("reading", path, distribution) for _ in range(processes)]
    return {what: float(np.median([one[what] for one in found])) for what in ("open", "sample")}


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Compare readers of stores with many steps to a reader of a small one; there is no peer."""
    del rounds, peers
    fill(folder / "small", SMALL_STEPS, 10, 10)
    rows, targets = [], []
    for place, case in enumerate(size.cases):
        base = _median(folder / "small", case.distribution, size.processes)
        store = folder / f"{place}"
        fill(store, *case[1:])
        taken = _median(store, case.distribution, size.processes)
        each = {what: (taken[what] - base[what]) / case.steps for what in base}
        cells = [number(taken[what] / 2**20) for what in base] + [number(each[what]) for what in base]
        rows.append([str(case), *cells])
        targets.append(Target(f"after a first batch: {case}", each["sample"], MOST_BYTES, "bytes a step"))
    header = ["", "opened, MiB", "and sampled, MiB", "opened, bytes a step", "and sampled, bytes a step"]
    return Report(
        "Memory of a reader",
        [Table(header, rows)],
        targets,
        [
            "RssAnon of /proc/self/status in a fresh process: what it held after dr.open, and after a first batch of "
            "256 5-step transitions (and, by priority, an update of them), less what it held when torch and the "
            "compiled kernels were loaded. The page cache, whose pages count as RssFile where they are mapped, is "
            "left out.",
            f"Bytes a step: less what the reader of a store of {SMALL_STEPS} steps takes, which is what torch and the "
            f"sampler take at the first batch. Median of {size.processes} processes.",
            "A reader keeps columns of numbers for each episode, so short episodes cost more a step. Priorities are "
            "21 bytes a step: the sum tree with its inner nodes, the raw error, and the place's episode.",
        ],
    )
