"""A sweep gives each id once in a pass."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

import diskreplay as dr
from diskreplay.sampling.passes import permuted
from diskreplay.sampling.population import Share
from tests.sampling.growing import add_episodes, everything, grown, population_of


@given(st.integers(1, 3_000), st.integers(0, 2**63 - 1))
def test_a_key_permutes_the_numbers(size: int, key: int) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_every_order_of_few_numbers_comes_equally_often() -> None:
    orders, counts = np.unique([permuted(np.arange(3), 3, key) for key in range(3_000)], axis=0, return_counts=True)
    assert len(orders) == 6
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.slow
def test_neighbours_and_places_are_independent_of_the_order() -> None:
    places = np.array([permuted(np.arange(20), 20, key) for key in range(1_500)])
    for number in (0, 7, 19):
        assert stats.chisquare(np.bincount(places[:, number], minlength=20)).pvalue > 1e-5
    steps = np.bincount((places[:, 1] - places[:, 0]) % 20, minlength=20)
    assert steps[0] == 0
    assert stats.chisquare(steps[1:]).pvalue > 1e-5


@pytest.mark.parametrize("size", [1, 7, 50, 300])
def test_each_pass_gives_each_id_once_and_batches_stay_full(size: int) -> None:
    population, sweep, rng = population_of(grown(2, [[30, 11], [9]])), dr.Sweep(passes=None), np.random.default_rng(0)
    ids = everything(population).tolist()
    drawn: list[int] = []
    while len(drawn) < 6 * len(ids):
        draw = sweep.draw(population, size, rng)
        assert len(draw.ids) == size
        drawn += draw.ids.tolist()
    passes = [drawn[i * len(ids) : (i + 1) * len(ids)] for i in range(6)]
    assert all(sorted(one) == ids for one in passes)
    assert len({tuple(one) for one in passes}) == 6


def test_the_last_pass_ends_in_a_short_batch_and_then_nothing() -> None:
    population, sweep, rng = population_of(grown(1, [[10]])), dr.Sweep(passes=2), np.random.default_rng(0)
    lengths = [len(sweep.draw(population, 8, rng).ids) for _ in range(5)]
    assert lengths == [8, 8, 4, 0, 0]


def test_a_pass_is_over_what_was_there_when_it_began_less_what_was_evicted() -> None:
    store = grown(1, [[20]], [10])
    population, sweep, rng = population_of(store), dr.Sweep(passes=None), np.random.default_rng(0)
    before = everything(population).tolist()
    drawn = sweep.draw(population, 10, rng).ids.tolist()
    add_episodes(store, 0, [[]], [25])
    store.end(0, 0)
    store.frontier = before[12]
    population.refresh(store.snapshot())
    left = [i for i in before[12:] if i not in drawn]
    assert sorted(sweep.draw(population, len(left), rng).ids.tolist()) == left
    now = everything(population).tolist()
    assert sorted(sweep.draw(population, len(now), rng).ids.tolist()) == now
    assert len(now) > len(before) - 12


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_sweep_their_own_ids_once_a_pass(world_size: int) -> None:
    population = population_of(grown(2, [[30], [9, 14]]))
    ids = everything(population)
    for rank in range(world_size):
        sweep, rng = dr.Sweep(passes=None), np.random.default_rng(rank)
        mine = ids[Share(rank, world_size).contains(ids)].tolist()
        population.share = Share(rank, world_size)
        drawn = [sweep.draw(population, 1, rng).ids[0] for _ in range(3 * len(mine))]
        for i in range(3):
            assert sorted(drawn[i * len(mine) : (i + 1) * len(mine)]) == mine


def test_a_rank_without_any_id_is_not_enough_data_or_the_end() -> None:
    population = population_of(grown(1, [[3]]))
    population.share = Share(5, 6)
    message = "none of the 3 sampleable steps belongs to rank 5 of 6; 1 is needed, append more"
    with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}$"):
        dr.Sweep(passes=None).draw(population, 4, np.random.default_rng(0))
    assert len(dr.Sweep(passes=3).draw(population, 4, np.random.default_rng(0)).ids) == 0


@pytest.mark.parametrize("done", [0, 1, 17, 40, 41, 95])
def test_a_saved_sweep_goes_on_where_it_was(done: int) -> None:
    def start() -> tuple[Any, np.random.Generator]:
        return population_of(grown(1, [[40]])), np.random.default_rng(1)

    population, rng = start()
    whole, sweep = dr.Sweep(passes=3), dr.Sweep(passes=3)
    want = whole.draw(population, 200, rng).ids.tolist()
    assert len(want) == 120
    population, rng = start()
    drawn = sweep.draw(population, done, rng).ids.tolist()
    loaded = dr.Sweep(passes=3)
    loaded.load_state_dict(sweep.state_dict())
    drawn += loaded.draw(population, 200, rng).ids.tolist()
    assert drawn == want


def test_another_kind_of_id_begins_a_pass_anew_and_another_view_of_the_same_kind_does_not() -> None:
    store, sweep, rng = grown(1, [[20]]), dr.Sweep(passes=1), np.random.default_rng(0)
    one, five, windows = (population_of(store, v) for v in (dr.Transitions(1), dr.Transitions(5), dr.Sequences(4, 0)))
    drawn = [*sweep.draw(one, 6, rng).ids, *sweep.draw(five, 30, rng).ids]
    assert sorted(drawn) == everything(one).tolist()
    sweep = dr.Sweep(passes=1)
    sweep.draw(one, 6, rng)
    assert sorted(sweep.draw(windows, 30, rng).ids) == everything(windows).tolist()


@pytest.mark.parametrize("passes", [0, -1, 1.0, True, "all"])
def test_bad_passes_are_refused(passes: Any) -> None:
    message = f"passes must be an int of at least 1, or None for no end, not {passes!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Sweep(passes)


@pytest.mark.parametrize(
    "change", [{"cursor": 40}, {"cursor": -1}, {"count": np.zeros(1)}, {"key": -2}, {"kind": "x"}, {"finished": None}]
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    sweep = dr.Sweep()
    sweep.draw(population_of(grown(1, [[40]])), 3, np.random.default_rng(0))
    with pytest.raises(ValueError, match="^this is no state of a sweep: "):
        dr.Sweep().load_state_dict({**sweep.state_dict(), **change})


# --- oldest first ----------------------------------------------------------------------------------------------------


def timed_population(store: Any, times: dict[int, int], view: Any = None) -> Any:
    """A population of a store whose steps were published when `times` says, by id; of others by their ids."""
    population = population_of(store, view)
    set_times(population, times)
    return population


def set_times(population: Any, times: dict[int, int]) -> None:
    population.snapshot.times = lambda ids: np.array([times.get(i, i) for i in ids.tolist()], np.int64)


def in_order(ids: np.ndarray, times: dict[int, int]) -> list[int]:
    return sorted(ids.tolist(), key=lambda i: (times.get(i, i), i))


def random_times(store: Any, rng: np.random.Generator) -> dict[int, int]:
    """Times that never fall along a lane, with many that are equal; lanes are ahead of each other at random."""
    found = {}
    for segment, lanes in enumerate(store.lanes):
        for lane in range(lanes):
            rows = 2 + store.next_row[segment][lane] + store.open[segment][lane]
            steps = np.cumsum(rng.integers(0, 3, rows) * rng.integers(0, 9))
            found |= {store.id(segment, lane, row): int(time) for row, time in enumerate(steps)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("block", "piece"), [(1 << 16, 1 << 12), (7, 3), (1, 1)])
@pytest.mark.parametrize("view", [dr.Transitions(), dr.Sequences(4, 1), dr.Sequences(4, 1, pad=False)], ids=str)
def test_a_pass_in_order_of_time_goes_oldest_first_over_all_lanes(
    monkeypatch: pytest.MonkeyPatch, view: Any, block: int, piece: int, seed: int
) -> None:
    monkeypatch.setattr("diskreplay.sampling.passes._SORTED_AT_ONCE", block)
    monkeypatch.setattr("diskreplay.sampling.passes._PIECE", piece)
    rng = np.random.default_rng(seed)
    store = grown(3, [[30, 11], [9, 9, 9], [1, 40]], [4, 0, 7])
    store.add_segment(2)
    add_episodes(store, 1, [[12], [3, 25]], [0, 6])
    times = random_times(store, rng)
    population = timed_population(store, times, view)
    want = in_order(everything(population), times)
    sweep = dr.Sweep(passes=2, order="time")
    drawn = [sweep.draw(population, int(size), rng).ids.tolist() for size in rng.integers(1, 30, 200)]
    assert [i for ids in drawn for i in ids] == want + want
    assert drawn[-1] == []


def test_a_pass_in_order_of_time_passes_over_what_was_evicted_and_leaves_new_ids_to_the_next() -> None:
    rng = np.random.default_rng(0)
    store = grown(2, [[20, 15], [30]], [10, 0])
    times = random_times(store, rng)
    population, sweep = timed_population(store, times), dr.Sweep(passes=2, order="time")
    before = in_order(everything(population), times)
    assert sweep.draw(population, 9, rng).ids.tolist() == before[:9]
    add_episodes(store, 0, [[], [7]], [25, 0])
    store.frontier = sorted(before)[30]
    population.refresh(store.snapshot())
    set_times(population, times)
    left = [i for i in before[9:] if i >= store.frontier]
    assert sweep.count_left(population) == len(left) + population.size
    now = in_order(everything(population), times)
    assert sweep.draw(population, 500, rng).ids.tolist() == left + now
    assert len(now) > len(left)


@pytest.mark.parametrize("done", [0, 1, 17, 75, 76, 100])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_saved_sweep_in_order_of_time_goes_on_where_it_was_also_if_ids_left(done: int, world_size: int) -> None:
    rng = np.random.default_rng(1)
    store = grown(2, [[20, 15], [40]])
    times = random_times(store, rng)
    population = timed_population(store, times)
    population.share = Share(world_size - 1, world_size)
    sweep, loaded = dr.Sweep(passes=3, order="time"), dr.Sweep(passes=3, order="time")
    sweep.draw(population, done, rng)
    loaded.load_state_dict(sweep.state_dict())
    left, state = sweep.count_left(population), sweep.state_dict()
    assert loaded.count_left(population) == left
    want = sweep.draw(population, 500, rng).ids.tolist()
    assert len(want) == left
    assert loaded.draw(population, 500, rng).ids.tolist() == want
    store.frontier = sorted(times)[12]
    population.refresh(store.snapshot())
    set_times(population, times)
    loaded.load_state_dict(state)
    assert loaded.draw(population, 500, rng).ids.tolist() == [i for i in want if i >= store.frontier]


@pytest.mark.parametrize("state", [{}, {"last": [1]}, {"last": [1, 2], "stride": np.zeros(1)}])
def test_a_state_of_another_order_is_refused(state: dict[str, Any]) -> None:
    population, sweep = population_of(grown(1, [[40]])), dr.Sweep()
    sweep.draw(population, 3, np.random.default_rng(0))
    with pytest.raises(ValueError, match="^this is no state of a sweep: "):
        dr.Sweep(order="time").load_state_dict({**sweep.state_dict(), **state})


@pytest.mark.parametrize("order", ["oldest", None, 1])
def test_a_bad_order_is_refused(order: Any) -> None:
    with pytest.raises(ValueError, match=f'^order must be "random" or "time", not {re.escape(repr(order))}$'):
        dr.Sweep(order=order)


# --- how many are left -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["random", "time"])
@pytest.mark.parametrize("share", [Share(), Share(1, 3)])
def test_what_is_left_is_what_is_drawn_until_the_end(share: Share, order: str) -> None:
    population, sweep = population_of(grown(2, [[30], [9, 14]])), dr.Sweep(passes=3, order=order)
    population.share = share
    rng, left = np.random.default_rng(0), []
    sizes = []
    while not sizes or sizes[-1]:
        left.append(sweep.count_left(population))
        sizes.append(len(sweep.draw(population, 10, rng).ids))
    assert left == [sum(sizes[i:]) for i in range(len(sizes))]
    assert left[0] == 3 * share.contains(everything(population)).sum()
    assert left[-1] == 0
