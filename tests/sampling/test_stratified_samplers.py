"""Stratified samplers of real stores: values of episodes, several writers, and fields that there are not."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr

SCHEMA = dr.Schema(
    obs=dr.Field((), "float32"),
    action=dr.Field((), "int64"),
    episode={"task": dr.Field((), "int64"), "goal": {"name": dr.Field((2,), "float32")}},
)


class Collector:
    """Two writers of episodes with values, longer ones for higher tasks, and one of three lanes without values."""

    def __init__(self, store: Any) -> None:
        self.rng = np.random.default_rng(0)
        self.writers, self.several = [store.writer() for _ in range(2)], store.writer(num_envs=3)
        self.tasks = [0, 1]

    def grow(self, calls: int) -> None:
        for _ in range(calls):
            for i, writer in enumerate(self.writers):
                task, ends = self.tasks[i], bool(self.rng.random() < 0.5 / (1 + 3 * self.tasks[i]))
                values = {"task": task, "goal": {"name": [task / 2, 1.0]}} if ends and self.rng.random() < 0.9 else None
                writer.append(0, task, 0.0, ends, next_obs=0, episode=values)
                if ends:
                    self.tasks[i] = int(self.rng.integers(0, 3))
            zeros = np.zeros(3)
            self.several.append(zeros, np.full(3, 7), zeros, self.rng.random(3) < 0.2, zeros > 0, next_obs=zeros)

    def close(self) -> None:
        for writer in (*self.writers, self.several):
            writer.close()


def expected(store: Any, view: Any, by: str) -> dict[int, float]:
    """The closed form, from the episodes as a user sees them."""
    with dr.Sampler(store, view) as sampler:
        ids = set(sampler.ids().tolist())
    groups: dict[int, Any] = {}
    for number, episode in enumerate(store.episodes):
        ended = episode.terminated or episode.truncated
        value = number if by == "episode" else episode["task"] if ended else None
        groups |= {int(i): int(value) for i in episode.ids if int(i) in ids and value is not None}
    sizes = Counter(groups.values())
    return {i: 1 / (len(sizes) * sizes[group]) for i, group in groups.items()}


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize("view", [dr.Transitions(2), dr.Sequences(4, 2, pad=False)], ids=str)
@pytest.mark.parametrize("by", ["episode", "episode/task", "episode/goal/name"])
@pytest.mark.parametrize("capacity", [None, 400])
def test_groups_are_drawn_equally_often_while_the_store_grows(
    tmp_store: Path, capacity: int | None, by: str, view: Any
) -> None:
    limits = {} if capacity is None else {"capacity": capacity, "segment_steps": 60}
    with dr.create(tmp_store, SCHEMA, **limits) as store:
        collector = Collector(store)
        sampler = dr.Sampler(store, view, dr.Stratified(by), batch_size=5_000, seed=0)
        for _ in range(12):
            collector.grow(40)
            batch = sampler.sample()
            want = expected(store, view, by)
            assert set(batch.index.tolist()) <= set(want)
            ids, chances = np.array(list(want)), np.array(list(want.values()))
            counts = (batch.index.numpy()[:, None] == ids).sum(axis=0)
            assert stats.chisquare(counts, 5_000 * chances).pvalue > 1e-5
            assert sampler.sampleable == len(want)
        assert (7 in batch.action) == (by == "episode")
        collector.close()
        sampler.close()


def test_a_field_that_the_store_has_not_is_refused_by_name(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store:
        mixture = dr.Mixture([(dr.Uniform(), 1), (dr.Stratified("episode/seed"), 1)])
        for distribution in (dr.Stratified("episode/seed"), mixture):
            message = f"{distribution} reads 'episode/seed', and the store's episode fields are: "
            with pytest.raises(ValueError, match=f"^{re.escape(message)}episode/task, episode/goal/name$"):
                dr.Sampler(store, dr.Transitions(), distribution)
        sampler = dr.Sampler(store, dr.Transitions())
        with pytest.raises(ValueError, match="reads 'episode/goal'"):
            sampler.distribution = dr.Stratified("episode/goal")
        assert isinstance(sampler.distribution, dr.Uniform)


@pytest.mark.parametrize("by", ["episode", "episode/task"])
def test_windows_across_episodes_are_of_the_episode_that_they_start_in(tmp_store: Path, by: str) -> None:
    view = dr.Sequences(6, stride=1, cross_episodes=True)
    with dr.create(tmp_store, SCHEMA) as store:
        collector = Collector(store)
        collector.grow(150)
        collector.close()
        with dr.Sampler(store, view, dr.Stratified(by), batch_size=20_000, seed=0) as sampler:
            batch, want = sampler.sample(), expected(store, view, by)
            assert sampler.sampleable == len(want)
        ids, chances = np.array(list(want)), np.array(list(want.values()))
        counts = (batch.index.numpy()[:, None] == ids).sum(axis=0)
        assert counts.sum() == 20_000
        assert stats.chisquare(counts, 20_000 * chances).pvalue > 1e-5
