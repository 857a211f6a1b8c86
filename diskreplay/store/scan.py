"""Episodes from `done`: one byte a row, each byte looked at once."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.format.layout import (
    CUT,
    END_MARKER,
    EPISODE_VALUES,
    FIRST,
    KNOWN_FLAGS,
    OBSERVATION_ONLY,
    TERMINATED,
    TRUNCATED,
    make_ids,
)

# Bits of `Episodes.end` beside TERMINATED, TRUNCATED, OBSERVATION_ONLY (the final observation is there), CUT and
# EPISODE_VALUES: FIRST's bit marks an episode that continues one cut for its length.
CONTINUES = FIRST
OPEN = 128
_ENDS = TERMINATED | TRUNCATED | OBSERVATION_ONLY | END_MARKER


@dataclass(frozen=True)
class Episodes:
    """Columns of episodes, arrays of equal length.

    ``first`` is the id of the first step and ``stride`` the distance of the ids of two successive ones (int64),
    ``steps`` and ``obs_rows`` count steps and the observations that exist (int64), ``end`` holds bits (uint8).
    """

    first: NDArray[np.int64]
    stride: NDArray[np.int64]
    steps: NDArray[np.int64]
    obs_rows: NDArray[np.int64]
    end: NDArray[np.uint8]

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self.first)

    def select(self, which: Any) -> "Episodes":
        """Return the episodes at ``which``: a slice, a mask or positions."""
        return Episodes(*(column[which] for column in self.columns))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """The five columns in order."""
        return self.first, self.stride, self.steps, self.obs_rows, self.end

    @staticmethod
    def concatenate(parts: "list[Episodes]") -> "Episodes":
        """Return all episodes of several tables."""
        if not parts:
            empty = np.zeros(0, np.int64)
            return Episodes(empty, empty, empty, empty, np.zeros(0, np.uint8))
        return Episodes(*(np.concatenate(columns) for columns in zip(*(p.columns for p in parts), strict=True)))


@dataclass(frozen=True)
class LaneScan:
    """What a scan of a lane's new rows found."""

    starts: NDArray[np.int64]
    steps: NDArray[np.int64]
    end: NDArray[np.uint8]
    open_start: int  # -1: none
    open_continues: bool


def scan_lane(flags: NDArray[np.uint8], first_row: int, sealed: bool, where: str) -> LaneScan:
    """Find the episodes in the flags of rows ``first_row``, ...; the first of them begins an episode.

    Raises
    ------
    FormatError
        The flags are no sequence of episodes.
    """
    if len(flags) == 0:
        return LaneScan(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8), -1, False)
    starts = np.flatnonzero(flags & FIRST)
    if len(starts) == 0 or starts[0] != 0 or (flags & ~np.uint8(KNOWN_FLAGS)).any():
        raise FormatError(f"{where}: the flags in done are damaged at row {first_row}; restore the segment")
    stops = np.append(starts[1:], len(flags))
    last = flags[stops - 1]
    extra = (last & (OBSERVATION_ONLY | END_MARKER)) != 0
    steps = stops - starts - extra
    if (steps < 1).any():
        raise FormatError(f"{where}: an episode without a step in done after row {first_row}; restore the segment")
    step_flags = np.where(extra, flags[starts + steps - 1], last)
    expected = np.count_nonzero(extra) + np.count_nonzero(step_flags & (TERMINATED | TRUNCATED))
    if np.count_nonzero(flags & _ENDS) != expected:
        raise FormatError(f"{where}: an episode in done ends twice after row {first_row}; restore the segment")
    end = step_flags & (TERMINATED | TRUNCATED | EPISODE_VALUES)
    end |= np.where(extra, last & (TRUNCATED | OBSERVATION_ONLY | CUT | EPISODE_VALUES), 0).astype(np.uint8)
    end |= np.where(flags[starts] & CUT, CONTINUES, 0).astype(np.uint8)
    ended = (end & (TERMINATED | TRUNCATED)) != 0
    ended[:-1] = True
    ended[-1] |= sealed
    # Nothing says how it ended, yet it did: the writer cut it without a final observation.
    end[ended & ((end & (TERMINATED | TRUNCATED)) == 0)] |= TRUNCATED | CUT
    if ended[-1]:
        return LaneScan(starts + first_row, steps, end, -1, False)
    continues = bool(end[-1] & CONTINUES)
    return LaneScan(starts[:-1] + first_row, steps[:-1], end[:-1], int(starts[-1]) + first_row, continues)


def to_episodes(scan: LaneScan, segment: int, lanes: int, lane: int) -> Episodes:
    """Return the ended episodes of a scan as columns."""
    final = (scan.end & OBSERVATION_ONLY) != 0
    count = len(scan.starts)
    return Episodes(
        first=make_ids(segment, lanes, lane, scan.starts),
        stride=np.full(count, lanes, np.int64),
        steps=scan.steps.astype(np.int64),
        obs_rows=scan.steps + final,
        end=scan.end,
    )
