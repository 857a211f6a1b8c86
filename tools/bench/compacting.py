"""Append, and draw, with and without a merge of old segments in the background."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from diskreplay.writing.merging import background
from tools.bench.fresh import answers, begin, measure
from tools.bench.harness import Report, Table, Target, number
from tools.bench.packs import fill_runs


class Size(NamedTuple):
    """Short segments, steps of each, and seconds of appending or drawing in each round.

    Then rounds, and seconds of each, with all processors busy. Then stores of one process, and seconds to merge all.
    """

    segments: int
    episode_steps: int
    seconds: float
    busy_rounds: int
    busy_seconds: float
    stores: int
    stores_seconds: float


FULL, TINY = Size(2_000, 100, 10.0, 5, 60.0, 40, 300.0), Size(70, 5, 0.3, 1, 0.5, 2, 20.0)

APPENDS, DRAWS = "steps a second, appended", "batches a second, drawn by another process"
_STARTING_S = 4.0  # roughly, to start a process that draws
_NEVER_S = 3600.0
_BUSY_A_CORE = 2
_SEGMENTS_A_STORE = 70


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Append, then draw, in fresh processes, in turn with stores that are merged meanwhile or not."""
    del peers
    found: dict[str, list[tuple[float, float]]] = {APPENDS: [], DRAWS: []}
    _fill(folder / "source", size)
    with dr.open(folder / "source") as source:
        for what in found:
            for name in {_copy(what, merges, round_) for round_ in range(rounds) for merges in (True, False)}:
                source.backup(folder / what / name)  # shares the sealed files
    os.sync()  # else the disk is still writing during the first measurements
    for round_ in range(rounds):
        for what, speeds in found.items():
            pair = {}
            for merges in (True, False) if round_ % 2 else (False, True):
                store = folder / what / _copy(what, merges, round_)
                pair[merges] = _measure(store, size, appends=what == APPENDS, merges=merges)
            speeds.append((pair[False], pair[True]))
    rows, targets = [], []
    for what, speeds in found.items():
        without, with_, ratio = (np.median(each) for each in (*np.array(speeds).T, [b / a for a, b in speeds]))
        rows.append([what, number(without), number(with_), number(ratio)])
        targets.append(Target(f"{what}: of the speed without", float(ratio), 0.8, "", at_least=True))
    busy, busy_targets = _beside_busy_loops(size, folder)
    helpers, helpers_target = _of_many_stores(size, folder)
    return Report(
        "Appending and drawing while segments are merged",
        [Table(["", "without", "while segments are merged", "of the speed (median of rounds)"], rows), busy, helpers],
        [*targets, *busy_targets, helpers_target],
        [
            f"All processors are busy: {_BUSY_A_CORE} processes a core use them all the time. Another process appends "
            f"250 steps a second, with 11 fields and a segment for each ten, for {size.busy_seconds:g} s. Stores with "
            f"and without merging take turns, {size.busy_rounds} times each.",
            f"Processes that merge: of {size.stores} stores that one process writes to at once, each of "
            f"{_SEGMENTS_A_STORE} segments.",
            f"A store of {size.segments:,} sealed segments with an episode of {size.episode_steps} steps of CartPole's "
            f"shape each, a new copy for each time that it changes. For {size.seconds:g} s a process appends such "
            "episodes at full speed, or another one draws batches of 256 from the whole store while the first one "
            "appends nothing. All that time segments are merged by the process that the first one starts for it where "
            "nobody calls Store.compact, or are not.",
        ],
    )


def _beside_busy_loops(size: Size, folder: Path) -> tuple[Table, list[Target]]:
    """Append while all processors are busy, with merging and without, in turn."""
    found: dict[str, list[dict[str, float]]] = {"manual": [], "auto": []}
    with _busy_loops():
        for round_ in range(size.busy_rounds):
            for how in found if round_ % 2 else reversed(found):
                path = folder / f"busy {how} {round_}"
                found[how].append(measure("collecting_slowly", path, size.busy_seconds, how))
    rows = []
    for how, each in found.items():
        slowest = sorted(one["slowest"] for one in each)
        times = float(np.median(slowest)), slowest[0], slowest[-1], float(np.median([one["p99"] for one in each]))
        rows.append([f'compaction="{how}"', *map(number, times), str(sum(int(one["appends"]) for one in each))])
    manual, auto = (float(np.median([one["slowest"] for one in each])) for each in found.values())
    header = ["all processors are busy", "slowest append, s (median of rounds)", "least", "most", "p99, s", "appends"]
    what = "slowest append, all processors busy"
    return Table(header, rows), [
        Target(what, auto, 1.0, "s"),
        Target(f'{what}, of that with "manual"', auto / manual, 2.0, "times"),
    ]


@contextmanager
def _busy_loops() -> Iterator[None]:
    """Keep all processors busy."""
    count = _BUSY_A_CORE * (os.cpu_count() or 1)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _of_many_stores(size: Size, folder: Path) -> tuple[Table, Target]:
    """Write to many stores in one process, while they are merged."""
    found = measure("many_writing", folder, size.stores, _SEGMENTS_A_STORE, size.stores_seconds)
    header = ["stores", "merged", "processes that merge, at most", "their memory, MB"]
    row = [str(size.stores), *(number(found[name]) for name in ("merged", "most")), number(found["bytes"] / 1e6)]
    return Table(header, [row]), Target(f"processes that merge, of {size.stores} stores", found["most"], 2, "")


def _copy(what: str, merges: bool, round_: int) -> str:
    """Return the copy of the store to measure: a separate one, or one for all rounds if nothing changes it."""
    return f"{round_} {merges}" if merges or what == APPENDS else "at rest"


def _fill(path: Path, size: Size) -> None:
    """Make the segments, without merging them."""
    before, background._FIRST_S = background._FIRST_S, _NEVER_S
    try:
        fill_runs(path, size.segments * size.episode_steps, size.episode_steps, compaction="auto")
    finally:
        background._FIRST_S = before


def _measure(path: Path, size: Size, *, appends: bool, merges: bool) -> float:
    """Return the steps, or batches, per second."""
    # With another process that draws: begin with it, and end with it, or when everything is merged.
    first_s = _NEVER_S if not merges else 0.0 if appends else _STARTING_S
    seconds = size.seconds if appends else _STARTING_S + 3 * size.seconds
    merging = begin("merging", path, seconds, size.episode_steps, appends, first_s)
    if appends:
        (answer,) = answers([merging])
        return answer["steps"]
    _, answer = answers([merging, begin("sampling", path, size.seconds, "")])
    return answer["batches"]
