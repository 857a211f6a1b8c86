"""Which ids make the next batches: drawn in the order of the batches, some of them ahead."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.base import Distribution, Draw, RefreshNeeded
from diskreplay.distributions.population import EVERY_ID, Population, Share
from diskreplay.distributions.prioritized import Prioritized, sequence_error
from diskreplay.distributions.restricted import AtMost, Bounded, Indices, TimesSampled
from diskreplay.distributions.saved_state import state_of
from diskreplay.distributions.snapshot import EpisodeFilter
from diskreplay.errors import NotEnoughData, SegmentGone
from diskreplay.reading.episodes import Episode
from diskreplay.reading.snapshot import Snapshot
from diskreplay.sampling.item_errors import ItemErrors
from diskreplay.sampling.sampler_states import PlannerState, SavedPlan, Told
from diskreplay.store.store import Store
from diskreplay.views.base import View

Ints = NDArray[np.int64]

_NONE: Ints = np.zeros(0, np.int64)

# Each failed attempt means that a segment was evicted in the few microseconds since a refresh.
ATTEMPTS = 100


@dataclass(slots=True, eq=False)
class Plan:
    """A batch that is drawn and not yet delivered. It keeps its snapshot, and with it what is mapped, alive.

    `asked` is the size that it was drawn for; `entropy` seeds what the view or a transform draws, None where they draw
    nothing; `told` are the fields of the batch that say how it was drawn; `prepared` is what transforms knew of the
    store at the draw; `gathered` is the batch, or what will be it, where that was begun: see `Prefetcher`.
    """

    snapshot: Snapshot
    draw: Draw
    asked: int
    entropy: int | None = None
    told: Told | None = None
    prepared: Any = None
    gathered: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return what it was drawn as."""
        state = {**self.draw._asdict(), "asked": self.asked, "entropy": self.entropy, **(self.told or {})}
        return state if self.prepared is None else {**state, "prepared": self.prepared}


class Planner:
    """Draws batches from a store. Not thread-safe: one sampler, under its lock.

    `distribution` is what the sampler was given, `active` what draws: the view's own, where it has one; `queue` holds
    the plans that are drawn ahead. `tells` names the fields of batches that say how they were drawn.
    """

    _view: View
    _random: bool
    _errors: ItemErrors
    population: Population
    active: Distribution

    def __init__(
        self,
        store: Store,
        view: View,
        distribution: Distribution,
        *,
        seed: Any,
        where: Callable[[Episode], bool] | None,
        share: Share = EVERY_ID,
        max_times_sampled: int | None = None,
        max_size: int | None = None,
        remover: str = "oldest",
        tells: Sequence[str] = (),
        random: bool = False,
    ) -> None:
        self._store = store
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self._where: Callable[[Snapshot, int], bool] | None = None
        if where is not None:
            self._where = lambda snapshot, first_id: where(Episode(snapshot, snapshot.find(first_id)))
        self._share, self.tells, self._transforms_random = share, tells, random
        self.queue: deque[Plan] = deque()
        # Not delivered, by the size asked for, which is another than of those drawn ahead.
        self._apart: dict[int, Plan] = {}
        self._returned = _NONE  # what was drawn, not delivered and does not come again by itself
        self._priorities: Prioritized | None = None
        self._times = None if max_times_sampled is None else TimesSampled(max_times_sampled)
        self._bounded: Bounded | None = None
        self._indices: Indices | None = None
        if max_size is not None:
            self._indices = Indices(max_size, remover, int(self.rng.integers(1 << 62)))
        self._check_times(view, distribution)
        self._own: Distribution | None = None  # the view's
        self._cursors: dict[str, Any] = {}  # states of own distributions of views that were set before, by their keys
        vars(self).update(self._follow(view))
        self.distribution = self._claim(distribution)
        vars(self).update(self._choose(self.distribution, self._own, self.population))

    def set_target(self, view: View, distribution: Distribution) -> None:
        """Draw from now on with this view and distribution; what was drawn ahead is dropped.

        An interrupt leaves all as it was, or all changed; it may be repeated.
        """
        self._check_times(view, distribution)
        claimed = self._claim(distribution)
        plans, before, population = [*self.queue, *self._apart.values()], self.active, self.population
        goes_on = distribution is self.distribution and view.kind == self._view.kind
        returned = self._once(plan.draw for plan in plans) if goes_on else _NONE
        follows = {} if view is self._view else self._follow(view)
        active = self._choose(claimed, follows.get("_own", self._own), follows.get("population", population))
        target = {**follows, "distribution": claimed, **active}
        target |= {"queue": deque[Plan](), "_apart": dict[int, Plan](), "_returned": returned}
        vars(self).update(target)  # one operation, in the middle of which no interrupt comes
        before.rewind()
        for plan in plans:
            before.forget(population, plan.draw)

    def _once(self, draws: Iterable[Draw]) -> Ints:
        """Return what has to be drawn again of these and of what was returned before, where it comes but once."""
        once = self.active.gives_once and self._own is None
        return np.concatenate([self._returned, *(draw.ids for draw in draws)]) if once else _NONE

    def _check_times(self, view: View, distribution: Distribution) -> None:
        """Refuse a view or distribution that the sampler's arguments do not fit."""
        if "probability" in self.tells and not distribution.tells_chances:
            raise ValueError(f"fields names 'probability', and {distribution} does not tell the chances of its ids")
        own = view.own_distribution(EpisodeFilter())
        limits = [("max_times_sampled", self._times), ("max_size", self._indices)]
        given = [name for name, limit in limits if limit is not None]
        if given and (own or distribution).gives_once:
            raise ValueError(
                f"{given[0]} means nothing to {distribution if own is None else view}, which gives each id a "
                "number of times of its own: leave it out"
            )
        if self._indices is not None and self._indices.remover == "lowest_priority" and not distribution.weighted:
            raise ValueError(f'remover="lowest_priority" needs priorities, and {distribution} has none')
        if self._indices is not None and not distribution.tells_chances:
            raise ValueError(f"max_size needs the chances of ids, and {distribution} does not tell them")

    def _choose(self, distribution: Distribution, own: Distribution | None, population: Population) -> dict[str, Any]:
        """Return what draws from a population, as attributes: a view's own distribution, or else the sampler's."""
        if own is not None:
            return {"active": own}
        active, kind, found = distribution, population.kind, dict[str, Distribution]()
        if self._indices is not None:
            active = found["_bounded"] = Bounded(active, self._indices.of(kind))
        return {**found, "active": active if self._times is None else AtMost(active, self._times, kind)}

    def _follow(self, view: View) -> dict[str, Any]:
        """Return the attributes that belong to a view which is drawn from now on."""
        episode_filter = EpisodeFilter(self._where)
        cursors = self._cursors if self._own is None else {**self._cursors, self._own.key: self._own.state_dict()}
        own, errors = _own_distribution(view, episode_filter, cursors), ItemErrors(view, self._store.schema)
        population = Population(view, episode_filter, self._share, errors.initial)
        random = view.random or self._transforms_random
        found = {"_view": view, "_own": own, "_cursors": cursors, "_random": random}
        return {**found, "_errors": errors, "population": population}

    def _claim(self, distribution: Distribution) -> Distribution:
        """Claim a distribution; a new `Prioritized` goes on with the priorities of the one before."""
        known = [leaf for leaf in self._store.schema.leaves if leaf.startswith("episode/")]
        if unknown := set(distribution.episode_fields).difference(known):
            names = ", ".join(known) or "none"
            raise ValueError(f"{distribution} reads {min(unknown)!r}, and the store's episode fields are: {names}")
        distribution.claim(self)
        if isinstance(distribution, Prioritized):
            before = self._priorities
            if before is not None and before is not distribution and distribution.is_new:
                distribution.load_state_dict(before.state_dict())
            self._priorities = distribution
        return distribution

    def next(self, sizes: Sequence[int], refresh: bool) -> Plan:
        """Return the plan of a batch of the first of these sizes, after drawing those of the others ahead.

        It stays the first in the queue until it is `delivered`, or dropped.
        """
        if self.queue and self.queue[0].asked != sizes[0]:
            self.set_target(self._view, self.distribution)
        while len(self.queue) < len(sizes):
            try:
                plan = self._draw_kept(sizes[len(self.queue)], refresh, self._keep)
            except NotEnoughData:
                if not self.queue:
                    raise
                break  # there may be enough when its turn comes
            if self.queue[-1] is not plan:
                break
        return self.queue[0]

    def _keep(self, plan: Plan) -> None:
        """Put a plan behind the others, unless it is the end and there are others."""
        if len(plan.draw.ids) or not self.queue:
            self.queue.append(plan)

    def _draw_kept(self, size: int, refresh: bool, keep: Callable[[Plan], None], lost: Draw | None = None) -> Plan:
        """Draw a batch and keep its plan; an interrupt before it is kept leaves the distribution as it was."""
        active, plan, returned = self.active, None, self._returned
        place = active.place() if active.gives_once else None
        try:
            plan = self.draw(size, refresh, lost)
            keep(plan)
            return plan
        except Exception:
            raise  # nothing was drawn
        except BaseException:
            if active.gives_once and not any(kept is plan for kept in (*self.queue, *self._apart.values())):
                if not self.rewind():
                    active.go_back(place)
                self._returned = returned
            raise

    def draw(self, size: int, refresh: bool, lost: Draw | None = None) -> Plan:
        """Draw one batch from the store's snapshot; in place of one that has `lost` ids, if that is given."""
        snapshot = self._store.newest_snapshot() if refresh else self._store.snapshot
        population, active = self.population, self.active
        if snapshot is not population.snapshot:
            try:
                population.refresh(snapshot)
            except SegmentGone:  # `where` read an episode
                snapshot = self._refresh_population()
        if not population.size:
            needed = "1 is" if active.least == 1 else f"{active.least} are"
            raise NotEnoughData(
                f"the store has {len(snapshot)} steps, 0 of them sampleable as {self._view}; {needed} needed"
            )
        returned = self._returned
        if len(returned) and lost is None:
            returned = returned[population.contains(returned)]
            lost, returned = Draw(returned[:size]), returned[size:]
        try:
            if lost is not None:
                draw = active.redraw(lost, population, size, self.rng)
            elif self._share.world_size == 1:
                draw = active.draw(population, size, self.rng)
            else:
                draw = active.draw_share(population, size, self.rng)
        except RefreshNeeded:
            return self.draw(size, refresh, lost)
        except SegmentGone:  # the distribution read times or values of steps
            return self.draw(size, True, lost)
        self._returned = returned
        entropy = int(self.rng.integers(1 << 62)) if self._random else None
        return Plan(snapshot, draw, size, entropy, self.tell(draw.ids) if self.tells else None)

    def tell(self, ids: Ints) -> Told:
        """Return the fields that say how these ids are drawn."""
        told = Told()
        if "probability" in self.tells:
            told["probability"] = self.active.share_chances(self.population, ids)
        if "population" in self.tells:
            told["population"] = np.full(len(ids), self.drawable())
        if "priority_sum" in self.tells:
            told["priority_sum"] = np.full(len(ids), self.active.priority_sum(self.population))
        return told

    def tell_now(self, ids: Ints, snapshot: Snapshot) -> Told:
        """Return the fields that say how these ids are drawn from a snapshot, 0 of those that cannot be."""
        self.population.refresh(snapshot)
        told = self.tell(ids)
        if "probability" in told:
            told["probability"] *= self._share.contains(ids)
        return told

    def drawable(self) -> int:
        """Return N, how many ids there were to be drawn when it was last looked."""
        if self.population.snapshot is None:
            return 0
        left = (self._own or self._bounded or self.distribution).left(self.population)
        return self.population.share_size() if left is None else len(left)

    def priority_sum(self) -> float:
        """Return the sum of their priorities."""
        return math.nan if self.population.snapshot is None else self.active.priority_sum(self.population)

    def batches_left(self, size: int, refresh: bool) -> int | None:
        """Return how many batches of this size `next` has until the end, None where there is none."""
        if not self.active.ends:
            return None
        self._follow_store(refresh)
        returned = int(np.count_nonzero(self.population.contains(self._returned)))
        return len(self.queue) + -(-(returned + self.active.count_left(self.population)) // size)

    def draw_apart(self, size: int, refresh: bool) -> Plan:
        """Draw one batch of another size than those that are drawn ahead, or return the one that was not delivered."""
        if size not in self._apart:
            self._draw_kept(size, refresh, lambda plan: self._apart.update({size: plan}))
        return self._apart[size]

    def draw_again(self, plan: Plan, size: int) -> Plan:
        """Draw a batch in place of one of which segments are gone."""
        self.rewind()
        return self._draw_kept(size, True, lambda again: self._replace(plan, again), plan.draw)

    def delivered(self, plan: Plan) -> None:
        """Take note that a batch is delivered; after an interrupt, it is once more, or is the next one again."""
        if self.active.gives_once:
            self.active.delivered(plan.draw)
        if self.queue and self.queue[0] is plan:
            self.queue.popleft()
        else:
            self._replace(plan, None)

    def drop(self, plan: Plan) -> None:
        """Give up a batch that was drawn."""
        if not self.rewind():
            self._replace(plan, None)
            self.active.forget(self.population, plan.draw)

    def _replace(self, plan: Plan, other: Plan | None) -> None:
        """Have another plan, or none, in place of one that was not delivered, by one operation."""
        if self.queue and self.queue[0] is plan:
            if other is None:
                self.queue.popleft()
            else:
                self.queue[0] = other
        for size, apart in self._apart.items():
            if apart is plan:
                if other is None:
                    del self._apart[size]
                else:
                    self._apart[size] = other
                break

    def rewind(self) -> bool:
        """Have all that was not delivered drawn again, where draws depend on each other; tell whether they do."""
        if not self.active.rewind():
            return False
        self.queue.clear()
        self._apart.clear()
        return True

    def count(self, refresh: bool) -> int:
        """Return how many ids can be drawn."""
        self._follow_store(refresh)
        left = self.active.left(self.population)
        return self.population.share_size() if left is None else len(left)

    def ids(self, refresh: bool) -> Ints:
        """Return the ids that can be drawn, in the order in which their steps were published."""
        for _ in range(ATTEMPTS):
            snapshot = self._follow_store(refresh)
            left = self.active.left(self.population)
            ids = np.concatenate([np.zeros(0, np.int64), *self.population.ids()]) if left is None else left
            try:
                return ids[np.lexsort((ids, snapshot.times(ids)))]
            except SegmentGone:
                refresh = True
        raise SegmentGone(f"segments were evicted faster than their times could be read, {ATTEMPTS} times")

    def _follow_store(self, refresh: bool) -> Snapshot:
        """Bring the population up to the store's snapshot, a new one if that is wanted."""
        if refresh:
            self._store.refresh()
        return self._refresh_population()

    @property
    def _kind(self) -> str:
        """What tells views apart whose samplers cannot take over each other's states."""
        return json.dumps(self._view.kind) + (self._own.key if self._own is not None else "")

    def state_dict(self) -> dict[str, Any]:
        """Return what the batches after the last delivered one depend on, beside the store."""
        kept = None if self._priorities is self.distribution else self._priorities
        cursors = self._cursors if self._own is None else {**self._cursors, self._own.key: self._own.state_dict()}
        return {
            "rng": json.dumps(self.rng.bit_generator.state),
            "view": str(self._view),
            "kind": self._kind,
            "order": self.population.order().state_dict(),
            "distribution": type(self.distribution).__name__,
            "state": self.distribution.state_dict(),
            "priorities": None if kept is None else {"arguments": kept.arguments, "state": kept.state_dict()},
            "cursors": cursors,
            "times": None if self._times is None else self.active.state_dict(),
            "indices": None if self._indices is None else self._indices.state_dict(),
            "returned": self._returned,
            "plans": [plan.state_dict() for plan in self.queue],
            "refused": [plan.state_dict() for plan in self._apart.values()],
        }

    def loaded(self, state: Mapping[str, Any], refresh: bool) -> "Planner":
        """Return one that goes on from a state. This one is as before, but for the distribution, which is both's.

        ValueError where it is no state, or that of another distribution or kind of id.
        """
        saved = PlannerState.read(state)
        if (saved.distribution, saved.kind) != (type(self.distribution).__name__, self._kind):
            raise ValueError(
                f"this is the state of {saved.distribution} over {saved.view}, and the sampler's are "
                f"{self.distribution} over {self._view}: give it the former first"
            )
        if refresh:
            self._store.refresh()
        episode_filter = EpisodeFilter(self._where)
        own = _own_distribution(self._view, episode_filter, saved.cursors)
        population = Population(self._view, episode_filter, self._share, self._errors.initial)
        population.restore(saved.order)
        times = None if self._times is None else TimesSampled.loaded(self._times.most, saved.times)
        indices = None if self._indices is None else self._indices.loaded(saved.indices)
        snapshot = self._refresh_population(population)
        with state_of(str(self.distribution)):
            self.distribution.load_state_dict(saved.state)
        if saved.priorities is not None:
            saved.priorities.claim(self)
        new = copy(self)
        new._priorities = self.distribution if isinstance(self.distribution, Prioritized) else saved.priorities
        new.rng = np.random.Generator(saved.generator)
        new._own, new._cursors, new._times, new._indices = own, saved.cursors, times, indices
        new.population = population
        vars(new).update(new._choose(self.distribution, own, population))
        new._returned = saved.returned
        new.queue = new._accepted(saved.plans, snapshot)
        refused = [plan for saved_plan in saved.refused for plan in new._accepted([saved_plan], snapshot)]
        new._apart = {plan.asked: plan for plan in refused}
        return new

    def _accepted(self, plans: Sequence[SavedPlan], snapshot: Snapshot) -> deque[Plan]:
        """Return batches drawn ahead, up to the first that has lost an id since; what is left of others is returned."""
        queue = deque[Plan]()
        for plan in plans:
            if (plan.entropy is None) == self._random or not self.active.accept(self.population, plan.draw):
                self._returned = self._once(other.draw for other in plans[len(queue) :])
                break
            # What was not asked for when it was drawn is told as of now.
            told = self.tell(plan.draw.ids) | plan.told if self.tells else None
            queue.append(Plan(snapshot, plan.draw, plan.asked, plan.entropy, told, plan.prepared))
        return queue

    def update(self, ids: Ints, errors: NDArray[np.float64], kind: tuple[Any, ...] | None) -> int:
        """Set priorities from errors, (n,), or (n, length) of sequences; return how many ids were skipped.

        All of them, where they are of another `kind` than the population's; None is the population's.
        """
        priorities = self.distribution
        if not priorities.weighted and self._priorities is not None:
            priorities = self._priorities
        if kind is not None and kind != self.population.kind and priorities.weighted:
            return len(ids)
        if self.population.version == 0:
            self._refresh_population()
        if errors.ndim == 2:
            ids, errors, skipped = self._of_sequences(ids, errors, priorities.eta)
            return skipped + priorities.update(self.population, ids, errors)
        return priorities.update(self.population, ids, errors)

    def _of_sequences(
        self, ids: Ints, errors: NDArray[np.float64], eta: float
    ) -> tuple[Ints, NDArray[np.float64], int]:
        """Return the ids that can be drawn, one error each, and how many cannot."""
        for _ in range(ATTEMPTS):
            known = self.population.contains(ids)
            try:
                mask = self._loss_mask(ids[known], errors.shape[1])
                break
            except SegmentGone:
                self._store.refresh()
                self._refresh_population()
        else:
            raise SegmentGone(f"segments were evicted faster than they could be read, {ATTEMPTS} times")
        return ids[known], sequence_error(errors[known], mask, eta), int((~known).sum())

    def _loss_mask(self, ids: Ints, length: int) -> NDArray[np.bool_]:
        """Return which steps of these sequences count for the loss, (n, length)."""
        mask = np.zeros((len(ids), length), bool)
        if not len(ids):
            return mask
        found = self._errors.loss_mask(cast(Snapshot, self.population.followed), ids)
        if found is None:
            raise ValueError(f"td_error must have one axis, (batch,) or (batch, 1): {self._view} has no sequences")
        if found.shape[1] > length:
            raise ValueError(f"td_error has {length} steps a sequence, and these have {found.shape[1]}")
        mask[:, : found.shape[1]] = found
        return mask

    def _refresh_population(self, population: Population | None = None) -> Snapshot:
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


def _own_distribution(view: View, episode_filter: EpisodeFilter, cursors: Mapping[str, Any]) -> Distribution | None:
    """Return a view's own distribution, where it was if it was used before; None where the view has none."""
    own = view.own_distribution(episode_filter)
    if own is not None and own.key in cursors:
        own.load_state_dict(cursors[own.key])
    return own
