"""Functions that compare a real store with its model: each function raises AssertionError with the first difference."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from diskreplay.ids import POSITION_BITS
from diskreplay.testing.model import ModelEpisode, ModelStore
from diskreplay.testing.nested import Flat, flat
from diskreplay.testing.reference import transition

_CLOCK_SLACK_S = 5.0

COMPUTED = ("reward", "discount")
"""Fields of a transition that are sums or powers.

In these fields, the float32 values of the store and of the reference may differ in the last digit.
"""


def check_store(store: Any, model: ModelStore, *, key: str = "serial", length_cuts: bool = False) -> dict[int, int]:
    """Compare every episode of a store's snapshot with the model, including hidden steps.

    `key` names the integer extra field whose value is different in every step. A writer may cut an open episode when it
    begins a new segment, and the model cannot predict this. With `length_cuts`, the model's episodes are cut where the
    store's episodes were cut.

    Returns
    -------
    dict of int to int
        The id of every visible step, by the step's value of `key`.
    """
    ids: dict[int, int] = {}
    real = {int(np.asarray(episode[key])[-1]): episode for episode in store.episodes}
    for lane in model.lanes():
        lane.show_ends()
    if length_cuts:
        _follow_length_cuts(real, model, key)
    expected = model.episodes
    _equal("number of episodes", len(real), len(expected))
    _equal("num_episodes", store.num_episodes, len(expected))
    for episode in expected:
        last = int(episode.steps[-1].extra[key])
        if last not in real:
            raise AssertionError(f"the episode whose last step is {last} is not in the store")
        if length_cuts:
            # A background thread seals segments, and only then shows ends that no row marks. So the model shows such an
            # end if the store shows it.
            episode.show_end(real[last].cut)
        check_episode(real[last], episode)
        serials = [int(step.extra[key]) for step in episode.steps[episode.hidden :]]
        ids.update(zip(serials, real[last].ids[episode.hidden :].tolist(), strict=True))
    _equal("len(store)", len(store), len(model))
    check_times(real.values())
    _equal("distinct ids", len(set(ids.values())), len(model))
    return ids


def check_account(store: Any, inserted: int | None = None) -> None:
    """Check that the counts of `store.info()` add up, in the whole store and in each segment.

    Every step that was ever inserted must be in exactly one class: visible, hidden, evicted, discarded, lost or in
    quarantine. The check refreshes the store. `inserted` is the expected number of inserted steps; None: any number.
    """
    info = store.info(total_reward=False)
    aside = info["quarantine"]["steps"]
    _equal("inserted steps", _in_classes(info) + aside, info["steps_inserted"])
    for segment in info["segments"]:
        _equal(f"steps of segment {segment['number']}", _in_classes(segment), segment["steps_inserted"])
    for key in ("steps", "steps_hidden", "steps_discarded", "steps_lost"):
        _equal(key, sum(segment[key] for segment in info["segments"]), info[key])
    _equal("steps of writers", sum(writer["steps"] for writer in info["writers"]), info["steps"])
    deleted = info["steps_evicted"] - sum(segment["steps_evicted"] for segment in info["segments"])
    of_segments = sum(segment["steps_inserted"] for segment in info["segments"])
    _equal("steps of segments", of_segments + deleted + aside, info["steps_inserted"])
    if min(deleted, *(info[key] for key in _CLASSES)) < 0:
        raise AssertionError(f"a number of steps is negative: {info}")
    if inserted is not None and info["steps_inserted"] != inserted:
        raise AssertionError(f"{info['steps_inserted']} steps were inserted, not {inserted}")


_CLASSES = ("steps", "steps_hidden", "steps_evicted", "steps_discarded", "steps_lost")


def _in_classes(counts: Mapping[str, Any]) -> int:
    return sum(int(counts[key]) for key in _CLASSES)


def check_times(episodes: Iterable[Any]) -> None:
    """Check that times never decrease within a lane, also between episodes, and that no time is in the future."""
    last: dict[tuple[int, int], float] = {}
    for episode in sorted(episodes, key=lambda episode: int(episode.ids[0])):
        times, lane = episode.times, (episode.segment, episode.lane)
        _equal("times: dtype and shape", (times.dtype, times.shape), (np.dtype(np.float64), (len(episode),)))
        if np.any(np.diff(times, prepend=last.get(lane, 0.0)) < 0):
            raise AssertionError(f"times of lane {lane} fall in {episode}")
        last[lane] = times[-1]
    # The slack allows for a wall clock that was set back a little after the steps were written.
    if last and max(last.values()) > time.time() + _CLOCK_SLACK_S:
        raise AssertionError(f"a step was published at {max(last.values())}, which is in the future")


def check_episode(real: Any, expected: ModelEpisode) -> None:
    steps, frames = expected.steps, [expected.frame(t) for t in range(expected.num_frames)]
    _equal("len", (len(real), real.length, real.hidden_steps), (len(steps), len(steps), expected.hidden))
    _equal("ends", (real.terminated, real.truncated, real.cut), (expected.terminated, expected.truncated, expected.cut))
    _same("obs", flat(real.obs, "obs"), _stacked(frames))
    _same("action", flat(real.action, "action"), _stacked([step.action for step in steps]))
    rewards = np.asarray([step.reward for step in steps])
    _same("reward", {"reward": np.asarray(real.reward, np.float64)}, {"reward": rewards.astype(np.float64)})
    priorities = np.array([np.nan if step.priority is None else step.priority for step in steps])
    _same("priority", {"priority": real["priority"]}, {"priority": priorities})
    for leaf, values in _stacked([step.extra for step in steps]).items():
        _same(leaf, {leaf: _leaf(real, leaf)}, {leaf: values})
    for leaf, value in expected.values.items():
        _same(leaf, {leaf: _leaf(real, leaf)}, {leaf: value})
    if len(steps) and not np.isclose(real.total_reward, rewards.sum(dtype=np.float64), rtol=1e-5, atol=1e-3):
        raise AssertionError(f"total_reward is {real.total_reward}, not {rewards.sum()}")
    if np.any(np.diff(real.ids) <= 0):
        raise AssertionError("ids of an episode do not rise")


def check_transitions(
    batch: Any, starts: Iterable[tuple[ModelEpisode, int]], n_step: int | None, gamma: float, frame_stack: int = 1
) -> int:
    """Compare a batch of `Transitions` with `transition` of each (episode, step) in `starts`. Return the batch size."""
    rows = [transition(episode, t, n_step, gamma, frame_stack) for episode, t in starts]
    got = {leaf: x for name, value in batch.numpy().items() for leaf, x in flat(value, name).items()}
    for leaf in rows[0]:
        expected = np.stack([row[leaf] for row in rows])
        if leaf not in got:
            raise AssertionError(f"the batch has no {leaf}; it has {', '.join(got)}")
        if leaf in COMPUTED:
            _close(leaf, got[leaf], expected)
        elif leaf in ("n_steps", "terminated", "truncated"):
            _same(leaf, {leaf: got[leaf].astype(np.int64)}, {leaf: expected.astype(np.int64)})
        else:
            _same(leaf, {leaf: got[leaf]}, {leaf: expected})
    return len(rows)


def _follow_length_cuts(real: Mapping[int, Any], model: ModelStore, key: str) -> None:
    """Split the model's episodes where the store's writer cut them to begin a new segment."""
    starts = {int(np.asarray(episode[key])[0]): episode for episode in real.values()}
    for lane in model.lanes():
        followed: list[ModelEpisode] = []
        for episode in lane.episodes:
            followed.append(episode)
            for _ in range(len(episode.steps)):
                current, serials = followed[-1], [int(step.extra[key]) for step in followed[-1].steps]
                pairs = enumerate(pairwise(serials), start=1)
                at = [t for t, (a, b) in pairs if a in real and b in starts and _moved(real[a], starts[b])]
                if not at:
                    break
                followed.append(current.split(at[0], final=_has_final(real[serials[at[0] - 1]])))
        lane.episodes = followed
    _follow_idle_cuts(real, model, key)


def _follow_idle_cuts(real: Mapping[int, Any], model: ModelStore, key: str) -> None:
    """End open episodes of the model that the store's writer cut for a new segment and has not continued."""
    newest: dict[int, int] = {}
    waiting: list[tuple[ModelEpisode, Any]] = []
    for lane in model.lanes():
        for episode in lane.episodes:
            found = real.get(int(episode.steps[-1].extra[key]))
            if found is None:
                continue
            newest[lane.writer] = max(newest.get(lane.writer, 0), _segment(found, -1))
            if episode is lane.open and found.cut:
                waiting.append((episode, found))
    for episode, found in waiting:
        if _segment(found, -1) < newest[episode.writer]:
            episode.derived, episode.left_behind = episode.final is None, True
            episode.end(cut=True)


def _moved(one: Any, other: Any) -> bool:
    return _segment(one, -1) < _segment(other, 0)


def _segment(episode: Any, step: int) -> int:
    return int(episode.ids[step]) >> POSITION_BITS


def _has_final(episode: Any) -> bool:
    return len(next(iter(flat(episode.obs, "obs").values()))) > len(episode)


def _leaf(real: Any, leaf: str) -> np.ndarray:
    name, *below = leaf.split("/")
    value = real[name]
    for key in below:
        value = value[key]
    return np.asarray(value)


def _stacked(rows: list[Flat]) -> Flat:
    return {leaf: np.stack([row[leaf] for row in rows]) for leaf in rows[0]} if rows else {}


def _equal(what: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise AssertionError(f"{what}: the store has {got}, the model {expected}")


def _same(what: str, got: Flat, expected: Flat) -> None:
    """Raise AssertionError unless all leaves have the same bytes; NaN equals a NaN with the same bytes."""
    _equal(f"{what}: leaves", list(got), list(expected))
    for leaf, x in expected.items():
        _equal(f"{leaf}: dtype and shape", (got[leaf].dtype, got[leaf].shape), (x.dtype, x.shape))
        if got[leaf].tobytes() != x.tobytes():
            differ = [i for i in range(len(x)) if got[leaf][i].tobytes() != x[i].tobytes()] if x.ndim else []
            raise AssertionError(f"{leaf} differs at {differ[:10]} of {len(x) if x.ndim else 1}")


def _close(leaf: str, got: np.ndarray, expected: np.ndarray) -> None:
    _equal(f"{leaf}: dtype and shape", (got.dtype, got.shape), (np.dtype(np.float32), expected.shape))
    # If float64 terms are added in another order, the float32 result may be a neighbouring float32, or a tiny number
    # instead of 0.
    wrong = ~np.isclose(got, expected, rtol=1.3e-7, atol=1e-11)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise AssertionError(f"{leaf} differs at {i}: the store has {got[i]!r}, the reference {expected[i]!r}")
