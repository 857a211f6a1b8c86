"""Replay buffers, pickled and loaded by Stable-Baselines3."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dumps
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

BOX, MOVE = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)
DICT = spaces.Dict({"image": spaces.Box(0, 255, (16, 24, 3), np.uint8), "state": BOX, "task": spaces.Discrete(5)})
STEPS = sum(length for length, _ in dumps.EPISODES)
# The class, spaces, environments, capacity in steps of each of these, and further arguments.
BUFFERS: dict[str, Any] = {
    "vectors": (ReplayBuffer, BOX, spaces.Discrete(4), 1, STEPS, {}),
    "moves": (ReplayBuffer, BOX, MOVE, 3, STEPS + 4, {}),
    "dicts": (DictReplayBuffer, DICT, spaces.MultiDiscrete([3, 2]), 1, STEPS, {}),
    "full": (ReplayBuffer, BOX, MOVE, 2, STEPS - 6, {}),
    "untimed": (ReplayBuffer, BOX, MOVE, 1, STEPS, {"handle_timeout_termination": False}),
}


def sampled(space: Any, count: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: sampled(inner, count) for key, inner in space.spaces.items()}
    return np.array([space.sample() for _ in range(count)])


def where(chosen: bool, one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {key: where(chosen, one[key], other[key]) for key in one}
    return (one if chosen else other).copy()


def write(folder: Path) -> None:
    for name, (made, obs_space, action_space, n_envs, capacity, arguments) in BUFFERS.items():
        for space in (obs_space, action_space):
            space.seed(0)
        rng, buffer = (
            np.random.default_rng(0),
            made(capacity * n_envs, obs_space, action_space, "cpu", n_envs, **arguments),
        )
        obs = sampled(obs_space, n_envs)
        for length, how in dumps.EPISODES:
            for at in range(length):
                done = at == length - 1
                after = sampled(obs_space, n_envs)
                infos = [{"TimeLimit.truncated": done and how == "truncated"}] * n_envs
                buffer.add(
                    where(True, obs, obs), where(True, after, after), sampled(action_space, n_envs), rng.random(n_envs),
                    np.full(n_envs, done), infos,
                )  # fmt: skip
                obs = where(done, sampled(obs_space, n_envs), after)
        save_to_pkl(folder / f"{name}.pkl", buffer)


def read(path: Path) -> Iterator[dict[str, Any]]:
    buffer = load_from_pkl(path)
    shift, size = (buffer.pos if buffer.full else 0), buffer.size()

    def rows(value: Any, env: int) -> dict[str, Any]:
        every = value if isinstance(value, dict) else {"": value}
        return {
            f"obs/{key}".rstrip("/"): np.roll(each[:, env], -shift, 0)[:size] if buffer.full else each[:size, env]
            for key, each in every.items()
        }

    found = []
    for env in range(buffer.n_envs):
        obs, after = rows(buffer.observations, env), rows(buffer.next_observations, env)
        rest = {name: rows(getattr(buffer, name), env)["obs"] for name in ("actions", "rewards", "dones", "timeouts")}
        start = 0
        for at in range(size):
            done, last = bool(rest["dones"][at]), at == size - 1
            if not (done or last) and all(np.array_equal(after[key][at], obs[key][at + 1]) for key in obs):
                continue
            part, timeout = slice(start, at + 1), bool(rest["timeouts"][at])
            values = {key: np.concatenate([obs[key][part], after[key][at : at + 1]]) for key in obs}
            spaces_of = {"": buffer.observation_space} | getattr(buffer.observation_space, "spaces", {})
            for key in values:
                space = spaces_of[key.removeprefix("obs").removeprefix("/")]
                values[key] = values[key].reshape(-1, *space.shape)
            values["action"] = rest["actions"][part].reshape(-1, *buffer.action_space.shape)
            values["reward"] = rest["rewards"][part]
            values |= {"terminated": np.bool_(done and not timeout), "truncated": np.bool_(done and timeout)}
            found.append((start, env, values))
            start = at + 1
    for _, _, values in sorted(found, key=lambda each: each[:2]):
        yield values


if __name__ == "__main__":
    dumps.main(write, read)
