"""Observations and actions of Tuple spaces are tuples in batches and episodes, wherever these come from."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import diskreplay as dr

SPACES = gym.spaces.Tuple(
    [
        gym.spaces.Box(-9, 9, (2,), np.float32),
        gym.spaces.Dict({"0": gym.spaces.Discrete(9), "1": gym.spaces.Tuple([gym.spaces.Discrete(3)])}),
    ]
)
ACTION = gym.spaces.Tuple([gym.spaces.Discrete(7), gym.spaces.Box(-1, 1, (2,), np.float32)])
EXTRA = {"state": (dr.Field(3, "float32"), dr.Field((), "int64")), "value": dr.Field((), "float32")}
STEPS = 60


def steps() -> list[tuple[Any, Any, Any]]:
    SPACES.seed(1)
    ACTION.seed(2)
    states = np.random.default_rng(3).standard_normal((STEPS, 3), np.float32)
    return [(SPACES.sample(), ACTION.sample(), (states[t], t)) for t in range(STEPS)]


@pytest.fixture
def store(tmp_store: Path) -> Iterator[dr.Store]:
    schema = dr.Schema.from_spaces(SPACES, ACTION, extra=EXTRA)
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        for t, (obs, action, state) in enumerate(steps()):
            writer.append(obs, action, float(t), t % 20 == 19, state=state, value=0.0)
        writer.flush()
        store.refresh()
        yield store


def is_record(node: Any) -> bool:
    """Tell whether a node is a tuple that has its items by their numbers as names, too."""
    return isinstance(node, tuple) and all(node[str(number)] is item for number, item in enumerate(node))


def numbered(batch: Any, field: str = "reward") -> np.ndarray:
    return batch[field].numpy().astype(np.int64)


def check(obs: Any, action: Any, state: Any, at: np.ndarray) -> int:
    """Compare the leaves at these steps, with any leading axes, and their form; return how many values there were."""
    expected, compared = steps(), 0
    for node, size in ((obs, 2), (action, 2), (state, 2), (obs[1]["1"], 1)):
        assert is_record(node)
        assert len(node) == size
    assert type(obs[1]) is dict
    a, b = action
    assert a is action[0] is action["0"]
    assert b is action[1] is action["1"]
    for index in np.ndindex(at.shape):
        was_seen, was_done, was = expected[at[index]]
        pairs = [
            (obs[0], was_seen[0]),
            (obs["1"]["0"], was_seen[1]["0"]),
            (obs[1]["1"]["0"], was_seen[1]["1"][0]),
            (a, was_done[0]),
            (b, was_done[1]),
            (state[0], was[0]),
            (state["1"], was[1]),
        ]
        for found, value in pairs:
            np.testing.assert_array_equal(np.asarray(found[index]), value)
            compared += 1
    return compared


def test_transitions(store: dr.Store) -> None:
    view = dr.Transitions(next_fields=("action", "state"), gamma=1.0)
    with dr.Sampler(store, view, batch_size=100, seed=0) as sampler:
        batch = sampler.sample()
        at = numbered(batch)
        assert check(batch.obs, batch.action, batch.state, at) == 700
        inside = np.flatnonzero(at % 20 < 19)
        select = {name: pytree.tree_map(lambda x: x[inside], batch[name]) for name in batch}
        assert check(select["next_obs"], select["next_action"], select["next_state"], at[inside] + 1) > 600
        assert repr(batch).startswith("Batch(obs=(float32[100, 2], {0: int64[100], 1: (int64[100])}), action=(int64")


@pytest.mark.usefixtures("threads_make_all")
@pytest.mark.parametrize("ahead", [0, 2])
def test_sequences_and_rollouts(store: dr.Store, ahead: int) -> None:
    seen = []

    def value_fn(obs: Any) -> torch.Tensor:
        seen.append(obs)
        first, _ = obs
        return first[:, 0]

    with dr.Sampler(store, dr.Sequences(length=5, overlap=0), batch_size=6, prefetch=ahead, seed=0) as sampler:
        for _ in range(3):
            batch = sampler.sample()
            assert check(batch.obs, batch.action, batch.state, numbered(batch)) == 6 * 5 * 7
            assert is_record(batch.next_obs)
        sampler.view = dr.Rollouts(15, value_fn=value_fn)
        batch = sampler.sample()
        assert check(batch.obs, batch.action, batch.state, numbered(batch)) == 15 * 7
        assert [is_record(obs) for obs in seen] == [True]
        small = next(batch.minibatches(8, seed=0))
        assert check(small.obs, small.action, small.state, numbered(small)) == 8 * 7


def test_what_is_made_of_a_batch_has_tuples_too(store: dr.Store) -> None:
    with dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0) as sampler:
        batch = sampler.sample()
        at = numbered(batch)
        arrays = batch.numpy()
        doubled = pytree.tree_map(lambda tensor: tensor * 1, batch)
        assert type(doubled) is dr.Batch
        assert doubled.kind == batch.kind == ("transitions",)
        for other in (batch.to("cpu"), doubled, copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
            assert check(other.obs, other.action, other.state, at) == 56
        assert check(arrays["obs"], arrays["action"], arrays["state"], at) == 56
        assert type(arrays["obs"][0]) is np.ndarray
        with dr.Sampler(store, dr.Transitions(), seed=1) as second:
            mixed = dr.MixedSampler([(sampler, 0.5), (second, 0.5)], batch_size=16, seed=0)
            for drawn in (found := mixed.sample(), mixed.gather(found.index)):
                assert check(drawn.obs, drawn.action, drawn.state, numbered(drawn)) == 112


def test_episodes_and_experiences(store: dr.Store) -> None:
    for number, episode in enumerate(store.episodes):
        at = np.arange(20) + 20 * number
        assert check(episode.obs, episode.action, episode["state"], at) == 140
        found = list(dr.nstep_experiences(episode, 1, 0.9))
        assert len(found) == 20
        for t, experience in zip(at, found, strict=True):
            expected = steps()[t]
            np.testing.assert_array_equal(experience.obs[0], expected[0][0])
            discrete, _ = experience.action
            assert discrete == expected[1][0]


def test_some_items_of_a_tuple_are_a_dict_of_these(store: dr.Store) -> None:
    with dr.Sampler(store, dr.Transitions(), batch_size=8, fields=("obs/1/1", "action/1"), seed=0) as sampler:
        batch = sampler.sample()
        assert type(batch.action) is type(batch.obs) is dict
        assert list(batch.action) == list(batch.obs) == ["1"]
        assert is_record(batch.obs["1"]["1"])


def test_a_record_of_a_batch_or_episode_can_be_appended(store: dr.Store, tmp_path: Path) -> None:
    with dr.create(tmp_path / "other", store.schema) as other, other.writer() as writer:
        for episode in store.episodes:
            writer.append_episode(
                episode.obs,
                episode.action,
                episode.reward,
                terminated=True,
                state=episode["state"],
                value=episode["value"],
            )
        writer.flush()
        other.refresh()
        assert other.num_episodes == 3
        for number, episode in enumerate(other.episodes):
            assert check(episode.obs, episode.action, episode["state"], np.arange(20) + 20 * number) == 140


def test_a_store_remembers_which_nodes_are_tuples(store: dr.Store) -> None:
    with dr.open(store.path) as again:
        assert is_record(again.episodes[0].action)
        assert type(again.episodes[0].obs[1]) is dict
