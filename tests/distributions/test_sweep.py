"""A sweep gives each id once in a pass."""

import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from tests.distributions.conftest import ids_of


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("size", [1, 7, 50, 300])
def test_each_pass_gives_each_id_once_and_batches_stay_full(grown: Any, size: int, world_size: int) -> None:
    store = grown([[30, 11], [9]])
    for rank in range(world_size):
        sampler = store.sampler(dr.Sweep(passes=None), batch_size=size, rank=rank, world_size=world_size)
        ids, drawn = ids_of(sampler).tolist(), list[int]()
        while len(drawn) < 6 * len(ids):
            batch = sampler.sample()
            assert batch.batch_size == size
            drawn += batch.index.tolist()
        passes = [drawn[i * len(ids) : (i + 1) * len(ids)] for i in range(6)]
        assert all(sorted(one) == ids for one in passes)
        assert len({tuple(one) for one in passes}) == 6


def passes_of(sampler: dr.Sampler, count: int) -> np.ndarray:
    """Draw passes, and return the numbers of their ids in order, a row a pass."""
    ids = ids_of(sampler)
    return np.array([np.searchsorted(ids, sampler.sample(len(ids)).index.numpy()) for _ in range(count)])


def test_a_pass_of_any_number_of_ids_gives_each_once(grown: Any) -> None:
    store, size = grown([[]]), 0
    sampler = store.sampler(dr.Sweep(passes=None))
    for more in [*[1] * 70, 57, 1, 1, 127, 1, 1, 500]:
        store.add(0, more)
        size += more
        assert (np.sort(passes_of(sampler, 2)) == np.arange(size)).all()


def test_every_order_of_few_ids_comes_equally_often(grown: Any) -> None:
    found = passes_of(grown([[3]]).sampler(dr.Sweep(passes=None), fields=("index",)), 3_000)
    orders, counts = np.unique(found, axis=0, return_counts=True)
    assert len(orders) == 6
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.slow
def test_neighbours_and_places_are_independent_of_the_order(grown: Any) -> None:
    found = passes_of(grown([[20]]).sampler(dr.Sweep(passes=None), fields=("index",)), 1_500)
    places = np.argsort(found)  # the place of each id in a pass
    for number in (0, 7, 19):
        assert stats.chisquare(np.bincount(places[:, number], minlength=20)).pvalue > 1e-5
    steps = np.bincount((places[:, 1] - places[:, 0]) % 20, minlength=20)
    assert steps[0] == 0
    assert stats.chisquare(steps[1:]).pvalue > 1e-5


@pytest.mark.parametrize("order", ["random", "time"])
def test_a_pass_is_over_what_was_there_when_it_began_less_what_was_evicted(grown: Any, order: str) -> None:
    store = grown([[20], [15]], [10, 0])
    sampler = store.sampler(dr.Sweep(passes=None, order=order))
    before = sampler.ids().tolist()
    drawn = sampler.sample(10).index.tolist()
    store.add(1, 7)
    store.add(0, 8)
    store.hide(12)
    left, now = [i for i in before[12:] if i not in drawn], sampler.ids().tolist()
    assert len(now) == len(before) - 12 + 15
    for want in (left, now):
        found = sampler.sample(len(want)).index.tolist()
        assert sorted(found) == sorted(want)
        assert (found == want) == (order == "time")


@pytest.mark.parametrize("order", ["random", "time"])
@pytest.mark.parametrize("rank", [{}, {"rank": 1, "world_size": 3}], ids=["alone", "a rank"])
def test_what_is_left_is_what_is_drawn_until_the_end(grown: Any, rank: Any, order: str) -> None:
    sampler = grown([[30], [9, 14]]).sampler(dr.Sweep(passes=3, order=order), batch_size=1, **rank)
    ids, left, sizes = ids_of(sampler), [len(sampler)], list[int]()
    while left[-1]:
        sizes.append(sampler.sample(10).batch_size)
        left.append(len(sampler))
    assert left == [sum(sizes[i:]) for i in range(len(left))]
    assert left[0] == 3 * len(ids) > 30
    with pytest.raises(StopIteration):
        sampler.sample(10)


def test_a_rank_without_any_id_is_at_the_end_of_a_sweep_that_ends(grown: Any) -> None:
    assert list(grown([[3]]).sampler(dr.Sweep(passes=3), rank=5, world_size=6)) == []


def test_another_kind_of_id_begins_a_pass_anew(grown: Any) -> None:
    sampler = grown([[20]]).sampler(dr.Sweep(passes=1), batch_size=30)
    sampler.sample(6)
    sampler.view = dr.Sequences(4, 0)
    assert sorted(sampler.sample().index.tolist()) == ids_of(sampler).tolist()


@pytest.mark.parametrize("passes", [0, -1, 1.0, True, "all"])
def test_bad_passes_are_refused(passes: Any) -> None:
    message = f"passes must be an int of at least 1, or None for no end, not {passes!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Sweep(passes)


@pytest.mark.parametrize("order", ["oldest", None, 1])
def test_a_bad_order_is_refused(order: Any) -> None:
    with pytest.raises(ValueError, match=f'^order must be "random" or "time", not {re.escape(repr(order))}$'):
        dr.Sweep(order=order)


@pytest.mark.parametrize(
    ("order", "change"),
    [
        *(("random", {"cursor": 40}), ("random", {"cursor": -1}), ("random", {"count": np.zeros(1)})),
        *(("random", {"key": -2}), ("random", {"kind": "x"}), ("random", {"finished": None})),
        *(("time", {}), ("time", {"last": [1]}), ("time", {"last": [1, 2], "stride": np.zeros(1)})),
    ],
)
def test_a_damaged_state_or_one_of_another_order_is_refused(grown: Any, order: str, change: dict[str, Any]) -> None:
    store = grown([[40]])
    sampler = store.sampler(dr.Sweep())
    sampler.sample(3)
    state = sampler.state_dict()
    state["planner"]["state"] |= change
    with pytest.raises(ValueError, match=r"this is not a state of a sweep: "):
        store.sampler(dr.Sweep(order=order)).load_state_dict(state)
