from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.cli.report import sample
from diskreplay.cli.report.sample import newest_episode, places, read_episodes, sample_steps


def nothing(done: int, total: int) -> None:
    """Show no progress."""


@pytest.fixture
def store(vectors: Path) -> Iterator[dr.Store]:
    with dr.open(vectors) as store:
        yield store


def test_all_of_a_small_store_is_read(store: dr.Store) -> None:
    episodes = read_episodes(store, None, nothing)
    assert (episodes.matching, episodes.asked, episodes.total) == (20, 20, 20)
    assert episodes.at.tolist() == [*range(20)]
    assert episodes.total_reward.tolist() == [30.0 * e for e in range(20)]
    assert episodes.length.tolist() == [30] * 20
    assert episodes.ended.tolist() == ["terminated", "truncated"] * 10
    assert episodes.began.tolist() == [episode.times[0] for episode in store.episodes]
    steps = sample_steps(store, None)
    assert (len(steps.ids), steps.total) == (600, 600)
    for path, name in (("obs", "obs"), ("action", "action"), ("reward", "reward")):
        ids, values = steps.read(path)
        np.testing.assert_array_equal(values, np.concatenate([episode[name][:30] for episode in store.episodes]))
        np.testing.assert_array_equal(ids, np.concatenate([episode.ids for episode in store.episodes]))
    np.testing.assert_array_equal(steps.times()[1], np.concatenate([episode.times for episode in store.episodes]))


def test_a_sample_is_always_the_same_and_has_the_newest_episode(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "EPISODES", 6)
    first, second = (read_episodes(store, None, nothing) for _ in range(2))
    assert first.at.tolist() == second.at.tolist()
    assert (len(first), first.matching) == (6, 20)
    assert first.at[-1] == 19
    monkeypatch.setattr(sample, "ASKED", 8)
    asked = read_episodes(store, lambda episode: True, nothing)
    assert (asked.asked, asked.matching, asked.total, len(asked)) == (8, 8, 20, 6)


def test_the_newest_episode_is_that_of_any_writer(tmp_store: Path) -> None:
    schema = dr.Schema(dr.Field((), "int64"), dr.Field((), "int64"))
    with dr.create(tmp_store, schema) as store, store.writer() as first, store.writer() as second:
        for writer in (first, second, first):
            writer.append_episode([0], [0], [0.0], terminated=True)
        store.refresh()
        assert [episode.segment for episode in store.episodes] == [0, 0, 1]
        assert newest_episode(store) == 1


def test_rewards_of_long_episodes_and_of_too_many_are_not_summed(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "REWARDS", 100)
    assert np.count_nonzero(np.isfinite(read_episodes(store, None, nothing).total_reward)) == 3
    monkeypatch.setattr(sample, "LONGEST", 29)
    assert np.isnan(read_episodes(store, None, nothing).total_reward).all()


def test_steps_are_drawn_in_pieces_with_equal_chances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "STEPS", 40)
    monkeypatch.setattr(sample, "PIECES", 4)
    np.testing.assert_array_equal(places(40), np.arange(40))
    found = places(1_003)
    assert len(found) == 40
    assert (np.diff(found.reshape(4, 10)) == 1).all()
    assert [at // 251 for at in found[::10]] == [0, 1, 2, 3]
    assert (np.diff(found) > 0).all()
    assert found[-1] < 1_003
    np.testing.assert_array_equal(found, places(1_003))


def test_a_sample_of_steps_is_read_across_episodes_and_writers(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "STEPS", 80)
    monkeypatch.setattr(sample, "PIECES", 2)
    steps = sample_steps(store, None)
    assert (len(steps.ids), steps.total) == (80, 600)
    np.testing.assert_array_equal(steps.read("reward")[1], places(600) // 30)
    assert steps.read("obs", 7)[1].shape == (7, 3)


def test_steps_that_have_left_are_not_read(tmp_store: Path) -> None:
    schema = dr.Schema(dr.Field((), "int64"), dr.Field((), "int64"))

    def fill(episodes: int) -> None:
        with writer_of.writer() as writer:
            for _ in range(episodes):
                writer.append_episode(np.arange(5), np.zeros(4, int), np.zeros(4), terminated=True)

    with dr.create(tmp_store, schema, capacity=40, segment_steps=8) as writer_of:
        fill(10)
        with dr.open(tmp_store) as store:
            steps = sample_steps(store, None)
            fill(8)
            writer_of.refresh()
            ids, values = steps.read("obs")
            assert 0 < len(ids) == len(values) < steps.total == 40
            episodes = read_episodes(store, None, nothing)
            assert 0 < len(episodes) < 10
