"""Draw batches of windows of frames, uniformly and by priority."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench import limits
from tools.bench.data import FRAME_SCHEMA, frame_episodes, write
from tools.bench.harness import (
    OURS,
    Contestant,
    Report,
    Table,
    Target,
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
    """Steps in the store; batches drawn first, in a round, and for the limit; and the windows."""

    steps: int
    warm: int
    batches: int
    copied: int
    batch_size: int = 64
    length: int = 80
    overlap: int = 40
    shortest: int = 100
    longest: int = 1000


FULL, TINY = Size(200_000, 120, 5, 10), Size(300, 2, 2, 2, 4, 8, 4, 10, 60)

DISTRIBUTIONS = {f"{OURS}, uniform": dr.Uniform, f"{OURS}, prioritized": dr.Prioritized}
FIELDS = ("obs", "action", "reward", "next_obs", "mask", "loss_mask", "weight")
THEIR_FIELDS = ("obs", "action", "reward", "done")
PEERS = {f"{OURS}, uniform": "TorchRL SliceSampler", f"{OURS}, prioritized": "TorchRL PrioritizedSliceSampler"}
TIMES_FASTER, LEAST_BANDWIDTH = 8.0, 0.75


def _update(sampler: dr.Sampler, errors: Any) -> None:
    sampler.update_priorities(draw(sampler.sample, FIELDS).index, errors)


def _theirs_by_priority(buffer: Any, errors: Any) -> None:
    batch, info = buffer.sample(return_info=True)
    for field in THEIR_FIELDS:
        batch[field]
    buffer.update_priority(info["index"], errors)


def _peers(size: Size, folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    from tools.bench import torchrl_peer

    for name in (torchrl_peer.SLICES, torchrl_peer.PRIORITIZED_SLICES):
        by_priority = name == torchrl_peer.PRIORITIZED_SLICES
        if by_priority and not torchrl_peer.extension_loads():
            continue
        buffer = torchrl_peer.slices(folder / name, size.steps, size.batch_size, size.length, by_priority)
        for number_, episode in enumerate(frame_episodes(size.steps, size.shortest, size.longest)):
            ended = np.arange(len(episode)) == len(episode) - 1
            columns = {"obs": episode.obs[:-1], "action": episode.action, "reward": episode.reward, "done": ended}
            torchrl_peer.fill(buffer, {**columns, "episode": np.full(len(episode), number_)})
        errors = np.ones(size.batch_size * size.length, np.float32)
        yield (
            name,
            partial(_theirs_by_priority, buffer, errors) if by_priority else partial(draw, buffer.sample, THEIR_FIELDS),
        )


def _limits(store: Any, sampler: dr.Sampler, size: Size) -> tuple[list[tuple[str, Callable[[], None]]], float]:
    """Return a function that copies the frames of batches like ours, and the bytes of a batch."""
    batches = []
    for _ in range(size.copied):
        ids = sampler.sample().index.numpy().copy()
        windows = limits.windows_of(store.snapshot, ids, size.length)
        last = np.maximum(windows.after, windows.obs_stop) - 1
        batches.append(limits.runs(store.snapshot, "obs", windows, [(windows.row, last)]))
    jobs = [(name, limits.copying(batches, name == limits.STREAM)) for name in (limits.COPY, limits.STREAM)]
    return jobs, float(np.mean([batch.nbytes for batch in batches]))


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw from a store and from the peer's buffers with the same steps, and copy the same bytes."""
    write(folder / "store", FRAME_SCHEMA, frame_episodes(size.steps, size.shortest, size.longest))
    view = dr.Sequences(length=size.length, overlap=size.overlap)
    errors = np.random.default_rng(0).exponential(size=(size.batch_size, size.length)).astype(np.float32)
    with dr.open(folder / "store") as store:
        jobs: list[tuple[str, Callable[[], None]]] = []
        for name, distribution in DISTRIBUTIONS.items():
            sampler = dr.Sampler(store, view, distribution(), batch_size=size.batch_size, seed=0)
            jobs.append(
                (
                    name,
                    partial(_update, sampler, errors)
                    if sampler.distribution.weighted
                    else partial(draw, sampler.sample, FIELDS),
                )
            )
        for _ in range(size.warm):
            sampler.sample()
        copies, nbytes = _limits(store, sampler, size)
        jobs += [*copies, *(_peers(size, folder) if peers else ())]
        calls = [()] * size.batches
        seconds = in_turn([Contestant(name, partial(timed, job, calls)) for name, job in jobs], rounds)
    targets: list[Target] = []
    for ours, peer in PEERS.items():
        # Priorities cost the peer time: if it has none, compare with its uniform draws instead.
        stands_in = peer if peer in seconds else PEERS[f"{OURS}, uniform"]
        targets += faster(seconds, {stands_in: TIMES_FASTER}, f"{ours}: ", ours)
        targets.append(bandwidth(seconds, ours, limits.COPY, LEAST_BANDWIDTH))
    speeds = [[name, number(nbytes / np.median(np.concatenate(seconds[name])) / 1e9)] for name, _ in jobs]
    pairs = [(ours, name) for ours in DISTRIBUTIONS for name in seconds if name not in DISTRIBUTIONS]
    caveats = [
        f"{size.steps:,} steps of (84, 84) uint8 frames in episodes of {size.shortest} to {size.longest} steps, "
        f"windows of {size.length} that overlap by {size.overlap}, {size.batches} batches in a round; no prefetching; "
        "ours and the copies have two threads, torch its default number. Everything is in the page cache, and "
        f"{size.warm} batches came before, after which nearly all pages are mapped.",
        "A batch of ours holds one frame more a window, for next_obs. Prioritized batches are followed by an update "
        "with an error for each step.",
        "The limit copies the frames of batches drawn like ours out of the same mappings, one memcpy a run, and does "
        "nothing else. A memcpy reads each line of its target before it overwrites it, up to a size; ours stores "
        "past the caches, so it can be faster, and the second limit does that too.",
        "The peer has the easier job: frames of the next step are not asked of it, and its starts are cached.",
    ]
    if peers and PEERS[f"{OURS}, prioritized"] not in seconds:
        from tools.bench import torchrl_peer

        caveats.append(torchrl_peer.NO_EXTENSION)
    return Report(
        f"Windows of {size.length} frames",
        [
            timing_table(seconds, f"a batch of {size.batch_size}"),
            ratio_table(seconds, pairs),
            Table([f"{nbytes / 1e6:.1f} MB of frames a batch", "GB/s (median)"], speeds),
        ],
        targets,
        caveats,
    )
