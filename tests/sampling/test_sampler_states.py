"""A sampler that is saved and loaded goes on as the one that was not interrupted, to the bit."""

import copy
import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr
from diskreplay.testing.nested import flat
from tests.testing.support import run_python
from tests.tiers import whole_or_part

pytestmark = pytest.mark.usefixtures("threads_make_all")

GOAL = dr.Field((2,), "float32")
SCHEMA = dr.Schema(
    obs={"observation": dr.Field((3,), "float32"), "achieved_goal": GOAL, "desired_goal": GOAL},
    action=dr.Field((), "int64"),
    extra={"value": dr.Field((), "float32")},
    episode={"task": dr.Field((), "int64")},
)
LANES = 3


def reached(achieved: np.ndarray, desired: np.ndarray, *_: Any) -> np.ndarray:
    return -np.abs(achieved - desired).sum(-1)


def rollouts(num_steps: int) -> Any:
    return dr.Rollouts(num_steps, value_fn=lambda obs: obs["observation"].sum(-1))


VIEWS: dict[str, Callable[[], Any]] = {
    "transitions": lambda: dr.Transitions(n_step=3, frame_stack={"observation": 2}),
    "random steps": lambda: dr.Transitions(n_step=(1, 5), next_fields=("action",)),
    "hindsight": lambda: dr.Transitions(n_step=2, relabel=dr.Hindsight(ratio=0.5, reward_fn=reached)),
    "sequences": lambda: dr.Sequences(length=8, overlap=4, burn_in=2),
    "moved back": lambda: dr.Sequences(length=7, overlap=3, pad=False),
    "aligned to the end": lambda: dr.Sequences(length=7, stride=5, align="end"),
    "across episodes": lambda: dr.Sequences(length=8, stride=3, burn_in=2, cross_episodes=True),
    "episodes": lambda: dr.Episodes(),
    "rollouts": lambda: rollouts(4),
}
DISTRIBUTIONS: dict[str, Callable[[], Any]] = {
    "uniform": dr.Uniform,
    "prioritized": lambda: dr.Prioritized(beta=dr.Linear(0.4, 1.0, 40)),
    "by the store": lambda: dr.Prioritized(alpha=0.8, beta=0.7, normalize="store", stratified=False),
    "recency": lambda: dr.Recency(60),
    "sweep": lambda: dr.Sweep(passes=None),
    "by time": lambda: dr.Sweep(passes=None, order="time"),
    "by episode": dr.Stratified,
    "by task": lambda: dr.Stratified("episode/task"),
    "mixture": lambda: dr.Mixture([(dr.Sweep(None), 0.3), (dr.Uniform(), 0.3), (dr.Prioritized(alpha=0.9), 0.4)]),
}


class Collector:
    """Two writers, one of several lanes, that append steps, most with priorities, and leave episodes open."""

    def __init__(self, store: Any, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.one, self.several = store.writer(), store.writer(num_envs=LANES)
        self.obs = self.observe(LANES + 1)

    def observe(self, lanes: int) -> dict[str, np.ndarray]:
        widths = {"observation": 3, "achieved_goal": 2, "desired_goal": 2}
        return {name: self.rng.standard_normal((lanes, width), np.float32) for name, width in widths.items()}

    def grow(self, steps: int) -> None:
        for _ in range(steps):
            coming, fresh = self.observe(LANES + 1), self.observe(LANES + 1)
            action, reward = self.rng.integers(0, 9, LANES + 1), self.rng.standard_normal(LANES + 1, np.float32)
            value, ends = self.rng.standard_normal(LANES + 1, np.float32), self.rng.random((2, LANES + 1)) < 0.07
            lanes, first = slice(0, LANES), LANES
            priority = np.where(self.rng.random(LANES + 1) < 0.4, np.nan, self.rng.normal(0, 2, LANES + 1))
            self.several.append(
                {k: x[lanes] for k, x in self.obs.items()}, action[lanes], reward[lanes], ends[0, lanes],
                ends[1, lanes], next_obs={k: x[lanes] for k, x in coming.items()}, value=value[lanes],
                episode={"task": action[lanes] % 3}, priority=priority[lanes],
            )  # fmt: skip
            self.one.append(
                {k: x[first] for k, x in self.obs.items()}, action[first], reward[first], ends[0, first],
                ends[1, first], next_obs={k: x[first] for k, x in coming.items()}, value=value[first],
                episode={"task": action[first] % 4} if ends[:, first].any() else None,
                priority=None if np.isnan(priority[first]) else priority[first],
            )  # fmt: skip
            over = ends.any(axis=0)[:, None]
            self.obs = {name: np.where(over, fresh[name], coming[name]) for name in coming}

    def close(self) -> None:
        self.one.close()
        self.several.close()


@contextmanager
def collected(path: Path, steps: int, **kwargs: Any) -> Iterator[tuple[Any, Collector]]:
    with dr.create(path, SCHEMA, chunk_bytes=1 << 16, **kwargs) as store:
        collector = Collector(store)
        collector.grow(steps)
        yield store, collector


def bits(batch: Any) -> dict[str, tuple[Any, ...]]:
    """Everything that a batch holds, to the bit."""
    leaves = flat(batch.numpy(), "")
    return {name: (value.dtype, value.shape, value.tobytes()) for name, value in leaves.items()}


def learn(sampler: Any, batch: Any, number: int) -> None:
    """Update priorities as training would: the errors of a batch depend on its number alone."""
    if sampler.distribution.weighted:
        errors = np.random.default_rng(number).standard_normal(len(batch.index))
        sampler.update_priorities(batch.index, errors)


def compare(samplers: list[Any], batches: int, between: Callable[[int], None] | None = None, first: int = 1000) -> None:
    """Draw from samplers that must be alike, learning and growing in between."""
    for number in range(first, first + batches):
        found = [sampler.sample() for sampler in samplers]
        for other in found[1:]:
            assert bits(other) == bits(found[0]), f"batch {number}"
        for sampler, batch in zip(samplers, found, strict=True):
            learn(sampler, batch, number)
        if between is not None:
            between(number)


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def map_all(store: Any) -> None:
    """Read every step: a segment that is evicted before its first use makes a sampler draw again."""
    store.refresh()
    with dr.Sampler(store, dr.Transitions()) as sampler:
        sampler.gather(sampler.ids())


def check(
    path: Path, view: str, distribution: str, prefetch: int, before: int = 20, after: int = 20, every: int = 3,
    capacity: int | None = None, **kwargs: Any,
) -> None:  # fmt: skip
    """Save after some batches, load in two more samplers, each on a Store of its own, and go on with all three."""
    grown, every = (6, 1) if view == "rollouts" else (4, every)
    limits = {} if capacity is None else {"capacity": capacity, "segment_steps": 90}
    samplers: list[Any] = []
    with collected(path, 60, **limits) as (first, collector), dr.open(path) as second, dr.open(path) as third:
        stores = (first, second, third) if capacity is not None else ()

        def made(on: Any) -> Any:
            samplers.append(
                dr.Sampler(
                    on, VIEWS[view](), DISTRIBUTIONS[distribution](), batch_size=16, prefetch=prefetch, seed=5, **kwargs
                )
            )
            return samplers[-1]

        def between(number: int) -> None:
            if number % every == 0:
                collector.grow(grown)
                for store in stores:
                    map_all(store)

        one = made(first)
        quiet = 0 if capacity is None else prefetch + 1  # batches drawn ahead that lost ids would be drawn again
        compare([one], before - quiet, between, first=0)
        compare([one], quiet, first=before - quiet)
        one.save("run")
        made(second).load("run")
        made(third).load_state_dict(through_torch(one.state_dict()))
        for store in stores:
            map_all(store)
        compare(samplers, after, between)
        for sampler in samplers:
            assert sampler.stats()["batches"] == before + after
            sampler.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "prefetch"),
    [*((distribution, 3) for distribution in DISTRIBUTIONS), ("uniform", 0), ("prioritized", 0), ("mixture", 0)],
)
def test_every_distribution_goes_on_as_if_nothing_had_happened(
    tmp_store: Path, distribution: str, prefetch: int
) -> None:
    check(tmp_store, "transitions", distribution, prefetch)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("before", [17, 18, 23, 24])
def test_batches_drawn_ahead_go_on_wherever_they_were(tmp_store: Path, distribution: str, before: int) -> None:
    check(tmp_store, "transitions", distribution, 3, before, every=1)


@pytest.mark.slow
@pytest.mark.parametrize(("distribution", "prefetch"), [("uniform", 3), ("prioritized", 0)])
@pytest.mark.parametrize("view", [view for view in VIEWS if view not in ("transitions", "rollouts")])
def test_every_view_goes_on_as_if_nothing_had_happened(
    tmp_store: Path, view: str, distribution: str, prefetch: int
) -> None:
    check(tmp_store, view, distribution, prefetch)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("share", [{}, {"rank": 1, "world_size": 2}])
def test_rollouts_go_on_where_they_were(tmp_store: Path, prefetch: int, share: dict[str, int]) -> None:
    check(tmp_store, "rollouts", "uniform", prefetch, **share)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["prioritized", "recency", "by time", "mixture"])
def test_a_rank_goes_on_with_its_share(tmp_store: Path, distribution: str) -> None:
    check(tmp_store, "transitions", distribution, 2, rank=1, world_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("view", "prefetch", "distribution"),
    [
        *(("transitions", 3, distribution) for distribution in ("uniform", "by the store", "mixture")),
        ("transitions", 0, "recency"),
        *(("moved back", 0, distribution) for distribution in ("prioritized", "sweep")),
    ],
)
def test_while_old_steps_leave(tmp_store: Path, view: str, distribution: str, prefetch: int) -> None:
    check(tmp_store, view, distribution, prefetch, before=20, after=15, every=1, capacity=300)


def test_where_is_asked_again_and_answers_alike(tmp_store: Path) -> None:
    check(tmp_store, "transitions", "prioritized", 3, where=lambda episode: int(episode.ids[0]) % 5 != 3)


@pytest.mark.slow
def test_a_thousand_batches_are_the_same(tmp_store: Path) -> None:
    check(tmp_store, "transitions", "prioritized", 3, before=100, after=1000, every=20)


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_many_batches_are_the_same_while_old_steps_leave(tmp_store: Path, distribution: str) -> None:
    batches = whole_or_part(1000, 120)
    check(tmp_store, "transitions", distribution, 3, before=100, after=batches, every=2, capacity=500)


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("capacity", [300, 700])  # of the latter nothing is hidden when the states are saved
def test_many_episodes_are_sorted_at_the_same_batch(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    monkeypatch.setattr("diskreplay.distributions.population.SMALL", 3)
    monkeypatch.setattr("diskreplay.distributions.priorities.FIRST_PAGES", 1)
    check(tmp_store, "transitions", "prioritized", 2, before=30, after=20, every=1, capacity=capacity)


FRESH = """
import hashlib, sys
import diskreplay as dr
from diskreplay.sampling import prefetcher
from tests.sampling import test_sampler_states as t

prefetcher.LEAST_FOR_A_THREAD = 0  # as of `threads_make_all` here: else nothing is drawn ahead there
with dr.open(sys.argv[1]) as store:
    view, distribution = t.VIEWS[sys.argv[2]](), t.DISTRIBUTIONS[sys.argv[3]]()
    sampler = dr.Sampler(store, view, distribution, batch_size=16, prefetch=2, seed=7)
    sampler.load("run")
    print(t.digest(sampler, 50))
    sampler.close()
"""


def digest(sampler: Any, batches: int) -> str:
    """Return a checksum of the next batches, learning in between."""
    found = hashlib.sha256()
    for number in range(batches):
        batch = sampler.sample()
        found.update(repr(sorted(bits(batch).items())).encode())
        learn(sampler, batch, number)
    return found.hexdigest()


@pytest.mark.slow(turns=4)
def test_a_fresh_process_goes_on_too(tmp_store: Path) -> None:
    view, distribution = "hindsight", "prioritized"
    with collected(tmp_store, 100, capacity=300, segment_steps=90) as (store, collector):
        sampler = dr.Sampler(store, VIEWS[view](), DISTRIBUTIONS[distribution](), batch_size=16, prefetch=2, seed=5)
        compare([sampler], 20, lambda number: collector.grow(2 if number < 17 else 0), first=0)
        sampler.save("run")
        assert run_python(FRESH, tmp_store, view, distribution).strip() == digest(sampler, 50)


# --- a sweep that ends -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("saved_after", [0, 5, 14, 99])
def test_the_rest_of_a_sweep_is_given_once_and_then_its_end(tmp_store: Path, prefetch: int, saved_after: int) -> None:
    with collected(tmp_store, 25) as (store, collector):
        collector.close()

        def made() -> Any:
            view = dr.Transitions()
            return dr.Sampler(store, view, dr.Sweep(passes=2), batch_size=15, prefetch=prefetch, seed=0)

        one, ids = made(), []
        for batch in one:
            ids += batch.index.tolist()
            if len(ids) >= 15 * saved_after:
                break
        one.save("run")
        other = made()
        other.load("run")
        rest, others_rest = ([bits(batch) for batch in sampler] for sampler in (one, other))
        assert others_rest == rest
        for sampler in (one, other):
            with pytest.raises(StopIteration):
                sampler.sample()
        total = made()
        assert len(rest) + len(ids) // 15 + (len(ids) % 15 > 0) == len(list(total))


# --- priorities of several kinds, and such as are set aside ----------------------------------------------------------


def test_every_kind_of_id_keeps_its_priorities_through_a_save(tmp_store: Path) -> None:
    with collected(tmp_store, 120) as (store, collector):
        one = dr.Sampler(store, VIEWS["transitions"](), dr.Prioritized(), batch_size=16, seed=1, prefetch=2)
        for i, view in enumerate(("transitions", "sequences", "episodes", "moved back", "transitions", "sequences")):
            one.view = VIEWS[view]()
            compare([one], 10, lambda _: collector.grow(2), first=100 * i)
        one.save("run")
        with dr.open(tmp_store) as second:
            other = dr.Sampler(second, VIEWS["sequences"](), dr.Prioritized(), batch_size=16, seed=2, prefetch=2)
            other.load("run")
            for i, view in enumerate(("sequences", "transitions", "moved back", "episodes", "sequences")):
                one.view, other.view = VIEWS[view](), VIEWS[view]()
                compare([one, other], 10, lambda _: collector.grow(2), first=1000 + 100 * i)
            other.close()


def test_priorities_that_are_set_aside_are_saved_and_updated(tmp_store: Path) -> None:
    with collected(tmp_store, 60) as (store, collector):
        one = dr.Sampler(store, VIEWS["transitions"](), dr.Prioritized(alpha=0.9), batch_size=16, seed=1)
        compare([one], 20, first=0)
        one.distribution = dr.Uniform()
        batch = one.sample()
        one.update_priorities(batch.index, np.full(16, 5.0))
        collector.grow(5)
        one.save("run")
        with dr.open(tmp_store) as second:
            other = dr.Sampler(second, VIEWS["transitions"](), dr.Uniform(), batch_size=16, seed=2)
            other.load("run")
            compare([one, other], 5, lambda _: collector.grow(3))
            for sampler in (one, other):
                assert sampler.update_priorities(batch.index, np.arange(16.0)) == 0
                sampler.distribution = dr.Prioritized(alpha=0.5, beta=1.0)
            compare([one, other], 20, lambda _: collector.grow(1))
            # Loading a state without any takes those away that the sampler had.
            plain = dr.Sampler(store, VIEWS["transitions"](), dr.Uniform(), batch_size=16, seed=3)
            plain.sample()
            other.distribution = dr.Uniform()
            other.load_state_dict(plain.state_dict())
            with pytest.raises(ValueError, match="has no priorities"):
                other.update_priorities(batch.index, np.ones(16))
            other.close()


def test_positions_of_rollouts_of_several_views_are_kept(tmp_store: Path) -> None:
    with collected(tmp_store, 60) as (store, _):
        one = dr.Sampler(store, rollouts(4), seed=0)
        one.sample()
        one.view = rollouts(7)
        one.sample()
        one.save("run")
        other = dr.Sampler(store, rollouts(7), seed=0)
        other.load("run")
        compare([one, other], 2)
        one.view, other.view = rollouts(4), rollouts(4)
        compare([one, other], 2)
        again = through_torch(other.state_dict())
        other.view = rollouts(4)
        other.load_state_dict(again)
        compare([one, other], 2)
        one.view, other.view = rollouts(7), rollouts(7)
        compare([one, other], 2)


def test_a_state_that_was_loaded_is_saved_again_alike(tmp_store: Path) -> None:
    with collected(tmp_store, 60) as (store, _):
        one = dr.Sampler(store, VIEWS["hindsight"](), DISTRIBUTIONS["prioritized"](), batch_size=16, seed=1, prefetch=3)
        compare([one], 10, first=0)
        state = one.state_dict()
        other = dr.Sampler(
            store, VIEWS["hindsight"](), DISTRIBUTIONS["prioritized"](), batch_size=16, seed=2, prefetch=3
        )
        other.load_state_dict(state)
        assert listed(other.state_dict()) == listed(state)


def test_a_state_of_another_store_is_refused_and_changes_nothing(tmp_store: Path) -> None:
    with collected(tmp_store, 60) as (store, _), collected(tmp_store.with_name("other"), 60) as (foreign, _):
        one, other = (dr.Sampler(x, dr.Transitions(), batch_size=4, seed=0) for x in (store, foreign))
        before = listed(other.state_dict())
        with pytest.raises(ValueError, match=f"a state of another store .*{store.uuid}.*{foreign.uuid}"):
            other.load_state_dict(through_torch(one.state_dict()))
        assert listed(other.state_dict()) == before
        without = {key: value for key, value in one.state_dict().items() if key != "store"}
        other.load_state_dict(without)  # one of a release that did not note it


def listed(state: Any) -> Any:
    """A state with lists in place of tensors."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: listed(value) for key, value in state.items()}
    return [listed(value) for value in state] if isinstance(state, list) else state


def test_what_was_loaded_from_may_change_afterwards(tmp_store: Path) -> None:
    def spoil(tree: Any) -> None:
        for value in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, dict | list):
                spoil(value)

    with collected(tmp_store, 60) as (store, collector):
        samplers = []
        for distribution in ("prioritized", "mixture", "sweep"):
            made = [
                dr.Sampler(
                    store, VIEWS["transitions"](), DISTRIBUTIONS[distribution](), batch_size=16, seed=i, prefetch=2
                )
                for i in range(2)
            ]
            compare(made[:1], 10, first=0)
            state = made[0].state_dict()
            made[1].load_state_dict(state)
            spoil(state)
            samplers.append(made)
        for made in samplers:
            compare(made, 10, lambda _: collector.grow(1))


# --- what was drawn ahead --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_batches_drawn_ahead_those_that_lost_ids_are_drawn_again(tmp_store: Path) -> None:
    for view in ("transitions", "sequences", "rollouts"):
        with collected(tmp_store / view, 60, capacity=240, segment_steps=90) as (store, collector):
            one = dr.Sampler(store, VIEWS[view](), batch_size=16, seed=0, prefetch=3)
            one.sample()
            one.save("run")
            collector.grow(90)
            other = dr.Sampler(store, VIEWS[view](), batch_size=16, seed=0, prefetch=3)
            other.load("run")
            visible = np.concatenate([episode.ids for episode in store.episodes])
            for _ in range(5):
                assert np.isin(other.sample().index.numpy(), visible).all()


def test_a_state_with_relabelled_batches_ahead_is_loaded_without_relabelling_and_back(tmp_store: Path) -> None:
    with collected(tmp_store, 60) as (store, _):
        views = dr.Transitions(n_step=2), VIEWS["hindsight"]()
        for one, other in (views, views[::-1]):
            first = dr.Sampler(store, one, batch_size=16, seed=0, prefetch=3)
            first.sample()
            second = dr.Sampler(store, other, batch_size=64, seed=0, prefetch=3)
            state = first.state_dict()
            state["batch_size"] = 64
            second.load_state_dict(state)
            batch = second.sample()
            stored = second.gather(batch.index)
            same = bits(batch)["/obs/desired_goal"] == bits(stored)["/obs/desired_goal"]
            assert same == (other is views[0])


# --- refusals --------------------------------------------------------------------------------------------------------


def broken(state: dict[str, Any]) -> Iterator[Any]:
    """Whatever is no state: rubbish, and a good state with one thing wrong."""
    yield from (
        None,
        3,
        "state",
        [],
        {},
        {"version": 1},
        {"version": 1, "planner": None},
        {"planner": {}, "version": 1},
    )
    for path, value in [
        (("version",), 2), (("version",), "1"), (("batch_size",), 15), (("batches",), -1), (("steps",), "many"),
        (("paid",), None), (("batches",), float("inf")), (("planner",), []), (("planner", "rng"), "{}"),
        (("planner", "rng"), "no json"), (("planner", "rng"), 5), (("planner", "order"), None),
        (("planner", "order", "runs"), torch.zeros(3, 1)), (("planner", "order", "runs"), {}),
        (("planner", "order", "regions"), [0, "x", 1]), (("planner", "order", "regions"), [2, 3]),
        (("planner", "plans"), {}),
        (("planner", "plans"), [3]), (("planner", "plans", 0, "ids"), torch.zeros(4, 4)),
        (("planner", "plans", 1, "chances"), torch.zeros(3)), (("planner", "plans", 2, "entropy"), "x"),
        (("planner", "plans", 0, "size"), float("nan")), (("planner", "cursors"), None),
        (("planner", "cursors"), {"[4]": {}}), (("planner", "cursors"), {"[4]": {"lanes": [[1]], "next_ids": [[1]]}}),
        (("planner", "priorities"), {}), (("planner", "priorities"), {"arguments": {"alpha": -1}, "state": {}}),
        (("planner", "priorities"), {"arguments": {}, "state": []}), (("planner", "kind"), '["episodes"]'),
        (("planner", "distribution"), "Other"), (("planner", "state"), None), (("planner", "state"), {"x": {}}),
        (("planner", "state"), {'["transitions"]': 3}), (("planner", "state"), {'["transitions"]': {"first": 2**70}}),
        (("planner", "state"), {"0": {"finished": 0}, "2": {"x": {}}}), (("planner", "state"), {"[[1]]": {}}),
        (("planner", "state"), {"finished": 0, "first": [1], "stride": [1]}), (("planner", "state"), {"finished": "x"}),
    ]:  # fmt: skip
        spoilt = copy.deepcopy(state)
        below = spoilt
        for key in path[:-1]:
            below = below[key]
        assert path[-1] in below if isinstance(below, dict) else path[-1] < len(below)
        below[path[-1]] = value
        yield spoilt


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["prioritized", "sweep", "mixture"])
def test_what_is_no_state_is_refused_and_changes_nothing(tmp_store: Path, distribution: str) -> None:
    with collected(tmp_store, 60) as (store, collector):
        one, other = (
            dr.Sampler(store, VIEWS["transitions"](), DISTRIBUTIONS[distribution](), batch_size=16, seed=0, prefetch=3)
            for _ in range(2)
        )
        compare([one, other], 9, lambda _: collector.grow(2))  # with which three are left that were drawn ahead
        states = list(broken(one.state_dict()))
        for number, bad in enumerate(states):
            with pytest.raises(ValueError, match="state"):
                other.load_state_dict(bad)
            compare([one, other], 1, lambda _: collector.grow(1), first=2000 + number)
        assert len(states) > 40


def test_a_state_of_another_sort_of_sampler_is_refused_and_changes_nothing(tmp_store: Path) -> None:
    def made(view: Any, distribution: Any, **kwargs: Any) -> Any:
        return dr.Sampler(store, view, distribution, **{"batch_size": 16, "seed": 0, "prefetch": 2} | kwargs)

    with collected(tmp_store, 100) as (store, _):
        one, other = (made(VIEWS["sequences"](), dr.Prioritized()) for _ in range(2))
        compare([one, other], 5)
        for sampler, message in [
            (made(VIEWS["sequences"](), dr.Uniform()), r"state of Uniform over Sequences.* has Prioritized\("),
            (made(VIEWS["transitions"](), dr.Prioritized()), r"state of Prioritized over Transitions.* over Sequences"),
            (made(VIEWS["moved back"](), dr.Prioritized()), "set that distribution and view first"),
            (made(VIEWS["episodes"](), dr.Prioritized()), "set that distribution and view first"),
            (made(VIEWS["rollouts"](), None), "set that distribution and view first"),
            (made(VIEWS["sequences"](), dr.Prioritized(), batch_size=8), "with batch_size=8, and the sampler's is 16"),
        ]:
            sampler.sample()
            sampler.save("other")
            for load in (lambda: other.load("other"), lambda s=sampler: other.load_state_dict(s.state_dict())):
                with pytest.raises(ValueError, match=message):
                    load()
                compare([one, other], 1)
        four = made(rollouts(4), None)
        for num_steps in (2, 8):
            with pytest.raises(ValueError, match="set that distribution and view first"):
                made(rollouts(num_steps), None).load_state_dict(four.state_dict())


def test_a_state_of_another_batch_size_is_taken_where_nothing_was_drawn_ahead(tmp_store: Path) -> None:
    with collected(tmp_store, 60) as (store, _):
        one, other = (dr.Sampler(store, dr.Transitions(), batch_size=n, seed=0) for n in (8, 16))
        one.sample()
        other.load_state_dict(one.state_dict())
        assert bits(other.sample(8)) == bits(one.sample(8))


def test_a_predicate_that_raises_while_loading_changes_nothing(tmp_store: Path) -> None:
    with collected(tmp_store, 60) as (store, collector):
        fails: list[bool] = []

        def where(episode: Any) -> bool:
            if fails:
                raise RuntimeError("not now")
            return True

        one = dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=16, seed=0, prefetch=2)
        other, third = (
            dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=16, seed=9, prefetch=2, where=where)
            for _ in range(2)
        )
        compare([one], 5)
        compare([other, third], 5)
        fails.append(True)
        with pytest.raises(RuntimeError, match="not now"):
            other.load_state_dict(one.state_dict())
        fails.clear()
        compare([other, third], 5, lambda _: collector.grow(2))
        other.load_state_dict(one.state_dict())
        compare([one, other], 5, lambda _: collector.grow(2))


def test_names_and_modes_that_do_not_fit_are_refused(tmp_store: Path) -> None:
    with collected(tmp_store, 20) as (store, _):
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=4, seed=0)
        sampler.save("b")
        sampler.save("a.b-C_1")
        for name in ("..", ".", "", "a/b", "a\0", "zarr.json", "x" * 101, "ä", None, 3, "-x", "a\n"):
            with pytest.raises(ValueError, match="^a name is 1 to 100 letters, digits, dots, "):
                sampler.save(name)
            with pytest.raises(dr.StoreNotFound, match=r"has no sampler state named .*; it has a\.b-C_1, b$"):
                sampler.load(name)
        with pytest.raises(dr.StoreNotFound, match="has no sampler state named 'c'; it has a.b-C_1, b$"):
            sampler.load("c")
        with dr.open(tmp_store) as reader:
            other = dr.Sampler(reader, dr.Transitions(), batch_size=4, seed=0)
            with pytest.raises(dr.ReadOnlyError, match='open it with mode "a" to save'):
                other.save("b")
            other.load("b")
            other.close()
        assert store.verify(deep=True) == []
        sampler.close()
        for call in (sampler.state_dict, lambda: sampler.save("b"), lambda: sampler.load("b")):
            with pytest.raises(dr.Closed, match="this sampler is closed"):
                call()
