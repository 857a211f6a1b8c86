"""Draw prioritized batches of n-step transitions and update their priorities."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench import ram_peers
from tools.bench.data import SCHEMA, episodes, fill, nstep_rows
from tools.bench.harness import Contestant, Report, Target, in_turn, ratio_table, ratios, timed, timing_table


class Size(NamedTuple):
    """Steps in the store, and batches drawn and updated in a round."""

    steps: int
    batches: int
    batch_size: int = 256
    shortest: int = 10
    longest: int = 500


FULL, TINY = Size(1_000_000, 500), Size(300, 5, 16, 3, 20)

N_STEP, GAMMA, ALPHA, BETA = 5, 0.99, 0.6, 0.4
OURS = "diskreplay"
FIELDS = ("obs", "action", "reward", "next_obs", "discount", "weight")
WANTED = {ram_peers.CPPRB: 3.0}


def _ours(sampler: dr.Sampler, td_error: Any) -> None:
    batch = sampler.sample()
    for field in FIELDS:
        batch[field]
    sampler.update_priorities(batch.index, td_error)


def _theirs(buffer: Any, size: int, td_error: Any) -> None:
    batch = buffer.sample(size, beta=BETA)
    buffer.update_priorities(batch["indexes"], td_error)


def _peers(size: Size) -> Iterator[tuple[str, Callable[[Any], None]]]:
    if ram_peers.CPPRB in ram_peers.INSTALLED:
        rows = nstep_rows(list(episodes(size.steps, size.shortest, size.longest)), N_STEP, GAMMA)
        buffer = ram_peers.cpprb_prioritized(SCHEMA, rows, ALPHA)
        yield ram_peers.CPPRB, partial(_theirs, buffer, size.batch_size)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw from a store and from the peer's buffer with the same steps; errors are random and the same for all."""
    fill(folder / "store", size.steps, size.shortest, size.longest)
    errors = np.random.default_rng(0).exponential(size=(size.batches, size.batch_size)).astype(np.float32)
    with (
        dr.open(folder / "store") as store,
        dr.Sampler(
            store,
            dr.Transitions(n_step=N_STEP, gamma=GAMMA),
            dr.Prioritized(alpha=ALPHA, beta=BETA),
            batch_size=size.batch_size,
            seed=0,
        ) as sampler,
    ):
        jobs = [(OURS, partial(_ours, sampler)), *(_peers(size) if peers else ())]
        calls = [(row,) for row in errors]
        seconds = in_turn([Contestant(name, partial(timed, job, calls)) for name, job in jobs], rounds)
    names = [name for name, _ in jobs[1:]]
    tables = [timing_table(seconds, f"a batch of {size.batch_size}, drawn and updated")]
    if names:
        tables.append(ratio_table(seconds, [(OURS, name) for name in names]))
    targets = [
        Target(
            f"faster than {name}", float(np.median(ratios(seconds, OURS, name))), WANTED[name], "times", at_least=True
        )
        for name in names
    ]
    return Report(
        f"Prioritized batches of {N_STEP}-step transitions, with updates",
        tables,
        targets,
        [
            f"{size.steps:,} steps of CartPole's shape in episodes of {size.shortest} to {size.longest}, "
            f"{size.batches:,} batches in a round; everything is in the page cache; no prefetching.",
            "Ours gives torch tensors, six of which are taken from the batch by name; cpprb gives numpy arrays.",
            f"cpprb has the easier job: its rows were made {N_STEP}-step ones before they were stored. Ours holds "
            "single steps and looks for new ones at each batch.",
        ],
    )
