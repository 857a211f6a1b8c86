"""Peers that keep their steps in memory: buffers of Stable-Baselines3 and cpprb, for appends one at a time."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import diskreplay as dr

SB3, CPPRB = "SB3 (RAM)", "cpprb (RAM)"
INSTALLED = [name for name, module in ((SB3, "stable_baselines3"), (CPPRB, "cpprb")) if find_spec(module)]

Adder = Callable[..., Any]


def adder(name: str, schema: dr.Schema, capacity: int) -> Adder:
    """Return what appends one step (obs, action, reward, terminated, truncated, next_obs) to a fresh buffer."""
    return {SB3: _sb3, CPPRB: _cpprb}[name](schema.obs, schema.action, capacity)


def _sb3(obs: dr.Field, action: dr.Field, capacity: int) -> Adder:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    bounds = (0, 255) if obs.dtype == np.uint8 else (-np.inf, np.inf)
    space = spaces.Box(*bounds, obs.shape, obs.dtype.type)
    buffer = ReplayBuffer(capacity, space, spaces.Discrete(2), device="cpu", handle_timeout_termination=True)
    infos = [[{"TimeLimit.truncated": truncated}] for truncated in (False, True)]
    dtype = action.dtype

    def add(obs: Any, action: int, reward: float, terminated: bool, truncated: bool, next_obs: Any) -> None:
        # What its algorithms do with one environment of a vector: a leading axis, and `infos` of truncations.
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

    buffer = ReplayBuffer(capacity, _cpprb_fields(obs, action))

    def add(obs: Any, action: int, reward: float, terminated: bool, truncated: bool, next_obs: Any) -> None:
        buffer.add(obs=obs, act=action, rew=reward, next_obs=next_obs, done=terminated)
        if terminated or truncated:
            buffer.on_episode_end()

    return add


def cpprb_prioritized(schema: dr.Schema, rows: dict[str, Any], alpha: float) -> Any:
    """Return a prioritized buffer of these rows."""
    from cpprb import PrioritizedReplayBuffer

    count = len(rows["obs"])
    buffer = PrioritizedReplayBuffer(count, _cpprb_fields(schema.obs, schema.action), alpha=alpha)
    for start in range(0, count, 10_000):
        obs, act, rew, next_obs, done = (column[start : start + 10_000] for column in rows.values())
        buffer.add(obs=obs, act=act, rew=rew, next_obs=next_obs, done=done)
    return buffer


def _cpprb_fields(obs: dr.Field, action: dr.Field) -> dict[str, Any]:
    shaped = {"shape": obs.shape, "dtype": obs.dtype.type}
    return {"obs": shaped, "next_obs": shaped, "act": {"dtype": action.dtype.type}, "rew": {}, "done": {}}
