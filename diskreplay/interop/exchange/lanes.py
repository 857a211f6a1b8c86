"""Flat buffers of transitions: in which order their rows are, and where episodes begin and end in them.

A lane is one environment's stream of transitions. Such buffers say where an episode ended, and not where it began: it
goes on as long as each transition leads to the observation that the next one begins with.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_BLOCK_BYTES = 8 << 20


class Piece(NamedTuple):
    """The part of a lane from position ``start`` to before ``stop``: an episode, or what is left of it."""

    lane: int
    start: int
    stop: int

    def __len__(self) -> int:
        """Return how many steps it has."""
        return self.stop - self.start


def ring_order(rows: int, next_row: int, is_full: bool) -> Ints:
    """Return the rows of a ring buffer that were written, oldest first, where ``next_row`` is the next to be."""
    if not is_full:
        return np.arange(next_row)
    return (np.arange(rows) + next_row) % rows


def breaks(obs: Sequence[NDArray[Any]], next_obs: Sequence[NDArray[Any]], order: Ints) -> Bools:
    """Tell after which transitions a lane does not go on with the observation that they led to.

    Parameters
    ----------
    obs, next_obs : sequence of array
        The leaves of the observations before and after each transition, ``(rows, lanes, ...)``.
    order : array of int
        The rows in the order of time, ``(T,)``.

    Returns
    -------
    array of bool
        ``(T, lanes)``; False after the last row.
    """
    lanes = obs[0].shape[1]
    found = np.zeros((len(order), lanes), np.bool_)
    row_bytes = max(1, sum(leaf.nbytes // max(1, len(leaf)) for leaf in obs))
    block = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(order) - 1, block):
        stop = min(start + block, len(order) - 1)
        for before, after in zip(obs, next_obs, strict=True):
            led_to, goes_on = (
                _bytes(leaf[rows], lanes)
                for leaf, rows in ((after, order[start:stop]), (before, order[start + 1 : stop + 1]))
            )
            found[start:stop] |= (led_to != goes_on).any(-1)
    return found


def _bytes(rows: NDArray[Any], lanes: int) -> NDArray[np.uint8]:
    # Bytes: a NaN that stays the same does not end an episode.
    return np.ascontiguousarray(rows).reshape(len(rows), lanes, -1).view(np.uint8)


def pieces(ended: Bools) -> list[Piece]:
    """Return the pieces of lanes, ``(T, lanes)``, in the order in which they began, those of one time by their lane.

    ``ended`` tells after which transitions a piece ends; each lane's last one ends with the lane.
    """
    found: list[Piece] = []
    for lane in range(ended.shape[1]):
        stops = {int(end) + 1 for end in np.flatnonzero(ended[:, lane])} | {len(ended)}
        found += [Piece(lane, start, stop) for start, stop in pairwise(sorted(stops | {0}))]
    return sorted(found, key=lambda piece: (piece.start, piece.lane))


class LaneFiller:
    """Shares pieces out to lanes as `pieces` found them: each goes on where the shortest lane ends.

    Pieces that come in the order in which they began, of lanes that all began together, get the lane they were in.
    """

    def __init__(self, lanes: int) -> None:
        self.lengths = [0] * lanes

    def place(self, steps: int) -> Piece:
        """Return where the next piece goes."""
        lane = min(range(len(self.lengths)), key=self.lengths.__getitem__)
        start = self.lengths[lane]
        self.lengths[lane] += steps
        return Piece(lane, start, start + steps)
