"""Each episode, or each value of an episode field, is drawn equally often."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from tests.distributions.conftest import chances, ids_of

VIEWS = [
    dr.Transitions(),
    dr.Transitions(3),
    dr.Sequences(4, 1),
    dr.Sequences(4, 1, pad=False),
    dr.Sequences(4, 1, pad=False, align="end"),
    dr.Sequences(3, stride=5, pad=False),
    dr.Episodes(),
]
GROUPS = ["episode", "episode/task"]


def expected(store: Any, view: Any, by: str, **rank: int) -> np.ndarray:
    """The closed form, 1 / (groups · ids of the group), for each id of a rank."""
    with store.sampler(view=view) as every, store.sampler(view=view, **rank) as of_rank:
        ids, mine = ids_of(every), ids_of(of_rank)
    group: dict[int, int] = {}
    for number, episode in enumerate(store.store.episodes):
        value = number if by == "episode" else episode["task"] if episode.terminated else None
        if value is not None:
            group |= dict.fromkeys(episode.ids.tolist(), int(value))
    sizes = Counter(group[i] for i in ids.tolist() if i in group)
    found = np.array([1 / (len(sizes) * sizes[group[i]]) if i in group else 0.0 for i in mine.tolist()])
    return found / (found.sum() or 1.0)


def with_tasks(grown: Any) -> Any:
    store = grown([[], [], []])
    for i, steps in enumerate((30, 5, 12, 4, 17, 40, 9, 8)):
        store.add(i % 3, steps, task=(7, -3, 7, 250)[i % 4] if i != 5 else None)
    store.add(0, 4, ends=False)
    store.add(2, 7, ends=False)
    return store


@pytest.mark.parametrize("by", GROUPS)
@pytest.mark.parametrize("rank", [{}, {"rank": 1, "world_size": 2}], ids=["alone", "a rank"])
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_groups_are_drawn_equally_often_and_then_their_ids(grown: Any, view: Any, rank: Any, by: str) -> None:
    store = with_tasks(grown)
    sampler = store.sampler(dr.Stratified(by), view, batch_size=30_000, **rank)
    want, ids = expected(store, view, by, **rank), ids_of(store.sampler(view=view, **rank))
    assert ids_of(sampler).tolist() == ids[want > 0].tolist()
    assert (want > 0).all() == (by == "episode")
    np.testing.assert_allclose(sampler.gather(ids).probability.numpy(), want, rtol=1e-12)
    counts = np.bincount(np.searchsorted(ids, sampler.sample().index.numpy()), minlength=len(ids))
    assert not counts[want == 0].any()
    assert stats.chisquare(counts[want > 0], 30_000 * want[want > 0]).pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("view", [dr.Transitions(), dr.Sequences(4, 1, pad=False), dr.Episodes()], ids=str)
@pytest.mark.parametrize("by", GROUPS)
def test_while_the_store_grows_and_loses_steps(grown: Any, by: str, view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskreplay.distributions.population.SMALL", 5)
    monkeypatch.setattr("diskreplay.distributions.stratified._FEW", 2)
    rng, store, compared = np.random.default_rng(0), with_tasks(grown), 0
    sampler = store.sampler(dr.Stratified(by), view)
    for number in range(60):
        lane, task = int(rng.integers(3)), int(rng.integers(5)) ** 3 - 4
        store.add(lane, int(rng.integers(6)), ends=rng.random() < 0.4, task=task if rng.random() < 0.8 else None)
        if rng.random() < 0.4:
            store.hide(int(rng.integers(1, 6)))
        want = expected(store, view, by)
        np.testing.assert_allclose(chances(sampler), want[want > 0], rtol=1e-12)
        compared += len(want)
        if number % 10 == 0:  # what follows afresh, as after a load, draws the same
            with store.sampler(dr.Stratified(by), view) as other:
                other.load_state_dict(sampler.state_dict())
                assert other.sample().index.equal(sampler.sample().index)
    assert compared > 500


def test_a_mixture_holds_it_and_weighs_by_its_chances(grown: Any) -> None:
    store = with_tasks(grown)
    prioritized = dr.Prioritized(alpha=1.0, beta=0.5, eps=0.01)
    parts = [(dr.Stratified(), 1.0), (dr.Stratified("episode/task"), 2.0), (prioritized, 1.0)]
    sampler = store.sampler(dr.Mixture(parts), batch_size=500)
    ids = ids_of(sampler)
    errors = np.random.default_rng(0).exponential(1.0, len(ids))
    sampler.update_priorities(ids, errors)
    forms = [expected(store, dr.Transitions(), by) for by in GROUPS]
    want = 0.25 * forms[0] + 0.5 * forms[1] + 0.25 * (errors + 0.01) / (errors + 0.01).sum()
    np.testing.assert_allclose(chances(sampler), want, rtol=1e-9)
    batch = sampler.sample()
    weights = (len(ids) * want[np.searchsorted(ids, batch.index.numpy())]) ** -0.5
    np.testing.assert_allclose(batch.weight.numpy(), weights / weights.max(), rtol=1e-6)


def test_without_a_value_there_is_nothing_to_draw(grown: Any) -> None:
    store = grown([[20]], [10])
    sampler = store.sampler(dr.Stratified("episode/task"))
    message = (
        "none of the 30 sampleable steps is of an ended episode with a value of episode/task; 1 is needed, append more"
    )
    with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}$"):
        sampler.sample()
    assert sampler.sampleable == 0
    store.add(0, 1, task=3)  # which ends the episode that was open
    assert sampler.sampleable == 11
    assert chances(sampler).tolist() == pytest.approx([1 / 11] * 11)


@pytest.mark.parametrize("by", ["task", "", "episode/", "episodes", 3, None])
def test_a_bad_group_is_refused(by: Any) -> None:
    message = f'by must be "episode" or an episode field such as "episode/task", not {by!r}'
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Stratified(by)
