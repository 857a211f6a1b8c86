"""The distribution that draws newer steps more often.

`Recency` keeps the newest ids of a population in their order of arrival, in blocks of consecutive steps. The length of
a block is a small part of a half-life. Ids older than `HALF_LIVES` half-lives are left out, because they would hardly
ever be drawn. A block consists of pieces. A piece is a run of ids in one lane. The ids of a piece are assumed to arrive
evenly while the block is filled. So all probabilities follow from one small array with an entry per block. A refresh
takes time only for new ids.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from diskreplay.distributions.base import Draw, Owned
from diskreplay.distributions.number_arguments import number
from diskreplay.distributions.population import Cursor, GrowingRuns, Population
from diskreplay.distributions.saved_state import columns, state_of
from diskreplay.errors import SegmentGone
from diskreplay.ids import POSITION_BITS, Floats, Ints
from diskreplay.kernels.runs import (
    FIRST,
    TIME,
    IdRuns,
    Visible,
    behind,
    by_lane,
    lane_keys,
    last_ids,
    pieces_of,
    runs_with,
    without_hidden,
)

# The number of blocks (see above) per half-life. With 32, probabilities within a block differ by a fiftieth.
BLOCKS = 32
# Steps older than this number of half-lives are left out: one in 10 ** 12 draws would hit them.
HALF_LIVES = 40
# A block with this number of pieces is full, even if it has few steps.
_MOST_PIECES = 256
# Runs are cut into pieces, and the pieces are sorted by time. A piece has one id, or at most 1 / _PARTS of a block's
# steps.
_PARTS = 4
_AT_ONCE = 1 << 20
# The factor for age in a block's weight is at least e ** -500: this is a normal float64.
_FAR = 500.0


class Recency(Owned):
    """Draw each id with a probability that halves with every `half_life` newer steps, with replacement.

    P(i) ∝ 2 ** (-age / half_life), where age is the number of newer drawable steps of all writers. The age is exact
    within one lane. Across lanes, a step counts as newer if the sampler discovered it later. Steps that were discovered
    together are ordered by their times, with a tolerance of a thirtieth of the half-life.

    A `Recency` belongs to one sampler.

    Parameters
    ----------
    half_life : float
        Number of newer drawable steps that halve the probability of an id; above 0.

    Raises
    ------
    ValueError
        `half_life` is invalid.

    Examples
    --------
    >>> sampler = dr.Sampler("cartpole.replay", dr.Transitions(), dr.Recency(half_life=100), fields=("age",), seed=0)
    >>> bool(sampler.sample(1000)["age"].float().mean() < 150)
    True
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = number("half_life", half_life, above=0.0)
        self._arrivals = Arrivals(self._half_life)

    def __repr__(self) -> str:
        return f"Recency(half_life={self._half_life:g})"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty."""
        return Draw(self._followed(population).draw(size, rng))

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability of each id, (n,); 0 for an id that cannot be drawn."""
        found = np.zeros(len(ids))
        drawable = population.contains(ids)
        if drawable.any():
            found[drawable] = self._followed(population).chances(ids[drawable])
        return found

    def place(self) -> "Arrivals":
        """Return the object with the ids and their order; `load_state_dict` makes a new object."""
        return self._arrivals

    def go_back(self, place: "Arrivals") -> None:
        """Restore an object that `place` returned."""
        self._arrivals = place

    def state_dict(self) -> dict[str, Any]:
        """Return the newest ids in their order of arrival."""
        return self._arrivals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; ids that came after the state was saved count as the newest.

        Raises ValueError if `state` is invalid.
        """
        with state_of("Recency"):
            self._arrivals = Arrivals.loaded(self._half_life, state)

    def _followed(self, population: Population) -> "Arrivals":
        if self._arrivals.is_of_another(population):
            self._arrivals = Arrivals(self._half_life)
        self._arrivals.follow(population)
        return self._arrivals


class Arrivals:
    """The newest ids of one population, in their order of arrival; not thread-safe."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._block = max(1.0, half_life / BLOCKS)
        self._most = max(HALF_LIVES * half_life, 4.0)
        self._is_changing = False
        self._clear()

    def _clear(self) -> None:
        self._cursor = Cursor()
        self._room = GrowingRuns(64)
        self._starts: Ints = np.zeros(1, np.int64)  # The index of each block's first piece, and the number of pieces.
        self._ranks: Floats = np.zeros(1)  # The number of steps before each block, and the number of all steps.
        self._is_full = True
        self._weigh()

    @property
    def _pieces(self) -> Ints:
        return self._room.array[:TIME, : self._starts[-1]]

    # --- drawing -----------------------------------------------------------------------------------------------------

    def draw(self, size: int, rng: np.random.Generator) -> Ints:
        at, which = rng.random((2, size))
        at *= self._weights[-1]
        block = np.minimum(np.searchsorted(self._weights, at, "right") - 1, len(self._ids) - 1)
        share = (at - self._weights[block]) / (self._weights[block + 1] - self._weights[block])
        length = self._lengths[block]
        share = np.log1p(share * np.expm1(length)) / length
        before = self._room.before
        among = before[self._starts[block]] + (which * self._ids[block]).astype(np.int64)
        piece = np.searchsorted(before[: self._starts[-1]], among, "right") - 1
        first, stride, count = self._pieces[:, piece]
        drawn: Ints = first + np.minimum((share * count).astype(np.int64), count - 1) * stride
        return drawn

    def chances(self, ids: Ints) -> Floats:
        """Return the probability of each id, (n,); all ids must be drawable."""
        pieces, segments = IdRuns(*self._pieces), self._cursor.visible[1:3]
        index, count = by_lane(pieces.first, segments), pieces.count
        piece, number, found = runs_with(ids, lane_keys(ids, *segments), index, pieces)
        number = np.where(found, number, 0)
        chance = np.where(found, self._mass(piece, number + 1) - self._mass(piece, number), 0.0)
        return np.asarray(chance / self._mass(np.arange(len(count)), count).sum(), np.float64)

    def _mass(self, piece: Ints, number: Ints) -> Floats:
        """Return the probability, up to a common factor, of the first `number[i]` ids of each piece `piece[i]`."""
        block = np.searchsorted(self._starts, piece, "right") - 1
        count, length = self._pieces[2, piece], self._lengths[block]
        share = np.expm1(length * number / count) / np.expm1(length)
        mass: Floats = np.diff(self._weights)[block] / self._weights[-1] * count / self._ids[block] * share
        return mass

    # --- following ---------------------------------------------------------------------------------------------------

    def is_of_another(self, population: Population) -> bool:
        """Return whether the ids are from a population other than `population`.

        After a state was loaded, the result is False for every population until the first call of `follow`.
        """
        return not (self._cursor.is_new or self._cursor.is_of(population))

    def follow(self, population: Population) -> None:
        if self._cursor.is_at(population):
            return
        if self._is_changing:  # an interrupt has stopped the last call of `follow`
            self._clear()
        self._is_changing = True
        try:
            self._take_in(population)
        except SegmentGone:
            self._is_changing = False  # no id was added
            raise
        self._is_changing = False

    def _take_in(self, population: Population) -> None:
        changes = self._cursor.changes(population)
        # Hidden ids are removed from the pieces, like evicted ids. A resumed sampler cannot tell hidden ids from
        # evicted ids, but must draw the same batches.
        self._drop_hidden(population.visible)
        if self._cursor.may_miss(population):
            self._drop_evicted(population)
        if not self._add(IdRuns(*changes.runs), population) or not self._starts[-1]:
            # All pieces are made anew in two cases. If steps came back from quarantine, the order of arrival is known
            # only from the times of steps. If no piece is left, the population may have older ids.
            self._clear()
            changes = self._cursor.changes(population)
            self._add(IdRuns(*changes.runs), population)
        self._drop_oldest()
        self._weigh()
        self._cursor.reach(population, changes)

    def _drop_hidden(self, visible: Visible) -> None:
        before, end = self._cursor.visible, int(self._starts[-1])
        same = visible.lanes is before.lanes
        if not visible.reached or (before.reached and visible.oldest is before.oldest and same):
            return
        if same:
            # Most segments are newer than the newest segment with a hidden step, so they need no check.
            newest = np.searchsorted(visible.lane_base, np.flatnonzero(visible.oldest)[-1:], "right") + visible.origin
            some = np.flatnonzero(self._room.runs.first[:end] < (newest.max(initial=0) << POSITION_BITS))
        else:
            some = np.arange(end)
        pieces, count = self._room.array[:TIME], self._room.runs.count[:end]
        left = without_hidden(IdRuns(*pieces[:, some]), visible.least_ids(pieces[FIRST, some]))
        pieces[:, some] = np.stack(left)
        if count.all():
            np.cumsum(count, out=self._room.before[1 : end + 1])
        else:
            kept = np.flatnonzero(count)
            self._replace(pieces[:, kept], kept)

    def _drop_evicted(self, population: Population) -> None:
        (first, stride, count), before = self._pieces, self._room.before[: self._starts[-1] + 1]
        parts, start = [np.zeros((4, 0), np.int64)], 0
        while start < len(first):
            stop = max(start + 1, int(np.searchsorted(before, before[start] + _AT_ONCE, "right")) - 1)
            piece = np.repeat(np.arange(start, stop), count[start:stop])
            number = np.arange(before[start], before[stop]) - before[piece]
            ids = first[piece] + number * stride[piece]
            left = population.contains(ids)
            ids, piece, number = ids[left], piece[left], number[left]
            # Successive remaining ids become one piece.
            begins = np.ones(len(ids), np.bool_)
            begins[1:] = (np.diff(piece) != 0) | (np.diff(number) != 1)
            at = np.flatnonzero(begins)
            parts.append(np.stack([ids[at], stride[piece[at]], np.diff(np.append(at, len(ids))), piece[at]]))
            start = stop
        *pieces, of = np.concatenate(parts, axis=1)
        if len(of) != len(first) or (pieces[2] != count).any():
            self._replace(np.stack(pieces), of)

    def _replace(self, pieces: Ints, of: Ints) -> None:
        """Replace all pieces: the new piece i is a part of the old piece `of[i]`.

        Blocks without pieces are removed. Other blocks keep their lengths in steps.
        """
        block = np.searchsorted(self._starts, of, "right") - 1
        kept = np.unique(block)
        lengths = np.diff(self._ranks)[kept]
        self._room.write(0, IdRuns(*pieces))
        self._starts = np.append(np.searchsorted(block, kept), len(of))
        self._ranks = self._ranks[0] + np.append(0.0, np.cumsum(lengths))

    def _add(self, runs: IdRuns, population: Population) -> bool:
        """Append the ids of `runs` that were not added yet; return False if they cannot be appended.

        If a run of a new lane began before the newest step of the last block was published, the call returns False and
        changes nothing.
        """
        runs, place, is_first = self._cursor.new_of(population, runs)
        if not len(place):
            return True
        if self._pieces.shape[1] and is_first.any():
            last = self._pieces[:, self._starts[-2] :]
            newest = population.followed.times(last_ids(IdRuns(*last))).max()
            if population.followed.times(runs.first[is_first]).min() < newest:
                return False
        _, origin, lanes, *_ = population.visible
        steps = population.steps_of(runs.first, runs.stride // lanes[(runs.first >> POSITION_BITS) - origin])
        if float((runs.count * steps).sum()) <= self._block:
            self._extend(runs, float((runs.count * steps).sum()))
        else:  # `times` raises before any change if a segment is gone
            self._append(*_by_time(runs, steps, population.followed.times, self._block, self._most), steps)
        self._cursor.take(runs, place)
        return True

    def _extend(self, runs: IdRuns, steps: float) -> None:
        """Add runs of `steps` steps in total to the last block, or to a new block if the last block is full."""
        if self._is_full or len(self._starts) == 1:
            self._starts = np.append(self._starts, self._starts[-1])
            self._ranks = np.append(self._ranks, self._ranks[-1])
        start = int(self._starts[-2])
        pieces = _merged(np.concatenate([self._pieces[:, start:], np.stack(runs)], axis=1))
        self._starts[-1] = self._room.write(start, IdRuns(*pieces))
        self._ranks[-1] += steps
        self._is_full = bool(self._ranks[-1] - self._ranks[-2] >= self._block or pieces.shape[1] >= _MOST_PIECES)

    def _append(self, runs: IdRuns, block: Ints, of: Ints, steps: Floats) -> None:
        """Append new blocks: run i belongs to block `block[i]`, and each of its ids stands for `steps[of[i]]` steps."""
        lengths = np.bincount(block, runs.count * steps[of])
        starts = np.append(np.flatnonzero(np.diff(block, prepend=-1)), len(block))
        parts = [_merged(part) for part in np.split(np.stack(runs), starts[1:-1], axis=1)]
        sizes = np.array([part.shape[1] for part in parts])
        self._room.write(int(self._starts[-1]), IdRuns(*np.concatenate(parts, axis=1)))
        self._starts = np.append(self._starts, self._starts[-1] + np.cumsum(sizes))
        self._ranks = np.append(self._ranks, self._ranks[-1] + np.cumsum(lengths))
        self._is_full = bool(lengths[-1] >= self._block)

    def _drop_oldest(self) -> None:
        gone = self._ranks[-1] - self._ranks[1:-1] >= self._most
        drop = int(np.count_nonzero(gone))
        if drop > len(gone) // 4:
            self._room.write(0, IdRuns(*self._pieces[:, self._starts[drop] :].copy()))
            self._starts, self._ranks = self._starts[drop:] - self._starts[drop], self._ranks[drop:] - self._ranks[drop]

    def _weigh(self) -> None:
        """Set `_ids`, `_lengths` and `_weights`, the values of the blocks that a draw needs.

        `_ids` is each block's number of ids. `_lengths` is each block's length in half-lives, multiplied by ln 2.
        `_weights[b]` is the sum of the weights of the blocks before block b.
        """
        self._ids = np.diff(self._room.before[self._starts])
        steps = np.diff(self._ranks)
        rate = math.log(2.0) / self._half_life
        self._lengths = np.clip(steps * rate, 1e-300, 700.0)
        # A block's weight is its number of ids per step times the integral of an exponential over the block.
        behind = np.maximum((self._ranks[1:] - self._ranks[-1]) * rate, -_FAR)
        weights = self._ids / np.maximum(steps, 1e-300) * np.exp(behind) * -np.expm1(-self._lengths)
        self._weights = np.append(0.0, np.cumsum(weights))

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "pieces": self._pieces.copy(),
            "starts": self._starts.copy(),
            "ranks": self._ranks.copy(),
            "taken": self._cursor.taken,
            "full": self._is_full,
        }

    @classmethod
    def loaded(cls, half_life: float, state: Mapping[str, Any]) -> "Arrivals":
        new = cls(half_life)
        pieces, new._ranks = np.array(state["pieces"], np.int64), np.array(state["ranks"], np.float64)
        (new._starts,), (taken,) = columns(state, ["starts"]), columns(state, ["taken"])
        new._cursor = Cursor(taken)
        new._is_full = bool(state["full"])
        first, stride, count = pieces
        good = pieces.ndim == 2 and new._starts[0] == 0 and new._starts[-1] == pieces.shape[1]
        good = good and new._ranks.shape == new._starts.shape
        if not good or (np.diff(new._starts) < 1).any() or not (np.diff(new._ranks) > 0).all():
            raise ValueError("its blocks do not match its pieces")
        if (first < 0).any() or (stride < 1).any() or (count < 1).any() or (taken < 0).any():
            raise ValueError("its pieces have an invalid id, stride or count")
        new._room.write(0, IdRuns(*pieces))
        new._weigh()
        return new


def _merged(pieces: Ints) -> Ints:
    """Join pieces of one block: a piece that begins where another piece ends is appended to that piece."""
    pieces = pieces[:, np.lexsort((pieces[0], pieces[0] % pieces[1], pieces[0] >> POSITION_BITS))]
    first, stride, count = pieces
    begins = np.ones(len(first), np.bool_)
    begins[1:] = (first[1:] != first[:-1] + stride[:-1] * count[:-1]) | (stride[1:] != stride[:-1])
    at = np.flatnonzero(begins)
    return np.stack([first[at], stride[at], np.add.reduceat(count, at)])


def _by_time(runs: IdRuns, steps: Floats, times: Any, size: float, most: float) -> tuple[IdRuns, Ints, Ints]:
    """Divide the newest `most` steps of runs into blocks of `size` steps, in the order of `times(ids)`.

    Each id of run i stands for `steps[i]` steps. Returns the pieces, the number of each piece's block, and the index of
    each piece's run.
    """
    begin = times(runs.first).astype(np.float64)
    end = np.maximum(times(last_ids(runs)).astype(np.float64), begin)
    newest = behind(runs, _older(runs.count, steps, begin, end, most))
    pieces, of = pieces_of(newest, np.maximum(1, np.floor(size / _PARTS / steps)).astype(np.int64))
    order = np.lexsort((pieces.first, times(pieces.first + (pieces.count - 1) // 2 * pieces.stride)))
    pieces, of = IdRuns(*(column[order] for column in pieces)), of[order]
    weight = pieces.count * steps[of]
    block = np.unique(((np.cumsum(weight) - 0.5 * weight) / size).astype(np.int64), return_inverse=True)[1]
    return pieces, np.asarray(block, np.int64), of


def _older(count: Ints, steps: Floats, begin: Floats, end: Floats, most: float) -> Ints:
    """Return, for each run, how many of its first ids are older than the newest `most` steps.

    Run i has `count[i]` ids, published evenly from time `begin[i]` to `end[i]`.
    """
    if float((count * steps).sum()) <= most:
        return np.zeros(len(count), np.int64)
    low, high = float(begin.min()), float(end.max()) + 1.0
    for _ in range(64):
        middle = 0.5 * (low + high)
        if float(((count - _before(count, begin, end, middle)) * steps).sum()) >= most:
            low = middle
        else:
            high = middle
    return _before(count, begin, end, low)


def _before(count: Ints, begin: Floats, end: Floats, time: float) -> Ints:
    share = np.clip((time - begin) / np.maximum(end - begin, 1.0), 0.0, 1.0)
    return np.minimum((share * count).astype(np.int64), count)
