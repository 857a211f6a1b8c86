"""Which ids make the next batches: drawn in the order of the batches, some of them ahead."""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import NotEnoughData
from diskreplay.loading.rollouts import RolloutCursor
from diskreplay.loading.states import PlannerState, load_distribution
from diskreplay.sampling.admission import Admission
from diskreplay.sampling.base import Distribution, Draw
from diskreplay.sampling.population import Population
from diskreplay.sampling.prioritized import Prioritized, sequence_error
from diskreplay.sampling.share import draw_share
from diskreplay.sampling.sweep import Sweep
from diskreplay.store.episodes import Episode
from diskreplay.store.snapshot import SegmentGone
from diskreplay.views.base import Block, View, offsets
from diskreplay.views.rollouts import Rollouts

Ints = NDArray[np.int64]

# Each failed attempt means that a segment was evicted in the few microseconds since a refresh.
ATTEMPTS = 100


@dataclass(slots=True, eq=False)
class Plan:
    """A batch that is drawn and not yet delivered. It keeps its snapshot, and with it what is mapped, alive.

    `entropy` seeds what the view draws itself, None where it draws nothing; `gathered` is the batch, or what will be
    it, where that was begun: see `Prefetcher`.
    """

    snapshot: Any
    draw: Draw
    entropy: int | None = None
    gathered: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return what it was drawn as."""
        return {**self.draw._asdict(), "entropy": self.entropy}


class Planner:
    """Draws batches from a store. Not thread-safe: one sampler, under its lock."""

    def __init__(
        self,
        store: Any,
        view: View,
        distribution: Distribution,
        *,
        seed: Any,
        where: Callable[[Any], bool] | None,
        rank: int,
        world_size: int,
    ) -> None:
        self._store = store
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self._where = None if where is None else _asking(where)
        self._rank, self._world_size = rank, world_size
        self.queue: deque[Plan] = deque()
        self._refused: dict[int, Plan] = {}  # by the size asked for, which is another than of those drawn ahead
        self._priorities: Prioritized | None = None
        self._cursors: dict[str, RolloutCursor] = {}
        self._saved_cursors: dict[str, Any] = {}  # of views that were not set since
        self._follow(view)
        self.distribution = self._own(distribution)

    def aim(self, view: View, distribution: Distribution) -> None:
        """Draw from now on with this view and distribution; what was drawn ahead is dropped."""
        owned = self._own(distribution)
        if view is not self._view:
            self._follow(view)
        self.distribution = owned
        self.queue.clear()
        self._refused.clear()
        self.failed()

    def _follow(self, view: View) -> None:
        self._view = view
        self._relabels = getattr(view, "relabel", None) is not None
        self.population = Population(view, Admission(self._where))
        self.cursor: RolloutCursor | None = None
        if isinstance(view, Rollouts):
            # One a view: what one has given, another may give again.
            key = _cursor_key(view)
            if key not in self._cursors:
                self._cursors[key] = self._new_cursor(view, self._saved_cursors)
            self.cursor = self._cursors[key]

    def _new_cursor(self, view: Any, saved: Mapping[str, Any]) -> Any:
        """Return a cursor for a view of rollouts, where it was saved if it was; None for other views."""
        if not isinstance(view, Rollouts):
            return None
        cursor = RolloutCursor(view, self._store, Admission(self._where), self._rank, self._world_size)
        if (key := _cursor_key(view)) in saved:
            cursor.load_state_dict(saved[key])
        return cursor

    def _own(self, distribution: Distribution) -> Distribution:
        """Claim a distribution that has state; a new `Prioritized` goes on with the priorities of the one before."""
        claim = getattr(distribution, "claim", None)
        if claim is not None:
            claim(self)
        if isinstance(distribution, Prioritized):
            before = self._priorities
            if before is not None and before is not distribution and distribution.is_new:
                distribution.load_state_dict(before.state_dict())
            self._priorities = distribution
        return distribution

    def next(self, size: int, ahead: int, refresh: bool) -> Plan:
        """Return the next batch's plan, after drawing so many that `ahead` are left."""
        if not ahead and not self.queue:
            return self.draw(size, refresh)
        while len(self.queue) <= ahead:
            try:
                plan = self.draw(size, refresh)
            except NotEnoughData:
                if not self.queue:
                    raise
                break  # there may be enough when its turn comes
            if not len(plan.draw.ids) and self.queue:
                break
            self.queue.append(plan)
        return self.queue.popleft()

    def draw(self, size: int, refresh: bool) -> Plan:
        """Draw one batch from the store's snapshot."""
        if self.cursor is not None:
            snapshot, ids = self.cursor.plan(refresh)
            return Plan(snapshot, Draw(ids))
        snapshot = self._follow_store(refresh)
        if not self.population.size:
            raise NotEnoughData(
                f"the store has {len(snapshot)} steps, 0 of them sampleable as {self._view}; 1 is needed"
            )
        if self._world_size == 1:
            draw = self.distribution.draw(self.population, size, self.rng)
        else:
            draw = draw_share(self.distribution, self.population, size, self.rng, self._rank, self._world_size)
        return Plan(snapshot, draw, int(self.rng.integers(1 << 62)) if self._relabels else None)

    def _follow_store(self, refresh: bool) -> Any:
        """Return the store's snapshot, after bringing the population up to it."""
        if refresh:
            self._store.refresh()
        snapshot = self._store.snapshot
        return snapshot if snapshot is self.population.snapshot else self._look()

    def draw_apart(self, size: int, refresh: bool) -> Plan:
        """Draw one batch of another size than those that are drawn ahead, or return the one that was refused."""
        return self._refused.pop(size, None) or self.draw(size, refresh)

    def draw_again(self, plan: Plan, size: int) -> Plan:
        """Draw a batch in place of one of which segments are gone; what is left of one of a `Sweep` stays in it."""
        self.failed()
        if self.cursor is not None or not isinstance(self.distribution, Sweep):
            return self.draw(size, refresh=True)
        snapshot = self._follow_store(refresh=True)
        left = plan.draw.ids[self.population.contains(plan.draw.ids)]
        if not len(left):
            return self.draw(size, refresh=False)
        missing = size - len(left)
        more = draw_share(self.distribution, self.population, missing, self.rng, self._rank, self._world_size)
        return Plan(snapshot, more._replace(ids=np.concatenate([left, more.ids])), plan.entropy)

    def refused(self, plan: Plan, apart: int | None) -> None:
        """Take back a plan that was not delivered yet: it is the next one of its size.

        `apart` is the size that `draw_apart` was asked for, which may be more than it has ids; None: it is of `next`.
        """
        if self.cursor is not None:
            self.failed()
        elif apart is not None:
            self._refused[apart] = plan
        else:
            self.queue.appendleft(plan)

    def failed(self) -> None:
        """Let steps that are given once be planned again: a batch could not be made of them."""
        if self.cursor is not None:
            self.queue.clear()
            self.cursor.rewind()

    def state_dict(self) -> dict[str, Any]:
        """Return what the batches after the last delivered one depend on, beside the store."""
        kept = None if self._priorities is self.distribution else self._priorities
        cursors = {key: cursor.state_dict() for key, cursor in self._cursors.items()}
        return {
            "rng": json.dumps(self.rng.bit_generator.state),
            "view": str(self._view),
            "kind": _kind(self._view),
            "order": self.population.order().state_dict(),
            "distribution": type(self.distribution).__name__,
            "state": self.distribution.state_dict() if hasattr(self.distribution, "state_dict") else None,
            "priorities": None if kept is None else {"arguments": kept.arguments, "state": kept.state_dict()},
            "cursors": self._saved_cursors | cursors,
            "plans": [plan.state_dict() for plan in self.queue],
            "refused": [{"asked": asked, **plan.state_dict()} for asked, plan in self._refused.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any], refresh: bool) -> None:
        """Go on from a state; nothing is changed if it raises.

        Raises
        ------
        ValueError
            It is no state, or that of another distribution or kind of id.
        """
        saved = PlannerState.read(state)
        if (saved.distribution, saved.kind) != (type(self.distribution).__name__, _kind(self._view)):
            raise ValueError(
                f"this is the state of {saved.distribution} over {saved.view}, and the sampler's are "
                f"{self.distribution} over {self._view}: give it the former first"
            )
        if refresh:
            self._store.refresh()
        cursor = self._new_cursor(self._view, saved.cursors)
        population = Population(self._view, Admission(self._where))
        population.restore(saved.order)
        queue = self._plan_again(saved.plans, population, cursor)
        refused = {asked: self._plan_again([plan], population, None) for asked, plan in saved.refused.items()}
        load_distribution(self.distribution, saved.state)
        # Nothing below raises.
        self._priorities = self.distribution if isinstance(self.distribution, Prioritized) else saved.priorities
        if saved.priorities is not None:
            saved.priorities.claim(self)
        self.rng = np.random.Generator(saved.generator)
        self._saved_cursors, self._cursors, self.cursor = saved.cursors, {}, cursor
        if cursor is not None:
            self._cursors[_cursor_key(cursor.view)] = cursor
        self.population, self.queue = population, queue
        self._refused = {asked: plans[0] for asked, plans in refused.items() if plans}

    def _plan_again(
        self, plans: Sequence[tuple[Draw, int | None]], population: Population, cursor: RolloutCursor | None
    ) -> deque[Plan]:
        """Return batches drawn ahead, up to the first that has lost an id since."""
        snapshot, queue = self._look(population), deque[Plan]()
        for draw, entropy in plans:
            if cursor is not None:
                if not cursor.plan_again(snapshot, draw.ids):
                    break
            elif not population.contains(draw.ids).all() or (entropy is None) == self._relabels:
                break
            queue.append(Plan(snapshot, draw, entropy))
        return queue

    def update(self, ids: Ints, errors: NDArray[np.float64], schema: Any) -> int:
        """Set priorities from errors, (n,), or (n, length) of sequences; return how many ids were skipped."""
        priorities: Any = self.distribution if self._updates() else self._priorities
        if priorities is None:
            raise ValueError(f"{self.distribution} has no priorities to update: draw with Prioritized(...)")
        if self.population.version == 0:
            self._look()
        if errors.ndim == 2:
            ids, errors, skipped = self._of_sequences(ids, errors, schema, priorities.eta)
            return skipped + int(priorities.update(self.population, ids, errors))
        return int(priorities.update(self.population, ids, errors))

    def _updates(self) -> bool:
        return self.distribution.weighted and hasattr(self.distribution, "update")

    def _of_sequences(
        self, ids: Ints, errors: NDArray[np.float64], schema: Any, eta: float
    ) -> tuple[Ints, NDArray[np.float64], int]:
        """Return the ids that can be drawn, one error each, and how many cannot."""
        for _ in range(ATTEMPTS):
            known = self.population.contains(ids)
            try:
                mask = self._loss_mask(ids[known], errors.shape[1], schema)
                break
            except SegmentGone:
                self._store.refresh()
                self._look()
        else:
            raise SegmentGone(f"segments were evicted faster than they could be read, {ATTEMPTS} times")
        return ids[known], sequence_error(errors[known], mask, eta), int((~known).sum())

    def _loss_mask(self, ids: Ints, length: int, schema: Any) -> NDArray[np.bool_]:
        """Return which steps of these sequences count for the loss, (n, length)."""
        mask = np.zeros((len(ids), length), bool)
        if not len(ids):
            return mask
        snapshot = self.population.snapshot
        try:
            reader = self._view.reader(schema, ("loss_mask",))
        except ValueError:
            raise ValueError(
                f"td_error must have one axis, (batch,) or (batch, 1): {self._view} has no sequences"
            ) from None
        leaves_for = getattr(reader, "leaves_for", None)
        leaves = reader.leaves if leaves_for is None else leaves_for(snapshot, ids)
        block = Block(leaves, len(ids), np.empty(offsets(leaves, len(ids))[1], np.uint8))
        reader.fill(snapshot, ids, block)
        found = block.arrays[[leaf.path for leaf in leaves].index(("loss_mask",))]
        if found.shape[1] > length:
            raise ValueError(f"td_error has {length} steps a sequence, and these have {found.shape[1]}")
        mask[:, : found.shape[1]] = found
        return mask

    def _look(self, population: Population | None = None) -> Any:
        """Bring the population, or another one, up to the store's snapshot."""
        population = self.population if population is None else population
        for _ in range(ATTEMPTS):
            snapshot = self._store.snapshot
            try:
                population.refresh(snapshot)
                return snapshot
            except SegmentGone:  # `where` read an episode
                self._store.refresh()
        raise SegmentGone(f"segments were evicted faster than their episodes could be read, {ATTEMPTS} times")


def _kind(view: View) -> str:
    """Return what tells views apart whose samplers cannot take over each other's states."""
    return json.dumps(view.kind) + (_cursor_key(view) if isinstance(view, Rollouts) else "")


def _cursor_key(view: Rollouts) -> str:
    """Return what tells views of rollouts apart that give different steps."""
    return json.dumps([view.num_steps, view.value, view.next_value])


def _asking(where: Callable[[Any], bool]) -> Callable[[Any, int], bool]:
    """Turn a predicate over episodes into one over snapshots and the ids at which episodes begin."""

    def ask(snapshot: Any, first_id: int) -> bool:
        return bool(where(Episode(snapshot, snapshot.find(first_id))))

    return ask
