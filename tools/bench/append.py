"""Append one step at a time."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench import ram_peers
from tools.bench.data import FRAME_SCHEMA, SCHEMA, single_frames, single_steps
from tools.bench.harness import (
    Contestant,
    Report,
    Seconds,
    Table,
    Target,
    faster,
    in_turn,
    ratio_table,
    ratios,
    timed,
    timing_table,
)


class Size(NamedTuple):
    """Steps appended in a round."""

    steps: int
    frames: int
    shortest: int = 10
    longest: int = 500


FULL, TINY = Size(3000, 600), Size(20, 20, 3, 9)

WITH, WITHOUT = "diskreplay, next_obs given", "diskreplay"
MADE_INSIDE = ", TensorDict made in the call"


class Shape(NamedTuple):
    """The kind of step, and the target ratio to the speed of each peer."""

    name: str
    schema: dr.Schema
    wanted: dict[str, float]


SMALL = Shape("obs (4,) float32", SCHEMA, {"TorchRL": 50, ram_peers.CPPRB: 6, ram_peers.SB3: 1.5})
FRAMES = Shape("obs (84, 84) uint8", FRAME_SCHEMA, {"TorchRL": 15, ram_peers.CPPRB: 2})


def _steps(shape: Shape, size: Size, rounds: int) -> tuple[int, Iterator[tuple[Any, ...]]]:
    """Return the steps of a round, and all steps."""
    if shape is SMALL:
        return size.steps, single_steps(size.steps * (rounds + 1), size.shortest, size.longest)
    return size.frames, single_frames(size.frames * (rounds + 1), size.shortest, size.longest)


def _contestant(name: str, call: Any, shape: Shape, size: Size, rounds: int, prepare: Any) -> Contestant:
    count, steps = _steps(shape, size, rounds)

    def one_round() -> Seconds:
        return timed(call, [prepare(step) for step in islice(steps, count)])

    return Contestant(name, one_round)


def _torchrl(folder: Path, shape: Shape, size: Size, rounds: int) -> list[Contestant]:
    from tools.bench import torchrl_peer

    made = []
    capacity = _steps(shape, size, rounds)[0] * (rounds + 1)
    for kind in torchrl_peer.KINDS:
        for inside in (False, True):
            name = kind + (MADE_INSIDE if inside else "")
            add = torchrl_peer.buffer(kind, folder / f"{shape.name} {name}", capacity, 256).add

            # Without `truncated`: one field less for the peer to write.
            def add_made_inside(*step: Any, add: Any = add) -> None:
                add(torchrl_peer.transition(*step))

            def plain(step: Any) -> tuple[Any, ...]:
                return (*step[:4], step[5])

            def ready(step: Any) -> tuple[Any, ...]:
                return (torchrl_peer.transition(*step[:4], step[5]),)

            call, prepare = (add_made_inside, plain) if inside else (add, ready)
            made.append(_contestant(name, call, shape, size, rounds, prepare))
    return made


def _in_memory(shape: Shape, size: Size, rounds: int) -> list[Contestant]:
    capacity = _steps(shape, size, rounds)[0] * (rounds + 1)
    return [
        _contestant(name, ram_peers.adder(name, shape.schema, capacity), shape, size, rounds, tuple)
        for name in ram_peers.INSTALLED
        if name in ram_peers.ADDERS
    ]


def _one_shape(shape: Shape, size: Size, rounds: int, folder: Path, peers: bool) -> tuple[list[Table], list[Target]]:
    with (
        dr.create(folder / f"{shape.name} with", shape.schema) as one,
        dr.create(folder / f"{shape.name} without", shape.schema) as other,
        one.writer() as writer,
        other.writer() as other_writer,
    ):
        ours = [
            _contestant(WITH, writer.append, shape, size, rounds, tuple),
            _contestant(WITHOUT, other_writer.append, shape, size, rounds, lambda step: step[:5]),
        ]
        theirs = [*_torchrl(folder, shape, size, rounds), *_in_memory(shape, size, rounds)] if peers else []
        seconds = in_turn([*ours, *theirs], rounds)
    tables = [timing_table(seconds, f"one append, {shape.name}")]
    if theirs:
        tables.append(ratio_table(seconds, [(own.name, peer.name) for own in ours for peer in theirs]))
    return tables, _targets(shape, seconds)


def _targets(shape: Shape, seconds: dict[str, list[Seconds]]) -> list[Target]:
    wanted = dict(shape.wanted)
    torchrl = [name for name in seconds if name.endswith(MADE_INSIDE)]
    if torchrl:
        # The calls of a collector, in the fastest way that the peer has.
        wanted[min(torchrl, key=lambda name: np.median(ratios(seconds, WITH, name)))] = wanted["TorchRL"]
    return faster(seconds, wanted, f"{shape.name}, {WITH}: ", WITH)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Append to two stores and to the peers' buffers, small steps and frames."""
    tables: list[Table] = []
    targets: list[Target] = []
    for shape in (SMALL, FRAMES):
        more = _one_shape(shape, size, rounds, folder, peers)
        tables += more[0]
        targets += more[1]
    return Report(
        "Append one step at a time",
        tables,
        targets,
        [
            f"Steps of CartPole's shape (obs (4,) float32, action int64, reward, done), {size.steps:,} in a round, and "
            f"frames (84, 84) uint8, {size.frames:,} in a round; episodes of {size.shortest} to {size.longest} steps. "
            "Ours gets numpy observations and Python numbers, as an environment gives them, and checks each value "
            "against the schema.",
            "The target against TorchRL counts what a collector has to do: make a TensorDict and add it, to the faster "
            "of its two buffers. The rows without that get a flat TensorDict that was made before the clock started.",
            "The peers store next_obs with every row. Ours stores each observation once, whether next_obs is given or "
            "not; where it is, the step can be sampled when the call returns, as the peers' can.",
            "A step of ours is visible to every other process when append returns; the peers' buffers are one "
            "process's. Those marked RAM keep nothing at all; the others leave syncing to the system, as we do.",
        ],
    )
