"""Compare this tree, and a second copy of an earlier revision, with that revision, with the benches here."""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.bench import append, data, fresh, grown, online, open_time, pixels, uniform, write_path
from tools.bench.harness import OURS, Contestant, Report, Table, Target, in_turn, number, timed, timing_table

ROOT = Path(__file__).parents[2]
REVISION = os.environ.get("DISKREPLAY_BEFORE", "HEAD~1")
SLOWER = 0.03
MOST = 1.05  # a figure is slower for certain if all of its ratios are above this number
COLUMNS = {"mean µs", "median s", "p99.9 µs", "ms"}
RATE = "steps a second together"  # of several processes; its inverse is compared like a time

Figures = dict[str, float]


class Size(NamedTuple):
    """Whether the benches run at full size, and the rounds that each process makes of the shorter ones.

    Full sizes are smaller than in the benches themselves: both sides are the same package.
    """

    full: bool
    rounds: int


FULL, TINY = Size(True, 9), Size(False, 1)

# --- parts: each yields tables ----------------------------------------------------------------------------------------


def _append(size: Size, folder: Path) -> Iterator[Table]:
    for shape in (append.SMALL, append.FRAMES):
        given = append.FULL if size.full else append.TINY
        yield from append._one_shape(shape, given, size.rounds, folder, False)[0]


def _write_path(size: Size, folder: Path) -> Iterator[Table]:
    for part in write_path.PARTS:
        rounds = size.rounds if part in (write_path._lanes, write_path._whole) else 1  # one flush is too few
        for table in part(write_path.FULL if size.full else write_path.TINY, rounds, folder, False)[0]:
            yield table._replace(header=["", *table.header[1:]])  # its first cell may hold a measured number


def _online(size: Size, folder: Path) -> Iterator[Table]:
    given = online.Size(20_000, 5000, 0, 0) if size.full else online.TINY
    for prioritized in (False, True):
        yield from online._loops(prioritized, given, min(size.rounds, 3), folder, False)[0]


def _uniform(size: Size, folder: Path) -> Iterator[Table]:
    given = data.Size(200_000, 500) if size.full else uniform.TINY
    yield from uniform.run(given, size.rounds, folder, False).tables


def _pixels(size: Size, folder: Path) -> Iterator[Table]:
    given = pixels.Size(30_000, 0, 50, 20, 0) if size.full else pixels.TINY
    with pixels.warmed(given, folder) as (_, sampler):
        job = partial(timed, partial(pixels.drawn, sampler), pixels.td_errors(given))
        seconds = in_turn([Contestant(OURS, job)], size.rounds)
    yield timing_table(seconds, "a batch of frames, drawn and updated")


def _open(size: Size, folder: Path) -> Iterator[Table]:
    data.fill(folder / "store", 1_000_000 if size.full else 300, 50, 50)
    answers = [fresh.measure("starting", folder / "store") for _ in range(min(size.rounds, 3))]
    total = np.median([sum(answer[part] for part in open_time.PARTS) for answer in answers])
    yield Table(["open a store", "ms"], [["and draw a first batch", str(total * 1e3)]])


def _grown(size: Size, folder: Path) -> Iterator[Table]:
    given = grown.Size(500_000, 0, 1000, 100, 200, 0) if size.full else grown.TINY._replace(steps=400)
    path = folder / "grown"
    grown._fill(path, given.steps, given)
    yield Table(["a store that merged its segments", "ms"], [["and a first batch", str(grown._opening(path) * 1e3)]])
    for name, what in grown.KINDS.items():
        seconds = grown._in_turn({given.steps: path}, given, size.rounds, name)
        yield timing_table(seconds, f"a batch of a store that merged its segments, {what}")


PARTS: dict[str, Callable[[Size, Path], Iterator[Table]]] = {
    "append": _append,
    "write_path": _write_path,
    "online": _online,
    "uniform": _uniform,
    "pixels": _pixels,
    "open": _open,
    "grown": _grown,
}
LIMITED = ("append", "online", "pixels")  # no slower than before
CHOSEN = os.environ.get("DISKREPLAY_BEFORE_PARTS", ",".join(PARTS)).split(",")

# --- processes --------------------------------------------------------------------------------------------------------


def measure(size: Size, folder: Path, names: list[str]) -> Figures:
    """Run parts with the package that was imported, and return their figures by name."""
    figures: Figures = {}
    for name in names:
        (folder / name).mkdir()
        for table in PARTS[name](size, folder / name):
            what = f"{name}: {table.header[0]}, " if table.header[0] else f"{name}: "
            for row in table.rows:
                for column, cell in zip(table.header, row, strict=True):
                    if column in COLUMNS:
                        figures[f"{what}{row[0]}, {column}"] = _value(cell)
                    elif column == RATE:
                        figures[f"{what}{row[0]} processes, s a step"] = 1 / _value(cell)
    return figures


def _value(cell: str) -> float:
    return float(cell.replace(",", ""))


CHILD = """
import json, sys
from pathlib import Path
import diskreplay
if Path(diskreplay.__file__).parents[1] != Path(sys.argv[1]):
    raise SystemExit(f"found {diskreplay.__file__}, not the package in {sys.argv[1]}")
from tools.bench import before
size = before.Size(sys.argv[3] == "True", int(sys.argv[4]))
print(json.dumps(before.measure(size, Path(sys.argv[2]), sys.argv[5:])))
"""


def _measured(tree: Path, size: Size, folder: Path) -> Figures:
    """Measure the package in a tree in a process of its own."""
    # In the environment, so that child processes use the tree, too.
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}
    with tempfile.TemporaryDirectory(dir=folder) as files:
        command = [sys.executable, "-P", "-c", CHILD, str(tree), files, str(size.full), str(size.rounds), *CHOSEN]
        done = subprocess.run(command, cwd=files, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the package in {tree} could not be measured:\n{done.stderr}")
    os.sync()
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Measure an earlier revision, the same revision again, and this tree, in turn."""
    if unknown := {*CHOSEN} - {*PARTS}:
        raise SystemExit(f"DISKREPLAY_BEFORE_PARTS names {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    archive = subprocess.run(["git", "archive", REVISION, "diskreplay"], cwd=ROOT, capture_output=True, check=True)
    trees = [folder / "before", folder / "again", ROOT]
    for tree in trees[:2]:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(tree, filter="data")
    found: dict[Path, list[Figures]] = {tree: [] for tree in trees}
    for number_ in range(-1 if size.full else 0, rounds):
        for at in range(3):  # each tree comes first, second and last in turn
            tree = trees[(number_ + at) % 3]
            figures = _measured(tree, size, folder)
            if number_ >= 0:  # round -1 compiles kernels
                found[tree].append(figures)
    rows, targets = [], []
    for name in found[ROOT][0]:
        before, again, now = (np.array([figures[name] for figures in found[tree]]) for tree in trees)
        times, same = now / before, again / before
        quartiles, spread = np.percentile(times, [25, 75]), np.percentile(same, [25, 75])
        cells = [*map(np.median, (before, now, times)), times.min(), *quartiles, np.median(same), *spread]
        rows.append([name, *map(number, cells)])
        if name.split(":")[0] in LIMITED:
            limit = 1 + max(SLOWER, *np.abs(spread - 1))
            targets.append(Target(name, float(np.median(times)), float(limit), "times"))
        targets.append(Target(f"{name}: least of {len(times)} ratios", float(times.min()), MOST, "times"))
    commit = subprocess.run(["git", "rev-parse", "--short", REVISION], cwd=ROOT, capture_output=True, check=True)
    beside = ["lower quartile", "upper quartile"]
    return Report(
        f"Beside {commit.stdout.decode().strip()}",
        [Table(["figure", "before", "now", "now, times", "least", *beside, "before again, times", *beside], rows)],
        targets,
        [
            "DISKREPLAY_BEFORE names the revision, DISKREPLAY_BEFORE_PARTS the parts. In each round "
            "a process measures the revision, one the same revision in another folder, and one this tree. Each of the "
            "three comes first in turn. Ratios are of one round; a first round is not counted.",
            f"The limit of {', '.join(LIMITED)} is {SLOWER:.0%}, or more, if a quartile of the revision's second copy "
            "lies farther from 1.",
            "The plain file of write_path is the same for all trees: it shows changes of the disk's speed.",
        ],
    )
