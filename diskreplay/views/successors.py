"""Steps one by one, and what follows each of them in its lane: from the flags of the rows around it.

A lane's chain of steps goes on from a step to the next of its episode, and from the last step of an episode that was
cut for its length to the first of its continuation, which may lie in the writer's next segment.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import InvalidIndex
from diskreplay.ids import CUT, FIRST, NO_STEP, OBSERVATION_ONLY, POSITION_BITS, TERMINATED, TRUNCATED, locate
from diskreplay.kernels import gathering as rows
from diskreplay.store.reading.lanes import LaneMap
from diskreplay.store.reading.snapshot import Snapshot
from diskreplay.views.base import Ints
from diskreplay.views.gather_plan import GatherPlan, row_plan
from diskreplay.views.windows import Copy, Windows

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

NONE = -1


class Following(NamedTuple):
    """What follows each step: arrays of one length.

    `successor` is the id of the lane's next step in the chain, NONE where the chain ends or goes no further yet.
    `truncated` also tells the last step of an episode that was cut and is not continued. `obs` says where the
    observation that the step led to lies, where `has_obs`.
    """

    terminated: Bools
    truncated: Bools
    successor: Ints
    has_obs: Bools
    obs: Windows


class Successors:
    """Finds steps and what follows them. Not thread-safe: it keeps what it has learnt of a store's lanes.

    `stack` is the depth of the deepest stack of frames.
    """

    def __init__(self, stack: int) -> None:
        self._stack = stack
        self._lanes = LaneMap()
        self._flags = row_plan(["done"], rows.OWN, rows.OWN_STOP)
        self._flags_before = GatherPlan([Copy("done", rows.ROW, rows.AFTER, 1 - stack, stack, 0)])

    def find(self, snapshot: Snapshot, ids: Ints, refuse: Callable[[int], InvalidIndex]) -> Windows:
        """Return windows of one row, that of the step of each id; `floor` is right for stacks of frames.

        Raises what `refuse` returns of the first id that is no visible step's.
        """
        good, steps = placed(snapshot, ids)
        if good.all():
            stop = snapshot.committed_rows(steps.slot, steps.lane)
            good = (steps.row >= oldest(snapshot, steps)) & (steps.row < stop)
        if good.all():
            good = self._flags_at(snapshot, steps, steps.row, steps.row) & NO_STEP == 0
        if not good.all():
            raise refuse(int(ids[np.argmin(good)]))
        if self._stack > 1:
            self.set_floor(snapshot, steps)
        return steps

    def _flags_at(self, snapshot: Snapshot, windows: Windows, row: Ints, last: Ints) -> Bytes:
        """Return the flags of a row of each window's lane, 0 for rows behind `last`."""
        windows.own[:], windows.own_stop[:] = row, last + 1
        return self._flags.rows(snapshot, windows)[0][:, 0].copy()

    def set_floor(self, snapshot: Snapshot, steps: Windows) -> None:
        """Find the oldest row that a stack may show: the episode's first, or the first that retention has left."""
        steps.floor[:] = np.maximum(oldest(snapshot, steps), steps.row - self._stack + 1)
        flags = self._flags_before.rows(snapshot, steps)[0]
        newest_first = flags[:, ::-1] & FIRST != 0
        back = np.where(newest_first.any(axis=1), newest_first.argmax(axis=1), self._stack)
        np.maximum(steps.floor, steps.row - back, out=steps.floor)

    def follow(self, snapshot: Snapshot, ids: Ints, steps: Windows) -> Following:
        """Find what follows each of these steps."""
        own = self._flags_at(snapshot, steps, steps.row, steps.row)
        stop = snapshot.committed_rows(steps.slot, steps.lane)
        behind = self._flags_at(snapshot, steps, steps.row + 1, stop - 1)
        flagged = own & (TERMINATED | TRUNCATED) != 0
        newest = steps.row + 1 >= stop
        going_on = ~flagged & ~newest & (behind & (NO_STEP | FIRST) == 0)
        successor = np.where(going_on, ids + snapshot.lanes[steps.slot], NONE)
        loose = np.flatnonzero(~flagged & ~going_on)
        moved_on = np.zeros(len(ids), np.bool_)
        if len(loose):
            after = steps.row[loose] + 1 + (behind[loose] & NO_STEP != 0)
            successor[loose], moved_on[loose] = self._continuations(snapshot, ids[loose], after)
        observed = snapshot.observed[snapshot.lane_base[steps.slot] + steps.lane]
        still_open = ~flagged & newest & ~snapshot.sealed[steps.slot] & ~moved_on
        has_obs = going_on | (behind & OBSERVATION_ONLY != 0) | (still_open & (steps.row + 1 < observed))
        cut = ~flagged & ~going_on & ~still_open & (successor == NONE)
        obs = steps.select(np.arange(steps.size))
        obs.row += 1
        elsewhere = np.flatnonzero(~has_obs & (successor != NONE))
        if len(elsewhere):
            target = place(snapshot, successor[elsewhere])
            obs.table[:, elsewhere] = target.table
            has_obs[elsewhere] = True
        obs.after[:] = obs.row + 1
        truncated = (own & TRUNCATED != 0) | cut
        return Following(own & TERMINATED != 0, truncated, successor, has_obs, obs)

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
        target = place(snapshot, first)
        continues = self._flags_at(snapshot, target, target.row, target.row) & (FIRST | CUT) == FIRST | CUT
        successor[known[continues]] = first[continues]
        return successor, found


def place(snapshot: Snapshot, ids: Ints) -> Windows:
    """Return windows of one row, that of each id, whose segment is there; stacks repeat it."""
    return placed(snapshot, ids)[1]


def placed(snapshot: Snapshot, ids: Ints) -> tuple[Bools, Windows]:
    """Return whether the segment of each id is there, and the windows of `place`, arbitrary where it is not."""
    windows = Windows(len(ids))
    known, windows.slot[:], _, windows.lane[:], windows.row[:] = locate(ids, snapshot.origin, snapshot.lanes)
    windows.floor[:] = windows.row
    windows.after[:] = windows.row + 1
    return known, windows


def ids_of(snapshot: Snapshot, slot: Ints, lane: Ints, row: Ints) -> Ints:
    """Return the ids of these rows of lanes."""
    return ((slot + snapshot.origin) << POSITION_BITS) | (row * snapshot.lanes[slot] + lane)


def oldest(snapshot: Snapshot, windows: Windows) -> Ints:
    """Return the first row that is not hidden of each window's lane."""
    found: Ints = snapshot.oldest[snapshot.lane_base[windows.slot] + windows.lane]
    return found
