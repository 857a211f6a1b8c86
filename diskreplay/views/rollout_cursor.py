"""The distribution of `Rollouts`: a cursor that draws each step of a lane once, oldest first."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.base import Draw, Owned, RefreshNeeded
from diskreplay.distributions.population import EVERY_ID, Population
from diskreplay.distributions.saved_state import columns, state_of
from diskreplay.distributions.snapshot import EpisodeFilter, Snapshot
from diskreplay.errors import NotEnoughData
from diskreplay.ids import CONTINUES, CUT, OBSERVATION_ONLY, OPEN, TERMINATED, TRUNCATED, EpisodeTable, Ints
from diskreplay.kernels.runs import IdRuns, id_blocks, without_hidden
from diskreplay.kernels.table import get_kernel
from diskreplay.reading.snapshot import LANE_BITS, LaneMap, is_abandoned, writer_and_lane

_NO_LANES: Ints = np.zeros(0, np.int64)


class Positions:
    """Records, for each lane, up to which id its steps were drawn. Immutable.

    `keys` has the sorted keys (see `LaneMap`) of the lanes from which ids were drawn. `after` has the position of each
    of these lanes: all smaller ids of the lane were drawn.
    """

    def __init__(self, keys: Any = (), after: Any = ()) -> None:
        self.keys: Ints = np.array(keys, np.int64)
        self.after: Ints = np.array(after, np.int64)

    def of(self, keys: Ints) -> Ints:
        return _values_of(keys, self.keys, self.after)

    def advanced(self, keys: Ints, after: Ints) -> "Positions":
        if np.array_equal(keys, self.keys):  # the usual case: the same lanes
            return Positions(keys, np.maximum(self.after, after))
        every = np.union1d(self.keys, keys)
        moved = self.of(every)
        np.maximum.at(moved, np.searchsorted(every, keys), after)
        return Positions(every, moved)


def _values_of(keys: Ints, known: Ints, values: Ints) -> Ints:
    """Return the value of each key, 0 for a key that is not known; `known` are the keys of `values`, sorted."""
    if not len(known):
        return np.zeros(len(keys), np.int64)
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[at] == keys, values[at], 0)


class LaneEpisodes(NamedTuple):
    """Episodes, each with the key (see `LaneMap`) of its lane. Most functions need them sorted by lane, then id."""

    key: Ints
    episodes: EpisodeTable

    def select(self, which: NDArray[Any]) -> "LaneEpisodes":
        return LaneEpisodes(self.key[which], self.episodes.select(which))

    def with_others(self, others: "LaneEpisodes") -> "LaneEpisodes":
        """Return these episodes followed by `others`, not sorted."""
        episodes = EpisodeTable.concatenate([self.episodes, others.episodes])
        return LaneEpisodes(np.append(self.key, others.key), episodes)

    def in_order(self) -> "LaneEpisodes":
        return self.select(np.lexsort((self.episodes.first, self.key)))


class Bootstrap(NamedTuple):
    """The sources of bootstrap values: two fields, and the view's `value_fn` if `calls_value_fn` is True.

    `value` names the field with V of each step's observation. `next_value` names the field with V of each step's next
    observation; None: there is no such field.
    """

    value: str
    next_value: str | None
    calls_value_fn: bool


def usable_steps(lanes: LaneEpisodes, bootstrap: Bootstrap) -> Ints:
    """Return, for each episode, how many of its first steps rollouts may hold.

    Only the last step of a lane may be left out. It is left out if its bootstrap value may still arrive. It is also
    left out if the lane ends in a cut and the store has no bootstrap value for the step. A lane ends in a cut, for
    example, if its writer closed.
    """
    key, episodes = lanes
    end, steps = episodes.end, episodes.steps
    if bootstrap.next_value is not None and not bootstrap.calls_value_fn:
        return steps
    has_next = np.append(key[1:] == key[:-1], False)
    continued = np.append(end[1:] & CONTINUES != 0, False) & has_next
    still_open = (end & OPEN != 0) & ~has_next
    if not bootstrap.calls_value_fn:
        # Only the step after a cut shows whether the episode was cut for its length, and only this step gives the
        # bootstrap value. If no step follows a cut, the last step before the cut is left out.
        given: Ints = steps - (still_open | ((end & CUT != 0) & ~has_next))
        return given
    known = (end & (TERMINATED | OBSERVATION_ONLY) != 0) | continued
    # Other steps of a lane are not left out. If such a step has no bootstrap value, the reader raises an error.
    known |= ((end & TRUNCATED != 0) & (end & CUT == 0)) | ((end & CUT != 0) & has_next)
    if bootstrap.next_value is not None:
        known |= ~still_open
    # In an open episode, `obs_rows` is `steps` + 1 if the newest step came with its next observation.
    return np.where(still_open, np.maximum(episodes.obs_rows - 1, 0), steps - ~known)


class Grid(NamedTuple):
    """Steps to draw next: `ids`, (num_steps, columns), and `keys`, the key of each column's lane (see `LaneMap`).

    `short` has the keys of the lanes with an open writer and too few steps. `counts` has the number of steps of each of
    these lanes.
    """

    ids: Ints
    keys: Ints
    short: Ints
    counts: Ints


def unseen_steps(lanes: LaneEpisodes, usable: Ints, positions: Positions, least: Ints) -> IdRuns:
    """Return the first `usable` steps of each episode, without ids that were drawn before or are below `least`."""
    runs = IdRuns(lanes.episodes.first, lanes.episodes.stride, usable)
    return without_hidden(runs, np.maximum(positions.of(lanes.key), least))


def oldest(lanes: LaneEpisodes, usable: Ints, growing: Ints, positions: Positions, least: Ints, num_steps: int) -> Grid:
    """Return the oldest `num_steps` undrawn steps of each lane that has enough undrawn steps.

    `usable` has the number of steps of each episode that may be drawn (see `usable_steps`). `least` has the smallest
    visible id in the lane and segment of each episode. `growing` has the keys of the lanes whose writers are open.
    """
    first, stride, count = unseen_steps(lanes, usable, positions, least)
    begin = np.flatnonzero(np.append(True, lanes.key[1:] != lanes.key[:-1])[: len(lanes.key)])
    keys, ends = lanes.key[begin], np.cumsum(count)
    before = ends[begin] - count[begin]
    total = np.diff(np.append(before, ends[-1:]))
    full = total >= num_steps
    lane = np.repeat(np.arange(len(keys)), np.diff(np.append(begin, len(count))))
    taken = np.where(full[lane], np.clip(num_steps - (ends - count - before[lane]), 0, count), 0)
    ids = np.empty((num_steps, np.count_nonzero(full)), np.int64)
    get_kernel("fill_grid")(np.stack([first, stride, taken]), ids)
    has = _values_of(growing, keys, total)
    short = has < num_steps
    return Grid(ids, keys[full], growing[short], has[short])


class _SnapshotLanes(NamedTuple):
    """The lanes of a rank's share (see `RolloutCursor`) in one snapshot.

    `lanes` has the keys (see `LaneMap`) of these lanes. `growing` has the keys of the lanes whose writers are open.
    `by_lane` has the episodes of the lanes, sorted by lane, then id.
    """

    snapshot: Snapshot
    by_lane: LaneEpisodes
    lanes: Ints
    growing: Ints


class RolloutCursor(Owned):
    """Draws each lane's steps once, oldest first.

    A cursor belongs to one sampler, which calls the cursor under the sampler's lock. Steps count as planned once they
    are drawn, and as seen once their draw is passed to `delivered`. After `rewind`, steps that were planned and not
    seen are drawn again. The share of a rank is the lanes with (writer + lane) % world_size == rank: a lane stays in
    its share when other writers come and go.

    Each draw takes `num_steps` steps of every lane that has enough steps. `episode_filter` admits episodes; None admits
    all.
    """

    sized = False
    gives_once = True
    keeps_share = True

    def __init__(self, num_steps: int, bootstrap: Bootstrap, episode_filter: EpisodeFilter | None = None) -> None:
        self._bootstrap = bootstrap
        self._filter = episode_filter or EpisodeFilter()
        self.least = num_steps
        self.key = json.dumps([num_steps, bootstrap.value, bootstrap.next_value])
        self._share = EVERY_ID
        self._lanes = LaneMap()
        self._planned = self._seen = Positions()
        # The keys of lanes that had too few steps in the last draw, and for which RefreshNeeded was already raised.
        self._ended_lanes = _NO_LANES
        self._forget()

    def __repr__(self) -> str:
        return "each step once"

    def _forget(self) -> None:
        self._current: _SnapshotLanes | None = None
        self._read = 0  # the number of episodes of `snapshot.log` that were read so far
        self._ended = LaneEpisodes(np.zeros(0, np.int64), EpisodeTable.concatenate([]))

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw the next `num_steps` steps of each lane in the rank's share, (num_steps * columns,), row by row.

        A column has the steps of one lane. `size` and `rng` are ignored. Raises NotEnoughData, and changes nothing, if
        a lane of an open writer has too few steps, or if no lane has enough steps. Raises RefreshNeeded if a lane seems
        to have ended: its writer may have begun the next segment just after this snapshot was made.
        """
        current, grid = self._next(self._follow(population))
        left = np.setdiff1d(current.lanes, grid.keys, assume_unique=True)
        if not np.isin(left, self._ended_lanes).all():
            self._ended_lanes = left
            raise RefreshNeeded
        if not grid.ids.size:
            self._ended_lanes = _NO_LANES
            raise NotEnoughData(
                f"the store has {len(current.snapshot)} steps, and no lane has {self.least} that were not given yet; "
                f"{self.least} are needed, append more"
            )
        self._ended_lanes = left
        self._planned = self._planned.advanced(grid.keys, grid.ids[-1] + 1)
        return Draw(grid.ids.ravel())

    def drawable(self, population: Population) -> Ints:
        """Return the undrawn ids of the rank's share, including ids of lanes with too few steps."""
        lanes = self._follow(population).by_lane
        least = population.followed.least_ids(lanes.episodes.first)
        runs = unseen_steps(lanes, usable_steps(lanes, self._bootstrap), self._planned, least)
        return np.concatenate([_NO_LANES, *id_blocks(runs)])

    def delivered(self, draw: Draw) -> None:
        self._seen = self._advanced(self._seen, draw.ids)

    def rewind(self) -> bool:
        self._planned = self._seen
        return True

    def redraw(self, lost: Draw, population: Population, size: int, rng: np.random.Generator) -> Draw:
        return self.draw(population, size, rng)

    def accept(self, population: Population, draw: Draw) -> bool:
        if len(draw.ids) % self.least or not population.followed.holds(draw.ids).all():
            return False
        self._lanes.update(population.followed)
        self._planned = self._advanced(self._planned, draw.ids)
        return True

    def _advanced(self, positions: Positions, ids: Ints) -> Positions:
        last = ids.reshape(self.least, -1)[-1]
        keys = self._lanes.key[self._lanes.places(last)]
        known = keys >= 0
        return positions.advanced(keys[known], last[known] + 1)

    def state_dict(self) -> dict[str, Ints]:
        """Return the keys of lanes as `lanes`, and each lane's smallest unseen id as `next_ids`; both are (lanes,)."""
        return {"lanes": self._seen.keys.copy(), "next_ids": self._seen.after.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with state_of("rollouts"):
            keys, after = columns(state, ("lanes", "next_ids"))
            if (np.diff(keys) <= 0).any():
                raise ValueError("lanes must be in order")
        self._planned = self._seen = Positions(keys, after)
        self._forget()

    def _follow(self, population: Population) -> _SnapshotLanes:
        if population.share != self._share:
            self._share = population.share
            self._forget()
        if self._current is None or population.followed is not self._current.snapshot:
            self._current = self._lanes_of(population.followed)
        return self._current

    def _next(self, current: _SnapshotLanes) -> tuple[_SnapshotLanes, Grid]:
        """Remove dead writers' lanes from `growing`; return the new `current`, and the grid of steps to draw."""
        grid = self._oldest_grid(current)
        if len(grid.short):
            dead = [w for w in np.unique(grid.short >> LANE_BITS).tolist() if is_abandoned(current.snapshot, w)]
            current = current._replace(growing=current.growing[~np.isin(current.growing >> LANE_BITS, dead)])
            grid = self._oldest_grid(current)
        if len(grid.short):
            slowest = int(grid.counts.argmin())
            writer, lane = writer_and_lane(int(grid.short[slowest]))
            raise NotEnoughData(
                f"lane {lane} of writer {writer} has {grid.counts[slowest]} steps that were not given yet; "
                f"{self.least} are needed of each lane, append more or close that writer. (The newest step counts "
                "once its bootstrap value is known.)"
            )
        return current, grid

    def _oldest_grid(self, current: _SnapshotLanes) -> Grid:
        usable = usable_steps(current.by_lane, self._bootstrap)
        visible = current.snapshot.least_ids(current.by_lane.episodes.first)
        return oldest(current.by_lane, usable, current.growing, self._planned, visible, self.least)

    def _lanes_of(self, snapshot: Snapshot) -> _SnapshotLanes:
        if self._current is not None and snapshot.generation != self._current.snapshot.generation:
            self._forget()
        self._lanes.update(snapshot)
        ended = snapshot.log.select(slice(self._read, None)).without_discarded()
        new = self._episodes_of_share(self._filter.admit(snapshot, ended))
        still_open = self._episodes_of_share(self._filter.admit(snapshot, snapshot.open))
        every = self._ended.with_others(new)
        last = every.episodes.first + (every.episodes.steps - 1) * every.episodes.stride
        self._ended = every.select(last >= np.maximum(self._seen.of(every.key), snapshot.least_ids(last)))
        self._read = len(snapshot.log)
        episodes, before = self._ended.with_others(still_open).in_order(), self._current
        if before is not None and before.snapshot.segments is snapshot.segments:  # the same lanes, of the same writers
            return before._replace(snapshot=snapshot, by_lane=episodes)
        lanes, growing = (keys[self._is_in_share(keys)] for keys in (self._lanes.keys, self._lanes.growing(snapshot)))
        return _SnapshotLanes(snapshot, episodes, lanes, growing)

    def _episodes_of_share(self, episodes: EpisodeTable) -> LaneEpisodes:
        key = self._lanes.key[self._lanes.places(episodes.first)]
        return LaneEpisodes(key, episodes).select((key >= 0) & self._is_in_share(key))

    def _is_in_share(self, keys: Ints) -> NDArray[np.bool_]:
        writer, lane = writer_and_lane(keys)
        rank, world_size = self._share
        mine: NDArray[np.bool_] = (writer + lane) % world_size == rank
        return mine
