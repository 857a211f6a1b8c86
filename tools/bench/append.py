"""Append one step at a time."""

from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import SCHEMA, single_steps
from tools.bench.harness import Contestant, Report, Seconds, Target, in_turn, ratio_table, ratios, timed, timing_table


class Size(NamedTuple):
    """Steps appended in a round."""

    steps: int
    shortest: int = 10
    longest: int = 500


FULL, TINY = Size(3000), Size(20, 3, 9)

WITH, WITHOUT = "diskreplay, next_obs given", "diskreplay"
MADE_INSIDE = ", TensorDict made in the call"


def _ours(writer: Any, size: Size, rounds: int, next_obs: bool) -> Contestant:
    def one_round() -> Seconds:
        given = list(islice(steps, size.steps))
        return timed(writer.append, given if next_obs else [step[:5] for step in given])

    steps = single_steps(size.steps * (rounds + 1), size.shortest, size.longest)
    return Contestant(WITH if next_obs else WITHOUT, one_round)


def _peer(kind: str, made_inside: bool, folder: Path, size: Size, rounds: int) -> Contestant:
    from tools.bench import torchrl_peer

    name = kind + (MADE_INSIDE if made_inside else "")
    count = size.steps * (rounds + 1)
    buffer = torchrl_peer.buffer(kind, folder / name, count, 256)
    steps = single_steps(count, size.shortest, size.longest)

    def add_made_inside(*step: Any) -> None:
        buffer.add(torchrl_peer.transition(*step))

    def one_round() -> Seconds:
        # Without `truncated`: one field less for the peer to write.
        given = [(*step[:4], step[5]) for step in islice(steps, size.steps)]
        if made_inside:
            return timed(add_made_inside, given)
        return timed(buffer.add, [(torchrl_peer.transition(*step),) for step in given])

    return Contestant(name, one_round)


def _peers(folder: Path, size: Size, rounds: int) -> list[Contestant]:
    from tools.bench import torchrl_peer

    return [
        _peer(kind, made_inside, folder, size, rounds) for kind in torchrl_peer.KINDS for made_inside in (False, True)
    ]


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Append to two stores and to the peer's buffers."""
    with (
        dr.create(folder / "with", SCHEMA) as one,
        dr.create(folder / "without", SCHEMA) as other,
        one.writer() as writer,
        other.writer() as other_writer,
    ):
        ours = [_ours(writer, size, rounds, True), _ours(other_writer, size, rounds, False)]
        theirs = _peers(folder, size, rounds) if peers else []
        seconds = in_turn([*ours, *theirs], rounds)
    tables = [timing_table(seconds, "one append")]
    targets = []
    if theirs:
        tables.append(ratio_table(seconds, [(own.name, peer.name) for own in ours for peer in theirs]))
        made_before = [peer.name for peer in theirs if not peer.name.endswith(MADE_INSIDE)]
        for own in ours:
            least = min(float(np.median(ratios(seconds, own.name, peer))) for peer in made_before)
            targets.append(Target(f"{own.name}: faster than any peer", least, 5, "times", at_least=True))
    return Report(
        "Append one step at a time",
        tables,
        targets,
        [
            f"Steps of CartPole's shape (obs (4,) float32, action int64, reward, done), {size.steps:,} in a round, in "
            f"episodes of {size.shortest} to {size.longest} steps. Ours gets numpy observations and Python numbers, "
            "as an environment gives them, and checks each value against the schema.",
            "The target counts against the peer's easiest job: a flat TensorDict that was made before the clock "
            "started. A collector has to make it; the rows that say so include that.",
            "The peer stores next_obs with every row. Ours stores each observation once, whether next_obs is given "
            "or not.",
            "A step of ours is visible to every other process when append returns; the peer's buffer is one process's.",
            "Neither is on the platter then; both leave that to the system.",
        ],
    )
