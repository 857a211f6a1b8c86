"""Open a store in a fresh process."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.bench.data import fill
from tools.bench.fresh import measure
from tools.bench.harness import Report, Table, Target, number


class Size(NamedTuple):
    """Steps in the store, steps of each episode, processes that open it."""

    steps: int
    episode_steps: int
    processes: int


FULL, TINY = Size(1_000_000, 50, 15), Size(300, 10, 2)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Open a store in one process after another; there is no peer, and rounds are processes here."""
    del rounds, peers
    fill(folder / "store", size.steps, size.episode_steps, size.episode_steps)
    answers = [measure("opening", folder / "store") for _ in range(size.processes + 1)][1:]
    taken = np.array([answer["open"] for answer in answers])
    found = answers[0]
    if found["steps"] != size.steps:
        raise RuntimeError(f"the store has {found['steps']} steps, not {size.steps}")
    cells = [np.median(taken) * 1e3, np.percentile(taken, 90) * 1e3, taken.min() * 1e3, taken.max() * 1e3]
    return Report(
        "Open a store",
        [
            Table(
                ["", "median ms", "p90 ms", "least", "most", "processes"],
                [["dr.open", *map(number, cells), str(len(taken))]],
            )
        ],
        [Target("dr.open, median", float(np.median(taken)), 0.5, "s")],
        [
            f"{size.steps:,} steps in {int(found['episodes']):,} episodes, one writer, sealed, in the page cache. Each "
            "process opens it once, with mode r; the time of imports is not in it (see import.md).",
        ],
    )
