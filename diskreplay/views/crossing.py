"""Windows that cross the ends of episodes within a lane: where these windows start, and the reader of their batches."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import InvalidIndex
from diskreplay.ids import (
    CUT,
    FIRST,
    NO_STEP,
    OBSERVATION_ONLY,
    OPEN,
    TERMINATED,
    TRUNCATED,
    EpisodeTable,
    Ints,
    locate,
)
from diskreplay.kernels import gathering as cols
from diskreplay.kernels.runs import lane_keys
from diskreplay.reading.snapshot import LaneMap, Snapshot
from diskreplay.schema.schema import Schema
from diskreplay.views.arguments import reward_leaves
from diskreplay.views.base import NO_PAGES, Block, Leaf, Pages, Reader, View
from diskreplay.views.gather_plan import GatherPlan
from diskreplay.views.requested import Requested, ShownField, WindowLeaf, write_fields
from diskreplay.views.successors import NONE, Bools, EpisodeFinder, Successors, ids_of
from diskreplay.views.windows import Copy, Windows, merged_pages, refuse, refuse_evicted, wide_pages

Bytes = NDArray[np.uint8]

ENDS = TERMINATED | TRUNCATED

# Names of gather plans, by what they copy: all steps of windows, the next observations, or only the first steps.
_STEPS, _NEXT, _FIRST = "steps", "next", "first"


class CrossingStarts:
    """Counts, in each episode, the steps at which a window of `length` steps of the lane starts. Not thread-safe.

    A window continues in the lane's next episode that is still in the store, if the sampler's filter admits that
    episode. A lane continues across the segments of its writer.

    An ended episode is called done when later steps cannot add windows that start in this episode. This is so if enough
    steps of ended episodes follow, or if the filter refuses the next ended episode. Any other ended episode is called
    waiting. Steps of open episodes do not count: the filter may admit an episode while it is open, and refuse the
    episode when it ends.
    """

    def __init__(self, length: int) -> None:
        self._behind = length - 1  # the number of steps in a window after its first step
        self._lanes = LaneMap()
        self._clear()

    def _clear(self) -> None:
        self._waiting, self._counts = EpisodeTable.concatenate([]), np.zeros(0, np.bool_)

    def update(
        self,
        snapshot: Snapshot,
        ended: EpisodeTable | None,
        admitted: EpisodeTable | None,
        still_open: EpisodeTable,
        is_fresh: bool,
    ) -> tuple[EpisodeTable | None, EpisodeTable]:
        """Return two tables: episodes that became done since the last call, and episodes that may get more windows.

        In both tables, an episode has only the steps at which windows start. If the first table would be empty, it is
        None, unless `is_fresh` is True. `ended` has the episodes that ended since the last call; None: no episode
        ended. With `is_fresh`, `ended` has all ended episodes, and earlier calls are forgotten. `admitted` has the
        episodes of `ended` that the sampler's filter admits. `still_open` has the open episodes that the filter admits.
        """
        if is_fresh:
            self._clear()
        parts, counts = [self._waiting], [self._counts]
        for every, some in ((ended, admitted), (snapshot.open, still_open)):
            if every is not None and some is not None:
                parts.append(every)
                counts.append(np.isin(every.first, some.first))
        lanes = self._in_lanes(snapshot, EpisodeTable.concatenate(parts), np.concatenate(counts))
        leaves, behind = lanes.done(self._behind), lanes.steps_behind(lanes.runs_on)[0]
        waits = ~lanes.is_open & ~leaves
        self._waiting, self._counts = lanes.episodes.select(waits), lanes.counts[waits]
        starting = np.where(lanes.counts, np.minimum(lanes.steps + behind - self._behind, lanes.steps), 0)
        first, stride, _, _, _, time = lanes.episodes.lines.T
        # Each episode is entered as terminated, so that an item can start at each of the episode's `starting` steps.
        found = EpisodeTable.of(first, stride, starting, starting, TERMINATED, time)
        whole, rest = found.select(leaves & (starting > 0)), found.select(~leaves & (starting > 0))
        by_lane = np.argsort(lane_keys(rest.first, snapshot.origin, snapshot.lanes))
        return (whole if is_fresh or len(whole) else None), rest.select(by_lane)

    def _in_lanes(self, snapshot: Snapshot, episodes: EpisodeTable, counts: Bools) -> "_Lanes":
        there = locate(episodes.first, snapshot.origin, snapshot.lanes)[0]
        episodes, counts = episodes.select(there), counts[there]
        self._lanes.update(snapshot)
        key = self._lanes.key[self._lanes.places(episodes.first)]
        order = np.lexsort((episodes.first, key))
        return _Lanes(episodes.select(order), counts[order], key[order])


class _Lanes:
    """Episodes, sorted by writer, then lane, then id.

    `counts` is True for an episode that the sampler's filter admits. `steps` has the number of steps of each episode
    that windows can hold. `runs_on` is True for an episode if windows continue in the next episode.
    """

    def __init__(self, episodes: EpisodeTable, counts: Bools, key: Ints) -> None:
        self.episodes, self.counts, self._key = episodes, counts, key
        self.is_open = episodes.end & OPEN != 0
        self._has_next = _following(key) == key
        self._has_next[-1:] = False
        # Windows cannot hold a lane's newest step until the store has the observation after this step.
        usable = np.minimum(episodes.steps, episodes.obs_rows - 1)
        self.steps = np.where(self.is_open & ~self._has_next, usable, episodes.steps)
        self._before = np.cumsum(self.steps) - self.steps
        self.runs_on = self._has_next & _following(counts)

    def steps_behind(self, runs_on: Bools) -> tuple[Ints, Ints]:
        """Return how many steps of later episodes each episode's windows can reach, and the last episode in reach.

        `runs_on` is True for an episode if windows continue in the next episode. The last episode is given by its
        index. It is the nearest episode, from the given episode on, whose `runs_on` is False.
        """
        places = np.where(runs_on, len(runs_on), np.arange(len(runs_on)))
        last = np.minimum.accumulate(places[::-1])[::-1]
        return self._before[last] + self.steps[last] - self._before - self.steps, last

    def done(self, behind: int) -> Bools:
        """Return a mask of the done episodes (see `CrossingStarts`). A window has 1 + `behind` steps."""
        next_open = _following(self.is_open)
        for_good, last = self.steps_behind(self.runs_on & ~next_open)
        is_broken = (self._has_next & ~self.runs_on & ~next_open)[last]
        done = ~self.is_open & (~self.counts | is_broken | (for_good >= behind))
        # An open episode can precede ended episodes of later segments. An ended episode is not done if fewer than
        # `behind` steps lie between the open episode and the ended episode: windows of the open episode may need steps
        # of the ended episode.
        opened = np.append(-1, np.maximum.accumulate(np.where(self.is_open, np.arange(len(done)), -1)))[: len(done)]
        distance = self._before - self._before[opened] - self.steps[opened]
        is_near = (opened >= 0) & (self._key[opened] == self._key) & (distance < behind)
        found: Bools = done & ~is_near
        return found


def _following(values: NDArray[Any]) -> NDArray[Any]:
    """Return, for each place, the value of the next place; the last place keeps its own value."""
    return np.append(values[1:], values[-1:])


class _Steps(NamedTuple):
    """The steps of windows. `ids` and `windows` are flat, (items * length,); the other arrays are (items, length).

    `ends` is TERMINATED or TRUNCATED for the last step of an episode, else 0. `has_obs` is True for a step if the next
    row has the step's next observation. `is_known`, (items,), is True if rows that are appended later cannot change
    `ends` and `has_obs` of the item's last step.
    """

    ids: Ints
    windows: Windows
    flags: Bytes
    ends: Bytes
    has_obs: Bools
    is_known: Bools


class LaneWalk:
    """Finds `length` successive steps of a lane, across its episodes and segments. Not thread-safe.

    `stack` is the depth of the deepest stack of frames.
    """

    def __init__(self, length: int, stack: int) -> None:
        self._length, self._stack = length, stack
        self._successors, self._lanes = Successors(stack), LaneMap()
        # The number of rows to read at once: usually enough for a window, the row after the window, and rows without
        # steps inside the window.
        self._width = length + 2 + length // 8
        self._flags = GatherPlan([Copy("done", cols.ROW, cols.AFTER, 0, self._width, 0)])

    def find(self, snapshot: Snapshot, ids: Ints, refused: Callable[[int], InvalidIndex]) -> _Steps:
        """Return `length` steps from each id on; raises the error `refused(id)` for the first id with too few steps."""
        at = self._successors.find(snapshot, ids, refused)
        self._lanes.update(snapshot)
        places = np.zeros((3, len(ids), self._length), np.int64)  # slot (segment index in the snapshot), lane, row
        # Four values for each step: the flags of its row; `ends`; `has_obs`; whether its next row exists or will never
        # exist.
        step_flags = np.zeros((4, len(ids), self._length), np.uint8)
        items, filled = np.arange(len(ids)), np.zeros(len(ids), np.int64)
        while len(items):
            at.floor[:], at.after[:] = at.row, snapshot.committed_rows(at.slot, at.lane)
            following = self._next_lanes(snapshot, snapshot.lane_base[at.slot] + at.lane)
            row, seen, inside, is_step = self._read(snapshot, at)
            count = is_step.cumsum(axis=1) + filled[items, None]
            i, j = np.nonzero(is_step & (count <= self._length))
            to = items[i], count[i, j] - 1
            places[(slice(None), *to)] = at.slot[i], at.lane[i], row[i, j]
            is_closed = inside[i, j + 1] | (snapshot.sealed[at.slot] | (following != NONE))[i]
            observed = row[i, j] + 1 < snapshot.observed[snapshot.lane_base[at.slot] + at.lane][i]
            end, shows = _ends_of(seen[i, j], seen[i, j + 1], inside[i, j + 1], is_closed, observed)
            step_flags[(slice(None), *to)] = seen[i, j], end, shows, is_closed
            filled[items] = np.minimum(count[:, -1], self._length)
            items, at = self._continue_items(snapshot, items, at, following, filled[items] < self._length)
        lacking = filled < self._length
        if lacking.any():
            raise refused(int(ids[lacking.argmax()]))
        flags, ends, has_obs, closed = step_flags
        windows = self._windows(snapshot, places.reshape(3, -1))
        step_ids = ids_of(snapshot, windows.slot, windows.lane, windows.row)
        is_known = (has_obs[:, -1] | closed[:, -1] | ends[:, -1]) != 0
        return _Steps(step_ids, windows, flags, ends, has_obs != 0, is_known)

    def _read(self, snapshot: Snapshot, at: Windows) -> tuple[Ints, Bytes, Bools, Bools]:
        """Read the flags of `_width` successive rows for each window, beginning with the window's `row`.

        Returns four arrays, (windows, rows): the number of each row, its flags, whether it exists, and whether it has a
        step. The last row never counts as a step, because the next row's flags are needed to tell whether a step ends
        its episode.
        """
        seen, further = self._flags.rows(snapshot, at)[0], np.arange(self._width)
        row = at.row[:, None] + further
        inside = row < at.after[:, None]
        ids = ids_of(snapshot, at.slot[:, None], at.lane[:, None], row)
        ids = np.where(inside, ids, ids[:, :1])
        is_step = inside & (seen & NO_STEP == 0) & ~snapshot.evicted(ids.ravel()).reshape(ids.shape)
        is_step[:, -1] = False
        return row, seen, inside, is_step

    def _windows(self, snapshot: Snapshot, places: Ints) -> Windows:
        """Return a one-row window for each step, with the `floor` that stacks of frames need.

        `places` has the slots, lanes and rows of the steps, (3, steps).
        """
        windows = Windows(places.shape[1])
        windows.slot[:], windows.lane[:], windows.row[:] = places
        windows.floor[:], windows.after[:] = windows.row, windows.row + 1
        if self._stack > 1:
            self._successors.set_floor(snapshot, windows)
        return windows

    def _next_lanes(self, snapshot: Snapshot, places: Ints) -> Ints:
        """Return each lane's place (see `LaneMap`) in the next existing segment with rows of the lane, or NONE."""
        found = self._lanes.next_rows(snapshot, places)
        while True:
            some = np.flatnonzero(found != NONE)
            gone = some[snapshot.lanes[self._lanes.slot[found[some]]] == 0]
            if not len(gone):
                return found
            found[gone] = self._lanes.next_rows(snapshot, found[gone])

    def _continue_items(
        self, snapshot: Snapshot, items: Ints, at: Windows, following: Ints, lacking: Bools
    ) -> tuple[Ints, Windows]:
        """Return the unfinished items whose lanes have more rows, and the windows of these rows.

        If the segment has no more rows of the lane, the window begins in the writer's next segment. `following` has the
        lane's place (see `LaneMap`) in that segment.
        """
        behind = at.row + self._width - 1
        inside = behind < at.after
        left = np.flatnonzero(lacking & (inside | (following != NONE)))
        items, behind, inside, place = items[left], behind[left], inside[left], following[left]
        at = at.select(left)
        moved = np.flatnonzero(~inside)
        at.row[:] = np.where(inside, behind, 0)
        at.slot[moved] = self._lanes.slot[place[moved]]
        at.lane[moved] = place[moved] - snapshot.lane_base[at.slot[moved]]
        return items, at


def _ends_of(own: Bytes, behind: Bytes, is_behind: Bools, is_closed: Bools, observed: Bools) -> tuple[Bytes, Bools]:
    """Return the arrays `ends` and `has_obs` of `_Steps` for steps with the flags `own`.

    `behind` has the flags of the next rows, and `is_behind` is True if the next row exists. `is_closed` and `observed`
    matter only if the next row does not exist. `is_closed` is True if the next row will never exist, and `observed` is
    True if the store has the step's next observation.
    """
    marked = behind & ENDS | np.where(behind & CUT, TRUNCATED, 0)
    derived = np.where(behind & NO_STEP, marked, np.where(behind & FIRST, TRUNCATED, 0))
    derived = np.where(is_behind, derived, np.where(is_closed, TRUNCATED, 0))
    ends = np.where(own & ENDS, own & ENDS, derived).astype(np.uint8)
    return ends, np.where(is_behind, (ends == 0) | (behind & OBSERVATION_ONLY != 0), observed & (own & ENDS == 0))


class CrossingReader(Reader):
    """Gathers `Sequences` with `cross_episodes`. Only `pages` is thread-safe: the reader owns scratch memory.

    The reader gathers each step separately, since rows without steps may lie between the steps of a window.
    """

    shows_leaves = False

    def __init__(
        self,
        view: View,
        schema: Schema,
        kinds: Sequence[WindowLeaf],
        shown: Sequence[ShownField],
        length: int,
        burn_in: int,
        gamma: float,
    ) -> None:
        self._view, self._length, self._burn_in = view, length, burn_in
        self.paths = [field.path for field in shown]
        # Leaves with a value for each step come first in memory: `fill` uses the memory of these leaves also as a
        # `Block` of single steps.
        kinds = sorted(kinds, key=lambda kind: not kind.each_step)
        self.leaves: Sequence[Leaf] = [kind.leaf(length) for kind in kinds]
        self._step_leaves = [kind.value for kind in kinds if kind.each_step]
        self._place = {leaf.path: place for place, leaf in enumerate(self.leaves)}
        copies: dict[str, list[Copy]] = {_STEPS: [], _NEXT: [], _FIRST: []}
        for target, kind in enumerate(kinds):
            if kind.source is not None:
                which = _FIRST if not kind.each_step else _NEXT if kind.value.path[0] == "next_obs" else _STEPS
                copy = Copy(kind.source, cols.ROW, cols.AFTER, 1 - kind.frames, kind.frames, target)
                copies[which].append(copy)
        self._copies = {which: some for which, some in copies.items() if some}
        self._plans = {which: GatherPlan(some) for which, some in self._copies.items()}
        stack = max(kind.frames for kind in kinds)
        self._walk, self._walk_of_pages = LaneWalk(length, stack), LaneWalk(length, stack)
        self._pages_lock = Lock()
        self._finder = EpisodeFinder()
        of_steps, of_items = (
            {kind.value.path: place for place, kind in enumerate(kinds) if kind.each_step == each}
            for each in (True, False)
        )
        rewards = reward_leaves(schema, None)
        self._of_steps = Requested(schema, of_steps, rewards, gamma).if_any()
        self._of_items = Requested(schema, of_items, rewards, gamma).if_any()

    def present(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return [tensors[self._place[path]] for path in self.paths]

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        steps = self._find(self._walk, snapshot, ids)
        each_step = Block(self._step_leaves, steps.windows.size, block.memory)
        for which, windows in self._windows(steps).items():
            self._plans[which].copy(snapshot, windows, block if which == _FIRST else each_step, self.threads)
        is_first = steps.flags & (FIRST | CUT) == FIRST
        is_exact = np.logical_or.accumulate(is_first, axis=1) | (np.arange(self._length) >= self._burn_in)
        made: dict[str, Any] = {
            "terminated": steps.ends & TERMINATED != 0,
            "truncated": steps.ends & TRUNCATED != 0,
            "is_first": is_first,
            "mask": True,
            "loss_mask": is_exact,
            "index": ids,
            "weight": 1.0,
        }
        write_fields(block, self._place, made)
        if self._of_steps is not None:
            self._of_steps.fill(snapshot, steps.ids, each_step)
        if self._of_items is not None:
            self._of_items.fill(snapshot, ids, block)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        try:
            with self._pages_lock:
                steps = self._find(self._walk_of_pages, snapshot, ids)
        except InvalidIndex:
            return NO_PAGES  # `fill` raises an error for these ids
        windows = self._windows(steps)
        return merged_pages([wide_pages(snapshot, windows[which], some) for which, some in self._copies.items()])

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        refuse_evicted(snapshot, ids[locate(ids, snapshot.origin, snapshot.lanes)[0]])
        steps = self._find(self._walk, snapshot, ids)
        before = self._finder.steps_before(snapshot, ids)
        odd = np.flatnonzero(before % self._view.starts.step)
        if len(odd):
            raise InvalidIndex(
                f"id {ids[odd[0]]} is step {before[odd[0]]} of its episode, and no window of {self._view} starts there"
            )
        if not steps.is_known.all():
            raise refuse(snapshot, int(ids[steps.is_known.argmin()]), self._view)

    def _find(self, walk: LaneWalk, snapshot: Snapshot, ids: Ints) -> _Steps:
        return walk.find(snapshot, ids, lambda step_id: refuse(snapshot, step_id, self._view))

    def _windows(self, steps: _Steps) -> dict[str, Windows]:
        """Return {name of a gather plan: windows whose rows the plan copies}."""
        windows = steps.windows
        found = {_STEPS: windows}
        if _FIRST in self._plans:
            found[_FIRST] = windows.select(np.arange(0, windows.size, self._length))
        if _NEXT in self._plans:
            found[_NEXT] = following = windows.select(np.arange(windows.size))
            following.row += 1
            following.after[:] = np.where(steps.has_obs.ravel(), following.row + 1, 0)
        return {which: found[which] for which in self._plans}
