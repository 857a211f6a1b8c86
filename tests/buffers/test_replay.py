"""The replay buffer: what goes in comes out, against plain lists."""

import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import diskreplay as dr
from tests.buffers.streams import few, serials, stream


def same(found: dr.Experience, pushed: dr.Experience) -> bool:
    pairs = zip(found, pushed, strict=True)
    return all(np.array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)


# --- adding and reading ----------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("ctde"), st.integers(0, 1)), max_size=40), st.data())
def test_a_buffer_is_the_sequence_of_its_newest_steps(
    capacity: int, steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    """c: the episode goes on, t: it is truncated, d: it is done, e: it is left as it is; 1 comes from another one."""
    model: list[dr.Experience] = []
    at, cleared = {0: 0, 1: 1000}, False
    following, cuts = None, 0
    with dr.ReplayBuffer(capacity) as buffer, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for kind, env in steps:
            t = at[env] = at[env] + (2 if kind == "e" else 1)
            cuts += following not in (None, t)
            following = None if kind in "td" else t + 1
            step = dr.Experience(np.full(2, t, "f4"), t, t / 4, np.full(2, t + 1, "f4"), kind == "d")
            buffer.add(*step, truncated=kind == "t")
            model = [*model, step][-capacity:]
            assert len(buffer) == len(model)
            if not cleared and data.draw(st.integers(0, 9)) == 0:
                buffer.clear()
                model, cleared, following = [], True, None
                assert len(buffer) == 0
        assert len(buffer) == len(model)
        assert len(told) == (cuts > 0)
        assert all(same(a, b) for a, b in zip(buffer, model, strict=True))
        assert all(same(buffer[i], model[i]) for i in range(-len(model), len(model)))
        assert all(same(a, b) for a, b in zip(buffer[1:-1:2], model[1:-1:2], strict=True))
        if model:
            batch = buffer.sample(len(model))
            assert sorted(batch.actions[:, 0].tolist()) == sorted(step.action for step in model)
            by_action = {step.action: step for step in model}
            for i, action in enumerate(batch.actions[:, 0].tolist()):
                names = ("states", "actions", "rewards", "next_states", "dones")
                values = [batch[name][i] if "states" in name else batch[name][i, 0] for name in names]
                assert same(dr.Experience(*values), by_action[action])
        for place in (len(model), -len(model) - 1):
            with pytest.raises(IndexError, match=f"^index {place} is out of range"):
                buffer[place]


def test_batches_have_one_set_of_names_and_one_convention_of_shapes() -> None:
    with dr.ReplayBuffer(10) as buffer:
        buffer.push(dr.Experience(torch.ones(1, 4), 2, 3.0, torch.full((1, 4), 2.0), True))
        batch = buffer.sample(1)
        assert (batch.states.shape, batch.next_states.shape) == ((1, 4), (1, 4))
        scalars = {"actions", "rewards", "dones", "discounts", "weights", "n_steps"}
        assert set(batch) == {"states", "next_states", "index", *scalars}
        for name in scalars:
            assert batch[name].shape == (1, 1), name
        assert batch.index.shape == (1,)
        assert {batch[name].dtype for name in ("rewards", "dones", "discounts", "weights")} == {torch.float32}
        assert (batch.actions.dtype, batch.rewards.dtype, batch.dones.dtype) == (
            torch.int64,
            torch.float32,
            torch.float32,
        )
        assert (batch.actions.item(), batch.rewards.item(), batch.dones.item()) == (2, 3.0, 1.0)
        assert batch.batch_size == 1


def test_a_target_of_columns_is_a_column() -> None:
    """The trap: `reward` was (32,) and `dones` (32, 1), and so their target (32, 32)."""
    with dr.ReplayBuffer(100) as buffer:
        for step in stream(40):
            buffer.push(step)
        batch = buffer.sample(32)
        q = torch.zeros(32, 1)
        assert (batch.rewards + 0.99 * (1 - batch.dones) * q).shape == (32, 1)
        assert (batch.weights * batch.discounts**batch.n_steps * q).shape == (32, 1)
        with pytest.raises(AttributeError, match="has no 'reward'"):
            batch.reward  # noqa: B018


def test_random_sample_takes_a_buffer_for_a_sequence() -> None:
    with dr.ReplayBuffer(100) as buffer:
        for step in stream(20):
            buffer.push(*step)
        random.seed(0)
        states, actions, rewards, next_states, dones = zip(*random.sample(buffer, 5), strict=True)
        assert torch.stack(states).shape == torch.stack(next_states).shape == (5, 3)
        assert len({int(action) for action in actions}) == 5
        assert torch.equal(torch.stack(rewards), torch.stack(actions).float() / 2)
        assert float((1 - torch.stack(dones)).sum()) == 5.0


def test_the_newest_step_can_be_sampled_at_once() -> None:
    with dr.ReplayBuffer(100) as buffer:
        for count, step in enumerate(stream(5), 1):
            buffer.push(step)
            assert sorted(serials(buffer.sample(count))) == list(range(count))


def test_a_batch_needs_as_many_steps_and_says_so() -> None:
    with dr.ReplayBuffer(10) as buffer:
        with pytest.raises(BufferError, match=few(0, 2)):
            buffer.sample(2)
        buffer.push(stream(1)[0])
        with pytest.raises(dr.NotEnoughData, match=few(1, 2)):
            buffer.sample(2)
        with pytest.raises(ValueError, match="batch_size must be an int of at least 1, not 0"):
            buffer.sample(0)


def test_streams_that_take_turns_are_cut_with_one_warning_of_the_callers_line() -> None:
    """The trap: two environments in turn, or observations normalised anew, gave 1-step transitions without a word."""
    one, other = stream(6), stream(6, start=100)
    with dr.ReplayBuffer(100, n_step=3) as buffer:
        buffer.push(one[0])
        with pytest.warns(UserWarning, match="the episode was cut there") as told:
            buffer.push(other[0])
        for pair in zip(one[1:], other[1:], strict=True):
            for step in pair:
                buffer.push(step)  # no second one: warnings are errors
        batch = buffer.sample(11)  # the last one's episode is open
        assert sorted(serials(batch)) == [*range(6), *range(100, 105)]
        assert torch.equal(batch.next_states, batch.states + 1)
        assert not batch.dones.any()
        assert torch.allclose(batch.discounts, torch.tensor(0.99))
    (warning,) = told
    assert warning.filename == __file__
    assert "several environments need a lane each, num_envs=" in str(warning.message)


def test_observations_that_are_normalised_anew_are_cut_with_a_warning() -> None:
    with dr.ReplayBuffer(100, n_step=3) as buffer:
        steps = [(np.float32([t / (t + 1)]), 0, 1.0, np.float32([(t + 1) / (t + 2.5)]), False) for t in range(6)]
        buffer.add(*steps[0])
        with pytest.warns(UserWarning, match="normalised or stacked again"):
            buffer.add(*steps[1])
        for step in steps[2:]:
            buffer.add(*step)


def test_a_truncated_step_is_bootstrapped_and_a_done_one_is_not() -> None:
    zero, one = np.zeros(2, "f4"), np.ones(2, "f4")
    with dr.ReplayBuffer(10, gamma=0.9) as buffer:
        buffer.add(zero, 0, 1.0, one, done=False, truncated=True)
        buffer.add(zero, 1, 1.0, one, done=True)
        buffer.add(zero, 2, 1.0, None, done=True)
        buffer.add(zero, 3, 1.0, one, done=True, truncated=True)
        batch = buffer.sample(4)
        order = batch.actions[:, 0].argsort()
        assert torch.allclose(batch.discounts[order, 0], torch.tensor([0.9, 0, 0, 0]))
        assert batch.dones[order, 0].tolist() == [0, 1, 1, 1]
        assert batch.next_states[order, 0].tolist() == [1, 1, 0, 1]


def test_n_step_returns_end_with_the_episode() -> None:
    with dr.ReplayBuffer(100, n_step=3, gamma=0.5) as buffer:
        for step in stream(5)[:4]:
            buffer.push(step._replace(reward=1.0))
        assert len(buffer) == 2
        with pytest.raises(dr.NotEnoughData, match=few(2, 3)):
            buffer.sample(3)
        assert sorted(serials(buffer.sample(2))) == [0, 1]
        buffer.push(stream(5)[4]._replace(reward=1.0, done=True))
        batch = buffer.sample(5)
        order = batch.actions[:, 0].argsort()
        assert batch.rewards[order, 0].tolist() == [1.75, 1.75, 1.75, 1.5, 1.0]
        assert batch.dones[order, 0].tolist() == [0, 0, 1, 1, 1]
        assert batch.n_steps[order, 0].tolist() == [3, 3, 3, 2, 1]
        # The sequence is of single steps all the same.
        assert buffer[0].reward == 1.0
        assert buffer[0].next_state[0] == 1.0


def test_one_environment_may_be_passed_over_too() -> None:
    first, second = stream(2)
    with dr.ReplayBuffer(10) as buffer:
        buffer.add(*first, mask=[False])
        assert buffer.store is None
        for step, mask in ((first, True), (second, torch.tensor([0])), (second, np.array(1))):
            buffer.add(*step, mask=mask)
        assert [int(step.action) for step in buffer] == [0, 1]


def test_a_view_of_what_is_left_after_clearing_is_told_as_it_was_given() -> None:
    with dr.ReplayBuffer(10, n_step=3) as buffer:
        buffer.push(stream(1)[0])
        buffer.clear()
        assert str(buffer.view) == "Transitions(n_step=3)"
        assert str(buffer._sampler.view) == "Transitions(n_step=3)"


# --- shapes and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("obs", "action", "shapes", "dtypes"),
    [
        (torch.zeros(1, 4), 1.0, ((4,), ()), ("float32", "float32")),
        (torch.zeros(1, 4, dtype=torch.float64), torch.tensor([[2]]), ((4,), (1,)), ("float32", "int64")),
        (torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(1, 3), ((4,), (3,)), ("float32", "float32")),
        (np.zeros(4), True, ((4,), ()), ("float32", "int64")),
        (np.zeros((84, 84), "u1"), np.int8(3), ((84, 84), ()), ("uint8", "int8")),
        (np.zeros(1, "f2"), np.zeros(1), ((1,), (1,)), ("float16", "float32")),
        ([0.0, 1.0], [1, 2], ((2,), (2,)), ("float32", "int64")),
        (3, 4, ((), ()), ("int64", "int64")),
    ],
)
def test_shapes_and_dtypes_are_those_of_the_first_step(obs: Any, action: Any, shapes: Any, dtypes: Any) -> None:
    with dr.ReplayBuffer(10) as buffer:
        buffer.add(obs, action, 1.0, obs, False)
        schema = buffer.store.schema
        assert (schema.obs.shape, schema.action.shape) == shapes
        assert (schema.obs.dtype, schema.action.dtype, schema.reward.dtype) == (*dtypes, "float32")
        assert buffer.sample(1).states.shape == (1, *(shapes[0] or (1,)))


def test_a_given_shape_keeps_its_leading_axis_of_one() -> None:
    frame = np.arange(6, dtype="u1").reshape(1, 2, 3)
    with dr.ReplayBuffer(
        10, obs_shape=(1, 2, 3), action_shape=(2,), obs_dtype="uint8", action_dtype=np.float64
    ) as buffer:
        buffer.add(frame, [0.1, 0.2], torch.ones(1, 1), frame[None], torch.tensor([False]))
        batch = buffer.sample(1)
        assert torch.equal(batch.states[0], torch.from_numpy(frame))
        assert torch.equal(batch.next_states, batch.states)
        assert batch.actions.tolist() == [[0.1, 0.2]]


def test_later_steps_may_come_with_or_without_the_environments_axis() -> None:
    with dr.ReplayBuffer(10) as buffer:
        buffer.add(torch.zeros(1, 4), torch.tensor([[1]]), torch.ones(1), torch.ones(1, 4), torch.zeros(1))
        buffer.add(np.ones(4), 2, 1.0, np.full(4, 2.0), True)
        assert sorted(buffer.sample(2).actions.tolist()) == [[1], [2]]
        assert buffer.store.num_episodes == 1


def test_nested_observations_and_actions_come_as_dicts() -> None:
    obs = {"image": np.full((2, 2), 7, "u1"), "speed": 0.5}
    with dr.ReplayBuffer(10) as buffer:
        buffer.add(obs, {"kind": 3, "force": np.ones(2)}, 1.0, obs, True)
        batch = buffer.sample(1)
        assert torch.equal(batch.states["image"][0], torch.full((2, 2), 7, dtype=torch.uint8))
        assert (batch.actions["kind"].shape, batch.actions["force"].shape) == ((1, 1), (1, 2))
        assert buffer[0].state["speed"] == 0.5
        assert int(buffer[0].action["kind"]) == 3


def test_actions_and_observations_of_tuple_spaces_come_as_tuples() -> None:
    """The trap: a Tuple action given as a tuple was refused."""
    spaces = pytest.importorskip("gymnasium.spaces")
    space = spaces.Tuple((spaces.Discrete(7), spaces.Box(-1, 1, (2,), np.float32)))
    nested = spaces.Dict({"pair": spaces.Tuple((spaces.Discrete(3), spaces.Discrete(4))), "x": spaces.Box(0, 1, (3,))})
    for item in (space, nested):
        item.seed(0)
    steps = [(nested.sample(), space.sample()) for _ in range(6)]
    with dr.ReplayBuffer(100) as buffer:
        for t in range(5):
            buffer.add(*steps[t], float(t), steps[t + 1][0], t == 4)
        batch = buffer.sample(5)
        kind, force = batch.actions
        assert (kind.shape, force.shape, batch.states["pair"]["1"].shape) == ((5, 1), (5, 2), (5, 1))
        for i, t in enumerate(batch.rewards[:, 0].int().tolist()):
            obs, action = steps[t]
            assert (kind[i].item(), force[i].tolist()) == (action[0], action[1].tolist())
            assert tuple(part[i].item() for part in batch.states["pair"]) == obs["pair"]
            assert batch.next_states["x"][i].tolist() == steps[t + 1][0]["x"].tolist()
        assert [int(step.action[0]) for step in buffer] == [int(action[0]) for _, action in steps[:5]]


def test_a_tuple_is_an_array_where_its_shape_is_given() -> None:
    with dr.ReplayBuffer(10, obs_shape=(3,), action_shape=(2,)) as buffer:
        buffer.add((14, 10, 0), (0.5, 1.5), 0.0, (20, 10, 0), True)
        batch = buffer.sample(1)
        assert (batch.states.tolist(), batch.actions.tolist()) == ([[14, 10, 0]], [[0.5, 1.5]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros(4)}, "obs: got float64 of shape (4,), needs float32 of shape (3,)"),
        ({"action": 1.5}, "action: got float64 of shape (), needs int64 of shape ()"),
        ({"action": [1, np.zeros(2)]}, "pass nested values as dicts and tuples"),
        ({"reward": [1.0, 2.0]}, "reward: got float64 of shape (2,), needs float32 of shape ()"),
        ({"next_obs": np.zeros((2, 3))}, "obs: got float64 of shape (2, 3), needs float32 of shape (3,)"),
        ({"next_obs": None}, "next_obs may be None only where done is true"),
        (
            {"done": [True, False]},
            "done has 2 values, and this buffer is for one environment: for a vector, make it with num_envs=2",
        ),
        ({"done": -3.7}, "done is one truth value a step, a bool or 0 or 1; got reward="),
        ({"done": 0.5}, "and done=0.5"),
        ({"done": np.nan}, "and done=nan"),
        ({"truncated": torch.tensor(2.0)}, "and truncated=tensor(2.)"),
        ({"truncated": "no"}, "truncated is one truth value a step"),
    ],
)
def test_a_step_that_does_not_fit_changes_nothing(change: dict[str, Any], message: str) -> None:
    first, second = stream(2)
    names = ("obs", "action", "reward", "next_obs", "done")
    with dr.ReplayBuffer(10) as buffer:
        buffer.push(first)
        with pytest.raises(ValueError, match=re.escape(message)):
            buffer.add(**{**dict(zip(names, stream(1, start=50)[0], strict=True)), **change})
        buffer.push(second)
        assert len(buffer) == 2
        assert buffer.store.num_episodes == 1


@pytest.mark.parametrize("done", [1.0, np.float32(1), [1.0], np.ones((1, 1)), torch.tensor(True)], ids=repr)
def test_done_may_be_a_float_of_1_or_0(done: Any) -> None:
    with dr.ReplayBuffer(10) as buffer:
        for (obs, action, reward, next_obs, _), ends in zip(stream(2), (done, 0.0), strict=True):
            buffer.add(obs, action, reward, next_obs, ends, truncated=0.0)
        assert [step.done for step in buffer] == [True, False]


def test_a_first_step_that_does_not_fit_makes_no_store() -> None:
    with dr.ReplayBuffer(10, obs_shape=(4,)) as buffer:
        with pytest.raises(dr.SchemaError, match=re.escape("obs: got float64 of shape (5,)")):
            buffer.add(np.zeros(5), 1, 1.0, np.zeros(5), False)
        assert buffer.store is None
        assert len(buffer) == 0
        with pytest.raises(IndexError):
            buffer[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity must be an int of at least 1, not 0"),
        ({"capacity": 2.5}, "capacity must be an int of at least 1, not 2.5"),
        ({"capacity": 5, "obs_shape": (0,)}, "a field's shape"),
        ({"capacity": 5, "action_dtype": "object"}, "a field's dtype"),
        ({"capacity": 5, "n_step": 0}, "n_step must be"),
        ({"capacity": 5, "gamma": 2.0}, "gamma must be"),
        ({"capacity": 5, "seed": -1}, "seed must be"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dr.ReplayBuffer(**arguments)


# --- priorities, clearing --------------------------------------------------------------------------------------------


def test_priorities_make_the_round_trip() -> None:
    with dr.ReplayBuffer(1000, prioritized=True, seed=0) as buffer:
        for step in stream(20):
            buffer.push(step)
        batch = buffer.sample(20)
        # All new steps are alike, and each has its part of the line that is drawn from.
        assert sorted(serials(batch)) == list(range(20))
        errors = (batch.actions + 1.0).requires_grad_()
        assert buffer.update_priorities(batch.index, errors) == 0
        drawn = [buffer.sample(20) for _ in range(200)]
        found = np.bincount(np.concatenate([b.actions[:, 0] for b in drawn]), minlength=20) / 4000
        p = np.arange(1.0, 21.0) ** 0.6
        np.testing.assert_allclose(found, p / p.sum(), atol=0.01)
        weights = drawn[-1].weights
        expected = (p / p.sum())[drawn[-1].actions] ** -0.4
        np.testing.assert_allclose(weights, expected / expected.max(), rtol=1e-3)
        with pytest.raises(dr.NotEnoughData, match=few(20, 21)):
            buffer.sample(21)
        buffer.clear()
        for step in stream(5, start=50):
            buffer.push(step)
        assert set(serials(buffer.sample(5))) <= set(range(50, 55))
        assert buffer.update_priorities(batch.index, errors) == len(batch.index)


def test_a_buffer_without_priorities_says_how_to_get_them() -> None:
    with dr.ReplayBuffer(10) as buffer:
        buffer.push(stream(1)[0])
        with pytest.raises(ValueError, match="^this buffer has no priorities: make it with prioritized=True"):
            buffer.update_priorities([0], [1.0])
    with pytest.raises(dr.NotEnoughData):
        dr.ReplayBuffer(10, prioritized=True).update_priorities([0], [1.0])


def test_priorities_can_be_switched_off_and_on_while_it_runs() -> None:
    with dr.ReplayBuffer(1000, seed=0) as buffer:
        for step in stream(20):
            buffer.push(step)
        assert (buffer.prioritized, buffer.alpha, buffer.eps) == (False, 0.6, 1e-6)
        assert (buffer.beta(0), buffer.beta(1_000_000)) == (0.4, 1.0)
        buffer.prioritized, buffer.alpha, buffer.beta = True, 1.0, 0.5
        batch = buffer.sample(20)
        buffer.update_priorities(batch.index, (batch.actions == 7).float() * 1e6)
        assert set(serials(buffer.sample(20))) == {7}
        buffer.prioritized = False
        batch = buffer.sample(20)
        assert sorted(serials(batch)) == list(range(20))
        assert (batch.weights == 1).all()
        buffer.update_priorities(batch.index, (batch.actions == 3).float() * 1e6)  # they are kept up to date
        buffer.prioritized = True
        assert set(serials(buffer.sample(20))) == {3}
        for name, value in (("alpha", -1), ("beta", -0.1)):
            with pytest.raises(ValueError, match=f"{name} must be"):
                setattr(buffer, name, value)


def test_alpha_beta_and_eps_are_those_of_prioritized_replay() -> None:
    with dr.ReplayBuffer(1000, prioritized=True, alpha=0.8, beta=0.7, eps=0.5, seed=0) as buffer:
        for step in stream(20):
            buffer.push(step)
        batch = buffer.sample(20)
        buffer.update_priorities(batch.index, batch.actions)
        p = (np.arange(20) + 0.5) ** 0.8
        drawn = [buffer.sample(20) for _ in range(200)]
        found = np.bincount(np.concatenate([b.actions[:, 0] for b in drawn]), minlength=20) / 4000
        np.testing.assert_allclose(found, p / p.sum(), atol=0.01)
        expected = (p / p.sum())[drawn[-1].actions] ** -0.7
        np.testing.assert_allclose(drawn[-1].weights, expected / expected.max(), rtol=1e-3)


def test_the_view_is_set_while_it_runs() -> None:
    with dr.ReplayBuffer(1000) as buffer:
        buffer.view = dr.Transitions(n_step=2, gamma=0.5)  # before the first step
        for step in stream(10):
            buffer.push(step._replace(reward=1.0))
        assert (len(buffer), buffer.view.n_step) == (9, 2)
        assert (buffer.sample(9).rewards == 1.5).all()
        buffer.clear()
        for step in stream(6, start=50):
            buffer.push(step._replace(reward=1.0))
        buffer.view = dr.Transitions(n_step=4, gamma=0.5, frame_stack=2)
        batch = buffer.sample(3)
        assert sorted(batch.states[:, 1, 0].tolist()) == [50, 51, 52]  # what was cleared stays so
        assert (batch.rewards == 1.875).all()
        with pytest.raises(ValueError, match="^view must be Transitions"):
            buffer.view = dr.Sequences(length=2, overlap=0)
        assert buffer.view.n_step == 4


def test_a_seed_makes_the_batches() -> None:
    drawn = []
    for seed in (3, 3, 4):
        with dr.ReplayBuffer(100, seed=seed) as buffer:
            for step in stream(50):
                buffer.push(step)
            drawn.append([serials(buffer.sample(8)) for _ in range(3)])
    assert drawn[0] == drawn[1] != drawn[2]


def test_cleared_steps_are_neither_counted_nor_sampled() -> None:
    with dr.ReplayBuffer(50) as buffer:
        buffer.clear()
        for step in stream(30):
            buffer.push(step)
        buffer.clear()
        assert len(buffer) == 0
        with pytest.raises(BufferError):
            buffer.sample(1)
        with pytest.raises(IndexError):
            buffer[0]
        for step in stream(10, start=30):
            buffer.push(step)
        assert sorted(serials(buffer.sample(10))) == list(range(30, 40))
        assert buffer[0].action == 30
        for step in stream(60, start=40):
            buffer.push(step)
        assert len(buffer) == 50
        assert sorted(serials(buffer.sample(50))) == list(range(50, 100))


# --- on disk ---------------------------------------------------------------------------------------------------------


def test_a_buffer_at_a_path_is_continued(tmp_store: Path) -> None:
    with dr.ReplayBuffer(20, path=tmp_store) as buffer:
        assert not tmp_store.exists()
        for step in stream(15):
            buffer.push(step)
    with dr.ReplayBuffer(20, obs_shape=(3,), path=tmp_store) as buffer:
        assert sorted(serials(buffer.sample(15))) == list(range(15))
        for step in stream(10, start=15):
            buffer.push(step)
        assert [int(step.action) for step in buffer] == list(range(5, 25))
    with dr.open(tmp_store) as store:
        assert len(store) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 30}, "keeps 20 steps, not 30"),
        ({"capacity": 20, "obs_shape": (4,)}, "has obs"),
        ({"capacity": 20, "action_dtype": "float32"}, "has action"),
    ],
)
def test_a_store_that_does_not_fit_is_refused(tmp_store: Path, arguments: dict[str, Any], message: str) -> None:
    with dr.ReplayBuffer(20, path=tmp_store) as buffer:
        buffer.push(stream(1)[0])
    with pytest.raises(ValueError, match=message):
        dr.ReplayBuffer(path=tmp_store, **arguments)


def test_a_store_with_fields_that_a_step_has_not_is_refused(tmp_store: Path) -> None:
    field = dr.Field((), "float32")
    dr.create(tmp_store, dr.Schema(obs=field, action=field, extra={"bonus": field}), capacity=20).close()
    with pytest.raises(dr.SchemaError, match=re.escape("has the extra fields ['bonus'], not []")):
        dr.ReplayBuffer(20, path=tmp_store)


def test_a_batch_of_as_many_as_the_buffer_has_is_there() -> None:
    """The trap: of 10 steps 6 were sampleable, and so `len(buffer) >= 10` said nothing about `sample(10)`."""
    with dr.ReplayBuffer(1000, n_step=5) as buffer:
        counts = []
        for step in stream(14):
            buffer.push(step)
            counts.append(len(buffer))
            if len(buffer):
                assert sorted(serials(buffer.sample(len(buffer)))) == [int(step.action) for step in buffer]
            with pytest.raises(BufferError):
                buffer.sample(len(buffer) + 1)
        assert counts == [0, 0, 0, 0, *range(1, 11)]
        assert len(random.sample(buffer, 10)) == 10
        assert [int(buffer[i].action) for i in (0, 9, -1)] == [0, 9, 9]
        with pytest.raises(IndexError):
            buffer[10]


def test_a_buffer_takes_a_range_of_steps() -> None:
    with dr.ReplayBuffer(100, n_step=(1, 4), gamma=1.0) as buffer:
        for number in range(60):
            row = np.full(3, number, np.float32)
            buffer.add(row, 0, 1.0, row + 1, False)
        batch = buffer.sample(48)
        assert set(batch.n_steps.flatten().tolist()) == {1, 2, 3, 4}
        assert torch.equal(batch.rewards, batch.n_steps.float())
        assert torch.equal(batch.next_states, batch.states + batch.n_steps)
