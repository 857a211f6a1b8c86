"""A fake store whose lanes grow, for tests of what follows it."""

from __future__ import annotations

from typing import Any

import numpy as np

import diskreplay as dr
from diskreplay.distributions.population import Population
from diskreplay.ids import OPEN, POSITION_MASK
from diskreplay.kernels import following
from tests.views.fakes import Columns, frozen_of, without


class FakeStore:
    """Lanes of segments that grow by whole episodes, an episode log in order of discovery, and a frontier.

    The frontier is an id; what is below it is hidden.
    """

    def __init__(self) -> None:
        self.lanes: list[int] = []
        self.next_row: list[list[int]] = []
        self.open: list[list[int]] = []
        self.log: list[tuple[int, int, int, int, int]] = []
        self.values: dict[int, int] = {}  # of ended episodes that were given one, by their first ids
        self.frontier = 0
        self.generation = 0
        self._widths: list[int] = []
        self._visible = without(0, 0, np.zeros(0, np.int64))

    def snapshot(self) -> Any:
        snapshot = type("Snapshot", (), {})()
        lanes = np.array(self.lanes, np.int64)
        if self._visible.reached != self.frontier or self._visible.lanes.tolist() != self.lanes:
            # The lanes of a segment that is gone keep their places.
            self._widths += self.lanes[len(self._widths) :]
            self._visible = without(self.frontier, 0, np.array(self._widths, np.int64))._replace(lanes=lanes)
        snapshot.visible, snapshot.oldest = self._visible, self._visible.oldest
        snapshot.reached = self._visible.reached
        snapshot.least_ids = lambda ids: snapshot.visible._replace(reached=1).least_ids(ids)
        snapshot.times = lambda ids: ids
        snapshot.episode_values = self.episode_values
        snapshot.origin, snapshot.lanes, snapshot.generation = 0, self._visible.lanes, self.generation
        snapshot.segments = object()
        snapshot.log = Columns.of(self.log)
        rows = [
            (self.id(s, lane, self.next_row[s][lane]), self.lanes[s], steps, steps, OPEN)
            for s in range(len(self.lanes))
            for lane, steps in enumerate(self.open[s])
            if steps
        ]
        known = np.full((following.LANE_ROWS, len(snapshot.oldest)), -1, np.int64)
        for first, width, steps, *_ in rows:
            place = snapshot.visible.lane_base[first >> 35] + (first & POSITION_MASK) % width
            known[[following.COMMITTED, following.OBSERVED], place] = (first & POSITION_MASK) // width + steps
        sealed = np.zeros(len(lanes), np.bool_)
        frozen = frozen_of(snapshot.visible, known, sealed, Columns.of(rows))
        snapshot.record, snapshot.alive, snapshot.open = frozen
        return snapshot

    def episode_values(self, leaf: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The value of each id's episode, and which have one."""
        found = {f + s * j: self.values.get(f) for f, s, steps, *_ in self.log for j in range(steps)}
        values = [found.get(i) for i in ids.tolist()]
        return np.array([v or 0 for v in values], np.int64), np.array([v is not None for v in values], bool)

    def id(self, segment: int, lane: int, row: int) -> int:
        return segment << 35 | (row * self.lanes[segment] + lane)

    def add_segment(self, lanes: int) -> None:
        self.lanes.append(lanes)
        self.next_row.append([0] * lanes)
        self.open.append([0] * lanes)

    def end(self, segment: int, lane: int) -> None:
        """End an open episode, with a final observation."""
        steps, lanes, row = self.open[segment][lane], self.lanes[segment], self.next_row[segment][lane]
        self.log.append((self.id(segment, lane, row), lanes, steps, steps + 1, 9))
        self.next_row[segment][lane] += steps + 1
        self.open[segment][lane] = 0

    def drop_hidden_segments(self) -> None:
        """As an eviction of files: the log keeps their episodes until it is made anew."""
        for segment in range(self.frontier >> 35):
            self.lanes[segment] = 0
            self.next_row[segment], self.open[segment] = [], []

    def new_log(self) -> None:
        self.generation += 1
        self.log = [e for e in self.log if e[0] + e[1] * (e[2] - 1) >= self.frontier]


def grown(lanes: int, episodes: list[list[int]], still_open: list[int] | None = None) -> FakeStore:
    """Make a store of one segment: the lengths of each lane's ended episodes, and of its open one."""
    store = FakeStore()
    store.add_segment(lanes)
    add_episodes(store, 0, episodes, still_open or [0] * lanes)
    return store


def add_episodes(store: FakeStore, segment: int, episodes: list[list[int]], still_open: list[int]) -> None:
    for lane, lengths in enumerate(episodes):
        for steps in lengths:
            store.open[segment][lane] = steps
            store.end(segment, lane)
        store.open[segment][lane] = still_open[lane]


def population_of(store: FakeStore, view: Any = None) -> Population:
    view = view or dr.Transitions()
    population = Population(view)
    population.refresh(store.snapshot())
    return population


def everything(population: Population) -> np.ndarray:
    """All ids that can be drawn, in their order."""
    return np.sort(population.take(np.arange(population.size)))


def positions_of(population: Population, ids: np.ndarray) -> np.ndarray:
    """The position of each id, -1 where it cannot be drawn."""
    run, (first, stride, count) = population.find_runs(ids), population.runs()
    there = run >= 0
    found = np.full(len(ids), -1)
    at, before = run[there], np.cumsum(count) - count
    found[there] = before[at] + (ids[there] - first[at]) // stride[at]
    return found


class Growth:
    """A store that grows and loses steps at random, and what follows it."""

    def __init__(self, seed: int, view: Any) -> None:
        self.rng, self.view = np.random.default_rng(seed), view
        self.store = FakeStore()
        self.store.add_segment(int(self.rng.integers(1, 4)))
        self.population = Population(view)

    def step(self) -> None:
        store, rng = self.store, self.rng
        segment = len(store.lanes) - 1
        for lane in range(store.lanes[segment]):
            store.open[segment][lane] += int(rng.integers(0, 6))
            if store.open[segment][lane] and rng.random() < 0.4:
                first = store.id(segment, lane, store.next_row[segment][lane])
                store.end(segment, lane)
                if rng.random() < 0.8:
                    store.values[first] = int(rng.integers(0, 5)) ** 3 - 4
        every = sorted(i for f, s, steps, *_ in store.log for i in range(f, f + s * steps, s) if i >= store.frontier)
        if rng.random() < 0.5 and len(every) > 80:
            store.frontier = every[int(rng.integers(0, min(40, len(every) - 70)))]
        if rng.random() < 0.1:
            for lane in range(store.lanes[segment]):
                if store.open[segment][lane]:
                    store.end(segment, lane)
            store.add_segment(int(rng.integers(1, 4)))
        if rng.random() < 0.05:
            store.drop_hidden_segments()
            store.new_log()
        self.population.refresh(store.snapshot())
