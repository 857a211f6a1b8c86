"""Transitions gathered in bytes equal the reference loop, every field of every sampleable step."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from diskreplay import Hindsight, Transitions
from diskreplay.testing.model import ModelEpisode
from diskreplay.testing.reference import transition
from tests.views.fakes import SCHEMA, Segment, Snapshot, check_every_id, episode, gathered, offered
from tests.views.strategies import snapshots

REWARDS = (None, {"reward": 2.0, "bonus": -0.3}, {"bonus": 1.0})
DISCOUNTS = (None, "bonus")
NEXT_FIELDS = ((), ("action",), ("bonus", "hidden", "reward"))


def expected(view: Transitions, episode: ModelEpisode, t: int) -> dict[str, Any]:
    """Ask the reference loop; weighted rewards and next fields are added to what it knows."""
    deepest = view.frame_stack if isinstance(view.frame_stack, int) else max(view.frame_stack.values(), default=1)
    found = transition(episode, t, view.n_step, view.gamma, deepest, view.discount)
    if not isinstance(view.frame_stack, int):
        for leaf in ("image", "state"):
            depth = view.frame_stack.get(leaf, 1)
            for name in (f"obs/{leaf}", f"next_obs/{leaf}"):
                frames = found[name] if deepest > 1 else found[name][None]
                found[name] = frames[-depth:] if depth > 1 else frames[-1]
    k = found["n_steps"]
    weights = {"reward": 1.0} if view.reward is None else view.reward
    found["reward"], power = 0.0, 1.0
    for step in episode.steps[t : t + k]:
        for name, weight in weights.items():
            found["reward"] += power * weight * (step.reward if name == "reward" else float(step.extra[name]))
        power *= view.gamma * (float(step.extra[view.discount]) if view.discount else 1.0)
    for name in view.next_fields:
        step = episode.steps[t + k] if t + k < len(episode.steps) else None
        like = episode.steps[t]
        for part in ("action", "extra"):
            for leaf, value in getattr(like, part).items():
                if leaf.split("/")[0] == name:
                    found[f"next_{leaf}"] = getattr(step, part)[leaf] if step else np.zeros_like(value)
        if name == "reward":
            found["next_reward"] = step.reward if step else 0.0
    if view.next_fields:
        found["next_mask"] = t + k < len(episode.steps)
    return found


@pytest.mark.slow
@given(
    snapshots(),
    st.integers(1, 20) | st.none(),
    st.sampled_from((0.0, 0.9, 1.0)),
    st.integers(1, 5) | st.dictionaries(st.sampled_from(("image", "state")), st.integers(1, 5)),
    st.sampled_from(REWARDS),
    st.sampled_from(NEXT_FIELDS),
    st.sampled_from(DISCOUNTS),
)
def test_every_field_of_every_step_equals_the_reference_loop(
    snapshot: Snapshot, n: Any, gamma: float, stack: Any, reward: Any, next_fields: Any, discount: Any
) -> None:
    view = Transitions(n, gamma, stack, reward, next_fields, discount=discount)
    ids = sorted(snapshot.sampleable(n, bool(next_fields)))
    batch = gathered(view, snapshot, ids)
    assert batch.pop("index").tolist() == ids
    batch.pop("weight")
    for i, step_id in enumerate(ids):
        want = expected(view, *snapshot.model[step_id])
        assert want.keys() == batch.keys()
        for name, value in want.items():
            exact = name not in ("reward", "discount")
            np.testing.assert_allclose(batch[name][i], value, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


@pytest.mark.slow
@given(snapshots(), st.integers(1, 20) | st.none(), st.sampled_from(NEXT_FIELDS))
def test_the_runs_are_exactly_the_steps_that_can_be_gathered(snapshot: Snapshot, n: Any, next_fields: Any) -> None:
    view = Transitions(n, next_fields=next_fields)
    assert sorted(offered(view, snapshot)) == sorted(snapshot.sampleable(n, bool(next_fields)))


@pytest.mark.slow
@given(snapshots(), st.integers(1, 20) | st.none(), st.booleans())
def test_dropped_are_windows_that_bootstrap_without_next_fields(snapshot: Snapshot, n: Any, relabels: bool) -> None:
    relabel = Hindsight(reward_fn=lambda achieved, desired: 0.0) if relabels else None
    everything, dropping = (
        Transitions(n, next_fields=("action",), relabel=relabel, next_missing=missing) for missing in ("mask", "drop")
    )
    every = offered(everything, snapshot)
    batch = gathered(Transitions(n, next_fields=("action",)), snapshot, every, ("next_mask", "discount"))
    bootstraps = (batch["discount"] > 0) & ~batch["next_mask"]
    kept = [i for i, missing in zip(every, bootstraps, strict=True) if not missing]
    assert offered(dropping, snapshot) == kept
    view = Transitions(n, next_fields=("action",), next_missing="drop")
    check_every_id(view, snapshot, kept, every, "cannot be sampled as .*without next fields$")


def test_a_return_over_an_episode_longer_than_one_tile_is_summed_whole() -> None:
    rng = np.random.default_rng(0)
    snapshot = Snapshot(SCHEMA, [Segment([[episode(SCHEMA, 700, "terminated", True, rng)]], chunk_rows=64)])
    view = Transitions(n_step=None, gamma=0.999, reward={"reward": 0.5, "bonus": 2.0})
    ids = sorted(snapshot.model)
    batch = gathered(view, snapshot, ids)
    want = [expected(view, *snapshot.model[i])["reward"] for i in ids]
    np.testing.assert_allclose(batch["reward"], want, rtol=1e-5, atol=1e-5)
    assert batch["n_steps"].tolist() == list(range(700, 0, -1))
    assert not batch["discount"].any()


def test_5424_returns_with_the_discounts_of_the_environment_equal_the_loop() -> None:
    rng = np.random.default_rng(1)
    lanes = [
        [episode(SCHEMA, int(rng.integers(1, 60)), end, True, rng) for _ in range(20)]
        for end in ("terminated", "truncated")
    ]
    for each in (step for lane in lanes for one in lane for step in one.steps):
        each.extra["bonus"] = np.float64(rng.choice((0.0, 0.5, 1.0, 1.0, 1.0)))
    snapshot, compared = Snapshot(SCHEMA, [Segment(lanes, chunk_rows=16)]), 0
    for n in (1, 3, 7, None):
        view = Transitions(n, 0.97, discount="bonus")
        ids = sorted(snapshot.sampleable(n))
        batch = gathered(view, snapshot, ids, ("reward", "discount"))
        want = [expected(view, *snapshot.model[i]) for i in ids]
        for name in ("reward", "discount"):
            np.testing.assert_array_equal(batch[name], np.float32([w[name] for w in want]))
        compared += len(ids)
    assert compared == 5_424
