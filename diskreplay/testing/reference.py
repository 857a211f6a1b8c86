"""The reference loop: what an n-step transition of an episode is, in about ten lines of plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from diskreplay.testing.model import ModelEpisode
from diskreplay.testing.nested import Flat


def transition(
    episode: ModelEpisode, t: int, n_step: int | None = 1, gamma: float = 0.99, frame_stack: int = 1
) -> dict[str, Any]:
    """Compute the transition that starts at step `t`; leaves are keyed by path ("obs/image", "next_obs/image").

    `t` must be one of `episode.sampleable(n_step)`. Sums are float64 and not rounded to the float32 of a batch.
    """
    steps = episode.steps
    k = episode.window_end - t if n_step is None else min(n_step, episode.window_end - t)
    at_end = episode.ended and t + k == len(steps)
    terminated = at_end and episode.terminated
    known = t + k < episode.num_frames
    following = _stack(episode, t + k if known else t, frame_stack)
    return {
        **_stack(episode, t, frame_stack),
        **{f"next_{leaf}": x if known else np.zeros_like(x) for leaf, x in following.items()},
        **steps[t].action,
        **steps[t].extra,
        "reward": sum(gamma**i * steps[t + i].reward for i in range(k)),
        "discount": 0.0 if terminated else gamma**k,
        "terminated": terminated,
        "truncated": at_end and episode.truncated,
        "n_steps": k,
    }


def _stack(episode: ModelEpisode, t: int, depth: int) -> Flat:
    """Stack the last `depth` frames, oldest first; the first frame that is left repeats."""
    if depth == 1:
        return episode.frame(t)
    rows = [episode.frame(max(t - back, episode.hidden)) for back in reversed(range(depth))]
    return {leaf: np.stack([row[leaf] for row in rows]) for leaf in rows[0]}
