"""Thousands of environments in parallel: rollouts, appends at a fixed rate, and batches during appends."""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

import diskreplay as dr
from tools.bench.harness import (
    OURS,
    Contestant,
    Report,
    Seconds,
    Table,
    Target,
    in_turn,
    number,
    ratio_table,
    ratios,
    timed,
    timing_table,
)


class Size(NamedTuple):
    """Environments of the rollout buffers, lanes of the writers, steps of a rollout, and calls."""

    envs: tuple[int, ...] = (4096, 1024, 64)
    lanes: int = 4096
    steps: int = 24
    repeats: int = 10  # rollouts of a round
    calls: int = 50  # appends in a round, each followed by a batch
    batch: int = 8192
    paced: int = 10_000  # appends at a fixed rate, in total
    capacity: int = 1_000_000
    file_calls: int = 64  # appends to each file of the bare writes


FULL, TINY = Size(), Size((8, 4), 8, 4, 2, 3, 16, 5, 400, 2)

OBS, ACTIONS = 48, 12
GAMMA, LAMBDA = 0.99, 0.95
CALLS_A_SECOND = 50
WANTED_TIMES = {4096: 1.5, 1024: 1.7, 64: 2.2}
LEAST_P999_S, LEAST_P99_S, OF_BARE = 5e-3, 12e-3, 1.5
PLAIN, TORCHRL, BARE = "plain torch tensors", "TorchRL LazyTensorStorage", "bare mapped writes"
MAPPED, NEW = "plain torch tensors through mapped files", "plain torch tensors through new files"
SCHEMA = dr.Schema(
    dr.Field((OBS,), "float32"), dr.Field((ACTIONS,), "float32"), extra={"value": dr.Field((), "float32")}
)


class Steps(NamedTuple):
    """A step of all environments as tensors on the CPU."""

    obs: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    done: torch.Tensor
    value: torch.Tensor
    log_prob: torch.Tensor

    @classmethod
    def random(cls, envs: int, ends: float = 0.01) -> "Steps":
        """Return a step. It ends the episodes of a share of the environments."""
        generator = torch.Generator().manual_seed(0)
        obs, action = (torch.randn(envs, width, generator=generator) for width in (OBS, ACTIONS))
        reward, value, log_prob = torch.randn(3, envs, generator=generator)
        done = (torch.rand(envs, generator=generator) < ends).float()
        return cls(obs, action, reward, done, value, log_prob)

    def fields(self) -> dict[str, torch.Tensor]:
        """Return the arguments of an append as tensors."""
        fields = {name: tensor for name, tensor in self._asdict().items() if name not in ("done", "log_prob")}
        return {**fields, "terminated": self.done > 0}

    def appended(self) -> dict[str, Any]:
        """Return the arguments of an append as arrays."""
        return {name: tensor.numpy() for name, tensor in self.fields().items()}


class PlainTensors:
    """A rollout storage as in learning libraries such as rsl_rl: a tensor for each field, and a loop for GAE."""

    def __init__(self, envs: int, steps: int) -> None:
        self.fields = [torch.zeros(steps, envs, *shape) for shape in ((OBS,), (ACTIONS,), (), (), (), ())]
        self.steps = 0

    def add(self, *values: torch.Tensor) -> None:
        """Copy a step."""
        for tensor, value in zip(self.fields, values, strict=True):
            tensor[self.steps].copy_(value)
        self.steps += 1

    def compute_returns(self, last_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns, of float32."""
        _, _, rewards, dones, values, _ = self.fields
        advantages = torch.zeros_like(rewards)
        run = torch.zeros_like(last_values)
        for t in reversed(range(len(rewards))):
            following = last_values if t == len(rewards) - 1 else values[t + 1]
            live = 1.0 - dones[t]
            delta = rewards[t] + GAMMA * live * following - values[t]
            run = delta + GAMMA * LAMBDA * live * run
            advantages[t] = run
        return advantages, advantages + values


class MappedFiles:
    """Mapped files with each step at its place in a store: the cost of the layout alone.

    ``chunk_rows`` has the rows of a chunk in a segment. A field has one file with room for ``rows`` rows of each lane,
    chunk after chunk; its pages are in memory from the beginning. Later steps overwrite the first ones.
    """

    def __init__(self, folder: Path, chunk_rows: Mapping[str, int], step: Mapping[str, np.ndarray], rows: int) -> None:
        folder.mkdir()
        self.step, self.count, self.chunks = step, 0, dict[str, np.ndarray]()
        for leaf, array in step.items():
            lanes, *shape = array.shape
            path = folder / leaf.replace("/", " ")
            whole = -(-rows // chunk_rows[leaf]), lanes, chunk_rows[leaf], *shape
            self.chunks[leaf] = np.memmap(path, array.dtype, "w+", shape=whole)
            self.chunks[leaf][:] = 0
            path.unlink()

    def place(self, leaf: str, number_: int) -> np.ndarray:
        """Return the rows of a step, ``(lanes, *shape)``."""
        chunks = self.chunks[leaf]
        rows = chunks.shape[2]
        return chunks[number_ // rows % len(chunks), :, number_ % rows]

    def append(self) -> None:
        """Write a step."""
        for leaf, array in self.step.items():
            self.place(leaf, self.count)[:] = array
        self.count += 1

    def read(self, fields: Mapping[str, np.ndarray]) -> None:
        """Read the last steps into the arrays ``(steps, lanes, *shape)`` of some leaves."""
        for leaf, out in fields.items():
            for at, row in enumerate(out, self.count - len(out)):
                row[:] = self.place(leaf, at)


class NewFiles:
    """Files with each step in one range of bytes, written by one system call and read by another: no layout at all.

    A file has ``steps`` steps; then `append` begins a new file.
    """

    def __init__(self, path: Path, step: Sequence[np.ndarray], steps: int) -> None:
        self.path, self.step, self.steps = path, step, steps
        self.bytes = sum(array.nbytes for array in step)
        self.count, self.fd = 0, -1

    def append(self) -> None:
        """Write a step."""
        at = self.count % self.steps
        if at == 0:
            self.close()
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            self.path.unlink()
        os.pwritev(self.fd, self.step, at * self.bytes)
        self.count += 1

    def read(self, fields: Sequence[np.ndarray]) -> None:
        """Read all steps of the file into a field for each array, ``(steps, lanes, *shape)``."""
        for at in range(self.steps):
            os.preadv(self.fd, [field[at] for field in fields], at * self.bytes)

    def close(self) -> None:
        """Close the file, if one is open."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class BareWrites:
    """Copies the bytes of a step to mapped files, a new one after some calls."""

    def __init__(self, folder: Path, step: dict[str, Any], file_calls: int) -> None:
        folder.mkdir()
        self.folder, self.file_calls, self.calls = folder, file_calls, 0
        self.arrays = [array.view(np.uint8).ravel() for array in step.values()]
        self.bytes = sum(map(len, self.arrays))
        self.rows: Iterator[np.ndarray] = iter(())

    def append(self) -> None:
        """Write one step."""
        row = next(self.rows, None)
        if row is None:
            path = self.folder / str(self.calls)
            mapped = np.memmap(path, np.uint8, "w+", shape=(self.file_calls, self.bytes))
            path.unlink()
            self.rows = iter(mapped)
            row = next(self.rows)
        self.calls += 1
        at = 0
        for array in self.arrays:
            row[at : at + len(array)] = array
            at += len(array)


def _torchrl_rollout(steps: int, step: Steps) -> Callable[[], Any]:
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    from tools.bench import torchrl_peer

    buffer = torchrl_peer.rollouts(steps)
    more = {"next_value": step.value, "terminated": step.done > 0}

    def rollout() -> Any:
        for _ in range(steps):
            buffer.add(torchrl_peer.TensorDict({**step._asdict(), **more}, []))
        data = buffer[:]
        columns = [data[name].T[..., None] for name in ("value", "next_value", "reward", "terminated", "terminated")]
        found = generalized_advantage_estimate(GAMMA, LAMBDA, *columns)
        buffer.empty()
        return data, found

    return rollout


def _rollout_buffers(envs: int, size: Size, rounds: int, peers: bool) -> tuple[list[Table], list[Target]]:
    """Compare rollouts in memory: the adds, the advantages, and all data."""
    step = Steps.random(envs)
    with dr.RolloutBuffer(envs, size.steps, (OBS,), (ACTIONS,)) as buffer:

        def ours() -> Any:
            for _ in range(size.steps):
                buffer.add(*step)
            buffer.compute_returns_and_advantages(step.value, GAMMA, LAMBDA)
            data = buffer.get_all_data()
            buffer.clear()
            return data

        plain = PlainTensors(envs, size.steps)

        def tensors() -> Any:
            for _ in range(size.steps):
                plain.add(*step)
            plain.steps = 0
            return plain.fields, plain.compute_returns(step.value)

        calls = {OURS: ours, PLAIN: tensors}
        if peers:
            calls[TORCHRL] = _torchrl_rollout(size.steps, step)
        seconds = in_turn(
            [Contestant(name, partial(timed, call, [()] * size.repeats)) for name, call in calls.items()],
            rounds,
        )
    what = f"RolloutBuffer, {envs:,} environments x {size.steps} steps"
    tables = [timing_table(seconds, what), ratio_table(seconds, [(OURS, peer) for peer in calls if peer != OURS])]
    if envs not in WANTED_TIMES:
        return tables, []
    return tables, [_times(seconds, OURS, PLAIN, f"{what}: time", WANTED_TIMES[envs])]


def _times(seconds: dict[str, list[Seconds]], ours: str, peer: str, what: str, most: float) -> Target:
    return Target(f"{what} beside {peer}", float(np.median(ratios(seconds, peer, ours))), most, "times")


def _rollouts_of_a_store(size: Size, rounds: int, folder: Path) -> tuple[list[Table], list[Target]]:
    """Compare appends and `Rollouts` of a store with tensors, both with a value of the last observations."""
    step = Steps.random(size.lanes)
    weights = torch.randn(OBS)
    appended = step.appended()
    plain = PlainTensors(size.lanes, size.steps)

    def value_fn(obs: torch.Tensor) -> torch.Tensor:
        return obs @ weights

    def tensors() -> Any:
        for _ in range(size.steps):
            plain.add(*step)
        plain.steps = 0
        return plain.compute_returns(value_fn(step.obs))

    with (
        dr.create(folder / "rollouts", SCHEMA, capacity=size.capacity) as store,
        store.writer(num_envs=size.lanes) as writer,
        dr.Sampler(store, dr.Rollouts(size.steps, GAMMA, LAMBDA, value_fn=value_fn)) as sampler,
        closing(NewFiles(folder / "new", [tensor.numpy() for tensor in step], size.steps)) as new,
    ):

        def ours() -> Any:
            for number_ in range(size.steps):
                writer.append(**appended, next_obs=appended["obs"] if number_ == size.steps - 1 else None)
            batch = sampler.sample()
            return [batch[name] for name in batch]

        ours()
        files = _files_like(store, folder / "mapped", appended, size.capacity // size.lanes)
        fields = [field.numpy() for field in plain.fields]

        def through(files: MappedFiles | NewFiles, read: Callable[[], None]) -> Any:
            for _ in range(size.steps):
                files.append()
            read()
            return plain.compute_returns(value_fn(step.obs))

        by_leaf = dict(zip(("obs", "action", "reward", "done", "extra/value"), fields, strict=False))
        calls = {OURS: ours, PLAIN: tensors}
        calls[MAPPED] = partial(through, files, partial(files.read, by_leaf))
        calls[NEW] = partial(through, new, partial(new.read, fields))
        seconds = in_turn(
            [Contestant(name, partial(timed, call, [()] * size.repeats)) for name, call in calls.items()],
            rounds,
        )
    what = f"{size.steps} VectorWriter.append and Rollouts({size.steps}), {size.lanes:,} lanes"
    pairs = [(OURS, PLAIN), (OURS, MAPPED), (OURS, NEW), (MAPPED, PLAIN), (NEW, PLAIN)]
    tables = [timing_table(seconds, what), ratio_table(seconds, pairs)]
    return tables, [_times(seconds, OURS, PLAIN, f"{what}: time", 4)]


def _files_like(store: dr.Store, folder: Path, appended: dict[str, Any], rows: int) -> MappedFiles:
    """Return files with the chunks of a store, for a step of all lanes."""
    document = json.loads(next((store.path / "segments").glob("*/zarr.json")).read_text())
    names = {"value": "extra/value", "terminated": "done"}
    step = {names.get(name, name): array for name, array in appended.items()}
    step["time"] = np.zeros(len(step["done"]), np.int64)
    return MappedFiles(folder, document["attributes"]["chunk_rows"], step, rows)


def _paced_appends(size: Size, folder: Path) -> tuple[list[Table], list[Target]]:
    """Append at a fixed rate, and write the same bytes to plain files between two appends."""
    appended = Steps.random(size.lanes).appended()
    bare = BareWrites(folder / "bare", appended, size.file_calls)
    taken: dict[str, list[float]] = {OURS: [], BARE: []}
    with (
        dr.create(folder / "paced", SCHEMA, capacity=size.capacity) as store,
        store.writer(num_envs=size.lanes) as writer,
    ):
        calls = itertools.cycle([(OURS, lambda: writer.append(**appended)), (BARE, bare.append)])
        begun = perf_counter()
        for count, (name, call) in zip(range(2 * size.paced), calls, strict=False):
            time.sleep(max(0.0, begun + count / (2 * CALLS_A_SECOND) - perf_counter()))
            started = perf_counter()
            call()
            taken[name].append(perf_counter() - started)
    rows, last = [], {}
    for name, every in taken.items():
        calls_ms = np.array(every) * 1e3
        cells = [*np.percentile(calls_ms, [50, 99, 99.9]), calls_ms.max()]
        last[name] = cells[2] / 1e3
        rows.append([name, *map(number, cells), str(len(every))])
    what = f"VectorWriter.append, {size.lanes:,} lanes, {CALLS_A_SECOND} calls a second"
    table = Table([what, "median ms", "p99 ms", "p99.9 ms", "most ms", "calls"], rows)
    most = max(LEAST_P999_S, OF_BARE * last[BARE])
    return [table], [Target(f"{what}: 99.9th percentile", last[OURS] * 1e3, most * 1e3, "ms")]


def _appends_and_batches(size: Size, rounds: int, folder: Path) -> tuple[list[Table], list[Target]]:
    """Append a step of all lanes and draw a batch, again and again."""
    appended = Steps.random(size.lanes).appended()
    bare = BareWrites(folder / "bare of batches", appended, size.file_calls)
    ids = {OURS: dr.Uniform(), f"{OURS}, priorities with an update": dr.Prioritized()}
    contestants = [Contestant(BARE, partial(timed, bare.append, [()] * size.calls))]
    opened: list[Any] = []
    for name, distribution in ids.items():
        store = dr.create(folder / f"batches {name}", SCHEMA, capacity=size.capacity)
        writer = store.writer(num_envs=size.lanes)
        sampler = dr.Sampler(store, dr.Transitions(n_step=3), distribution, batch_size=size.batch, seed=0)
        for _ in range(8):
            writer.append(**appended)

        def step(writer: Any = writer, sampler: Any = sampler, updates: bool = name != OURS) -> None:
            writer.append(**appended)
            batch = sampler.sample()
            for field in ("obs", "action", "reward", "next_obs", "discount"):
                batch[field]
            if updates:
                sampler.update_priorities(batch.index, batch.reward)

        contestants.append(Contestant(name, partial(timed, step, [()] * size.calls)))
        opened += sampler, writer, store
    seconds = in_turn(contestants, rounds)
    for each in opened:
        each.close()
    what = f"append {size.lanes:,} and a batch of {size.batch:,}, 3-step"
    bare_s = float(np.percentile(np.concatenate(seconds[BARE]), 99))
    ours_s = float(np.percentile(np.concatenate(seconds[OURS]), 99))
    target = Target(f"{what}: 99th percentile", ours_s * 1e3, max(LEAST_P99_S, OF_BARE * bare_s) * 1e3, "ms")
    return [timing_table(seconds, what)], [target]


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Measure rollouts in memory and in a store, appends at a fixed rate, and appends with batches."""
    parts = [_rollout_buffers(envs, size, rounds, peers) for envs in size.envs]
    parts.append(_rollouts_of_a_store(size, rounds, folder))
    parts.append(_appends_and_batches(size, rounds, folder))
    parts.append(_paced_appends(size, folder))
    return Report(
        "Thousands of environments",
        [table for tables, _ in parts for table in tables],
        [target for _, targets in parts for target in targets],
        [
            f"Observations ({OBS},) and actions ({ACTIONS},) float32; about 1 % of the environments end with each "
            f"step. torch has {torch.get_num_threads()} threads for all contestants, and no device but the CPU.",
            f"A call of the first tables is a whole rollout: {size.steps} adds, advantages and returns, all data. The "
            "plain tensors are a tensor a field, one copy a field and step, and a loop over steps for the advantages, "
            "in the form of rsl_rl's RolloutStorage. They check nothing and sum in float32; ours checks shapes, dtypes "
            "and flags, and sums in float64. TorchRL makes a TensorDict a step, and has its own estimate.",
            f"{MAPPED.capitalize()}: the plain tensors' work, but each step is first written to mapped files, to "
            "the places that its values have in the store, and read from there when the rollout is complete. The files "
            "have the store's chunks and as many steps as its capacity. They are made beforehand; nothing else that a "
            "store does is done.",
            f"{NEW.capitalize()}: one pwritev writes each step to a new file, in one range of bytes. When the rollout "
            "is complete, one preadv reads each step. The file has no layout, no index and no checksums.",
            "Appends go to files, which the system writes back meanwhile. The bare writes copy the same bytes to "
            f"mapped files, a new one after {size.file_calls} calls, and keep no index of episodes.",
            f"The paced appends and the bare writes take turns in one run of {size.paced / CALLS_A_SECOND:.0f} s. The "
            f"bound of a percentile is {LEAST_P999_S * 1e3:.0f} ms (with batches {LEAST_P99_S * 1e3:.0f} ms) or "
            f"{OF_BARE} times the percentile of the bare writes, whichever is larger.",
        ],
    )
