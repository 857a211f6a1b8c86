"""Episodes from `done`: one byte a row, each byte read once."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.ids import (
    CONTINUES,
    CUT,
    DISCARD,
    DISCARD_BEFORE,
    DISCARDED,
    END_MARKER,
    EPISODE_VALUES,
    FIRST,
    OBSERVATION_ONLY,
    POSITION_BITS,
    TERMINATED,
    TRUNCATED,
    EpisodeTable,
    Ints,
)

_ENDS = TERMINATED | TRUNCATED | OBSERVATION_ONLY | END_MARKER


class LaneSlice(NamedTuple):
    """Rows of lanes, one slice after another: the first row of each begins an episode.

    Arrays of one length, int64: number of the segment, its lanes, which of them, first row, rows; and whether the
    segment is ``sealed`` (bool).
    """

    segment: Ints
    lanes: Ints
    lane: Ints
    first_row: Ints
    rows: Ints
    sealed: NDArray[np.bool_]


class ParsedEpisodes(NamedTuple):
    """What `parse_episodes` found: the ended episodes, and of each slice the row where an open one starts, or -1."""

    ended: EpisodeTable
    open_start: Ints
    open_continues: NDArray[np.bool_]


class Gaps(NamedTuple):
    """Rows without a flag that were left out of an array of flags, int64: how many behind each of some positions."""

    at: Ints
    rows: Ints

    def before(self, positions: Ints) -> Ints:
        """Return how many rows were left out before each position."""
        total: Ints = np.append(0, np.cumsum(self.rows))
        return total[np.searchsorted(self.at, positions)]


def parse_episodes(flags: NDArray[np.uint8], slices: LaneSlice, gaps: Gaps | None = None) -> ParsedEpisodes:
    """Find the episodes in the flags of slices of rows, which lie one after another in ``flags``.

    With ``gaps``, the rows of a slice are those that ``flags`` has of it. Raises FormatError where the flags of a
    slice are no sequence of episodes.
    """
    end_at = np.cumsum(slices.rows)
    begin_at = end_at - slices.rows
    filled = np.flatnonzero(slices.rows)
    starts, marks = _starts(flags)
    # Every slice begins with a start, so that the next start or the end of all flags is where an episode stops.
    discards = marks[marks >= DISCARDED]
    if ((discards != DISCARD) & (discards != DISCARD_BEFORE)).any() or not (flags[begin_at[filled]] & FIRST).all():
        raise _damaged(flags, slices, "the flags in done are damaged at row {}")
    stops = np.append(starts[1:], len(flags))[: len(starts)]
    last = flags[stops - 1]
    extra = (last & (OBSERVATION_ONLY | END_MARKER)) != 0
    begin, start, stop = begin_at, starts, stops
    if gaps is not None:
        begin, start, stop = (positions + gaps.before(positions) for positions in (begin_at, starts, stops))
    steps = stop - start - extra
    if ((steps < 1) & (last != DISCARD_BEFORE)).any():
        raise _damaged(flags, slices, "an episode without a step in done after row {}")
    step_flags = np.where(extra, flags[stops - 1 - extra], last)
    step_flags[steps < 1] = 0
    expected = np.count_nonzero(extra) + np.count_nonzero(step_flags & (TERMINATED | TRUNCATED))
    if np.count_nonzero(marks & _ENDS) != expected:
        raise _damaged(flags, slices, "an episode in done ends twice after row {}")
    end = step_flags & (TERMINATED | TRUNCATED | EPISODE_VALUES)
    end |= np.where(extra, last & (TRUNCATED | OBSERVATION_ONLY | CUT | EPISODE_VALUES | DISCARDED), np.uint8(0))
    end |= np.where(last & DISCARDED, np.uint8(TRUNCATED | CUT), np.uint8(0))
    end |= np.where(flags[starts] & CUT, np.uint8(CONTINUES), np.uint8(0))

    newest = np.searchsorted(starts, end_at[filled]) - 1  # the last episode of each slice: it may be open
    is_open = ((end[newest] & (TERMINATED | TRUNCATED)) == 0) & ~slices.sealed[filled]
    open_start, open_continues = np.full(len(end_at), -1), np.zeros(len(end_at), np.bool_)
    opened, newest = filled[is_open], newest[is_open]
    open_start[opened] = start[newest] - begin[opened] + slices.first_row[opened]
    open_continues[opened] = (end[newest] & CONTINUES) != 0
    # Nothing says how it ended, yet it did: the writer cut it without a final observation.
    end[(end & (TERMINATED | TRUNCATED)) == 0] |= TRUNCATED | CUT
    if len(newest):
        starts, start, steps, end = (np.delete(column, newest) for column in (starts, start, steps, end))
    if not len(starts):
        return ParsedEpisodes(EpisodeTable.concatenate([]), open_start, open_continues)
    # Of slices that begin at one place, all but the last are empty.
    which = np.searchsorted(begin_at, starts, side="right") - 1 if len(begin_at) > 1 else np.zeros(1, np.int64)
    row, stride = start + (slices.first_row - begin)[which], slices.lanes[which]
    first = ((slices.segment << POSITION_BITS) + slices.lane)[which] + row * stride
    ended = EpisodeTable.of(first, stride, steps, steps + ((end & OBSERVATION_ONLY) != 0), end)
    return ParsedEpisodes(ended, open_start, open_continues)


def _starts(flags: NDArray[np.uint8]) -> tuple[Ints, NDArray[np.uint8]]:
    """Return where episodes start, and flags: all that are not 0, and perhaps others."""
    # In long episodes most are 0: eight are compared at once.
    whole = len(flags) & ~7
    words = np.flatnonzero(flags[:whole].view(np.uint64))
    if 4 * len(words) > len(flags) // 8:
        return np.flatnonzero(flags & FIRST), flags
    some = flags[:whole].reshape(-1, 8)[words].reshape(-1)
    at, rest = np.flatnonzero(some & FIRST), np.flatnonzero(flags[whole:] & FIRST)
    return np.concatenate([(words[at >> 3] << 3) + (at & 7), rest + whole]), np.append(some, flags[whole:])


def _damaged(flags: NDArray[np.uint8], slices: LaneSlice, what: str) -> FormatError:
    """Return the error that names the slice with the damage: each is parsed alone."""
    number = 0
    stops = np.cumsum(slices.rows).tolist()
    if len(stops) > 1:
        for number, stop in enumerate(stops):
            alone = LaneSlice._make(column[number : number + 1] for column in slices)
            try:
                parse_episodes(flags[stop - int(alone.rows[0]) : stop], alone)
            except FormatError as error:
                return error
    where = f"segment {slices.segment[number]}, lane {slices.lane[number]}"
    return FormatError(f"{where}: {what.format(slices.first_row[number])}; restore the segment")
