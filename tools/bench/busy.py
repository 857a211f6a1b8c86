"""Two samplers and eight collectors at full speed, each in its own process, on all cores of the machine."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import SCHEMA
from tools.bench.fresh import answers, begin
from tools.bench.harness import Report, Table, Target, number


class Size(NamedTuple):
    """Seconds for which collectors append and samplers draw, and the number of each."""

    appending: float
    sampling: float
    collectors: int = 8
    samplers: int = 2


FULL, TINY = Size(30.0, 8.0), Size(1.0, 0.2, 2, 1)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Start all together: first with compiled kernels, then without; there is no peer."""
    del rounds, peers
    rows, found = [], {}
    for what, kept in (("compiled kernels", ""), ("nothing compiled", str(folder / "kernels"))):
        path = folder / what
        dr.create(path, SCHEMA).close()
        if not kept:
            _warm(folder / "warm")
        collecting = [begin("appending", path, size.appending) for _ in range(size.collectors)]
        drawing = [begin("sampling", path, size.sampling, kept) for _ in range(size.samplers)]
        every = answers(drawing + collecting)
        found[what], appended = every[: size.samplers], every[size.samplers :]
        steps = sum(each["steps"] for each in appended)
        first, batches, high = (np.array([each[name] for each in found[what]]) for name in ("first", "batches", "p99"))
        cells = [first.max(), batches.min(), np.median(batches), high.max() * 1e3, steps]
        rows.append([what, *map(number, cells)])
    slowest = min(answer["batches"] for answer in found["compiled kernels"])
    latest = max(answer["first"] for answer in found["nothing compiled"])
    return Report(
        f"{size.samplers} samplers beside {size.collectors} collectors",
        [Table(["", "first batch, s", "batches a second, least", "median", "p99 ms, most", "steps a second"], rows)],
        [
            Target("batches a second of each sampler", slowest, 40.0, "", at_least=True),
            Target("the first batch, compiling included", latest, 40.0, "s"),
        ],
        [
            f"Processes of their own that start together: {size.collectors} append steps of CartPole's shape at full "
            f"speed for {size.appending:g} s, {size.samplers} ask for batches of 256 from the empty store on and draw "
            f"for {size.sampling:g} s after the first. All compete for the cores of the machine.",
            "Steps a second are those of all collectors together, over the whole time.",
            "Collectors may have ended before a first batch that had to wait for kernels: batches after it are then of "
            "a store at rest.",
        ],
    )


def _warm(path: Path) -> None:
    """Compile the kernels of the samplers."""
    dr.create(path, SCHEMA).close()
    with dr.open(path) as store:
        dr.warmup(store, dr.Transitions(n_step=3))
