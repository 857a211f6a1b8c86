"""The sampler: a store, a view and a distribution multiplied into batches."""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from diskreplay.device_tensors import fetched
from diskreplay.distributions.base import Distribution
from diskreplay.distributions.number_arguments import int_argument
from diskreplay.errors import Closed, NotEnoughData, RateLimited, ReplayError, SegmentGone
from diskreplay.kernels.table import of_sampler
from diskreplay.reading.episodes import Episode
from diskreplay.sampling.arguments import (
    check_meaning,
    device_argument,
    distribution_argument,
    drawing_arguments,
    errors_argument,
    ids_argument,
    kind_argument,
    store_argument,
    view_argument,
)
from diskreplay.sampling.batch import Batch, Kind, kind_of
from diskreplay.sampling.gatherer import Destination
from diskreplay.sampling.planner import ATTEMPTS, Plan, Planner
from diskreplay.sampling.prefetcher import Makers
from diskreplay.sampling.sampler_states import (
    VERSION as STATE_VERSION,
    Change,
    as_arrays,
    as_tensors,
    own_state,
    replace_attributes,
)
from diskreplay.sampling.transforms import (
    Rollback,
    TransformLike,
    load_transforms,
    transform_argument,
    transforms_state,
)
from diskreplay.store.store import Store
from diskreplay.views.base import View
from diskreplay.workers import fork_listeners
from diskreplay.writing.limiter import AttachedLimiter, RateLimiter

# One line says what is active: when a sampler is made, and when its view or distribution is set.
_logger = logging.getLogger("diskreplay")


class Statistics:
    """Counts of one sampler, which adds to them under its lock.

    ``batches`` and ``steps`` were delivered, by the run that is resumed too; ``planning`` and ``elsewhere`` are seconds
    in which batches were planned, and between the calls. The first batch was asked for at ``first``, the last one was
    delivered at ``last``: readings of one clock in seconds, 0 before. ``ids`` are of the last batch.
    """

    def __init__(self) -> None:
        self.planning = self.elsewhere = 0.0
        self.first = self.last = 0.0
        self.batches = self.steps = self._steps_before = 0
        self.ids: NDArray[np.int64] | None = None
        self._kept: Counter[str] = Counter()

    def add(self, ids: NDArray[np.int64], steps: int, started: float, planned: float) -> None:
        """Count a batch that is delivered now: its call began at `started`, and it was planned at `planned`."""
        if not self.first:
            self.first = self.last = started
        self.batches += 1
        self.steps += steps
        self.planning += planned - started
        self.elsewhere += started - self.last
        self.ids = ids
        self.last = perf_counter()

    def resumed(self, batches: int, steps: int) -> "Statistics":
        """Return statistics that count on from the counts of another run."""
        new = copy(self)
        new.batches, new.steps, new._steps_before, new.first, new.last = batches, steps, steps, 0.0, 0.0
        new.ids = None
        return new

    def last_ids(self) -> NDArray[np.int64]:
        """Return the ids of the last batch; NotEnoughData before there is one."""
        if self.ids is None:
            raise NotEnoughData("no batch was delivered yet: draw one first, or give ids")
        return self.ids

    def keep(self, seconds: Mapping[str, float]) -> None:
        """Add to what `report` is given later."""
        self._kept.update(seconds)

    def state_dict(self) -> dict[str, int]:
        """Return the counts that a resumed run starts from."""
        return {"batches": self.batches, "steps": self.steps}

    def report(self, stored_steps: int, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return all of it, and the `seconds` of where batches are made; see `Sampler.stats`."""
        elapsed = self.last - self.first
        return {
            "batches": self.batches,
            "steps": self.steps,
            "steps_per_second": (self.steps - self._steps_before) / elapsed if elapsed > 0 else 0.0,
            "replay_ratio": self.steps / stored_steps if stored_steps else 0.0,
            "seconds_planning": self.planning,
            "seconds_elsewhere": self.elsewhere,
            **{name: spent + self._kept[name] for name, spent in seconds.items()},
        }


class Payments:
    """What a sampler pays its `limiter`, if it has one: the steps that it draws, `steps` or more for a batch.

    ``paid`` steps were paid for by a call that failed: they count for the next batch. ValueError if a batch would wait
    for ever.
    """

    def __init__(self, limiter: RateLimiter | None, store: Store, steps: int) -> None:
        self.limiter: AttachedLimiter | None = None
        self.paid = 0
        if limiter is not None:
            limiter.check_batch(steps)
            self.limiter = limiter.attach(store)

    def pay(self, steps: int) -> None:
        """Wait until the limiter lets so many steps be drawn."""
        if self.limiter is not None and steps > self.paid:
            self.limiter.draw(steps - self.paid)
            self.paid = steps

    def pay_for(self, plan: Plan, steps: int, planner: Planner) -> None:
        """Pay for a batch that is drawn. One that is refused is the next one of its size, unless it never may be."""
        limiter, due = self.limiter, steps - self.paid
        try:
            self.pay(steps)
        except Exception as error:
            # Those very types: what a damaged store raises is a ValueError, too.
            is_refusal = type(error) in (RateLimited, ValueError) and planner.target.active.sized
            if is_refusal and limiter is not None and not limiter.limiter.fits(due):
                planner.drop(plan)
                raise type(error)(
                    f"{error}. The batch that was drawn, {len(plan.draw.ids)} items from id {plan.draw.ids[0]} on, "
                    "might wait for ever and is dropped: the next call draws another one"
                ) from error
            planner.rewind()
            raise


class Sampler(IterableDataset[Batch]):
    """Draws ids of a store with a distribution and gathers what a view says they mean.

    `for batch in sampler` calls `sample` until a `Sweep` ends, and for ever with other distributions. Where it ends,
    `len(sampler)` is the number of batches until then. `torch.utils.data.DataLoader(sampler, batch_size=None)` gives
    the same batches, in the process that made the sampler (``num_workers=0``).

    Any thread may call any method; calls of one sampler run one after the other. Several samplers may share a store. A
    sampler belongs to the process that made it: in a forked child it is a ReplayError, as both would draw the same.

    Parameters
    ----------
    store : Store or path
        Where the steps are. The sampler does not close a store that it was given; of a path it opens the store with
        mode "r", and closes it with itself.
    view : View
        What an id means, `Transitions(...)` for example.
    distribution : Distribution
        Which ids are drawn; None is `Uniform()`.
    batch_size : int
        Items of a batch.
    device : torch.device or str or None
        Where batches are delivered; None is the CPU.
    prefetch : int
        Batches made ahead by threads, which read from disk together, while the trainer computes. Batch i is drawn in
        the call that delivers batch i - prefetch: it holds what the store held then, and knows no priorities updated
        since. Batches of less than 256 KiB on the CPU, and rollouts, are made when they are asked for.
    seed : int or None
        Makes the draws a function of the seed and the calls; None is different each time.
    fields : sequence of str or None
        What a batch holds, beside index and weight: "obs" with all below it, "obs/image" alone. None is all but the
        following, and so is "..." beside some of these. Of each step: "time" (float64, seconds since the epoch at which
        it was published), "step" (its number in its episode), "return_to_go" (the sum of rewards from it on),
        "discounted_return_to_go" and "priority" (the initial one, NaN where none was given). Of each item: "age" (steps
        of the store that are newer), "episode/NAME" (a value of its episode; "episode_known" tells where it was given),
        "probability" (P(i) of the draw), "population" (N) and "priority_sum" (Σ p). See "Fields on request" in
        docs/concepts.md.
    where : callable or None
        A predicate over episodes; steps of others are not drawn. It is asked once of an ended episode, and of an open
        one at every refresh that changed something. Episodes are whole, so the answer for an ended one must depend on
        it alone: one that depends on its `hidden_steps` or on the time makes a resumed sampler draw other batches.
    rank, world_size : int
        This trainer's share of the ids, by a hash of each: shares are even, do not overlap and are complete, and an id
        stays in its share. Of `Rollouts`, lanes are shared.
    limiter : RateLimiter or None
        Makes `sample` wait while this trainer is too far ahead of the writers with the same limiter. It counts in the
        store, so that must be open with mode "a".
    refresh : bool
        Whether each batch looks for new steps first. If not, call `store.refresh()`.
    debug : bool
        Overwrite the memory of batches that are gone, so that a pointer kept without its tensor shows.
    max_times_sampled : int or None
        How often each id of a kind may be in batches of this sampler, as in Reverb; None: as often as it is drawn.
        Those that are left keep their probabilities in proportion to each other. Not for `Rollouts`, nor where a
        `Sweep` draws: these give each id a number of times of their own.
    max_size : int or None
        How many ids of a kind this sampler draws from at the most, of all ranks; None: all that there are. Ids that are
        removed for new ones are not drawn any more; the store keeps their steps. Not for `Rollouts`, nor where a
        `Sweep` draws.
    remover : {"oldest", "lowest_priority", "random"}
        Which id is removed for a new one, as in Reverb (Fifo, MinHeap, Uniform): the oldest by when steps were
        published; the one with the lowest priority, of equal ones the oldest; or one at random, so that every id that
        came has the same probability to be left: a reservoir (Vitter 1985, algorithm R). The latter two may remove the
        new one.
    transform : callable or sequence of callables, or None
        What is done to each batch before it is delivered, one after the other: `Normalize`, `RandomShift`, `ToFloat`,
        or functions of a batch that return a batch, or a dict of the fields that are new. They see all fields of the
        batch on its device, with weights of 1: those of the draw are multiplied in last. They run in the thread that
        makes the batch; on a CUDA device in the call that delivers it, on its stream. `gather` does without.

    Raises
    ------
    ValueError
        An argument is invalid, or the view or `fields` names something that the store has not.
    StoreNotFound
        There is no store at the path.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        view: View,
        distribution: Distribution | None = None,
        *,
        batch_size: int = 256,
        device: torch.device | str | None = None,
        prefetch: int = 0,
        seed: int | None = None,
        fields: Sequence[str] | None = None,
        where: Callable[[Episode], bool] | None = None,
        rank: int = 0,
        world_size: int = 1,
        limiter: RateLimiter | None = None,
        refresh: bool = True,
        debug: bool = False,
        max_times_sampled: int | None = None,
        max_size: int | None = None,
        remover: str = "oldest",
        transform: TransformLike | Sequence[TransformLike] | None = None,
    ) -> None:
        self._batch_size = int_argument("batch_size", batch_size)
        self._sizes: tuple[int, ...] = (self._batch_size,)  # of the next batches; those behind the first are made ahead
        self._prefetch = int_argument("prefetch", prefetch, 0)
        drawing = drawing_arguments(where, rank, world_size, max_times_sampled, max_size, remover)
        self._view, distribution = view_argument(view), distribution_argument(distribution)
        self._fields, self._transforms = fields, transform_argument(transform)
        self._refresh = bool(refresh)
        self._statistics = Statistics()
        self._closed = False
        self._change: Makers | None = None
        self._before: Rollback | None = None  # of a load that is not complete
        self._destination = Destination(device_argument(device), 2 + self._prefetch, debug)
        self._own_store = Store(store) if isinstance(store, str | os.PathLike) else None
        self._steps_when_closed: int | None = None
        # An empty store is false.
        self._store = store_argument(store) if self._own_store is None else self._own_store
        try:
            self._store.follow_compiled(of_sampler(distribution.weighted))
            _alive.add(self)
            self._lock: Any = threading.RLock()
            self._payments = Payments(limiter, self._store, self._batch_size * (view.item_steps or 1))
            for one in self._transforms:
                one.claim(self)
            self._set_makers(self._makers_of(view))
            self._planner = Planner(
                self._store,
                view,
                distribution,
                seed=seed,
                draw_fields=list(self._makers.gatherer.draw_fields),
                random=any(one.random for one in self._transforms),
                **drawing,
            )
        except BaseException:
            if self._own_store is not None:
                self._own_store.close()
            raise
        _logger.info("%s", self)

    def _makers_of(self, view: View) -> Makers:
        """Return what makes the batches of a view."""
        arguments = self._fields, self._destination, self._transforms, self._prefetch, self._sizes[0]
        return Makers(view, self._store.schema, *arguments)

    def _set_makers(self, makers: Makers) -> None:
        self._view, self._makers, self._statistics.ids = makers.view, makers, None
        self._sizes = self._sizes[:1] * makers.planned

    def _expect(self, size: int) -> None:
        """Make ready for batches of another size than the sampler's own, where batches are made ahead."""
        if self._prefetch:
            with self._lock:
                self._sizes = (size,)
                self.view = self._view

    def _sample_first(self, sizes: Sequence[int], beta: float | None) -> Batch:
        """Draw a batch of the first of these sizes; where batches are made ahead, those are next."""
        with self._lock:
            self._sizes = tuple(sizes[: self._makers.planned])
            return self.sample(sizes[0], beta)

    def __repr__(self) -> str:
        return f"{self._planner.target.active} over {self.view}"

    @property
    def store(self) -> Store:
        """The store that it draws from: the one given, or the one opened at a path."""
        return self._store

    @property
    def view(self) -> View:
        """What an id means. Setting it changes what the next batch holds; batches drawn ahead are drawn again."""
        return self._view if self._change is None else self._change.view

    @view.setter
    def view(self, view: View) -> None:
        makers = self._makers_of(view_argument(view))
        with self._lock:
            self._change = makers
            self._complete_change()

    def _complete_change(self) -> None:
        """Set the view that was given last, where an interrupt came before it was set.

        First take back a state that an interrupt kept from being loaded wholly.
        """
        self._go_back()
        if self._change is None:
            return
        makers = self._change
        try:
            self._planner.set_target(makers.view, self._planner.target.distribution)
        except Exception:
            self._change = None
            raise
        self._statistics.keep(self._makers.seconds())
        self._makers.close()
        self._set_makers(makers)
        self._change = None
        _logger.info("%s", self)

    @property
    def distribution(self) -> Distribution:
        """Which ids are drawn. Setting it counts from the next batch on; batches drawn ahead are drawn again.

        Priorities stay: those of a `Prioritized` that is set aside are kept up to date by `update_priorities`, and a
        new one goes on with them.
        """
        return self._planner.target.distribution

    @distribution.setter
    def distribution(self, distribution: Distribution) -> None:
        with self._lock:
            self._complete_change()
            self._planner.set_target(self._view, distribution_argument(distribution))
            _logger.info("%s", self)

    @property
    def sampleable(self) -> int:
        """How many ids can be drawn now: those that the view offers of this rank's share and the episodes of `where`.

        Without those that were sampled `max_times_sampled` times, or removed for `max_size`; of rollouts, the steps
        that were not given yet. It looks for new steps first, as `sample` does.
        """
        with self._lock:
            self._check_open()
            return self._planner.count(self._refresh)

    def ids(self) -> NDArray[np.int64]:
        """Return the ids that `sampleable` counts, oldest first by when they were published, (n,) int64."""
        with self._lock:
            self._check_open()
            return self._planner.ids(self._refresh)

    def sample(self, batch_size: int | None = None, beta: float | None = None) -> Batch:
        """Draw and gather one batch.

        Parameters
        ----------
        batch_size : int or None
            Items of this batch; None is the sampler's. A batch of another size than the sampler's is drawn on the
            spot, before those drawn ahead.
        beta : float or None
            Exponent of the importance weights of this batch; None is the distribution's.

        Raises
        ------
        NotEnoughData
            No step is sampleable, or with `max_times_sampled` all of them together fewer times than the batch needs;
            nothing is drawn.
        RateLimited
            The limiter's timeout passed; nothing was drawn, or what was is the next batch of this size. One of
            `Episodes` with more steps than `error_buffer` has room for is dropped, and the message says so.
        StopIteration
            A `Sweep` has given every id as often as it should; `for batch in sampler` ends there.
        ValueError
            `batch_size` is no positive int; `beta` is given to a distribution without weights. Or the limiter has no
            timeout, and no room in `error_buffer` for the batch of `Episodes` that was drawn: it is dropped.
        """
        size = self._batch_size if batch_size is None else int_argument("batch_size", batch_size)
        with self._lock:
            if self._closed or self._change is not None or self._before is not None:
                self._check_open()
            planner = self._planner
            if batch_size is not None or beta is not None:
                check_meaning(planner.target.active, self._view, batch_size, beta)
            started = perf_counter()
            payments, item_steps = self._payments, self._makers.item_steps
            if payments.limiter is not None and planner.target.active.sized and item_steps is not None:
                payments.pay(size * item_steps)
            if size == self._sizes[0]:
                return self._deliver(planner.next(self._sizes, self._refresh), beta, started)
            return self._deliver(planner.draw_other_size(size, self._refresh), beta, started, is_other_size=True)

    def _deliver(self, plan: Plan, beta: float | None, started: float, is_other_size: bool = False) -> Batch:
        """Pay for the batch of a plan and gather it, another one if its segments have gone."""
        planner, makers, payments = self._planner, self._makers, self._payments
        active = planner.target.active
        is_refused = False
        for attempt in range(ATTEMPTS):
            try:
                if attempt:
                    plan = planner.draw_again(plan)
                if not len(plan.draw.ids):
                    raise StopIteration(f"{active} has drawn every id")
                if self._transforms:
                    makers.prepare((plan, *planner.queue))
                ids, item_steps = plan.draw.ids, makers.item_steps
                if item_steps is None:
                    steps = makers.gatherer.reader.count_steps(plan.snapshot, ids)
                else:
                    steps = item_steps * len(ids)
                if payments.limiter is not None and (item_steps is None or not active.sized):  # else it was paid before
                    is_refused = True
                    payments.pay_for(plan, steps, planner)
                    is_refused = False
                planned = perf_counter()
                weights = active.weigh(plan.draw, beta, self._statistics.batches) if active.weighted else None
                if makers.prefetcher is not None and not is_other_size:
                    makers.prefetcher.begin(planner.queue, plan)
                gathered = plan.gathered
                if gathered is None:
                    gathered = makers.gatherer.gather(plan.snapshot, ids, plan.entropy, plan.draw_info)
                elif makers.prefetcher is not None:
                    gathered = makers.prefetcher.wait(gathered)
                    plan.gathered = None  # what is made of it now may change it: an interrupt has it gathered again
                if not self._transforms:
                    batch = makers.gatherer.to_batch(gathered, weights)
                else:
                    batch = makers.transformed(plan, gathered, weights)
            except SegmentGone:
                continue
            except Exception:
                # Not the next one again: a row that is damaged would be read by every call. Unless the next one would
                # not be what it is with this one left out.
                if not is_refused:
                    planner.drop(plan)
                raise
            except BaseException:
                # An interrupt: the batch was not given, and is the next one of its size.
                plan.gathered = None
                raise
            payments.paid = 0
            self._statistics.add(ids, steps, started, planned)
            planner.delivered(plan)
            return batch
        planner.rewind()
        raise SegmentGone("segments were evicted faster than they could be read")

    def gather(self, ids: Any = None, fields: Sequence[str] | None = None) -> Batch:
        """Gather the batch of exactly these ids, in their order, as they are stored; all weights are 1.

        Nothing is transformed or relabelled.

        Parameters
        ----------
        ids : array_like of int or Tensor or None
            Ids, one axis. None: the ids of the last delivered batch, as of the store's current snapshot.
        fields : sequence of str or None
            The fields of this batch, named as for `Sampler`. None: the fields of the sampler's batches.

        Raises
        ------
        InvalidIndex
            An id never existed, was evicted, or cannot be sampled with this view.
        NotEnoughData
            `ids` is None, and no batch was delivered since the sampler was made, loaded, or had its view set.
        """
        wanted = None if ids is None else ids_argument(ids)
        with self._lock:
            self._check_open()
            if wanted is None:
                wanted = self._statistics.last_ids()
            elif self._refresh:
                self._store.refresh()
            return self._makers.batch_of(wanted, self._store, self._planner, fields)

    def update_priorities(self, index: Any, td_error: Any, kind: Kind | None = None) -> int:
        """Set the priorities of ids from their temporal-difference errors; nothing is changed if it raises.

        Parameters
        ----------
        index : array_like of int or Tensor
            Ids, such as a batch's `index`.
        td_error : array_like of float or Tensor
            One error of either sign for each, (B,) or (B, 1); of sequences also (B, L), of which the steps in the loss
            mask count: eta · max |td| + (1 - eta) · mean |td|. A gradient is left alone. Where an id is named twice,
            its last value counts.
        kind : tuple or None
            What the ids are ids of, such as a batch's `kind`. None is what a batch's `index` carries; ids of which
            nothing says it are taken for the view's.

        Returns
        -------
        int
            How many ids were skipped: they were evicted meanwhile, are unknown to the view, or of another kind.

        Raises
        ------
        ValueError
            Another shape, a value that is not finite, or no `Prioritized` was ever the sampler's distribution.
        """
        kind = kind_of(index) if kind is None else kind_argument(kind)
        index, td_error = fetched(index, td_error)
        ids = ids_argument(index)
        errors = errors_argument(td_error, len(ids))
        with self._lock:
            self._check_open()
            return self._planner.update(ids, errors, kind)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last delivered batch: tensors, numbers and texts, for `torch.save`.

        It holds priorities (8 bytes an id, and some numbers an episode), the count that schedules go by, the state of
        the random numbers, which steps of rollouts and of a `Sweep` were given, how often ids were sampled where
        `max_times_sampled` limits that, the ids that are drawn from where `max_size` limits them (16 bytes an id), and
        the ids of batches drawn ahead, or drawn and refused by a limiter. It does
        not hold arguments of sampler, view or distribution.
        """
        with self._lock:
            self._check_open()
            return {**as_tensors(self._state()), "store": self._store.uuid}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: with the same arguments and steps in the store, with the same batches.

        Ids that are gone are dropped, new ones begin with the largest priority given. Of batches drawn ahead, the first
        with a lost id and all behind it are drawn again; the others tell `age`, and what is to come in episodes that
        were open, as of now.

        Raises
        ------
        ValueError
            It is no sampler's state, or that of a sampler of another store or with another distribution, kind of view
            or, if batches were drawn ahead or refused, batch size; nothing is changed.
        """
        self._load(state)

    def save(self, name: str) -> None:
        """Save the state in the store, as a zarr group at `samplers/<name>`, in place of what was saved there before.

        It is durable when this returns; a crash leaves the old state or the new one.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        ValueError
            `name` is more than letters, digits, dots, dashes and underscores.
        StorageFull
            There is no room; what was saved before is untouched.
        """
        with self._lock:
            self._check_open()
            state = self._state()
        self._store.save_sampler_state(name, state)

    def load(self, name: str) -> None:
        """Go on from the state that was saved last under a name; see `load_state_dict`.

        Raises
        ------
        StoreNotFound
            The store has none of that name.
        FormatError
            It is damaged.
        ValueError
            It is the state of another sort of sampler.
        """
        with self._lock:
            self._check_open()
            self._load(self._store.load_sampler_state(name))

    def _state(self) -> dict[str, Any]:
        own = {"version": STATE_VERSION, "batch_size": self._batch_size, "paid": self._payments.paid}
        transforms = transforms_state(self._transforms)
        own |= self._statistics.state_dict()
        return {**own, "planner": self._planner.state_dict(), "transforms": transforms}

    def _load(self, state: Any, replace: Callable[[Sequence[Change]], None] = replace_attributes) -> None:
        """Go on from a state where `replace` replaces the attributes that it is given, else from where it was."""
        with self._lock:
            self._check_open()
            state = as_arrays(state)
            counts = own_state(state, self._batch_size, self._store.uuid)
            self._before = Rollback(self._planner.target.distribution, self._transforms)
            try:
                load_transforms(self._transforms, state.get("transforms") or [])
                planner = self._planner.loaded(state["planner"], self._refresh)
                statistics = self._statistics.resumed(counts["batches"], counts["steps"])
                own = {"_statistics": statistics, "_before": None}
                paid = {"paid": counts["paid"]}
                replace([(self._planner, vars(planner)), (self._payments, paid), (self, own)])
            finally:
                self._go_back()

    def _go_back(self) -> None:
        """Take back a state that was not loaded wholly; an interrupt leaves it to the next call."""
        if self._before is not None:
            self._before.go_back()
            self._before = None

    def __reduce__(self) -> str:
        raise TypeError("a sampler cannot be sent to another process: make one there, with a seed or rank of its own")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self.sample()

    def __len__(self) -> int:
        """Return how many batches come until the end, if no step comes or goes; TypeError where there is no end.

        In the middle of a pass it costs as much as drawing the rest of it.
        """
        with self._lock:
            self._check_open()
            left = self._planner.batches_left(self._batch_size, self._refresh)
        if left is None:
            raise TypeError(f"{self} never ends, and so has no len(): one with dr.Sweep() has")
        return left

    def __bool__(self) -> bool:
        """Return True, also where no batch is left."""
        return True

    def stats(self) -> dict[str, float]:
        """Return what the sampler has done so far.

        `batches` and `steps` of the environment delivered (a window of 20 is 20); `steps_per_second` since the first
        batch was asked for; `replay_ratio`, steps delivered per step that is in the store now, or was when `close`
        closed it. Where time went: `seconds_planning` (drawing ids, and waiting for a limiter), `seconds_waiting` for
        batches that are made ahead, `seconds_elsewhere` between the calls: the trainer's own. In whichever thread:
        `seconds_reading` (waiting for the disk), `seconds_gathering` (copying rows), `seconds_copying` to a device that
        is no CUDA device, and `seconds_transforming`. `population` and `priority_sum` are what the fields of these
        names are, as of now. `Normalize` adds `steps_not_finite`.
        """
        with self._lock:
            steps = self._steps_when_closed
            if steps is None:
                steps = len(self._store.snapshot)
            found = self._statistics.report(steps, self._makers.seconds())
            for one in self._transforms:
                found |= one.stats()
            return {
                **found,
                "population": self._planner.target.drawable(),
                "priority_sum": self._planner.target.priority_sum(),
            }

    def close(self) -> None:
        """End the threads and release memory. Batches stay valid; the store stays open, unless a path named it."""
        if isinstance(self._lock, _ForeignLock):
            return  # a forked child has none of it
        with self._lock:
            self._closed = True
            self._planner.set_target(self._view, self._planner.target.distribution)
            self._makers.close()
            self._destination.pool.clear()
            if self._own_store is not None:
                if self._steps_when_closed is None:
                    self._steps_when_closed = len(self._own_store)
                self._own_store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this sampler is closed; make another")
        if self._change is not None or self._before is not None:
            self._complete_change()


class _ForeignLock:
    """In place of a sampler's lock in a forked child, where nobody would ever release one that another thread held."""

    def __init__(self) -> None:
        self._parent = os.getppid()

    def __enter__(self) -> None:
        raise ReplayError(
            f"this sampler belongs to another process, number {self._parent}: make one there, with a seed or rank of "
            "its own, or give a DataLoader with workers a diskreplay.interop.torch.StoreDataset"
        )

    def __exit__(self, *_: object) -> None:
        pass  # it was never taken


# A forked child's samplers get a lock that refuses, and so a parent's lock costs nothing more.
_alive = fork_listeners(lambda sampler: setattr(sampler, "_lock", _ForeignLock()))
