"""Draws by recency halve with every half-life, in the order in which steps came."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import diskreplay as dr
from tests.distributions.conftest import chances, ids_of


def pvalue(counts: np.ndarray, want: np.ndarray) -> float:
    """Compare counts with what was to be expected, rare ones taken together."""
    want = want * counts.sum() / want.sum()
    often = want >= 10
    together = [counts[~often].sum()], [want[~often].sum()]
    if together[1][0] < 10:
        counts, want = counts[often], want[often]
        want *= counts.sum() / want.sum()
    else:
        counts, want = np.append(counts[often], together[0]), np.append(want[often], together[1])
    return float(stats.chisquare(counts, want).pvalue)


def by_age(ages: np.ndarray, half_life: float) -> np.ndarray:
    return 2.0 ** (-ages / half_life)


def counted(sampler: dr.Sampler, draws: int = 200_000) -> np.ndarray:
    """Return how often each id was drawn."""
    ids = ids_of(sampler)
    at = np.searchsorted(ids, sampler.sample(draws).index.numpy())
    return np.bincount(at, minlength=len(ids))


def ages_of(store: Any) -> np.ndarray:
    """Return how many steps were appended after each one, by their ids."""
    sampler = store.sampler(fields=("action",))
    numbers = sampler.gather(ids_of(sampler)).action.numpy()
    return numbers.max() - numbers


@pytest.fixture
def interleaved(grown: Any) -> Any:
    """Lanes of uneven episodes, some of them open, in several segments."""
    store = grown([[30], [4], [70]], [0, 4, 0], segment_steps=120)
    for lane, steps, ends in (
        (0, 9, True),
        (1, 40, True),
        (0, 20, False),
        (2, 11, True),
        (1, 25, True),
        (2, 30, False),
    ):
        store.add(lane, steps, ends)
    return store


@pytest.mark.parametrize("half_life", [0.7, 5, 15.0, 40.0, 1e3, 1e12])
def test_what_is_found_together_is_drawn_by_its_time(interleaved: Any, half_life: float) -> None:
    sampler = interleaved.sampler(dr.Recency(half_life))
    want, found = by_age(ages_of(interleaved), half_life), chances(sampler)
    assert found.sum() == pytest.approx(1.0)
    assert pvalue(counted(sampler), want if half_life < 20 else found) > 1e-4
    if half_life > 20:  # nearly so
        np.testing.assert_allclose(found, want / want.sum(), rtol=1.5 / 32)


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("many", [1, 7])
def test_what_is_found_one_after_the_other_is_drawn_in_that_order(grown: Any, lanes: int, many: int) -> None:
    rng, store = np.random.default_rng(lanes), grown([[]] * lanes)
    sampler = store.sampler(dr.Recency(20), batch_size=4)
    for number in range(80):
        for _ in range(int(rng.integers(0, many + 1)) if number else 50):
            store.add(int(rng.integers(lanes)), 1, ends=rng.random() < 0.02)
        sampler.sample()
    found, want = chances(sampler), by_age(ages_of(store), 20)
    assert found.sum() == pytest.approx(1.0)
    assert pvalue(counted(sampler), found) > 1e-4
    newest = want > 2.0**-2
    np.testing.assert_allclose(found[newest] / found.max(), want[newest] / want.max(), rtol=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_it_draws_what_can_be_drawn_whatever_came_and_went(grown: Any, seed: int) -> None:
    rng, store = np.random.default_rng(seed), grown([[30, 9], [4, 4, 40], [70]], [20, 0, 3], segment_steps=60)
    sampler, every = store.sampler(dr.Recency((3.0, 50.0, 1000.0)[seed % 3]), batch_size=50), store.sampler()
    evicted = 0
    for _ in range(12):
        for lane in range(3):
            store.add(lane, int(rng.integers(0, 4)), ends=rng.random() < 0.4)
        if rng.random() < 0.4:
            store.hide(int(rng.integers(1, 30)))
        if rng.random() < 0.3:
            evicted += store.store.evict(lambda episode: rng.random() < 0.2)
        if rng.random() < 0.6:
            assert set(sampler.sample().index.tolist()) <= set(every.ids().tolist())
            assert chances(sampler).sum() == pytest.approx(1.0)
            assert (chances(sampler) >= 0).all()
    assert evicted or seed > 3


def test_where_all_that_could_be_drawn_was_evicted_older_steps_are_drawn(grown: Any) -> None:
    store = grown([[400, 300]], segment_steps="episode")
    sampler = store.sampler(dr.Recency(0.5), fields=("action",))
    assert (sampler.sample(20).action >= 400).all()
    store.writer.close()  # which seals its segment
    assert store.store.evict(lambda episode: len(episode) == 300) == 300
    assert (sampler.sample(20).action < 400).all()


def test_windows_are_as_old_as_the_steps_behind_them(grown: Any) -> None:
    found = chances(grown([[400]]).sampler(dr.Recency(40.0), dr.Sequences(8, 4, pad=False)))
    want = by_age(4.0 * np.arange(len(found))[::-1], 40.0)
    np.testing.assert_allclose(found, want / want.sum(), rtol=0.05)


def test_episodes_are_as_old_as_the_steps_of_those_behind_them(grown: Any) -> None:
    found = chances(grown([[5, 80, 20, 40]]).sampler(dr.Recency(50.0), dr.Episodes()))
    want = by_age(np.array([140, 60, 40, 0.0]), 50.0)
    assert found.argsort().tolist() == [0, 1, 2, 3]
    # An episode is taken at its middle, as if its id had come while its steps did.
    np.testing.assert_allclose(found, want / want.sum(), rtol=0.8)


@pytest.mark.parametrize("half_life", [1e-9, 1.0, 1e300])
def test_one_id_is_always_drawn(grown: Any, half_life: float) -> None:
    sampler = grown([[1]]).sampler(dr.Recency(half_life))
    batch = sampler.sample()
    assert batch.index.tolist() == sampler.ids().tolist() * 16
    assert batch.weight.tolist() == batch.probability.tolist() == [1.0] * 16


@pytest.mark.parametrize(
    "change",
    [
        {"pieces": np.zeros((2, 1))},
        {"pieces": -np.ones((3, 1))},
        {"starts": np.array([0, 2])},
        {"starts": np.array([1, 1])},
        {"ranks": np.array([0.0, 0.0])},
        {"taken": np.array([-1])},
        {"full": None, "starts": None},
    ],
)
def test_what_is_no_state_is_refused(grown: Any, change: dict[str, Any]) -> None:
    sampler = grown([[1]]).sampler(dr.Recency(10))
    sampler.sample()
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    state["planner"]["state"] |= change
    with pytest.raises(ValueError, match="state"):
        sampler.load_state_dict(state)


def test_its_state_is_of_what_torch_loads_without_unpickling(tmp_path: Any) -> None:
    schema = dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"))
    with (
        dr.create(tmp_path / "store", schema) as store,
        store.writer() as writer,
        dr.Sampler(store, dr.Transitions(), dr.Recency(200), batch_size=4, seed=0) as sampler,
    ):
        for _ in range(5):
            writer.append_episode(np.zeros(4, "f4"), np.zeros(3, int), np.zeros(3), terminated=True)
            sampler.sample()
            torch.save(sampler.state_dict(), tmp_path / "state.pt")
            sampler.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


@pytest.mark.parametrize("half_life", [0, -1, float("inf"), "many", True])
def test_bad_half_lives_are_refused(half_life: Any) -> None:
    message = f"half_life must be a finite number above 0, not {half_life!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Recency(half_life)


@pytest.mark.slow
@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("at_rest", [False, True])
def test_ages_fit_the_closed_form_with_several_collectors(tmp_path: Any, writers: int, at_rest: bool) -> None:
    half_life, batches = 300, 400
    schema = dr.Schema(obs=dr.Field((1,), "float32"), action=dr.Field((), "int64"))
    ages, lanes = [], []
    with dr.create(tmp_path / "store", schema, segment_steps=700) as store:
        collectors, came, rng = [store.writer() for _ in range(writers)], 0, np.random.default_rng(0)

        def collect(count: int) -> None:
            nonlocal came
            for _ in range(count):
                i = int(rng.integers(writers))
                obs = np.full(1, i, np.float32)
                collectors[i].append(obs, came, 0.0, bool(rng.random() < 0.01), next_obs=obs)
                came += 1

        collect(6000)
        sampler = dr.Sampler(store, dr.Transitions(), dr.Recency(half_life), batch_size=256, seed=0)
        for _ in range(batches):
            batch = sampler.sample()
            ages.append(came - 1 - batch.action.numpy())
            lanes.append(batch.obs.numpy()[:, 0])
            if not at_rest:
                collect(2)
        for collector in collectors:
            collector.close()
        sampler.close()
    drawn = np.concatenate(ages)
    counts = np.bincount(np.minimum(drawn // 50, 60), minlength=61)
    want = by_age(50.0 * np.arange(61), half_life)
    want[60] /= 1 - 2.0 ** (-50 / half_life)
    share = counts / counts.sum() / (want / want.sum())
    assert (abs(share[:20] - 1) < 0.1).all(), share
    assert np.bincount(np.concatenate(lanes).astype(int)) / len(drawn) == pytest.approx(1 / writers, abs=0.06)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
@pytest.mark.parametrize(
    "made",
    [dr.Uniform, dr.Prioritized, lambda: dr.Recency(30), dr.Stratified, lambda: dr.Mixture([(dr.Recency(9), 1)])],
    ids=["uniform", "prioritized", "recency", "stratified", "mixture"],
)
def test_a_distribution_can_be_copied_and_sent_to_another_process(
    grown: Any, made: Callable[[], Any], copied: Callable[[Any], Any]
) -> None:
    store, distribution = grown([[40]]), made()
    sampler, other = store.sampler(copied(distribution)), store.sampler(distribution)
    for _ in range(3):
        assert sampler.sample(100).index.tolist() == other.sample(100).index.tolist()
        store.add(0, 5)
