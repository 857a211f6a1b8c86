"""Peers that keep their steps in memory: buffers of Stable-Baselines3, cpprb and Tianshou."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import numpy as np

import diskreplay as dr

SB3, CPPRB, TIANSHOU = "SB3 (RAM)", "cpprb (RAM)", "Tianshou (RAM)"
_MODULES = {SB3: "stable_baselines3", CPPRB: "cpprb", TIANSHOU: "tianshou"}
INSTALLED = [name for name, module in _MODULES.items() if find_spec(module)]
MISSING_ARE_LEFT_OUT = "Peers that are not installed are left out: " + (
    ", ".join(name for name in _MODULES if name not in INSTALLED) or "none of those in memory"
)

Adder = Callable[..., Any]
Rows = dict[str, Any]  # as `data.nstep_rows` returns them


def _sb3_buffer(obs: dr.Field, capacity: int) -> Any:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    bounds = (0, 255) if obs.dtype == np.uint8 else (-np.inf, np.inf)
    space = spaces.Box(*bounds, obs.shape, obs.dtype.type)
    return ReplayBuffer(capacity, space, spaces.Discrete(2), device="cpu", handle_timeout_termination=True)


def _sb3(obs: dr.Field, action: dr.Field, capacity: int) -> Adder:
    buffer = _sb3_buffer(obs, capacity)
    infos = [[{"TimeLimit.truncated": truncated}] for truncated in (False, True)]
    dtype = action.dtype

    def add(obs: Any, action: int, reward: float, terminated: bool, truncated: bool, next_obs: Any) -> None:
        # As in its algorithms with one environment of a vector: a leading axis, and `infos` of truncations.
        buffer.add(
            obs[None],
            next_obs[None],
            np.array([action], dtype),
            np.array([reward]),
            np.array([terminated or truncated]),
            infos[truncated],
        )

    return add


def _cpprb(obs: dr.Field, action: dr.Field, capacity: int) -> Adder:
    from cpprb import ReplayBuffer

    buffer = ReplayBuffer(capacity, _cpprb_fields(obs.shape, obs, action))

    def add(obs: Any, action: int, reward: float, terminated: bool, truncated: bool, next_obs: Any) -> None:
        buffer.add(obs=obs, act=action, rew=reward, next_obs=next_obs, done=terminated)
        if terminated or truncated:
            buffer.on_episode_end()

    return add


ADDERS = {SB3: _sb3, CPPRB: _cpprb}


def adder(name: str, schema: dr.Schema, capacity: int) -> Adder:
    """Return a function that appends a step (obs, action, reward, terminated, truncated, next_obs) to a new buffer."""
    return ADDERS[name](schema.obs, schema.action, capacity)


def sb3_uniform(schema: dr.Schema, rows: Rows) -> Any:
    """Return a buffer of these rows, assigned to its public arrays."""
    count = len(rows["reward"])
    buffer = _sb3_buffer(schema.obs, count)
    names = {"observations": "obs", "next_observations": "next_obs", "rewards": "reward", "dones": "done"}
    for theirs, ours in names.items():
        getattr(buffer, theirs)[:, 0] = rows[ours]
    buffer.actions[:, 0, 0] = rows["action"]
    buffer.full = True
    return buffer


def cpprb_uniform(schema: dr.Schema, rows: Rows) -> Any:
    """Return a buffer of these rows."""
    from cpprb import ReplayBuffer

    buffer = ReplayBuffer(len(rows["reward"]), _cpprb_fields(schema.obs.shape, schema.obs, schema.action))
    return _cpprb_filled(buffer, rows)


def cpprb_prioritized(schema: dr.Schema, rows: Rows, alpha: float) -> Any:
    """Return a prioritized buffer of these rows."""
    from cpprb import PrioritizedReplayBuffer

    fields = _cpprb_fields(schema.obs.shape, schema.obs, schema.action)
    return _cpprb_filled(PrioritizedReplayBuffer(len(rows["reward"]), fields, alpha=alpha), rows)


def cpprb_stacked(schema: dr.Schema, episodes: Iterable[Rows], capacity: int, stack: int, alpha: float) -> Any:
    """Return a prioritized buffer of episodes whose observations are stacks, each frame kept once for obs and next_obs.

    Its stack axis is the last one.
    """
    from cpprb import PrioritizedReplayBuffer

    fields = _cpprb_fields((*schema.obs.shape, stack), schema.obs, schema.action)
    buffer = PrioritizedReplayBuffer(capacity, fields, alpha=alpha, stack_compress=["obs", "next_obs"])
    for rows in episodes:
        stacks = {name: np.moveaxis(rows[name], 1, -1) for name in ("obs", "next_obs")}
        _cpprb_filled(buffer, rows | stacks)
        buffer.on_episode_end()
    return buffer


def _cpprb_filled(buffer: Any, rows: Rows) -> Any:
    for start in range(0, len(rows["reward"]), 10_000):
        obs, act, rew, next_obs, done = (column[start : start + 10_000] for column in rows.values())
        buffer.add(obs=obs, act=act, rew=rew, next_obs=next_obs, done=done)
    return buffer


def _cpprb_fields(shape: tuple[int, ...], obs: dr.Field, action: dr.Field) -> dict[str, Any]:
    shaped = {"shape": shape, "dtype": obs.dtype.type}
    return {"obs": shaped, "next_obs": shaped, "act": {"dtype": action.dtype.type}, "rew": {}, "done": {}}


def tianshou_prioritized(rows: Rows, ends: Any, alpha: float, beta: float) -> Any:
    """Return a prioritized buffer of single steps; `ends` is true at the last step of each episode."""
    from tianshou.data import Batch, PrioritizedReplayBuffer

    count = len(rows["reward"])
    buffer = PrioritizedReplayBuffer(count, alpha, beta)
    columns = {"obs": rows["obs"], "act": rows["action"], "rew": rows["reward"], "obs_next": rows["next_obs"]}
    terminated, truncated = rows["done"], ends & ~rows["done"]
    buffer.set_batch(Batch(**columns, terminated=terminated, truncated=truncated, done=ends, info=Batch()))
    buffer._size = count  # as its own `from_data` does
    buffer.init_weight(np.arange(count))
    return buffer


def tianshou_returns(buffer: Any, size: int, n: int, gamma: float) -> tuple[Any, Any]:
    """Draw a batch with n-step returns, as in its algorithms; return it and its indices."""
    import torch

    try:
        from tianshou.algorithm.algorithm_base import Algorithm
    except ImportError:  # before 2.0
        from tianshou.policy import BasePolicy as Algorithm

    def values(buffer: Any, after: Any) -> Any:
        # Reads the input of a target network; the network itself costs nothing here.
        return torch.zeros(len(buffer[after].obs_next))

    batch, index = buffer.sample(size)
    return Algorithm.compute_nstep_return(batch, buffer, index, values, gamma, n), index


def cpprb_step(buffer: Any, size: int, beta: float, td_error: Any) -> None:
    """Draw a batch of cpprb's prioritized buffer, and update it."""
    batch = buffer.sample(size, beta=beta)
    buffer.update_priorities(batch["indexes"], td_error)


def online(
    name: str, schema: dr.Schema, size: int, n: int, gamma: float, alpha: float, beta: float
) -> tuple[Adder, Callable[[], Any]] | None:
    """Return functions that append a step to a new buffer, and draw a batch; None if the peer cannot.

    With more than one step, draws are by priority, and priorities are updated.
    """
    made: tuple[Adder, Callable[[], Any]] | None = _ONLINE[name](schema, size, n, gamma, alpha, beta)
    return made


def _sb3_online(schema: dr.Schema, size: int, n: int, *_: float) -> Any:
    if n > 1:
        return None
    buffer = _sb3_buffer(schema.obs, 1_000_000)
    infos = [[{"TimeLimit.truncated": truncated}] for truncated in (False, True)]

    def add(obs: Any, action: int, reward: float, terminated: bool, truncated: bool, next_obs: Any) -> None:
        ends = np.array([terminated or truncated])
        buffer.add(obs[None], next_obs[None], np.array([action]), np.array([reward]), ends, infos[truncated])

    return add, lambda: buffer.sample(size)


def _cpprb_online(schema: dr.Schema, size: int, n: int, gamma: float, alpha: float, beta: float) -> Any:
    from cpprb import PrioritizedReplayBuffer, ReplayBuffer

    fields, td_error = _cpprb_fields(schema.obs.shape, schema.obs, schema.action), np.random.default_rng(0).random(size)
    if n == 1:
        buffer = ReplayBuffer(1_000_000, fields)
    else:
        steps = {"size": n, "gamma": gamma, "rew": "rew", "next": "next_obs"}
        buffer = PrioritizedReplayBuffer(1_000_000, fields, alpha=alpha, Nstep=steps)

    def add(obs: Any, action: int, reward: float, terminated: bool, truncated: bool, next_obs: Any) -> None:
        buffer.add(obs=obs, act=action, rew=reward, next_obs=next_obs, done=terminated)
        if terminated or truncated:
            buffer.on_episode_end()

    return add, (lambda: buffer.sample(size)) if n == 1 else (lambda: cpprb_step(buffer, size, beta, td_error))


def _tianshou_online(schema: dr.Schema, size: int, n: int, gamma: float, alpha: float, beta: float) -> Any:
    from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

    buffer = ReplayBuffer(1_000_000) if n == 1 else PrioritizedReplayBuffer(1_000_000, alpha, beta)
    td_error = np.random.default_rng(0).random(size)

    def add(obs: Any, action: int, reward: float, terminated: bool, truncated: bool, next_obs: Any) -> None:
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
        buffer.add(Batch(obs=obs, act=action, rew=reward, obs_next=next_obs, info={}, **ends))

    def step() -> None:
        _, index = buffer.sample(size)
        if n > 1:
            buffer.update_weight(index, td_error)

    return add, step


_ONLINE = {SB3: _sb3_online, CPPRB: _cpprb_online, TIANSHOU: _tianshou_online}
