"""A sharded sampler's methods, with shards in this process."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr
from tests.interop.ray.in_process import SCHEMA, InProcess, Lost, ShardedSampler, append, make_stores
from tests.sampling.test_interrupts import learn, loads_wholly_or_not
from tests.testing.device import Device
from tests.tiers import whole_or_part

STEPS = (30, 12, 50)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[InProcess]:
    with InProcess(make_stores(tmp_path, STEPS)) as group:
        yield group


@pytest.fixture(params=["another node", "this node"])
def near_or_far(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InProcess]:
    with InProcess(make_stores(tmp_path, STEPS), node=request.param) as group:
        yield group


def made(shards: InProcess, view: Any = None, distribution: Any = None, **arguments: Any) -> ShardedSampler:
    view = dr.Transitions() if view is None else view
    return ShardedSampler(shards, view, distribution, **{"batch_size": 16, "seed": 3, **arguments})


@pytest.mark.slow
@pytest.mark.parametrize("distribution", [dr.Uniform, dr.Prioritized])
@pytest.mark.parametrize(
    "view",
    [dr.Transitions(n_step=3), dr.Sequences(length=8, overlap=4), dr.Transitions(frame_stack=2)],
    ids=["transitions", "sequences", "stacks"],
)
def test_a_batch_has_what_each_shard_s_own_sampler_gathers(
    near_or_far: InProcess, view: Any, distribution: Any
) -> None:
    with made(near_or_far, view, distribution()) as sampler:
        batch = sampler.sample()
        again = sampler.gather(batch.index)
        assert batch.kind == ("sharded", *view.kind)
        for shard, (path, _) in enumerate(near_or_far.places):
            rows = np.flatnonzero(batch.index[:, 0].numpy() == shard)
            with dr.Sampler(path, view) as own:
                expected = own.gather(batch.index[rows, 1])
            assert set(batch) == set(expected)
            for name in set(expected) - {"index", "weight"}:
                assert torch.equal(batch[name][rows], expected[name]), name
                assert torch.equal(again[name][rows], expected[name]), name
        assert torch.equal(again.index, batch.index)


def test_next_obs_of_windows_is_in_the_memory_of_obs(shards: InProcess) -> None:
    with made(shards, dr.Sequences(length=8, overlap=4)) as sampler:
        batch = sampler.sample()
        assert batch.next_obs.data_ptr() == batch.obs.data_ptr() + 3 * 4


def test_batches_made_ahead_have_the_fields_of_others(near_or_far: InProcess) -> None:
    with made(near_or_far, distribution=dr.Prioritized(), prefetch=4) as sampler:
        for _ in range(12):
            batch = sampler.sample()
            assert torch.equal(batch.obs[:, 0].long(), batch.index[:, 0])
        assert len(sampler.sample(5)["index"]) == 5
        assert len(next(iter(sampler))["index"]) == 16


def test_equal_seeds_give_equal_batches(tmp_path: Path) -> None:
    paths, found = make_stores(tmp_path, STEPS), []
    for _ in range(2):
        with InProcess(paths) as shards, made(shards) as sampler:
            found.append([sampler.sample().index.tolist() for _ in range(5)])
    assert found[0] == found[1]


def test_a_state_goes_on_with_the_same_batches(shards: InProcess) -> None:
    with made(shards, distribution=dr.Prioritized(beta=dr.Linear(0.4, 1.0, 10)), direct=False) as sampler:
        for _ in range(4):
            batch = sampler.sample()
            sampler.update_priorities(batch.index, np.arange(16.0))
        sampler.sampleable  # noqa: B018  # which sends the updates
        sampler.save("here")
        state = sampler.state_dict()
        expected = [sampler.sample() for _ in range(3)]
        sampler.load("here")
        for wanted in expected:
            found = sampler.sample()
            assert torch.equal(found.index, wanted.index)
            assert torch.equal(found.weight, wanted.weight)
        sampler.load_state_dict(state)
        assert torch.equal(sampler.sample().index, expected[0].index)


class Sending:
    """A sharded sampler whose updates are sent at once, and not when the next batch or a thread takes them along."""

    def __init__(self, sampler: ShardedSampler) -> None:
        self.sample, self.state_dict, self.load_state_dict = sampler.sample, sampler.state_dict, sampler.load_state_dict
        self._sampler = sampler

    def update_priorities(self, index: Any, td_error: Any) -> None:
        self._sampler.update_priorities(index, td_error)
        self._sampler.sampleable  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("distribution", [dr.Uniform, dr.Prioritized])
def test_states_of_shards_are_loaded_wholly_or_not(shards: InProcess, distribution: Any) -> None:
    with made(shards, distribution=distribution(), direct=False) as sampler:
        sender = Sending(sampler)
        if distribution is dr.Uniform:
            sender.update_priorities = lambda *_: None  # type: ignore[method-assign]
        loads_wholly_or_not(sender, whole_or_part(1, 61))


def test_a_state_that_a_shard_refuses_changes_nothing(shards: InProcess) -> None:
    with made(shards, distribution=dr.Prioritized(), direct=False, prefetch=3) as sampler:
        sender = Sending(sampler)
        learn(sender, 0)
        other = sampler.state_dict()
        for number in range(3):
            learn(sender, number)
        sampler.save("here")
        state = sampler.state_dict()
        sampler.load_state_dict(state)  # batches made ahead are drawn again
        expected = [learn(sender, number) for number in range(5)]
        assert (Path(shards.places[1][0]) / "samplers/here").exists()
        shutil.rmtree(Path(shards.places[1][0]) / "samplers/here")
        broken = {**other, "shards": [other["shards"][0], {}, other["shards"][2]]}
        refused: list[tuple[Callable[[], None], type[Exception], str]] = [
            (lambda: sampler.load_state_dict(broken), ValueError, "this is not a state of a sampler"),
            (
                lambda: sampler.load_state_dict({**other, "rng": {}}),
                ValueError,
                "this is not a state of a sharded sampler",
            ),
            (
                lambda: sampler.load_state_dict({**other, "batches": "x"}),
                ValueError,
                "not a state of a sharded sampler",
            ),
            (lambda: sampler.load("here"), dr.StoreNotFound, "here"),
        ]
        for load, error, message in refused:
            sampler.load_state_dict(state)
            learn(sender, 0)
            with pytest.raises(error, match=message):
                load()
            assert [learn(sender, number) for number in range(1, 5)] == expected[1:]


def test_a_shard_that_is_lost_while_states_are_loaded_leaves_the_others_as_they_were(
    shards: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(shards, distribution=dr.Prioritized(1.0, 0.0, 1e-9), direct=False) as sampler:
        state = sampler.state_dict()
        sampler.update_priorities(sampler.ids(), np.full(sum(STEPS), 2.0))
        handle, calls = shards.handles[1], iter(["the state"])
        call = handle.call

        def call_once(name: str, arguments: tuple[Any, ...]) -> Any:
            """Answer the question for the state, and die at the next call of the sampler."""
            if name == "with_sampler" and next(calls, None) is None:
                raise Lost("the actor died")
            return call(name, arguments)

        monkeypatch.setattr(handle, "call", call_once)
        with pytest.raises(dr.ReplayError, match="^shard 1 .* does not answer: the actor died$"):
            sampler.load_state_dict(state)
        assert sampler.stats()["shards"][0]["mass"] == pytest.approx(2.0 * STEPS[0])


def test_updates_that_wait_are_in_the_state(shards: InProcess) -> None:
    with made(shards, distribution=dr.Prioritized(1.0, 0.0, 1e-9), update_age_s=3600.0) as sampler:
        ids = sampler.ids()
        sampler.update_priorities(ids, np.full(len(ids), 2.0))
        state = sampler.state_dict()
        sampler.update_priorities(ids, np.full(len(ids), 3.0))
        sampler.load_state_dict(state)
        assert sampler.stats()["priority_sum"] == pytest.approx(2.0 * len(ids))
        assert sampler.sampleable == len(ids)
        assert sampler.stats()["priority_sum"] == pytest.approx(2.0 * len(ids))


def test_view_and_distribution_can_be_set_and_priorities_stay(near_or_far: InProcess) -> None:
    with made(near_or_far, distribution=dr.Prioritized(1.0, 0.0, 1e-9)) as sampler:
        sampler.update_priorities(sampler.ids(), np.full(sum(STEPS), 2.0))
        sampler.view = dr.Transitions(n_step=5)
        assert int(sampler.sample().n_steps.max()) == 5
        sampler.distribution = dr.Uniform()
        assert sampler.sample().weight.min() == 1.0
        assert np.isnan(sampler.stats()["priority_sum"])
        sampler.distribution = dr.Prioritized(1.0, 0.0, 1e-9)
        assert sampler.sampleable == sum(STEPS)
        assert sampler.stats()["priority_sum"] == pytest.approx(2.0 * sum(STEPS))
        sampler.view = dr.Sequences(length=6, overlap=3)
        assert sampler.sample().obs.shape == (16, 6, 3)


def test_a_uniform_sampler_may_become_prioritized(shards: InProcess) -> None:
    with made(shards) as sampler:
        with pytest.raises(
            ValueError, match=r"^Uniform\(\) has no priorities to update: draw with Prioritized\(...\)$"
        ):
            sampler.update_priorities([[0, 1]], [1.0])
        sampler.distribution = dr.Prioritized()
        batch = sampler.sample()
        assert sampler.update_priorities(batch.index, torch.ones(16, 1, requires_grad=True)) == 0


def test_an_update_of_a_device_is_waited_for_once(shards: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", device.current)
    with made(shards, distribution=dr.Prioritized()) as sampler:
        index = sampler.sample().index
        assert sampler.update_priorities(device.tensor(index), device.tensor(torch.zeros(16))) == 0
        assert device.stream.waits == 1


def test_errors_of_sequences_count_by_their_loss_mask(tmp_path: Path) -> None:
    view, priorities = dr.Sequences(length=8, overlap=4), dr.Prioritized(1.0, 0.0, 1e-9, eta=0.5)
    with InProcess(make_stores(tmp_path, (12,))) as shards, made(shards, view, priorities) as sampler:
        errors = np.zeros((2, 8))
        errors[:, 3] = 4.0
        sampler.update_priorities(sampler.ids(), errors)
        assert sampler.sampleable == 2
        assert sampler.stats()["priority_sum"] == pytest.approx(2 * (0.5 * 4.0 + 0.5 * 0.5))


def test_trainers_of_one_name_share_their_priorities_and_others_do_not(shards: InProcess) -> None:
    names = ("default", "default", "apart")
    one, *others = samplers = [made(shards, None, dr.Prioritized(1.0, 0.0, 1e-9), name=name) for name in names]
    one.update_priorities(one.ids(), np.full(sum(STEPS), 5.0))
    for sampler, expected in ((one, 5.0), (others[0], 5.0), (others[1], 1.0)):
        assert sampler.sampleable == sum(STEPS)
        assert sampler.stats()["priority_sum"] == pytest.approx(expected * sum(STEPS))
    for sampler in samplers:
        sampler.close()


def test_another_view_under_the_same_name_is_refused(shards: InProcess) -> None:
    with made(shards):
        message = r"^the sampler 'default' of .* has view Transitions\(.*\): give yours another name, or the same argum"
        with pytest.raises(ValueError, match=message):
            made(shards, dr.Sequences(length=4, overlap=2))


def test_where_is_asked_in_the_shards(shards: InProcess) -> None:
    with made(shards, where=lambda episode: len(episode) < 40) as sampler:
        assert sampler.sampleable == 42
        assert set(sampler.sample().index[:, 0].tolist()) <= {0, 1}


def test_a_batch_holds_the_fields_that_are_named(shards: InProcess) -> None:
    with made(shards, fields=("reward", "population", "probability", "priority_sum")) as sampler:
        batch = sampler.sample()
        assert set(batch) == {"reward", "index", "weight", "population", "probability", "priority_sum"}
        assert set(batch.population.tolist()) == {sum(STEPS)}
        np.testing.assert_allclose(batch.probability, 1.0 / sum(STEPS))


@pytest.mark.parametrize(
    ("view", "distribution", "message"),
    [
        (dr.Rollouts(4), None, "cannot be drawn from shards: each lane gives its steps once, in order, to one trainer"),
        (dr.Episodes(), None, "cannot be drawn from shards: a batch is as long as its longest episode"),
        (None, dr.Recency(10), "cannot draw from shards: an age counts the newer steps of all shards"),
        (None, dr.Sweep(), "cannot draw from shards: a sweep counts the ids of one trainer"),
        (None, dr.Mixture([(dr.Uniform(), 1.0)]), "cannot draw from shards: a shard has one mass"),
        (None, dr.Prioritized(normalize="store"), "^normalize='store' needs the largest weight of all shards"),
        ("transitions", None, r"^view must be Transitions\(...\) or Sequences\(...\), not 'transitions'$"),
        (None, "uniform", r"^distribution must be Uniform\(\) or Prioritized\(\), not 'uniform'"),
    ],
)
def test_what_shards_cannot_do_is_refused_with_the_reason(
    tmp_path: Path, view: Any, distribution: Any, message: str
) -> None:
    with InProcess(make_stores(tmp_path, (4,))) as shards, pytest.raises(ValueError, match=message):
        made(shards, view, distribution)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.sample(beta=1.0), ValueError, r"^beta means nothing to Uniform\(\)"),
        (lambda s: s.sample(0), ValueError, "^batch_size must be an int of at least 1, not 0$"),
        (lambda s: s.gather([1, 2]), dr.InvalidIndex, r"^an index over shards is integers \(batch, 2\), shard and id"),
        (lambda s: s.gather([[9, 2]]), dr.InvalidIndex, "^there is no shard 9: the store has 3$"),
        (lambda s: s.gather([[0, 1 << 40]]), dr.InvalidIndex, "^id 1099511627776 "),
        (lambda s: s.load("nothing"), dr.StoreNotFound, "has no sampler state named 'nothing'$"),
        (lambda s: s.load_state_dict({}), ValueError, "^this is not a state of a sharded sampler, but dict$"),
    ],
)
def test_what_is_wrong_is_refused(tmp_path: Path, call: Any, error: type[Exception], message: str) -> None:
    with InProcess(make_stores(tmp_path, STEPS)) as shards, made(shards) as sampler:
        with pytest.raises(error, match=message):
            call(sampler)
        sampler.sample()


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([1.0], "^td_error must have one row for each of 2 ids"),
        ([1.0, np.nan], "^td_error must be finite: nothing was updated$"),
        (np.zeros((2, 2, 2)), r"^td_error must be \(batch,\), \(batch, 1\) or \(batch, length\)"),
    ],
)
def test_wrong_errors_update_nothing(tmp_path: Path, errors: Any, message: str) -> None:
    with InProcess(make_stores(tmp_path, (4,))) as shards, made(shards, distribution=dr.Prioritized()) as sampler:
        with pytest.raises(ValueError, match=message):
            sampler.update_priorities(sampler.ids()[:2], errors)
        sampler.sample()
        assert sampler.stats()["updates_sent"] == 0


def test_stores_of_different_schemas_are_refused(tmp_path: Path) -> None:
    paths = make_stores(tmp_path, (4, 4))
    with dr.create(tmp_path / "other", dr.Schema(obs=dr.Field((2,), "float32"), action=dr.Field((), "int64"))):
        pass
    with InProcess([*paths, tmp_path / "other"]) as shards, pytest.raises(ValueError, match="have different schemas$"):
        made(shards)


def test_a_field_that_would_hide_how_items_were_drawn_is_refused(tmp_path: Path) -> None:
    extra = {"probability": dr.Field((), "float32")}
    with dr.create(tmp_path / "store", dr.Schema(obs=SCHEMA.obs, action=SCHEMA.action, extra=extra)):
        pass
    with InProcess([tmp_path / "store"]) as shards, pytest.raises(ValueError, match="^the store has a field 'probab"):
        made(shards)


def test_a_group_of_shards_tells_its_steps_and_schema(shards: InProcess) -> None:
    assert len(shards) == sum(STEPS)
    assert shards.schema == SCHEMA
    assert [info["steps"] for info in shards.info()] == list(STEPS)


def test_steps_that_are_appended_are_drawn(shards: InProcess) -> None:
    with made(shards) as sampler:
        sampler.sample()
        append(Path(shards.places[1][0]), 1, 5000)
        assert sampler.sampleable == sum(STEPS) + 5000
        assert (sampler.sample().index[:, 0] == 1).sum() > 10


def test_a_closed_sampler_says_so(shards: InProcess) -> None:
    sampler = made(shards)
    sampler.close()
    sampler.close()
    with pytest.raises(dr.Closed, match="^this sampler is closed; make another$"):
        sampler.sample()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a/b"}, "^name must be 1 to 80 letters, digits, dots, dashes and underscores, not 'a/b'$"),
        ({"deadline_s": 0}, "^deadline_s must be a number of seconds above 0, not 0$"),
        ({"batch_size": 2.5}, "^batch_size must be an int of at least 1, not 2.5$"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with InProcess(make_stores(tmp_path, (4,))) as shards, pytest.raises(ValueError, match=message):
        made(shards, **arguments)


def test_hindsight_goals_are_drawn_in_the_shards(tmp_path: Path) -> None:
    goals = {"observation": dr.Field((2,), "float32"), "achieved_goal": dr.Field((2,), "float32")}
    schema = dr.Schema(obs={**goals, "desired_goal": dr.Field((2,), "float32")}, action=dr.Field((), "int64"))
    with dr.create(tmp_path / "goals", schema) as store, store.writer() as writer:
        obs = {name: np.arange(22, dtype=np.float32).reshape(11, 2) for name in schema.obs}
        obs["desired_goal"] = np.full((11, 2), -1.0, np.float32)
        writer.append_episode(obs, np.zeros(10, int), np.zeros(10), terminated=True)
    view = dr.Transitions(relabel=dr.Hindsight(ratio=1.0, reward_fn=lambda achieved, desired: np.ones(len(achieved))))
    for node in ("another node", "this node"):
        with InProcess([tmp_path / "goals"], node=node) as shards, made(shards, view) as sampler:
            batch = sampler.sample()
            assert (batch.obs["desired_goal"] >= 0).all()
            assert (batch.reward == 1.0).all()
    with InProcess([tmp_path / "goals"]) as shards, pytest.raises(ValueError, match="cannot be drawn by priorities"):
        made(shards, view, dr.Prioritized())
