"""Measure the import time and the memory of a collector process."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import SCHEMA
from tools.bench.fresh import measure
from tools.bench.harness import Report, Table, Target, number


class Size(NamedTuple):
    """Processes that import, and steps that a collector appends."""

    processes: int
    steps: int


FULL, TINY = Size(11, 100_000), Size(1, 50)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Import in one process after another; collect in one. There is no peer, and rounds are processes here."""
    del rounds, peers
    dr.create(folder / "store", SCHEMA).close()
    answers = [measure("importing") for _ in range(size.processes + 1)][1:]
    process = measure("collecting", folder / "store", size.steps)
    if process["heavy"]:
        raise RuntimeError("a collector loaded torch or numba")
    rows = []
    for what, name in {"package": "import diskreplay", "collector": "and all that a collector uses"}.items():
        taken = np.array([answer[what] for answer in answers]) * 1e3
        cells = [np.median(taken), np.percentile(taken, 90), taken.min(), taken.max()]
        rows.append([name, *map(number, cells), str(len(taken))])
    resident = {
        "the interpreter": process["interpreter"],
        "with a store and a writer open": process["opened"],
        f"after {size.steps:,} steps": process["VmRSS"],
        "of that its own (RssAnon)": process["RssAnon"],
        "at most, sealing included": process["most"],
    }
    slowest = float(np.median([answer["collector"] for answer in answers]))
    return Report(
        "Import, and the memory of a collector",
        [
            Table(["", "median ms", "p90 ms", "least", "most", "processes"], rows),
            Table(["resident", "MB"], [[name, number(value / 1e6)] for name, value in resident.items()]),
        ],
        [
            Target("import, with all that a collector uses", slowest, 0.3, "s"),
            Target("resident, at most", process["most"] / 1e6, 80, "MB"),
        ],
        [
            "Fresh processes, compiled files and shared libraries in the page cache. `import diskreplay` alone loads "
            "nearly nothing: a name's module is loaded when it is first used, so the second row is the one that "
            "counts. It has numpy in it, and neither torch, numba nor zarr.",
            "Resident memory counts the pages of the chunks that the process maps. At most: VmHWM, when the store is "
            "closed.",
        ],
    )
