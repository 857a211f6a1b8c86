"""Draw uniform batches of 1-step and 5-step transitions."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import diskreplay as dr
from tools.bench import ram_peers
from tools.bench.data import GAMMA, N_STEP, READ_BACK, SCHEMA, Array, Size, drop, episodes, fill, nstep_rows
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
    timed,
    timing_table,
)

FULL, TINY = Size(1_000_000, 1000), Size(300, 5, 16, 3, 20)

WRITTEN = f"{OURS}, pages as written"
NESTED = ", nested keys"
FLAT_FIELDS = ("obs", "action", "reward", "next_obs", "done")
NESTED_FIELDS = ("observation", "action", ("next", "reward"), ("next", "observation"), ("next", "done"))
OUR_FIELDS = ("obs", "action", "reward", "next_obs", "discount")
IN_RAM = {ram_peers.CPPRB: 1.5, ram_peers.SB3: 4.0}
WANTED_OF_TORCHRL = {1: 6.0, N_STEP: 4.0}


def _torchrl(columns: dict[str, Array], size: Size, folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    from tools.bench import torchrl_peer

    last = list(torchrl_peer.KINDS)[-1]
    for kind, name in [*((kind, kind) for kind in torchrl_peer.KINDS), (last, last + NESTED)]:
        make = torchrl_peer.nested_rows if name.endswith(NESTED) else torchrl_peer.rows
        buffer = torchrl_peer.buffer(kind, folder / name, size.steps, size.batch_size)
        torchrl_peer.fill(buffer, columns, make)
        fields = NESTED_FIELDS if name.endswith(NESTED) else FLAT_FIELDS
        yield name, partial(draw, buffer.sample, fields)


def _in_memory(columns: dict[str, Array], size: Size) -> Iterator[tuple[str, Callable[[], None]]]:
    for name, make in ((ram_peers.CPPRB, ram_peers.cpprb_uniform), (ram_peers.SB3, ram_peers.sb3_uniform)):
        if name in ram_peers.INSTALLED:
            yield name, partial(make(SCHEMA, columns).sample, size.batch_size)


def _one(n: int, size: Size, rounds: int, folder: Path, peers: bool) -> tuple[list[Table], list[Target], float]:
    """Return tables, targets, and the share of our time that drawing takes."""
    jobs: list[tuple[str, Callable[[], None]]] = []
    if peers:
        columns = nstep_rows(episodes(size.steps, size.shortest, size.longest), n, GAMMA)
        jobs += _in_memory(columns, size) if n == 1 else ()
        jobs += _torchrl(columns, size, folder / f"{n}")
    wanted = {name: IN_RAM.get(name, WANTED_OF_TORCHRL[n]) for name, _ in jobs}
    with ExitStack() as stack:
        for name in (WRITTEN, OURS):
            store = stack.enter_context(dr.open(folder / name))
            view = dr.Transitions(n_step=n, gamma=GAMMA)
            sampler = dr.Sampler(store, view, batch_size=size.batch_size, seed=0)
            jobs.insert(0, (name, partial(draw, stack.enter_context(sampler).sample, OUR_FIELDS)))
        calls = [()] * size.batches
        seconds = in_turn([Contestant(name, partial(timed, job, calls)) for name, job in jobs], rounds)
        made = sampler.stats()
    tables = [timing_table(seconds, f"one batch of {size.batch_size}, {n}-step")]
    if wanted:
        tables.append(ratio_table(seconds, [(OURS, name) for name in wanted]))
    share = made["seconds_planning"] / (made["seconds_planning"] + made["seconds_gathering"])
    return tables, faster(seconds, wanted, f"{n}-step: "), share


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw from a store and from the peers' buffers with the same steps."""
    for name in (WRITTEN, OURS):
        fill(folder / name, size.steps, size.shortest, size.longest)
    drop(folder / OURS)
    tables: list[Table] = []
    targets: list[Target] = []
    for n in (1, N_STEP):
        (folder / f"{n}").mkdir()
        more, met, share = _one(n, size, rounds, folder, peers)
        tables, targets = tables + more, targets + met
    return Report(
        f"Uniform batches of 1-step and {N_STEP}-step transitions",
        tables,
        targets,
        [
            f"{size.steps:,} steps of CartPole's shape in episodes of {size.shortest} to {size.longest} steps, "
            f"{size.batches:,} batches in a round; CPU tensors, but cpprb gives numpy arrays.",
            READ_BACK,
            f"The peers have the easiest job: their rows were made 1-step or {N_STEP}-step ones before they were "
            "stored (obs, action, reward, next_obs, done, flat), as TorchRL's MultiStep transform does on the "
            "collector's side. Ours stores single steps and makes returns, next observations and discounts as it "
            "draws.",
            "Five tensors of ours and of TorchRL's are taken from the batch by name.",
            'Nested keys are those that TorchRL\'s own losses read: ("next", "reward") and so on.',
            "A batch of ours also holds terminated, truncated, n_steps, index and weight, and each call looks for new "
            f"steps first. {share:.0%} of its time went into looking and drawing, the rest into "
            "gathering.",
            "torch uses its default number of threads; ours gathers with one.",
            ram_peers.MISSING_ARE_LEFT_OUT,
        ],
    )
