"""Hindsight equals the rule as it is written down, step by step, in what may come out and in how often it does."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chi2_contingency, chisquare

import diskreplay as dr
from diskreplay.testing.model import ModelEpisode
from tests.views.fakes import FLAT_SCHEMA, Segment, Snapshot, check_every_id, episode, fill, offered
from tests.views.strategies import snapshots

GOAL = dr.Field((2,), "float32")
SCHEMA = dr.Schema(
    obs={"observation": dr.Field((3,), "float32"), "achieved_goal": GOAL, "desired_goal": GOAL},
    action=dr.Field((), "int64"),
    extra={"bonus": dr.Field((), "float64"), "count": dr.Field((), "int32")},
)
STRATEGIES = ("future", "final", "episode")
REWARDS = (None, {"bonus": -0.5, "reward": 2.0, "count": 0.25}, {"bonus": 1.0})
GOALS = (("obs", "desired_goal"), ("next_obs", "desired_goal"))
REWARD, WEIGHT = ("reward",), ("weight",)


def distance(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    """A reward that tells the two goals apart."""
    return np.abs(2 * achieved.astype(np.float64) - desired).sum(-1)


def reached(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    """Tell for some pairs of goals that the first one reaches the second."""
    return np.abs(2 * achieved.astype(np.float64) - desired).sum(-1) % 3 < 1


def filled(
    view: dr.Transitions, snapshot: Snapshot, ids: Any, entropy: int | None = 0, fields: Any = None
) -> dict[tuple[str, ...], np.ndarray]:
    reader = view.reader(snapshot.schema, fields)
    reader.seed(entropy)
    return by_path(reader, snapshot, ids)


def by_path(reader: Any, snapshot: Snapshot, ids: Any) -> dict[tuple[str, ...], np.ndarray]:
    arrays = fill(reader, snapshot, ids).arrays
    return {leaf.path: array for leaf, array in zip(reader.leaves, arrays, strict=True) if leaf.path != WEIGHT}


def goal_rows(model: ModelEpisode, t: int, k: int, strategy: str) -> list[int]:
    """List the observations whose achieved goal may become that of the window of k steps from t on."""
    last = model.num_frames - 1
    if t + k > last:
        return []
    first = {"future": t + 1, "final": last, "episode": 1}[strategy]
    return list(range(first, last + 1))


def achieved(model: ModelEpisode, row: int) -> np.ndarray:
    return model.frame(row)["obs/achieved_goal"]


def plain(view: dr.Transitions, snapshot: Snapshot, ids: Any) -> dict[tuple[str, ...], np.ndarray]:
    """Gather with the same view, but without relabelling."""
    return by_path(replace(view, relabel=None).reader(snapshot.schema), snapshot, ids)


def return_of(view: dr.Transitions, model: ModelEpisode, t: int, k: int, goal: np.ndarray) -> float:
    """Sum the rewards of k steps under a goal, one after the other."""
    total, power = 0.0, 1.0
    for i in range(k):
        step = model.steps[t + i]
        values = {**step.extra, "reward": distance(achieved(model, t + i + 1), goal)}
        total += power * sum(weight * values[name] for name, weight in (view.reward or {"reward": 1.0}).items())
        power *= view.gamma * (step.extra[view.discount] if view.discount else 1.0)
    return total


@pytest.mark.slow
@given(
    snapshots(SCHEMA),
    st.sampled_from(STRATEGIES),
    st.sampled_from((1, 2, 3, 20, None)),
    st.sampled_from((1, 3, {"desired_goal": 2}, {"observation": 4, "achieved_goal": 2})),
    st.sampled_from(REWARDS),
    st.sampled_from((0.0, 0.9, 1.0)),
    st.sampled_from((None, "bonus")),
    st.sampled_from((None, reached)),
    st.integers(0, 2**63 - 1),
)
def test_goals_and_returns_equal_the_rule_and_nothing_else_changes(
    snapshot: Snapshot, strategy: str, n: Any, stack: Any, reward: Any, gamma: float, discount: Any, ends: Any,
    entropy: int,
) -> None:  # fmt: skip
    relabel = dr.Hindsight(strategy, 1.0, distance, terminated_fn=ends)
    view = dr.Transitions(n, gamma, stack, reward, relabel=relabel, discount=discount)
    ids = sorted(snapshot.sampleable(None))
    batch, want = filled(view, snapshot, ids, entropy), plain(view, snapshot, ids)
    for i, step_id in enumerate(ids):
        model, t = snapshot.model[step_id]
        k = int(want["n_steps",][i])
        rows = goal_rows(model, t, k, strategy)
        desired = batch["obs", "desired_goal"][i].reshape(-1, 2)[-1]
        row = [row for row in rows if (achieved(model, row) == desired).all()]
        assert len(row) == bool(rows)
        if row:
            want["obs", "desired_goal"][i] = want["next_obs", "desired_goal"][i] = achieved(model, row[0])
            goal, taken = achieved(model, row[0]), k
            if ends is not None:
                last = next((j for j in range(k) if ends(achieved(model, t + j + 1), goal)), None)
                bootstraps = last is None
                taken = k if last is None else last + 1
                factors = [step.extra[discount] if discount else 1.0 for step in model.steps[t : t + k]]
                want["terminated",][i] = not bootstraps
                want["discount",][i] = gamma**k * np.prod(factors) if bootstraps else 0.0
            want[REWARD][i] = return_of(view, model, t, taken, goal)
    for path in (REWARD, ("discount",)):
        np.testing.assert_allclose(batch.pop(path), want.pop(path), rtol=1e-5, atol=1e-5)
    assert batch.keys() == want.keys()
    for path, array in want.items():
        np.testing.assert_array_equal(batch[path], array)


@pytest.mark.slow
@settings(max_examples=40)
@given(snapshots(SCHEMA), st.sampled_from(STRATEGIES), st.sampled_from((1, 3, None)), st.booleans())
def test_without_a_seed_and_with_ratio_0_a_batch_is_what_is_stored(
    snapshot: Snapshot, strategy: str, n: Any, seeded: bool
) -> None:
    ids = sorted(snapshot.sampleable(None))
    relabel = dr.Hindsight(strategy, 0.0 if seeded else 1.0, distance)
    batch = filled(dr.Transitions(n, relabel=relabel), snapshot, ids, entropy=1 if seeded else None)
    for path, array in plain(dr.Transitions(n), snapshot, ids).items():
        np.testing.assert_array_equal(batch[path], array)


@pytest.mark.slow
@settings(max_examples=40)
@given(snapshots(SCHEMA), st.sampled_from((1, 3, None)), st.booleans())
def test_the_steps_of_ended_episodes_are_offered_and_no_others(snapshot: Snapshot, n: Any, whole: bool) -> None:
    view = dr.Transitions(n, next_fields=("action",) if whole else (), relabel=dr.Hindsight(reward_fn=distance))
    want = snapshot.sampleable(None)
    assert sorted(offered(view, snapshot)) == sorted(want)
    check_every_id(view, snapshot, want, snapshot.model)


def ended(steps: int = 6, end: str = "terminated", final: bool = True, **kwargs: Any) -> Snapshot:
    """One episode between two others, in a lane beside another one."""
    rng = np.random.default_rng(5)
    around = [episode(SCHEMA, 3, "terminated", True, rng) for _ in range(4)]
    lanes = [[around[0], episode(SCHEMA, steps, end, final, rng), around[1]], around[2:]]
    return Snapshot(SCHEMA, [Segment(lanes)], **kwargs)


def ids_of(snapshot: Snapshot, steps: int) -> list[int]:
    """The ids of the episode that has so many steps."""
    return sorted(i for i, (model, _) in snapshot.model.items() if len(model.steps) == steps)


def rows_of(batch: dict[tuple[str, ...], np.ndarray], snapshot: Snapshot) -> list[int]:
    """The row of its episode whose achieved goal each item has; -1 where it has its own desired goal."""
    models = {step_id: snapshot.model[step_id][0] for step_id in np.unique(batch["index",]).tolist()}
    rows = {
        (step_id, achieved(model, row).tobytes()): row
        for step_id, model in models.items()
        for row in range(model.num_frames)
    }
    goals = batch["obs", "desired_goal"]
    return [
        rows.get((step_id, goal.tobytes()), -1) for step_id, goal in zip(batch["index",].tolist(), goals, strict=True)
    ]


CASES = [
    ("terminated", True, 0),
    ("terminated", False, 0),
    ("truncated", True, 2),
    ("truncated", False, 0),
    ("cut", False, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("end", "final", "hidden"), CASES)
def test_every_goal_that_the_rule_allows_is_as_frequent_as_the_others(
    strategy: str, end: str, final: bool, hidden: int
) -> None:
    snapshot = ended(7, end, final)
    snapshot = ended(7, end, final, frontier=ids_of(snapshot, 7)[hidden])
    model, _ = snapshot.model[ids_of(snapshot, 7)[0]]
    view = dr.Transitions(relabel=dr.Hindsight(strategy, 1.0, distance))
    draws = 2000
    for t in model.sampleable(None):
        allowed = goal_rows(model, t, 1, strategy) or [-1]
        counts = Counter(rows_of(filled(view, snapshot, [ids_of(snapshot, 7)[t]] * draws, entropy=t), snapshot))
        assert sorted(counts) == allowed
        if len(allowed) > 1:
            assert chisquare([counts[row] for row in allowed]).pvalue > 1e-4


def test_items_are_relabelled_with_the_probability_of_the_ratio() -> None:
    snapshot = ended()
    ids = ids_of(snapshot, 6) * 2000
    for ratio in (0.2, 0.8):
        batch = filled(dr.Transitions(relabel=dr.Hindsight("future", ratio, distance)), snapshot, ids, entropy=3)
        relabelled = np.array(rows_of(batch, snapshot)).reshape(-1, 6) >= 0
        counts = relabelled.sum(0)
        assert chi2_contingency([counts, 2000 - counts]).pvalue > 1e-4
        total = int(counts.sum())
        assert chisquare([total, len(ids) - total], [ratio * len(ids), (1 - ratio) * len(ids)]).pvalue > 1e-4
        # That an item is relabelled says nothing about its neighbour.
        pairs = np.bincount(2 * relabelled[:, 0] + relabelled[:, 1], minlength=4).reshape(2, 2)
        assert chi2_contingency(pairs).pvalue > 1e-4


def test_the_reward_function_is_called_once_for_all_steps_of_all_relabelled_items() -> None:
    snapshot = ended(6, "terminated", False)
    calls: list[tuple[np.ndarray, np.ndarray]] = []

    def reward_fn(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        calls.append((achieved.copy(), desired.copy()))
        achieved[:], desired[:] = 7, 8  # its arrays are its own
        return np.zeros(len(achieved))

    view = dr.Transitions(3, relabel=dr.Hindsight("final", 1.0, reward_fn))
    ids = ids_of(snapshot, 6)
    batch = filled(view, snapshot, ids)
    ((got, wanted),) = calls
    model, _ = snapshot.model[ids[0]]
    # The windows from steps 3, 4 and 5 on reach the end, whose observation is not known.
    np.testing.assert_array_equal(got, [achieved(model, t + i + 1) for t in range(3) for i in range(3)])
    np.testing.assert_array_equal(wanted, [achieved(model, 5)] * 9)
    assert got.dtype == wanted.dtype == np.float32
    np.testing.assert_array_equal(batch["obs", "desired_goal"][:3], [achieved(model, 5)] * 3)
    assert batch[REWARD].tolist()[:3] == [0, 0, 0]
    calls.clear()
    filled(view, snapshot, ids[3:])
    assert not calls


def test_a_reward_that_is_not_summed_is_not_computed() -> None:
    def reward_fn(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        raise AssertionError("nobody wants it")

    snapshot = ended()
    relabel = dr.Hindsight("future", 1.0, reward_fn)
    batch = filled(dr.Transitions(reward={"bonus": 1.0}, relabel=relabel), snapshot, ids_of(snapshot, 6))
    assert min(rows_of(batch, snapshot)) >= 1
    batch = filled(dr.Transitions(relabel=relabel), snapshot, ids_of(snapshot, 6), fields=("obs",))
    assert min(rows_of(batch, snapshot)) >= 1


@pytest.mark.parametrize("n", [1, 3, None])
@pytest.mark.parametrize("name", ["reward", "obs", "obs/desired_goal", "next_obs", "action", "n_steps", "discount"])
def test_chosen_fields_hold_what_the_whole_batch_holds(name: str, n: Any) -> None:
    snapshot = ended()
    view = dr.Transitions(n, frame_stack=2, relabel=dr.Hindsight("episode", 0.5, distance))
    ids = ids_of(snapshot, 6) * 3
    whole, part = filled(view, snapshot, ids), filled(view, snapshot, ids, fields=(name,))
    assert {path[: len(name.split("/"))] for path in part} == {tuple(name.split("/")), ("index",)} - {()} or len(
        part
    ) > 1
    for path, array in part.items():
        np.testing.assert_array_equal(array, whole[path])


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "bool", "uint8"])
def test_goals_of_every_dtype_and_without_an_axis_are_relabelled(dtype: str) -> None:
    goal = dr.Field((), dtype)
    schema = dr.Schema(
        obs={"observation": {"a": GOAL, "b": GOAL}, "achieved_goal": goal, "desired_goal": goal, "clock": GOAL},
        action=dr.Field((), "int64"), reward=dr.Field((), "float64"),
    )  # fmt: skip
    snapshot = Snapshot(schema, [Segment([[episode(schema, 5, "terminated", True, np.random.default_rng(0))]])])

    def reward_fn(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        assert achieved.dtype == desired.dtype == dtype
        assert achieved.shape == desired.shape == (10,)
        return achieved == desired

    batch = filled(
        dr.Transitions(None, 1.0, 2, relabel=dr.Hindsight("final", 1.0, reward_fn)),
        snapshot,
        sorted(snapshot.model)[1:],
    )
    model = snapshot.model[min(snapshot.model)][0]
    assert model.final is not None
    goals = [achieved(model, row) for row in range(6)]
    for path in GOALS:
        np.testing.assert_array_equal(batch[path], np.full((4, 2), goals[5]))
    np.testing.assert_array_equal(
        batch[REWARD], [sum(goals[j] == goals[5] for j in range(t + 1, 6)) for t in range(1, 5)]
    )


def with_info(achieved: np.ndarray, desired: np.ndarray, info: dict[str, Any]) -> np.ndarray:
    assert info == {}
    return distance(achieved, desired)


def with_default(achieved: np.ndarray, desired: np.ndarray, scale: float = 1.0) -> np.ndarray:
    return scale * distance(achieved, desired)


class Env:
    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        return with_info(achieved_goal, desired_goal, info)


class Task:
    def __call__(self, achieved_goal: np.ndarray, desired_goal: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(distance(achieved_goal, desired_goal))


@pytest.mark.parametrize(
    "reward_fn",
    [
        with_info,
        with_default,
        Env().compute_reward,
        Task(),
        lambda *goals: distance(*goals),
        partial(with_info, info={}),
    ],
)
def test_a_reward_function_gets_as_many_arguments_as_it_needs(reward_fn: Callable[..., Any]) -> None:
    snapshot = ended()
    ids = ids_of(snapshot, 6)
    want = filled(dr.Transitions(3, relabel=dr.Hindsight(reward_fn=distance)), snapshot, ids)
    got = filled(dr.Transitions(3, relabel=dr.Hindsight(reward_fn=reward_fn)), snapshot, ids)
    for path, array in want.items():
        np.testing.assert_array_equal(got[path], array)


def test_a_reward_function_without_a_signature_gets_two_goals() -> None:
    class Odd:
        __signature__ = "none"  # what inspect.signature refuses

        def __call__(self, *goals: np.ndarray) -> float:
            assert len(goals) == 2
            return 1.5

    snapshot = ended()
    batch = filled(dr.Transitions(relabel=dr.Hindsight("final", 1.0, Odd())), snapshot, ids_of(snapshot, 6))
    assert batch[REWARD].tolist() == [1.5] * 6


WANTED = "reward_fn must return one finite number for each of the 6 given steps"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.zeros((6, 1)), f"{WANTED}, shape (6,), not an array of shape (6, 1)"),
        (np.zeros(5), f"{WANTED}, shape (6,), not an array of shape (5,)"),
        ([[0], [1, 2]], f"{WANTED}, not list: a ragged list"),
        (None, f"{WANTED}, not NoneType of dtype object"),
        (["a"] * 6, f"{WANTED}, not list of dtype <U1"),
        (np.zeros(6, complex), f"{WANTED}, not ndarray of dtype complex128"),
        ([0, np.nan, 0, 0, np.inf, 0], f"{WANTED}, and returned nan for 2 of them"),
    ],
)
def test_rewards_that_are_no_finite_numbers_are_refused(returned: Any, message: str) -> None:
    snapshot = ended()
    view = dr.Transitions(relabel=dr.Hindsight("future", 1.0, lambda achieved, desired: returned))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        filled(view, snapshot, ids_of(snapshot, 6))


def only_one(achieved: np.ndarray) -> None: ...


def four(achieved: np.ndarray, desired: np.ndarray, info: Any, more: Any) -> None: ...


def keyword(achieved: np.ndarray, desired: np.ndarray, *, info: Any) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "past"}, 'strategy must be "future", "final" or "episode", not \'past\''),
        ({"strategy": ["final"]}, 'strategy must be "future", "final" or "episode", not [\'final\']'),
        ({"ratio": 1.2}, "ratio must be a number from 0 to 1, not 1.2"),
        ({"ratio": True}, "ratio must be a number from 0 to 1, not True"),
        ({"ratio": float("nan")}, "ratio must be a number from 0 to 1, not nan"),
        ({"reward_fn": None}, "reward_fn must be a function of (achieved_goal, desired_goal), not None"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Hindsight(**{"reward_fn": distance, **arguments})


@pytest.mark.parametrize("reward_fn", [only_one, four, keyword])
def test_a_reward_function_of_other_arguments_is_refused(reward_fn: Callable[..., Any]) -> None:
    message = (
        r"reward_fn must take \(achieved_goal, desired_goal\), or these and info, and <function .* takes \(achieved"
    )
    with pytest.raises(ValueError, match=f"^{message}"):
        dr.Hindsight(reward_fn=reward_fn)


def test_relabel_takes_a_hindsight_and_nothing_else() -> None:
    with pytest.raises(ValueError, match=r"^relabel must be None or Hindsight\(\.\.\.\), not 'future'$"):
        dr.Transitions(relabel="future")


def goal_schema(**obs: Any) -> dr.Schema:
    return dr.Schema(obs=obs, action=dr.Field((), "int64"))


NEEDS = 'relabel needs observations that are a dict with "observation", "achieved_goal" and "desired_goal"'


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (FLAT_SCHEMA, f"{NEEDS}; the observation of this store is one array"),
        (
            goal_schema(observation=GOAL, desired_goal=GOAL),
            f"{NEEDS}; this store has no 'achieved_goal', but 'observation', 'desired_goal'",
        ),
        (
            goal_schema(inner={"observation": GOAL, "achieved_goal": GOAL, "desired_goal": GOAL}),
            f"{NEEDS}; this store has no 'observation', but 'inner'",
        ),
        (
            goal_schema(observation=GOAL, achieved_goal={"x": GOAL}, desired_goal={"x": GOAL}),
            "relabel needs goals that are one array each; 'achieved_goal' of this store is nested",
        ),
        (
            goal_schema(observation=GOAL, achieved_goal=dr.Field((2,), "float64"), desired_goal=GOAL),
            "relabel needs goals of one dtype and shape; in this store achieved_goal is float64[2] and desired_goal "
            "float32[2]",
        ),
        (
            goal_schema(observation=GOAL, achieved_goal=dr.Field((), "float32"), desired_goal=GOAL),
            "relabel needs goals of one dtype and shape; in this store achieved_goal is float32[] and desired_goal "
            "float32[2]",
        ),
    ],
)
def test_observations_that_are_not_goal_conditioned_are_refused(schema: dr.Schema, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Transitions(relabel=dr.Hindsight(reward_fn=distance)).reader(schema)


def test_hindsights_are_equal_by_their_arguments_and_print_short() -> None:
    assert dr.Hindsight(reward_fn=distance) == dr.Hindsight("future", 0.8, distance)
    assert dr.Hindsight("final", reward_fn=distance) != dr.Hindsight("future", 0.8, distance)
    assert repr(dr.Hindsight(reward_fn=distance)) == "Hindsight(strategy='future', ratio=0.8, reward_fn=distance)"
    assert repr(dr.Hindsight(reward_fn=Task())) == "Hindsight(strategy='future', ratio=0.8, reward_fn=Task)"
    assert repr(dr.Hindsight(reward_fn=distance, terminated_fn=reached)).endswith(", terminated_fn=reached)")
    assert repr(dr.Transitions(relabel=dr.Hindsight(reward_fn=distance))).endswith(
        "relabel=" + repr(dr.Hindsight(reward_fn=distance)) + ")"
    )


# On a store: every observation's achieved goal is its serial number, and what is desired is -1.
SERIAL = dr.Field((1,), "float32")
LENGTHS = (3, 4, 5, 1)


def steps() -> Iterator[tuple[dict[str, np.ndarray], int, dict[str, np.ndarray], bool, bool]]:
    """Yield obs, serial, next_obs, terminated and truncated of four episodes."""
    serial = 0
    for number, length in enumerate(LENGTHS):
        for t in range(length):
            yield (
                observation(serial),
                serial,
                observation(serial + 1),
                *(t == length - 1 and number % 2 == i for i in (0, 1)),
            )
            serial += 1
        serial += 1


def observation(serial: int) -> dict[str, np.ndarray]:
    value = np.array([serial], np.float32)
    return {"observation": value, "achieved_goal": value, "desired_goal": np.array([-1], np.float32)}


def sparse(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return -(np.abs(achieved - desired)[:, 0] > 1).astype(np.float32)


@pytest.fixture
def goal_store(tmp_store: Path) -> Iterator[dr.Store]:
    schema = goal_schema(observation=SERIAL, achieved_goal=SERIAL, desired_goal=SERIAL)
    with dr.create(tmp_store, schema) as store:
        with store.writer() as writer:
            for obs, serial, next_obs, terminated, truncated in steps():
                writer.append(obs, serial, -5.0, terminated, truncated, next_obs=next_obs)
        store.refresh()
        yield store


Outcome = tuple[int, int, float, bool]  # the step, its goal, its reward, whether it terminated


def outcomes(observations: Any, rewards: Any, terminated: Any) -> Counter[Outcome]:
    columns = (observations["observation"], observations["desired_goal"], rewards, terminated)
    lists = [np.asarray(column).reshape(-1).tolist() for column in columns]
    return Counter((int(s), int(g), float(r), bool(d)) for s, g, r, d in zip(*lists, strict=True))


def by_the_rule(strategy: str, draws: int, rng: np.random.Generator) -> Counter[Outcome]:
    """Draw n = 1 transitions as the paper does, one after the other in plain Python."""
    table = list(steps())
    ends = [number for number, step in enumerate(table) if step[3] or step[4]]
    found: Counter[Outcome] = Counter()
    for _ in range(draws):
        at = int(rng.integers(len(table)))
        obs, serial, next_obs, terminated, _ = table[at]
        first = max((end + 1 for end in ends if end < at), default=0)
        last = min(end for end in ends if end >= at)
        goal, reward = obs["desired_goal"], -5.0
        if rng.random() < 0.8:
            low = {"future": at, "final": last, "episode": first}[strategy]
            goal = table[int(rng.integers(low, last + 1))][2]["achieved_goal"]
            reward = float(sparse(next_obs["achieved_goal"][None], goal[None])[0])
        found[serial, int(goal[0]), reward, terminated] += 1
    return found


def by_the_sampler(store: dr.Store, strategy: str, draws: int) -> Counter[Outcome]:
    view = dr.Transitions(relabel=dr.Hindsight(strategy, 0.8, sparse))
    with dr.Sampler(store, view, batch_size=draws, seed=1) as sampler:
        batch = sampler.sample()
    assert torch.equal(batch.obs["desired_goal"], batch.next_obs["desired_goal"])
    assert torch.equal(batch.next_obs["observation"], batch.obs["observation"] + 1)
    return outcomes(batch.obs, batch.reward, batch.terminated)


def alike(one: Counter[Outcome], other: Counter[Outcome]) -> bool:
    assert one.keys() == other.keys()
    return bool(chi2_contingency([[count[key] for key in sorted(one)] for count in (one, other)]).pvalue > 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_step_transitions_are_those_of_the_paper_in_distribution(goal_store: dr.Store, strategy: str) -> None:
    assert alike(by_the_sampler(goal_store, strategy, 20_000), by_the_rule(strategy, 20_000, np.random.default_rng(2)))


class GoalEnv(gym.Env):
    """What stable-baselines3 needs to compute rewards."""

    observation_space = gym.spaces.Dict(
        {name: gym.spaces.Box(-np.inf, np.inf, (1,)) for name in ("observation", "achieved_goal", "desired_goal")}
    )
    action_space = gym.spaces.Discrete(100)

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
        return sparse(achieved, desired)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_step_transitions_are_those_of_stable_baselines3_in_distribution(
    goal_store: dr.Store, strategy: str
) -> None:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3 import HerReplayBuffer
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = GoalEnv()
    buffer = HerReplayBuffer(
        100, env.observation_space, env.action_space, DummyVecEnv([lambda: env]), "cpu",
        n_sampled_goal=4, goal_selection_strategy=strategy,
    )  # fmt: skip
    for obs, serial, next_obs, terminated, truncated in steps():
        rows = ({name: value[None] for name, value in o.items()} for o in (obs, next_obs))
        info = [{"TimeLimit.truncated": truncated}]
        buffer.add(*rows, np.array([serial]), np.array([-5.0]), np.array([terminated or truncated]), info)
    state = np.random.get_state()
    np.random.seed(3)
    samples = buffer.sample(20_000)
    np.random.set_state(state)
    theirs = outcomes(samples.observations, samples.rewards, samples.dones)
    assert alike(by_the_sampler(goal_store, strategy, 20_000), theirs)


def same(one: dr.Batch, other: dr.Batch) -> bool:
    a, b = one.numpy(), other.numpy()
    pairs = [(a.pop(name), b.pop(name)) for name in ("obs", "next_obs")]
    assert a.keys() == b.keys()
    nested = [(x[key], y[key]) for x, y in pairs for key in x]
    return all(np.array_equal(x, y) for x, y in [*nested, *((a[name], b[name]) for name in a)])


def test_a_seed_decides_the_goals_whatever_is_drawn_ahead(goal_store: dr.Store) -> None:
    def batches(prefetch: int, seed: int) -> list[dr.Batch]:
        view = dr.Transitions(2, relabel=dr.Hindsight("future", 0.8, sparse))
        with dr.Sampler(goal_store, view, batch_size=16, seed=seed, prefetch=prefetch) as sampler:
            return [sampler.sample() for _ in range(8)]

    first = batches(0, 4)
    for prefetch in (0, 1, 3):
        assert all(same(x, y) for x, y in zip(first, batches(prefetch, 4), strict=True))
    assert not any(same(x, y) for x, y in zip(first, batches(0, 5), strict=True))
    goals = [batch.obs["desired_goal"].tolist() for batch in first]
    assert len({str(goal) for goal in goals}) == len(goals)


def test_ids_are_gathered_as_they_are_stored(goal_store: dr.Store) -> None:
    view = dr.Transitions(2, relabel=dr.Hindsight("future", 1.0, sparse))
    with dr.Sampler(goal_store, view, seed=0) as sampler, dr.Sampler(goal_store, dr.Transitions(2)) as stored:
        ids = [int(i) for episode in goal_store.episodes for i in episode.ids]
        assert len(ids) == sum(LENGTHS)
        assert -1.0 not in sampler.sample().obs["desired_goal"]
        assert same(sampler.gather(ids), stored.gather(ids))
        assert set(sampler.gather(ids).obs["desired_goal"].flatten().tolist()) == {-1.0}


def test_an_open_episode_is_neither_sampled_nor_gathered(goal_store: dr.Store) -> None:
    view = dr.Transitions(relabel=dr.Hindsight("future", 1.0, sparse))
    writer = goal_store.writer()
    for serial in range(50, 53):
        writer.append(observation(serial), serial, 0.0, False, next_obs=observation(serial + 1))
    with dr.Sampler(goal_store, view, batch_size=500, seed=0) as sampler:
        assert sampler.sample().action.max() < 50
        with pytest.raises(dr.InvalidIndex, match="its window is not complete yet"):
            sampler.gather(goal_store.episodes[-1].ids)
        writer.append(observation(53), 53, 0.0, True, next_obs=observation(54))
        assert sampler.sample().action.max() == 53
    writer.close()


def test_relabelling_is_switched_on_and_off_between_batches(goal_store: dr.Store) -> None:
    with dr.Sampler(goal_store, dr.Transitions(), batch_size=100, seed=0, prefetch=2) as sampler:
        assert sampler.sample().reward.unique().tolist() == [-5.0]
        sampler.view = dr.Transitions(relabel=dr.Hindsight("episode", 1.0, sparse))
        assert set(sampler.sample().reward.tolist()) == {-1.0, 0.0}
        sampler.view = dr.Transitions()
        assert sampler.sample().reward.unique().tolist() == [-5.0]


@pytest.mark.parametrize("n_step", [1, 3])
def test_terminated_fn_ends_windows_at_the_first_step_that_reaches_the_goal(tmp_store: Path, n_step: int) -> None:
    field = dr.Field((1,), "float32")
    obs = dict.fromkeys(("observation", "achieved_goal", "desired_goal"), field)
    line = np.arange(11.0)[:, None]
    with dr.create(tmp_store, dr.Schema(obs=obs, action=dr.Field((), "int64"))) as store:
        with store.writer() as writer:
            writer.append_episode(
                {"observation": line, "achieved_goal": line, "desired_goal": line - 100}, np.zeros(10, int),
                np.zeros(10), terminated=True,
            )  # fmt: skip
        relabel = dr.Hindsight(
            ratio=1.0, reward_fn=lambda a, d: (a == d)[:, 0] - 1.0, terminated_fn=lambda a, d: (a == d)[:, 0]
        )
        view = dr.Transitions(n_step=n_step, gamma=0.5, relabel=relabel)
        batch = dr.Sampler(store, view, batch_size=200, seed=0).sample()
        ends = 0
        for i in range(200):
            at, goal = int(batch.obs["observation"][i]), int(batch.obs["desired_goal"][i])
            k = int(batch.n_steps[i])
            reached = goal - at <= k
            rewards = [0.5**j * (at + j + 1 == goal) - 0.5**j for j in range(min(k, goal - at))]
            assert bool(batch.terminated[i]) is reached
            assert batch.discount[i].item() == (0.0 if reached else 0.5**k)
            assert batch.reward[i].item() == sum(rewards)
            ends += reached
        assert 20 < ends < 180
        bad = dr.Hindsight(
            reward_fn=lambda a, d: np.zeros(len(a)), terminated_fn=lambda a, d: np.zeros(len(a)), ratio=1.0
        )
        with pytest.raises(ValueError, match="^terminated_fn must return one bool for each of the "):
            dr.Sampler(store, dr.Transitions(relabel=bad), batch_size=8, seed=0).sample()
