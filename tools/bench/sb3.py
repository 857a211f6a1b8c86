"""Train with Stable-Baselines3, with steps in a store and in its own buffer; and time single calls of both."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import ReplayBuffer

import diskreplay as dr
from diskreplay.interop.sb3 import DiskReplayBuffer
from tools.bench.harness import (
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


class Task(NamedTuple):
    """An algorithm on an environment, and the steps of a round."""

    algorithm: type[DQN] | type[SAC]
    env: str
    steps: int

    def __str__(self) -> str:
        return f"{self.algorithm.__name__}, {self.env}"


class Size(NamedTuple):
    """Training, calls of a round, and the steps in both buffers before the first one."""

    tasks: tuple[Task, ...]
    calls: int
    held: int


FULL = Size((Task(DQN, "CartPole-v1", 10_000), Task(SAC, "Pendulum-v1", 250)), 1000, 20_000)
TINY = Size((Task(DQN, "CartPole-v1", 140), Task(SAC, "Pendulum-v1", 110)), 5, 40)

OURS, THEIRS = DiskReplayBuffer.__name__, "SB3's own buffer"
BATCH, CAPACITY, MOST = 256, 1_000_000, 1.05


class Training:
    """Trains a task with one of the buffers, each round with another seed; keeps the times and networks of rounds."""

    def __init__(self, task: Task, folder: Path | None) -> None:
        self._task, self._folder = task, folder
        self.cpu: list[Seconds] = []
        self.in_calls: list[Seconds] = []
        self.networks: list[dict[str, torch.Tensor]] = []

    def round(self) -> Seconds:
        """Return the wall time of `learn`."""
        seed = len(self.networks)
        model = self._task.algorithm("MlpPolicy", self._task.env, seed=seed, device="cpu", **self._buffer(seed))
        in_calls: list[float] = []
        assert model.replay_buffer is not None
        for name in ("add", "sample"):
            setattr(model.replay_buffer, name, _noting(getattr(model.replay_buffer, name), in_calls))
        started, started_cpu = perf_counter(), process_time()
        model.learn(self._task.steps)
        wall, cpu = perf_counter() - started, process_time() - started_cpu
        self.cpu.append(np.array([cpu]))
        self.in_calls.append(np.array([sum(in_calls)]))
        self.networks.append(model.policy.state_dict())
        if isinstance(model.replay_buffer, DiskReplayBuffer):
            model.replay_buffer.close()
        return np.array([wall])

    def _buffer(self, seed: int) -> dict[str, Any]:
        if self._folder is None:
            return {}
        path = self._folder / f"{self._task} {seed}"
        with closing(gym.make(self._task.env)) as env:
            fields = [dr.Field(space.shape, space.dtype) for space in (env.observation_space, env.action_space)]
        dr.create(path, dr.Schema(*fields), capacity=CAPACITY).close()
        return {"replay_buffer_class": DiskReplayBuffer, "replay_buffer_kwargs": {"path": path}}


def _noting(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a function that notes the processor time of each call."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        started = thread_time()
        result = call(*args, **kwargs)
        seconds.append(thread_time() - started)
        return result

    return noting


def _train(task: Task, rounds: int, folder: Path) -> tuple[list[list[str]], list[Target]]:
    """Train a task in turn with both buffers; return rows of the table, and targets."""
    runs = {OURS: Training(task, folder), THEIRS: Training(task, None)}
    wall = in_turn([Contestant(name, run.round) for name, run in runs.items()], rounds)
    cpu, in_calls = ({name: of(run)[-rounds:] for name, run in runs.items()} for of in (_cpu_of, _calls_of))
    rows, targets = [], []
    # Equal training differs only in these calls: the time of SB3's training with our calls instead of its own.
    rest = [whole - own for whole, own in zip(cpu[THEIRS], in_calls[THEIRS], strict=True)]
    replaced = {OURS: [own + more for own, more in zip(in_calls[OURS], rest, strict=True)], THEIRS: cpu[THEIRS]}
    for what, seconds in (("wall time", wall), ("processor time", cpu), ("with the calls replaced", replaced)):
        ratio = float(np.median(ratios(seconds, THEIRS, OURS)))
        medians = [number(np.median(seconds[name])) for name in (OURS, THEIRS)]
        rows.append([f"{task}, {task.steps:,} steps: {what}", *medians, f"{ratio:.3f}"])
        targets.append(Target(f"{task}: {what} beside SB3's own", ratio, MOST, "times"))
    equal = [_equal(*pair) for pair in zip(*(run.networks for run in runs.values()), strict=True)]
    targets.append(Target(f"{task}: networks that are equal, bit for bit", float(np.mean(equal)), 1, "", at_least=True))
    return rows, targets


def _cpu_of(run: Training) -> list[Seconds]:
    return run.cpu


def _calls_of(run: Training) -> list[Seconds]:
    return run.in_calls


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# --- single calls ----------------------------------------------------------------------------------------------------

Steps = list[tuple[Any, ...]]
_SPACES = spaces.Box(-9, 9, (4,), np.float32), spaces.Discrete(2)


def _steps(count: int, n_envs: int) -> Steps:
    """Return steps in the form of Stable-Baselines3, of episodes with a mean length of 100 steps."""
    rng = np.random.default_rng(0)
    made: Steps = []
    obs = rng.standard_normal((n_envs, 4), np.float32)
    for _ in range(count):
        following, ends = rng.standard_normal((n_envs, 4), np.float32), rng.random(n_envs) < 0.01
        infos = [{"TimeLimit.truncated": False} if end else {} for end in ends]
        action, reward = rng.integers(0, 2, n_envs), rng.standard_normal(n_envs, np.float32)
        made.append((obs, following, action, reward, ends, infos))
        obs = np.where(ends[:, None], rng.standard_normal((n_envs, 4), np.float32), following)
    return made


def _calls(size: Size, rounds: int, folder: Path) -> list[Table]:
    """Add steps of one environment and of eight, and draw batches, in turn with both buffers."""
    tables = []
    for n_envs in (1, 8):
        steps = _steps(size.held + size.calls * (rounds + 1), n_envs)
        with ExitStack() as stack:
            ours = DiskReplayBuffer(CAPACITY, *_SPACES, "cpu", n_envs, path=folder / f"calls {n_envs}")
            stack.enter_context(closing(ours))
            theirs = ReplayBuffer(CAPACITY, *_SPACES, "cpu", n_envs)
            for step in steps[: size.held]:
                ours.add(*step)
                theirs.add(*step)
            pairs = ((OURS, ours), (THEIRS, theirs))
            envs = f"{n_envs} environment{'s' * (n_envs > 1)}"
            adders = [_adder(name, buffer, steps[size.held :], size.calls) for name, buffer in pairs]
            tables.append(timing_table(in_turn(adders, rounds), f"one add, {envs}"))
            draws = [Contestant(name, _drawing(buffer, size.calls)) for name, buffer in pairs]
            seconds = in_turn(draws, rounds)
            tables += [timing_table(seconds, f"a batch of {BATCH}, {envs}"), ratio_table(seconds, [(OURS, THEIRS)])]
    return tables


def _adder(name: str, buffer: ReplayBuffer, steps: Steps, calls: int) -> Contestant:
    given = iter(steps)
    return Contestant(name, lambda: timed(buffer.add, [next(given) for _ in range(calls)]))


def _drawing(buffer: ReplayBuffer, calls: int) -> Callable[[], Seconds]:
    return lambda: timed(buffer.sample, [(BATCH,)] * calls)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Train both algorithms, and time the calls."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trained = [_train(task, rounds, folder) for task in size.tasks]
        calls = _calls(size, rounds, folder)
    finally:
        torch.set_num_threads(threads)
    header = ["training", f"{OURS}, s", f"{THEIRS}, s", "ratio (median of pairs)"]
    return Report(
        "Train with Stable-Baselines3",
        [Table(header, [row for rows, _ in trained for row in rows]), *calls],
        [target for _, targets in trained for target in targets],
        [
            "Training: `learn` with the default arguments of the algorithms and a buffer of a million steps, both "
            "buffers in turn with the same seed, each round with another one. The networks are compared after each "
            "round. The store is made before the clock starts, and closed after it was stopped.",
            "Processor time is that of all threads of the process, those that make steps durable included: it says "
            "what a buffer costs, also where other processes take turns on the same processors.",
            "With the calls replaced: processor time of training with SB3's own buffer, less what `add` and `sample` "
            "took of it, and what they took with ours, the first calls included. Both train the same networks, so this "
            "is how they differ; the times of whole rounds vary by a tenth where other processes work, too.",
            "One thread of torch's: networks of this size are trained faster by one.",
            f"Calls: CartPole's shape, {size.held:,} steps of each environment in both buffers at the start. Ours "
            "makes a step visible to every other process, and durable some seconds later.",
        ],
    )
