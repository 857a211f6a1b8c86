"""Appends of this tree beside those of an earlier revision: both by the code of these benches, in turn."""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.bench import append, write_path
from tools.bench.harness import Report, Table, Target, number

ROOT = Path(__file__).parents[2]
REVISION = os.environ.get("DISKREPLAY_BEFORE", "HEAD~1")
SLOWER = 1.03
COLUMNS = {"mean µs", "median s", "p99.9 µs"}
RATE = "steps a second together"  # of so many processes; its inverse can be compared as times are

Figures = dict[str, float]


class Size(NamedTuple):
    """Whether the benches run at their full size, and how many rounds each process makes of the shorter ones."""

    full: bool
    rounds: int


FULL, TINY = Size(True, 11), Size(False, 1)


def measure(size: Size, folder: Path) -> Figures:
    """Run the benches, of whichever package was found first, and return their figures by what they are of."""
    found: list[tuple[str, Table]] = []
    for shape in (append.SMALL, append.FRAMES):
        given = append.FULL if size.full else append.TINY
        made = append._one_shape(shape, given, size.rounds, folder, False)[0]
        found += [(f"{shape.name}, ", table) for table in made]
    for part in write_path.PARTS:
        rounds = size.rounds if part in (write_path._lanes, write_path._whole) else 1  # one flush says little of a disk
        made = part(write_path.FULL if size.full else write_path.TINY, rounds, folder, False)[0]
        found += [("", table) for table in made]
    figures: Figures = {}
    for prefix, table in found:
        for row in table.rows:
            for column, cell in zip(table.header, row, strict=True):
                if column in COLUMNS:
                    figures[f"{prefix}{row[0]}, {column}"] = _value(cell)
                elif column == RATE:
                    figures[f"{row[0]} processes, s a step"] = 1 / _value(cell)
    return figures


def _value(cell: str) -> float:
    return float(cell.replace(",", ""))


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import json
from pathlib import Path
from tools.bench import before
print(json.dumps(before.measure(before.Size(sys.argv[3] == "True", int(sys.argv[4])), Path(sys.argv[2]))))
"""


def _measured(tree: Path, size: Size, folder: Path) -> Figures:
    """Measure the package in a tree in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as files:
        arguments = [str(tree), files, str(size.full), str(size.rounds)]
        done = subprocess.run([sys.executable, "-c", CHILD, *arguments], cwd=ROOT, capture_output=True, check=True)
    os.sync()
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Measure an earlier revision and this tree in turn."""
    archive = subprocess.run(["git", "archive", REVISION, "diskreplay"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder / "before", filter="data")
    found: dict[Path, list[Figures]] = {folder / "before": [], ROOT: []}
    for number_ in range(rounds):
        for tree in found if number_ % 2 else reversed(found):
            found[tree].append(_measured(tree, size, folder))
    rows, targets = [], []
    before, now = found.values()
    for name in before[0]:
        one, other = (np.array([figures[name] for figures in each]) for each in (before, now))
        times = other / one
        cells = [np.median(one), np.median(other), np.median(times), *np.percentile(times, [25, 75])]
        rows.append([name, *map(number, cells)])
        if "p99.9" not in name and "plain file" not in name:
            targets.append(Target(name, float(np.median(times)), SLOWER, "times"))
    commit = subprocess.run(["git", "rev-parse", "--short", REVISION], cwd=ROOT, capture_output=True, check=True)
    header = ["figure", "before", "now", "now, times", "lower quartile", "upper quartile"]
    return Report(
        f"Beside {commit.stdout.decode().strip()}",
        [Table(header, rows)],
        targets,
        [
            "The revision is that of DISKREPLAY_BEFORE. Each process runs the benches append and write_path without "
            "peers; both trees have one in each round, in the opposite order every other time.",
            "The plain file is written by neither: it shows what the disk did meanwhile.",
        ],
    )
