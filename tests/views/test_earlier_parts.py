"""Stacks of frames read behind a cut for an episode's length while the segment before is there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

LANES = 3
VIEWS: dict[str, Callable[[], Any]] = {
    "steps": lambda: dr.Transitions(frame_stack=4),
    "five steps": lambda: dr.Transitions(n_step=5, frame_stack=4),
    "one to three steps": lambda: dr.Transitions(n_step=(1, 3), frame_stack=4),
    "next fields": lambda: dr.Transitions(n_step=2, frame_stack=4, next_fields=("action",)),
    "windows": lambda: dr.Sequences(3, stride=1, frame_stack=4),
    "windows across episodes": lambda: dr.Sequences(3, stride=1, frame_stack=4, cross_episodes=True),
}


def schema() -> dr.Schema:
    return dr.Schema(obs=dr.Field((2,), "float32"), action=dr.Field((), "int64"))


def frame(step: int, lane: int) -> np.ndarray:
    return np.array([step, lane], np.float32)


def append(store: Any, lanes: int, steps: int, ends: Callable[[int, int], bool]) -> None:
    """Append steps; an observation holds its step and lane."""
    with store.writer(num_envs=lanes) as writer:
        for t in range(steps):
            end = np.array([ends(t, lane) for lane in range(lanes)])
            now, then = (np.stack([frame(step, lane) for lane in range(lanes)]) for step in (t, t + 1))
            writer.append(now, np.full(lanes, t), np.zeros(lanes), end, end & False, next_obs=then)


def expected(step: int, lane: int, ends: Callable[[int, int], bool]) -> np.ndarray:
    """Return the stack of an observation: frames of its episode; before its start the first frame repeats."""
    first = step
    while first > 0 and not ends(first - 1, lane) and first > step - 3:
        first -= 1
    return np.stack([frame(max(step - back, first), lane) for back in (3, 2, 1, 0)])


def check(sampler: dr.Sampler, ends: Callable[[int, int], bool]) -> set[tuple[int, int]]:
    """Compare every stack of a sampler with the definition; return the steps and lanes of them."""
    batch, seen = sampler.gather(sampler.ids()).numpy(), set()
    if "mask" in batch:
        count = batch["mask"].sum(axis=1)
        stacks = [
            obs[number] for obs, many in zip(batch["obs"], count, strict=True) for number in range(min(many, len(obs)))
        ]
    else:
        stacks = list(batch["obs"])
        after = batch["action"] + batch["n_steps"]
        lanes = batch["obs"][:, -1, 1]
        for stack, t, lane in zip(batch["next_obs"], after.tolist(), lanes.tolist(), strict=True):
            if stack.any():
                assert stack.tolist() == expected_next(t, int(lane), ends).tolist()
    for stack in stacks:
        step, lane = map(int, stack[-1])
        assert stack.tolist() == expected(step, lane, ends).tolist()
        seen.add((step, lane))
    return seen


def expected_next(step: int, lane: int, ends: Callable[[int, int], bool]) -> np.ndarray:
    """As `expected`, of an observation behind the last step of an episode, too."""
    return expected(step, lane, lambda t, lane: t < step - 1 and ends(t, lane))


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_stacks_reach_behind_cuts_for_the_length(tmp_store: Path, view: str) -> None:
    def ends(t: int, lane: int) -> bool:
        return lane == 1 and t in (2, 30, 77)

    with dr.create(tmp_store, schema(), segment_steps=24, chunk_bytes=64) as store:
        append(store, LANES, 100, ends)
        store._sealer.drain()
        for compacted in (False, True):
            if compacted:
                assert store.compact()["segments"]
            store.refresh()
            assert sum(e.continues for e in store.episodes) > 3
            with dr.Sampler(store, VIEWS[view](), seed=0) as sampler:
                assert len(check(sampler, ends)) > 250


def test_stacks_reach_behind_several_cuts(tmp_store: Path) -> None:
    def ends(t: int, lane: int) -> bool:
        return False

    with dr.create(tmp_store, schema(), segment_steps=1, chunk_bytes=64) as store:
        append(store, 1, 40, ends)
        store.refresh()
        assert max(len(e) for e in store.episodes) <= 3
        with dr.Sampler(store, dr.Transitions(frame_stack=4)) as sampler:
            assert len(check(sampler, ends)) == 40


def test_the_first_frame_of_a_part_repeats_when_the_part_before_is_gone(tmp_store: Path) -> None:
    def ends(t: int, lane: int) -> bool:
        return False

    with dr.create(tmp_store, schema(), segment_steps=24, chunk_bytes=64) as store:
        append(store, 1, 100, ends)
        store._sealer.drain()
        store.refresh()
        first, second, *_ = (int(e.ids[0]) for e in store.episodes)
        assert store.episodes[1].continues
        with dr.Sampler(store, dr.Transitions(frame_stack=4)) as sampler:
            begin = int(sampler.gather(np.array([second])).action[0])
            frames = [[begin - 3.0, begin - 2.0, begin - 1.0, begin]]
            assert sampler.gather(np.array([second])).obs[..., 0].tolist() == frames
            store.evict(lambda episode: int(episode.ids[0]) == first)
            store.refresh()
            assert sampler.gather(np.array([second])).obs[0, :, 0].tolist() == [begin] * 4


def test_a_capacity_cuts_an_episode_and_its_stacks_are_whole(tmp_store: Path) -> None:
    def ends(t: int, lane: int) -> bool:
        return t == 2999

    with dr.create(tmp_store, schema(), capacity=4000) as store:
        append(store, 1, 3000, ends)
        store.refresh()
        assert [(e.length, e.continued, e.continues) for e in store.episodes] == [
            (2048, True, False),
            (952, False, True),
        ]
        with dr.Sampler(store, dr.Transitions(frame_stack=4)) as sampler:
            ids = store.episodes[1].ids[:4]
            stacks = sampler.gather(ids).obs[..., 0].tolist()
            assert stacks == [[t - 3.0, t - 2.0, t - 1.0, t] for t in range(2048, 2052)]
            assert check(sampler, ends)


def test_stacks_reach_over_the_numbers_of_packs(tmp_store: Path) -> None:
    steps, short = 80, 7

    def ends(t: int, lane: int) -> bool:
        return lane == short and t % 5 == 4

    def write(writer: dr.Writer, t: int, lane: int) -> None:
        writer.append(frame(t, lane), t, 0.0, ends(t, lane), False, next_obs=frame(t + 1, lane))

    with dr.create(tmp_store, schema(), segment_steps=10, compaction="manual") as store, store.writer() as writer:
        for t in range(steps):
            write(writer, t, 0)
            if t == 4:
                with store.writer() as other:
                    for step in range(5 * t, 5 * t + 30):
                        write(other, step, short)
                assert store.compact()["segments"] > 1
        store.refresh()
        assert sum(episode.continues for episode in store.episodes) > 1
        with dr.Sampler(store, dr.Transitions(frame_stack=4)) as sampler:
            check(sampler, ends)
