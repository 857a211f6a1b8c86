"""Flags of rows, and how ids are made of them: the numbers that the format, the kernels and the views share.

An id is ``segment << POSITION_BITS | position``, and the position is ``row * lanes + lane`` of a segment with so many
lanes. `done` has a byte of flags for each row; docs/format.md says what each means.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

POSITION_BITS = 35
POSITION_MASK = (1 << POSITION_BITS) - 1

# Bits of one row of `done` (CF flags).
TERMINATED = 1
TRUNCATED = 2
FIRST = 4
OBSERVATION_ONLY = 8
CUT = 16
END_MARKER = 32
EPISODE_VALUES = 64
DISCARDED = 128
NO_STEP = OBSERVATION_ONLY | END_MARKER
# The only rows with DISCARDED. The first is the end marker of an episode that its writer discarded. The second stands
# for a part without a step, behind a cut for the episode's length.
DISCARD = END_MARKER | DISCARDED
DISCARD_BEFORE = FIRST | CUT | DISCARD

# Bits of how an episode ends, beside TERMINATED, TRUNCATED, OBSERVATION_ONLY (the final observation is there), CUT,
# EPISODE_VALUES and DISCARDED: it continues one that was cut for its length; it has not ended.
CONTINUES = FIRST
OPEN = 256

# Columns of an `EpisodeTable`.
FIRST_ID, STRIDE, STEPS, OBS_ROWS, END, TIME = range(6)
EPISODE_COLUMNS = 6


def is_end_with_values(flags: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Tell by the flags of the row behind an episode's steps whether it holds the episode's values, not the last step.

    It does where it is of that episode, as its final observation or its end marker, and was published with the values.
    """
    found: NDArray[np.bool_] = (flags & (EPISODE_VALUES | FIRST)) == EPISODE_VALUES
    return found


class EpisodeTable:
    """Episodes, a line each: (n, 6) int64.

    ``first`` is the id of the first step and ``stride`` the distance of the ids of two successive ones, ``steps`` and
    ``obs_rows`` count steps and the observations that exist, ``end`` holds bits, ``time`` says when the first step was
    published, in nanoseconds since the epoch: 0 in a store whose steps leave by no order. These are views of ``lines``.
    """

    __slots__ = ("lines",)

    def __init__(self, lines: Ints) -> None:
        self.lines = lines

    @classmethod
    def of(cls, *columns: Any) -> "EpisodeTable":
        """Return the episodes of these columns, in the order above; those that are not given are 0."""
        lines = np.zeros((len(columns[FIRST_ID]), EPISODE_COLUMNS), np.int64)
        for number, column in enumerate(columns):
            lines[:, number] = column
        return cls(lines)

    @classmethod
    def concatenate(cls, parts: "Sequence[EpisodeTable]") -> "EpisodeTable":
        """Return all episodes of several tables."""
        return cls(np.concatenate([np.zeros((0, EPISODE_COLUMNS), np.int64), *(part.lines for part in parts)]))

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self.lines)

    def select(self, which: Any) -> "EpisodeTable":
        """Return the episodes at ``which``: a slice, a mask or positions."""
        return EpisodeTable(self.lines[which])

    def without_discarded(self) -> "EpisodeTable":
        """Return the episodes that their writers have not discarded."""
        discarded = self.end & DISCARDED != 0
        return self.select(~discarded) if discarded.any() else self

    def with_discarded(self, at: Any) -> "EpisodeTable":
        """Return all episodes, of which those at these positions are discarded."""
        lines = self.lines.copy()
        lines[at, END] |= DISCARDED
        return EpisodeTable(lines)

    @property
    def first(self) -> Ints:
        """The ids of the first steps."""
        return self.lines[:, FIRST_ID]

    @property
    def stride(self) -> Ints:
        """The distances of the ids of two successive steps."""
        return self.lines[:, STRIDE]

    @property
    def steps(self) -> Ints:
        """How many steps there are."""
        return self.lines[:, STEPS]

    @property
    def obs_rows(self) -> Ints:
        """How many observations there are."""
        return self.lines[:, OBS_ROWS]

    @property
    def end(self) -> Ints:
        """Bits that say how each ended."""
        return self.lines[:, END]

    @property
    def time(self) -> Ints:
        """When the first steps were published, or 0."""
        return self.lines[:, TIME]


def locate(ids: Ints, origin: int, lanes: Ints) -> tuple[NDArray[np.bool_], Ints, Ints, Ints, Ints]:
    """Return whether the segment of each id is there, its number from `origin` on, its lanes, the lane and the row.

    `lanes` are those of the segments from number `origin` on, 0 where one is gone. Where there is no segment, the lanes
    are 1 and the rest is arbitrary; its number is a valid index, unless there are no segments at all.
    """
    slot = (ids >> POSITION_BITS) - origin
    known = (slot >= 0) & (slot < len(lanes))
    slot = np.where(known, slot, 0)
    width = lanes[slot] if len(lanes) else np.zeros_like(slot)
    known &= width > 0
    width = np.where(known, width, 1)
    row, lane = np.divmod(ids & POSITION_MASK, width)
    return known, slot, width, lane, row


def row_keys(ids: Ints, lanes: Ints, lane: Ints, row: Ints) -> Ints:
    """Return numbers that order ids by segment, lane and row, and grow by one from row to row.

    `lanes` are as many as the segment of each id has.
    """
    return (ids & ~np.int64(POSITION_MASK)) + (lane * (POSITION_MASK // lanes) + row)


def places_of(first: Ints, count: Ints) -> Ints:
    """Return `first[i]`, `first[i]` + 1, ..., `count[i]` numbers each, one behind the other."""
    return np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64-bit hashes of numbers, one for each: the finalizer of splitmix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
