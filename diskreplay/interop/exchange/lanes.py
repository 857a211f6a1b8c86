"""Find the order of rows and the boundaries of episodes in flat buffers of transitions.

An episode ends where a buffer marks an end, and also where a transition's next observation is not the next transition's
observation.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay import FormatError

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_BLOCK_BYTES = 8 << 20


class Piece(NamedTuple):
    """The transitions of a lane from position ``start`` to before ``stop``: an episode, or a part of an episode."""

    lane: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def ring_order(rows: int, next_row: int, is_full: bool) -> Ints:
    """Return the indices of the written rows of a ring buffer, oldest first; ``next_row`` is the next row to write."""
    if not is_full:
        return np.arange(next_row)
    return np.roll(np.arange(rows), -next_row)


def rows_at(order: Ints) -> slice | Ints:
    """Return row numbers as a slice if they are consecutive, since an array indexed by a slice is not copied."""
    if len(order) and (order[1:] - order[:-1] == 1).all():
        return slice(int(order[0]), int(order[-1]) + 1)
    return order


def breaks(obs: Sequence[NDArray[Any]], next_obs: Sequence[NDArray[Any]], order: Ints) -> Bools:
    """Tell which transitions have a next observation that is not the observation of the lane's next row.

    Parameters
    ----------
    obs, next_obs : sequence of array
        The leaves of the observations before and after each transition, ``(rows, lanes, ...)``.
    order : array of int
        The indices of the rows in the order of time, ``(T,)``.

    Returns
    -------
    array of bool
        ``(T, lanes)``, in the order of time. The last row is False.
    """
    lanes = obs[0].shape[1]
    found = np.zeros((len(order), lanes), np.bool_)
    row_bytes = max(1, sum(leaf.nbytes // max(1, len(leaf)) for leaf in obs))
    block = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(order) - 1, block):
        stop = min(start + block, len(order) - 1)
        for before, after in zip(obs, next_obs, strict=True):
            if before.shape != after.shape:
                raise FormatError(f"observations have the shape {before.shape}, and next ones {after.shape}")
            reached, following = (
                leaf[rows].reshape(-1, *leaf.shape[2:])
                for leaf, rows in ((after, rows_at(order[start:stop])), (before, rows_at(order[start + 1 : stop + 1])))
            )
            found[start:stop] |= differ(reached, following).reshape(-1, lanes)
    return found


def differ(one: NDArray[Any], other: NDArray[Any]) -> Bools:
    """Return a mask, ``(N,)``: true where the rows of two arrays ``(N, ...)`` are different observations.

    Rows are compared by value: a NaN equals a NaN, and 0.0 equals -0.0. A row also equals the same row rounded to
    float32, or to the narrower of the two dtypes, since files may store rounded observations. The arrays may have
    different dtypes and byte orders.
    """
    one, other = (np.ascontiguousarray(rows).reshape(len(rows), math.prod(rows.shape[1:])) for rows in (one, other))
    if one.dtype != other.dtype:
        return ~_same(one, other)
    # Most rows have the same bytes in both arrays, so the bytes are compared first, in words of up to 8 bytes.
    words = f"u{math.gcd(one.shape[1] * one.itemsize, 8)}"
    unequal = one.view(words) != other.view(words)
    found = np.zeros(len(one), np.bool_)
    found[np.flatnonzero(unequal) // max(1, unequal.shape[1])] = True  # twice as fast as `np.any` for short rows
    if (at := np.flatnonzero(found)).size:
        found[at] = ~_same(one[at], other[at])
    return found


def _same(one: NDArray[Any], other: NDArray[Any]) -> Bools:
    found: Bools = np.all(_equal(one, other), axis=-1)
    floats = [rows.dtype for rows in (one, other) if rows.dtype.kind == "f"]
    if not floats or found.all():
        return found
    narrow = min([*floats, np.dtype("f4")] if len(floats) == 2 else floats, key=lambda dtype: dtype.itemsize)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = [rows.astype(narrow) for rows in (one, other)]
    is_rounded = np.all(_equal(one, rounded[0]), axis=-1) | np.all(_equal(other, rounded[1]), axis=-1)
    found |= is_rounded & np.all(_equal(*rounded), axis=-1)
    return found


def _equal(one: NDArray[Any], other: NDArray[Any]) -> Bools:
    equal: Bools = (one == other) | (one != one) & (other != other)  # only a NaN differs from itself
    return equal


def with_final(obs: NDArray[Any], final: NDArray[Any], name: str) -> NDArray[Any]:
    """Append the final observation, ``(1, ...)``, to observations, ``(T, ...)``, in the dtype of ``obs``.

    FormatError is raised if this dtype cannot hold a value of ``final``.
    """
    if final.dtype == obs.dtype:
        return np.concatenate([obs, final])
    with np.errstate(over="ignore", invalid="ignore"):
        cast = final.astype(obs.dtype)
    if differ(final, cast).any():
        raise FormatError(
            f"{name} has {final.dtype} values that {obs.dtype}, the dtype of the observations, cannot hold"
        )
    return np.concatenate([obs, cast])


def pieces(ended: Bools) -> list[Piece]:
    """Divide all lanes into `Piece` objects, and return them sorted by start position and then by lane.

    ``ended``, ``(T, lanes)``, is true for the last transition of each piece. The last piece of a lane ends at the end
    of the lane.
    """
    found: list[Piece] = []
    for lane in range(ended.shape[1]):
        stops = {int(end) + 1 for end in np.flatnonzero(ended[:, lane])} | {len(ended)}
        found += [Piece(lane, start, stop) for start, stop in pairwise(sorted(stops | {0}))]
    return sorted(found, key=lambda piece: (piece.start, piece.lane))


class LaneFiller:
    """Appends each `Piece` to the shortest lane.

    If the pieces come in the order in which `pieces` returns them, each piece goes to its old lane.
    """

    def __init__(self, lanes: int) -> None:
        self.lengths = [0] * lanes

    def place(self, steps: int) -> Piece:
        lane = min(range(len(self.lengths)), key=self.lengths.__getitem__)
        start = self.lengths[lane]
        self.lengths[lane] += steps
        return Piece(lane, start, start + steps)
