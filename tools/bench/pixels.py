"""Draw prioritized batches of 3-step transitions with stacks of frames."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench import ram_peers
from tools.bench.data import FRAME_SCHEMA, GAMMA, Steps, frame_episodes, nstep_rows_of, write
from tools.bench.harness import (
    OURS,
    Contestant,
    Report,
    Table,
    bandwidth,
    draw,
    faster,
    in_turn,
    number,
    ratio_table,
    timed,
    timing_table,
)


class Size(NamedTuple):
    """Steps in the store and in TorchRL's; batches drawn first, in a round, and for the limit."""

    steps: int
    torchrl_steps: int
    warm: int
    batches: int
    copied: int
    batch_size: int = 256
    shortest: int = 100
    longest: int = 1000


FULL, TINY = Size(200_000, 40_000, 300, 10, 20), Size(300, 100, 2, 2, 2, 16, 10, 60)

N_STEP, STACK, ALPHA, BETA = 3, 4, 0.6, 0.4
FIELDS = ("obs", "action", "reward", "next_obs", "discount", "weight")
TORCHRL = "TorchRL ReplayBuffer, uniform"
WANTED = {ram_peers.CPPRB: 1.2, TORCHRL: 5.0}
LEAST_BANDWIDTH = 0.7

Job = Callable[[Any], None]


def drawn(sampler: dr.Sampler, td_error: Any) -> None:
    sampler.update_priorities(draw(sampler.sample, FIELDS).index, td_error)


def drawn_torchrl(buffer: Any, td_error: Any) -> None:
    draw(buffer.sample, ("obs", "action", "reward", "next_obs", "done"))


def _copied(copy: Callable[[], None], td_error: Any) -> None:
    copy()


def _stacked(size: Size, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows for the peers, one episode at a time."""
    for episode in _episodes(size, steps):
        yield nstep_rows_of(episode, N_STEP, GAMMA, STACK)


def _episodes(size: Size, steps: int) -> Iterator[Steps]:
    return frame_episodes(steps, size.shortest, size.longest)


def _peers(size: Size, folder: Path) -> Iterator[tuple[str, Job]]:
    from tools.bench import torchrl_peer

    if ram_peers.CPPRB in ram_peers.INSTALLED:
        buffer = ram_peers.cpprb_stacked(FRAME_SCHEMA, _stacked(size, size.steps), size.steps, STACK, ALPHA)
        yield ram_peers.CPPRB, partial(ram_peers.cpprb_step, buffer, size.batch_size, BETA)
    theirs = torchrl_peer.buffer("TorchRL ReplayBuffer", folder / "torchrl", size.torchrl_steps, size.batch_size)
    for rows in _stacked(size, size.torchrl_steps):
        torchrl_peer.fill(theirs, rows)
    yield TORCHRL, partial(drawn_torchrl, theirs)


def _limits(store: Any, sampler: dr.Sampler, size: Size) -> tuple[list[tuple[str, Job]], float]:
    """Return a function that copies the frames of batches like ours, and the bytes of a batch."""
    from tools.bench import limits  # not above: it uses internals of this tree, and `before` imports other revisions

    batches = []
    for _ in range(size.copied):
        ids = sampler.sample().index.numpy().copy()
        windows = limits.windows_of(store.snapshot, ids, N_STEP, STACK)
        last = np.where(windows.obs_stop > 0, windows.after, windows.after - 1)
        stacks = [(np.maximum(row - STACK + 1, windows.floor), row) for row in (windows.row, last)]
        batches.append(limits.runs(store.snapshot, "obs", windows, stacks))
    jobs: list[tuple[str, Job]] = [
        (name, partial(_copied, limits.copying(batches, name == limits.STREAM)))
        for name in (limits.COPY, limits.STREAM)
    ]
    return jobs, float(np.mean([batch.nbytes for batch in batches]))


@contextmanager
def warmed(size: Size, folder: Path) -> Iterator[tuple[dr.Store, dr.Sampler]]:
    """Write the store, and open it with a sampler that has drawn some batches."""
    write(folder / "store", FRAME_SCHEMA, _episodes(size, size.steps))
    view = dr.Transitions(n_step=N_STEP, gamma=GAMMA, frame_stack=STACK)
    distribution = dr.Prioritized(alpha=ALPHA, beta=BETA)
    with (
        dr.open(folder / "store") as store,
        dr.Sampler(store, view, distribution, batch_size=size.batch_size, seed=0) as sampler,
    ):
        for _ in range(size.warm):
            sampler.sample()
        yield store, sampler


def td_errors(size: Size) -> list[tuple[Any]]:
    """Return the arguments of the calls of a round."""
    errors = np.random.default_rng(0).exponential(size=(size.batches, size.batch_size)).astype(np.float32)
    return [(row,) for row in errors]


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw from a store, from the peers' buffers with the same steps, and copy the same bytes."""
    from tools.bench import limits

    with warmed(size, folder) as (store, sampler):
        copies, nbytes = _limits(store, sampler, size)
        jobs = [(OURS, partial(drawn, sampler)), *copies, *(_peers(size, folder) if peers else ())]
        calls = td_errors(size)
        seconds = in_turn([Contestant(name, partial(timed, job, calls)) for name, job in jobs], rounds)
    wanted = {name: WANTED[name] for name, _ in jobs if name in WANTED}
    speeds = [[name, number(nbytes / np.median(np.concatenate(seconds[name])) / 1e9)] for name, _ in jobs]
    return Report(
        f"Prioritized batches of {N_STEP}-step transitions with stacks of {STACK} frames",
        [
            timing_table(seconds, f"a batch of {size.batch_size}, drawn and updated"),
            ratio_table(seconds, [(OURS, name) for name, _ in jobs[1:]]),
            Table([f"{nbytes / 1e6:.1f} MB of frames a batch", "GB/s (median)"], speeds),
        ],
        [*faster(seconds, wanted), bandwidth(seconds, OURS, limits.COPY, LEAST_BANDWIDTH)],
        [
            f"{size.steps:,} steps of (84, 84) uint8 frames in episodes of {size.shortest} to {size.longest} steps, "
            f"{size.batches} batches in a round; no prefetching. Ours and the copies have two threads, cpprb has one, "
            f"torch its default number. Everything is in the page cache, and {size.warm} batches came before, after "
            "which nearly all pages are mapped: the first touch of each costs a fault.",
            "The limit copies the frames of batches drawn like ours out of the same mappings, one memcpy a run, and "
            "does nothing else. A memcpy of a few frames reads each line of its target before it overwrites it; ours "
            "stores past the caches, so it can be faster, and the second limit does that too.",
            f"The peers have the easier job: their rows were made {N_STEP}-step ones before they were stored. cpprb "
            "keeps each frame twice, for obs and next_obs (stack_compress), and gives arrays with the stack's axis "
            f"last. TorchRL keeps whole stacks, so it has {size.torchrl_steps:,} steps only; it draws uniformly and "
            "updates nothing.",
            ram_peers.MISSING_ARE_LEFT_OUT,
        ],
    )
