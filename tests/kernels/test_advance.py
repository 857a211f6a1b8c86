"""The next snapshot in one call: kernels and their twins do the same, and what is left is the newest by time."""

import numpy as np
import pytest

from diskreplay.ids import EPISODE_COLUMNS, FIRST_ID, POSITION_MASK, STEPS
from diskreplay.kernels import advancing, following as live, frozen, hiding
from diskreplay.kernels.packed import pack
from tests.kernels.pairs import KERNELS
from tests.kernels.plain.frozen import Frozen
from tests.kernels.test_follow import CHUNK, CHUNKS, CLOCK, ORIGIN, ROWS, Lanes, episodes_of, untouched
from tests.kernels.test_twins import segments_of

BITS = CHUNK.bit_length() - 1


class Reader:
    """What a reader keeps that follows lanes of one segment by one kernel, and hides all but the newest steps."""

    def __init__(self, kernel, of: Lanes, capacity: int | None = None, splits: bool = False) -> None:
        self.kernel, self.of = kernel, of
        count = len(of.flags)
        self.rows, self.ended = untouched(count), np.zeros((2 * ROWS * count, EPISODE_COLUMNS), np.int64)
        self.found, self.hidden = np.zeros(live.FOUND, np.int64), np.zeros(hiding.FOUND, np.int64)
        self.hidden[[hiding.CAPACITY, hiding.LAST]] = -1 if capacity is None else capacity, -1
        self.found[live.SPLITS] = splits
        self.table = segments_of(np.array([count]), of.growing)
        self.table.head[frozen.ORIGIN] = ORIGIN
        self.oldest, self.time_bases = np.zeros(count, np.int64), of.time_bases.copy()
        self.make_room(0)
        self.asked: list[int] = []

    def make_room(self, count: int) -> None:
        self.heap = np.zeros((2 * count, hiding.HEAP_COLUMNS), np.int64)
        self.by_place = np.zeros((hiding.PLACE_ROWS, count), np.int64)
        self.by_place[[hiding.LINE, hiding.TAIL]] = -1
        self.following = np.zeros(len(self.ended), np.int64)

    def tables(self, hides: bool) -> np.ndarray:
        of, one, count = self.of, np.zeros(1, np.int64), len(self.oldest)
        flags = one, np.array([of.room]), np.array([BITS]), of.bases
        times = one, np.array([CHUNKS // 2]), np.array([BITS + 1]), self.time_bases
        lanes = of.growing, *flags, *times, self.rows, self.ended, self.table.head, self.found, self.hidden
        # Of `hide_oldest`, slot 0 is the segment with number ORIGIN.
        where = np.array([count]), one, np.array([CLOCK]), one, np.full(count, frozen.OWN_FOLDER)
        self.arrays = (*lanes, *where, self.heap, self.by_place, self.following) if hides else lanes
        self.hidden[hiding.OLDEST_AT] = self.oldest.ctypes.data
        return pack(*self.arrays)

    def advance(self, until: int = 0, hides: bool = True) -> np.ndarray | None:
        """Return the record of a snapshot, None where nothing has changed."""
        self.found[[live.CHANGED, live.FOLLOWED]] = 0
        count = len(self.oldest)
        self.record, newer = np.full(frozen.HEAD + live.LANE_ROWS * count, -7), np.full(count, -7)
        record = self.record
        self.asked = []
        while status := self.kernel(self.tables(hides), until, newer, record):
            self.asked.append(status)
            if status == advancing.UNREADY:
                self.make_room(count)
                self.hidden[hiding.READY] = 1
            elif status == live.ADDED:
                assert self.found[live.SPLITS]
            else:
                assert status in (live.UNCHECKED, advancing.UNMAPPED)
                assert (self.time_bases != self.of.time_bases).any()
                self.time_bases[:] = self.of.time_bases
        if self.found[live.CHANGED] & live.HIDDEN:
            self.oldest = newer
            assert self.hidden[hiding.OLDEST_AT] == newer.ctypes.data
        return record if self.found[live.CHANGED] else None

    def steps(self) -> list[tuple[int, int, int]]:
        """Return time, lane and row of all steps that were followed, the oldest first."""
        count, found = len(self.oldest), []
        for line in self.ended[: self.found[live.ENDED]].tolist():
            row, lane = divmod(line[FIRST_ID] & POSITION_MASK, count)
            found += [(lane, row + i) for i in range(line[STEPS])]
        for lane, (start, stop) in enumerate(self.rows[[live.OPEN_START, live.COMMITTED]].T.tolist()):
            found += [(lane, row) for row in range(start, stop) if start >= 0]
        return sorted(
            (int(self.of.times[r // (2 * CHUNK), lane, r % (2 * CHUNK)]) + CLOCK, lane, r) for lane, r in found
        )

    def numbers(self) -> list[int]:
        """Return all numbers that are no addresses, and neither what is left over from a call.

        The entries of the heap and of its ring count together: the twin has no ring.
        """
        left_over = hiding.COUNT, hiding.NEEDED, hiding.SIZE, hiding.FRONT, hiding.WAITING, hiding.OLDEST_AT
        hidden = np.delete(self.hidden, left_over)
        listed = int(self.hidden[[hiding.SIZE, hiding.WAITING]].sum())
        return [*np.delete(self.found, live.LEFT).tolist(), *hidden.tolist(), listed]


def lanes_of(rng: np.random.Generator, in_turn: bool = False) -> Lanes:
    """Return some lanes of random episodes; ``in_turn``: their rows were published lane by lane, row after row."""
    lanes = Lanes([episodes_of(rng) for _ in range(int(rng.integers(1, 5)))], ROWS)
    if in_turn:
        order = np.arange(ROWS * len(lanes.flags)).reshape(CHUNKS // 2, 2 * CHUNK, -1).transpose(0, 2, 1)
        lanes.times[:] = order
    return lanes


def publish_to(lanes: Lanes, row: int) -> None:
    for lane, flags in enumerate(lanes.flags):
        lanes.committed[lane] = lanes.observed[lane] = row + (row < ROWS and flags[row] & 40 != 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(150))
def test_the_kernel_and_its_twin_make_the_same_snapshots(case: int) -> None:
    rng = np.random.default_rng(case)
    lanes, hides = lanes_of(rng), case % 3 > 0
    capacity = int(rng.integers(1, 200)) if case % 4 else None
    name = "advance_hiding" if hides else "advance"
    both = [Reader(kernel, lanes, capacity, case % 5 == 0) for kernel in KERNELS[name]]
    until = 0
    for step in range(12):
        if rng.random() < 0.9:
            lanes.publish(rng)
        if hides and case % 2 and step > 3:
            until = CLOCK + int(rng.integers(lanes.times.size))
        done = int(min(lanes.committed)) // (2 * CHUNK)
        if step % 3 == 2 and done:
            both[0].time_bases[done - 1] = both[1].time_bases[done - 1] = 0
        past = both[0].hidden[hiding.PAST]
        fast, plain = (one.advance(until, hides) for one in both)
        assert both[0].asked == both[1].asked
        assert both[0].numbers() == both[1].numbers()
        for fact in ("rows", "ended", "oldest"):
            np.testing.assert_array_equal(getattr(both[0], fact), getattr(both[1], fact))
        assert (fast is None) == (plain is None)
        if fast is not None:
            assert plain is not None
            for one, other in zip(Frozen.of(fast), Frozen.of(plain), strict=True):
                np.testing.assert_array_equal(one, other)
            for one, record in zip(both, (fast, plain), strict=True):
                seen = Frozen.of(record)
                np.testing.assert_array_equal(seen.oldest, one.oldest)
                np.testing.assert_array_equal(seen.live, one.rows)
                assert seen.reached == one.hidden[hiding.REACHED]
        steps = both[0].steps()
        visible = [row >= both[0].oldest[lane] for _, lane, row in steps]
        assert sum(visible) == len(steps) - both[0].hidden[hiding.HIDDEN]
        if hides:
            assert capacity is None or sum(visible) <= capacity
            # What comes later than others and is older than these stays, until some are hidden again.
            shown = [time for (time, _, _), is_visible in zip(steps, visible, strict=True) if is_visible]
            assert until <= past or min(shown, default=until) >= until
        else:
            assert all(visible)


@pytest.mark.parametrize("kernel", [0, 1])
@pytest.mark.parametrize("case", range(10))
def test_what_is_left_is_the_newest_by_time(case: int, kernel: int) -> None:
    rng = np.random.default_rng(case)
    lanes, capacity = lanes_of(rng, in_turn=True), int(rng.integers(1, 150))
    reader = Reader(KERNELS["advance_hiding"][kernel], lanes, capacity)
    for row in np.unique(rng.integers(1, ROWS, 12)).tolist():
        publish_to(lanes, row)
        reader.advance()
        steps = reader.steps()
        hidden = max(0, len(steps) - capacity)
        assert [r >= reader.oldest[lane] for _, lane, r in steps] == [i >= hidden for i in range(len(steps))]
        if hidden:
            assert steps[hidden - 1][0] < reader.hidden[hiding.HIDDEN_BEFORE] <= reader.hidden[hiding.REACHED]
    assert reader.hidden[hiding.HIDDEN] > 0


@pytest.mark.parametrize("kernel", [0, 1])
@pytest.mark.parametrize("name", ["advance", "advance_hiding"])
def test_nothing_is_written_where_nothing_has_changed(name: str, kernel: int) -> None:
    lanes = lanes_of(np.random.default_rng(3))
    reader = Reader(KERNELS[name][kernel], lanes, 10)
    publish_to(lanes, 50)
    assert reader.advance(hides=name == "advance_hiding") is not None
    assert reader.advance(hides=name == "advance_hiding") is None
    assert reader.asked == []
    assert (reader.record == -7).all()


@pytest.mark.parametrize("kernel", [0, 1])
def test_the_kernel_asks_for_what_it_needs_and_goes_on_from_there(kernel: int) -> None:
    lanes = lanes_of(np.random.default_rng(1), in_turn=True)
    publish_to(lanes, ROWS - 20)
    reader = Reader(KERNELS["advance_hiding"][kernel], lanes, 10, splits=True)
    followed = reader.tables(True)
    reader.time_bases[0] = 0
    # The times of episodes' first steps are needed as they are followed: rows that are not mapped are to be.
    assert reader.kernel(followed, 0, reader.oldest, np.empty(0, np.int64)) == live.UNCHECKED
    reader.time_bases[:] = lanes.time_bases
    reader.found[live.FOLLOWED] = 0
    record = reader.advance()
    assert record is not None
    assert reader.asked == [live.ADDED, advancing.UNREADY]
    assert sum(row >= reader.oldest[lane] for _, lane, row in reader.steps()) == 10
    reader.hidden[hiding.CAPACITY] = 5
    reader.time_bases[:] = 0
    publish_to(lanes, ROWS - 20)
    reader.advance()
    assert reader.asked == [advancing.UNMAPPED]
    assert sum(row >= reader.oldest[lane] for _, lane, row in reader.steps()) == 5
