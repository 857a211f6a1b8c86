"""Fields on request: each is what a plain loop over the episodes of a model says, while the store changes."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.testing.reference import window
from tests.testing.collected import SCHEMA, Collected
from tests.testing.on_disk import POSITION_BITS
from tests.views.fakes import fields_of
from tests.views.inner import few_at_once, times_read

GAMMA = 0.9
STEP_FIELDS = ("step", "return_to_go", "discounted_return_to_go", "priority")
FIELDS = (*STEP_FIELDS, "age", "episode")
VIEWS = (
    dr.Transitions(gamma=GAMMA),
    dr.Transitions(n_step=3, gamma=GAMMA, frame_stack=2, reward={"reward": 0.5, "bonus": -2.0}, discount="bonus"),
    dr.Transitions(n_step=None, gamma=GAMMA),
    dr.Sequences(8, 4, gamma=GAMMA, frame_stack=2),
    dr.Sequences(5, 2, pad=False, gamma=GAMMA, align="end"),
    dr.Episodes(gamma=GAMMA),
    dr.Episodes(max_length=6, gamma=GAMMA),
    dr.Transitions(n_step=(1, 4), gamma=GAMMA),
)


@pytest.fixture(autouse=True)
def _few_at_once() -> Iterator[None]:
    with few_at_once():
        yield


@pytest.fixture(params=[None, 250], ids=["unbounded", "capacity 250"])
def collected(tmp_store: Path, request: Any) -> Iterator[Collected]:
    with dr.create(tmp_store, SCHEMA, capacity=request.param, segment_steps=60) as store:
        yield Collected(store, np.random.default_rng(1))


def sampler_of(store: dr.Store, view: Any, **kwargs: Any) -> dr.Sampler:
    return dr.Sampler(store, view, **{"batch_size": 40, "seed": 0, "fields": ("...", *FIELDS), **kwargs})


def facts_for(collected: Collected, view: Any) -> Any:
    weights, discount = getattr(view, "reward", None), getattr(view, "discount", None)
    return collected.facts(GAMMA, weights, discount)


def flat(batch: dr.Batch) -> dict[str, np.ndarray]:
    """Return the fields on request by path."""
    arrays, episode = batch.numpy(), batch.numpy()["episode"]
    task = {f"episode/task/{name}": episode["task"][name] for name in ("name", "weight")}
    names = (*STEP_FIELDS, "age", "episode_known")
    return {name: arrays[name] for name in names} | {"episode/seed": episode["seed"]} | task


def compare(batch: dr.Batch, facts: Any, width: Any) -> Counter[str]:
    """Compare a batch with what is known of its steps; return how many numbers of each field were compared.

    `width` returns the distance of the ids of two successive steps.
    """
    compared: Counter[str] = Counter()
    found, index = flat(batch), batch.index.numpy()
    mask = batch.mask.numpy() if "mask" in batch else np.ones((index.size, 1), bool)
    ids = index.reshape(-1, 1) + np.arange(mask.shape[1]) * np.array([[width(i)] for i in index.ravel().tolist()])
    for name, values in found.items():
        dtype = {"step": "int64", "age": "int64", "episode_known": "bool", "priority": "float64"}.get(name)
        assert dtype is None or values.dtype == dtype
        for place, step_id in np.ndenumerate(ids):
            item, j = place
            if name in STEP_FIELDS:
                expected = facts[int(step_id)][name] if mask[item, j] else 0
                value = values.reshape(mask.shape)[item, j]
            elif j == 0:
                expected, value = facts[int(step_id)][name], values.reshape(index.size, -1)[item]
            else:
                continue
            same = np.array_equal(np.ravel(value), np.ravel(expected), equal_nan=name == "priority")
            assert same, (name, step_id, value, expected)
            compared[name] += bool(mask[item, j])
    return compared


def widths(store: dr.Store) -> Any:
    snapshot = store.snapshot
    return lambda step_id: int(snapshot.lanes[(step_id >> POSITION_BITS) - snapshot.origin])


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_every_field_of_every_view_while_the_store_grows_and_evicts(collected: Collected, view: Any) -> None:
    compared: Counter[str] = Counter()
    with sampler_of(collected.store, view) as sampler:
        for number in range(8):
            if number == 6:
                collected.close()
            elif number == 7:
                evict(collected)
            else:
                collected.append(15 + 20 * (number == 0))
            collected.trim(250)
            batches = [sampler.sample(), sampler.sample(), sampler.gather(sampler.ids())]
            facts, width = facts_for(collected, view), widths(collected.store)
            for batch in batches:
                compared += compare(batch, facts, width)
    of_episodes = {"episode_known", "episode/seed", "episode/task/name", "episode/task/weight"}
    assert set(compared) == {*STEP_FIELDS, "age", *of_episodes}
    assert min(compared.values()) > 700


def evict(collected: Collected) -> None:
    """Evict every third episode that is left, by hand."""
    chosen = {int(episode["serial"][-1]) for episode in list(collected.store.episodes)[::3]}
    steps = collected.store.evict(lambda episode: int(episode["serial"][-1]) in chosen)
    assert steps == collected.model.evict(lambda episode: int(episode.steps[-1].extra["serial"]) in chosen)
    assert steps > 30
    collected.refresh()


@pytest.mark.slow
def test_windows_across_episodes_have_them_for_each_step(collected: Collected) -> None:
    view, compared = dr.Sequences(7, stride=2, gamma=GAMMA, cross_episodes=True), 0
    with sampler_of(collected.store, view) as sampler:
        for _ in range(4):
            collected.append(20)
            collected.trim(250)
            batch, facts = sampler.gather(sampler.ids()), facts_for(collected, view)
            episodes = list(collected.store.episodes)
            ids = {int(s): int(i) for of in episodes for s, i in zip(of["serial"], of.ids, strict=True)}
            found, serials = flat(batch), batch.serial.numpy()
            assert serials[:, 0].size == len(np.unique(serials[:, 0]))
            for (item, j), serial in np.ndenumerate(serials):
                fact = facts[ids[int(serial)]]
                for name in STEP_FIELDS if j else found:
                    value = found[name][item, j] if name in STEP_FIELDS else found[name][item]
                    same = np.array_equal(np.ravel(value), np.ravel(fact[name]), equal_nan=name == "priority")
                    assert same, (name, serial)
                    compared += 1
    assert compared > 5000


@pytest.mark.slow
def test_rollouts_have_them_for_each_step(collected: Collected) -> None:
    view = dr.Rollouts(5, gamma=GAMMA, next_value="value", discount="bonus")
    compared: Counter[str] = Counter()
    with sampler_of(collected.store, view) as sampler:
        for _ in range(4):
            collected.append(20)
            collected.trim(250)
            batch, facts = sampler.sample(), facts_for(collected, view)
            assert batch.step.shape == batch.age.shape == batch.episode["seed"].shape == batch.index.shape
            assert batch.episode["task"]["name"].shape == (*batch.index.shape, 3)
            compared += compare(batch, facts, widths(collected.store))
    assert min(compared.values()) >= 60
    for name in ("probability", "population", "priority_sum"):
        with pytest.raises(ValueError, match=f"fields names '{name}', and a batch has action, "):
            sampler_of(collected.store, view, fields=("...", name))


@pytest.mark.slow
@pytest.mark.usefixtures("threads_make_all")
@pytest.mark.parametrize("view", [VIEWS[1], VIEWS[3], VIEWS[5]], ids=str)
def test_batches_that_are_drawn_ahead_tell_what_was_when_they_were_drawn(collected: Collected, view: Any) -> None:
    collected.append(30)
    with sampler_of(collected.store, view, prefetch=2) as sampler:
        sampler.sample()
        before = facts_for(collected, view)
        collected.append(1)
        after = facts_for(collected, view)
        for drawn_of in (before, before, after):
            compared = compare(sampler.sample(), drawn_of, widths(collected.store))
            assert min(compared.values()) >= 40
            collected.append(1)


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS[::2], ids=str)
def test_a_sampler_that_goes_on_from_a_state_gives_the_same(collected: Collected, view: Any) -> None:
    collected.append(40)
    fields = ("...", *FIELDS, "probability", "population", "priority_sum")
    kwargs: Any = {"fields": fields, "prefetch": 2}
    with sampler_of(collected.store, view, distribution=dr.Prioritized(), **kwargs) as before:
        first = before.sample()
        before.update_priorities(first.index, np.arange(40.0))
        before.save("run")
        with sampler_of(collected.store, view, distribution=dr.Prioritized(), **kwargs) as after:
            after.load("run")
            for _ in range(5):
                pair = before.sample(), after.sample()
                assert [str(batch) for batch in pair] == [str(pair[0])] * 2
                for name in ("index", "age", "step", "probability", "population", "priority_sum", "weight"):
                    assert pair[0][name].equal(pair[1][name]), name


@pytest.mark.slow
def test_when_episodes_go_the_times_of_the_others_are_not_read_again(collected: Collected) -> None:
    collected.append(60)
    collected.close()
    collected.trim(250)
    before = collected.store.snapshot
    with sampler_of(collected.store, VIEWS[0]) as sampler, times_read() as read:
        sampler.gather([])
        assert sum(read) == 2 * len(before.log) > 30
        evict(collected)
        assert collected.store.snapshot.generation != before.generation
        read.clear()
        sampler.gather([])
        assert read
        assert sum(read) == 0


def test_a_new_sampler_counts_ages_where_segments_of_old_episodes_have_gone(tmp_store: Path) -> None:
    schema = dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"))
    with dr.create(tmp_store, schema, capacity=200, segment_steps=20) as store, store.writer() as writer:
        for _ in range(35):
            writer.append_episode(np.zeros(9, "f4"), np.zeros(8, int), np.zeros(8), terminated=True)
            store.refresh()
        snapshot = store.snapshot
        there = snapshot.lanes[(snapshot.log.first >> POSITION_BITS) - snapshot.origin] > 0
        assert 0 < np.count_nonzero(~there) < len(there)
        with dr.Sampler(store, dr.Transitions(), fields=("age",)) as sampler:
            ids = sampler.ids()
            assert sampler.gather(ids).age.tolist() == list(reversed(range(len(ids))))
            assert len(ids) == 200


@pytest.mark.slow
def test_a_decision_transformer_has_its_batch(collected: Collected) -> None:
    collected.append(60)
    collected.close()
    collected.trim(250)
    view, fields = dr.Sequences(12, 6, frame_stack=3), ("obs", "action", "return_to_go", "step", "mask")
    places = {int(step.extra["serial"]): (e, t) for e in collected.model.episodes for t, step in enumerate(e.steps)}
    with sampler_of(collected.store, view, batch_size=64, fields=(*fields, "serial")) as sampler:
        batch = sampler.sample().numpy()
    assert set(batch) == {*fields, "serial", "index", "weight"}
    padded = 0
    for item in range(64):
        episode, start = places[int(batch["serial"][item, 0])]
        expected = window(episode, start, 12, frame_stack=3)
        real = int(expected["mask"].sum())
        padded += 12 - real
        for name in ("obs", "action", "mask"):
            assert np.array_equal(batch[name][item], expected[name])
        assert batch["step"][item].tolist() == [*range(start, start + real), *[0] * (12 - real)]
        rewards = [step.reward for step in episode.steps[start:]]
        returns = np.cumsum(np.array(rewards, np.float64)[::-1])[::-1].astype(np.float32)
        assert batch["return_to_go"][item].tolist() == [*returns[:real].tolist(), *[0] * (12 - real)]
    assert padded > 60


def test_what_stacks_frames_on_a_device_has_them(collected: Collected) -> None:
    collected.append(20)
    plain = dr.Transitions(frame_stack=3).reader(SCHEMA, ("...", "time", *FIELDS))
    later = plain.for_device()
    assert later is not plain
    ids = np.array(collected.ids(lambda episode: episode.sampleable(1)))
    want, found = (fields_of(reader, collected.store.snapshot, ids) for reader in (plain, later))
    assert list(want) == list(found)
    for path, array in want.items():
        np.testing.assert_array_equal(array, found[path], err_msg=path)  # NaN are alike


def test_fields_on_request_are_there_where_they_are_named(collected: Collected) -> None:
    collected.append(20)
    store = collected.store
    with sampler_of(store, dr.Transitions(), fields=None) as sampler:
        default = list(sampler.sample())
    assert not {*FIELDS, "time", "probability", "population", "priority_sum", "episode_known"} & set(default)
    with sampler_of(store, dr.Transitions(), fields=("...", "time", "episode/seed")) as sampler:
        batch = sampler.sample()
        assert list(batch) == [*default, "time", "episode", "episode_known"]
        assert list(batch.episode) == ["seed"]
    with sampler_of(store, dr.Transitions(), fields=("...",)) as sampler:
        assert list(sampler.sample()) == default
    with sampler_of(store, dr.Transitions(), fields=("age",)) as sampler:
        assert list(sampler.sample()) == ["index", "weight", "age"]
    with pytest.raises(ValueError, match="fields names 'ages', and a batch has action, age, "):
        sampler_of(store, dr.Transitions(), fields=("...", "ages"))


def test_a_field_of_the_store_goes_before_one_of_its_name(tmp_store: Path) -> None:
    schema = dr.Schema(
        obs=dr.Field((), "float32"),
        action=dr.Field((), "int64"),
        extra={"step": dr.Field((2,), "int16"), "probability": dr.Field((), "float32")},
    )
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        for t in range(10):
            writer.append(0.0, t, 0.0, False, next_obs=0.0, step=[t, -t], probability=t / 2)
        for fields in (None, ("...", "age"), ("step", "action", "probability", "age")):
            with sampler_of(store, dr.Transitions(), fields=fields) as sampler:
                batch = sampler.sample()
                assert batch.step[:, 0].equal(batch.action.to(batch.step.dtype))
                assert batch.probability.equal(batch.action / 2)


def test_of_no_ids_there_are_no_fields(collected: Collected) -> None:
    collected.append(20)
    for view in (*VIEWS[:4], dr.Sequences(7, stride=2, cross_episodes=True)):
        with sampler_of(collected.store, view) as sampler:
            assert flat(sampler.gather([]))["age"].shape == (0,)


def test_relabelled_transitions_have_no_returns_to_go(tmp_store: Path) -> None:
    goal = dr.Field((1,), "float32")
    schema = dr.Schema(
        obs={"observation": goal, "achieved_goal": goal, "desired_goal": goal}, action=dr.Field((), "int64")
    )
    view = dr.Transitions(relabel=dr.Hindsight(reward_fn=lambda achieved, desired: -abs(achieved - desired)[:, 0]))
    with dr.create(tmp_store, schema) as store:
        for name in ("return_to_go", "discounted_return_to_go"):
            with pytest.raises(ValueError, match=f"fields names '{name}', which batches with relabel do not have"):
                dr.Sampler(store, view, fields=("...", name))
        with dr.Sampler(store, view, fields=("...", "step", "age", "probability")) as sampler, store.writer() as writer:
            obs = np.zeros((5, 1), "f4")
            values = dict.fromkeys(("observation", "achieved_goal", "desired_goal"), obs)
            writer.append_episode(values, np.zeros(4, int), np.zeros(4), terminated=True)
            assert set(sampler.sample().step.tolist()) == {0, 1, 2, 3}
