"""Snapshots (the rows and episodes of all lanes at one moment), and maps of a writer's lanes across segments."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import InvalidIndex, SegmentGone
from diskreplay.ids import (
    CUT,
    DISCARDED,
    EPISODE_COLUMNS,
    EPISODE_VALUES,
    FIRST,
    NO_STEP,
    OPEN,
    POSITION_BITS,
    POSITION_MASK,
    EpisodeTable,
    Floats,
    Ints,
    is_end_with_values,
    locate,
    places_of,
)
from diskreplay.kernels import following, frozen
from diskreplay.kernels.runs import Visible, lane_keys, open_episodes
from diskreplay.reading.chunk_table import ChunkTable, ChunkTables
from diskreplay.reading.episode_log import Evicted
from diskreplay.schema.schema import Schema
from diskreplay.segments.documents import layout
from diskreplay.segments.files.locks import is_locked
from diskreplay.segments.sealing import may_seal
from diskreplay.workers import computed_once

# A search for the episodes of given steps begins with the newest _NEWEST ended episodes, as most of these steps are
# new. If episodes are still missing, the search is repeated in _MORE times as many episodes.
_NEWEST, _MORE = 1024, 8


# --- lanes of writers across segments ---------------------------------------------------------------------------------


LANE_BITS = layout.MAX_LANES.bit_length() - 1


def writer_and_lane(key: Any) -> tuple[Any, Any]:
    return key >> LANE_BITS, key & (layout.MAX_LANES - 1)


class LaneMap:
    """Connects each lane of a segment with the same lane in other segments of the same writer. Not thread-safe.

    A segment lane is one lane of one segment; its place is ``snapshot.lane_base[slot] + lane``.

    Attributes
    ----------
    key : (segment lanes,) int64
        The key of each segment lane: ``writer << 20 | number``, where ``number`` is the lane's number for the writer.
        The key is -1 if the segment was gone before `update`.
    keys : (lanes,) int64
        Each different value in ``key`` except -1, in ascending order: by writer, then by lane.
    slot : (segment lanes,) int64
        The slot of the segment of each segment lane.
    following, previous : (segment lanes,) int64
        The place of the same lane in the writer's next and previous segment with this lane; -1 without such a segment.
    """

    def __init__(self) -> None:
        self._generation: int | None = None
        self._clear(0)

    def _clear(self, origin: int) -> None:
        self.key: Ints = np.zeros(0, np.int64)
        self.keys: Ints = np.zeros(0, np.int64)
        self.slot: Ints = np.zeros(0, np.int64)
        self.following: Ints = np.zeros(0, np.int64)
        self.previous: Ints = np.zeros(0, np.int64)
        self._origin = origin
        self._base: Ints = np.zeros(0, np.int64)
        self._counts: Ints = np.zeros(0, np.int64)

    def update(self, snapshot: Any) -> None:
        if snapshot.generation != self._generation:
            self._generation = snapshot.generation
            self._clear(snapshot.origin)
        seen, slots = len(self._base), len(snapshot.lanes)
        if slots <= seen:
            return  # a caller may pass an older snapshot after a newer one
        # `snapshot.lanes` is 0 for a deleted segment, but the segment's lanes keep their places.
        self._base = snapshot.lane_base
        self._counts = np.diff(np.append(snapshot.lane_base, len(snapshot.committed)))
        keys = [self.key]
        for slot, count in enumerate(self._counts[seen:].tolist(), seen):
            found = snapshot.tables.lanes_of(slot, self._origin)
            keys.append(np.full(count, -1) if found is None else (found[0] << LANE_BITS) + found[1])
        self.key = np.concatenate(keys)
        self.keys = np.unique(self.key[self.key >= 0])
        self.slot = np.repeat(np.arange(slots), self._counts)
        order = np.argsort(self.key, kind="stable")
        same = (self.key[order][1:] == self.key[order][:-1]) & (self.key[order][1:] >= 0)
        self.following, self.previous = np.full((2, len(self.key)), -1)
        self.following[order[:-1][same]] = order[1:][same]
        self.previous[order[1:][same]] = order[:-1][same]

    def places(self, ids: Ints) -> Ints:
        """Return the place of each id's segment lane; call `update` first, with a snapshot that has the ids."""
        slot = (ids >> POSITION_BITS) - self._origin
        places: Ints = self._base[slot] + (ids & POSITION_MASK) % self._counts[slot]
        return places

    def next_rows(self, snapshot: Any, places: Ints) -> Ints:
        """Return the place of each lane in the next segment that has rows of the lane; -1 if there is none."""
        found = self.following[places]
        while True:
            found[found >= len(snapshot.committed)] = -1  # no place in a segment that is newer than the snapshot
            empty = found >= 0
            empty[empty] = snapshot.committed[found[empty]] == 0
            if not empty.any():
                return found
            found[empty] = self.following[found[empty]]

    def growing(self, snapshot: Any) -> Ints:
        """Return the keys of all lanes of the writers that have an unsealed segment, in ascending order."""
        live = ~snapshot.sealed & (snapshot.lanes > 0)
        there = slice(len(snapshot.committed))  # without the segments that are newer than the snapshot
        writers = np.unique(self.key[there][live[self.slot[there]]] >> LANE_BITS)
        return self.keys[np.isin(self.keys >> LANE_BITS, writers)]


def is_abandoned(snapshot: Any, writer: int) -> bool:
    """Return whether a writer with unsealed segments has died: no process holds the locks of these segments.

    On a shared file system, the locks that other machines hold cannot be seen, so writers of other machines do not
    count as dead.
    """
    growing = map(snapshot.tables.info, np.flatnonzero(~snapshot.sealed & (snapshot.lanes > 0)).tolist())
    live = [info for info in growing if info is not None and info.writer == writer]
    return all(may_seal(info) and not is_locked(info.lock_path) for info in live)


# --- snapshots --------------------------------------------------------------------------------------------------------


class SegmentTable(NamedTuple):
    """The segments of a snapshot. Successive snapshots share one table until a segment is added, sealed or deleted.

    The slot of a segment is its number minus ``origin``: ``slot = (id >> 35) - origin`` for an id of a step. Live lanes
    are the lanes of segments that may grow.

    Attributes
    ----------
    lanes : (slots,) int64
        The number of lanes of each segment; 0 if the segment is gone.
    lane_base : (slots,) int64
        The place of each segment's first lane among all lanes.
    clocks : (slots,) int64
        The wall time at which the clock of each segment showed 0, in nanoseconds since the epoch.
    evictions : Evicted
        The episodes that were evicted by hand, lost to damage, or discarded by their writers. These episodes are not
        visible.
    generation : int
        The generation of the log. In all snapshots with the same generation, a position in ``log`` stands for the same
        episode.
    folders, first_rows : (slots,) and (lanes,) int64
        The folder of each segment, and the first row of each lane in its folder: see `ChunkTables`.
    growing : (segments, 3) int64
        A line for each segment that may grow: its slot, its number of lanes, and the place of its first lane among live
        lanes.
    live_base : (slots,) int64
        The place of each segment's first lane among live lanes; -1 if the segment cannot grow.
    live_places : (live lanes,) int64
        The place of each live lane among all lanes.
    head : (`frozen.HEAD`,) int64
        The numbers at the start of the `record` of every snapshot with this table, see `kernels.frozen`.
    discarded_steps : int
        The number of steps of discarded episodes, which stay in the log.
    """

    schema: Schema
    tables: ChunkTables
    origin: int
    lanes: Ints
    lane_base: Ints
    clocks: Ints
    sealed: NDArray[np.bool_]
    evictions: Evicted
    generation: int
    folders: Ints
    first_rows: Ints
    growing: Ints
    live_base: Ints
    live_places: Ints
    head: Ints
    discarded_steps: int = 0

    @classmethod
    def of(cls, growing: Ints, **columns: Any) -> "SegmentTable":
        """Return a table with the attributes ``columns``.

        All other attributes of the table are computed from ``growing``, the array `LiveLanes.growing`.
        """
        slot, width, place = growing[:, [following.SLOT, following.LANES, following.PLACE]].T
        column = np.cumsum(width) - width
        lines = np.ascontiguousarray(np.stack([slot, width, column], axis=1))
        lanes, lane_base = columns["lanes"], columns["lane_base"]
        live_base, head = np.full(len(lanes), -1), np.zeros(frozen.HEAD, np.int64)
        live_base[slot] = column
        head[[frozen.ORIGIN, frozen.SLOTS, frozen.LIVE_LANES]] = columns["origin"], len(lanes), width.sum()
        arrays = [array.ctypes.data for array in (lanes, lane_base, live_base, lines)]
        head[[frozen.LANES, frozen.LANE_BASE, frozen.LIVE_BASE, frozen.GROWING]] = arrays
        folders, first_rows = columns["folders"], columns["first_rows"]
        head[[frozen.FOLDERS, frozen.FIRST_ROWS]] = folders.ctypes.data, first_rows.ctypes.data
        head[[frozen.GROWING_COUNT, frozen.FOLDER_COUNT]] = len(lines), folders.max(initial=-1) + 1
        head[frozen.FIRST_GROWING] = slot.min(initial=len(lanes))
        places = places_of(place, width)
        return cls(growing=lines, live_base=live_base, live_places=places, head=head, **columns)


@dataclass(eq=False)
class Snapshot:
    """The state of a store that a reader sees until it refreshes.

    A snapshot is immutable, and any number of threads may use it. ``committed`` and ``observed`` have a number per
    lane: the number of complete rows, and the number of rows with an observation. In such arrays, the index of a lane
    is ``lane_base[slot] + lane``.

    Attributes
    ----------
    steps : int
        The number of visible steps.
    record : ndarray of int64
        The array that kernels read: the head of the table, and then numbers of the live lanes, see `kernels.frozen`.
    lane_rows : (`following.LANE_ROWS`, lanes) int64
        The array `Slots.rows` of the follower. The columns of live lanes may change later.
    log : EpisodeTable
        The ended episodes, in the order in which the follower has found them. `open` has the episodes that have not
        ended.
    oldest : (lanes,) int64
        For each lane, the first row that no limit hides.
    reached : int
        Every episode with hidden steps began before this time, in nanoseconds since the epoch.
    hidden_before : int
        Every hidden step was published before this time, in nanoseconds since the epoch.
    """

    segments: SegmentTable
    steps: int
    record: Ints
    lane_rows: Ints
    log: EpisodeTable
    oldest: Ints
    reached: int
    hidden_before: int

    def __len__(self) -> int:
        return self.steps

    @property
    def schema(self) -> Schema:
        return self.segments.schema

    @property
    def generation(self) -> int:
        return self.segments.generation

    @property
    def tables(self) -> ChunkTables:
        return self.segments.tables

    @property
    def origin(self) -> int:
        return self.segments.origin

    @property
    def lanes(self) -> Ints:
        return self.segments.lanes

    @property
    def lane_base(self) -> Ints:
        return self.segments.lane_base

    @property
    def clocks(self) -> Ints:
        """The nanoseconds to add to the stored times of each segment to get nanoseconds since the epoch."""
        return self.segments.clocks

    @property
    def sealed(self) -> NDArray[np.bool_]:
        return self.segments.sealed

    @property
    def evictions(self) -> Evicted:
        return self.segments.evictions

    @property
    def committed(self) -> Ints:
        return self._counters[following.COMMITTED]

    def committed_rows(self, slot: Ints, lane: Ints) -> Ints:
        """Return the number of complete rows of each ``(slot[i], lane[i])``.

        For few lanes, this is faster than `committed`.
        """
        rows: Ints = self.lane_rows[following.COMMITTED, self.lane_base[slot] + lane]
        column = self.segments.live_base[slot]
        grows = column >= 0
        rows[grows] = self._live[following.COMMITTED, column[grows] + lane[grows]]
        return rows

    @property
    def observed(self) -> Ints:
        return self._counters[following.OBSERVED]

    def rows_of(self, number: int) -> Ints | None:
        """Return the number of complete rows of each lane of segment ``number``, if the segment may grow.

        Return None if the segment is sealed or gone. A segment that is newer than this snapshot counts as one lane
        without rows.
        """
        slot = number - self.origin
        if slot >= len(self.lanes):
            return np.zeros(1, np.int64)
        if slot < 0 or self.sealed[slot] or not self.lanes[slot]:
            return None
        lane = np.arange(self.lanes[slot])
        return self.committed_rows(np.full(len(lane), slot), lane)

    @computed_once
    def _counters(self) -> tuple[Ints, Ints]:
        found = self.lane_rows[: following.OBSERVED + 1].copy()
        found[:, self.segments.live_places] = self._live[: following.OBSERVED + 1]
        return found[following.COMMITTED], found[following.OBSERVED]

    @property
    def _live(self) -> Ints:
        return self.record[frozen.HEAD :].reshape(following.LANE_ROWS, -1)

    @computed_once
    def open(self) -> EpisodeTable:
        return open_episodes(self.origin, self.segments.growing, self._live)

    @property
    def visible(self) -> Visible:
        return Visible(self.reached, self.origin, self.lanes, self.lane_base, self.oldest)

    def leaf(self, path: str) -> ChunkTable:
        return self.segments.tables.leaf(path)

    @computed_once
    def episodes(self) -> EpisodeTable:
        """The episodes with a visible step, oldest first. Each episode has all its steps, also hidden steps."""
        log = self.log.without_discarded()
        every = EpisodeTable.concatenate([log, self.open]) if len(self.open) else log
        if (every.first[1:] < every.first[:-1]).any():
            every = every.select(np.argsort(every.first, kind="stable"))
        shown = self.hidden_steps(every) < every.steps
        return every if shown.all() else every.select(shown)

    def least_ids(self, ids: Ints) -> Ints:
        """Return, for each id, the smallest visible id of its lane; `NEVER` if the segment of the id is gone.

        If no step is hidden, the result is 0 for each id.
        """
        return self.visible.least_ids(ids)

    def times(self, ids: Ints) -> Ints:
        """Return each step's time of publication, in nanoseconds since the epoch; 0 if the step's segment is gone."""
        found = np.zeros(len(ids), np.int64)
        there, slots, _, lane, row = locate(ids, self.origin, self.lanes)
        slots = slots[there]
        found[there] = self.leaf(layout.TIME).values(slots, lane[there], row[there]) + self.clocks[slots]
        return found

    def episode_values(self, leaf: str, ids: Ints) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the value of an episode field for the episode of each step, ``(n, *shape)``, and a mask, ``(n,)``.

        If the episode is open or gone, or was given no values, the mask is False and the value is zeros.
        """
        episodes, values = self._ended_episodes(ids), self.leaf(leaf)
        given = (episodes.end & EPISODE_VALUES) != 0
        found = np.zeros((len(ids), *values.shape), values.dtype)
        found[given] = values.values(*self.value_places(episodes.select(given)))
        return found, given

    def _ended_episodes(self, ids: Ints) -> EpisodeTable:
        found, missing, count = np.zeros((len(ids), EPISODE_COLUMNS), np.int64), np.arange(len(ids)), _NEWEST
        keys = lane_keys(ids, self.origin, self.lanes)
        while len(missing) and len(self.log):
            some = self.log.select(slice(max(0, len(self.log) - count), None))
            begin = lane_keys(some.first, self.origin, self.lanes)
            order = np.argsort(begin)
            at = np.searchsorted(begin[order], keys[missing], "right") - 1
            episode = order[at]
            inside = (at >= 0) & (keys[missing] >= 0) & (keys[missing] - begin[episode] < some.steps[episode])
            found[missing[inside]] = some.lines[episode[inside]]
            missing = missing[~inside]
            if count >= len(self.log):
                break
            count *= _MORE
        return EpisodeTable(found)

    def value_places(self, episodes: EpisodeTable) -> tuple[Ints, Ints, Ints]:
        """Return the slots, lanes and rows at which the arrays of episode fields have the values of ended episodes.

        Each of the episodes must have values of episode fields. The rows are the result of `ChunkTables.value_rows`.
        """
        slots = (episodes.first >> POSITION_BITS) - self.origin
        row, lane = np.divmod(episodes.first & POSITION_MASK, episodes.stride)
        last, committed = row + episodes.steps, self.committed_rows(slots, lane)
        behind = np.flatnonzero(last < committed)
        flags = np.full(len(last), FIRST, np.uint8)
        flags[behind] = self.leaf(layout.DONE).values(slots[behind], lane[behind], last[behind])
        last -= ~is_end_with_values(flags)
        return slots, lane, self.tables.value_rows(slots, lane, last, committed)

    def value_rows(self, slot: Ints, lane: Ints, row: Ints) -> Ints:
        return self.tables.value_rows(slot, lane, row, self.committed_rows(slot, lane))

    @property
    def has_priorities(self) -> bool:
        return self.segments.tables.priorities is not None

    def priorities(self, ids: Ints) -> Floats:
        """Return the priority that each step was appended with, ``(n,)``; NaN if a step had no priority or is gone."""
        table = self.segments.tables.priorities
        return np.full(len(ids), np.nan) if table is None else table.priorities(ids, self.origin, self.lanes)

    def hidden_steps(self, episodes: EpisodeTable) -> Ints:
        """Return the number of hidden steps of each episode; the hidden steps are always the oldest steps."""
        least = self.least_ids(episodes.first)
        hidden: Ints = np.clip(-((episodes.first - least) // episodes.stride), 0, episodes.steps)
        return hidden

    def count_by_segment(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the numbers of visible, hidden and discarded steps per slot, and of steps both discarded and evicted.

        The third array includes the steps of the fourth array.
        """

        def count(episodes: EpisodeTable, steps: Ints) -> Ints:
            slots = (episodes.first >> POSITION_BITS) - self.origin
            counts: Ints = np.bincount(slots, steps, len(self.lanes)).astype(np.int64)
            counts[self.lanes == 0] = 0
            return counts

        # An episode that began at `reached` or later has no hidden steps.
        log, total = self.log.without_discarded(), count(self.log, self.log.steps)
        older = log.select(log.time < self.reached)
        hidden = count(older, self.hidden_steps(older)) + count(self.open, self.hidden_steps(self.open))
        kept = count(log, log.steps)
        out = self.evictions.episodes
        out = out.select(out.end & DISCARDED != 0)
        discarded = count(out, out.steps)
        return kept + count(self.open, self.open.steps) - hidden, hidden, discarded, discarded - (total - kept)

    def kept_reward_sums(self, episodes: EpisodeTable) -> tuple[Floats, NDArray[np.bool_]]:
        slot = int(episodes.first[0] >> POSITION_BITS) - self.origin
        row, lane = np.divmod(episodes.first & POSITION_MASK, episodes.stride)
        return self.tables.reward_sums(slot, lane, row, episodes.steps)

    def find(self, first: int) -> int:
        begins = self.episodes.first
        at = int(np.searchsorted(begins, max(first, 0)))
        if at < len(begins) and begins[at] == first:
            return at
        raise InvalidIndex(f"no visible episode begins at id {first}")

    @computed_once
    def _lane_map(self) -> LaneMap:
        found = LaneMap()
        found.update(self)
        return found

    def continued(self, episodes: EpisodeTable) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (episodes.end & (CUT | OPEN)) == CUT
        first = episodes.first[found]
        slot, lane = (first >> POSITION_BITS) - self.origin, (first & POSITION_MASK) % episodes.stride[found]
        at, row = self.lane_base[slot] + lane, (first & POSITION_MASK) // episodes.stride[found] + episodes.steps[found]
        done, committed = self.leaf(layout.DONE), self.committed
        inside = np.flatnonzero(row < committed[at])
        row[inside] += (done.values(slot[inside], lane[inside], row[inside]) & NO_STEP) != 0
        behind = np.where(row < committed[at], at, self._lane_map.next_rows(self, at))
        row[behind != at] = 0
        slot = self._lane_map.slot[behind]
        there = np.flatnonzero((behind >= 0) & (self.lanes[slot] > 0))
        slot, lane = slot[there], behind[there] - self.lane_base[slot[there]]
        continues = np.zeros(len(first), np.bool_)
        continues[there] = (done.values(slot, lane, row[there]) & (FIRST | CUT)) == FIRST | CUT
        found[found] = continues
        return found

    def holds(self, ids: Ints) -> NDArray[np.bool_]:
        there, slot, _, lane, row = locate(ids, self.origin, self.lanes)
        at = self.lane_base[slot[there]] + lane[there]
        there[there] = (self.oldest[at] <= row[there]) & (row[there] < self.committed[at])
        there[there] = ~self.evicted(ids[there])
        return there

    def evicted(self, ids: Ints) -> NDArray[np.bool_]:
        """Return whether each id is in an episode of `evictions`. The snapshot must have the segments of all ids."""
        return self.evictions.contains(ids, self.lanes[(ids >> POSITION_BITS) - self.origin])

    def rows(self, leaf: str, step_id: int, count: int) -> NDArray[Any]:
        """Return ``count`` rows of a leaf from the row of ``step_id`` on.

        The result is a view if one uncompressed chunk has these rows, else a copy.
        """
        slot, position = (step_id >> POSITION_BITS) - self.origin, step_id & POSITION_MASK
        if not 0 <= slot < len(self.lanes) or self.lanes[slot] == 0:
            raise SegmentGone(f"the segment of id {step_id} was evicted or set aside; refresh, and use current ids")
        lanes = int(self.lanes[slot])
        row, lane = divmod(position, lanes)
        if row + count > max(self.observed[self.lane_base[slot] + lane], self.committed[self.lane_base[slot] + lane]):
            raise InvalidIndex(f"in the snapshot, the lane of id {step_id} has fewer than {count} rows from this id on")
        return self.leaf(leaf).rows(slot, lane, row, row + count)
