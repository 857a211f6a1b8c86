"""Draw stacks of frames from a real emulator, from compressed packs and from uncompressed segments."""

import gc
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from diskreplay.reading import chunk_budget
from diskreplay.retention.policy import disk_usage
from tools.bench.atari import GAMES, atari_episodes
from tools.bench.control_groups import bytes_read, join, read_limit
from tools.bench.data import FRAME_SCHEMA, GAMMA, append_whole, drop, nstep_rows_of, read_files
from tools.bench.fresh import measure
from tools.bench.harness import (
    Contestant,
    Report,
    Table,
    Target,
    in_turn,
    number,
    ratio_table,
    ratios,
    timed,
    timing_table,
)
from tools.bench.pixels import ALPHA, BETA, N_STEP, STACK, TORCHRL, drawn, drawn_torchrl


class Size(NamedTuple):
    """Steps in the stores and in TorchRL's; batches drawn first, in a round, and from the disk."""

    steps: int
    torchrl_steps: int
    warm: int
    batches: int
    cold: int
    batch_size: int = 256


FULL, TINY = Size(200_000, 200_000, 1000, 10, 30), Size(600, 200, 2, 2, 2, 16)

# Bytes and reads per second of a disk in the cloud at its base price, such as Amazon's gp3.
DISK_BYTES, DISK_READS = 125_000_000, 3_000

RAW, PACKED, LARGE = "uncompressed", "packs, zstd", "packs, zstd, as if too large to be kept"


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw in turn from both stores and from TorchRL's storage of uncompressed stacks; then from the disk."""
    _fill(folder, size)
    peers = peers and find_spec("torchrl") is not None
    nbytes = {name: disk_usage(folder / name / "segments")[0] for name in (RAW, PACKED)}
    peer = _peer(folder, size) if peers else None
    seconds = _in_turn(folder, size, rounds, PACKED, peer)
    # In separate processes: a process has one cache for all its stores.
    large = _in_turn(folder, size, rounds, LARGE, None)
    cold = {"": _cold(folder, size, rounds)}
    with read_limit(folder, DISK_BYTES, DISK_READS) as group:
        if group:
            cold[f", {DISK_BYTES / 1e6:g} MB and {DISK_READS:,} reads a second"] = _cold(folder, size, rounds, group)
    limit, found = list(cold.items())[-1]
    ratio = float(np.median(found[RAW][:, 0] / found[PACKED][:, 0]))
    targets = [
        Target("bytes, uncompressed beside packs", nbytes[RAW] / nbytes[PACKED], 30.0, "times", at_least=True),
        Target("warm: time beside uncompressed", float(np.median(ratios(seconds, RAW, PACKED))), 4.0, "times"),
        Target(f"cold{limit}: faster than uncompressed", ratio, 4.0, "times", at_least=True),
    ]
    if peers:
        faster = float(np.median(ratios(seconds, PACKED, TORCHRL)))
        targets.append(Target(f"warm: faster than {TORCHRL}", faster, 3.0, "times", at_least=True))
    return Report(
        "Compressed frames",
        [
            timing_table(seconds, f"a batch of {size.batch_size}, drawn and updated"),
            ratio_table(seconds, [(PACKED, name) for name in seconds if name != PACKED]),
            timing_table(large, "of a field that is too large to be kept"),
            Table(
                ["from the disk", "mean ms a batch", "MB read for each"],
                [
                    [f"{name}{limit}", *map(number, each.mean(axis=0) * [1e3, 1e-6])]
                    for limit, found in cold.items()
                    for name, each in found.items()
                ],
            ),
            Table(
                ["on disk", "MB", "bytes a step"],
                [[name, number(each / 1e6), number(each / size.steps)] for name, each in nbytes.items()],
            ),
        ],
        targets,
        [
            f"{size.steps:,} steps of {', '.join(GAMES)} (ale-py), played at random, frames 84 x 84 uint8; prioritized "
            f"batches of {N_STEP}-step transitions with stacks of {STACK}; no prefetching.",
            f"Warm: all files are in the page cache, and {size.warm} batches were drawn. A process keeps what it has "
            f"decompressed in up to {number(chunk_budget.MOST_DECOMPRESSED / 2**30)} GiB, a sixteenth of the memory, "
            f"where at least half of a field fits into that, as here. Of a larger field it keeps "
            f"{chunk_budget.LEAST_DECOMPRESSED >> 20} MiB, and nearly every frame that is drawn is decompressed: the "
            "second table of times is of the same stores, as if this one were so large.",
            f"From the disk: the first {size.cold} such batches of fresh processes that have loaded their kernels, "
            "after the page cache was dropped, of files that were copied for each round. A virtual disk may answer "
            "from the memory of its host, and then is faster than any other; so the same is measured with as much a "
            "second as a disk in the cloud gives (gp3 of Amazon), where a control group can be made that sets this "
            "limit.",
            f"TorchRL keeps whole stacks uncompressed, of {size.torchrl_steps:,} steps; it draws uniformly.",
        ],
    )


def _fill(folder: Path, size: Size) -> None:
    with (
        dr.create(folder / RAW, FRAME_SCHEMA, compaction="manual") as raw,
        dr.create(folder / PACKED, FRAME_SCHEMA, compaction="manual", compression="zstd") as packed,
    ):
        with raw.writer() as one, packed.writer() as other:
            for episode in atari_episodes(size.steps):
                append_whole(one, episode)
                append_whole(other, episode)
        packed.compact()


def _sampler(store: dr.Store, batch_size: int, seed: int = 0) -> dr.Sampler:
    view = dr.Transitions(n_step=N_STEP, gamma=GAMMA, frame_stack=STACK)
    return dr.Sampler(store, view, dr.Prioritized(alpha=ALPHA, beta=BETA), batch_size=batch_size, seed=seed)


def _errors(batches: int, batch_size: int) -> Any:
    return np.random.default_rng(0).exponential(size=(batches, batch_size)).astype(np.float32)


def _in_turn(folder: Path, size: Size, rounds: int, packed: str, peer: Any) -> dict[str, list[Any]]:
    """Draw from the uncompressed store, the packs, and a peer's storage, if there is one, in turn."""
    errors = _errors(size.batches, size.batch_size)
    most = chunk_budget.MOST_DECOMPRESSED
    gc.collect()  # also frees the caches of the previous stores
    read_files(folder)
    with ExitStack() as opened:
        opened.callback(setattr, chunk_budget, "MOST_DECOMPRESSED", most)
        if packed == LARGE:
            chunk_budget.MOST_DECOMPRESSED = chunk_budget.LEAST_DECOMPRESSED
        jobs: list[tuple[str, Any]] = []
        for name in (RAW, packed):
            store = opened.enter_context(dr.open(folder / (RAW if name == RAW else PACKED)))
            job = partial(drawn, opened.enter_context(_sampler(store, size.batch_size)))
            for _ in range(size.warm):
                job(errors[0])
            jobs.append((name, job))
        if peer is not None:
            jobs.append((TORCHRL, partial(drawn_torchrl, peer)))
        calls = [(row,) for row in errors]
        return in_turn([Contestant(name, partial(timed, job, calls)) for name, job in jobs], rounds)


def _peer(folder: Path, size: Size) -> Any:
    from tools.bench import torchrl_peer

    buffer = torchrl_peer.buffer("TorchRL ReplayBuffer", folder / "torchrl", size.torchrl_steps, size.batch_size)
    for episode in atari_episodes(size.torchrl_steps):
        torchrl_peer.fill(buffer, nstep_rows_of(episode, N_STEP, GAMMA, STACK))
    return buffer


def _cold(folder: Path, size: Size, rounds: int, group: Path | str = "") -> dict[str, Any]:
    """Return the seconds of the first batches, and the bytes read for them: means of each round, (rounds, 2).

    Fresh processes draw them with nothing in memory. The processes join a control group, if one is named.
    """
    found: dict[str, list[tuple[float, float]]] = {RAW: [], PACKED: []}
    for seed in range(rounds):
        for name in _in_order(found, seed):
            copy = folder / "copy"
            subprocess.run(["cp", "-a", "--sparse=always", "--reflink=never", folder / name, copy], check=True)
            drop(copy)
            answer: Any = measure(
                "drawing", "compressed", "first_batches", copy, size.cold, size.batch_size, seed, group
            )
            found[name].append((float(np.mean(answer["seconds"])), answer["read"] / size.cold))
            shutil.rmtree(copy)
    return {name: np.array(each) for name, each in found.items()}


def first_batches(path: str, batches: str, batch_size: str, seed: str, group: str) -> dict[str, Any]:
    """Draw and update the first batches of this fresh process; print the seconds and the bytes read."""
    calls = [(row,) for row in _errors(int(batches), int(batch_size))]
    with dr.open(path) as store, _sampler(store, int(batch_size), int(seed)) as sampler:
        dr.warmup(store, sampler.view, sampler.distribution)
        join(group)
        before = bytes_read()
        seconds = timed(partial(drawn, sampler), calls).tolist()
        return {"seconds": seconds, "read": bytes_read() - before}


def _in_order(names: Iterable[str], seed: int) -> list[str]:
    order = list(names)
    return order if seed % 2 else order[::-1]
