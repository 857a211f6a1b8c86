"""A population offers exactly the ids of its view, however the store grew."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import diskreplay as dr
from diskreplay.distributions import population as module
from diskreplay.distributions.population import Order, Population, Share
from diskreplay.distributions.snapshot import EpisodeFilter
from tests.distributions.growing import FakeStore, grown, positions_of
from tests.views.fakes import FLAT_SCHEMA, Columns, Segment, Snapshot, episode

SHARE = Share(1, 3)
VIEWS = [
    dr.Transitions(2),
    dr.Sequences(length=3, overlap=1),
    dr.Sequences(length=4, overlap=1, pad=False),
    dr.Sequences(length=3, stride=5, pad="drop"),
    dr.Sequences(length=4, overlap=1, align="end"),
    dr.Episodes(),
]


def everything(population: Population) -> list[int]:
    return population.take(np.arange(population.size)).tolist()


class Growth(RuleBasedStateMachine):
    """Grow a fake store and compare the population with a plain list after every change."""

    def __init__(self) -> None:
        super().__init__()
        self.store = FakeStore()
        self.population = Population(dr.Transitions(2), EpisodeFilter(lambda _, first: first % 5 != 3), SHARE)

    @rule(lanes=st.integers(1, 3))
    def add_segment(self, lanes: int) -> None:
        self.store.lanes.append(lanes)
        self.store.next_row.append([0] * lanes)
        self.store.open.append([0] * lanes)

    @rule(data=st.data(), steps=st.integers(1, 6))
    def append(self, data: st.DataObject, steps: int) -> None:
        if self.store.lanes:
            segment = data.draw(st.integers(0, len(self.store.lanes) - 1))
            self.store.open[segment][data.draw(st.integers(0, self.store.lanes[segment] - 1))] += steps

    @rule(order=st.randoms(use_true_random=False), share=st.floats(0, 1))
    def end_episodes(self, order: Any, share: float) -> None:
        ended = []
        for s, lanes in enumerate(self.store.lanes):
            for lane in range(lanes):
                steps = self.store.open[s][lane]
                if steps and order.random() < share:
                    ended.append((self.store.id(s, lane, self.store.next_row[s][lane]), lanes, steps, steps + 1, 9))
                    self.store.next_row[s][lane] += steps + 1
                    self.store.open[s][lane] = 0
        order.shuffle(ended)
        self.store.log += ended

    @rule(share=st.floats(0, 1))
    def hide(self, share: float) -> None:
        ids = sorted(first + stride * j for first, stride, steps, *_ in self.store.log for j in range(steps))
        if ids:
            self.store.frontier = max(self.store.frontier, ids[int(share * (len(ids) - 1))])

    @rule()
    def compact(self) -> None:
        self.store.generation += 1
        self.store.log = [e for e in self.store.log if e[0] + e[1] * (e[2] - 1) >= self.store.frontier]

    @invariant()
    def holds_exactly_the_ids_of_the_view(self) -> None:
        compare(self.store, self.population)


def compare(store: FakeStore, population: Population) -> None:
    """Compare a population of two-step transitions, every fifth episode left out, with plain lists."""
    snapshot = store.snapshot()
    population.refresh(snapshot)
    admitted = [e for e in store.log if e[0] % 5 != 3]
    still_open = [e for e in snapshot.open.lines.tolist() if e[0] % 5 != 3]
    want = [f + s * j for f, s, steps, *_ in admitted for j in range(steps)]
    want += [int(f + s * j) for f, s, steps, *_ in still_open for j in range(steps - 2)]
    want = sorted(i for i in want if i >= store.frontier)
    found = everything(population)
    assert sorted(found) == want
    assert positions_of(population, np.array(found, np.int64)).tolist() == list(range(len(found)))
    others = [i for f, s, steps, *_ in store.log for i in (f + s * steps, f - s, f + 1)]
    others += [-1, 1 << 50, store.frontier - 1]
    inside = set(want)
    positions = positions_of(population, np.array(others, np.int64))
    assert [(at >= 0, at >= -1) for at in positions] == [(i in inside, True) for i in others]
    assert population.contains(np.array(others, np.int64)).tolist() == [i in inside for i in others]
    mine = np.array(want, np.int64)[SHARE.contains(np.array(want, np.int64))].tolist()
    assert population.share_size() == len(mine)
    assert sorted(i for ids in population.ids() for i in ids.tolist()) == mine


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_frontier_that_moves_step_by_step_through_interleaved_lanes_hides_exactly_what_is_below(seed: int) -> None:
    rng = np.random.default_rng(seed)
    store = FakeStore()
    store.lanes, store.next_row, store.open = [3], [[0, 0, 0]], [[0, 0, 0]]
    population = Population(dr.Transitions(2), EpisodeFilter(lambda _, first: first % 5 != 3), SHARE)
    for _ in range(150):
        for lane in range(3):
            store.open[0][lane] += int(rng.integers(0, 4))
            # Lane 0 has long episodes, which end when the frontier is in the middle of them.
            if store.open[0][lane] and rng.random() < (0.4 if lane else 0.03):
                steps = store.open[0][lane]
                store.log.append((store.id(0, lane, store.next_row[0][lane]), 3, steps, steps + 1, 9))
                store.next_row[0][lane] += steps + 1
                store.open[0][lane] = 0
        store.frontier = max(store.frontier, 3 * (min(store.next_row[0][1:]) - 40) + int(rng.integers(0, 9)))
        compare(store, population)
    assert population.epoch > 2


@pytest.mark.parametrize("seed", range(3))
def test_positions_among_many_runs_are_found_while_these_come_and_are_hidden(seed: int) -> None:
    rng = np.random.default_rng(seed)
    store, ends = FakeStore(), EpisodeFilter(lambda _, first: first % 5 != 3)
    store.add_segment(2)
    population, covered = Population(dr.Transitions(2), ends, SHARE), set[int]()
    for _ in range(12):
        for _ in range(int(rng.integers(0, 60))):
            lane = int(rng.integers(0, 2))
            store.open[0][lane] = int(rng.integers(1, 6))
            store.end(0, lane)
        store.open[0][0] = int(rng.integers(0, 6))
        if rng.random() < 0.4:
            store.frontier = max(store.frontier, int(rng.integers(0, 2 * min(store.next_row[0]) + 1)))
        compare(store, population)
        covered.add(len(population._block.coarse))
    assert len(covered) > 2


@pytest.fixture(autouse=True)
def sort_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 3)
    monkeypatch.setattr(module, "MANY", 1)


TestGrowth = Growth.TestCase
TestGrowth.settings = settings(max_examples=30, stateful_step_count=20)


class Resumed:
    """A population that was restored from another's order.

    It follows a store that was opened anew: one with the same episodes, in another order of discovery.
    """

    def __init__(self, store: FakeStore, view: Any, order: Order, rng: np.random.Generator) -> None:
        self.store, self.generation = store, 0
        self.population = Population(view, EpisodeFilter(lambda _, first: first % 5 != 3))
        self.population.restore(order)
        self.log = [store.log[i] for i in rng.permutation(len(store.log))]

    def compact(self) -> None:
        self.generation += 1
        self.log = [e for e in self.log if e[0] + e[1] * (e[2] - 1) >= self.store.frontier]

    def compare(self, other: Population) -> None:
        known = set(self.log)
        visible = [e for e in self.store.log if e[0] + e[1] * (e[2] - 1) >= self.store.frontier]
        self.log += [e for e in reversed(visible) if e not in known]
        snapshot = self.store.snapshot()
        snapshot.log, snapshot.generation = Columns.of(self.log), self.generation
        self.population.refresh(snapshot)
        found = everything(other)
        assert everything(self.population) == found
        assert [r.tolist() for r in self.population.runs()] == [r.tolist() for r in other.runs()]
        assert positions_of(self.population, np.array(found, np.int64)).tolist() == list(range(len(found)))
        assert listed(self.population.order()) == listed(other.order())


def listed(order: Order) -> list[Any]:
    return [column.tolist() for runs in order for column in runs]


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_a_restored_population_has_every_id_where_it_would_be_and_goes_on_alike(seed: int, view: Any) -> None:
    rng = np.random.default_rng(seed)
    store = grown(3, [[], [], []])
    population = Population(view, EpisodeFilter(lambda _, first: first % 5 != 3))
    resumed: Resumed | None = None
    cut_through = several = 0
    for _ in range(200):
        for lane in range(3):
            store.open[0][lane] += int(rng.integers(0, 4))
            # Lane 0 has long episodes, which end when the frontier is in the middle of them.
            if store.open[0][lane] and rng.random() < (0.4 if lane else 0.03):
                store.end(0, lane)
        if rng.random() < 0.5:
            store.frontier = max(store.frontier, 3 * (min(store.next_row[0][1:]) - 40) + int(rng.integers(0, 9)))
        if rng.random() < 0.05:
            store.new_log()
        before = population.size
        population.refresh(store.snapshot())
        several += population.size > before
        if resumed is not None:
            if rng.random() < 0.05:
                resumed.compact()
            resumed.compare(population)
        if rng.random() < 0.2:
            order = population.order()
            cut_through += len(order.partly.first) > 0
            loaded = Order.loaded(order.state_dict())
            assert listed(loaded) == listed(order)
            resumed = Resumed(store, view, loaded, rng)
            assert listed(resumed.population.order()) == listed(order)
    assert population.epoch > 2
    assert several > 10
    assert cut_through > 2 or isinstance(view, dr.Episodes)  # an episode is one id, which no frontier cuts through


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"runs": np.zeros((4, 2), np.int64), "regions": [1, 1, 0]},
        {"runs": np.ones((4, 2), np.int64), "regions": [1, 1, 1]},
        {"runs": np.ones((4, 2), np.int64), "regions": [3, -1, 0]},
        {"runs": -np.ones((4, 1), np.int64), "regions": [1, 0, 0]},
        {"runs": np.ones(3, np.int64), "regions": [1, 0, 0]},
    ],
)
def test_what_is_no_order_is_refused(state: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        Order.loaded(state)


def ended_snapshot(plans: list[tuple[int, str]], previous: Snapshot | None = None, **kwargs: Any) -> Snapshot:
    rng = np.random.default_rng(0)
    return Snapshot(FLAT_SCHEMA, [Segment([[episode(FLAT_SCHEMA, n, end, True, rng) for n, end in plans]])], **kwargs)


def test_what_is_hidden_whole_since_counts_for_a_restored_population_as_it_does_for_the_other() -> None:
    store = grown(2, [[4] * 14, []], [0, 10])
    population = Population(dr.Transitions())
    population.refresh(store.snapshot())
    store.end(0, 1)  # which began before all others, and is found after them
    for _ in range(5):
        store.open[0][0] = 4
        store.end(0, 0)
    population.refresh(store.snapshot())
    order = population.order()
    assert (len(order.main.first), len(order.ended.first)) == (14, 6)
    store.frontier = 2 * 55  # 11 episodes of lane 0, and that of lane 1
    restored = Population(dr.Transitions())
    restored.restore(order)
    for each in population, restored:
        each.refresh(store.snapshot())
    assert everything(restored) == everything(population)
    assert listed(restored.order()) == listed(population.order())


@pytest.mark.parametrize("calls", [0, 1])
def test_an_interrupted_refresh_loses_nothing(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    population = Population(dr.Transitions())
    population.refresh(ended_snapshot([(3, "terminated")]))
    find, left = population._find_starts, [calls]

    def interrupted(*arguments: Any) -> int:
        if not left:
            return find(*arguments)
        if left[0] == 0:
            left.clear()
            raise KeyboardInterrupt
        left[0] -= 1
        return find(*arguments)

    monkeypatch.setattr(population, "_find_starts", interrupted)
    grown = ended_snapshot([(3, "terminated"), (4, "terminated")])
    with pytest.raises(KeyboardInterrupt):
        population.refresh(grown)
    population.refresh(grown)
    assert population.size == 7
    assert len(everything(population)) == 7


def test_a_refresh_that_brings_nothing_new_sorts_nothing() -> None:
    population = Population(dr.Transitions())
    population.refresh(ended_snapshot([(3, "terminated")] * 40))
    epoch = population.epoch
    for _ in range(5):
        population.refresh(ended_snapshot([(3, "terminated")] * 40))
    population.refresh(ended_snapshot([(3, "terminated")] * 42))
    assert population.epoch == epoch
    assert population.size == 126


def test_episodes_are_put_in_order_when_the_first_step_is_hidden_and_not_before() -> None:
    store = FakeStore()
    store.add_segment(2)
    population = Population(dr.Transitions())
    for lane in (1, 0, 1):
        for _ in range(6):
            store.open[0][lane] = 2
            store.end(0, lane)
        population.refresh(store.snapshot())
    epoch, found = population.epoch, population.order()
    times = np.concatenate([found.main.time, found.ended.time])
    assert len(found.main.time) > 4
    assert (times[1:] < times[:-1]).any()
    store.frontier = 1
    population.refresh(store.snapshot())
    wanted = {2 * row + lane for lane, rows in enumerate((18, 36)) for row in range(rows) if row % 3 < 2}
    assert set(everything(population)) == wanted - {0}
    assert population.epoch > epoch
    times = population.order().main.time
    assert (times[1:] >= times[:-1]).all()


def test_runs_that_are_found_together_are_in_order() -> None:
    store = FakeStore()
    store.add_segment(2)
    for lane in (1, 0, 1, 0):
        for _ in range(5):
            store.open[0][lane] = 2
            store.end(0, lane)
    population = Population(dr.Transitions())
    population.refresh(store.snapshot())
    found = population.runs()
    assert len(found.first) == 20
    assert (found.first[1:] > found.first[:-1]).all()
