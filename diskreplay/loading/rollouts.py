"""Which steps a sampler of rollouts gives next, which it gave, and how values are computed with torch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.errors import NotEnoughData
from diskreplay.ids import EpisodeTable
from diskreplay.sampling.admission import Admission
from diskreplay.store.lanes import LANE_BITS, LaneMap, is_abandoned, writer_and_lane
from diskreplay.store.snapshot import SegmentGone
from diskreplay.views.lane_steps import Grid, LaneEpisodes, Positions, oldest, usable_steps
from diskreplay.views.rollouts import Rollouts

Ints = NDArray[np.int64]

# Each failed attempt means that a segment was evicted in the few microseconds since a refresh.
ATTEMPTS = 100


class _Look(NamedTuple):
    """What is known of one snapshot; `lanes` are all of this trainer's, `growing` those that may get more."""

    snapshot: Any
    episodes: LaneEpisodes
    lanes: Ints
    growing: Ints


class RolloutCursor:
    """Gives each lane's steps once, oldest first. Not thread-safe: one sampler, under its lock.

    Steps are planned by `plan`, and seen when their batch is `delivered`; after `rewind`, what was planned and not
    delivered is planned again.

    Parameters
    ----------
    view : Rollouts
        How many steps, and what they are bootstrapped with.
    store : Store
        Where they are.
    admission : Admission or None
        Which episodes count; None is all.
    rank, world_size : int
        This trainer's share: the lanes for which writer + lane, modulo `world_size`, is `rank`. That does not change
        when writers come and go.
    """

    def __init__(
        self, view: Rollouts, store: Any, admission: Admission | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        self.view, self._store = view, store
        self._admission = admission or Admission()
        self._rank, self._world_size = rank, world_size
        self._lanes = LaneMap()
        self._planned = self._seen = Positions()
        self._left: Ints = np.zeros(0, np.int64)
        self._forget()

    def _forget(self) -> None:
        self._look: _Look | None = None
        self._read = 0  # episodes of the log that are in
        self._ended = LaneEpisodes(*(np.zeros(0, np.int64) for _ in LaneEpisodes._fields))

    def plan(self, refresh: bool) -> tuple[Any, Ints]:
        """Return a snapshot and the ids of the next batch, (num_steps * columns,), one row of steps after the other.

        Raises
        ------
        NotEnoughData
            A lane of a writer that is not closed has too few steps, or no lane has enough; nothing changed.
        """
        if refresh:
            self._store.refresh()
        look, grid = self._next()
        left = np.setdiff1d(look.lanes, grid.keys, assume_unique=True)
        if refresh and not np.isin(left, self._left).all():
            # A writer that closed a segment may have begun the next just after this look began.
            self._store.refresh()
            look, grid = self._next()
            left = np.setdiff1d(look.lanes, grid.keys, assume_unique=True)
        if not grid.ids.size:
            steps = self.view.num_steps
            raise NotEnoughData(
                f"the store has {len(look.snapshot)} steps, and no lane has {steps} that were not given yet; "
                f"{steps} are needed, append more"
            )
        self._left = left
        self._planned = self._planned.advanced(grid.keys, grid.ids[-1] + 1)
        return look.snapshot, grid.ids.ravel()

    def delivered(self, ids: Ints) -> None:
        """Count the steps of a planned batch as seen."""
        self._seen = self._advanced(self._seen, ids)

    def plan_again(self, snapshot: Any, ids: Ints) -> bool:
        """Count a batch as planned that was planned when a state was saved; tell whether its steps are still there."""
        if len(ids) % self.view.num_steps or not snapshot.holds(ids).all():
            return False
        self._lanes.update(snapshot)
        self._planned = self._advanced(self._planned, ids)
        return True

    def _advanced(self, positions: Positions, ids: Ints) -> Positions:
        last = ids.reshape(self.view.num_steps, -1)[-1]
        keys = self._lanes.key[self._lanes.places(last)]
        known = keys >= 0
        return positions.advanced(keys[known], last[known] + 1)

    def rewind(self) -> None:
        """Plan again what was planned and not delivered."""
        self._planned = self._seen

    def state_dict(self) -> dict[str, Ints]:
        """Return how far each lane was delivered: `lanes` and the lowest id of each that was not, (lanes,) int64."""
        return {"lanes": self._seen.keys.copy(), "next_ids": self._seen.after.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; what was planned is forgotten."""
        keys, after = (np.asarray(state[name], np.int64) for name in ("lanes", "next_ids"))
        if keys.ndim != 1 or keys.shape != after.shape or (np.diff(keys) <= 0).any():
            raise ValueError("this is no state of rollouts: lanes must be in order, with one of next_ids each")
        self._planned = self._seen = Positions(keys, after)
        self._forget()

    def _next(self) -> tuple[_Look, Grid]:
        """Look at the store's snapshot and take the oldest steps; a writer that died counts as closed."""
        look = self._looked()
        grid = self._take(look)
        if len(grid.short):
            dead = [w for w in np.unique(grid.short >> LANE_BITS).tolist() if is_abandoned(look.snapshot, w)]
            look = look._replace(growing=look.growing[~np.isin(look.growing >> LANE_BITS, dead)])
            grid = self._take(look)
        if len(grid.short):
            slowest = int(grid.counts.argmin())
            writer, lane = writer_and_lane(int(grid.short[slowest]))
            raise NotEnoughData(
                f"lane {lane} of writer {writer} has {grid.counts[slowest]} steps that were not given yet; "
                f"{self.view.num_steps} are needed of each lane, append more or close that writer. (The newest step "
                "counts when it is known what it is bootstrapped with.)"
            )
        return look, grid

    def _take(self, look: _Look) -> Grid:
        usable = usable_steps(look.episodes, self.view)
        least, num_steps = look.snapshot.least_ids(look.episodes.first), self.view.num_steps
        return oldest(look.episodes, usable, look.growing, self._planned, least, num_steps)

    def _looked(self) -> _Look:
        for _ in range(ATTEMPTS):
            snapshot = self._store.snapshot
            try:
                if self._look is None or snapshot is not self._look.snapshot:
                    self._look = self._look_at(snapshot)
                return self._look
            except SegmentGone:  # `where` read an episode
                self._store.refresh()
        raise SegmentGone(f"segments were evicted faster than their episodes could be read, {ATTEMPTS} times")

    def _look_at(self, snapshot: Any) -> _Look:
        if self._look is not None and snapshot.generation != self._look.snapshot.generation:
            self._admission.keep_only(snapshot.log.first)
            self._forget()
        self._lanes.update(snapshot)
        # The predicate of `where` may raise: ask it before anything changes.
        new = self._mine(self._admission.admit(snapshot, snapshot.log.select(slice(self._read, None))))
        still_open = self._mine(self._admission.admit(snapshot, snapshot.open))
        ended = self._ended.with_others(new)
        last = ended.first + (ended.steps - 1) * ended.stride
        self._ended = ended.select(last >= np.maximum(self._seen.of(ended.key), snapshot.least_ids(last)))
        self._read = len(snapshot.log)
        lanes = np.unique(self._lanes.key[self._lanes.key >= 0])
        lanes, growing = (keys[self._is_mine(keys)] for keys in (lanes, self._lanes.growing(snapshot)))
        return _Look(snapshot, self._ended.with_others(still_open), lanes, growing)

    def _mine(self, episodes: EpisodeTable) -> LaneEpisodes:
        key = self._lanes.key[self._lanes.places(episodes.first)]
        found = LaneEpisodes.of(key, episodes)
        return found.select((key >= 0) & self._is_mine(key))

    def _is_mine(self, keys: Ints) -> NDArray[np.bool_]:
        writer, lane = writer_and_lane(keys)
        mine: NDArray[np.bool_] = (writer + lane) % self._world_size == self._rank
        return mine


def torch_values(value_fn: Callable[[Any], Any], device: torch.device) -> Callable[[Any], NDArray[Any]]:
    """Return the function over arrays that calls one over tensors on a device, without gradients."""

    def evaluate(observations: Any) -> NDArray[Any]:
        with torch.no_grad():
            values = value_fn(_tensors(observations, device))
        if isinstance(values, torch.Tensor):
            values = values.to("cpu", torch.float64).numpy()
        return np.asarray(values)

    return evaluate


def _tensors(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, dict):
        return {name: _tensors(below, device) for name, below in tree.items()}
    return torch.from_numpy(tree).to(device)
