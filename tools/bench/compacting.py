"""Append, and draw, while old segments are merged in the background, beside the same without that."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from diskreplay.store.compaction import background
from tools.bench.fresh import answers, begin
from tools.bench.harness import Report, Table, Target, number
from tools.bench.packs import fill_runs


class Size(NamedTuple):
    """Short segments that are there, steps of each, and seconds for which is appended, or drawn, in each round."""

    segments: int
    episode_steps: int
    seconds: float


FULL, TINY = Size(2_000, 100, 10.0), Size(70, 5, 0.3)

APPENDS, DRAWS = "steps a second, appended", "batches a second, drawn by another process"
_STARTING_S = 4.0  # of a process that draws, about
_NEVER_S = 3600.0


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Append, then draw, in fresh processes: from stores that are merged meanwhile and stores that are not, in turn."""
    del peers
    found: dict[str, list[tuple[float, float]]] = {APPENDS: [], DRAWS: []}
    _fill(folder / "source", size)
    with dr.open(folder / "source") as source:
        for what in found:
            for name in {_copy(what, merges, round_) for round_ in range(rounds) for merges in (True, False)}:
                source.backup(folder / what / name)  # the same files, as far as they are sealed
    os.sync()  # else the first ones are measured beside what the disk has to do yet
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
    return Report(
        "Appending and drawing while segments are merged",
        [Table(["", "without", "while segments are merged", "of the speed (median of rounds)"], rows)],
        targets,
        [
            f"A store of {size.segments:,} sealed segments with an episode of {size.episode_steps} steps of CartPole's "
            f"shape each, a new copy for each time that it changes. For {size.seconds:g} s a process appends such "
            "episodes at full speed, or another one draws batches of 256 from the whole store while the first one "
            "appends nothing. All that time segments are merged by the process that the first one starts for it where "
            "nobody calls Store.compact, or are not.",
        ],
    )


def _copy(what: str, merges: bool, round_: int) -> str:
    """Return which copy of the store is measured: one of its own, or one for all rounds if nothing changes it."""
    return f"{round_} {merges}" if merges or what == APPENDS else "at rest"


def _fill(path: Path, size: Size) -> None:
    """Make the segments, none of which is merged yet."""
    before, background._FIRST_S = background._FIRST_S, _NEVER_S
    try:
        fill_runs(path, size.segments * size.episode_steps, size.episode_steps, compaction="auto")
    finally:
        background._FIRST_S = before


def _measure(path: Path, size: Size, *, appends: bool, merges: bool) -> float:
    """Return how many steps, or batches, come a second."""
    # Where another process draws, it begins with that, and goes on until that has ended, or nothing is left to merge.
    first_s = _NEVER_S if not merges else 0.0 if appends else _STARTING_S
    seconds = size.seconds if appends else _STARTING_S + 3 * size.seconds
    merging = begin("merging", path, seconds, size.episode_steps, appends, first_s)
    if appends:
        (answer,) = answers([merging])
        return answer["steps"]
    _, answer = answers([merging, begin("sampling", path, size.seconds, "")])
    return answer["batches"]
