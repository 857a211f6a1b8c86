"""A table of priorities holds what plain dicts hold, however the store grows and the view changes."""

import itertools
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import diskreplay as dr
from diskreplay.distributions import population as population_module
from diskreplay.distributions.population import Cursor, Population, Share
from diskreplay.distributions.priorities import PriorityTable
from diskreplay.distributions.snapshot import EpisodeFilter
from diskreplay.kernels.packed import pack
from tests.distributions.growing import FakeStore, everything as every_id, grown

ALPHA = 0.7


class Model:
    """A table, and beside it what it should hold, in a dict."""

    def __init__(self, view: Any) -> None:
        self.store = FakeStore()
        self.episode_filter = EpisodeFilter(lambda _, first: first % 5 != 3)
        self.population = Population(view, self.episode_filter)
        self.table = PriorityTable(ALPHA, least=True)
        self.raw: dict[int, float] = {}
        self.given: set[int] = set()  # ids whose priority an update gave
        self.alpha = ALPHA

    def update(self, ids: list[int], values: list[float]) -> None:
        drawable = set(every_id(self.population).tolist())
        skipped = self.table.update(np.array(ids, np.int64), np.array(values), 0.0)
        assert skipped == sum(i not in drawable for i in ids)
        for i, value in zip(ids, values, strict=True):
            if i in drawable:
                self.raw[i] = value
                self.given.add(i)

    def largest(self, drawable: list[int]) -> float:
        return max((self.raw[i] for i in self.given.intersection(drawable)), default=1.0)

    def set_alpha(self, alpha: float) -> None:
        self.table.set_alpha(alpha)
        self.alpha = alpha

    def save_and_load(self) -> None:
        self.table = PriorityTable.loaded(self.table.state_dict(), self.alpha, least=True)

    def look(self) -> None:
        self.population.refresh(self.store.snapshot())

    def compare(self) -> None:
        if self.population.version == 0:
            self.look()
        self.table.follow(self.population)
        drawable = every_id(self.population).tolist()
        fresh = self.largest(drawable)
        for i in drawable:
            self.raw.setdefault(i, fresh)
        self.raw = {i: value for i, value in self.raw.items() if i >= self.population.visible.reached}
        ids = np.array(drawable, np.int64)
        want = {i: self.raw[i] ** self.alpha for i in drawable}
        places = np.sort(self.table.places(ids))
        np.testing.assert_array_equal(places, np.flatnonzero(self.table.tree.masses))
        assert dict(zip(drawable, self.table.masses_of(ids).tolist(), strict=True)) == pytest.approx(want)
        assert self.table.tree.total == pytest.approx(sum(want.values()))
        for share in (Share(1, 3), Share(0, 2), Share()):
            mine = ids[share.contains(ids)]
            assert self.table.total_of(share) == pytest.approx(sum(want[i] for i in mine.tolist()))
        assert self.table.tree.least == pytest.approx(min(want.values(), default=np.inf))
        assert (self.table.largest or 1.0) == fresh


class Prioritizing(RuleBasedStateMachine):
    """Grow a fake store, update, switch views, save and load; compare the table with a dict after every change."""

    views: tuple[Any, ...] = (dr.Transitions(2), dr.Transitions(1), dr.Transitions(None), dr.Transitions(4))

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(self.views[0])
        self.store = self.model.store

    @rule(lanes=st.integers(1, 3))
    def add_segment(self, lanes: int) -> None:
        self.store.add_segment(lanes)

    @rule(order=st.randoms(use_true_random=False))
    def append(self, order: Any) -> None:
        for lanes in self.store.open:
            for lane in range(len(lanes)):
                lanes[lane] += order.choice((0, 1, 3, 20))
        self.model.look()

    @rule(order=st.randoms(use_true_random=False), share=st.sampled_from((0.3, 0.7, 1.0)))
    def end_episodes(self, order: Any, share: float) -> None:
        lanes = [(s, lane) for s, lanes in enumerate(self.store.open) for lane, steps in enumerate(lanes) if steps]
        order.shuffle(lanes)
        for segment, lane in lanes:
            if order.random() < share:
                self.store.end(segment, lane)

    @rule(share=st.floats(0, 1))
    def hide(self, share: float) -> None:
        ids = sorted(first + stride * j for first, stride, steps, *_ in self.store.log for j in range(steps))
        if ids:
            self.store.frontier = max(self.store.frontier, ids[int(share * (len(ids) - 1))])

    @rule(new_log=st.booleans())
    def drop(self, new_log: bool) -> None:
        self.store.drop_hidden_segments()
        if new_log:
            self.store.new_log()

    @rule(view=st.integers(0, 3))
    def switch_view(self, view: int) -> None:
        self.model.population = Population(self.views[view], self.model.episode_filter)

    @rule(alpha=st.sampled_from((0.0, 0.5, 1.0)))
    def set_alpha(self, alpha: float) -> None:
        self.model.set_alpha(alpha)

    @rule()
    def save_and_load(self) -> None:
        self.model.save_and_load()

    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        some = every_id(self.model.population).tolist()
        ids = data.draw(st.lists(st.sampled_from([*some[:3], *some[-3:], -1, 1 << 60]), max_size=8))
        self.model.update(ids, data.draw(st.lists(st.floats(0.01, 5.0), min_size=len(ids), max_size=len(ids))))

    @rule()
    def look(self) -> None:
        self.model.look()

    @invariant()
    def holds_what_the_dict_holds(self) -> None:
        self.model.compare()


class PrioritizingWindows(Prioritizing):
    """The same over windows."""

    views = (dr.Sequences(length=4, overlap=1, pad=False),) * 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "view",
    [dr.Transitions(3), dr.Sequences(length=5, overlap=3, pad=False), dr.Sequences(length=5, overlap=3, align="end")],
    ids=repr,
)
def test_a_bounded_store_is_followed_step_by_step(view: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = Model(view)
    store = model.store
    store.add_segment(3)
    for _ in range(200):
        newest = len(store.lanes) - 1
        for segment in range(max(newest - 1, 0), newest + 1):
            for lane in range(store.lanes[segment]):
                store.open[segment][lane] += int(rng.integers(0, 4 if segment == newest else 2))
                if store.open[segment][lane] > 2 and rng.random() < (0.3 if lane else 0.03):
                    store.end(segment, lane)
        if sum(store.next_row[newest]) > 60:
            store.add_segment(int(rng.integers(1, 4)))
        ids = sorted(f + s * j for f, s, steps, *_ in store.log for j in range(steps))
        if len(ids) > 150:
            store.frontier = max(store.frontier, ids[len(ids) - 150])
        if rng.random() < 0.1:
            store.drop_hidden_segments()
        if rng.random() < 0.03:
            store.new_log()
        if rng.random() < 0.04:
            model.save_and_load()
        model.look()
        model.compare()
        some = rng.choice([*every_id(model.population), store.frontier - 1], 5)
        model.update(some.tolist(), rng.uniform(0.01, 3.0, 5).tolist())
    assert model.table.tree.capacity <= 64 * 40


def test_runs_of_a_segment_that_went_in_one_look_are_drawn_no_more() -> None:
    model = Model(dr.Transitions(1))
    for segment in range(2):
        model.store.add_segment(1)
        for _ in range(6):
            model.store.open[segment][0] = 4
            model.store.end(segment, 0)
    model.look()
    model.compare()
    cursor = Cursor()
    cursor.reach(model.population, cursor.changes(model.population))
    model.store.frontier = 1 << 35
    model.store.drop_hidden_segments()
    model.look()
    assert not cursor.changes(model.population).whole
    model.compare()


def test_steps_that_came_and_went_between_two_looks_are_not_drawn() -> None:
    model = Model(dr.Transitions(1))
    model.store.add_segment(1)

    def grow(episodes: int) -> None:
        for _ in range(episodes):
            model.store.open[0][0] = 4
            model.store.end(0, 0)
        model.look()

    grow(2)
    model.compare()
    grow(8)
    grow(1)  # the two regions become one
    model.store.frontier = 5 * 8 + 2
    grow(1)
    model.compare()


def test_a_table_that_uses_its_pages_again_goes_on_bit_by_bit_wherever_it_is_saved() -> None:
    store, rng = grown(3, [[30], [], []]), np.random.default_rng(0)
    population = Population(dr.Transitions())
    population.refresh(store.snapshot())
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
        store.frontier = max(store.frontier, int(every_id(population)[-3000:][0]))
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


@pytest.fixture(autouse=True)
def sort_and_compact_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(population_module, "SMALL", 3)
    monkeypatch.setattr("diskreplay.distributions.priorities.FIRST_PAGES", 1)


TestPrioritizing = Prioritizing.TestCase
TestPrioritizing.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPrioritizingWindows = PrioritizingWindows.TestCase
TestPrioritizingWindows.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("grow", [lambda table: table.draw(1, 10_000, 1), lambda table: table._resize(64)])
def test_after_an_interrupt_the_record_of_a_table_names_memory_that_is_there(grow: Any) -> None:
    # Of the algorithm: with freed memory a draw may go well, or end the process much later.
    for number in itertools.count():
        table, lines = PriorityTable(ALPHA), itertools.count()

        def interrupt(frame: Any, event: str, _: Any, lines: Any = lines, number: int = number) -> Any:
            if event == "line" and frame.f_code.co_qualname.startswith("PriorityTable.") and next(lines) == number:
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            grow(table)
            is_whole = True
        except KeyboardInterrupt:
            is_whole = False
        finally:
            sys.settrace(None)
        tree = table.tree
        named = table._pages, table._slots, table._stacks, table._heights, table._raw, table._bounds
        named = *named, tree.starts, tree.tree, tree.sums, tree.smallest, *table._ints, *table._floats
        assert (table._table == pack(*named)).all()
        if is_whole:
            break
    assert number > 5
