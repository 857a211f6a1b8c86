"""Draw prioritized batches of n-step transitions and update their priorities, at several sizes of store."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench import ram_peers
from tools.bench.data import GAMMA, N_STEP, READ_BACK, SCHEMA, Size, drop, episodes, fill, nstep_rows
from tools.bench.harness import (
    OURS,
    Contestant,
    Report,
    Table,
    Target,
    draw,
    faster,
    in_turn,
    ratio_table,
    ratios,
    timed,
    timing_table,
)


class Sizes(NamedTuple):
    """Sizes of the comparison with peers, and steps of the stores that are compared with each other."""

    beside: Size
    grown: tuple[int, ...]


# A multiple of the batches that are drawn ahead at once.
FULL = Sizes(Size(1_000_000, 504), (100_000, 1_000_000, 10_000_000))
TINY = Sizes(Size(300, 5, 16, 3, 20), (100, 300))

ALPHA, BETA = 0.6, 0.4
FIELDS = ("obs", "action", "reward", "next_obs", "discount", "weight")
TORCHRL = "TorchRL ReplayBuffer, prioritized"
WANTED = {ram_peers.CPPRB: 3.0, ram_peers.TIANSHOU: 7.0, TORCHRL: 12.0}
MOST_GROWTH = 3.0

Job = Callable[[Any], None]


def _ours(sampler: dr.Sampler, td_error: Any) -> None:
    sampler.update_priorities(draw(sampler.sample, FIELDS).index, td_error)


def _tianshou(buffer: Any, size: int, td_error: Any) -> None:
    _, index = ram_peers.tianshou_returns(buffer, size, N_STEP, GAMMA)
    buffer.update_weight(index, td_error)


def _torchrl(buffer: Any, td_error: Any) -> None:
    batch, info = buffer.sample(return_info=True)
    for field in ("obs", "action", "reward", "next_obs", "done"):
        batch[field]
    buffer.update_priority(info["index"], td_error)


def _peers(size: Size, folder: Path) -> Iterator[tuple[str, Job]]:
    from tools.bench import torchrl_peer

    found = list(episodes(size.steps, size.shortest, size.longest))
    rows = nstep_rows(found, N_STEP, GAMMA)
    if ram_peers.CPPRB in ram_peers.INSTALLED:
        buffer = ram_peers.cpprb_prioritized(SCHEMA, rows, ALPHA)
        yield ram_peers.CPPRB, partial(ram_peers.cpprb_step, buffer, size.batch_size, BETA)
    if ram_peers.TIANSHOU in ram_peers.INSTALLED:
        ends = np.zeros(size.steps, bool)
        ends[np.cumsum([len(episode) for episode in found]) - 1] = True
        buffer = ram_peers.tianshou_prioritized(nstep_rows(found, 1, GAMMA), ends, ALPHA, BETA)
        yield ram_peers.TIANSHOU, partial(_tianshou, buffer, size.batch_size)
    if torchrl_peer.extension_loads():
        theirs = torchrl_peer.prioritized(folder / "torchrl", size.steps, size.batch_size, ALPHA, BETA)
        torchrl_peer.fill(theirs, rows)
        yield TORCHRL, partial(_torchrl, theirs)


def _sampler(store: dr.Store, size: Size) -> dr.Sampler:
    view, distribution = dr.Transitions(n_step=N_STEP, gamma=GAMMA), dr.Prioritized(alpha=ALPHA, beta=BETA)
    return dr.Sampler(store, view, distribution, batch_size=size.batch_size, seed=0)


def _contestants(jobs: list[tuple[str, Job]], size: Size) -> list[Contestant]:
    """Update all with the same random errors."""
    errors = np.random.default_rng(0).exponential(size=(size.batches, size.batch_size)).astype(np.float32)
    calls = [(row,) for row in errors]
    return [Contestant(name, partial(timed, job, calls)) for name, job in jobs]


def _beside_peers(size: Size, rounds: int, folder: Path, peers: bool) -> tuple[list[Table], list[Target]]:
    fill(folder / "store", size.steps, size.shortest, size.longest)
    drop(folder / "store")
    with dr.open(folder / "store") as store, _sampler(store, size) as sampler:
        theirs = list(_peers(size, folder)) if peers else []
        seconds = in_turn(_contestants([(OURS, partial(_ours, sampler)), *theirs], size), rounds)
    tables = [timing_table(seconds, f"a batch of {size.batch_size}, drawn and updated")]
    if theirs:
        tables.append(ratio_table(seconds, [(OURS, other) for other, _ in theirs]))
    return tables, faster(seconds, WANTED)


def _grown(sizes: Sizes, rounds: int, folder: Path) -> tuple[list[Table], list[Target]]:
    """Compare stores of several sizes in turn."""
    stores, jobs = [], []
    for steps in sizes.grown:
        fill(folder / f"{steps}", steps, sizes.beside.shortest, sizes.beside.longest)
        drop(folder / f"{steps}")
        stores.append(dr.open(folder / f"{steps}"))
        jobs.append((f"{steps:,} steps", partial(_ours, _sampler(stores[-1], sizes.beside))))
    seconds = in_turn(_contestants(jobs, sizes.beside), rounds)
    for store in stores:
        store.close()
    least, *more = seconds
    targets = [
        Target(f"{name}, against {least}", float(np.median(ratios(seconds, least, name))), MOST_GROWTH, "times")
        for name in more
    ]
    return [timing_table(seconds, "a batch, drawn and updated")], targets


def run(size: Sizes, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw from a store and from the peers' buffers with the same steps; then from stores of several sizes."""
    tables, targets = _beside_peers(size.beside, rounds, folder, peers)
    more, growth = _grown(size, rounds, folder)
    left_out = [ram_peers.MISSING_ARE_LEFT_OUT]
    if peers and TORCHRL not in [row[0] for row in tables[0].rows]:
        from tools.bench import torchrl_peer

        left_out.append(torchrl_peer.NO_EXTENSION)
    one = size.beside
    return Report(
        f"Prioritized batches of {N_STEP}-step transitions, with updates",
        tables + more,
        targets + growth,
        [
            f"{one.steps:,} steps of CartPole's shape in episodes of {one.shortest} to {one.longest}, "
            f"{one.batches:,} batches in a round. The stores of several sizes take turns like contestants.",
            READ_BACK,
            "Ours gives torch tensors, six of which are taken from the batch by name; cpprb gives numpy arrays.",
            f"cpprb has an easier job: its rows were made {N_STEP}-step ones before they were stored. Ours holds "
            "single steps and looks for new ones at each batch.",
            f"Tianshou holds single steps too; its row is sample, its own {N_STEP}-step return (with a target that "
            "costs nothing) and the update.",
            *left_out,
        ],
    )
