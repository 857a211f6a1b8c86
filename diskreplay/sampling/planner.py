"""Plans of the next batches. The ids of a batch may be drawn ahead of its delivery."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.base import Distribution, Draw, RefreshNeeded
from diskreplay.distributions.population import EVERY_ID, Population, Share
from diskreplay.distributions.prioritized import Prioritized, sequence_error
from diskreplay.distributions.restricted import AtMost, Bounded, Indices, TimesSampled
from diskreplay.distributions.saved_state import state_of
from diskreplay.distributions.snapshot import EpisodeFilter
from diskreplay.errors import NotEnoughData, SegmentGone
from diskreplay.ids import Ints
from diskreplay.reading.episodes import Episode
from diskreplay.reading.snapshot import Snapshot
from diskreplay.sampling.gatherer import ItemErrors
from diskreplay.sampling.sampler_states import DrawInfo, PlannerState, SavedPlan
from diskreplay.store.store import Store
from diskreplay.views.base import View

_NONE: Ints = np.zeros(0, np.int64)

# The number of attempts to read from a snapshot. An attempt fails if a segment is evicted in the few microseconds
# between a refresh and the read.
ATTEMPTS = 100


@dataclass(slots=True, eq=False)
class Plan:
    """A batch that is drawn and not yet delivered. A plan keeps its snapshot and the snapshot's mapped chunks alive.

    `asked` is the requested batch size. `entropy` seeds the random numbers of the view and the transforms; None: no
    random numbers are needed. `prepared` has the statistics of the transforms from the time of the draw. `gathered` is
    the job that makes the batch ahead (see `Prefetcher`), or None.
    """

    snapshot: Snapshot
    draw: Draw
    asked: int
    entropy: int | None = None
    draw_info: DrawInfo | None = None
    prepared: Any = None
    gathered: Any = None

    def state_dict(self) -> dict[str, Any]:
        state = {**asdict(self.draw), "asked": self.asked, "entropy": self.entropy, **(self.draw_info or {})}
        return state if self.prepared is None else {**state, "prepared": self.prepared}


class Limits(NamedTuple):
    times: TimesSampled | None
    indices: Indices | None

    def check(self, view: View, distribution: Distribution) -> None:
        own = view.own_distribution(EpisodeFilter())
        given = [name for name, limit in zip(("max_times_sampled", "max_size"), self, strict=True) if limit is not None]
        if given and (own or distribution).gives_once:
            raise ValueError(
                f"{given[0]} does not apply to {distribution if own is None else view}, which sets the number of times "
                "for each id itself: leave it out"
            )
        if self.indices is not None and self.indices.remover == "lowest_priority" and not distribution.weighted:
            raise ValueError(f'remover="lowest_priority" needs priorities, and {distribution} has none')
        if self.indices is not None and not distribution.tells_chances:
            raise ValueError(f"max_size needs the probabilities of ids, and {distribution} does not give them")

    def bounded(self, distribution: Distribution, kind: tuple[Any, ...]) -> Distribution:
        """Return `distribution`, restricted to the ids that `max_size` keeps, if there is this limit."""
        return distribution if self.indices is None else Bounded(distribution, self.indices.of(kind))

    def loaded(self, saved: PlannerState) -> "Limits":
        return Limits(
            None if self.times is None else TimesSampled.loaded(self.times.most, saved.times),
            None if self.indices is None else self.indices.loaded(saved.indices),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A view, the population of its ids, and the distribution that draws these ids.

    `distribution` is the sampler's argument. `own` replaces `distribution` if the view has its own distribution, else
    it is None. `bounded` is the distribution in use, with the limit `max_size`. `active` also has the limit
    `max_times_sampled`. `errors` reads the loss masks and initial |td| of items. `random` is True if batches depend on
    random numbers in addition to their ids.
    """

    view: View
    distribution: Distribution
    own: Distribution | None
    population: Population
    errors: ItemErrors
    random: bool
    limits: Limits
    bounded: Distribution = field(init=False)
    active: Distribution = field(init=False)

    def __post_init__(self) -> None:
        times, kind = self.limits.times, self.population.kind
        bounded = active = self.limits.bounded(self.distribution, kind) if self.own is None else self.own
        if times is not None and self.own is None:
            active = AtMost(bounded, times, kind)
        object.__setattr__(self, "bounded", bounded)
        object.__setattr__(self, "active", active)

    @property
    def kind(self) -> str:
        """The kind of the ids, as a text in saved states. A sampler refuses a state if the texts differ."""
        return json.dumps(self.view.kind) + (self.own.key if self.own is not None else "")

    def ids(self) -> Ints:
        limited = self.active.drawable(self.population)
        return np.concatenate([_NONE, *self.population.ids()]) if limited is None else limited

    def count(self) -> int:
        return self._count_of(self.active)

    def drawable(self) -> int:
        """Return the number of ids that `max_size` allows, at the last refresh; 0 before the first refresh."""
        return 0 if self.population.snapshot is None else self._count_of(self.bounded)

    def _count_of(self, distribution: Distribution) -> int:
        limited = distribution.drawable(self.population)
        return self.population.share_size() if limited is None else len(limited)

    def priority_sum(self) -> float:
        return math.nan if self.population.snapshot is None else self.active.priority_sum(self.population)

    def draw_info_of(self, names: Sequence[str], ids: Ints) -> DrawInfo:
        draw_info = DrawInfo()
        if "probability" in names:
            draw_info["probability"] = self.active.share_chances(self.population, ids)
        if "population" in names:
            draw_info["population"] = np.full(len(ids), self.drawable())
        if "priority_sum" in names:
            draw_info["priority_sum"] = np.full(len(ids), self.active.priority_sum(self.population))
        return draw_info


def check_draw_fields(names: Sequence[str], distribution: Distribution) -> None:
    if "probability" in names and not distribution.tells_chances:
        raise ValueError(f"fields names 'probability', and {distribution} does not give the probabilities of its ids")


class Planner:
    """Draws batches from a store. Not thread-safe: a sampler calls it under its lock.

    `draw_fields` names the fields of batches that describe the draw, such as "probability".
    """

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
        draw_fields: Sequence[str] = (),
        random: bool = False,
    ) -> None:
        self._store = store
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self._where: Callable[[Snapshot, int], bool] | None = None
        if where is not None:
            self._where = lambda snapshot, first_id: where(Episode(snapshot, snapshot.find(first_id)))
        self._share, self.draw_fields, self._transforms_random = share, draw_fields, random
        self.queue: deque[Plan] = deque()
        # Undelivered plans that `draw_other_size` drew, by the size of their batches.
        self._other_sizes: dict[int, Plan] = {}
        self._returned = _NONE  # ids of dropped plans, to be drawn again; see `_once`
        self._priorities: Prioritized | None = None
        limits = Limits(
            None if max_times_sampled is None else TimesSampled(max_times_sampled),
            None if max_size is None else Indices(max_size, remover, int(self.rng.integers(1 << 62))),
        )
        self._check_target(view, distribution, limits)
        self._cursors: dict[str, Any] = {}  # states of distributions that earlier views made, by key
        self.target = self._target_of(view, self._claim(distribution), {}, limits)

    def set_target(self, view: View, distribution: Distribution) -> None:
        """Use this view and this distribution from now on, and drop the batches that were drawn ahead.

        After an interrupt, either nothing has changed, or everything has changed. It is safe to repeat the call.
        """
        before, cursors = self.target, self._cursors
        self._check_target(view, distribution, before.limits)
        claimed = self._claim(distribution)
        plans = [*self.queue, *self._other_sizes.values()]
        is_same_kind = distribution is before.distribution and view.kind == before.view.kind
        returned = self._once(plan.draw for plan in plans) if is_same_kind else _NONE
        if view is before.view:
            target = replace(before, distribution=claimed)
        else:
            cursors = self._every_cursor()
            target = self._target_of(view, claimed, cursors, before.limits)
        state = {"target": target, "_cursors": cursors, "_returned": returned}
        # All attributes change in a single operation, which no interrupt can divide.
        vars(self).update({**state, "queue": deque[Plan](), "_other_sizes": dict[int, Plan]()})
        before.active.rewind()
        for plan in plans:
            before.active.forget(before.population, plan.draw)

    def _once(self, draws: Iterable[Draw]) -> Ints:
        """Return the ids to draw again, with the ids of the dropped `draws`.

        The result is empty if the distribution does not use up drawn ids (`gives_once`), or if the view made it.
        """
        once = self.target.active.gives_once and self.target.own is None
        return np.concatenate([self._returned, *(draw.ids for draw in draws)]) if once else _NONE

    def _check_target(self, view: View, distribution: Distribution, limits: Limits) -> None:
        check_draw_fields(self.draw_fields, distribution)
        limits.check(view, distribution)

    def _every_cursor(self) -> dict[str, Any]:
        """Return the states of the distributions that this view and earlier views made, by `Distribution.key`."""
        own = self.target.own
        return self._cursors if own is None else {**self._cursors, own.key: own.state_dict()}

    def _target_of(self, view: View, distribution: Distribution, cursors: Mapping[str, Any], limits: Limits) -> Target:
        episode_filter = EpisodeFilter(self._where)
        own, errors = view.own_distribution(episode_filter), ItemErrors(view, self._store.schema)
        if own is not None and own.key in cursors:
            own.load_state_dict(cursors[own.key])
        population = Population(view, episode_filter, self._share, errors.initial)
        return Target(view, distribution, own, population, errors, view.random or self._transforms_random, limits)

    def _claim(self, distribution: Distribution) -> Distribution:
        """Become the owner of a distribution; a new `Prioritized` gets the priorities of the previous `Prioritized`."""
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
        """Draw batches of these sizes ahead, and return the plan of the first batch.

        This plan stays the first plan in the queue until it is passed to `delivered` or `drop`.
        """
        if self.queue and self.queue[0].asked != sizes[0]:
            self.set_target(self.target.view, self.target.distribution)
        queue = self.queue
        if not queue:
            self._draw_kept(sizes[0], refresh)
        while len(queue) < len(sizes):
            try:
                plan = self._draw_kept(sizes[len(queue)], refresh)
            except NotEnoughData:
                break  # enough steps may arrive before this batch is needed
            if queue[-1] is not plan:
                break
        return queue[0]

    def _draw_kept(self, size: int, refresh: bool, is_other_size: bool = False, instead: Plan | None = None) -> Plan:
        """Draw a batch, keep its plan, and return the plan.

        The plan replaces the plan `instead`, if given. If `is_other_size` is True, the plan is kept in `_other_sizes`,
        else in the queue. A distribution that has ended gives an empty draw. The plan of an empty draw is queued only
        if the queue is empty. After an interrupt, the distribution is as before the call, unless the plan is kept.
        """
        active, plan = self.target.active, None
        before = (active.place(), self._returned) if active.gives_once else None
        try:
            plan = self.draw(size, refresh, None if instead is None else instead.draw)
            if instead is not None:
                self._replace(instead, plan)
            elif is_other_size:
                self._other_sizes[size] = plan
            elif not self.queue or len(plan.draw.ids):
                self.queue.append(plan)
            return plan
        except BaseException as error:
            kept = *self.queue, *self._other_sizes.values()
            # An Exception comes before the draw, so there is nothing to undo.
            if not isinstance(error, Exception) and before is not None and not any(one is plan for one in kept):
                if not self.rewind():
                    active.go_back(before[0])
                self._returned = before[1]
            raise

    def draw(self, size: int, refresh: bool, lost: Draw | None = None) -> Plan:
        """Draw a batch from the store's snapshot, in place of the draw `lost`, if given. Return the batch's plan."""
        snapshot = self._store.newest_snapshot() if refresh else self._store.snapshot
        target = self.target
        population, active = target.population, target.active
        if snapshot is not population.snapshot:
            try:
                population.refresh(snapshot)
            except SegmentGone:  # from the user's `where`, which reads episodes
                snapshot = self._refresh_population()
        if not population.size:
            needed = "1 is" if active.least == 1 else f"{active.least} are"
            raise NotEnoughData(
                f"the store has {len(snapshot)} steps, 0 of them sampleable as {target.view}; {needed} needed"
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
        except SegmentGone:  # from the distribution, which reads times or values of steps
            return self.draw(size, True, lost)
        self._returned = returned
        entropy = int(self.rng.integers(1 << 62)) if target.random else None
        draw_info = target.draw_info_of(self.draw_fields, draw.ids) if self.draw_fields else None
        return Plan(snapshot, draw, size, entropy, draw_info)

    def current_draw_info(self, names: Sequence[str], ids: Ints, snapshot: Snapshot) -> DrawInfo:
        """Return the fields of a draw of `ids` at present, by name. Ids that cannot be drawn have probability 0."""
        self.target.population.refresh(snapshot)
        draw_info = self.target.draw_info_of(names, ids)
        if "probability" in draw_info:
            draw_info["probability"] *= self._share.contains(ids)
        return draw_info

    def batches_left(self, size: int, refresh: bool) -> int | None:
        active, population = self.target.active, self.target.population
        if not active.ends:
            return None
        self._follow_store(refresh)
        returned = int(np.count_nonzero(population.contains(self._returned)))
        return len(self.queue) + -(-(returned + active.count_left(population)) // size)

    def draw_other_size(self, size: int, refresh: bool) -> Plan:
        if size not in self._other_sizes:
            self._draw_kept(size, refresh, is_other_size=True)
        return self._other_sizes[size]

    def draw_again(self, plan: Plan) -> Plan:
        self.rewind()
        return self._draw_kept(plan.asked, True, instead=plan)

    def delivered(self, plan: Plan) -> None:
        """Record that the batch of a plan is delivered.

        Repeat the call after an interrupt: otherwise the batch may be delivered twice.
        """
        active = self.target.active
        if active.gives_once:
            active.delivered(plan.draw)
        if self.queue and self.queue[0] is plan:
            self.queue.popleft()  # faster than `_replace`
        else:
            self._replace(plan, None)

    def drop(self, plan: Plan) -> None:
        """Drop an undelivered plan, or all undelivered plans if each draw depends on earlier draws; see `rewind`."""
        if not self.rewind():
            self._replace(plan, None)
            self.target.active.forget(self.target.population, plan.draw)

    def _replace(self, plan: Plan, other: Plan | None) -> None:
        """Replace an undelivered plan by `other`, or remove the plan, in a single operation."""
        if self.queue and self.queue[0] is plan:
            if other is None:
                self.queue.popleft()
            else:
                self.queue[0] = other
        for size, kept in self._other_sizes.items():
            if kept is plan:
                if other is None:
                    del self._other_sizes[size]
                else:
                    self._other_sizes[size] = other
                break

    def rewind(self) -> bool:
        """Drop all undelivered plans if each draw depends on earlier draws. The dropped ids are drawn again.

        Return whether each draw depends on earlier draws.
        """
        if not self.target.active.rewind():
            return False
        self.queue.clear()
        self._other_sizes.clear()
        return True

    def count(self, refresh: bool) -> int:
        self._follow_store(refresh)
        return self.target.count()

    def ids(self, refresh: bool) -> Ints:
        for _ in range(ATTEMPTS):
            snapshot = self._follow_store(refresh)
            ids = self.target.ids()
            try:
                return ids[np.lexsort((ids, snapshot.times(ids)))]
            except SegmentGone:
                refresh = True
        raise SegmentGone(f"segments were evicted faster than their times could be read, {ATTEMPTS} times")

    def _follow_store(self, refresh: bool) -> Snapshot:
        if refresh:
            self._store.refresh()
        return self._refresh_population()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last delivered batch. This state and the store determine the next batches."""
        target = self.target
        distribution, (times, indices) = target.distribution, target.limits
        kept = None if self._priorities is distribution else self._priorities
        return {
            "rng": json.dumps(self.rng.bit_generator.state),
            "view": str(target.view),
            "kind": target.kind,
            "order": target.population.order().state_dict(),
            "distribution": type(distribution).__name__,
            "state": distribution.state_dict(),
            "priorities": None if kept is None else {"arguments": kept.arguments, "state": kept.state_dict()},
            "cursors": self._every_cursor(),
            "times": None if times is None else target.active.state_dict(),
            "indices": None if indices is None else indices.state_dict(),
            "returned": self._returned,
            "plans": [plan.state_dict() for plan in self.queue],
            "refused": [plan.state_dict() for plan in self._other_sizes.values()],
        }

    def loaded(self, state: Mapping[str, Any], refresh: bool) -> "Planner":
        """Return a planner that continues from a state. Raises ValueError if `state` does not fit this planner.

        The two planners share the distribution, which the load changes. Nothing else of this planner changes.
        """
        saved, view, distribution = PlannerState.read(state), self.target.view, self.target.distribution
        if (saved.distribution, saved.kind) != (type(distribution).__name__, self.target.kind):
            raise ValueError(
                f"this is the state of {saved.distribution} over {saved.view}, and the sampler has "
                f"{distribution} over {view}: set that distribution and view first"
            )
        if refresh:
            self._store.refresh()
        new = copy(self)
        new.target = self._target_of(view, distribution, saved.cursors, self.target.limits.loaded(saved))
        new.target.population.restore(saved.order)
        snapshot = new._refresh_population()
        with state_of(str(distribution)):
            distribution.load_state_dict(saved.state)
        if saved.priorities is not None:
            saved.priorities.claim(self)
        new._priorities = distribution if isinstance(distribution, Prioritized) else saved.priorities
        new.rng = np.random.Generator(saved.generator)
        new._cursors, new._returned = saved.cursors, saved.returned
        new.queue = new._accepted(saved.plans, snapshot)
        refused = [plan for saved_plan in saved.refused for plan in new._accepted([saved_plan], snapshot)]
        new._other_sizes = {plan.asked: plan for plan in refused}
        return new

    def _accepted(self, plans: Sequence[SavedPlan], snapshot: Snapshot) -> deque[Plan]:
        """Return the saved plans before the first plan that lost an id.

        The ids of all other plans may be drawn again; see `_once`.
        """
        queue, target = deque[Plan](), self.target
        for plan in plans:
            if (plan.entropy is None) == target.random or not target.active.accept(target.population, plan.draw):
                self._returned = self._once(other.draw for other in plans[len(queue) :])
                break
            # A field that the saved plan lacks gets its current value.
            info = target.draw_info_of(self.draw_fields, plan.draw.ids) | plan.draw_info if self.draw_fields else None
            queue.append(Plan(snapshot, plan.draw, plan.asked, plan.entropy, info, plan.prepared))
        return queue

    def update(self, ids: Ints, errors: NDArray[np.float64], kind: tuple[Any, ...] | None) -> int:
        """Set priorities from errors, (n,), or (n, length) for sequences; return the number of skipped ids.

        All ids are skipped if `kind` differs from the population's kind. If `kind` is None, it is not checked.
        """
        priorities, population = self.target.distribution, self.target.population
        if not priorities.weighted and self._priorities is not None:
            priorities = self._priorities
        if kind is not None and kind != population.kind and priorities.weighted:
            return len(ids)
        if population.version == 0:
            self._refresh_population()
        if errors.ndim == 2:
            ids, errors, skipped = self._of_sequences(ids, errors, priorities.eta)
            return skipped + priorities.update(population, ids, errors)
        return priorities.update(population, ids, errors)

    def _of_sequences(
        self, ids: Ints, errors: NDArray[np.float64], eta: float
    ) -> tuple[Ints, NDArray[np.float64], int]:
        """Return the ids that can be drawn, an error for each, and the number of ids that cannot be drawn."""
        population = self.target.population
        for _ in range(ATTEMPTS):
            known = population.contains(ids)
            try:
                followed = cast(Snapshot, population.followed)
                mask = self.target.errors.loss_mask(followed, ids[known], errors.shape[1])
                break
            except SegmentGone:
                self._store.refresh()
                self._refresh_population()
        else:
            raise SegmentGone(f"segments were evicted faster than they could be read, {ATTEMPTS} times")
        return ids[known], sequence_error(errors[known], mask, eta), int((~known).sum())

    def _refresh_population(self) -> Snapshot:
        for _ in range(ATTEMPTS):
            snapshot = self._store.snapshot
            try:
                self.target.population.refresh(snapshot)
                return snapshot
            except SegmentGone:  # from the user's `where`, which reads episodes
                self._store.refresh()
        raise SegmentGone(f"segments were evicted faster than their episodes could be read, {ATTEMPTS} times")
