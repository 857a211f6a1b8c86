"""Time the first batch of a process, which compiles kernels, or loads them if they are cached."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.bench.data import fill
from tools.bench.fresh import measure
from tools.bench.harness import Report, Table, Target, number


class Size(NamedTuple):
    """Steps in the store; processes that compile, that load, and that start at once; kinds of batches."""

    steps: int
    compiling: int
    loading: int
    at_once: int
    kinds: int


FULL, TINY = Size(20_000, 3, 7, 8, 4), Size(300, 1, 1, 1, 1)

KINDS = {
    "uniform": "Uniform, Transitions",
    "prioritized": "Prioritized, Transitions",
    "updated": "the same, and update_priorities",
    "sequences": "Uniform, Sequences",
}

# Seconds until the first batch without compiled kernels: twice as long as with private options of numba.
WANTED = {"uniform": 8, "prioritized": 14, "updated": 14, "sequences": 10}


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw a first batch in one process after another; there is no peer, and rounds are processes here."""
    del rounds, peers
    store, kept = folder / "store", folder / "kept"
    fill(store, size.steps, 10, 50)
    rows, targets = [], []
    for kind, name in list(KINDS.items())[: size.kinds]:
        compiled = []
        for _ in range(size.compiling):
            shutil.rmtree(kept, ignore_errors=True)
            compiled.append(measure("first_batch", store, kind, kept))
        loaded = [measure("first_batch", store, kind, kept) for _ in range(size.loading)]
        shutil.rmtree(kept)
        cells = [np.median([answer[part] for answer in compiled]) for part in ("first", "cpu")]
        cells += [np.median([answer[part] for answer in loaded]) for part in ("first", "numba")]
        rows.append([name, *map(number, cells), str(size.compiling), str(size.loading)])
        targets += [
            Target(f"compile, {name}", cells[0], WANTED[kind], "s"),
            Target(f"load, {name}", cells[2], 0.3, "s"),
        ]
    with ThreadPoolExecutor(size.at_once) as pool:
        together = list(pool.map(lambda _: measure("first_batch", store, "uniform", kept), range(size.at_once)))
    slowest = max(answer["first"] for answer in together)
    cpu = sum(answer["cpu"] for answer in together)
    return Report(
        "Compile kernels, or load them",
        [
            Table(["first batch, s", "compiled", "CPU-s", "loaded", "numba itself", "compiled", "loaded"], rows),
            Table(
                [f"{size.at_once} processes at once, none kept", "s"],
                [["the slowest one's first batch", number(slowest)], ["CPU-s of all", number(cpu)]],
            ),
        ],
        targets,
        [
            "From an open store to the first batch of 256, in fresh processes. Torch is imported before, and numba "
            "with all that it loads at its own first use ('numba itself'); our own modules are not.",
            "Compiled: with an empty cache. Loaded: from the cache that another process left. The last columns are "
            "processes.",
        ],
    )
