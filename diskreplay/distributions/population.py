"""The ids that can be drawn, at positions 0 to size - 1.

A run is an arithmetic sequence of ids in one lane. Hidden steps are beyond the store's limits and cannot be drawn. All
runs are in one growing block of arrays, in three regions:

    [0, main)      runs of ended episodes; sorted by start time as soon as any step is hidden. The first `hidden` of
                   these runs are partially or wholly hidden
    [main, ended)  runs of ended episodes that later refreshes found; sorted among the runs of the same refresh
    [ended, end)   runs of open episodes, and visible parts of partially hidden runs; rewritten by each refresh

A refresh takes time only for the new runs. A search among cumulative counts finds the id at a position. The second
region is merged into the first when it has more than `SMALL` runs, and more than a quarter of the number of visible
runs in the first region. So the id at a position depends on the order in which episodes were discovered.
`Population.order` returns the runs in the order of their positions. A population that restores this order has the same
ids at the same positions.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.snapshot import EpisodeFilter, Snapshot
from diskreplay.errors import NotEnoughData
from diskreplay.ids import POSITION_BITS, EpisodeTable, Floats, Ints, locate, mixed
from diskreplay.kernels.huge_pages import LARGE_PAGE, give_back_free, zeros
from diskreplay.kernels.packed import pack
from diskreplay.kernels.runs import (
    ALL_VISIBLE,
    BEFORE,
    BLOCK_ROWS,
    COARSE_BITS,
    COUNT,
    FIRST,
    FIRST_ONLY,
    LINES,
    MOVED_BACK,
    NEVER,
    RUNS,
    RUNS_AND_OPEN,
    STRIDE,
    TIME,
    IdRuns,
    LaneIndex,
    Starts,
    TimedRuns,
    Visible,
    behind,
    by_lane,
    id_blocks,
    joined,
    keep,
    lane_keys,
    last_ids,
    runs_with,
    sort_runs,
    without_hidden,
)
from diskreplay.kernels.table import get_kernel

# A second region (see above) with at most this many runs is small: its size causes no merge.
SMALL = 1024
# A binary search among this many runs or more reads more memory than the caches of a processor hold.
MANY = 1 << 15

_NO_RUNS = TimedRuns(*(np.zeros(0, np.int64) for _ in TimedRuns._fields))
_NO_INTS = np.zeros(0, np.int64)
_NO_PARTLY = np.zeros((4, 0), np.int64)


class Share(NamedTuple):
    """The ids of one of several ranks.

    A hash of the id chooses its rank, so that ranks get equal parts of every lane. The rank of an id never changes.
    """

    rank: int = 0
    world_size: int = 1

    def contains(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = mixed(ids.astype(np.uint64)) % np.uint64(self.world_size) == self.rank
        return found

    def count(self, runs: Ints) -> int:
        if not runs.shape[1]:
            return 0
        return sum(int(np.count_nonzero(self.contains(ids))) for ids in id_blocks(IdRuns(*runs)))


EVERY_ID = Share()


class Progress(NamedTuple):
    """The point up to which a follower, such as a table of priorities, has read a population.

    The fields are earlier values of the population's `epoch`, `_rewrites`, `_hidden` and `_ended`. `epoch` and
    `rewrites` change when older runs move to other positions. `hidden` and `ended` are indices in the block, see the
    module's docstring.
    """

    epoch: int
    rewrites: int
    hidden: int
    ended: int


class Order(NamedTuple):
    """The runs of ended episodes in the order of their positions.

    `main` and `ended` are the runs in the first two regions of a population's block, see the module's docstring.
    `partly` are the visible parts of runs with some hidden ids.
    """

    main: TimedRuns
    ended: TimedRuns
    partly: TimedRuns

    def state_dict(self) -> dict[str, Any]:
        return {"runs": np.stack(joined(list(self))), "regions": [len(runs.first) for runs in self]}

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> "Order":
        runs, (main, ended, partly) = np.ascontiguousarray(state["runs"], np.int64), state["regions"]
        good = min(main, ended, partly) >= 0 and runs.shape == (4, main + ended + partly)
        if not good or (runs[[0, 3]] < 0).any() or (runs[1:3] < 1).any():
            raise ValueError("the runs of its order have an invalid shape, id, stride, count or time")
        return cls(*(TimedRuns(*part) for part in np.split(runs, [main, main + ended], axis=1)))


class Changes(NamedTuple):
    """The changes of a population since a follower last read it; see `Progress`.

    `progress` is the argument of the follower's next call of `Population.changes`. `runs` are the new runs. If `whole`
    is True, `runs` are all runs, and replace the runs of all earlier calls.

    The last `provisional` runs may change with each refresh. The provisional runs of a call replace all provisional
    runs of earlier calls. The first `partially_hidden` provisional runs are visible parts of older runs. `reached` are
    runs of earlier calls that may have hidden ids by now. The visible parts of `reached` are among the provisional
    runs.

    `runs` and `reached` are (3, n), with the rows of `IdRuns`. The next refresh overwrites both arrays.
    """

    progress: Progress
    whole: bool
    reached: Ints
    runs: Ints
    provisional: int
    partially_hidden: int


class Crossing(Protocol):
    """Finds the steps at which a sample can start, if samples continue into the following episodes of a lane."""

    def update(
        self,
        snapshot: Any,
        ended: EpisodeTable | None,
        admitted: EpisodeTable | None,
        still_open: EpisodeTable,
        is_fresh: bool,
    ) -> tuple[EpisodeTable | None, EpisodeTable]:
        """Return two tables of starts (steps at which a sample can start), one line per episode with starts.

        The first table has the episodes that get no more starts. The second table has the episodes that may get more
        starts. The column `steps` of a table has the number of starts.

        `ended` are the episodes that ended since the last call, or None if no episode ended. `admitted` are the
        episodes of `ended` that the filter admits, and `still_open` are the open episodes that the filter admits. If
        `is_fresh` is True, `ended` are all ended episodes, and earlier calls are forgotten. If `is_fresh` is False, the
        first result is None instead of an empty table.
        """


class Column(NamedTuple):
    """An immutable mapping of ids, in ascending order, to integers."""

    ids: Ints = _NO_INTS
    values: Ints = _NO_INTS

    def of(self, ids: Ints, otherwise: int = 0) -> Ints:
        if not len(self.ids):
            return np.full(len(ids), otherwise)
        at = self._places(ids)
        return np.where(self.ids[at] == ids, self.values[at], otherwise)

    def has(self, ids: Ints) -> NDArray[np.bool_]:
        return self.ids[self._places(ids)] == ids if len(self.ids) else np.zeros(len(ids), np.bool_)

    def _places(self, ids: Ints) -> Ints:
        return np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)

    def at(self, which: NDArray[np.bool_]) -> "Column":
        return self if which.all() else Column(self.ids[which], self.values[which])

    def with_others(self, ids: Ints, values: Ints) -> "Column":
        """Return a `Column` with more ids and their values; none of the ids may be in this mapping."""
        if not len(ids):
            return self
        order = np.argsort(ids)
        at = np.searchsorted(self.ids, ids[order])
        return Column(np.insert(self.ids, at, ids[order]), np.insert(self.values, at, values[order]))

    def plus(self, ids: Ints, values: Ints) -> "Column":
        """Return a `Column` with values[i] added to the value of ids[i]; ids may be new, and may be repeated."""
        every, where = np.unique(np.append(self.ids, ids), return_inverse=True)
        sums = np.zeros(len(every), np.int64)
        np.add.at(sums, where, np.append(self.values, values))
        return Column(every, sums)


class View(Protocol):
    """The part of `views.base.View` that a population needs."""

    @property
    def kind(self) -> tuple[Any, ...]: ...

    @property
    def starts(self) -> Starts: ...

    def crossing(self) -> Crossing | None:
        """Return an object that finds samples across the ends of episodes; None: each sample is in one episode."""


# A function of (snapshot, ids, eta) that returns the initial |td| of each id, computed from the priorities that writers
# gave to the steps of the id. The result is NaN for an id whose steps have no priorities.
InitialErrors = Callable[[Any, Ints, float], Floats]


class Population:
    """The ids that a view offers from a snapshot.

    Not thread-safe: a sampler uses a population under a lock. `episode_filter` admits episodes; None admits all.
    `share` is a rank's part of the ids. `initial_errors` reads the priorities that writers gave to steps; None: the
    store has no such priorities. `snapshot` is None before the first refresh. `size` is the number of ids that can be
    drawn. `epoch` changes when older ids move to other positions, and `version` changes with each new snapshot.
    """

    def __init__(
        self,
        view: View,
        episode_filter: EpisodeFilter | None = None,
        share: Share = EVERY_ID,
        initial_errors: InitialErrors | None = None,
    ) -> None:
        self.share, self.initial_errors = share, initial_errors
        self._starts = view.starts
        self._crossing = view.crossing()
        self._find_starts = get_kernel("starts")
        self._find_random = get_kernel("random_ids")
        self._filter = episode_filter or EpisodeFilter()
        self._looks_at_open = self._filter.asks or self._crossing is not None
        self.snapshot: Snapshot | None = None
        self._restored: Order | None = None  # the order of runs for the next refresh that reads all episodes
        self.kind = view.kind
        self.epoch = self.version = 0
        self._let_in: Ints = np.zeros(0, np.int64)  # The first id of each open episode that the filter admitted.
        # A number that grows when an episode could be drawn while it was open, but is refused or discarded now.
        self._refusals = 0
        self._share_size = _ShareSize()
        self._clear()

    def _clear(self) -> None:
        self._block = _Block(self._starts)
        self.size = 0
        self._main = self._ended = self._end = self._hidden = 0
        self._seen = 0  # The number of episodes in the snapshot's `log` that were read.
        self._partly = _NO_PARTLY  # The first id, stride, count and time of partially hidden runs.
        self._oldest_new = NEVER  # The time when the oldest episode of the second region began.
        self._reached = 0
        self._unreached = 0  # `_hide` finds no new runs while `_reached` is at most this time.
        self._main_index: LaneIndex | None = None
        self._rest_index: LaneIndex | None = None
        self._is_sorted = True  # Whether the first region is sorted by the start times of episodes.
        self._rewrites = 0  # How often runs were moved within the second region.
        self._is_unmerged = False  # Whether the regions must be merged when more runs come.
        # The results of `_progress` before and after the last merge in `_add_ended`. The merge changed no ids.
        self._same_progress: tuple[Progress | None, Progress | None] = None, None
        self.epoch += 1

    def refresh(self, snapshot: Snapshot) -> None:
        old, log = self.snapshot, snapshot.log
        if snapshot is old:
            return
        # If `segments` is the same object, the generation is unchanged, and need not be compared.
        is_fresh = old is None or (snapshot.segments is not old.segments and snapshot.generation != old.generation)
        if is_fresh:
            self._start_afresh(log)
        seen = len(log.lines)
        found = ended = still_open = None
        # The predicate of `where` may raise, so it is called before anything changes.
        if is_fresh or seen > self._seen:
            new = log.select(slice(self._seen, None))
            found = new.without_discarded()
            self._refusals += found is not new  # discarded episodes could be drawn while they were open
            ended = self._filter.admit(snapshot, found)
        if self._looks_at_open:
            still_open = self._admit_open(snapshot, ended)
        self.version += 1
        self.snapshot = None  # if this call is interrupted, the next refresh reads everything again
        if self._crossing is not None and still_open is not None:
            ended, still_open = self._crossing.update(snapshot, found, ended, still_open, is_fresh)
        self._reached, self._seen = snapshot.reached, seen
        if ended is not None or self._reached > self._unreached:
            self._add_and_hide(snapshot, ended, is_fresh)
        kind, left = RUNS_AND_OPEN if still_open is None else RUNS, self._partly
        end = self._write_starts(snapshot, left, kind, self._ended)
        if end < 0:  # some runs are wholly hidden now
            end = ~end
            self._partly = np.compress(left[COUNT] > 0, left, axis=1)
        self._end = end if still_open is None else self._write_starts(snapshot, still_open.lines, LINES, end)
        if self._ended >= MANY:
            self._block.settle(self._ended)
        self.size = self._block.ids_before(self._end) - self._block.ids_before(self._hidden)
        self._rest_index = None
        if is_fresh:
            give_back_free(self._end)  # there is much freed memory after sorting
        self.snapshot, self._restored = snapshot, None

    def _start_afresh(self, log: EpisodeTable) -> None:
        if self.snapshot is not None:
            self._filter.keep_only(log.first)
            self._restored = self.order()
        self.snapshot = None
        self._clear()

    def _admit_open(self, snapshot: Snapshot, ended: EpisodeTable | None) -> EpisodeTable:
        """Return the open episodes that the filter admits.

        `ended` are the newly ended episodes that the filter admits. Adds 1 to `_refusals` if an episode of the last
        call's result is neither in `ended` nor in the new result.
        """
        still_open = self._filter.admit(snapshot, snapshot.open)
        if self._filter.asks:
            counting = still_open.first if ended is None else np.append(still_open.first, ended.first)
            self._refusals += not np.isin(self._let_in, counting).all()
            self._let_in = still_open.first
        return still_open

    def order(self) -> Order:
        if self.snapshot is None:
            return self._restored or Order(_NO_RUNS, _NO_RUNS, _NO_RUNS)
        regions = self._block.slice(self._hidden, self._main), self._block.slice(self._main, self._ended)
        return Order(*(TimedRuns(*runs.copy()) for runs in (*regions, self._partly)))

    def restore(self, order: Order) -> None:
        """Forget all runs; the next refresh reads all episodes again, and keeps the order of the runs in `order`."""
        self.snapshot, self._restored = None, order
        self.size = 0

    def _add_and_hide(self, snapshot: Snapshot, ended: EpisodeTable | None, is_fresh: bool) -> None:
        if ended is not None:
            self._add_ended(snapshot, ended, is_fresh)
        if self._hide() or ended is not None:
            # The regions are merged when the next runs come. So a follower that has read all runs before the merge need
            # not read them again.
            self._is_unmerged = _is_large(self._ended - self._main, self._main - self._hidden)
            if self._is_unmerged and is_fresh and self._restored is None:
                self._merge()

    def _add_ended(self, snapshot: Snapshot, ended: EpisodeTable, is_fresh: bool) -> None:
        """Add the runs of ended episodes to the second region of the block; see the module's docstring.

        If the block is empty after `restore`, the restored order decides the positions of the runs in the first two
        regions.
        """
        start = self._ended
        end = self._write_starts(snapshot, ended.lines, LINES, start)
        if self._restored is not None and is_fresh:
            found = TimedRuns(*self._block.slice(start, end).copy())
            new = self._restore_order(self._restored, found, snapshot.visible)
            if len(new.first) and _is_large(len(self._restored.ended.first), len(self._restored.main.first)):
                self._merge()
            start = self._ended
            self._append(new)
            self._block.sort(start, self._ended)
            return
        if end == start:
            return
        if self._is_unmerged:
            new = TimedRuns(*self._block.slice(start, end).copy())
            before = self._progress()
            self._merge()
            self._same_progress = before, self._progress()
            start = self._ended
            end = self._block.write(start, new)
        self._block.sort(start, end)
        self._oldest_new = min(self._oldest_new, self._block.time_of(start))
        self._ended = end

    def _write_starts(self, snapshot: Snapshot, given: Ints, kind: int, at: int) -> int:
        """Write runs into the block from index `at` on; for the arguments and the result see `kernels.runs.starts`."""
        block, record = self._block, snapshot.record
        room = at + (2 * len(given) if kind == LINES else given.shape[1])
        if kind == RUNS_AND_OPEN:
            room += 2 * len(record)  # an upper bound: `record` has several numbers per open episode
        if room >= block.room:
            block.make_room(room)
        end: int = self._find_starts(given, kind, record, block.record, at)
        return end

    def _restore_order(self, order: Order, found: TimedRuns, visible: Visible) -> TimedRuns:
        """Fill the empty block with the runs of `order`; return the runs of `found` that are not in `order`."""
        # Hiding steps moves the start of a run, never its end, so runs are compared by their last ids. `found` lacks
        # runs of `order` that are wholly hidden by now. These runs stay in the block until `_hide` is called, as in the
        # population that saved `order`.
        there, known = last_ids(found), [last_ids(runs) for runs in order]
        main, ended, partly = (
            keep(runs, np.isin(last, there) | (runs.time < visible.reached) & (last < visible.least_ids(runs.first)))
            for runs, last in zip(order, known, strict=True)
        )
        self._main = self._ended = self._block.write(0, main)
        self._is_sorted = False
        self._append(ended)
        self._partly = np.stack(partly)
        return keep(found, ~np.isin(there, np.concatenate(known)))

    def _append(self, found: TimedRuns) -> None:
        if len(found.first):
            self._ended = self._block.write(self._ended, found)
            self._oldest_new = min(self._oldest_new, int(found.time.min()))

    def _hide(self) -> bool:
        """Move the runs of episodes that began before `_reached` to `_partly`: these runs may have hidden ids.

        Returns whether any run was moved.
        """
        reached, self._unreached = self._reached, 0
        if not reached:
            return False
        if not self._is_sorted:
            self._sort()
        is_reached = self._hide_first(reached)
        if self._oldest_new < reached:
            is_reached = True
            if self._main - self._hidden <= self._ended - self._main:
                self._merge()
                self._hide_first(reached)
            else:
                newer = TimedRuns(*self._block.slice(self._main, self._ended))
                is_old = newer.time < reached
                self._partly = np.append(self._partly, np.stack(keep(newer, is_old)), axis=1)
                left = keep(newer, ~is_old)
                self._ended = self._block.write(self._main, left)
                self._rewrites += 1
                self._oldest_new = int(left.time.min(initial=NEVER))
        oldest = self._block.time_of(self._hidden) if self._hidden < self._main else NEVER
        self._unreached = min(oldest, self._oldest_new)
        return is_reached

    def _hide_first(self, reached: int) -> bool:
        hidden = self._hidden
        if hidden >= self._main or self._block.time_of(hidden) >= reached:
            return False
        time = self._block.runs.time
        self._hidden += int(time[hidden : self._main].searchsorted(reached))
        self._partly = np.append(self._partly, self._block.slice(hidden, self._hidden), axis=1)
        return True

    def _sort(self) -> None:
        times, self._is_sorted = self._block.runs.time[self._hidden : self._main], True
        if (times[1:] < times[:-1]).any():
            self._merge()

    def _merge(self) -> None:
        self._main_index, self._is_unmerged = None, False
        if not self._reached:
            self._main, self._oldest_new, self._is_sorted = self._ended, NEVER, False
            return
        start = self._hidden
        if 2 * start > self._ended:  # hidden runs take more than half of the memory
            self._hidden, self._main, self._ended = 0, self._main - start, self._ended - start
            self._block.array[:, : self._ended] = self._block.array[:, start : start + self._ended]
            self._block.array[BEFORE, 0] = start = 0
        self._block.merge(start, self._ended)
        self._main, self._oldest_new = self._ended, NEVER
        self.epoch += 1

    def take(self, positions: NDArray[Any]) -> Ints:
        """Return the id at the integer part of each position, 0 <= position < `size`."""
        memory = np.empty((2, len(positions)), np.int64)
        get_kernel("ids_at")(positions.astype(np.float64), self._hidden, self._end, self._block.record, memory)
        found: Ints = memory[0]
        return found

    def random_ids(self, key: int, count: int) -> Ints:
        """Return `count` ids, drawn from all ids with equal probabilities; `key` is a random number of 63 bits."""
        # Each id uses 53 random bits: with a billion ids, relative differences of probabilities are below 2e-7.
        memory = np.empty((2, count), np.int64)
        self._find_random(key, self._hidden, self._end, self._block.record, memory)
        found: Ints = memory[0]
        return found

    def ids(self) -> Iterator[Ints]:
        return (ids[self.share.contains(ids)] for ids in id_blocks(self.runs()))

    def share_size(self) -> int:
        """Return the number of ids in the share.

        With several ranks, a call takes time for each id that came or left since the last call.
        """
        return self.size if self.share.world_size == 1 else self._share_size.of(self)

    def nothing_in_share(self) -> NotEnoughData:
        rank, world_size = self.share
        return NotEnoughData(
            f"none of the {self.size} sampleable steps belongs to rank {rank} of {world_size}; 1 is needed, append more"
        )

    def runs(self) -> IdRuns:
        return IdRuns(*self._block.array[:TIME, self._hidden : self._end])

    def _progress(self) -> Progress:
        return Progress(self.epoch, self._rewrites, self._hidden, self._ended)

    def changes(self, since: Progress | None) -> Changes:
        """Return the changes since the call that returned the progress `since`; None: all runs are new.

        The time of a call grows with the number of new runs, not with the number of all runs.
        """
        now, partly = self._progress(), self._partly.shape[1]
        if since == self._same_progress[0]:
            since = self._same_progress[1]
        array, provisional = self._block.array[:TIME], self._end - self._ended
        # All visible runs are returned if older runs have moved, or if runs that came after `since` are hidden already.
        if since is None or since[:2] != now[:2] or self._hidden > since.ended:
            return Changes(now, True, array[:, :0], array[:, self._hidden : self._end], provisional, partly)
        reached = array[:, since.hidden : self._hidden]
        return Changes(now, False, reached, array[:, since.ended : self._end], provisional, partly)

    @property
    def followed(self) -> Snapshot:
        assert self.snapshot is not None, "the population was never refreshed"
        return self.snapshot

    @property
    def visible(self) -> Visible:
        return ALL_VISIBLE if self.snapshot is None else self.snapshot.visible

    @property
    def generation(self) -> int:
        """A number that grows when ids other than the oldest may have left the population.

        -1 before the first refresh.
        """
        return -1 if self.snapshot is None else int(self.snapshot.generation) + self._refusals

    def steps_of(self, ids: Ints, apart: Ints) -> Floats:
        """Return the number of steps that each id stands for, (n,).

        For a view with one id per episode, this is the number of steps of the episode. For other views, the result is
        `apart`: the distance in rows between successive ids in the id's run.
        """
        if self._starts.last != FIRST_ONLY:
            return apart.astype(np.float64)
        every = EpisodeTable.concatenate([self.followed.log, self.followed.open])
        order = np.argsort(every.first)
        return every.steps[order[np.searchsorted(every.first[order], ids)]].astype(np.float64)

    @property
    def segments(self) -> tuple[int, Ints]:
        """The number of the first segment, and the number of lanes of each segment, 0 for a deleted segment."""
        snapshot = self.snapshot
        return (0, np.zeros(0, np.int64)) if snapshot is None else (snapshot.origin, snapshot.lanes)

    def episodes(self) -> IdRuns:
        """Return all visible steps as one run per episode, including episodes that the filter refuses."""
        every = EpisodeTable.concatenate([self.followed.log, self.followed.open])
        runs = IdRuns(every.first, every.stride, every.steps)
        return without_hidden(runs, self.visible.least_ids(every.first))

    def find_runs(self, ids: Ints) -> Ints:
        """Return, for each id, the index of its run in `runs()`; -1 for an id that cannot be drawn."""
        found = np.full(len(ids), -1)
        if self.size:
            keys = lane_keys(ids, *self.segments)
            for index in self._indices():
                if len(index[0]):
                    run, _, there = runs_with(ids, keys, index, IdRuns(*self._block.runs[:3]))
                    there &= (keys >= 0) & (run >= self._hidden)
                    found[there] = run[there] - self._hidden
        return found

    def contains(self, ids: Ints) -> NDArray[np.bool_]:
        return self.find_runs(ids) >= 0

    def find_moved(self, runs: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return, for each run, the index of its episode's moved sample, and whether the run is itself a moved sample.

        A moved sample starts at another step than `Starts.step` says, so that it fits in its episode; see `MOVED_BACK`
        in `kernels.runs.Starts`. A moved sample is a run of one id, in an episode with another run. `runs` and the
        returned indices are indices into `runs()`. An index is -1 if the run is itself the moved sample, or if its
        episode has no moved sample.
        """
        found, is_moved = np.full(len(runs), -1), np.zeros(len(runs), np.bool_)
        if self._starts.last != MOVED_BACK or self._starts.step == 1:
            return found, is_moved
        lane, moved = self._lanes_of(runs + self._hidden)
        key = lane_keys(self.runs().first[runs], *self.segments)
        # In the index, a moved sample comes after the other run of its episode, or with `from_end` before the other
        # run.
        neighbour = np.where(moved == self._starts.from_end, 1, -1)
        for keys, places in self._indices():
            if not len(keys):
                continue
            at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
            other = places[np.clip(at + neighbour, 0, len(keys) - 1)]
            others_lane, others_moved = self._lanes_of(other)
            is_pair = (keys[at] == key) & (other >= self._hidden) & (others_lane == lane) & (others_moved != moved)
            found[is_pair & ~moved] = other[is_pair & ~moved] - self._hidden
            is_moved |= is_pair & moved
        return found, is_moved

    def _lanes_of(self, at: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return a lane number for each run `at[i]` of the block, and whether the run is a moved sample."""
        first, stride = (self._block.array[row, at] for row in (FIRST, STRIDE))
        _, slot, width, lane, _ = locate(first, *self.segments)
        return (slot << POSITION_BITS) + lane, stride == width

    def _indices(self) -> tuple[LaneIndex, LaneIndex]:
        if self._main_index is None:
            self._main_index = self._index(0, self._main)
        if self._rest_index is None:
            self._rest_index = self._index(self._main, self._end)
        return self._main_index, self._rest_index

    def _index(self, start: int, end: int) -> LaneIndex:
        keys, order = by_lane(self._block.slice(start, end)[FIRST], self.segments)
        return keys, order + start


class GrowingRuns:
    """A growing table of runs, with a column per run; `before[i]` is the number of ids in the runs before run i."""

    def __init__(self, capacity: int) -> None:
        self._replace(_block_array(capacity))

    def _replace(self, array: Ints) -> None:
        self.array = array
        self.room = array.shape[1]
        self.runs, self.before = TimedRuns(*array[:BEFORE]), array[BEFORE]

    def __getstate__(self) -> dict[str, Ints]:
        return {"array": self.array}  # `runs` and `before` are views of this array

    def __setstate__(self, state: dict[str, Ints]) -> None:
        self._replace(state["array"])

    def write(self, start: int, runs: TimedRuns | IdRuns) -> int:
        """Write runs at the indices from `start` on; return the index after the last written run.

        If `runs` have no times, the times in the array stay as they are.
        """
        end = start + len(runs.first)
        self.make_room(end)
        if end == start:
            return end
        for column, values in zip(self.runs, runs, strict=False):
            column[start:end] = values
        before = self.before[start + 1 : end + 1]
        runs.count.cumsum(out=before)
        before += self.before[start]
        return end

    def make_room(self, end: int) -> None:
        old = self.array
        if end >= old.shape[1]:
            self._replace(_block_array(2 * end))
            for row, before in zip(self.array, old, strict=True):
                if before.any():  # zeros are not written, because unwritten pages take no memory
                    row[: len(before)] = before


class _Block(GrowingRuns):
    """The runs of a population; kernels get the `record` of their arrays, see `kernels.runs.RULE`.

    `coarse` has every 16th number of `before`, for a faster search, see `kernels.ids_at`.
    """

    def __init__(self, starts: Starts) -> None:
        self._rule, self.coarse = np.array(starts, np.int64), _NO_INTS
        super().__init__(256)

    def _replace(self, array: Ints) -> None:
        super()._replace(array)
        # A memoryview returns Python numbers several times as fast as numpy.
        self.ids_before, self.time_of = self.before.data.__getitem__, self.runs.time.data.__getitem__
        self._pack()

    def _pack(self) -> None:
        """Make a new `record` after an array was replaced, because `record` has the addresses of arrays."""
        self.record = pack(self._rule, self.array, self.coarse)

    def slice(self, start: int, end: int) -> Ints:
        return self.array[:BEFORE, start:end]

    def settle(self, end: int) -> None:
        """Extend `coarse` to the runs before `end`.

        After the call, only `write`, `sort` and `merge` may change these runs, because these methods also shorten
        `coarse`.
        """
        known, parts = len(self.coarse), end >> COARSE_BITS
        if parts > known:
            new = self.before[known << COARSE_BITS : parts << COARSE_BITS : 1 << COARSE_BITS]
            self.coarse = np.concatenate([self.coarse, new])
            self._pack()

    def _unsettle(self, start: int) -> None:
        if len(self.coarse) << COARSE_BITS > start:
            self.coarse = self.coarse[: start >> COARSE_BITS]
            self._pack()

    def write(self, start: int, runs: TimedRuns | IdRuns) -> int:
        self._unsettle(start)
        return super().write(start, runs)

    def sort(self, start: int, end: int) -> None:
        self._unsettle(start)
        if end - start > 1 and not self._is_sorted(start, end):
            sort_runs(self.array, start, end)

    def _is_sorted(self, start: int, end: int) -> bool:
        first, time = self.runs.first[start:end], self.runs.time[start:end]
        is_later, is_same = time[1:] > time[:-1], time[1:] == time[:-1]
        return bool((is_later | is_same & (first[1:] > first[:-1])).all())

    def merge(self, start: int, end: int) -> None:
        """Sort the runs `start` to `end` - 1, which consist of sorted parts, by the start times of their episodes.

        Runs with equal times keep their order.
        """
        self._unsettle(start)
        runs = self.array[:BEFORE, start:end]
        runs[:] = runs[:, runs[TIME].argsort(kind="stable")]
        np.add(runs[COUNT].cumsum(), self.before[start], out=self.before[start + 1 : end + 1])


def _block_array(capacity: int) -> Ints:
    """Return an array of zeros for at least `capacity` runs.

    A row that fills at least one large page of memory begins at the start of a page, and so touches fewer pages.
    """
    large = LARGE_PAGE // np.dtype(np.int64).itemsize
    columns = capacity + 1
    if columns > large:
        columns += -columns % large
    (memory,) = zeros((BLOCK_ROWS * columns, np.int64))
    return memory.reshape(BLOCK_ROWS, columns)


def _is_large(second: int, first: int) -> bool:
    """Return whether a second region of `second` runs must be merged into a first region of `first` visible runs."""
    return second > max(SMALL, first // 4)


def _no_population() -> Population | None:
    """Stand in for a weak reference to a deleted population."""
    return None


class Cursor:
    """The point up to which a follower has read a population, and the last id that the follower took from each lane.

    Not thread-safe. `population` is a weak reference to the population that was read last. `visible` is the boundary
    between hidden and visible steps at the last `reach`. A follower that keeps ids in their order of arrival uses
    `new_of` and `take`. Such a follower saves `taken`: the last taken id of each lane. A new cursor with the saved
    `taken` continues after these ids.

    A follower calls `changes`, processes the changes, and then calls `reach`. `kept`, `may_miss` and `new_of` need the
    state of the last `reach`, so a follower calls these methods before the next `reach`. If `may_miss` is True, ids
    that left the population may be in it again. `new_of` does not return these ids. A follower that cannot find these
    ids in another way begins again with a new cursor.
    """

    def __init__(self, taken: Ints = _NO_INTS) -> None:
        self.population: Callable[[], Population | None] = _no_population
        self.visible = ALL_VISIBLE
        self._version = -1
        self._progress: Progress | None = None
        self._generation: int | None = None  # None before the first `reach` of this population.
        # The last taken id of each lane, or -1, in the order of places. Before the first call of `new_of`, this is the
        # argument `taken`.
        self._last = taken

    @property
    def is_new(self) -> bool:
        return self.population is _no_population

    def copy(self) -> "Cursor":
        new = copy(self)
        new._last = self._last.copy()
        return new

    def is_of(self, population: Population) -> bool:
        return self.population() is population

    def is_at(self, population: Population) -> bool:
        return self.population() is population and self._version == population.version

    def changes(self, population: Population) -> Changes:
        """Return the changes of a population since the last `reach`.

        If the last call was for another population, or was not followed by `reach`, all runs are returned.
        """
        progress, self._progress = self._progress, None
        if not self.is_of(population):
            progress, self._generation, self.population = None, None, weakref.ref(population)
        self._version = -1
        return population.changes(progress)

    def reach(self, population: Population, changes: Changes) -> None:
        self._version, self._progress = population.version, changes.progress
        self._generation, self.visible = population.generation, population.visible

    def may_miss(self, population: Population) -> bool:
        """Return whether ids other than the oldest may have left the population since the last `reach`.

        Such ids were evicted by hand, put in quarantine, or refused by the filter.
        """
        return self._generation != population.generation

    def kept(self, population: Population, ids: Ints) -> NDArray[np.bool_]:
        """Return which ids can still be drawn, (n,) bool.

        Each of `ids` must be an id that could be drawn at the last `reach`, or a newer id.
        """
        if self.may_miss(population):
            return population.contains(ids)
        if self.visible.oldest is population.visible.oldest:
            return np.ones(len(ids), np.bool_)
        return ids >= population.visible.least_ids(ids)

    @property
    def taken(self) -> Ints:
        return self._last[self._last >= 0]

    def new_of(self, population: Population, runs: IdRuns) -> tuple[IdRuns, Ints, NDArray[np.bool_]]:
        """Return the ids of `runs` that come after the last taken id of their lane, as runs.

        Also returns two values per run: the place of the lane (see `Visible.places`), and whether no id of the lane was
        taken yet.
        """
        visible = population.visible
        if self.may_miss(population):
            known = self.taken
            place = visible.places(known)
            self._last = np.full(len(visible.oldest), -1)
            self._last[place[place >= 0]] = known[place >= 0]
        elif visible.lanes is not self.visible.lanes:
            self._last = np.append(self._last, np.full(len(visible.oldest) - len(self._last), -1))
            known = np.flatnonzero(self._last >= 0)
            self._last[known[visible.places(self._last[known]) < 0]] = -1
        place = visible.places(runs.first)
        there = place >= 0
        runs, place = keep(runs, there), place[there]
        runs = behind(runs, np.clip((self._last[place] - runs.first) // runs.stride + 1, 0, runs.count))
        new = runs.count > 0
        return keep(runs, new), place[new], self._last[place[new]] < 0

    def take(self, runs: IdRuns, place: Ints) -> None:
        """Record that all ids of `runs` were taken; `new_of` must have returned `runs` and `place`."""
        np.maximum.at(self._last, place, last_ids(runs))


class _ShareSize:
    def __init__(self) -> None:
        self._cursor = Cursor()
        # `_size` is the number of ids in all runs. `_settled` is the number of ids in runs that are not provisional
        # (see `Changes`).
        self._settled = self._size = 0

    def of(self, population: Population) -> int:
        if not self._cursor.is_at(population):
            share, changes = population.share, self._cursor.changes(population)
            ended = changes.runs.shape[1] - changes.provisional
            before = 0 if changes.whole else self._settled - share.count(changes.reached)
            self._settled = before + share.count(changes.runs[:, :ended])
            self._size = self._settled + share.count(changes.runs[:, ended:])
            self._cursor.reach(population, changes)
        return self._size
