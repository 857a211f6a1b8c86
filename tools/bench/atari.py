"""Frames from a real emulator: games of ale-py, played at random."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.bench.data import Steps

GAMES = ("Breakout", "Pong", "SpaceInvaders", "Qbert")
_AT_ONCE = 256


def atari_episodes(steps: int, games: tuple[str, ...] = GAMES) -> Iterator[Steps]:
    """Yield episodes of 84 x 84 frames, the same number of steps of each game; its last episode is truncated."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    for number, game in enumerate(games):
        env = gymnasium.make(f"ALE/{game}-v5", obs_type="grayscale", frameskip=4, repeat_action_probability=0.25)
        rng, left = np.random.default_rng(number), steps // len(games)
        while left > 0:
            episode = _play(env, rng, left)
            yield episode
            left -= len(episode)
        env.close()


def _play(env: Any, rng: np.random.Generator, most: int) -> Steps:
    obs, _ = env.reset(seed=int(rng.integers(1 << 31)))
    frames, actions, rewards, terminated = [obs], list[int](), list[float](), False
    while len(actions) < most and not terminated:
        actions.append(int(rng.integers(env.action_space.n)))
        obs, reward, terminated, truncated, _ = env.step(actions[-1])
        frames.append(obs)
        rewards.append(float(reward))
        if truncated:
            break
    return Steps(_small(frames), np.array(actions), np.array(rewards, np.float32), bool(terminated))


def _small(frames: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return frames of 84 x 84; each pixel is the mean of the pixels that it covers."""
    import torch
    from torch.nn.functional import interpolate

    parts = []
    for start in range(0, len(frames), _AT_ONCE):
        given = torch.from_numpy(np.stack(frames[start : start + _AT_ONCE]))[:, None].float()
        parts.append(interpolate(given, (84, 84), mode="area")[:, 0].round().to(torch.uint8).numpy())
    return np.concatenate(parts)
