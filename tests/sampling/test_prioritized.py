"""Prioritized draws follow the priorities, the weights follow the formula, and both survive everything."""

import pickle
import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from diskreplay.sampling.population import Population, Share
from diskreplay.sampling.priorities import PriorityTable
from diskreplay.sampling.prioritized import sequence_error
from tests.sampling.growing import FakeStore, add_episodes, everything, grown, population_of


def frequencies(distribution: Any, population: Population, draws: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw batches of 1,000; return all ids in order, and how often each was drawn."""
    rng = np.random.default_rng(seed)
    ids = everything(population)
    counts = np.zeros(len(ids), np.int64)
    for _ in range(draws // 1_000):
        drawn = distribution.draw(population, 1_000, rng).ids
        at = np.searchsorted(ids, drawn)
        assert (ids[at] == drawn).all()
        counts += np.bincount(at, minlength=len(ids))
    return ids, counts


def goodness(counts: np.ndarray, chances: np.ndarray) -> float:
    return float(stats.chisquare(counts, chances / chances.sum() * counts.sum()).pvalue)


def test_a_million_draws_follow_the_priorities_after_updates_growth_and_eviction() -> None:
    rng = np.random.default_rng(0)
    store = grown(3, [[40, 30], [60], [25, 25]], [10, 0, 7])
    population = population_of(store)
    distribution = dr.Prioritized(alpha=0.6, eps=1e-3, stratified=False)
    raw: dict[int, float] = {}
    given: set[int] = set()

    def look() -> np.ndarray:
        population.refresh(store.snapshot())
        ids = everything(population).tolist()
        largest = max((raw[i] for i in given.intersection(ids)), default=1.0)
        return np.array([raw.setdefault(i, largest) for i in ids])

    look()
    for change in ("updates", "growth", "eviction"):
        if change == "growth":
            store.add_segment(1)
            add_episodes(store, 1, [[50, 20]], [4])
            store.open[0][1] = 33
        if change == "eviction":
            store.frontier = int(everything(population)[90])
        look()
        ids = everything(population)
        some = rng.choice(ids, len(ids) // 2, replace=False)
        errors = rng.normal(0, 2, len(some)) * (rng.random(len(some)) < 0.8)
        assert distribution.update(population, some, errors) == 0
        raw |= dict(zip(some.tolist(), (np.abs(errors) + 1e-3).tolist(), strict=True))
        given |= set(some.tolist())
        drawn, counts = frequencies(distribution, population, 1_000_000)
        want = np.array([raw[i] for i in drawn.tolist()]) ** 0.6
        assert goodness(counts, want) > 1e-4


def test_stratified_draws_follow_the_priorities_and_vary_less() -> None:
    population = population_of(grown(2, [[50], [30, 20]]))
    errors = np.random.default_rng(1).exponential(1.0, population.size)
    spread = {}
    for stratified in (False, True):
        distribution = dr.Prioritized(alpha=1.0, stratified=stratified)
        distribution.update(population, everything(population), errors)
        rng = np.random.default_rng(2)
        ids = everything(population)
        counts = np.array(
            [
                np.bincount(np.searchsorted(ids, distribution.draw(population, 64, rng).ids), minlength=len(ids))
                for _ in range(2_000)
            ]
        )
        means = counts.mean(axis=0)
        # Each mean is that of 2,000 batches, whose spread is at most that of independent draws.
        expected = 64 * (errors + 1e-6) / (errors + 1e-6).sum()
        assert (np.abs(means - expected) < 5 * np.sqrt(expected / 2_000)).all()
        spread[stratified] = counts.var(axis=0).sum()
    assert spread[True] < 0.75 * spread[False]


def test_the_batch_is_drawn_from_equal_parts_of_the_total() -> None:
    population = population_of(grown(1, [[64]]))
    distribution = dr.Prioritized()
    for seed in range(20):
        drawn = distribution.draw(population, 64, np.random.default_rng(seed)).ids
        assert sorted(drawn.tolist()) == everything(population).tolist()


@pytest.mark.parametrize("normalize", ["batch", "store"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_those_of_the_formula(normalize: str, beta: float) -> None:
    population = population_of(grown(1, [[200]]))
    rng = np.random.default_rng(0)
    distribution = dr.Prioritized(alpha=0.7, beta=beta, eps=0.01, normalize=normalize)
    ids, errors = everything(population), rng.normal(0, 1, 200)
    distribution.update(population, ids, errors)
    p = (np.abs(errors) + 0.01) ** 0.7
    chances = dict(zip(ids.tolist(), (p / p.sum()).tolist(), strict=True))
    draw = distribution.draw(population, 32, rng)
    chance = np.array([chances[i] for i in draw.ids.tolist()])
    np.testing.assert_allclose(draw.chances, chance, rtol=1e-12)
    weights = (200 * chance) ** -beta
    largest = weights.max() if normalize == "batch" else (200 * (p / p.sum())).min() ** -beta
    found = distribution.weigh(draw, None)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, weights / largest, rtol=1e-6)
    np.testing.assert_allclose(distribution.weigh(draw, 0.5), distribution.weigh(draw, dr.Linear(0.5, 1, 10)), rtol=0)
    np.testing.assert_allclose(distribution.chances(population, draw.ids), chance, rtol=1e-12)


def test_a_schedule_counts_delivered_batches() -> None:
    population = population_of(grown(1, [[50]]))
    distribution = dr.Prioritized(beta=dr.Linear(0.4, 1.0, 100))
    distribution.update(population, everything(population), np.arange(50.0))
    draw = distribution.draw(population, 8, np.random.default_rng(0))
    for batches, beta in ((0, 0.4), (50, 0.7), (100, 1.0), (1_000, 1.0)):
        np.testing.assert_allclose(distribution.weigh(draw, None, batches), distribution.weigh(draw, beta), rtol=1e-6)


def test_new_ids_enter_with_the_largest_priority_that_was_given() -> None:
    store = grown(1, [[4]])
    population = population_of(store)
    distribution = dr.Prioritized(alpha=1.0, eps=0.5)
    assert distribution.chances(population, everything(population)).tolist() == [0.25] * 4
    first = everything(population)
    distribution.update(population, first[:3], np.array([0.0, -2.5, 0.25]))
    add_episodes(store, 0, [[2]], [0])
    population.refresh(store.snapshot())
    chances = distribution.chances(population, everything(population))
    np.testing.assert_allclose(chances * (0.5 + 3.0 + 0.75 + 1.0 + 3.0 + 3.0), [0.5, 3.0, 0.75, 1.0, 3.0, 3.0])


def entered(distribution: dr.Prioritized, store: FakeStore, population: Population) -> float:
    """Add a step to a store of one lane, and return the priority with which it enters."""
    add_episodes(store, len(store.lanes) - 1, [[1]], [0])
    population.refresh(store.snapshot())
    return float(distribution.priorities(population, everything(population)[-1:])[0])


def test_small_errors_count_however_many_ids_entered_with_one_and_were_never_drawn() -> None:
    store = grown(1, [[10_000]])
    population = population_of(store)
    distribution = dr.Prioritized(eps=1 / 1024)
    assert distribution.priorities(population, everything(population)).tolist() == [1.0] * 10_000
    assert entered(distribution, store, population) == 1.0
    distribution.update(population, everything(population)[::500].copy(), np.arange(21) / 1024)
    assert entered(distribution, store, population) == 21 / 1024
    assert distribution.priorities(population, everything(population)).tolist().count(1.0) == 10_001 - 21


def test_the_largest_falls_when_its_id_is_updated_or_goes() -> None:
    store = grown(1, [[300]])
    population = population_of(store)
    distribution = dr.Prioritized(eps=0.5)
    ids = everything(population)
    distribution.update(population, ids[:4], np.array([7.0, 5.0, 3.0, 2.0]))
    assert entered(distribution, store, population) == 7.5
    distribution.update(population, ids[:1], np.array([0.0]))
    assert entered(distribution, store, population) == 5.5
    distribution.update(population, ids[[1, 1]], np.array([9.0, 4.0]))  # the last one counts
    assert entered(distribution, store, population) == 4.5
    store.frontier = int(ids[2])
    assert entered(distribution, store, population) == 3.5
    store.frontier = int(ids[4])  # those that entered by the rule are left
    assert entered(distribution, store, population) == 1.0
    distribution.update(population, ids[-1:], np.array([-0.25]))
    assert entered(distribution, store, population) == 0.75


def test_ids_that_a_view_does_not_offer_count_when_it_does_again() -> None:
    store = grown(1, [[5]], [3])
    short, long = population_of(store), population_of(store, dr.Transitions(3))
    distribution = dr.Prioritized(eps=0.5)
    distribution.update(short, everything(short), np.arange(7.0))
    assert long.size == 5
    store.open[0][0] = 6
    long.refresh(store.snapshot())
    assert distribution.priorities(long, everything(long)).tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 6.5]
    short.refresh(store.snapshot())
    assert distribution.priorities(short, everything(short))[-3:].tolist() == [6.5] * 3


@pytest.mark.parametrize("saved_before", [False, True])
def test_a_loaded_table_knows_which_priorities_were_given(saved_before: bool) -> None:
    store = grown(1, [[100]])
    population = population_of(store)
    distribution, other = dr.Prioritized(eps=0.125), dr.Prioritized(eps=0.125)
    distribution.update(population, everything(population)[:50], np.full(50, 0.25))
    state = distribution.state_dict()
    if saved_before:  # by a version that did not know it, and saved the largest so far
        del state['["transitions"]']["given"]
        state['["transitions"]']["largest"] = 1.0
    other.load_state_dict(state)
    add_episodes(store, 0, [[5]], [0])
    for one in (distribution, other):
        population.refresh(store.snapshot())
        assert one.priorities(population, everything(population)).tolist() == [0.375] * 50 + [1.0] * 50 + [0.375] * 5


def test_alpha_may_change_through_zero_and_back() -> None:
    population = population_of(grown(1, [[30]]))
    distribution = dr.Prioritized(alpha=0.6, eps=0.1)
    ids, errors = everything(population), np.linspace(0, 3, 30)
    distribution.update(population, ids, errors)
    for alpha in (0.0, 1.0, 0.6):
        distribution.alpha = alpha
        p = (errors + 0.1) ** alpha
        np.testing.assert_allclose(distribution.chances(population, ids), p / p.sum())
        assert distribution.alpha == alpha


def test_an_update_of_ids_that_are_gone_is_skipped_and_counted_and_the_last_duplicate_counts() -> None:
    store = grown(1, [[10]], [6])
    population = population_of(store, dr.Transitions(3))
    ids = everything(population)
    store.frontier = int(ids[4])
    population.refresh(store.snapshot())
    distribution = dr.Prioritized(alpha=1.0, eps=1.0)
    given = np.array([ids[0], ids[5], ids[6], ids[5], -1, ids[-1] + 1, 1 << 61])
    assert distribution.update(population, given, np.array([9.0, 9, 2, 4, 9, 9, 9])) == 4
    want = np.ones(len(ids) - 4)
    want[[1, 2]] = 5.0, 3.0
    np.testing.assert_allclose(distribution.chances(population, ids[4:]), want / want.sum())
    assert distribution.chances(population, given[[0, 4]]).tolist() == [0.0, 0.0]


def test_an_update_that_is_refused_changes_nothing() -> None:
    population = population_of(grown(1, [[10]]))
    distribution, ids = dr.Prioritized(), everything(population)
    before = distribution.chances(population, ids)
    for bad, message in (
        (np.array([1.0, np.nan]), "td_error[1] is nan: nothing was updated"),
        (np.array([np.inf, 1.0]), "td_error[0] is inf: nothing was updated"),
        (np.ones(3), "td_error must have one value for each of 2 ids, not shape [3]"),
        (np.ones((2, 2)), "td_error must have one value for each of 2 ids, not shape [2, 2]"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            distribution.update(population, ids[:2], bad)
    np.testing.assert_array_equal(distribution.chances(population, ids), before)
    assert distribution.update(population, ids[:0], np.zeros(0)) == 0


def test_the_error_of_a_sequence_counts_what_the_mask_counts() -> None:
    errors = np.array([[1.0, -4.0, 2.0], [5.0, np.nan, 1.0], [3.0, 3.0, 3.0]])
    mask = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0]], bool)
    np.testing.assert_allclose(sequence_error(errors, mask, 0.9), [0.9 * 4 + 0.1 * 2.5, 1.0, 0.0])
    with pytest.raises(ValueError, match=re.escape("td_error[0, 1] is nan: nothing was updated")):
        sequence_error(errors[1:2], ~mask[1:2], 0.9)
    with pytest.raises(ValueError, match=re.escape("td_error must be (batch, length) as loss_mask, [3, 3]")):
        sequence_error(errors[:, :2], mask, 0.9)
    view = dr.Sequences(length=3, overlap=1)
    population = population_of(grown(1, [[7]]), view)
    distribution, ids = dr.Prioritized(alpha=1.0, eps=1.0, eta=0.5), everything(population)
    assert len(ids) == 3
    distribution.update(population, ids, sequence_error(errors, mask, distribution.eta))
    np.testing.assert_allclose(distribution.chances(population, ids) * (4.25 + 2 + 1), [4.25, 2.0, 1.0])


def test_each_kind_of_id_keeps_its_priorities_while_the_view_is_switched() -> None:
    store = grown(1, [[20]], [8])
    distribution = dr.Prioritized(alpha=1.0, eps=0.1)
    one = population_of(store, dr.Transitions(1))
    ids = everything(one)
    errors = np.arange(len(ids), dtype=float)
    distribution.update(one, ids, errors)
    windows = population_of(store, dr.Sequences(length=4, overlap=0))
    np.testing.assert_allclose(distribution.chances(windows, everything(windows)), 1 / windows.size)
    five = population_of(store, dr.Transitions(5))
    few = everything(five)
    assert len(few) == len(ids) - 4
    p = errors[:-4] + 0.1
    np.testing.assert_allclose(distribution.chances(five, few), p / p.sum())
    again = population_of(store, dr.Transitions(1))
    np.testing.assert_allclose(distribution.chances(again, ids), (errors + 0.1) / (errors + 0.1).sum())


def updated(store: FakeStore, seed: int = 0, **kwargs: Any) -> tuple[dr.Prioritized, Population]:
    population = population_of(store)
    distribution = dr.Prioritized(**kwargs)
    rng = np.random.default_rng(seed)
    distribution.update(population, everything(population), rng.exponential(1.0, population.size))
    return distribution, population


def go_on(distribution: dr.Prioritized, store: FakeStore, seed: int) -> list[int]:
    """Draw and update while the store grows and forgets; return all that was drawn."""
    rng, found = np.random.default_rng(seed), []
    population = population_of(store)
    for step in range(60):
        store.open[0][step % 2] += 3
        if step % 7 == 6:
            store.end(0, step % 2)
        store.frontier += 2
        population.refresh(store.snapshot())
        draw = distribution.draw(population, 16, rng)
        distribution.update(population, draw.ids, rng.exponential(1.0, 16))
        found += draw.ids.tolist()
    return found


def test_a_loaded_distribution_draws_on_bit_by_bit() -> None:
    def store() -> FakeStore:
        return grown(2, [[30, 40], [50]], [5, 9])

    growing = store()
    distribution, _ = updated(growing)
    go_on(distribution, growing, 1)
    copy = grown(1, [[1]])
    copy.__dict__ |= pickle.loads(pickle.dumps(vars(growing)))
    state = pickle.loads(pickle.dumps(distribution.state_dict()))
    loaded = dr.Prioritized()
    loaded.load_state_dict(state)
    assert go_on(loaded, copy, 2) == go_on(distribution, growing, 2)


def test_a_table_that_uses_its_pages_again_goes_on_bit_by_bit_wherever_it_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diskreplay.sampling.priorities.FIRST_PAGES", 1)
    store, rng = grown(3, [[30], [], []]), np.random.default_rng(0)
    population = population_of(store)
    table = PriorityTable(0.6)
    sizes: list[int] = []
    seen: set[int] = set()
    for step in range(150):
        for segment in range(len(store.lanes)):
            for lane in range(len(store.open[segment])):
                store.open[segment][lane] += int(rng.integers(1, 30))
                if rng.random() < 0.5:
                    store.end(segment, lane)
        if step % 20 == 19:
            store.add_segment(int(rng.integers(1, 4)))
        store.frontier = max(store.frontier, int(everything(population)[-3000:][0]))
        store.drop_hidden_segments()
        loaded = PriorityTable.loaded(pickle.loads(pickle.dumps(table.state_dict())), 0.6)
        population.refresh(store.snapshot())
        key, errors, found = int(rng.integers(1 << 63)), rng.exponential(1.0, 64), []
        for one in (table, loaded):
            one.follow(population)
            ids, chances = one.draw(key, 64, 64)
            assert one.update(ids, errors, 1e-3) == 0
            found.append((ids.tolist(), chances.tolist(), one.tree.tree.tolist(), one.tree.sums.tolist()))
        assert found[0] == found[1], step
        if rng.random() < 0.5:
            table = loaded
        sizes.append(len(table._pages))
        seen |= set(table._pages[:, 0].tolist())
    assert len(set(sizes[-60:])) == 1
    assert len(seen) > 2 * sizes[-1]


def test_loading_drops_what_is_gone_and_takes_the_rest_for_new() -> None:
    store = grown(1, [[10, 10]])
    distribution, population = updated(store, alpha=1.0, eps=0.1)
    ids, old = everything(population), distribution.chances(population, everything(population))
    state = distribution.state_dict()
    assert state['["transitions"]']["values"].nbytes == 8 * 20
    add_episodes(store, 0, [[5]], [0])
    store.frontier = int(ids[3])
    population = population_of(store)
    loaded = dr.Prioritized(alpha=1.0, eps=0.1)
    loaded.load_state_dict(state)
    chances = loaded.chances(population, everything(population))
    assert len(chances) == 22
    np.testing.assert_allclose(chances[:17] / chances[0], old[3:] / old[3])
    np.testing.assert_allclose(chances[17:], chances[:17].max())


@pytest.mark.parametrize(
    "change",
    [
        {"values": np.ones(3)},
        {"values": np.zeros(20)},
        {"page": np.array([-5, 3])},
        {"page": np.array([1, 1])},
        {"page": np.array([1 << 62, 0])},
        {"pages": 0},
        {"first": np.array([0, 5])},
        {"first": np.array([1, 1])},
        {"stride": np.array([0, 2])},
        {"known": np.array([1, 1])},
        {"given": np.array([-1, -1])},
        {"first": "nonsense"},
    ],
    ids=repr,
)
def test_a_damaged_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    distribution, population = updated(grown(1, [[10, 10]]))
    before = distribution.chances(population, everything(population))
    state = distribution.state_dict()
    state['["transitions"]'] |= change
    with pytest.raises(ValueError, match="^this "):
        distribution.load_state_dict(state)
    with pytest.raises(ValueError, match="this is no state of a table of priorities"):
        distribution.load_state_dict({'["transitions"]': {}})
    with pytest.raises(ValueError, match="no kind of id"):
        distribution.load_state_dict({"transitions": {}})
    np.testing.assert_array_equal(distribution.chances(population, everything(population)), before)


@pytest.mark.parametrize("pages", [1 << 40, 10**300], ids=["memory", "int64"])
def test_a_state_gets_no_memory_for_the_empty_pages_that_it_claims(pages: int) -> None:
    distribution, population = updated(grown(1, [[10, 10]]))
    state = distribution.state_dict()
    state['["transitions"]'] |= {"pages": pages, "page": np.array([(1 << 40) - 1])}
    loaded = dr.Prioritized()
    loaded.load_state_dict(state)
    everyone = everything(population)
    np.testing.assert_array_equal(loaded.chances(population, everyone), distribution.chances(population, everyone))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_ids_in_proportion(world_size: int) -> None:
    distribution, population = updated(grown(2, [[30], [40]]), alpha=1.0)
    ids = everything(population)
    chances = distribution.chances(population, ids)
    for rank in range(world_size):
        rng = np.random.default_rng(rank)
        mine = Share(rank, world_size).contains(ids)
        population.share = Share(rank, world_size)
        draws = [distribution.draw_share(population, 50, rng) for _ in range(400)]
        drawn = np.concatenate([draw.ids for draw in draws])
        assert Share(rank, world_size).contains(drawn).all()
        counts = np.bincount(np.searchsorted(ids, drawn), minlength=len(ids))
        assert goodness(counts[mine], chances[mine]) > 1e-4
        np.testing.assert_allclose(draws[0].chances, chances[np.searchsorted(ids, draws[0].ids)])


def test_extreme_errors_keep_the_tree_in_order() -> None:
    population = population_of(grown(1, [[40]]))
    distribution, ids = dr.Prioritized(alpha=3.0, eps=1e-300), everything(population)
    errors = np.zeros(40)
    errors[::3] = 1e308
    distribution.update(population, ids, errors)
    drawn = distribution.draw(population, 500, np.random.default_rng(0))
    assert set(drawn.ids.tolist()) <= set(ids[::3].tolist())
    assert np.isfinite(drawn.chances).all()
    distribution.update(population, ids, np.zeros(40))
    np.testing.assert_allclose(distribution.chances(population, ids), 1 / 40)


def test_it_belongs_to_one_sampler() -> None:
    class Owner:
        pass

    distribution, one, other = dr.Prioritized(), Owner(), Owner()
    distribution.claim(one)
    distribution.claim(one)
    message = "this Prioritized holds the state of another sampler: make a new Prioritized for each sampler"
    with pytest.raises(ValueError, match=f"^{message}$"):
        distribution.claim(other)


def test_it_says_what_it_is() -> None:
    assert repr(dr.Prioritized()) == "Prioritized(alpha=0.6, beta=0.4)"
    assert repr(dr.Prioritized(alpha=0.6, beta=dr.Linear(0.4, 1.0, 10))) == "Prioritized(alpha=0.6, beta=0.4→1.0)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": -0.1}, "alpha must be a finite number of at least 0, not -0.1"),
        ({"alpha": True}, "alpha must be a finite number of at least 0, not True"),
        (
            {"alpha": dr.Linear(0, 1, 2)},
            "alpha must be a finite number of at least 0, not Linear(start=0.0, end=1.0, steps=2)",
        ),
        ({"beta": -1}, "beta must be a finite number of at least 0, not -1"),
        ({"beta": dr.Linear(0.4, -1.0, 5)}, "beta.end must be a finite number of at least 0, not -1.0"),
        ({"beta": "0.4"}, "beta must be a finite number of at least 0, not '0.4'"),
        ({"eps": 0}, "eps must be a finite number above 0, not 0"),
        ({"eps": float("nan")}, "eps must be a finite number above 0, not nan"),
        ({"eta": 1.5}, "eta must be a number from 0 to 1, not 1.5"),
        ({"normalize": "all"}, 'normalize must be "batch" or "store", not \'all\''),
        ({"stratified": 1}, "stratified must be True or False, not 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Prioritized(**arguments)


def test_a_bad_beta_of_one_batch_is_refused() -> None:
    distribution, population = updated(grown(1, [[10]]))
    draw = distribution.draw(population, 4, np.random.default_rng(0))
    with pytest.raises(ValueError, match="^beta must be a finite number of at least 0, not -1$"):
        distribution.weigh(draw, -1)
    with pytest.raises(ValueError, match="^beta must be a finite number of at least 0, not nan$"):
        distribution.weigh(draw, lambda batches: float("nan"))
