"""Reference implementations of n-step transitions and of windows, in plain Python loops."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from diskreplay.testing.model import ModelEpisode
from diskreplay.testing.nested import Flat


def transition(
    episode: ModelEpisode,
    t: int,
    n_step: int | None = 1,
    gamma: float = 0.99,
    frame_stack: int = 1,
    discount: str | None = None,
) -> dict[str, Any]:
    """Compute the transition that starts at step `t`, as a dict by path, such as "obs/image" or "next_obs/image".

    `t` must be one of `episode.sampleable(n_step)`. `discount` is the name of the extra field with the environment's
    discounts; None: all discounts are 1. Sums are float64; in a batch, sums are rounded to float32.
    """
    steps = episode.steps
    k = episode.window_end - t if n_step is None else min(n_step, episode.window_end - t)
    at_end = episode.ended and t + k == len(steps)
    terminated = at_end and episode.terminated
    known = t + k < episode.num_frames
    scale = [1.0]  # scale[i] is the product of the first i discounts
    for step in steps[t : t + k]:
        scale.append(scale[-1] * gamma * (1.0 if discount is None else float(step.extra[discount])))
    following = _stack(episode, t + k if known else t, frame_stack)
    return {
        **_stack(episode, t, frame_stack),
        **{f"next_{leaf}": x if known else np.zeros_like(x) for leaf, x in following.items()},
        **steps[t].action,
        **steps[t].extra,
        "reward": sum(scale[i] * steps[t + i].reward for i in range(k)),
        "discount": 0.0 if terminated else scale[k],
        "terminated": terminated,
        "truncated": at_end and episode.truncated,
        "n_steps": k,
    }


def _stack(episode: ModelEpisode, t: int, depth: int) -> Flat:
    """Stack the `depth` frames that end with frame `t`, oldest first; a depth of 1 adds no axis."""
    if depth == 1:
        return episode.frame(t)
    rows = [episode.frame(t - back) for back in reversed(range(depth))]
    return {leaf: np.stack([row[leaf] for row in rows]) for leaf in rows[0]}


def window_starts(
    episode: ModelEpisode, length: int, stride: int, pad: bool | str = True, align: str = "start"
) -> list[int]:
    """Return the first step of each window of `Sequences`, without windows that begin at a hidden step.

    `stride` is the number of steps from one start to the next; in `Sequences`, it is `length - overlap` by default.
    `pad` and `align` are arguments of `Sequences`.
    """
    total = episode.window_end if episode.ended else episode.num_frames - 1
    starts: list[int] = []
    if align == "end":
        for end in range(total if episode.ended else 0, 0, -stride):
            if end >= length or pad != "drop":
                starts.insert(0, max(end - length, 0))
            if end <= length:
                break
    else:
        for s in range(0, total, stride):
            if s + length <= total or (episode.ended and pad is True):
                starts.append(s)
            elif episode.ended and pad is False:
                starts.append(max(total - length, 0))
            if s + length >= total:
                break
    return [s for s in starts if s >= episode.hidden]


def window(
    episode: ModelEpisode,
    start: int,
    length: int,
    burn_in: int = 0,
    frame_stack: int = 1,
    start_only: tuple[str, ...] = (),
    continues: bool = False,
) -> dict[str, Any]:
    """Compute the window of `length` steps from step `start` on, as a dict by path.

    `start` must be one of `window_starts`. `continues` says whether the episode continues an episode that was cut
    because its segment was full. If `length` is the length of the whole episode and `burn_in` is 0, the result is an
    item of `Episodes`.
    """
    total = episode.window_end if episode.ended else episode.num_frames - 1
    real = min(length, total - start)
    found: dict[str, list[Any]] = {}

    def put(values: Mapping[str, Any]) -> None:
        for leaf, value in values.items():
            found.setdefault(leaf, []).append(value)

    frames = min(episode.num_frames, start + real + 1)
    for j in range(length):
        t, is_real = start + j, j < real
        step = episode.steps[t if is_real else start]
        last = is_real and episode.ended and t == len(episode.steps) - 1
        is_first = j == 0 and start == 0 and not continues
        stays_in_loss = j >= burn_in or (start == 0 and not continues)
        values = {**step.action, "reward": step.reward, **_without(step.extra, start_only)}
        put(values if is_real else {leaf: np.zeros_like(x) for leaf, x in values.items()})
        put(_padded_stack(episode, t, frame_stack, frames))
        put({f"next_{leaf}": x for leaf, x in _padded_stack(episode, t + 1, frame_stack, frames).items()})
        put({"terminated": last and episode.terminated, "truncated": last and episode.truncated})
        put({"is_first": is_first, "mask": is_real, "loss_mask": is_real and stays_in_loss})
    read_once = {leaf: x for leaf, x in episode.steps[start].extra.items() if leaf.split("/")[0] in start_only}
    return {**{leaf: np.stack(values) for leaf, values in found.items()}, **read_once}


def crossing_starts(lane: Sequence[ModelEpisode], length: int, stride: int) -> list[tuple[int, int]]:
    """Return the starts of the windows of `Sequences` with `cross_episodes`, as pairs (index of the episode, step).

    `lane` has consecutive episodes of one lane.
    """
    steps = []
    for i, episode in enumerate(lane):
        is_newest = not episode.ended and i == len(lane) - 1
        steps += [(i, t) for t in range(episode.num_frames - 1 if is_newest else len(episode.steps))]
    full = steps[: max(len(steps) - length + 1, 0)]
    return [(i, t) for i, t in full if t % stride == 0 and t >= lane[i].hidden]


def crossing_window(
    lane: Sequence[ModelEpisode],
    start: tuple[int, int],
    length: int,
    burn_in: int = 0,
    frame_stack: int = 1,
    start_only: tuple[str, ...] = (),
    continuing: Collection[int] = (),
) -> dict[str, Any]:
    """Compute the window of `length` steps that starts at `start`, as a dict by path.

    `start` must be one of `crossing_starts`. `continuing` has the index in `lane` of each episode that continues an
    earlier episode. The earlier episode was cut because its segment was full.
    """
    found: dict[str, list[Any]] = {}

    def put(values: Mapping[str, Any]) -> None:
        for leaf, value in values.items():
            found.setdefault(leaf, []).append(value)

    (i, t), is_exact = start, False
    read_once = {leaf: x for leaf, x in lane[i].steps[t].extra.items() if leaf.split("/")[0] in start_only}
    for j in range(length):
        episode, step = lane[i], lane[i].steps[t]
        is_first = t == 0 and i not in continuing
        is_exact |= is_first
        last = t == len(episode.steps) - 1
        ends = last and (episode.ended or i < len(lane) - 1)
        put({**step.action, "reward": step.reward, **_without(step.extra, start_only)})
        put(_padded_stack(episode, t, frame_stack, episode.num_frames))
        following = _padded_stack(episode, t + 1, frame_stack, episode.num_frames)
        if t + 1 == episode.num_frames:
            following = {leaf: np.zeros_like(x) for leaf, x in following.items()}
        put({f"next_{leaf}": x for leaf, x in following.items()})
        put({"terminated": ends and episode.terminated, "truncated": ends and (episode.truncated or not episode.ended)})
        put({"is_first": is_first, "mask": True, "loss_mask": is_exact or j >= burn_in})
        i, t = (i + 1, 0) if last else (i, t + 1)
    return {**{leaf: np.stack(values) for leaf, values in found.items()}, **read_once}


def _without(extra: Flat, names: tuple[str, ...]) -> Flat:
    return {leaf: value for leaf, value in extra.items() if leaf.split("/")[0] not in names}


def _padded_stack(episode: ModelEpisode, t: int, depth: int, frames: int) -> Flat:
    """Stack the `depth` frames that end with frame `t`; each frame with an index of at least `frames` is zeros."""
    rows = []
    for back in reversed(range(depth)):
        at = t - back
        row = episode.frame(min(at, frames - 1))
        rows.append(row if at < frames else {leaf: np.zeros_like(x) for leaf, x in row.items()})
    return rows[0] if depth == 1 else {leaf: np.stack([row[leaf] for row in rows]) for leaf in rows[0]}
