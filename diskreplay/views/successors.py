"""Functions that find the successors, the next observations and the episodes of single steps.

The successor of a step is the next step of its episode. If an episode was cut for its length, the successor of its last
step is the first step of the continuation. The continuation may be in the writer's next segment.
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
    """The successors of steps; each array has a value for each step.

    `successor` is the id of the next step of the same episode, or of the first step of its continuation after a length
    cut. `successor` is NONE if the store does not have such a step (yet). `truncated` is True for the last step of an
    episode that was truncated, or was cut and is not continued. `has_obs` is True if the store has the next
    observation; see `observations`.
    """

    steps: Windows
    terminated: Bools
    truncated: Bools
    successor: Ints
    has_obs: Bools
    elsewhere: Bools  # whether the next observation is the `obs` of the continuation's first step

    def observations(self, snapshot: Snapshot, which: Ints) -> Windows:
        """Return one-row windows of the next observations of steps.

        `which` has the positions of the steps; `has_obs` must be True for these steps.
        """
        obs = self.steps.select(which)
        obs.row += 1
        moved = np.flatnonzero(self.elsewhere[which])
        if len(moved):
            obs.table[:, moved] = place(snapshot, self.successor[which[moved]]).table
        obs.after[:] = obs.row + 1
        return obs


class Successors:
    """Finds steps and their successors. Not thread-safe: it keeps a map of the store's lanes.

    `stack` is the depth of the deepest stack of frames.
    """

    def __init__(self, stack: int) -> None:
        self._stack = stack
        self._lanes = LaneMap()
        self._flags = row_plan(["done"])
        self._flags_before = GatherPlan([Copy("done", cols.ROW, cols.AFTER, 1 - stack, stack, 0)])

    def find(self, snapshot: Snapshot, ids: Ints, refuse: Callable[[int], InvalidIndex]) -> Windows:
        """Return the one-row window of each id; `floor` is the oldest row that a stack of frames may show.

        Raises the error that `refuse` returns for the first id that is not the id of a visible step.
        """
        steps = Windows(len(ids))
        bad = steps.find_steps(snapshot, ids)
        if bad >= 0:
            raise refuse(int(ids[bad]))
        if self._stack > 1:
            self.set_floor(snapshot, steps)
        return steps

    def set_floor(self, snapshot: Snapshot, steps: Windows) -> None:
        """Set `floor` to the oldest row that a stack may show: up to `stack` - 1 rows back, in the step's episode."""
        steps.floor[:] = np.maximum(steps.row - self._stack + 1, 0)
        flags = self._flags_before.rows(snapshot, steps)[0]
        newest_first = flags[:, ::-1] & FIRST != 0
        back = np.where(newest_first.any(axis=1), newest_first.argmax(axis=1), self._stack)
        np.maximum(steps.floor, steps.row - back, out=steps.floor)

    def follow(self, snapshot: Snapshot, ids: Ints, steps: Windows) -> Following:
        """Return the successors of these steps; `steps` are the windows that `find` returned for the ids."""
        own, behind, stop = steps.ends, steps.behind, steps.own_stop
        flagged = own & (TERMINATED | TRUNCATED) != 0
        newest = steps.row + 1 >= stop
        is_inside = ~flagged & ~newest & (behind & (NO_STEP | FIRST) == 0)
        successor = np.where(is_inside, ids + snapshot.lanes[steps.slot], NONE)
        has_obs = is_inside | (behind & OBSERVATION_ONLY != 0)
        elsewhere, truncated = np.zeros((2, len(ids)), np.bool_)
        at_break = np.flatnonzero(~flagged & ~is_inside)
        if len(at_break):
            slot, lane, row = steps.slot[at_break], steps.lane[at_break], steps.row[at_break]
            successor[at_break], moved_on = self._continuations(
                snapshot, ids[at_break], row + 1 + (behind[at_break] & NO_STEP != 0)
            )
            still_open = newest[at_break] & ~snapshot.sealed[slot] & ~moved_on
            observed = snapshot.observed[snapshot.lane_base[slot] + lane]
            has_obs[at_break] |= still_open & (row + 1 < observed)
            continues = successor[at_break] != NONE
            truncated[at_break] = ~still_open & ~continues
            elsewhere[at_break] = continues & ~has_obs[at_break]
            has_obs[at_break] |= continues
        truncated |= own & TRUNCATED != 0
        return Following(steps, own & TERMINATED != 0, truncated, successor, has_obs, elsewhere)

    def _continuations(self, snapshot: Snapshot, ids: Ints, after: Ints) -> tuple[Ints, Bools]:
        """Return the id of the first step of each episode's continuation, or NONE if the episode has no continuation.

        `ids` has the id of each episode's last step. `after` has the row where a continuation in the same segment would
        begin. Also return whether the lane has a row after the episode, in this or a later segment: in this case, the
        episode cannot grow.
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
    """Return a one-row window for each id. Frame stacks of such a window repeat the row.

    The window is arbitrary if the id's segment is gone.
    """
    windows = Windows(len(ids))
    _, windows.slot[:], _, windows.lane[:], windows.row[:] = locate(ids, snapshot.origin, snapshot.lanes)
    windows.floor[:] = windows.row
    windows.after[:] = windows.row + 1
    return windows


def ids_of(snapshot: Snapshot, slot: Ints, lane: Ints, row: Ints) -> Ints:
    """Return the ids of rows; `slot` has the index of each row's segment in the snapshot."""
    return ((slot + snapshot.origin) << POSITION_BITS) | (row * snapshot.lanes[slot] + lane)


Table = TypeVar("Table")

# With at most this many new ended episodes, the large table is not made again.
_FEW = 1024


class EpisodeTables(Generic[Table]):
    """Two tables with the episodes of a snapshot; the function `make` makes each table. Not thread-safe.

    The large table has most ended episodes. The large table is made again when the number of ended episodes has grown
    by an eighth, or when some of its episodes are gone. For a new large table, `make` also gets the previous large
    table. The small table has the other ended episodes and the open episodes, and is made for each snapshot.
    """

    def __init__(self, make: Callable[[Snapshot, EpisodeTable, Table | None], Table]) -> None:
        self._make = make
        self._most: Table | None = None
        self._rest: Table | None = None
        self._snapshot: Snapshot | None = None
        self._count = self._generation = -1

    def of(self, snapshot: Snapshot) -> tuple[Table, Table]:
        """Return the large and the small table. `snapshot` may be older than the snapshot of the last call."""
        if snapshot is self._snapshot and self._most is not None and self._rest is not None:
            return self._most, self._rest
        self._snapshot, log = None, snapshot.log
        is_other = snapshot.generation != self._generation or len(log) < self._count
        if self._most is None or is_other or len(log) - self._count > max(_FEW, self._count // 8):
            self._generation = -1  # if an interrupt ends `make`, the next call makes the table again
            self._most, self._count = self._make(snapshot, log, self._most), len(log)
            self._generation = snapshot.generation
        rest = EpisodeTable.concatenate([log.select(slice(self._count, None)), snapshot.open])
        self._rest = self._make(snapshot, rest, None)
        self._snapshot = snapshot
        return self._most, self._rest


class _ByPlace(NamedTuple):
    """Episodes in the order of `keys`; keys[i] is the key (see `row_keys`) of episode i's first step."""

    keys: Ints
    episodes: EpisodeTable


class EpisodeFinder:
    """Finds the episodes of steps. Not thread-safe: it keeps sorted tables."""

    def __init__(self) -> None:
        self._tables = EpisodeTables(_by_place)

    def find(self, snapshot: Snapshot, ids: Ints) -> EpisodeTable:
        """Return the episode of each visible step; an episode includes its hidden steps."""
        keys = _keys(snapshot, ids)
        found, best = np.zeros((len(ids), EPISODE_COLUMNS), np.int64), np.full(len(ids), -1)
        for table in self._tables.of(snapshot):
            if not len(table.keys):
                continue
            # Of the episodes of both tables, a step belongs to the last one that begins at or before the step.
            at = np.maximum(np.searchsorted(table.keys, keys, "right") - 1, 0)
            is_better = (table.keys[at] <= keys) & (table.keys[at] > best)
            found = np.where(is_better[:, None], table.episodes.lines[at], found)
            best = np.where(is_better, table.keys[at], best)
        return EpisodeTable(found)

    def steps_before(self, snapshot: Snapshot, ids: Ints) -> Ints:
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
