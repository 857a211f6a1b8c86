"""Draw batches of frames from disk, with no frame in memory, and with at most a quarter in memory."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from tools.bench.control_groups import bytes_read, join, memory_limit
from tools.bench.data import FRAME_SCHEMA, drop
from tools.bench.fresh import measure
from tools.bench.harness import Report, Table, Target, number

EPISODE = 1000
OURS, AHEAD, PEER = "diskreplay", "diskreplay, prefetch=4", "TorchRL memmap"


class Size(NamedTuple):
    """Frames on disk, batches with no frame in memory, and the most batches and seconds with a quarter."""

    frames: int
    batches: int
    steady: int
    seconds: float


FULL, TINY = Size(1_000_000, 50, 500, 20.0), Size(3000, 3, 4, 1.0)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw (obs, next_obs) of 256 steps in fresh processes, in turn with a peer and with fio."""
    names = [OURS, AHEAD]
    _fill(folder / "store", size.frames)
    peers = peers and find_spec("torchrl") is not None
    if peers:
        names.append(PEER)
        # In its own process: the system does not drop pages that a process has mapped.
        measure("drawing", "cold", "fill_peer", folder / "peer", size.frames, EPISODE)
    found: dict[str, list[Any]] = {name: [] for name in names}
    disk: list[float] = []
    for seed in range(rounds):
        for name in names if seed % 2 else reversed(names):
            found[name].append(_drawn(name, folder, size.batches, seed))
        if shutil.which("fio") and _reads_directly(folder):
            disk.append(_direct_reads(folder / "store", seed))
    steady: dict[str, list[Any]] = {}
    # A quarter of the frames, and the memory of Python and torch.
    with memory_limit(size.frames * FRAME_SCHEMA.leaves["obs"].row_bytes // 4 + (512 << 20)) as group:
        for seed in range(rounds if group else 0):
            for name in names:
                answer = _drawn(name, folder, size.steady, seed, size.seconds, group or "")
                steady.setdefault(name, []).append(answer)
    return _report(size, found, steady, disk, peers)


def _fill(path: Path, frames: int) -> None:
    """Make the store; its writer is closed when this returns."""
    image = np.random.default_rng(0).integers(0, 256, (EPISODE + 1, 84, 84), np.uint8)
    with dr.create(path, FRAME_SCHEMA) as store, store.writer() as writer:
        for _ in range(frames // EPISODE):
            writer.append_episode(image, np.arange(EPISODE), np.ones(EPISODE, np.float32), terminated=True)


def _drawn(name: str, folder: Path, batches: int, seed: int, seconds: float = 0, group: Path | str = "") -> Any:
    """Draw in a fresh process with nothing in memory; see `_draw`."""
    drop(folder)  # no process has mapped its files
    if name == PEER:
        return measure("drawing", "cold", "peer", folder / "peer", batches, seed, seconds, group)
    prefetch = 4 if name == AHEAD else 0
    return measure("drawing", "cold", "ours", folder / "store", batches, seed, seconds, group, prefetch)


def _reads_directly(folder: Path) -> bool:
    """Return whether files there can be read past the page cache."""
    try:
        os.close(os.open(folder / "store" / "zarr.json", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def _direct_reads(store: Path, seed: int) -> float:
    """Return the seconds that fio takes to read the pages of a batch: two frames are on four or five pages."""
    chunks = [str(path) for path in sorted(store.glob("segments/*/obs/c.*"))]
    chunks = chunks[: 3000 // len(chunks[0])]  # fio does not take much longer names
    options = (
        "--rw=randread --blockalign=4k --bssplit=16k/56:20k/44 --iodepth=32 --ioengine=libaio --direct=1 --readonly"
    )
    more = f"--runtime=2 --time_based --thread --output-format=terse --terse-version=3 --randseed={seed + 1}"
    command = ["fio", "--name=reads", f"--filename={':'.join(chunks)}", *options.split(), *more.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return 256 / float(done.stdout.strip().splitlines()[-1].split(";")[7])


def _report(size: Size, found: Any, steady: Any, disk: list[float], peers: bool) -> Report:
    rows, targets = [], []
    for name, rounds in found.items():
        calls = np.array([answer["seconds"] for answer in rounds]) * 1e3
        read = np.mean([answer["read"] / size.batches for answer in rounds]) / 1e6
        cells = (calls.mean(), np.median(calls), _p90_of_the_first(rounds).mean() * 1e3, calls[:, 0].mean(), read)
        rows.append([name, *map(number, cells), str(calls.size)])
    tables = [
        Table(["nothing in memory", "mean ms", "median ms", "p90 of 20, ms", "first ms", "MB read", "calls"], rows)
    ]
    if disk:
        tables.append(Table(["fio, the same reads", "ms"], [["direct, depth 32", number(np.median(disk) * 1e3)]]))
        targets.append(_at_least("of the speed of fio's direct reads, mean", np.array(disk) / _means(found[OURS]), 0.7))
    if peers:
        ratio = _means(found[PEER]) / _means(found[OURS])
        targets.append(_at_least("faster than the peer, mean of the first batches", ratio, 10))
        ratio = _p90_of_the_first(found[PEER]) / _p90_of_the_first(found[OURS])
        targets.append(_at_least("faster than the peer, p90 of the first 20", ratio, 25))
    if steady:
        rows = [[name, number(np.median(_a_second(rounds)))] for name, rounds in steady.items()]
        tables.append(Table(["a quarter in memory", "batches a second"], rows))
    if steady and peers:
        ratio = _a_second(steady[AHEAD]) / _a_second(steady[PEER])
        targets.append(_at_least("faster than the peer, a quarter in memory", ratio, 20))
    caveats = [
        f"{size.frames:,} frames (84, 84) uint8, batches of 256 steps, obs and next_obs. The medians of paired ratios.",
        "Each round in a fresh process, after the page cache was dropped. The first batch includes mapping files.",
        "The peer has each frame once, too: a memory-mapped TensorDict as its storage makes it, read at i and i + 1.",
        "MB read: what the process had read from disk, a batch.",
        "fio reads 256 times four or five pages, as a batch does. Without it, or on a file system without direct "
        "reads, its row is left out.",
        "A quarter: a control group limits memory, page cache included; where none can be made it is left out. The "
        f"second half of {size.steady} batches, or of as many as {size.seconds:.0f} s are enough for.",
    ]
    return Report("Draw frames from disk", tables, targets, caveats)


def _at_least(what: str, ratios: NDArray[np.float64], bound: float) -> Target:
    return Target(what, float(np.median(ratios)), bound, "times", at_least=True)


def _means(rounds: Any) -> NDArray[np.float64]:
    return np.array([np.mean(answer["seconds"]) for answer in rounds])


def _p90_of_the_first(rounds: Any) -> NDArray[np.float64]:
    return np.array([np.percentile(answer["seconds"][:20], 90) for answer in rounds])


def _a_second(rounds: Any) -> NDArray[np.float64]:
    """Return batches a second in the second half of each round."""
    halves = [answer["seconds"][len(answer["seconds"]) // 2 :] for answer in rounds]
    return np.array([len(half) / sum(half) for half in halves])


def _draw(batch: Any, batches: int, seconds: float, group: str) -> dict[str, Any]:
    """Time calls of `batch`, in a control group if one is named, until there are enough."""
    from time import perf_counter

    join(group)
    before, taken, began = bytes_read(), [], perf_counter()
    while len(taken) < batches and (not seconds or perf_counter() - began < seconds or len(taken) < 2):
        started = perf_counter()
        batch()
        taken.append(perf_counter() - started)
    return {"seconds": taken, "read": bytes_read() - before}


def ours(path: str, batches: str, seed: str, seconds: str, group: str, prefetch: str) -> dict[str, Any]:
    """Draw from a store in this process."""
    sampler = dr.Sampler(dr.open(path), dr.Transitions(), batch_size=256, seed=int(seed), prefetch=int(prefetch))
    with sampler:
        return _draw(lambda: sampler.sample().obs, int(batches), float(seconds), group)


def fill_peer(path: str, frames: str, episode: str) -> dict[str, Any]:
    """Make the peer's storage."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage

    Path(path).mkdir()
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (int(episode), 84, 84), np.uint8))
    storage = LazyMemmapStorage(int(frames) + 1, scratch_dir=path)
    for start in range(0, int(frames), int(episode)):
        storage.set(range(start, start + int(episode)), TensorDict({"obs": image}, [int(episode)]))
    return {}


def peer(path: str, batches: str, seed: str, seconds: str, group: str) -> dict[str, Any]:
    """Draw from the peer's storage in this process."""
    import torch
    from tensordict import TensorDict

    rows = TensorDict.load_memmap(path)
    generator = torch.Generator().manual_seed(int(seed))

    def batch() -> Any:
        index = torch.randint(0, len(rows) - 2, (256,), generator=generator)
        return rows[index]["obs"], rows[index + 1]["obs"]

    return _draw(batch, int(batches), float(seconds), group)
