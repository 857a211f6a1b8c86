"""Copy batches of stacked frames to a CUDA device, and steps from it; the bare copy of pinned bytes is the limit."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

import diskreplay as dr
from tools.bench.data import FRAME_SCHEMA
from tools.bench.harness import Contestant, Report, Seconds, Table, Target, in_turn, number, timing_table
from tools.bench.thousands import SCHEMA, Steps

OURS, BARE, GATHERED = "sampler, prefetch=4", "bare pinned copy", "sampler to the CPU"
APPEND, ADD = "VectorWriter.append", "RolloutBuffer(path=...).add"
APPEND_EACH = "VectorWriter.append, tensor.cpu() of each field"


class Size(NamedTuple):
    """Episodes of frames, their steps, and batches of a round; environments, and appends of a step of all."""

    episodes: int
    steps: int
    batches: int
    envs: int
    calls: int


FULL, TINY = Size(200, 500, 100, 4096, 24), Size(3, 20, 2, 8, 4)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw batches in turn with the bare copy, and with a sampler on the CPU; there is no peer."""
    del peers
    _fill(folder / "store", size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    view = dr.Transitions(n_step=3, frame_stack=4)
    with (
        dr.open(folder / "store") as store,
        dr.Sampler(store, view, seed=0, prefetch=4, device=device) as sampler,
        dr.Sampler(store, view, seed=0) as on_cpu,
    ):
        nbytes = _nbytes(on_cpu.sample())
        contestants = [
            _contestant(OURS, size.batches, sampler.sample),
            _contestant(GATHERED, size.batches, on_cpu.sample),
        ]
        if device == "cuda":
            contestants.append(_contestant(BARE, size.batches, _bare_copy(nbytes)))
        seconds = in_turn(contestants, rounds)
    from_device = _steps_from(device, size, rounds, folder)
    targets = []
    rates = [[name, number(nbytes / np.concatenate(taken).mean() / 1e9)] for name, taken in seconds.items()]
    if device == "cuda":
        slower = np.maximum(*(np.concatenate(seconds[name]) for name in (BARE, GATHERED)))
        share = float(np.median(slower / np.concatenate(seconds[OURS])))
        targets.append(Target("of the speed of gathering or of the bare copy, the slower", share, 0.8, "times", True))
    caveats = [
        f"{size.episodes * size.steps:,} steps of (84, 84) uint8 frames, obs and next_obs stacked by 4; a batch "
        f"is 256 of them, {nbytes / 1e6:.1f} MB.",
        "Times are those of whole batches on the device, one after the other, with nothing computed between them.",
        f"A step is that of {size.envs:,} environments, with observations of 48 and actions of 12 float32 on the "
        f"device. {size.calls} calls come one after the other. RolloutBuffer writes in the background, and its calls "
        "wait where the disk is slower.",
    ]
    if device == "cuda":
        caveats.append(f"The device is one {torch.cuda.get_device_name()}.")
    else:
        caveats.append(
            "There was no CUDA device: batches and steps stay on the CPU, and there is no bare copy to compare with."
        )
    tables = [timing_table(seconds, "a batch"), Table(["rate", "GB/s"], rates), timing_table(from_device, "a step")]
    return Report("Bring batches to a device", tables, targets, caveats)


def _fill(path: Path, size: Size) -> None:
    images = np.random.default_rng(0).integers(0, 256, (size.steps + 1, 84, 84), np.uint8)
    with dr.create(path, FRAME_SCHEMA) as store, store.writer() as writer:
        for _ in range(size.episodes):
            writer.append_episode(images, np.zeros(size.steps, int), np.ones(size.steps, np.float32), terminated=True)


def _steps_from(device: str, size: Size, rounds: int, folder: Path) -> dict[str, list[Seconds]]:
    """Return the times of calls that append a step of many environments from a device."""
    step = Steps(*(tensor.to(device) for tensor in Steps.random(size.envs)))
    fields = step.fields()
    with (
        dr.create(folder / "vector", SCHEMA, capacity=64 * size.envs) as store,
        store.writer(size.envs) as writer,
        dr.RolloutBuffer(size.envs, size.calls, path=folder / "rollouts", device=device) as buffer,
    ):

        def append_each() -> None:
            writer.append(**{name: tensor.cpu().numpy() for name, tensor in fields.items()})

        def add() -> None:
            if len(buffer) == size.envs * size.calls:
                buffer.clear()
            buffer.add(*step)

        calls = {APPEND: lambda: writer.append(**fields), APPEND_EACH: append_each, ADD: add}
        return in_turn([_contestant(name, size.calls, call) for name, call in calls.items()], rounds)


def _nbytes(batch: Any) -> int:
    return sum(batch[name].nbytes for name in batch)


def _bare_copy(nbytes: int) -> Callable[[], Any]:
    """Return a call that copies pinned memory to the device."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return lambda: target.copy_(source, non_blocking=True)


def _contestant(name: str, batches: int, call: Callable[[], Any]) -> Contestant:
    """Return a contestant with ``batches`` calls in a round; the time of a batch is their mean."""

    def run_round() -> Any:
        started = perf_counter()
        for _ in range(batches):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return np.array([(perf_counter() - started) / batches])

    return Contestant(name, run_round)
