"""A frozen set of committed lengths, and the episodes in it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import InvalidIndex, SegmentGone
from diskreplay.format import layout
from diskreplay.format.schema import Schema
from diskreplay.ids import POSITION_BITS, POSITION_MASK, EpisodeTable, Floats, Ints, locate, places_of
from diskreplay.kernels import following, frozen
from diskreplay.kernels.runs import Visible, open_episodes
from diskreplay.store.reading.chunk_table import ChunkTable, ChunkTables
from diskreplay.store.reading.episode_log import Hidden
from diskreplay.store.reading.episode_values import episode_values


class SegmentTable(NamedTuple):
    """What a snapshot knows of segments: shared by all snapshots between which none came, was sealed or went.

    ``slot = (id >> 35) - origin`` indexes ``lanes`` (0 where a segment is gone), ``lane_base``, ``sealed`` and
    ``clocks``, the wall time at which the clock of its rows began, in nanoseconds since the epoch. The episodes in
    ``hidden`` were evicted by hand or lost to damage, and are in no table of episodes. Positions in the log of ended
    episodes mean the same episode in every snapshot of one ``generation``.

    ``folders`` and ``first_rows`` say where the rows of each are: see `ChunkTables`.

    ``growing`` are the segments that may grow, ``live_base`` says where their lanes are among those that may, -1 for
    others, and ``live_places`` where each of these is among all; ``head`` is what is the same in all records of these
    snapshots: see `kernels.frozen`.
    """

    schema: Schema
    tables: ChunkTables
    origin: int
    lanes: Ints
    lane_base: Ints
    clocks: Ints
    sealed: NDArray[np.bool_]
    hidden: Hidden
    generation: int
    folders: Ints
    first_rows: Ints
    growing: Ints
    live_base: Ints
    live_places: Ints
    head: Ints

    @classmethod
    def of(cls, growing: Ints, **columns: Any) -> "SegmentTable":
        """Return the table of these columns; ``growing`` is that of `LiveLanes`."""
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


@dataclass(slots=True, eq=False)
class Snapshot:
    """What a reader sees until it refreshes.

    Immutable; any number of threads may use one. ``lane_base[slot] + lane`` indexes ``committed`` and ``observed``, the
    rows of that lane that are complete and whose observation is there, and ``oldest``, the first row that is not hidden
    by a capacity or for its age. Hidden are all steps that were published before ``hidden_before``, and none of an
    episode that began at ``reached`` or later: nanoseconds since the epoch. ``log`` holds the ended episodes in
    the order they were found, ``open`` the others.

    ``record`` is what kernels read, with what was known of the lanes that may grow. ``lane_rows`` is what is known of
    all lanes; it is the follower's own, and only what it says of sealed lanes stays as it is.
    """

    segments: SegmentTable
    steps: int
    record: Ints
    lane_rows: Ints
    log: EpisodeTable
    oldest: Ints
    reached: int
    hidden_before: int
    _open: EpisodeTable | None = field(default=None, init=False, repr=False)
    _counters: Ints | None = field(default=None, init=False, repr=False)
    _episodes: EpisodeTable | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        """Return the number of visible steps."""
        return self.steps

    @property
    def schema(self) -> Schema:
        """The store's schema."""
        return self.segments.schema

    @property
    def generation(self) -> int:
        """Changes when positions in ``log`` do; see `SegmentTable`."""
        return self.segments.generation

    @property
    def tables(self) -> ChunkTables:
        """Where the rows of each array are in memory."""
        return self.segments.tables

    @property
    def origin(self) -> int:
        """The number of the first slot's segment."""
        return self.segments.origin

    @property
    def lanes(self) -> Ints:
        """The lanes of each segment, 0 where it is gone."""
        return self.segments.lanes

    @property
    def lane_base(self) -> Ints:
        """The place of each segment's first lane among all lanes."""
        return self.segments.lane_base

    @property
    def clocks(self) -> Ints:
        """What is added to the times of each segment."""
        return self.segments.clocks

    @property
    def sealed(self) -> NDArray[np.bool_]:
        """Whether each segment is sealed."""
        return self.segments.sealed

    @property
    def hidden(self) -> Hidden:
        """Episodes that were evicted by hand or lost to damage."""
        return self.segments.hidden

    @property
    def committed(self) -> Ints:
        """The complete rows of each lane."""
        rows: Ints = self._rows_of_lanes()[following.COMMITTED]
        return rows

    def committed_rows(self, slot: Ints, lane: Ints) -> Ints:
        """Return the complete rows of some lanes, without looking at all."""
        rows: Ints = self.lane_rows[following.COMMITTED, self.lane_base[slot] + lane]
        column = self.segments.live_base[slot]
        grows = column >= 0
        rows[grows] = self._live[following.COMMITTED, column[grows] + lane[grows]]
        return rows

    @property
    def observed(self) -> Ints:
        """The rows of each lane whose observation is there."""
        rows: Ints = self._rows_of_lanes()[following.OBSERVED]
        return rows

    def _rows_of_lanes(self) -> Ints:
        found = self._counters
        if found is None:
            found = self.lane_rows[: following.OBSERVED + 1].copy()
            found[:, self.segments.live_places] = self._live[: following.OBSERVED + 1]
            self._counters = found
        return found

    @property
    def _live(self) -> Ints:
        return self.record[frozen.HEAD :].reshape(following.LANE_ROWS, -1)

    @property
    def open(self) -> EpisodeTable:
        """The open episodes."""
        found = self._open
        if found is None:
            found = self._open = open_episodes(self.origin, self.segments.growing, self._live)
        return found

    @property
    def visible(self) -> Visible:
        """What is hidden of each lane."""
        return Visible(self.reached, self.origin, self.lanes, self.lane_base, self.oldest)

    def leaf(self, path: str) -> ChunkTable:
        """Return the table of one array: a leaf of the schema, or ``done``."""
        return self.segments.tables.leaves[path]

    @property
    def episodes(self) -> EpisodeTable:
        """All visible episodes, oldest first; one that is hidden in part begins at its oldest visible step."""
        found = self._episodes
        if found is None:
            found = self._episodes = self._sorted_episodes()
        return found

    def _sorted_episodes(self) -> EpisodeTable:
        every = EpisodeTable.concatenate([self.log, self.open]) if len(self.open) else self.log
        if (every.first[1:] < every.first[:-1]).any():
            every = every.select(np.argsort(every.first, kind="stable"))
        hidden = self.hidden_steps(every)
        kept = hidden < every.steps
        if kept.all() and not hidden.any():
            return every
        every, hidden = every.select(kept), hidden[kept]
        return EpisodeTable.of(
            every.first + hidden * every.stride,
            every.stride,
            every.steps - hidden,
            every.obs_rows - hidden,
            every.end,
            every.time,
        )

    def least_ids(self, ids: Ints) -> Ints:
        """Return the least id that is not hidden in the lane of each of these; `NEVER` where its segment is gone."""
        return self.visible.least_ids(ids)

    def times(self, ids: Ints) -> Ints:
        """Return when each step was published, in nanoseconds since the epoch; 0 where its segment is gone."""
        found = np.zeros(len(ids), np.int64)
        there, slots, _, lane, row = locate(ids, self.origin, self.lanes)
        slots = slots[there]
        found[there] = self.leaf(layout.TIME).values(slots, lane[there], row[there]) + self.clocks[slots]
        return found

    def episode_values(self, leaf: str, ids: Ints) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the value of an episode field, ``(n, *shape)``, for the episode of each of these steps.

        And which have one: episodes that are open, gone, or were given none have zeros.
        """
        return episode_values(self, leaf, ids)

    @property
    def has_priorities(self) -> bool:
        """Whether any step may have been appended with a priority."""
        return self.segments.tables.priorities is not None

    def priorities(self, ids: Ints) -> Floats:
        """Return the |td| that each step was appended with, ``(n,)``, NaN where that is none or its segment is gone."""
        table = self.segments.tables.priorities
        return np.full(len(ids), np.nan) if table is None else table.priorities(ids, self.origin, self.lanes)

    def hidden_steps(self, episodes: EpisodeTable) -> Ints:
        """Return how many of each episode's first steps are hidden."""
        least = self.least_ids(episodes.first)
        hidden: Ints = np.clip(-((episodes.first - least) // episodes.stride), 0, episodes.steps)
        return hidden

    def find(self, first: int) -> int:
        """Return the position in `episodes` of the episode that holds the step with id ``first``, its first one."""
        episodes = self.episodes
        at = int(np.searchsorted(episodes.first, max(first, 0)))
        # Where some of an episode is hidden, it is among those that now begin a little later.
        for position in range(at, len(episodes)):
            distance = int(episodes.first[position]) - first
            if distance % int(episodes.stride[position]) == 0 and distance >= 0:
                return position
        raise InvalidIndex(f"no visible episode begins at id {first}")

    def holds(self, ids: Ints) -> NDArray[np.bool_]:
        """Tell which ids are those of visible steps."""
        there, slot, _, lane, row = locate(ids, self.origin, self.lanes)
        at = self.lane_base[slot[there]] + lane[there]
        there[there] = (self.oldest[at] <= row[there]) & (row[there] < self.committed[at])
        there[there] = ~self.evicted(ids[there])
        return there

    def evicted(self, ids: Ints) -> NDArray[np.bool_]:
        """Tell which ids, all of rows of the snapshot's segments, are of episodes that were evicted by hand or lost."""
        return self.hidden.contains(ids, self.lanes[(ids >> POSITION_BITS) - self.origin])

    def rows(self, leaf: str, step_id: int, count: int) -> NDArray[Any]:
        """Return ``count`` rows of a leaf from the row of ``step_id`` on, without a copy where one chunk has them."""
        slot, position = (step_id >> POSITION_BITS) - self.origin, step_id & POSITION_MASK
        if not 0 <= slot < len(self.lanes) or self.lanes[slot] == 0:
            raise SegmentGone(f"the segment of id {step_id} was evicted or set aside; refresh and look again")
        lanes = int(self.lanes[slot])
        row, lane = divmod(position, lanes)
        if row + count > max(self.observed[self.lane_base[slot] + lane], self.committed[self.lane_base[slot] + lane]):
            raise InvalidIndex(f"id {step_id} has no {count} rows")
        return self.leaf(leaf).rows(slot, lane, row, row + count)
