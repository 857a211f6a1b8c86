"""The ids that can be drawn, as one line of positions 0 to size - 1.

Its runs lie in one growing block of arrays, in three regions:

    [0, main)      ended episodes, from when on steps are hidden for their age in the order in which they began; of the
                   first `hidden` of them some is hidden
    [main, ended)  ended episodes found since, refresh by refresh, those of one in order
    [ended, end)   open episodes, and what is left of the partly hidden ones; written anew by each refresh

so a refresh costs what is new, and a search among cumulative counts finds the id at a position. When the second region
outgrows what can be drawn of the first, both are merged into one. So what is at a position depends on what was found
when; `order` tells, and a population that is given the order of another goes on as that one would.
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
from diskreplay.kernels.table import chosen

# Runs in the second region below which sorting is not worth it.
SMALL = 1024
# Runs from which on a search among all reads more than caches hold.
MANY = 1 << 15

_NO_RUNS = TimedRuns(*(np.zeros(0, np.int64) for _ in TimedRuns._fields))
_NO_INTS = np.zeros(0, np.int64)
_NO_PARTLY = np.zeros((4, 0), np.int64)


class Share(NamedTuple):
    """The ids of one rank among `world_size`: by a hash, so that shares are even whatever lanes and windows they have.

    No two ranks share an id, each has one, and it stays there while the store grows.
    """

    rank: int = 0
    world_size: int = 1

    def contains(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which ids are in it."""
        found: NDArray[np.bool_] = mixed(ids.astype(np.uint64)) % np.uint64(self.world_size) == self.rank
        return found

    def count(self, runs: Ints) -> int:
        """Count the ids of runs, (3, n), that are in it."""
        if not runs.shape[1]:  # as a rule
            return 0
        return sum(int(np.count_nonzero(self.contains(ids))) for ids in id_blocks(IdRuns(*runs)))


EVERY_ID = Share()


class Mark(NamedTuple):
    """How far a follower of a population has seen it."""

    epoch: int
    rewrites: int
    hidden: int
    ended: int


class Order(NamedTuple):
    """The runs of ended episodes in the order of their positions; of those in `partly` some may be hidden."""

    main: TimedRuns
    ended: TimedRuns
    partly: TimedRuns

    def state_dict(self) -> dict[str, Any]:
        """Return first ids, strides, counts and times of all runs, (4, n) int64, and how many are of each region."""
        return {"runs": np.stack(joined(list(self))), "regions": [len(runs.first) for runs in self]}

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> "Order":
        """Return the order of a state; ValueError where it is invalid."""
        runs, (main, ended, partly) = np.ascontiguousarray(state["runs"], np.int64), state["regions"]
        good = min(main, ended, partly) >= 0 and runs.shape == (4, main + ended + partly)
        if not good or (runs[[0, 3]] < 0).any() or (runs[1:3] < 1).any():
            raise ValueError("the order of ids contradicts itself")
        return cls(*(TimedRuns(*part) for part in np.split(runs, [main, main + ended], axis=1)))


class Changes(NamedTuple):
    """What has changed for a follower of a population.

    `runs` hold the ids that came; the last `loose` of them are all that may change without being new, and replace what
    was loose before. The first `left` of these are what is left of runs that were there before and are hidden in part.
    `reached` are runs of which some may have been hidden since, as they were; what is left of them is loose. `whole`:
    `runs` are all there are, whatever was before. Both are (3, n), with the rows of `IdRuns`, and change with the next
    refresh.
    """

    mark: Mark
    whole: bool
    reached: Ints
    runs: Ints
    loose: int
    left: int


class Crossing(Protocol):
    """Finds the steps of episodes at which samples start that run on across the episodes behind them in a lane."""

    def update(
        self,
        snapshot: Any,
        ended: EpisodeTable | None,
        admitted: EpisodeTable | None,
        still_open: EpisodeTable,
        is_fresh: bool,
    ) -> tuple[EpisodeTable | None, EpisodeTable]:
        """Return the episodes that are done with, and those that may get more samples, without their other steps.

        `ended` are those that ended since the last call, None where nothing did; with `is_fresh` there was none before,
        and what is done with is not None. Of them and of the open ones those count that are `admitted`, and
        `still_open`.
        """


class Column(NamedTuple):
    """A number for each of some ids, which are in order. Immutable."""

    ids: Ints = _NO_INTS
    values: Ints = _NO_INTS

    def of(self, ids: Ints, otherwise: int = 0) -> Ints:
        """Return the number of each id, `otherwise` where it has none."""
        if not len(self.ids):
            return np.full(len(ids), otherwise)
        at = self._places(ids)
        return np.where(self.ids[at] == ids, self.values[at], otherwise)

    def has(self, ids: Ints) -> NDArray[np.bool_]:
        """Tell which ids have one."""
        return self.ids[self._places(ids)] == ids if len(self.ids) else np.zeros(len(ids), np.bool_)

    def _places(self, ids: Ints) -> Ints:
        return np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)

    def at(self, which: NDArray[np.bool_]) -> "Column":
        """Return the ids at a mask, and their numbers."""
        return self if which.all() else Column(self.ids[which], self.values[which])

    def with_others(self, ids: Ints, values: Ints) -> "Column":
        """Return these and other ids, with their numbers."""
        if not len(ids):
            return self
        order = np.argsort(ids)
        at = np.searchsorted(self.ids, ids[order])
        return Column(np.insert(self.ids, at, ids[order]), np.insert(self.values, at, values[order]))

    def plus(self, ids: Ints, values: Ints) -> "Column":
        """Return the sum of these numbers and others, in which an id may be named more than once."""
        every, where = np.unique(np.append(self.ids, ids), return_inverse=True)
        sums = np.zeros(len(every), np.int64)
        np.add.at(sums, where, np.append(self.values, values))
        return Column(every, sums)


class View(Protocol):
    """What is needed of a view: see `views.base.View`."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What its ids are ids of."""

    @property
    def starts(self) -> Starts:
        """At which steps of episodes its samples start."""

    def crossing(self) -> Crossing | None:
        """Return what tells where samples start that run across episodes' ends; None: they stay in one."""


# Returns the |td| with which ids of a snapshot begin, given eta: the initial priorities of their steps, NaN for none.
InitialErrors = Callable[[Any, Ints, float], Floats]


class Population:
    """The ids that a view offers from a snapshot. Not thread-safe: one sampler, under its lock.

    Of its episodes those count that `episode_filter` admits; None is all. `share` is what a rank draws of them.
    `initial_errors` reads initial priorities; None: there are none.
    `snapshot` is the one that it follows, None before the first; `size` counts the ids that can be drawn. `epoch`
    changes when positions of older ids change but by those that leave: after a sort or a fresh start; `version` with
    every refresh that brings another snapshot.
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
        self._find_starts = chosen("starts")
        self._find_random = chosen("random_ids")
        self._filter = episode_filter or EpisodeFilter()
        self._looks_at_open = self._filter.asks or self._crossing is not None
        self.snapshot: Snapshot | None = None
        self._restored: Order | None = None  # taken over at the next fresh start
        self.kind = view.kind
        self.epoch = self.version = 0
        self._let_in: Ints = np.zeros(0, np.int64)  # first ids of open episodes that count; kept where `where` asks
        self._refusals = 0  # how often some of these came to count no more
        self._share_size = _ShareSize()
        self._clear()

    def _clear(self) -> None:
        self._block = _Block(self._starts)
        self.size = 0
        self._main = self._ended = self._end = self._hidden = 0
        self._seen = 0  # episodes of the log that are in
        self._partly = _NO_PARTLY  # first, stride, count and time of runs of which some is hidden
        self._oldest_new = NEVER  # when the first episode of the second region began
        self._oldest: Ints | None = None
        self._reached = 0
        self._main_index: LaneIndex | None = None
        self._rest_index: LaneIndex | None = None
        self._is_sorted = True  # the first region
        self._rewrites = 0  # of the second region
        self._is_unmerged = False  # but will be when more comes
        self._same_marks: tuple[Mark | None, Mark | None] = None, None  # between which nothing came or went
        self.epoch += 1

    def refresh(self, snapshot: Snapshot) -> None:
        """Follow a newer snapshot."""
        old, log = self.snapshot, snapshot.log
        if snapshot is old:
            return
        # Of the same segments, it is of the same generation.
        is_fresh = old is None or (snapshot.segments is not old.segments and snapshot.generation != old.generation)
        if is_fresh:
            self._start_afresh(log)
        seen = len(log.lines)
        found = ended = still_open = None
        # The predicate of `where` may raise: ask it before anything changes.
        if is_fresh or seen > self._seen:  # most often all that is new is a few steps of open episodes
            new = log.select(slice(self._seen, None))
            found = new.without_discarded()
            self._refusals += len(found) < len(new)  # while they were open, these could be drawn
            ended = self._filter.admit(snapshot, found)
        if self._looks_at_open:
            still_open = self._admit_open(snapshot, ended)
        self.version += 1
        self.snapshot = None  # until the rest is done: whatever interrupts it, the next refresh starts afresh
        if self._crossing is not None and still_open is not None:
            ended, still_open = self._crossing.update(snapshot, found, ended, still_open, is_fresh)
        oldest = snapshot.oldest
        hides, self._oldest, self._reached, self._seen = oldest is not self._oldest, oldest, snapshot.reached, seen
        if ended is not None:
            self._add_ended(snapshot, ended, is_fresh)
        took_away = (hides or ended is not None) and self._hide()
        if took_away or ended is not None:
            # Before others come: for who has followed these, that changes nothing.
            self._is_unmerged = _is_large(self._ended - self._main, self._main - self._hidden)
            if self._is_unmerged and is_fresh and self._restored is None:
                self._merge()
        self._end = self._write_third(snapshot, still_open)
        if self._ended >= MANY:
            self._block.settle(self._ended)
        self.size = self._block.ids_before(self._end) - self._block.ids_before(self._hidden)
        self._rest_index = None
        if is_fresh:
            give_back_free(self._end)  # what sorting took
        self.snapshot, self._restored = snapshot, None

    def _start_afresh(self, log: EpisodeTable) -> None:
        """Forget all runs; keep their order, and the answers of `where` for episodes of the log."""
        if self.snapshot is not None:
            self._filter.keep_only(log.first)
            self._restored = self.order()
        self.snapshot = None
        self._clear()

    def _admit_open(self, snapshot: Snapshot, ended: EpisodeTable | None) -> EpisodeTable:
        """Return the open episodes that count; note whether some that counted while they were open do no more.

        `ended` are the new ended episodes that count.
        """
        still_open = self._filter.admit(snapshot, snapshot.open)
        if self._filter.asks:
            counting = still_open.first if ended is None else np.append(still_open.first, ended.first)
            self._refusals += not np.isin(self._let_in, counting).all()
            self._let_in = still_open.first
        return still_open

    def order(self) -> Order:
        """Return the order of what was refreshed last."""
        if self.snapshot is None:
            return self._restored or Order(_NO_RUNS, _NO_RUNS, _NO_RUNS)
        regions = self._block.slice(self._hidden, self._main), self._block.slice(self._main, self._ended)
        return Order(*(TimedRuns(*runs.copy()) for runs in (*regions, self._partly)))

    def restore(self, order: Order) -> None:
        """Start afresh at the next refresh, with what is still there in this order."""
        self.snapshot, self._restored = None, order
        self.size = 0

    def _add_ended(self, snapshot: Snapshot, ended: EpisodeTable, is_fresh: bool) -> None:
        """Take in ended episodes; at a fresh start in the order that was given, if one was."""
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
            before = self._mark()
            self._merge()
            self._same_marks = before, self._mark()
            start = self._ended
            end = self._block.write(start, new)
        self._block.sort(start, end)
        self._oldest_new = min(self._oldest_new, self._block.time_of(start))
        self._ended = end

    def _write_third(self, snapshot: Snapshot, still_open: EpisodeTable | None) -> int:
        """Write the third region: partly hidden runs, and those of open episodes, None for all; return its end."""
        left = self._partly
        end = self._write_starts(snapshot, left, RUNS_AND_OPEN if still_open is None else RUNS, self._ended)
        if end < 0:  # some are hidden whole now
            end = ~end
            self._partly = np.compress(left[COUNT] > 0, left, axis=1)
        return end if still_open is None else self._write_starts(snapshot, still_open.lines, LINES, end)

    def _write_starts(self, snapshot: Snapshot, given: Ints, kind: int, at: int) -> int:
        """Put the runs that `kernels.runs.starts` makes into the block, from a place on; return what it returns."""
        block, record = self._block, snapshot.record
        room = at + (2 * len(given) if kind == LINES else given.shape[1])
        if kind == RUNS_AND_OPEN:
            room += 2 * len(record)  # which has more numbers than there are open episodes
        if room >= block.room:
            block.make_room(room)
        end: int = self._find_starts(given, kind, record, block.record, at)
        return end

    def _restore_order(self, order: Order, found: TimedRuns, visible: Visible) -> TimedRuns:
        """Fill the empty block in a given order; return what the order does not know."""
        # What is hidden moves a run's start, never its end. One that is hidden whole since is not found, and leaves
        # later: until then it counts, as it does in the population that the order is of.
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
        """Take away what is hidden, of runs that began before the last hidden step was published; tell whether any was.

        Most often what is hidden goes on inside of the same episodes, and that is none.
        """
        reached = self._reached
        if not reached:
            return False
        if not self._is_sorted:
            self._sort()
        is_reached = self._hide_first(reached)
        if self._oldest_new >= reached:
            return is_reached
        if self._main - self._hidden <= self._ended - self._main:
            self._merge()
            self._hide_first(reached)
            return True
        newer = TimedRuns(*self._block.slice(self._main, self._ended))
        is_old = newer.time < reached
        self._partly = np.append(self._partly, np.stack(keep(newer, is_old)), axis=1)
        left = keep(newer, ~is_old)
        self._ended = self._block.write(self._main, left)
        self._rewrites += 1
        self._oldest_new = int(left.time.min(initial=NEVER))
        return True

    def _hide_first(self, reached: int) -> bool:
        """Take away what was reached of the first region; tell whether any was."""
        hidden = self._hidden
        if hidden >= self._main or self._block.time_of(hidden) >= reached:
            return False
        time = self._block.runs.time
        self._hidden += int(time[hidden : self._main].searchsorted(reached))
        self._partly = np.append(self._partly, self._block.slice(hidden, self._hidden), axis=1)
        return True

    def _sort(self) -> None:
        """See that the first region is sorted, which it need not be before anything is hidden."""
        times, self._is_sorted = self._block.runs.time[self._hidden : self._main], True
        if (times[1:] < times[:-1]).any():
            self._merge()

    def _merge(self) -> None:
        """Make the first two regions one, of what can be drawn of them."""
        self._main_index, self._is_unmerged = None, False
        if not self._reached:
            self._main, self._oldest_new, self._is_sorted = self._ended, NEVER, False
            return
        start = self._hidden
        if 2 * start > self._ended:  # what is hidden takes as much room
            self._hidden, self._main, self._ended = 0, self._main - start, self._ended - start
            self._block.array[:, : self._ended] = self._block.array[:, start : start + self._ended]
            self._block.array[BEFORE, 0] = start = 0
        self._block.merge(start, self._ended)
        self._main, self._oldest_new = self._ended, NEVER
        self.epoch += 1

    def take(self, positions: NDArray[Any]) -> Ints:
        """Return the ids at the whole parts of these positions, each from 0 to below `size`."""
        out = np.empty(len(positions), np.int64)
        record = self._block.record_for(len(out))
        chosen("ids_at")(positions.astype(np.float64), self._hidden, self._end, record, out)
        return out

    def random_ids(self, key: int, count: int) -> Ints:
        """Return so many ids, each with the same probability, as a function of a random key of 63 bits."""
        # 53 random bits each: at a billion ids their probabilities differ by less than 2e-7 of themselves.
        out = np.empty(count, np.int64)
        self._find_random(key, self._hidden, self._end, self._block.record_for(count), out)
        return out

    def ids(self) -> Iterator[Ints]:
        """Yield the ids of the share, many at a time."""
        return (ids[self.share.contains(ids)] for ids in id_blocks(self.runs()))

    def share_size(self) -> int:
        """Count the ids of the share; among several ranks at the cost of those that came and went since."""
        return self.size if self.share.world_size == 1 else self._share_size.of(self)

    def nothing_in_share(self) -> NotEnoughData:
        """Return the error that none of the ids is in the share."""
        rank, world_size = self.share
        return NotEnoughData(
            f"none of the {self.size} sampleable steps belongs to rank {rank} of {world_size}; 1 is needed, append more"
        )

    def runs(self) -> IdRuns:
        """Return the runs of all ids that can be drawn, in the order of their positions."""
        return IdRuns(*self._block.array[:TIME, self._hidden : self._end])

    def _mark(self) -> Mark:
        return Mark(self.epoch, self._rewrites, self._hidden, self._ended)

    def changes(self, mark: Mark | None) -> Changes:
        """Return what changed since an earlier call returned this mark, at a cost of what is new; None: everything."""
        now, left = self._mark(), self._partly.shape[1]
        if mark == self._same_marks[0]:
            mark = self._same_marks[1]
        array, loose = self._block.array[:TIME], self._end - self._ended
        # What came since and is hidden again is not told as such.
        if mark is None or mark[:2] != now[:2] or self._hidden > mark.ended:
            return Changes(now, True, array[:, :0], array[:, self._hidden : self._end], loose, left)
        reached = array[:, mark.hidden : self._hidden]
        return Changes(now, False, reached, array[:, mark.ended : self._end], loose, left)

    @property
    def followed(self) -> Snapshot:
        """The snapshot that it follows; there must be one."""
        assert self.snapshot is not None, "the population was never refreshed"
        return self.snapshot

    @property
    def visible(self) -> Visible:
        """What is hidden of each lane."""
        return ALL_VISIBLE if self.snapshot is None else self.snapshot.visible

    @property
    def generation(self) -> int:
        """Grows with that of the snapshot that it follows: while it stays the same, nothing but the oldest ids goes."""
        return -1 if self.snapshot is None else int(self.snapshot.generation) + self._refusals

    def steps_of(self, ids: Ints, apart: Ints) -> Floats:
        """Return for how many steps each id stands: as many rows as they are ``apart``, or a whole episode."""
        if self._starts.last != FIRST_ONLY:
            return apart.astype(np.float64)
        every = EpisodeTable.concatenate([self.followed.log, self.followed.open])
        order = np.argsort(every.first)
        return every.steps[order[np.searchsorted(every.first[order], ids)]].astype(np.float64)

    @property
    def segments(self) -> tuple[int, Ints]:
        """The number of the first segment, and how many lanes each has from there on, 0 where it is gone."""
        snapshot = self.snapshot
        return (0, np.zeros(0, np.int64)) if snapshot is None else (snapshot.origin, snapshot.lanes)

    def episodes(self) -> IdRuns:
        """Return all steps that the snapshot has, of episodes that do not count too, as one run an episode."""
        every = EpisodeTable.concatenate([self.followed.log, self.followed.open])
        runs = IdRuns(every.first, every.stride, every.steps)
        return without_hidden(runs, self.visible.least_ids(every.first))

    def find_runs(self, ids: Ints) -> Ints:
        """Return the place in `runs` of the run that each id is in, -1 where it cannot be drawn."""
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
        """Tell which ids can be drawn."""
        return self.find_runs(ids) >= 0

    def find_moved(self, runs: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return where in `runs` the moved sample of the episode of each of these runs is, and which ones it is itself.

        -1 where the episode has none, or no other run; then none is told to be one itself.
        """
        found, is_moved = np.full(len(runs), -1), np.zeros(len(runs), np.bool_)
        if self._starts.last != MOVED_BACK or self._starts.step == 1:
            return found, is_moved
        lane, moved = self._lanes_of(runs + self._hidden)
        key = lane_keys(self.runs().first[runs], *self.segments)
        # In its lane, a sample that was moved is next to the others of its episode, behind them unless `from_end`.
        beside = np.where(moved == self._starts.from_end, 1, -1)
        for keys, places in self._indices():
            if not len(keys):
                continue
            at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
            other = places[np.clip(at + beside, 0, len(keys) - 1)]
            others_lane, others_moved = self._lanes_of(other)
            is_pair = (keys[at] == key) & (other >= self._hidden) & (others_lane == lane) & (others_moved != moved)
            found[is_pair & ~moved] = other[is_pair & ~moved] - self._hidden
            is_moved |= is_pair & moved
        return found, is_moved

    def _lanes_of(self, at: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return a number for the lane of each of these runs of the block, and which are a sample that was moved."""
        first, stride = (self._block.array[row, at] for row in (FIRST, STRIDE))
        _, slot, width, lane, _ = locate(first, *self.segments)
        return (slot << POSITION_BITS) + lane, stride == width

    def _indices(self) -> tuple[LaneIndex, LaneIndex]:
        """Return the runs of the first region, and all others, in the order of their lanes; see `_index`."""
        if self._main_index is None:
            self._main_index = self._index(0, self._main)
        if self._rest_index is None:
            self._rest_index = self._index(self._main, self._end)
        return self._main_index, self._rest_index

    def _index(self, start: int, end: int) -> LaneIndex:
        """Return the runs of a region in the order of their lanes: keys, and where in the block they stand."""
        keys, order = by_lane(self._block.slice(start, end)[FIRST], self.segments)
        return keys, order + start


class GrowingRuns:
    """Runs of ids, with room for more; see `kernels.runs.FIRST`. `before[i]` counts the ids in runs before run i."""

    def __init__(self, capacity: int) -> None:
        self._replace(_block_array(capacity))

    def _replace(self, array: Ints) -> None:
        self.array = array
        self.room = array.shape[1]
        self.runs, self.before = TimedRuns(*array[:BEFORE]), array[BEFORE]

    def __getstate__(self) -> dict[str, Ints]:
        return {"array": self.array}  # a copy has its own columns, which are parts of its array

    def __setstate__(self, state: dict[str, Ints]) -> None:
        self._replace(state["array"])

    def write(self, start: int, runs: TimedRuns | IdRuns) -> int:
        """Put runs from `start` on, over what is there, and return where they end; without times, these stay."""
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
        """See that there is room for runs before this place."""
        old = self.array
        if end >= old.shape[1]:
            self._replace(_block_array(2 * end))
            for row, before in zip(self.array, old, strict=True):
                if before.any():  # zeros that nobody writes take no memory
                    row[: len(before)] = before


class _Block(GrowingRuns):
    """The runs of a population. `coarse` has the `before` of some that were settled; see `kernels.ids_at`.

    `record` is what kernels read, and names these arrays and the numbers of `starts`.
    """

    def __init__(self, starts: Starts) -> None:
        self._rule, self._wanted = np.array(starts, np.int64), np.zeros(0, np.int64)
        self.coarse: Ints = self._wanted
        super().__init__(256)

    def _replace(self, array: Ints) -> None:
        super()._replace(array)
        # As Python's own numbers, which numpy takes several times as long for.
        self.ids_before, self.time_of = self.before.data.__getitem__, self.runs.time.data.__getitem__
        self._pack()

    def _pack(self) -> None:
        """Make the record, after one of its arrays was replaced."""
        self.record = pack(self._rule, self.array, self.coarse, self._wanted)

    def record_for(self, count: int) -> Ints:
        """Return the record, with memory for so many ids and no more than some times that."""
        if not count <= len(self._wanted) <= 4 * count:
            # An interrupt must not leave a record that names freed memory: then the next call makes another one.
            self._wanted, wanted = self._wanted[:0], np.empty(count, np.int64)
            self.record = pack(self._rule, self.array, self.coarse, wanted)
            self._wanted = wanted
        return self.record

    def slice(self, start: int, end: int) -> Ints:
        """Return runs, (4, n), as views."""
        return self.array[:BEFORE, start:end]

    def settle(self, end: int) -> None:
        """Take in the runs before a place, which stay as they are until they are written again."""
        known, parts = len(self.coarse), end >> COARSE_BITS
        if parts > known:
            new = self.before[known << COARSE_BITS : parts << COARSE_BITS : 1 << COARSE_BITS]
            self.coarse = np.concatenate([self.coarse, new])
            self._pack()

    def _unsettle(self, start: int) -> None:
        """Forget what was settled from a place on."""
        if len(self.coarse) << COARSE_BITS > start:
            self.coarse = self.coarse[: start >> COARSE_BITS]
            self._pack()

    def write(self, start: int, runs: TimedRuns | IdRuns) -> int:
        """Put runs from `start` on, over what is there, and return where they end."""
        self._unsettle(start)
        return super().write(start, runs)

    def sort(self, start: int, end: int) -> None:
        """Sort runs by when their episodes began, and then by id."""
        self._unsettle(start)
        if end - start > 1 and not self._is_sorted(start, end):
            sort_runs(self.array, start, end)

    def _is_sorted(self, start: int, end: int) -> bool:
        first, time = self.runs.first[start:end], self.runs.time[start:end]
        is_later, is_same = time[1:] > time[:-1], time[1:] == time[:-1]
        return bool((is_later | is_same & (first[1:] > first[:-1])).all())

    def merge(self, start: int, end: int) -> None:
        """Sort runs, which are sorted parts, by when their episodes began; those of one time stay in their order."""
        self._unsettle(start)
        runs = self.array[:BEFORE, start:end]
        runs[:] = runs[:, runs[TIME].argsort(kind="stable")]
        np.add(runs[COUNT].cumsum(), self.before[start], out=self.before[start + 1 : end + 1])


def _block_array(capacity: int) -> Ints:
    """Return an array of zeros for so many runs, or more.

    Each of its rows begins with a large page, if it has any: else it would take one more than it fills.
    """
    large = LARGE_PAGE // np.dtype(np.int64).itemsize
    columns = capacity + 1
    if columns > large:
        columns += -columns % large
    (memory,) = zeros((BLOCK_ROWS * columns, np.int64))
    return memory.reshape(BLOCK_ROWS, columns)


def _is_large(second: int, first: int) -> bool:
    """Tell whether the second region has outgrown what can be drawn of the first."""
    return second > max(SMALL, first // 4)


def _no_population() -> Population | None:
    """Stand for a weak reference to a population, before the first."""
    return None


class Cursor:
    """How far one follower has seen one population, and the ids of each lane. Not thread-safe.

    `population` is a weak reference: it returns the population that was seen last, None before the first. `visible` is
    what it hid then. Who keeps ids in the order in which they come takes them by `new_of` and `take`; a saved state
    knows the last ones of each lane that were taken in, `taken`, with which another cursor begins.
    """

    def __init__(self, taken: Ints = _NO_INTS) -> None:
        self.population: Callable[[], Population | None] = _no_population
        self.visible = ALL_VISIBLE
        self._version = -1
        self._mark: Mark | None = None
        self._generation: int | None = None  # None: of another population
        self._last = taken  # of each lane of the population, -1 for none; as they were given before it is followed

    @property
    def is_new(self) -> bool:
        """Whether it has seen no population yet."""
        return self.population is _no_population

    def copy(self) -> "Cursor":
        """Return one that goes on by itself."""
        new = copy(self)
        new._last = self._last.copy()
        return new

    def is_of(self, population: Population) -> bool:
        """Tell whether it is this population that was seen last."""
        return self.population() is population

    def is_at(self, population: Population) -> bool:
        """Tell whether all of a population was seen since its last refresh."""
        return self.population() is population and self._version == population.version

    def changes(self, population: Population) -> Changes:
        """Return what has changed; all of it for another population, or where the last changes were not `reached`."""
        mark, self._mark = self._mark, None
        if not self.is_of(population):
            mark, self._generation, self.population = None, None, weakref.ref(population)
        self._version = -1
        return population.changes(mark)

    def reach(self, population: Population, changes: Changes) -> None:
        """Note that what `changes` returned was taken in."""
        self._version, self._mark = population.version, changes.mark
        self._generation, self.visible = population.generation, population.visible

    def may_miss(self, population: Population) -> bool:
        """Tell whether ids may have gone that are not the oldest ones: evicted by hand, set aside or refused."""
        return self._generation != population.generation

    def kept(self, population: Population, ids: Ints) -> NDArray[np.bool_]:
        """Tell which ids can still be drawn, of such as could be when `changes` were reached, or that came since."""
        if self.may_miss(population):
            return population.contains(ids)
        if self.visible.oldest is population.visible.oldest:
            return np.ones(len(ids), np.bool_)
        return ids >= population.visible.least_ids(ids)

    @property
    def taken(self) -> Ints:
        """The last ids of each lane that were taken in."""
        return self._last[self._last >= 0]

    def new_of(self, population: Population, runs: IdRuns) -> tuple[IdRuns, Ints, NDArray[np.bool_]]:
        """Return what is behind the last ids of these runs, the place of each one's lane, and whether that is new."""
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
        """Take in what `new_of` returned."""
        np.maximum.at(self._last, place, last_ids(runs))


class _ShareSize:
    """How many ids of a population are in its share."""

    def __init__(self) -> None:
        self._cursor = Cursor()
        self._settled = self._size = 0  # the former of runs that stay as they are

    def of(self, population: Population) -> int:
        """Return how many there are."""
        if not self._cursor.is_at(population):
            share, changes = population.share, self._cursor.changes(population)
            ended = changes.runs.shape[1] - changes.loose
            before = 0 if changes.whole else self._settled - share.count(changes.reached)
            self._settled = before + share.count(changes.runs[:, :ended])
            self._size = self._settled + share.count(changes.runs[:, ended:])
            self._cursor.reach(population, changes)
        return self._size
