"""Prioritized draws follow the priorities, the weights follow the formula, and both survive everything."""

import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from tests.distributions.conftest import TOLD, chances, ids_of, priorities


@pytest.mark.slow
def test_a_million_draws_follow_the_priorities_after_updates_growth_and_eviction(grown: Any) -> None:
    rng, store = np.random.default_rng(0), grown([[40, 30], [60], [25, 25]], [10, 0, 7])
    sampler = store.sampler(dr.Prioritized(alpha=0.6, eps=1e-3, stratified=False), batch_size=10_000)
    raw: dict[int, float] = {}
    given: set[int] = set()
    for change in ("updates", "growth", "eviction"):
        if change == "growth":
            store.add(0, 50)
            store.add(2, 26, ends=False)
        if change == "eviction":
            store.hide(90)
        ids = ids_of(sampler)
        largest = max((raw[i] for i in given.intersection(ids.tolist())), default=1.0)
        want = np.array([raw.setdefault(i, largest) for i in ids.tolist()]) ** 0.6
        np.testing.assert_allclose(chances(sampler), want / want.sum(), rtol=1e-12)
        some = rng.choice(ids, len(ids) // 2, replace=False)
        errors = rng.normal(0, 2, len(some)) * (rng.random(len(some)) < 0.8)
        assert sampler.update_priorities(some, errors) == 0
        raw |= dict(zip(some.tolist(), (np.abs(errors) + 1e-3).tolist(), strict=True))
        given |= set(some.tolist())
        drawn = np.concatenate([sampler.sample().index.numpy() for _ in range(100)])
        want = np.array([raw[i] for i in ids.tolist()]) ** 0.6
        counts = np.bincount(np.searchsorted(ids, drawn), minlength=len(ids))
        assert stats.chisquare(counts, want / want.sum() * 1_000_000).pvalue > 1e-4


def test_stratified_draws_follow_the_priorities_and_vary_less(grown: Any) -> None:
    store = grown([[50], [30, 20]])
    errors, spread = np.random.default_rng(1).exponential(1.0, 100), {}
    for stratified in (False, True):
        sampler = store.sampler(dr.Prioritized(alpha=1.0, stratified=stratified), batch_size=64, fields=("index",))
        ids = ids_of(sampler)
        sampler.update_priorities(ids, errors)
        drawn = [np.searchsorted(ids, sampler.sample().index.numpy()) for _ in range(2_000)]
        counts = np.array([np.bincount(each, minlength=100) for each in drawn])
        # Each mean is that of 2,000 batches, whose spread is at most that of independent draws.
        expected = 64 * (errors + 1e-6) / (errors + 1e-6).sum()
        assert (np.abs(counts.mean(axis=0) - expected) < 5 * np.sqrt(expected / 2_000)).all()
        spread[stratified] = counts.var(axis=0).sum()
    assert spread[True] < 0.75 * spread[False]


def test_the_batch_is_drawn_from_equal_parts_of_the_total(grown: Any) -> None:
    sampler = grown([[64]]).sampler(dr.Prioritized(), batch_size=64)
    for _ in range(20):
        assert sorted(sampler.sample().index.tolist()) == ids_of(sampler).tolist()


@pytest.mark.parametrize("normalize", ["batch", "store"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_those_of_the_formula(grown: Any, normalize: str, beta: float) -> None:
    distribution = dr.Prioritized(alpha=0.7, beta=beta, eps=0.01, normalize=normalize)
    sampler, errors = grown([[200]]).sampler(distribution, batch_size=32), np.random.default_rng(0).normal(0, 1, 200)
    ids = ids_of(sampler)
    sampler.update_priorities(ids, errors)
    p = (np.abs(errors) + 0.01) ** 0.7
    p /= p.sum()
    np.testing.assert_allclose(chances(sampler), p, rtol=1e-12)
    for asked in (None, 0.5):
        batch = sampler.sample(beta=asked)
        chance = p[np.searchsorted(ids, batch.index.numpy())]
        np.testing.assert_allclose(batch.probability.numpy(), chance, rtol=1e-12)
        weights = (chance / (chance if normalize == "batch" else p).min()) ** -(beta if asked is None else asked)
        assert batch.weight.numpy().dtype == np.float32
        np.testing.assert_allclose(batch.weight.numpy(), weights, rtol=1e-6)


def entered(store: Any, sampler: dr.Sampler) -> float:
    """Add a step to a store of one lane, and return the priority with which it enters."""
    store.add(0, 1)
    return float(priorities(sampler)[-1])


def test_small_errors_count_however_many_ids_entered_with_one_and_were_never_drawn(grown: Any) -> None:
    store = grown([[10_000]])
    sampler = store.sampler(dr.Prioritized(alpha=1.0, eps=1 / 1024))
    np.testing.assert_allclose(priorities(sampler), np.ones(10_000))
    assert entered(store, sampler) == pytest.approx(1.0)
    sampler.update_priorities(ids_of(sampler)[::500], np.arange(21) / 1024)
    assert entered(store, sampler) == pytest.approx(21 / 1024)
    assert np.isclose(priorities(sampler), 1.0).sum() == 10_001 - 21


def test_the_largest_falls_when_its_id_is_updated_or_goes(grown: Any) -> None:
    store = grown([[300]])
    sampler = store.sampler(dr.Prioritized(alpha=1.0, eps=0.5))
    ids = ids_of(sampler)
    found = []
    for some, errors, hidden in (
        (ids[:4], [7.0, -5.0, 3.0, 2.0], 0),
        (ids[:1], [0.0], 0),
        (ids[[1, 1]], [9.0, 4.0], 0),  # the last one counts
        ([], [], 2),
        ([], [], 2),  # those that entered by the rule are left
        (ids[-1:], [-0.25], 0),
    ):
        assert sampler.update_priorities(some, errors) == 0
        if hidden:
            store.hide(hidden)
        found.append(entered(store, sampler))
    assert found == pytest.approx([7.5, 5.5, 4.5, 3.5, 1.0, 0.75])


def test_ids_that_a_view_does_not_offer_count_when_it_does_again(grown: Any) -> None:
    store = grown([[5]], [3])
    sampler = store.sampler(dr.Prioritized(alpha=1.0, eps=0.5))
    sampler.update_priorities(ids_of(sampler), np.arange(8.0))
    sampler.view = dr.Transitions(3)
    assert len(ids_of(sampler)) == 6  # of the open episode, one
    store.add(0, 3, ends=False)
    assert priorities(sampler).tolist() == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 7.5])
    sampler.view = dr.Transitions()
    assert priorities(sampler)[-3:].tolist() == pytest.approx([7.5] * 3)


def test_each_kind_of_id_keeps_its_priorities_while_the_view_is_switched(grown: Any) -> None:
    sampler = grown([[20]], [8]).sampler(dr.Prioritized(alpha=1.0, eps=0.1))
    errors = np.arange(28.0)
    sampler.update_priorities(ids_of(sampler), errors)
    windows = dr.Sequences(length=4, overlap=0)
    sampler.view = windows
    np.testing.assert_allclose(priorities(sampler), np.ones(7))
    sampler.update_priorities(ids_of(sampler)[:1], np.full((1, 4), 2.0))
    for view, want in (
        (dr.Transitions(5), errors[:24] + 0.1),
        (dr.Transitions(1), errors + 0.1),
        (windows, [2.1, *[1.0] * 6]),
    ):
        sampler.view = view
        np.testing.assert_allclose(priorities(sampler), want)


def table_of(state: Any) -> dict[str, Any]:
    table: dict[str, Any] = state["planner"]["state"]['["transitions"]']
    return table


@pytest.mark.parametrize("saved_before", [False, True])
def test_a_loaded_table_knows_which_priorities_were_given(grown: Any, saved_before: bool) -> None:
    store = grown([[100]])
    one, other = (store.sampler(dr.Prioritized(alpha=1.0, eps=0.125)) for _ in range(2))
    one.update_priorities(ids_of(one)[:50], np.full(50, 0.25))
    state = one.state_dict()
    if saved_before:  # by a version that did not know it, and saved the largest so far
        del table_of(state)["given"]
        table_of(state)["largest"] = 1.0
    other.load_state_dict(state)
    store.add(0, 5)
    for sampler in (one, other):
        np.testing.assert_allclose(priorities(sampler), [0.375] * 50 + [1.0] * 50 + [0.375] * 5)


def test_alpha_may_change_through_zero_and_back(grown: Any) -> None:
    distribution, errors = dr.Prioritized(alpha=0.6, eps=0.1), np.linspace(0, 3, 30)
    sampler = grown([[30]]).sampler(distribution)
    sampler.update_priorities(ids_of(sampler), errors)
    for alpha in (0.0, 1.0, 0.6):
        distribution.alpha = alpha
        p = (errors + 0.1) ** alpha
        np.testing.assert_allclose(chances(sampler), p / p.sum())
        assert distribution.alpha == alpha


def test_an_update_of_ids_that_are_gone_is_skipped_and_counted_and_the_last_duplicate_counts(grown: Any) -> None:
    store = grown([[10]], [6])
    sampler = store.sampler(dr.Prioritized(alpha=1.0, eps=1.0), dr.Transitions(3))
    ids = ids_of(sampler)
    store.hide(4)
    assert ids_of(sampler).tolist() == ids[4:].tolist()
    index = [ids[0], ids[5], ids[6], ids[5], -1, ids[-1] + 1, 1 << 57]
    assert sampler.update_priorities(index, [9.0, 9, 2, 4, 9, 9, 9]) == 4
    want = np.ones(len(ids) - 4)
    want[[1, 2]] = 5.0, 3.0
    np.testing.assert_allclose(priorities(sampler), want)


def test_an_update_that_is_refused_changes_nothing(grown: Any) -> None:
    sampler = grown([[10]]).sampler(dr.Prioritized())
    before, ids = chances(sampler), ids_of(sampler)
    for index, message in (([1.0, np.nan], "td_error[1] is nan"), ([np.inf, 1.0], "td_error[0] is inf")):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}, not finite: nothing was updated$"):
            sampler.update_priorities(ids[:2], index)
    for shape, message in (((3,), "one row for each of 2"), ((2, 5), "one axis")):
        with pytest.raises(ValueError, match=message):
            sampler.update_priorities(ids[:2], np.ones(shape))
    assert sampler.update_priorities([], []) == 0
    np.testing.assert_array_equal(chances(sampler), before)


@pytest.mark.parametrize("eta", [0.5, 0.9])
def test_the_error_of_a_sequence_counts_what_the_mask_counts(grown: Any, eta: float) -> None:
    view = dr.Sequences(length=4, overlap=2, burn_in=1)
    sampler = grown([[9, 2]]).sampler(dr.Prioritized(alpha=1.0, eps=1.0, eta=eta), view, fields=(*TOLD, "loss_mask"))
    masks = sampler.gather(ids_of(sampler)).loss_mask.numpy()
    errors = np.random.default_rng(0).normal(0, 3, masks.shape)
    counted = [np.abs(row[mask]) for row, mask in zip(errors, masks, strict=True)]
    assert len({len(row) for row in counted}) > 1
    assert sampler.update_priorities(ids_of(sampler), np.where(masks, errors, np.inf if eta == 0.5 else np.nan)) == 0
    want = [eta * row.max() + (1 - eta) * row.mean() + 1.0 if len(row) else 1.0 for row in counted]
    np.testing.assert_allclose(priorities(sampler), want)
    with pytest.raises(ValueError, match="^td_error has 3 steps a sequence, and these sequences have 4$"):
        sampler.update_priorities(ids_of(sampler), errors[:, :3])


def test_loading_drops_what_is_gone_and_takes_the_rest_for_new(grown: Any) -> None:
    store = grown([[10, 10]])
    one, other = (store.sampler(dr.Prioritized(alpha=1.0, eps=0.1)) for _ in range(2))
    errors = np.random.default_rng(0).exponential(1.0, 20)
    one.update_priorities(ids_of(one), errors)
    state = one.state_dict()
    assert table_of(state)["values"].nbytes == 8 * 20
    store.add(0, 5)
    store.hide(3)
    other.load_state_dict(state)
    np.testing.assert_allclose(priorities(other), [*(errors[3:] + 0.1), *[errors[3:].max() + 0.1] * 5])


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
        None,
    ],
    ids=repr,
)
def test_a_damaged_state_is_refused_and_changes_nothing(grown: Any, change: dict[str, Any] | None) -> None:
    sampler = grown([[10, 10]]).sampler(dr.Prioritized())
    sampler.update_priorities(ids_of(sampler), np.arange(20.0))
    before, state = chances(sampler), sampler.state_dict()
    if change is None:
        table_of(state).clear()
    else:
        table_of(state).update(change)
    with pytest.raises(ValueError, match=r"^this is not a state of Prioritized\(.*\): this "):
        sampler.load_state_dict(state)
    state["planner"]["state"] = {"transitions": {}}
    with pytest.raises(ValueError, match="is not a kind of id"):
        sampler.load_state_dict(state)
    np.testing.assert_array_equal(chances(sampler), before)


@pytest.mark.parametrize("pages", [1 << 40, 10**300], ids=["memory", "int64"])
def test_a_state_gets_no_memory_for_the_empty_pages_that_it_claims(grown: Any, pages: int) -> None:
    store = grown([[10, 10]])
    one, other = (store.sampler(dr.Prioritized()) for _ in range(2))
    one.update_priorities(ids_of(one), np.arange(20.0))
    state = one.state_dict()
    table_of(state).update({"pages": pages, "page": np.array([(1 << 40) - 1])})
    other.load_state_dict(state)
    np.testing.assert_array_equal(chances(other), chances(one))


def test_extreme_errors_keep_the_tree_in_order(grown: Any) -> None:
    sampler = grown([[40]]).sampler(dr.Prioritized(alpha=3.0, eps=1e-300), batch_size=500)
    ids, errors = ids_of(sampler), np.zeros(40)
    errors[::3] = 1e308
    sampler.update_priorities(ids, errors)
    batch = sampler.sample()
    assert set(batch.index.tolist()) <= set(ids[::3].tolist())
    assert np.isfinite(batch.probability.numpy()).all()
    sampler.update_priorities(ids, np.zeros(40))
    np.testing.assert_allclose(chances(sampler), 1 / 40)


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


@pytest.mark.parametrize(("beta", "told"), [(-1, "-1"), (lambda batches: float("nan"), "nan")])
def test_a_bad_beta_of_one_batch_is_refused(grown: Any, beta: Any, told: str) -> None:
    sampler = grown([[10]]).sampler(dr.Prioritized())
    with pytest.raises(ValueError, match=f"^beta must be a finite number of at least 0, not {told}$"):
        sampler.sample(beta=beta)
