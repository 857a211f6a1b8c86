"""Mixed samplers: of several views, with batches made ahead, saved and loaded."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr
from tests.sampling.test_sampler_states import bits, through_torch

SOURCE_SHIFT = 58  # an index is an id of the sampler with this number
SCHEMA = dr.Schema(obs={"x": dr.Field((2,), "float32")}, action=dr.Field((), "int64"))


@pytest.fixture
def store(tmp_store: Path) -> Iterator[Any]:
    """Episodes of numbered steps, of 1 to 12 steps each; the observation of step i is (i, i)."""
    rng, number = np.random.default_rng(0), 0
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        for steps in rng.integers(1, 13, 40).tolist():
            numbers = np.arange(number, number + steps + 1)
            obs = {"x": np.repeat(numbers[:, None], 2, axis=1).astype(np.float32)}
            writer.append_episode(obs, numbers[:-1], numbers[:-1] * 1.0, terminated=False, truncated=True)
            number += steps + 1
        store.refresh()
        yield store


def episode_of(store: Any) -> dict[int, tuple[Any, int]]:
    """By id: its episode, and which of its steps it is."""
    return {int(i): (episode, t) for episode in store.episodes for t, i in enumerate(episode.ids)}


def halves(batch: Any) -> list[dict[str, np.ndarray]]:
    """The parts of a batch by sampler, as arrays, with the ids of their own store."""
    arrays = batch.numpy()
    arrays |= {name: arrays[name]["x"] for name in ("obs", "next_obs")}
    sources = arrays["index"] >> SOURCE_SHIFT
    arrays["index"] = arrays["index"] & ((1 << SOURCE_SHIFT) - 1)
    return [{name: value[sources == source] for name, value in arrays.items()} for source in np.unique(sources)]


def test_a_repr_says_which_share_each_sampler_has(store: Any) -> None:
    one, five = (dr.Sampler(store, dr.Transitions(n_step=n)) for n in (1, 5))
    assert repr(dr.MixedSampler([(one, 1), (five, 3)])) == (
        "MixedSampler([(Uniform() over Transitions(n_step=1), 0.25), (Uniform() over Transitions(n_step=5), 0.75)])"
    )


def test_one_step_and_five_step_transitions_share_a_batch(store: Any) -> None:
    views = dr.Transitions(1, gamma=0.9), dr.Transitions(5, gamma=0.9)
    samplers = [dr.Sampler(store, view, dr.Prioritized(), seed=i) for i, view in enumerate(views)]
    mixed, known, compared = dr.MixedSampler([(s, 0.5) for s in samplers], batch_size=64, seed=0), episode_of(store), 0
    for _ in range(10):
        batch = mixed.sample()
        for n, half in zip((1, 5), halves(batch), strict=True):
            assert len(half["index"]) == 32
            for row, i in enumerate(half["index"].tolist()):
                episode, t = known[i]
                k = min(n, len(episode) - t)
                reward = sum(0.9**j * float(episode.reward[t + j]) for j in range(k))
                np.testing.assert_allclose(half["reward"][row], reward, rtol=1e-6)
                np.testing.assert_allclose(half["discount"][row], 0.9**k, rtol=1e-6)
                assert half["next_obs"][row].tolist() == episode.obs["x"][t + k].tolist()
                assert (half["n_steps"][row], half["action"][row]) == (k, episode.action[t])
                compared += 1
        assert mixed.update_priorities(batch.index, np.ones(64)) == 0
    assert compared == 640


@pytest.mark.parametrize(("lengths", "pad"), [((3, 7), True), ((7, 3), True), ((4, 6), False)])
def test_shorter_sequences_are_padded_as_their_own_are(store: Any, lengths: tuple[int, int], pad: Any) -> None:
    samplers = [
        dr.Sampler(store, dr.Sequences(length, 1, pad=pad), dr.Prioritized(), seed=i)
        for i, length in enumerate(lengths)
    ]
    mixed, known, compared = dr.MixedSampler([(s, 0.5) for s in samplers], batch_size=32, seed=0), episode_of(store), 0
    for _ in range(10):
        batch = mixed.sample()
        assert batch.mask.shape == (32, 7 if 7 in lengths else 6)
        for length, half in zip(lengths, halves(batch), strict=True):
            for row, i in enumerate(half["index"].tolist()):
                episode, t = known[i]
                steps, longest = min(length, len(episode) - t), half["mask"].shape[1]
                for name, values in (("action", episode.action), ("reward", episode.reward)):
                    assert half[name][row].tolist() == [*values[t : t + steps].tolist(), *[0] * (longest - steps)]
                x = episode.obs["x"][t : t + steps + 1, 0].tolist()
                assert half["obs"][row, :, 0].tolist() == [*x, *[0.0] * longest][:longest]
                assert half["next_obs"][row, :, 0].tolist() == [*x[1:], *[0.0] * longest][:longest]
                assert half["mask"][row].tolist() == [True] * steps + [False] * (longest - steps)
                assert not half["loss_mask"][row, steps:].any()
                compared += 1
        errors = np.random.default_rng(0).standard_normal(batch.mask.shape)
        assert mixed.update_priorities(batch.index, errors) == 0
        assert mixed.update_priorities(batch.index, errors * batch.mask.numpy()) == 0
    assert compared == 320


def test_whole_episodes_of_two_stores_are_padded_to_the_longest(store: Any) -> None:
    samplers = [dr.Sampler(store, dr.Episodes(), seed=i) for i in range(2)]
    mixed, known = dr.MixedSampler([(s, 0.5) for s in samplers], batch_size=4, seed=0), episode_of(store)
    longest = set()
    for _ in range(20):
        halved = halves(mixed.sample())
        for half in halved:
            assert half["mask"].sum(axis=1).tolist() == [len(known[i][0]) for i in half["index"].tolist()]
        longest.add(halved[0]["mask"].shape[1])
    assert len(longest) > 1


@pytest.mark.parametrize("others", [dr.Transitions(frame_stack=2), dr.Sequences(3, 1)], ids=str)
def test_batches_that_differ_in_more_are_refused(store: Any, others: Any) -> None:
    samplers = [dr.Sampler(store, view, seed=0) for view in (dr.Transitions(), others)]
    mixed = dr.MixedSampler([(s, 0.5) for s in samplers], batch_size=4)
    with pytest.raises(ValueError, match=r"^the samplers' batches have different fields: Batch\(.*; see `fields`$"):
        mixed.sample()


# --- made ahead ------------------------------------------------------------------------------------------------------


def made(store: Any, prefetch: tuple[int, int], batch_size: int = 16) -> tuple[Any, list[Any]]:
    samplers = [
        dr.Sampler(store, dr.Transitions(3), dr.Prioritized(stratified=False), seed=1, prefetch=prefetch[0]),
        dr.Sampler(store, dr.Transitions(1), dr.Sweep(passes=None), seed=2, prefetch=prefetch[1]),
    ]
    pairs = [(samplers[0], 0.3), (samplers[1], 0.7)]  # 4.8 and 11.2 of 16
    return dr.MixedSampler(pairs, batch_size=batch_size, seed=3), samplers


def threads() -> set[str]:
    return {t.name.rsplit("_", 1)[0] for t in threading.enumerate() if t.name.startswith("diskreplay-gather")}


@pytest.mark.usefixtures("threads_make_all")
@pytest.mark.parametrize("prefetch", [(3, 3), (0, 2), (2, 5)])
def test_parts_that_are_made_ahead_are_what_they_would_have_been(store: Any, prefetch: tuple[int, int]) -> None:
    plain, (one, two) = made(store, (0, 0))
    ahead, (three, four) = made(store, prefetch)
    sizes = set()
    with one, two, three, four:
        for number in range(40):
            expected, batch = plain.sample(), ahead.sample()
            assert bits(batch) == bits(expected)
            sizes.add(int((batch.index >> SOURCE_SHIFT == 0).sum()))
            assert [len(sampler._planner.queue) for sampler in (three, four)] == list(prefetch)
            if number % 9 == 8:  # of another size: on the spot, by whichever sampler
                assert ahead.sample(5).batch_size == plain.sample(5).batch_size == 5
                break
        assert threads() == {"diskreplay-gather"}
        batches = [ahead.sample() for _ in range(20)]
        assert {batch.batch_size for batch in batches} == {16}
    assert sizes == {4, 5}


@pytest.mark.slow
@pytest.mark.usefixtures("threads_make_all")
@pytest.mark.parametrize("before", [0, 7, 8])
def test_a_saved_mixed_sampler_goes_on_with_what_was_drawn_ahead(store: Any, before: int) -> None:
    one, owned = made(store, (3, 2))
    for number in range(before):
        batch = one.sample()
        owned[0].update_priorities((batch.index & ((1 << SOURCE_SHIFT) - 1))[:4], np.full(4, number))
    others = [made(store, (3, 2)) for _ in range(2)]
    others[0][0].load_state_dict(one.state_dict())
    others[1][0].load_state_dict(through_torch(one.state_dict()))
    for _ in range(20):
        expected = bits(one.sample())
        assert all(bits(other.sample()) == expected for other, _ in others)
    with pytest.raises(ValueError, match="batches of .*16.* items drawn ahead, and the batch_size is 8: use the same"):
        made(store, (3, 2), 8)[0].load_state_dict(one.state_dict())
    for sampler in (*owned, *(sampler for _, samplers in others for sampler in samplers)):
        sampler.close()


@pytest.mark.usefixtures("threads_make_all")
def test_a_sampler_may_be_used_alone_before_and_in_between(store: Any) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), dr.Sweep(), batch_size=8, seed=0, prefetch=4)
    drawn = [*sampler.sample().index.tolist()]
    mixed = dr.MixedSampler([(sampler, 1.0)], batch_size=20)
    drawn += mixed.sample().index.tolist()
    drawn += sampler.sample().index.tolist()
    for batch in mixed:
        drawn += batch.index.tolist()
    assert len(drawn) == len(set(drawn)) == len(store)
    sampler.close()


def test_a_call_that_failed_goes_on_where_it_stopped(store: Any, tmp_path: Path) -> None:
    with dr.create(tmp_path / "other", SCHEMA) as late, late.writer() as writer:
        sweep, empty = (
            dr.Sampler(store, dr.Transitions(), dr.Sweep(), seed=0),
            dr.Sampler(late, dr.Transitions(), seed=0),
        )
        mixed = dr.MixedSampler([(sweep, 0.5), (empty, 0.5)], batch_size=16, seed=0)
        for _ in range(3):
            with pytest.raises(dr.NotEnoughData):
                mixed.sample()
        writer.append({"x": [0, 0]}, 0, 0.0, terminated=True)
        batches = list(mixed)
        drawn = [i for batch in batches for i in batch.index.tolist() if i >> SOURCE_SHIFT == 0]
    assert sorted(drawn) == sorted(int(i) for i in episode_of(store))
    assert {batch.batch_size for batch in batches[:-1]} == {16}


@pytest.mark.parametrize("obs", [{"x": dr.Field((2,), "float32")}, (dr.Field((2,), "float32"), dr.Field((), "bool"))])
def test_the_state_after_a_call_that_failed_has_the_parts_that_were_drawn(tmp_path: Path, obs: Any) -> None:
    schema = dr.Schema(obs=obs, action=dr.Field((), "int64"))
    value: Any = {"x": [0, 0]} if isinstance(obs, dict) else ([1, 2], True)
    with (
        dr.create(tmp_path / "full", schema) as full,
        dr.create(tmp_path / "late", schema) as late,
        full.writer() as writer,
        late.writer() as late_writer,
    ):
        for i in range(100):
            writer.append(value, i, float(i), terminated=i % 7 == 6, next_obs=value)
        full.refresh()

        def made() -> dr.MixedSampler:
            views = (
                dr.Sampler(full, dr.Transitions(), dr.Prioritized(), seed=1),
                dr.Sampler(late, dr.Transitions(), seed=2),
            )
            return dr.MixedSampler([(view, 0.5) for view in views], batch_size=9, seed=0)

        one = made()
        with pytest.raises(dr.NotEnoughData):
            one.sample()
        states = one.state_dict(), through_torch(one.state_dict())
        late_writer.append(value, 0, 0.0, terminated=True, next_obs=value)
        others = [made() for _ in states]
        for other, state in zip(others, states, strict=True):
            other.load_state_dict(state)
        for _ in range(5):
            expected = one.sample()
            for other in others:
                batch = other.sample()
                assert type(batch.obs) is type(expected.obs)
                assert bits(batch) == bits(expected)
        broken = made()
        with pytest.raises(ValueError, match="parts of a batch differ in size from its plan"):
            broken.load_state_dict({**states[0], "planned": torch.zeros((0, 2), dtype=torch.int64)})
        # The state of the second sampler is refused when the first one has taken its own.
        before = broken.sample(5), broken.state_dict()
        planner = {**states[0]["samplers"][1]["planner"], "distribution": "Sweep"}
        refused = [states[0]["samplers"][0], {**states[0]["samplers"][1], "planner": planner}]
        with pytest.raises(ValueError, match="state of 2 samplers, but the mixed sampler has 1"):
            dr.MixedSampler([(dr.Sampler(full, dr.Transitions()), 1)]).load_state_dict(states[0])
        with pytest.raises(ValueError, match="not a state of a mixed sampler"):
            broken.load_state_dict({})
        with pytest.raises(ValueError, match="this is the state of Sweep"):
            broken.load_state_dict({**states[0], "samplers": refused})
        unchanged = broken.sample()
        broken.load_state_dict(before[1])
        assert bits(broken.sample()) == bits(unchanged)
