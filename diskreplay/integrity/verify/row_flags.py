"""Checks that the flags of a lane's rows describe successive episodes, by checking each pair of successive rows."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import CUT, DISCARDED, END_MARKER, EPISODE_VALUES, FIRST, OBSERVATION_ONLY, TERMINATED, TRUNCATED

NO_STEP = OBSERVATION_ONLY | END_MARKER
# Stands for the flags of the row before a lane's first row. No row has these flags.
START = 255
_ENDED = TERMINATED | TRUNCATED
_CUT_HERE = TRUNCATED | CUT
_CONTINUES = FIRST | CUT


def is_row(flags: int) -> bool:
    """Whether a row can have these flags, whatever flags the previous row has."""
    if flags & DISCARDED:
        return flags & ~_CONTINUES == END_MARKER | DISCARDED and flags & _CONTINUES in (0, _CONTINUES)
    if flags & NO_STEP:
        marker = flags & ~EPISODE_VALUES == END_MARKER | _CUT_HERE
        observation = flags & ~EPISODE_VALUES & ~_CUT_HERE == OBSERVATION_ONLY
        return marker or (observation and (not flags & CUT or bool(flags & TRUNCATED)))
    return (not flags & CUT or bool(flags & FIRST)) and (not flags & EPISODE_VALUES or bool(flags & _ENDED))


def may_follow(before: int, flags: int) -> bool:
    """Whether a row with ``flags`` may follow a row with the flags ``before``.

    With `START` as ``before``, this tells whether the row may be the first row of a lane.
    """
    if not is_row(flags):
        return False
    if flags & FIRST:
        return True
    if before == START or before & NO_STEP:
        return False
    if before & _ENDED:
        # Only the final observation may follow the last step, and only if the row of the last step has no values of the
        # episode.
        return flags & ~EPISODE_VALUES == OBSERVATION_ONLY and not before & EPISODE_VALUES
    return not flags & NO_STEP or bool(flags & (TRUNCATED | DISCARDED))


@lru_cache(maxsize=1)
def _table() -> NDArray[np.bool_]:
    return np.array([[may_follow(before, flags) for flags in range(256)] for before in range(256)]).reshape(-1)


def first_wrong(flags: NDArray[np.uint8], before: NDArray[np.uint8], rows: NDArray[np.int64]) -> tuple[int, int] | None:
    """Return (lane, row) of the first row that may not follow the row before it; None: all rows may.

    ``flags``, ``(lanes, width)`` uint8, has the flags of successive rows of some lanes. ``before``, ``(lanes,)`` uint8,
    has the flags of the row before these rows, or `START`. Only the first ``rows[lane]`` rows of each lane are checked.
    """
    previous = np.concatenate([before[:, None], flags[:, :-1]], axis=1)
    # Most rows are inside an episode: their flags and the flags of the previous row are 0.
    lane, row = np.nonzero((flags | previous) != 0)
    pairs = previous[lane, row].astype(np.int64) << 8 | flags[lane, row]
    wrong = np.flatnonzero(~_table()[pairs] & (row < rows[lane]))
    return (int(lane[wrong[0]]), int(row[wrong[0]])) if len(wrong) else None


def count_steps(flags: NDArray[np.uint8], rows: NDArray[np.int64]) -> int:
    counted = np.arange(flags.shape[1]) < rows[:, None]
    return int(np.count_nonzero(counted & (flags & NO_STEP == 0)))
