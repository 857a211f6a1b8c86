"""The flags of rows, and the bits of ids.

An id is ``segment << POSITION_BITS | position``. In a segment with ``lanes`` lanes, the position is ``row * lanes +
lane``. The array `done` has a byte of flags for each row; docs/format.md defines each flag.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

POSITION_BITS = 35
POSITION_MASK = (1 << POSITION_BITS) - 1

# The flags of a row: the bits of its byte in the array `done`.
TERMINATED = 1
TRUNCATED = 2
FIRST = 4
OBSERVATION_ONLY = 8
CUT = 16
END_MARKER = 32
EPISODE_VALUES = 64
DISCARDED = 128
NO_STEP = OBSERVATION_ONLY | END_MARKER
# Only two kinds of rows have the flag DISCARDED. A row with the flags DISCARD is the end marker of an episode that its
# writer discarded. A row with the flags DISCARD_BEFORE is the only row of an empty episode, which continues an episode
# that was cut for its length. This row discards the cut episode, and all earlier episodes that the cut episode
# continues.
DISCARD = END_MARKER | DISCARDED
DISCARD_BEFORE = FIRST | CUT | DISCARD

# The bits of `EpisodeTable.end` are TERMINATED, TRUNCATED, OBSERVATION_ONLY (the episode has a final observation), CUT,
# EPISODE_VALUES, DISCARDED, CONTINUES (the episode continues an episode that was cut for its length), and OPEN (the
# episode has not ended).
CONTINUES = FIRST
OPEN = 256

# The numbers of the columns of an `EpisodeTable`.
FIRST_ID, STRIDE, STEPS, OBS_ROWS, END, TIME = range(6)
EPISODE_COLUMNS = 6


def is_end_with_values(flags: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return, for each row after the last step of an episode, whether the row has the values of the episode fields.

    ``flags``, (n,), are the flags of these rows. A row has the values if it has the flag EPISODE_VALUES, and is not the
    first row of the next episode.
    """
    found: NDArray[np.bool_] = (flags & (EPISODE_VALUES | FIRST)) == EPISODE_VALUES
    return found


@dataclass(slots=True, eq=False)
class EpisodeTable:
    """A table with one episode per line: (n, 6) int64.

    ``first`` is the id of the first step, and ``stride`` the difference between the ids of successive steps. ``steps``
    and ``obs_rows`` are the numbers of steps and of existing observations. ``end`` has bits that tell how the episode
    ended; this module defines the bits. ``time`` is the publishing time of the first step, in nanoseconds since the
    epoch, and 0 in a store without limits. Each attribute is a view of a column of ``lines``.
    """

    lines: Ints

    @classmethod
    def of(cls, *columns: Any) -> "EpisodeTable":
        """Return a table of ``columns``, in the order from FIRST_ID to TIME. Missing columns are 0."""
        lines = np.zeros((len(columns[FIRST_ID]), EPISODE_COLUMNS), np.int64)
        for number, column in enumerate(columns):
            lines[:, number] = column
        return cls(lines)

    @classmethod
    def concatenate(cls, parts: "Sequence[EpisodeTable]") -> "EpisodeTable":
        return cls(np.concatenate([np.zeros((0, EPISODE_COLUMNS), np.int64), *(part.lines for part in parts)]))

    def __len__(self) -> int:
        return len(self.lines)

    def select(self, which: Any) -> "EpisodeTable":
        return EpisodeTable(self.lines[which])

    def without_discarded(self) -> "EpisodeTable":
        discarded = self.end & DISCARDED != 0
        return self.select(~discarded) if discarded.any() else self

    def with_discarded(self, at: Any) -> "EpisodeTable":
        lines = self.lines.copy()
        lines[at, END] |= DISCARDED
        return EpisodeTable(lines)

    @property
    def first(self) -> Ints:
        return self.lines[:, FIRST_ID]

    @property
    def stride(self) -> Ints:
        return self.lines[:, STRIDE]

    @property
    def steps(self) -> Ints:
        return self.lines[:, STEPS]

    @property
    def obs_rows(self) -> Ints:
        return self.lines[:, OBS_ROWS]

    @property
    def end(self) -> Ints:
        return self.lines[:, END]

    @property
    def time(self) -> Ints:
        return self.lines[:, TIME]


def locate(ids: Ints, origin: int, lanes: Ints) -> tuple[NDArray[np.bool_], Ints, Ints, Ints, Ints]:
    """Return for each id: whether its segment exists, the segment's slot and number of lanes, the id's lane and row.

    ``lanes`` has the number of lanes of each segment from number ``origin`` on; 0 for a deleted segment. The slot is
    the segment's index in ``lanes``. If the segment does not exist, the returned number of lanes is 1, and the slot,
    lane and row have no meaning. Every returned slot is a valid index of ``lanes``, unless ``lanes`` is empty.
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
    """Return a sort key for each id, by segment, lane and row. In each lane, the key grows by one from row to row.

    ``lanes`` has the number of lanes of each id's segment; ``lane`` and ``row`` have each id's lane and row.
    """
    return (ids & ~np.int64(POSITION_MASK)) + (lane * (POSITION_MASK // lanes) + row)


def places_of(first: Ints, count: Ints) -> Ints:
    """Return one array: for each i, the numbers from ``first[i]`` to ``first[i] + count[i] - 1``."""
    return np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each number, by the finalizer of splitmix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
