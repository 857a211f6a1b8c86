"""The kernels of prioritized replay do what their twins do: whole tables, one of each kind, side by side."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import diskreplay as dr
from diskreplay.distributions import priorities
from diskreplay.distributions.population import Population
from diskreplay.distributions.priorities import PriorityTable
from diskreplay.kernels.priority_pages import CHANGED, NEW, UNUSED
from tests.distributions.growing import FakeStore, everything
from tests.kernels.pairs import KERNELS

seeds = st.integers(0, 2**32 - 1)


@contextmanager
def kernels(kind: int) -> Iterator[None]:
    """Choose the compiled kernels, 0, or the plain ones, 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priorities, "get_kernel", lambda name: KERNELS[name][kind])
        patch.setattr(priorities, "FIRST_PAGES", 1)
        yield


def arrays(table: PriorityTable) -> dict[str, np.ndarray]:
    tree = table.tree
    found = {"tree": tree.tree, "sums": tree.sums, "least": tree.smallest, "raw": table._raw, "pages": table._pages}
    unused, new = (table._stacks[i, : table._heights[height]] for i, height in ((UNUSED, UNUSED), (CHANGED, NEW)))
    return found | {"largest": np.array(table.largest), "unused": unused, "new": np.sort(new)}


def grow(store: FakeStore, rng: np.random.Generator) -> None:
    """Let lanes grow, some episodes end, and now and then the oldest ids be hidden."""
    for segment, lanes in enumerate(store.open):
        for lane in range(len(lanes)):
            lanes[lane] += int(rng.choice((0, 1, 5, 40)))
            if lanes[lane] and rng.random() < 0.3:
                store.end(segment, lane)
    if rng.random() < 0.2:
        store.add_segment(int(rng.integers(1, 4)))
    if store.log and rng.random() < 0.3:
        store.frontier = max(store.frontier, store.log[int(rng.integers(len(store.log)))][0] + 1)
    if rng.random() < 0.2:
        store.drop_hidden_segments()
    if rng.random() < 0.1:
        store.new_log()


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.sampled_from((dr.Transitions(2), dr.Sequences(5, overlap=3, pad=False), dr.Sequences(90, overlap=0))),
    st.sampled_from((0.0, 0.6, 1.0, 3.0)), st.booleans(), seeds,
)  # fmt: skip
def test_tables_of_both_kinds_hold_and_draw_the_same_bit_for_bit(
    view: Any, alpha: float, least: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    store = FakeStore()
    store.add_segment(2)
    population = Population(view)
    tables: list[PriorityTable] = []
    for kind in (0, 1):
        with kernels(kind):
            tables.append(PriorityTable(alpha, least))
    for _ in range(12):
        grow(store, rng)
        population.refresh(store.snapshot())
        if not population.size:
            continue
        key, size = int(rng.integers(1 << 63)), int(rng.integers(1, 180))
        strata = size if rng.random() < 0.5 else 1
        ids = rng.choice([*everything(population), -1, 1 << 50, store.frontier - 1], int(rng.integers(0, 40)))
        # Updated are the ids that were drawn, all but one of these, or any.
        sort, other = rng.choice(("drawn", "all but one", "any")), rng.integers(size)
        count = len(ids) if sort == "any" else size
        errors = rng.standard_normal(count) * 10.0 ** rng.integers(-5, 5)
        if count and rng.random() < 0.1:
            errors[rng.integers(count)] = rng.choice((np.nan, np.inf, -np.inf))
        found = []
        for kind, table in enumerate(tables):
            with kernels(kind):
                table.follow(population)
                drawn, chances = table.draw(key, size, strata)
                if sort != "any":
                    ids = drawn.copy()
                if sort == "all but one":
                    ids[other] = -1
                updates = [table.update(ids, errors * factor, 1e-6) for factor in (1.0, 0.5)]
                found.append((drawn, chances, updates, arrays(table)))
        fast, plain = found
        for one, other in zip(fast[:3], plain[:3], strict=True):
            np.testing.assert_array_equal(one, other)
        for name, array in fast[3].items():
            np.testing.assert_array_equal(array, plain[3][name], err_msg=name)


@pytest.mark.parametrize("kind", [0, 1])
def test_thousands_of_ids_are_shown_and_hidden_at_once(kind: int) -> None:
    store = FakeStore()
    store.add_segment(1)
    for steps in (3000, 700, 1024, 1):
        store.open[0][0] = steps
        store.end(0, 0)
    with kernels(kind):
        table = PriorityTable(0.5, least=True)
        for view, size in ((dr.Transitions(1), 4725), (dr.Transitions(None), 4725)):
            population = Population(view)
            population.refresh(store.snapshot())
            table.follow(population)
            assert table.tree.total == size
        table.update(everything(population)[1000:1002], np.array([4.0, 9.0]), 0.0)
        assert table.tree.total == size + 1 + 2
        store.frontier = int(everything(population)[1001])
        population.refresh(store.snapshot())
        table.follow(population)
        assert table.tree.total == 4725 - 1001 + 2
        assert table.tree.least == 1.0
        ids, chances = table.draw(12345, 8000, 8000)  # every id has at least two whole parts of the equal parts
        assert sorted(set(ids.tolist())) == everything(population).tolist()
        assert chances.max() == 3.0 / table.tree.total


def hundred_steps() -> tuple[FakeStore, Population]:
    """Return a store with one episode of 100 steps, and its population."""
    store = FakeStore()
    store.add_segment(1)
    store.open[0][0] = 100
    store.end(0, 0)
    population = Population(dr.Transitions(1))
    population.refresh(store.snapshot())
    return store, population


@pytest.mark.parametrize("kind", [0, 1])
def test_drawn_ids_that_are_hidden_since_are_not_updated(kind: int) -> None:
    store, population = hundred_steps()
    with kernels(kind):
        table = PriorityTable(1.0)
        table.follow(population)
        ids, _ = table.draw(12345, 100, 100)
        assert table.update(ids, np.full(100, 2.0), 0.0) == 0
        store.frontier = int(ids[40])
        population.refresh(store.snapshot())
        table.follow(population)
        assert table.update(ids, np.full(100, 3.0), 0.0) == 40
        assert table.tree.total == 3.0 * 60


@pytest.mark.parametrize("kind", [0, 1])
def test_draws_and_updates_of_any_size_follow_each_other(kind: int) -> None:
    _, population = hundred_steps()
    every = everything(population)
    with kernels(kind):
        table = PriorityTable(1.0)
        table.follow(population)
        for turn, (drawn, updated) in enumerate([(10, 20000), (20000, 10), (20000, 20000), (5000, 5000), (10, 10)]):
            ids, chances = table.draw(turn, drawn, drawn)
            np.testing.assert_array_equal(chances, table.masses_of(ids) / table.tree.total)
            if updated != drawn:
                ids = np.resize(every, updated)
            errors = np.arange(1.0, 1.0 + updated)
            assert table.update(ids, errors, 0.5) == 0
            last = dict(zip(ids.tolist(), errors.tolist(), strict=True))
            assert table.raw(ids).tolist() == [last[i] + 0.5 for i in ids.tolist()]
