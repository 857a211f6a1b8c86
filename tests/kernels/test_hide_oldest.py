"""Hiding the oldest steps: the kernel and its twin do the same, and what is left is what a sort by time leaves."""

import numpy as np
import pytest

from diskreplay.ids import EPISODE_COLUMNS, POSITION_BITS
from diskreplay.kernels import following as live, hiding
from diskreplay.kernels.frozen import OWN_FOLDER
from diskreplay.kernels.packed import pack
from tests.kernels.pairs import KERNELS

ORIGIN, ROWS, CHUNK = 2, 64, 8


class Lanes:
    """Lanes of segments, and what of them was found so far.

    Their steps were published in a random order of lanes, or `together`: by all lanes at once but for those that pause.
    """

    def __init__(self, rng: np.random.Generator, together: bool = False) -> None:
        self.rng = rng
        self.lanes = rng.integers(1, 4, 3)
        self.lane_base = np.cumsum(self.lanes) - self.lanes
        self.places = int(self.lanes.sum())
        self.clocks = np.array([1000, 0, 77])
        # Of a row that is no step there is a time, too.
        self.is_step = rng.random((self.places, ROWS)) < 0.9
        self.is_step[:, 0] = True
        order = rng.permutation(np.repeat(np.arange(self.places), ROWS))
        self.wall = np.empty((self.places, ROWS), np.int64)
        rows = [0] * self.places
        if together:
            pauses = (rng.random((self.places, ROWS)) < 0.1) * rng.integers(1, 20, (self.places, ROWS))
            self.wall[:] = 5000 + np.cumsum(1 + pauses, axis=1)
        for now, place in enumerate([] if together else order.tolist()):
            self.wall[place, rows[place]] = 5000 + now
            rows[place] += 1
        self.slot = np.repeat(np.arange(3), self.lanes)
        self.committed = np.zeros(self.places, np.int64)
        # Some are in packs, where lanes stand one behind the other.
        in_pack = rng.random(3) < 0.4
        lane = np.arange(self.places) - self.lane_base[self.slot]
        self.first_rows = np.where(in_pack[self.slot], lane * ROWS, OWN_FOLDER)
        blocks = [
            np.ascontiguousarray(
                times.reshape(1, -1, CHUNK).transpose(1, 0, 2)
                if in_pack[s]
                else times.reshape(-1, ROWS // CHUNK, CHUNK).transpose(1, 0, 2)
            )
            for s in range(3)
            for times in [self.wall[self.slot == s] - self.clocks[s]]
        ]
        self.kept = blocks
        self.addresses = np.array([chunk.ctypes.data for block in blocks for chunk in block], np.int64)
        chunks = np.array([len(block) for block in blocks])
        self.table = np.cumsum(chunks) - chunks, chunks, np.full(3, CHUNK.bit_length() - 1)
        self.growing = np.array([(s, self.lanes[s], self.lane_base[s], 0, 0, ROWS, 0) for s in range(3)], np.int64)
        self.lines: list[list[int]] = []
        self.open: dict[int, int] = {}  # the first row of each lane's open episode

    def grow(self) -> None:
        """Publish rows; an episode ends at a row that is no step, or anywhere."""
        for place in range(self.places):
            for row in range(self.committed[place], min(ROWS, self.committed[place] + int(self.rng.integers(0, 12)))):
                if place in self.open and (not self.is_step[place, row] or self.rng.random() < 0.2):
                    self.lines.append(self._line(place, self.open.pop(place), row))
                if self.is_step[place, row]:
                    self.open.setdefault(place, row)
                self.committed[place] = row + 1

    def _line(self, place: int, start: int, stop: int) -> list[int]:
        slot = int(self.slot[place])
        width = int(self.lanes[slot])
        first = ((slot + ORIGIN) << POSITION_BITS) + start * width + place - int(self.lane_base[slot])
        return [first, width, stop - start, stop - start, 0, int(self.wall[place, start])]

    def rows(self) -> np.ndarray:
        rows = np.zeros((live.LANE_ROWS, self.places), np.int64)
        rows[live.COMMITTED] = self.committed
        rows[live.OPEN_START] = [self.open.get(place, -1) for place in range(self.places)]
        rows[live.OPEN_TIME] = [self.wall[p, self.open[p]] if p in self.open else 0 for p in range(self.places)]
        return rows

    def steps(self) -> list[tuple[int, int, int]]:
        """Return time, place and row of all steps that are there, the oldest first."""
        there = [(int(self.wall[p, r]), p, r) for p in range(self.places) for r in range(self.committed[p])]
        there.sort(key=lambda step: (step[0], self._line(step[1], step[2], 0)[0]))
        return [step for step in there if self.is_step[step[1], step[2]]]


class Hiding:
    """What one kernel keeps."""

    def __init__(self, kernel, lanes: Lanes) -> None:
        self.kernel, self.of = kernel, lanes
        self.heap = np.zeros((2 * lanes.places, hiding.HEAP_COLUMNS), np.int64)
        self.by_place = np.zeros((hiding.PLACE_ROWS, lanes.places), np.int64)
        self.by_place[[hiding.LINE, hiding.TAIL]] = -1
        self.following = np.zeros(1000, np.int64)
        self.found = np.zeros(hiding.FOUND, np.int64)
        self.bases = np.zeros_like(lanes.addresses)

    def hide(self, count: int, until: int) -> None:
        of, lines = self.of, np.array(self.of.lines, np.int64).reshape(-1, EPISODE_COLUMNS)
        self.found[hiding.COUNT], self.found[hiding.UNTIL] = count, until
        rows, head, apart = of.rows(), np.zeros(0, np.int64), np.arange(3)
        where = of.lanes, of.lane_base, of.clocks, apart, of.first_rows
        flags, times = (head,) * 4, (*of.table, self.bases)
        known = self.heap, self.by_place, self.following
        tables = pack(of.growing, *flags, *times, rows, lines, head, self.found, self.found, *where, *known)
        origin = np.int64(ORIGIN)  # as `advance_hiding` reads it from a record, also without numba
        while self.kernel(tables, origin, len(lines), self.found) == hiding.UNMAPPED:
            needed = int(self.found[hiding.NEEDED])
            slot = (needed >> POSITION_BITS) - ORIGIN
            row, lane = divmod(needed & ((1 << POSITION_BITS) - 1), int(of.lanes[slot]))
            row += max(int(of.first_rows[of.lane_base[slot] + lane]), 0)
            chunk = int(of.table[0][slot]) + row // CHUNK
            assert self.bases[chunk] == 0
            self.bases[chunk] = of.addresses[chunk]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(100))
def test_what_is_left_is_what_a_sort_by_time_leaves(case: int) -> None:
    rng = np.random.default_rng(case)
    lanes = Lanes(rng, together=case % 2 == 0)
    both = [Hiding(kernel, lanes) for kernel in KERNELS["hide_oldest"]]
    capacity, hidden, until = int(rng.integers(1, 150)), 0, 0
    for _ in range(12):
        lanes.grow()
        steps = lanes.steps()
        if case % 3 == 0:
            until = max(until, 5000 + int(rng.integers(0, len(steps) + 1)))
        hidden = max(hidden, len(steps) - capacity, sum(when < until for when, _, _ in steps))
        for one in both:
            count = max(len(steps) - int(one.found[hiding.HIDDEN]) - capacity, 0)
            one.hide(count, until)
            assert one.found[hiding.HIDDEN] == hidden
            kept = one.by_place[hiding.OLDEST]
            assert [row >= kept[place] for _, place, row in steps] == [i >= hidden for i in range(len(steps))]
            assert hidden == 0 or one.found[hiding.LAST] >= steps[hidden - 1][0]


@pytest.mark.parametrize("first", [0, 1])
def test_one_kernel_goes_on_where_the_other_has_stopped(first: int) -> None:
    lanes = Lanes(np.random.default_rng(5), together=True)
    one = Hiding(KERNELS["hide_oldest"][first], lanes)
    for turn in range(8):
        one.kernel = KERNELS["hide_oldest"][(first + turn) % 2]
        lanes.grow()
        steps = lanes.steps()
        one.hide(len(steps) // 2 - int(one.found[hiding.HIDDEN]), 0)
        kept = one.by_place[hiding.OLDEST]
        assert [row >= kept[place] for _, place, row in steps] == [i >= len(steps) // 2 for i in range(len(steps))]


@pytest.mark.parametrize("kernel", [0, 1])
def test_lanes_that_are_gone_are_passed_over(kernel: int) -> None:
    lanes = Lanes(np.random.default_rng(0))
    one = Hiding(KERNELS["hide_oldest"][kernel], lanes)
    lanes.grow()
    one.hide(1, 0)
    gone = lanes.slot == 1
    one.by_place[hiding.OLDEST, gone], one.by_place[hiding.LINE, gone] = hiding.NEVER, -1
    left = [step for step in lanes.steps() if not gone[step[1]] and step[2] >= one.by_place[hiding.OLDEST, step[1]]]
    before = int(one.found[hiding.HIDDEN])
    one.hide(5, 0)
    assert one.found[hiding.HIDDEN] == before + 5
    assert all(row < one.by_place[hiding.OLDEST, place] for _, place, row in left[:5])
    assert all(row >= one.by_place[hiding.OLDEST, place] for _, place, row in left[5:])
