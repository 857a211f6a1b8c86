"""Episodes stay whole where a capacity or an age hides their first steps: it decides what is drawn, and no verdict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.testing.nested import flat
from tests.sampling.test_sampler_states import DISTRIBUTIONS, VIEWS, bits, collected, learn
from tests.testing.support import append_numbered, serial_schema
from tests.tiers import whole_or_part

STEPS = 300


def returned_all(episode: dr.Episode) -> bool:
    return episode.ended != "open" and episode.total_reward >= STEPS


def append(writer: Any, episodes: int = 1, steps: int = STEPS) -> None:
    """Append episodes whose step t observes t and has the reward 1."""
    t = np.arange(steps + 1, dtype=np.float32)[:, None]
    for _ in range(episodes):
        writer.append_episode(t, np.arange(steps), np.ones(steps, np.float32), terminated=True)


@pytest.fixture
def store(tmp_store: Path) -> Any:
    schema = dr.Schema.from_example(obs=np.zeros(1, np.float32), action=0)
    with dr.create(tmp_store, schema, capacity=1000) as store:
        yield store


def test_an_episode_with_hidden_steps_is_listed_whole(store: Any) -> None:
    with store.writer() as writer:
        append(writer, 6)
        store.refresh()
        assert (len(store), store.num_episodes) == (1000, 4)
        assert [(len(e), e.length, e.hidden_steps) for e in store.episodes] == [(300, 300, 200), *[(300, 300, 0)] * 3]
        assert [(e.total_reward, e.ended) for e in store.episodes] == [(300.0, "terminated")] * 4
        first = store.episodes[0]
        assert first.obs[:, 0].tolist() == [*range(301)]
        assert (len(first.ids), len(first.times), len(first.action)) == (300, 300, 300)
        assert (np.diff(first.times) >= 0).all()
        with dr.open(store.path) as late:
            assert late.episodes[0].ids.tolist() == first.ids.tolist()
            assert late.snapshot.find(int(first.ids[0])) == 0
            with pytest.raises(dr.InvalidIndex, match=r"^no visible episode begins at id "):
                late.snapshot.find(int(first.ids[first.hidden_steps]))


def test_every_ended_episode_of_many_lanes_has_its_whole_return(tmp_store: Path) -> None:
    lanes, rng = 64, np.random.default_rng(0)
    schema = dr.Schema.from_example(obs=np.zeros(1, np.float32), action=0)
    with dr.create(tmp_store, schema, capacity=lanes * 45) as store, store.writer(num_envs=lanes) as writer:
        t, x = rng.integers(0, 30, lanes), np.zeros((lanes, 1), np.float32)
        began = np.zeros(lanes, bool)
        for _ in range(150):
            t += 1
            end = t >= 30
            writer.append(x, np.zeros(lanes, int), np.ones(lanes), end, end & False, next_obs=x + 1)
            x, t, began = np.where(end[:, None], 0, x + 1).astype(np.float32), np.where(end, 0, t), began | end
        store.refresh()
        ended = [e for e in store.episodes if e.ended == "terminated"]
        assert any(e.hidden_steps for e in ended)
        assert {(e.total_reward, float(e.obs[0, 0]), len(e)) for e in ended} == {(30.0, 0.0, 30)}
        whole = sum(len(e) - e.hidden_steps for e in ended)
        with dr.Sampler(store, dr.Transitions(), where=lambda e: e.total_reward >= 30 and e.ended != "open") as sampler:
            assert sampler.sampleable == whole


def test_an_eviction_asks_about_whole_episodes_and_takes_them_whole(store: Any) -> None:
    with store.writer() as writer:
        append(writer, 4)
    store.refresh()
    assert store.episodes[0].hidden_steps == 200
    assert store.evict(lambda episode: episode.total_reward < STEPS) == 0
    assert len(store) == 1000
    first = int(store.episodes[0].ids[0])
    assert store.evict(lambda episode: int(episode.ids[0]) == first) == STEPS
    assert (len(store), store.num_episodes) == (900, 3)
    assert store.verify(deep=True) == []


def test_samplers_that_start_at_different_times_agree_on_a_predicate(store: Any) -> None:
    def sampler() -> dr.Sampler:
        return dr.Sampler(dr.open(store.path), dr.Transitions(), batch_size=64, seed=0, where=returned_all)

    with store.writer() as writer:
        append(writer, 3)
        running = sampler()
        running.sample()
        append(writer)
        running.sample()
        resumed, late = sampler(), sampler()
        resumed.load_state_dict(running.state_dict())
        late.sample()
        assert running.sampleable == resumed.sampleable == late.sampleable == 1000
        assert bits(running.sample()) == bits(resumed.sample())


def test_a_hidden_id_is_refused_as_hidden_and_its_priority_is_skipped(store: Any) -> None:
    with store.writer() as writer:
        append(writer, 4)
        store.refresh()
        first = store.episodes[0]
        with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=8, seed=0) as sampler:
            sampler.sample()
            assert sampler.update_priorities(first.ids[199:202], np.ones(3)) == 1
            for view in (
                dr.Transitions(),
                dr.Sequences(4, 0),
                dr.Episodes(),
                dr.Sequences(4, stride=1, cross_episodes=True),
            ):
                sampler.view = view
                with pytest.raises(dr.InvalidIndex, match=f"^id {first.ids[0]} is hidden by the capacity or "):
                    sampler.gather(first.ids[:1])


def test_fields_of_the_episode_count_hidden_steps(store: Any) -> None:
    with store.writer() as writer:
        append(writer, 4)
        with dr.Sampler(store, dr.Transitions(), fields=("...", "step", "return_to_go")) as sampler:
            batch = sampler.gather(sampler.ids()[:3])
            assert batch.step.tolist() == [200, 201, 202]
            assert batch.return_to_go.tolist() == [100.0, 99.0, 98.0]
        with dr.Sampler(store, dr.Transitions(n_step=None, gamma=1.0)) as sampler:
            assert sampler.gather(sampler.ids()[:1]).reward.tolist() == [100.0]
        with dr.Sampler(store, dr.Sequences(40, overlap=0)) as sampler:
            batch = sampler.gather(sampler.ids()[:2])
            assert batch.obs[:, 0, 0].tolist() == [200.0, 240.0]
            assert not batch.is_first.any()
        with dr.Sampler(store, dr.Episodes()) as sampler:
            assert sampler.sampleable == 3


STACKED: list[Callable[[], Any]] = [
    lambda: dr.Transitions(frame_stack=4),
    lambda: dr.Transitions(n_step=3, frame_stack=4),
    lambda: dr.Sequences(4, stride=1, frame_stack=4),
    lambda: dr.Sequences(4, stride=1, frame_stack=4, cross_episodes=True),
]


@pytest.mark.parametrize("view", STACKED)
def test_stacks_show_hidden_frames_of_their_episode(tmp_store: Path, view: Any) -> None:
    schema = dr.Schema.from_example(obs=np.float32(0), action=0)
    with dr.create(tmp_store, schema, capacity=10) as store, store.writer() as writer:
        for t in range(30):
            writer.append(np.float32(t), 0, 0.0, False, next_obs=np.float32(t + 1))
        with dr.Sampler(store, view()) as sampler:
            ids = sampler.ids()[:4]
            stacks = sampler.gather(ids).obs.reshape(len(ids), -1, 4)[:, 0].tolist()
            assert stacks == [[t - 3.0, t - 2.0, t - 1.0, t] for t in (20.0, 21.0, 22.0, 23.0)]


def test_goals_of_hindsight_are_of_the_whole_episode(tmp_store: Path) -> None:
    goal = dr.Field((1,), "float32")
    schema = dr.Schema(
        obs={"observation": goal, "achieved_goal": goal, "desired_goal": goal}, action=dr.Field((), "int64")
    )
    with dr.create(tmp_store, schema, capacity=4) as store, store.writer() as writer:
        t = np.arange(21, dtype=np.float32)[:, None]
        obs = {"observation": t, "achieved_goal": t, "desired_goal": t - 100}
        writer.append_episode(obs, np.zeros(20, int), np.zeros(20), terminated=True)
        view = dr.Transitions(relabel=dr.Hindsight("episode", 1.0, lambda achieved, desired: achieved[:, 0]))
        with dr.Sampler(store, view, batch_size=2000, seed=0) as sampler:
            assert set(sampler.sample().obs["desired_goal"][:, 0].tolist()) == set(range(1, 21))


def test_parts_of_an_episode_that_was_cut_for_its_length_say_so(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps=10, chunk_bytes=64) as store, store.writer() as writer:
        append_numbered(writer, range(45))
        append_numbered(writer, range(100, 103))
        writer.append(np.zeros(3), 0, 0.0, False, next_obs=np.ones(3), serial=200)
        writer.end_episode()
        for steps in (range(300, 350), range(400, 402)):
            append_numbered(writer, steps, end="open" if steps[0] == 400 else "terminated")
        for compacted in (False, True):
            if compacted:
                store._sealer.drain()
                store.compact()
            with dr.open(tmp_store) as reader:
                parts = [(int(e["serial"][0]), int(e["serial"][-1]), e.continues, e.continued) for e in reader.episodes]
            parts.sort()
            starts = {0, 100, 200, 300, 400}
            assert [first for first, _, continues, _ in parts if not continues] == sorted(starts)
            ends = {last + 1 for _, last, _, continued in parts if continued}
            assert ends == {first for first, *_ in parts} - starts
            assert len(parts) > 6


def facts(episode: dr.Episode) -> Any:
    """All that an episode says of itself, but for what is hidden of it; arrays to the bit."""
    names = ("obs", "action", "reward", "value", "task", "priority")
    arrays = {
        path: x.tobytes()
        for name in names
        for path, x in flat(np.zeros(0) if episode[name] is None else episode[name], name).items()
    }
    said = len(episode), episode.length, episode.ended, episode.continues, episode.total_reward
    return said, episode.ids.tolist(), episode.has_final_obs, arrays


@pytest.mark.slow(turns=2)
def test_a_store_with_a_capacity_lists_the_episodes_of_one_without(tmp_path: Path) -> None:
    settings = {"segment_steps": 40, "compaction": "manual"}
    with (
        collected(tmp_path / "all", 60, **settings) as (every, ones),
        collected(tmp_path / "some", 60, capacity=150, **settings) as (some, others),
    ):
        hidden = evicted = 0
        for number in range(12):
            for collector in (ones, others):
                collector.grow(15)
            if number % 4 == 3:
                for store in (every, some):
                    store._sealer.drain()
                    evicted += store.evict(lambda e: len(e) > 2 and e.total_reward < -4)
            every.refresh()
            some.refresh()
            known = {int(e.ids[0]): e for e in every.episodes}
            assert len(some) == sum(len(e) - e.hidden_steps for e in some.episodes) <= 150
            for found in some.episodes:
                assert facts(found) == facts(known[int(found.ids[0])])
                hidden += found.hidden_steps > 0
        assert hidden > 10
        assert evicted > 0
        for collector in (ones, others):
            collector.close()


def map_all(store: Any) -> None:
    """Read every visible step: a sampler draws again where a segment leaves before it is first read."""
    store.refresh()
    with dr.Sampler(store, dr.Transitions(), refresh=False) as sampler:
        sampler.gather(sampler.ids())


PAIRS = [
    ("transitions", "uniform"),
    ("transitions", "prioritized"),
    ("across episodes", "uniform"),
    ("sequences", "recency"),
    ("episodes", "by the store"),
    ("hindsight", "by task"),
]


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize(("view", "distribution"), PAIRS)
def test_samplers_that_are_resumed_decide_as_the_one_that_runs(tmp_path: Path, view: str, distribution: str) -> None:
    rng = np.random.default_rng([len(view), len(distribution)])
    settings = {"segment_steps": 10, "capacity": 450, "compaction": "manual"}

    def where(episode: dr.Episode) -> bool:
        return len(episode) > 3 and episode.total_reward > -2

    def sampler(store: Any) -> dr.Sampler:
        return dr.Sampler(store, VIEWS[view](), DISTRIBUTIONS[distribution](), batch_size=16, seed=3, where=where)

    with collected(tmp_path / "store", 110, **settings) as (store, collector):
        running, evicted, merged = sampler(store), 0, 0
        points = whole_or_part(100, 30)
        for number in range(points):
            collector.grow(int(rng.integers(1, 12)))
            map_all(store)
            learn(running, running.sample(), number)
            if rng.random() < 10 / points:
                store._sealer.drain()
                evicted += store.evict(lambda e, which=number % 5: int(e.ids[0]) % 5 == which and len(e) < 12)
            if rng.random() < 10 / points:
                store._sealer.drain()
                merged += store.compact()["segments"] > 0
            state = running.state_dict()
            with dr.open(store.path) as late, sampler(late) as resumed:
                resumed.load_state_dict(state)
                for _ in range(2):
                    one, other = running.sample(), resumed.sample()
                    assert bits(one) == bits(other), f"at point {number}"
                assert running.sampleable == resumed.sampleable
            learn(running, one, number + 1000)
        assert evicted > 0
        assert merged > 1
        running.close()
        collector.close()
