"""A mixture draws from each of its distributions by its share."""

import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from tests.distributions.conftest import chances, ids_of, lose_batch


@pytest.mark.slow
def test_an_id_is_drawn_with_the_mixed_probability_and_weighed_by_it(grown: Any) -> None:
    rng, n = np.random.default_rng(0), 75
    prioritized = dr.Prioritized(alpha=1.0, beta=dr.Linear(0.5, 1.0, 10), eps=0.01, stratified=False)
    mixture = dr.Mixture([(prioritized, 3), (dr.Recency(20), 1.5), (dr.Uniform(), 0.5), (dr.Sweep(passes=None), 1.0)])
    sampler = grown([[75]]).sampler(mixture, batch_size=500)
    ids, errors = ids_of(sampler), rng.exponential(1.0, n)
    assert sampler.update_priorities(np.append(ids, -1), np.append(errors, 1.0)) == 1
    recent = 2.0 ** (-np.arange(n)[::-1] / 20)
    want = (3 * (errors + 0.01) / (errors + 0.01).sum() + 1.5 * recent / recent.sum() + 1.5 / n) / 6
    np.testing.assert_allclose(chances(sampler), want, rtol=1e-9)
    batches = [sampler.sample() for _ in range(400)]
    counts = np.bincount(np.searchsorted(ids, np.concatenate([b.index.numpy() for b in batches])), minlength=n)
    # The sweep's part varies less than independent draws do; the test then passes the more easily.
    assert stats.chisquare(counts, want * counts.sum()).pvalue > 1e-4
    weights = (n * want[np.searchsorted(ids, batches[5].index.numpy())]) ** -0.75
    np.testing.assert_allclose(batches[5].weight.numpy(), weights / weights.max(), rtol=1e-6)


def test_the_parts_take_turns_at_random_places(grown: Any) -> None:
    sampler = grown([[400]]).sampler(dr.Mixture([(dr.Recency(0.01), 1), (dr.Uniform(), 1)]), batch_size=8)
    ids = np.array([sampler.sample().index.numpy() for _ in range(2_000)])
    newest = (ids == ids_of(sampler)[-1]).mean(axis=0)
    assert (np.abs(newest - 0.5) < 0.06).all()


def test_without_priorities_all_weigh_one(grown: Any) -> None:
    sampler = grown([[10]]).sampler(dr.Mixture([(dr.Uniform(), 1), (dr.Recency(3), 1)]))
    assert sampler.sample().weight.tolist() == [1.0] * 16
    assert sampler.update_priorities(sampler.ids(), np.ones(10)) == 0


@pytest.mark.usefixtures("threads_make_all")
@pytest.mark.parametrize("rank", [{}, {"rank": 1, "world_size": 2}], ids=["alone", "a rank"])
def test_a_sweep_inside_a_mixture_misses_no_id_also_if_batches_drawn_ahead_lose_some(grown: Any, rank: Any) -> None:
    store = grown([[80]])

    def made() -> dr.Sampler:
        mixture = dr.Mixture([(dr.Sweep(passes=None), 0.5), (dr.Recency(0.001), 0.5)])
        return store.sampler(mixture, batch_size=10, prefetch=3, **rank)

    sampler = made()
    drawn, state = sampler.sample().index.tolist(), sampler.state_dict()
    store.hide(20)
    with store.sampler(**rank) as other:
        *mine, newest = ids_of(other).tolist()
    sampler = made()
    sampler.load_state_dict(state)
    while len(set(drawn).intersection(mine)) < len(mine):
        batch = sampler.sample()
        assert set(batch.index.tolist()) <= {*mine, newest}
        drawn += batch.index.tolist()
    # Until each was drawn, none was drawn twice.
    swept = [i for i in drawn[:-10] if i in mine]
    assert len(swept) == len(set(swept)) > 10


def test_a_batch_that_lost_ids_keeps_what_is_left_of_it_where_a_sweep_is_a_part(grown: Any) -> None:
    def made() -> dr.Sampler:
        mixture = dr.Mixture([(dr.Sweep(passes=None), 0.8), (dr.Prioritized(alpha=1.0, eps=0.1), 0.2)])
        sampler = store.sampler(mixture, batch_size=40)
        sampler.update_priorities(ids_of(sampler), np.arange(50.0))
        return sampler

    store = grown([[20]], [30])
    sampler, lost = made(), made().sample().index.tolist()
    lose_batch(sampler, lambda: store.hide(10))
    batch, ids = sampler.sample(), ids_of(sampler)
    left = [i for i in lost if i in ids]
    assert 10 < len(left) < 40 == batch.batch_size
    assert batch.index.tolist()[: len(left)] == left
    p = chances(sampler)[np.searchsorted(ids, batch.index.numpy())]
    np.testing.assert_array_equal(batch.probability.numpy(), p)
    np.testing.assert_allclose(batch.weight.numpy(), (p.min() / p) ** 0.4, rtol=1e-6)
    # No id that a sweep gives once was lost.
    assert {*batch.index.tolist(), *sampler.sample(60).index.tolist()} == set(ids.tolist())


@pytest.mark.parametrize(
    "make", [dr.Uniform, lambda: dr.Mixture([(dr.Uniform(), 1), (dr.Recency(5), 1)])], ids=["uniform", "mixture"]
)
def test_a_batch_that_lost_ids_is_drawn_afresh_where_ids_come_again(grown: Any, make: Any) -> None:
    store = grown([[50]])
    sampler, other = store.sampler(make()), store.sampler(make())
    lost, wanted = (other.sample().index for _ in range(2))
    lose_batch(sampler)
    assert sampler.sample().index.equal(wanted)
    assert not lost.equal(wanted)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts must name at least one distribution"),
        (5, "parts must be (distribution, share) pairs, not 5"),
        ([(dr.Uniform(), 0)], "the share of parts[0] must be a finite number above 0, not 0"),
        ([(dr.Uniform(), 1), ("x", 1)], "parts[1] must begin with a distribution such as Uniform(), not 'x'"),
        ([(dr.Sweep(2), 1)], "parts[0] is Sweep(passes=2), which ends: only Sweep(passes=None) fits"),
        (
            [(dr.Prioritized(normalize="store"), 1)],
            'parts[0] must have normalize="batch": the largest weight of a store is not known to a mixture',
        ),
    ],
)
def test_bad_parts_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Mixture(parts)
