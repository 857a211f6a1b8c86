"""Steps one by one: what follows each of them in its lane, by the flags of the rows around it, and its episode.

A lane's chain of steps goes on from a step to the next of its episode, and from the last step of an episode that was
cut for its length to the first of its continuation, which may lie in the writer's next segment.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import InvalidIndex
from diskreplay.ids import (
    CUT,
    EPISODE_COLUMNS,
    FIRST,
    NO_STEP,
    OBSERVATION_ONLY,
    POSITION_BITS,
    TERMINATED,
    TRUNCATED,
    EpisodeTable,
    Ints,
    locate,
    row_keys,
)
from diskreplay.kernels import gathering as cols
from diskreplay.reading.snapshot import LaneMap, Snapshot
from diskreplay.views.gather_plan import GatherPlan, row_plan
from diskreplay.views.windows import Copy, Windows

Bools = NDArray[np.bool_]

NONE = -1


class Following(NamedTuple):
    """What follows each step: arrays of one length.

    `successor` is the id of the lane's next step in the chain, NONE where the chain ends or goes no further yet.
    `truncated` also tells the last step of an episode that was cut and is not continued. `has_obs` tells whether the
    observation that a step led to is there: see `observations`.
    """

    steps: Windows
    terminated: Bools
    truncated: Bools
    successor: Ints
    has_obs: Bools
    elsewhere: Bools  # that observation is the successor's own, of a continuation

    def observations(self, snapshot: Snapshot, which: Ints) -> Windows:
        """Return windows of the observations that these steps led to, which are there."""
        obs = self.steps.select(which)
        obs.row += 1
        moved = np.flatnonzero(self.elsewhere[which])
        if len(moved):
            obs.table[:, moved] = place(snapshot, self.successor[which[moved]]).table
        obs.after[:] = obs.row + 1
        return obs


class Successors:
    """Finds steps and what follows them. Not thread-safe: it keeps what it has learnt of a store's lanes.

    `stack` is the depth of the deepest stack of frames.
    """

    def __init__(self, stack: int) -> None:
        self._stack = stack
        self._lanes = LaneMap()
        self._flags = row_plan(["done"])
        self._flags_before = GatherPlan([Copy("done", cols.ROW, cols.AFTER, 1 - stack, stack, 0)])

    def find(self, snapshot: Snapshot, ids: Ints, refuse: Callable[[int], InvalidIndex]) -> Windows:
        """Return windows of one row as of `Windows.find_steps`; `floor` is right for stacks of frames.

        Raises what `refuse` returns of the first id that is no visible step's.
        """
        steps = Windows(len(ids))
        bad = steps.find_steps(snapshot, ids)
        if bad >= 0:
            raise refuse(int(ids[bad]))
        if self._stack > 1:
            self.set_floor(snapshot, steps)
        return steps

    def set_floor(self, snapshot: Snapshot, steps: Windows) -> None:
        """Find the oldest row that a stack may show: the episode's first, or as many rows back as the stack has."""
        steps.floor[:] = np.maximum(steps.row - self._stack + 1, 0)
        flags = self._flags_before.rows(snapshot, steps)[0]
        newest_first = flags[:, ::-1] & FIRST != 0
        back = np.where(newest_first.any(axis=1), newest_first.argmax(axis=1), self._stack)
        np.maximum(steps.floor, steps.row - back, out=steps.floor)

    def follow(self, snapshot: Snapshot, ids: Ints, steps: Windows) -> Following:
        """Find what follows each of these steps, as `find` returned them."""
        own, behind, stop = steps.ends, steps.behind, steps.own_stop
        flagged = own & (TERMINATED | TRUNCATED) != 0
        newest = steps.row + 1 >= stop
        going_on = ~flagged & ~newest & (behind & (NO_STEP | FIRST) == 0)
        successor = np.where(going_on, ids + snapshot.lanes[steps.slot], NONE)
        has_obs = going_on | (behind & OBSERVATION_ONLY != 0)
        elsewhere, truncated = np.zeros((2, len(ids)), np.bool_)
        loose = np.flatnonzero(~flagged & ~going_on)
        if len(loose):
            slot, lane, row = steps.slot[loose], steps.lane[loose], steps.row[loose]
            successor[loose], moved_on = self._continuations(
                snapshot, ids[loose], row + 1 + (behind[loose] & NO_STEP != 0)
            )
            still_open = newest[loose] & ~snapshot.sealed[slot] & ~moved_on
            observed = snapshot.observed[snapshot.lane_base[slot] + lane]
            has_obs[loose] |= still_open & (row + 1 < observed)
            continues = successor[loose] != NONE
            truncated[loose] = ~still_open & ~continues
            elsewhere[loose] = continues & ~has_obs[loose]
            has_obs[loose] |= continues
        truncated |= own & TRUNCATED != 0
        return Following(steps, own & TERMINATED != 0, truncated, successor, has_obs, elsewhere)

    def _continuations(self, snapshot: Snapshot, ids: Ints, after: Ints) -> tuple[Ints, Bools]:
        """Return the first step of the continuation of each episode that ends before row `after` of its lane.

        Also whether the lane has a row there, or in a later segment: then nothing is appended to the episode.
        """
        self._lanes.update(snapshot)
        lane = self._lanes.places(ids)
        inside = after < snapshot.committed[lane]
        lane = np.where(inside, lane, self._lanes.next_rows(snapshot, lane))
        row = np.where(inside, after, 0)
        found = lane >= 0
        found[found] = snapshot.lanes[self._lanes.slot[lane[found]]] > 0
        successor, known = np.full(len(ids), NONE), np.flatnonzero(found)
        slot = self._lanes.slot[lane[known]]
        first = ids_of(snapshot, slot, lane[known] - snapshot.lane_base[slot], row[known])
        continues = self._flags.rows(snapshot, place(snapshot, first))[0][:, 0] & (FIRST | CUT) == FIRST | CUT
        successor[known[continues]] = first[continues]
        return successor, found


def place(snapshot: Snapshot, ids: Ints) -> Windows:
    """Return windows of one row, that of each id, arbitrary where its segment is gone; stacks repeat it."""
    windows = Windows(len(ids))
    _, windows.slot[:], _, windows.lane[:], windows.row[:] = locate(ids, snapshot.origin, snapshot.lanes)
    windows.floor[:] = windows.row
    windows.after[:] = windows.row + 1
    return windows


def ids_of(snapshot: Snapshot, slot: Ints, lane: Ints, row: Ints) -> Ints:
    """Return the ids of these rows of lanes."""
    return ((slot + snapshot.origin) << POSITION_BITS) | (row * snapshot.lanes[slot] + lane)


Table = TypeVar("Table")

# Ended episodes that are not worth sorting those before anew.
_FEW = 1024


class EpisodeTables(Generic[Table]):
    """Two tables that `make` makes of a snapshot's episodes. Not thread-safe.

    One is of most ended ones and made anew when there are an eighth more of them, or some have gone: then `make` is
    given the one before, too. The other, of the rest and of open ones, is made for each snapshot.
    """

    def __init__(self, make: Callable[[Snapshot, EpisodeTable, Table | None], Table]) -> None:
        self._make = make
        self._most: Table | None = None
        self._rest: Table | None = None
        self._snapshot: Snapshot | None = None
        self._count = self._generation = -1

    def of(self, snapshot: Snapshot) -> tuple[Table, Table]:
        """Return both tables of a snapshot, which may be an older one than the last."""
        if snapshot is self._snapshot and self._most is not None and self._rest is not None:
            return self._most, self._rest
        self._snapshot, log = None, snapshot.log
        is_other = snapshot.generation != self._generation or len(log) < self._count
        if self._most is None or is_other or len(log) - self._count > max(_FEW, self._count // 8):
            self._generation = -1  # until the rest is done
            self._most, self._count = self._make(snapshot, log, self._most), len(log)
            self._generation = snapshot.generation
        rest = EpisodeTable.concatenate([log.select(slice(self._count, None)), snapshot.open])
        self._rest = self._make(snapshot, rest, None)
        self._snapshot = snapshot
        return self._most, self._rest


class _ByPlace(NamedTuple):
    """Episodes in the order of segment, lane and row, and the key of each one's first step; see `row_keys`."""

    keys: Ints
    episodes: EpisodeTable


class EpisodeFinder:
    """Finds the episodes that steps belong to. Not thread-safe: it keeps what it has sorted."""

    def __init__(self) -> None:
        self._tables = EpisodeTables(_by_place)

    def find(self, snapshot: Snapshot, ids: Ints) -> EpisodeTable:
        """Return the episode of each of these visible steps, whole, as the snapshot has it."""
        keys = _keys(snapshot, ids)
        found, best = np.zeros((len(ids), EPISODE_COLUMNS), np.int64), np.full(len(ids), -1)
        for table in self._tables.of(snapshot):
            if not len(table.keys):
                continue
            # Of the last episode of each table that begins before a step, the later one is the step's.
            at = np.maximum(np.searchsorted(table.keys, keys, "right") - 1, 0)
            is_better = (table.keys[at] <= keys) & (table.keys[at] > best)
            found = np.where(is_better[:, None], table.episodes.lines[at], found)
            best = np.where(is_better, table.keys[at], best)
        return EpisodeTable(found)

    def steps_before(self, snapshot: Snapshot, ids: Ints) -> Ints:
        """Return how many steps of its episode come before each of these visible steps, hidden ones included."""
        episodes = self.find(snapshot, ids)
        before: Ints = (ids - episodes.first) // episodes.stride
        return before


def _by_place(snapshot: Snapshot, episodes: EpisodeTable, _: _ByPlace | None) -> _ByPlace:
    keys = _keys(snapshot, episodes.first)
    order = np.argsort(keys, kind="stable")
    return _ByPlace(keys[order], episodes.select(order))


def _keys(snapshot: Snapshot, ids: Ints) -> Ints:
    _, _, width, lane, row = locate(ids, snapshot.origin, snapshot.lanes)
    return row_keys(ids, width, lane, row)
