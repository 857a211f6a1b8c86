"""Following lanes that grow: kernels and their twins do the same, and find what a scan of all flags finds."""

import numpy as np
import pytest

from diskreplay.ids import DISCARDED, END, EPISODE_COLUMNS, FIRST_ID, OPEN, POSITION_MASK, TIME
from diskreplay.kernels import following
from diskreplay.kernels.following import follow_plain
from diskreplay.kernels.packed import pack
from diskreplay.segments.segment_reader import LaneSlice, parse_episodes
from tests.kernels.pairs import KERNELS

ORIGIN, CHUNK, CHUNKS = 3, 64, 4
ROWS = CHUNK * CHUNKS
CLOCK = 10**6
# Flags of an episode's last step, and of the row behind it.
ENDINGS = [(1, []), (1, [8]), (0, [8 | 2]), (0, [8 | 2 | 16]), (2 | 64, [8 | 64]), (0, [32 | 2 | 16]), (0, [])]
DISCARD, DISCARD_BEFORE = 32 | 128, 4 | 16 | 32 | 128
ENDINGS.append((0, [DISCARD]))


def episodes_of(rng: np.random.Generator) -> np.ndarray:
    """Return the flags of a lane of random episodes, ended in every way there is."""
    flags: list[int] = []
    while len(flags) < ROWS:
        steps = [0] * int(rng.integers(1, 30))
        steps[0] |= 4 | (16 if rng.random() < 0.2 else 0)
        last, behind = ENDINGS[rng.integers(len(ENDINGS))]
        if rng.random() < 0.1:
            steps, last, behind = [DISCARD_BEFORE], 0, []
        steps[-1] |= last
        flags += [*steps, *behind]
    return np.array(flags[:ROWS], np.uint8)


class Lanes:
    """Lanes of one segment in memory, and how far each was published."""

    def __init__(
        self, flags: list[np.ndarray], checked: int, unmapped: int | None = None, timed: bool = True, room: int = CHUNKS
    ) -> None:
        lanes = len(flags)
        self.flags = flags
        self.blocks = np.ascontiguousarray(np.stack(flags).reshape(lanes, CHUNKS, CHUNK).transpose(1, 0, 2))
        self.bases = np.array([block.ctypes.data for block in self.blocks], np.int64)
        if unmapped is not None:
            self.bases[unmapped] = 0
        self.room = room
        self.committed, self.observed = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        # Times lie in other chunks than flags: one of them has as many rows as two.
        self.times = np.arange(lanes * ROWS).reshape(CHUNKS // 2, lanes, 2 * CHUNK)
        self.time_bases = np.array([block.ctypes.data for block in self.times], np.int64) if timed else np.zeros(0, int)
        counters = self.observed.ctypes.data, self.committed.ctypes.data
        self.growing = np.array([(0, lanes, 0, *counters, checked, CLOCK, 0)], np.int64)

    def publish(self, rng: np.random.Generator) -> None:
        self.committed += rng.integers(0, 40, len(self.committed))
        np.minimum(self.committed, ROWS, out=self.committed)
        for lane, row in enumerate(self.committed):
            # What ends an episode is published with its last step.
            self.committed[lane] += row < ROWS and self.flags[lane][row] & 40 != 0 and self.flags[lane][row] & 4 == 0
        self.observed[:] = self.committed + rng.integers(0, 2, len(self.committed))

    def followed(self, kernel, lanes: np.ndarray):
        """Return status and what was found, and the episodes that ended; ``lanes`` is changed."""
        ended = np.zeros((60, EPISODE_COLUMNS), np.int64)
        found = np.zeros(following.FOUND, np.int64)
        first, bits = np.zeros(1, np.int64), CHUNK.bit_length() - 1
        flags = first, np.array([self.room]), np.array([bits]), self.bases
        times = first, np.array([CHUNKS // 2]), np.array([bits + 1]), self.time_bases
        tables = pack(self.growing, *flags, *times, lanes, ended)
        status = kernel(tables, ORIGIN, found)
        return status, found, ended[: found[following.ENDED]]


def untouched(lanes: int) -> np.ndarray:
    """The state of lanes of which nothing was followed."""
    return np.array([[0] * lanes, [0] * lanes, [-1] * lanes, [OPEN] * lanes, [0] * lanes], np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(300))
def test_the_kernel_and_its_twin_follow_alike(case: int) -> None:
    rng = np.random.default_rng(case)
    flags = [episodes_of(rng) for _ in range(int(rng.integers(1, 5)))]
    if case % 2:
        flags[0][rng.integers(ROWS)] = rng.integers(256)
    unmapped = int(rng.integers(CHUNKS)) if case % 5 == 0 else None
    lanes = Lanes(flags, int(rng.choice([200, ROWS])), unmapped, case % 3 > 0, CHUNKS - (case % 11 == 0))
    states = [untouched(len(flags)) for _ in range(2)]
    for step in range(10):
        lanes.publish(rng)
        if case % 7 == 0 and step == 5:
            lanes.observed[0] += 2  # no writer does that
        unseen = (lanes.committed != states[0][following.COMMITTED]) | (lanes.observed != states[0][following.OBSERVED])
        fast, plain = (lanes.followed(kernel, state) for kernel, state in zip(KERNELS["follow"], states, strict=True))
        assert fast[0] == plain[0]
        if fast[0] in (following.DONE, following.ADDED):  # there is no such lane
            fast[1][following.LEFT] = plain[1][following.LEFT] = 0
        for one, other in zip((*fast[1:], states[0]), (*plain[1:], states[1]), strict=True):
            np.testing.assert_array_equal(one, other)
        if fast[0] not in (following.DONE, following.ADDED):
            return
        assert fast[1][following.CHANGED] == unseen.any()


@pytest.mark.parametrize("kernel", [0, 1])
@pytest.mark.parametrize("case", range(20))
def test_what_is_followed_bit_by_bit_is_what_a_scan_of_all_finds(case: int, kernel: int) -> None:
    rng = np.random.default_rng(case)
    flags = [episodes_of(rng) for _ in range(3)]
    lanes, state, parts = Lanes(flags, ROWS), untouched(3), []
    open_steps = 0
    while (state[following.COMMITTED] < ROWS).any():
        lanes.publish(rng)
        status, found, ended = lanes.followed(KERNELS["follow"][kernel], state)
        has_discards = bool((ended[:, END] & DISCARDED).any())
        assert status == (following.ADDED if has_discards else following.DONE)
        open_steps += found[following.OPEN_STEPS]
        parts.append(ended.copy())
    three = np.full(3, 3)
    stretches = LaneSlice(np.full(3, ORIGIN), three, np.arange(3), np.zeros(3, np.int64), np.full(3, ROWS), three < 0)
    whole = parse_episodes(np.concatenate(flags), stretches)
    every = np.concatenate(parts)
    lane, row = (every[:, FIRST_ID] & POSITION_MASK) % 3, (every[:, FIRST_ID] & POSITION_MASK) // 3
    assert (every[:, TIME] == CLOCK + lanes.times[row // (2 * CHUNK), lane, row % (2 * CHUNK)]).all()
    every[:, TIME] = 0  # a scan of flags knows none
    assert sorted(every.tolist()) == sorted(whole.ended.lines.tolist())
    np.testing.assert_array_equal(state[following.OPEN_START], whole.open_start)
    assert open_steps == (ROWS - whole.open_start)[whole.open_start >= 0].sum()


def test_rows_behind_the_room_of_a_segment_belong_to_another_one() -> None:
    lanes, state = Lanes([np.full(ROWS, 4 | 1, np.uint8)], ROWS, room=1), untouched(1)
    lanes.committed[:] = lanes.observed[:] = 50
    for kernel in KERNELS["follow"]:
        assert lanes.followed(kernel, state)[0] == following.DONE
        state = untouched(1)
    state[following.COMMITTED], state[following.OPEN_START] = 50, -1
    lanes.committed[:] = lanes.observed[:] = CHUNK + 1
    for kernel in KERNELS["follow"]:
        assert lanes.followed(kernel, state)[0] == following.UNCHECKED


def test_more_new_rows_than_there_is_room_for_episodes_are_left() -> None:
    lanes, state = Lanes([np.full(ROWS, 4 | 1, np.uint8)], ROWS), untouched(1)
    lanes.committed[:] = lanes.observed[:] = 61
    for kernel in KERNELS["follow"]:
        assert lanes.followed(kernel, state)[0] == following.FULL
        assert (state == untouched(1)).all()
    lanes.committed[:] = lanes.observed[:] = 59
    assert len(lanes.followed(follow_plain, state)[2]) == 59
