"""The class `Sampler`, which draws batches from a store."""

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

# A sampler logs one line when it is made, and when its view or distribution is set.
_logger = logging.getLogger("diskreplay")


class Statistics:
    """Counts and times of one sampler. Not thread-safe: the sampler calls it under its lock.

    Attributes
    ----------
    batches, steps : int
        Numbers of delivered batches and steps. After a load, the batches and steps of the saved run are included.
    planning, elsewhere : float
        Seconds spent on planning batches, and in the trainer between the calls of the sampler.
    first, last : float
        The times by `perf_counter` of the first request for a batch and of the last delivery; 0 if no batch was
        delivered.
    """

    def __init__(self) -> None:
        self.planning = self.elsewhere = 0.0
        self.first = self.last = 0.0
        self.batches = self.steps = self._steps_before = 0
        self.ids: NDArray[np.int64] | None = None
        self._kept: Counter[str] = Counter()

    def resumed(self, batches: int, steps: int) -> "Statistics":
        new = copy(self)
        new.batches, new.steps, new._steps_before, new.first, new.last = batches, steps, steps, 0.0, 0.0
        new.ids = None
        return new

    def last_ids(self) -> NDArray[np.int64]:
        if self.ids is None:
            raise NotEnoughData("no batch was delivered yet: draw one first, or give ids")
        return self.ids

    def keep(self, seconds: Mapping[str, float]) -> None:
        """Add these seconds, by name, to the results of later calls of `report`."""
        self._kept.update(seconds)

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches, "steps": self.steps}

    def report(self, stored_steps: int, seconds: Mapping[str, float]) -> dict[str, float]:
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
    """Reports to a `limiter` how many steps a sampler draws; if `limiter` is None, reports nothing.

    `steps` is the smallest number of steps of a batch. Raises ValueError if the limiter could never allow this number.
    ``paid`` is the number of steps that a failed call has reported. The next batch need not report them again.
    """

    def __init__(self, limiter: RateLimiter | None, store: Store, steps: int) -> None:
        self.limiter: AttachedLimiter | None = None
        self.paid = 0
        if limiter is not None:
            limiter.check_batch(steps)
            self.limiter = limiter.attach(store)

    def pay(self, steps: int) -> None:
        """Wait until the limiter allows a draw of `steps` steps. The first `paid` steps were already reported."""
        if self.limiter is not None and steps > self.paid:
            self.limiter.draw(steps - self.paid)
            self.paid = steps

    def pay_for(self, plan: Plan, steps: int, planner: Planner) -> None:
        """Report the steps of a drawn batch to the limiter, and wait until the limiter allows these steps.

        If the limiter refuses a batch, the next call with the same batch size gets this batch. If the limiter could
        never allow a batch, the batch is dropped.
        """
        limiter, due = self.limiter, steps - self.paid
        try:
            self.pay(steps)
        except Exception as error:
            # A limiter raises exactly these types. A damaged store raises subclasses of ValueError.
            is_refusal = type(error) in (RateLimited, ValueError) and planner.target.active.sized
            if is_refusal and limiter is not None and not limiter.limiter.fits(due):
                planner.drop(plan)
                raise type(error)(
                    f"{error}. The drawn batch, {len(plan.draw.ids)} items from id {plan.draw.ids[0]} on, might wait "
                    "for ever and is dropped: the next call draws another one"
                ) from error
            planner.rewind()
            raise


class Sampler(IterableDataset[Batch]):
    """Draws ids from a store by a distribution, and gathers batches of the items that a view defines at these ids.

    `for batch in sampler` calls `sample` until a `Sweep` ends, and for ever with other distributions. With a `Sweep`,
    `len(sampler)` is the number of batches that are left. `torch.utils.data.DataLoader(sampler, batch_size=None)` gives
    the same batches, in the process that made the sampler (``num_workers=0``).

    Any thread may call any method; calls of one sampler run one after the other. Several samplers may share a store. A
    sampler belongs to the process that made it. Use of the sampler in a forked child raises ReplayError, since both
    processes would draw the same batches.

    Parameters
    ----------
    store : Store or path
        The store of the steps, or its path. If you give a path, the sampler opens the store with mode "r", and `close`
        closes it. If you give a store, `close` leaves it open.
    view : View
        The meaning of an id, for example `Transitions(...)`.
    distribution : Distribution
        The rule by which ids are drawn; None is `Uniform()`.
    batch_size : int
        Number of items in a batch.
    device : torch.device or str or None
        The device of the delivered batches; None is the CPU.
    prefetch : int
        The number of batches that threads make ahead while the trainer computes. Batch i is drawn in the call that
        delivers batch i - prefetch, from the snapshot and the priorities at that call. Rollouts, and batches of less
        than 256 KiB on the CPU, are not made ahead.
    seed : int or None
        Seed of the draws, which depend only on the seed and the calls. None: an arbitrary seed.
    fields : sequence of str or None
        The fields of a batch, in addition to index and weight. "obs" means all leaves below "obs", and "obs/image"
        means only that leaf. None: the default fields. To add some of the following fields to the default fields, give
        their names and "...".

        Fields of each step: "time" (float64, the step's publication in seconds since the epoch), "step" (the step's
        number in its episode), "return_to_go" (the sum of the rewards from this step on), "discounted_return_to_go",
        and "priority" (the initial priority, NaN if the collector gave none).

        Fields of each item: "age" (the number of newer steps in the store), "episode/NAME" (a value of the item's
        episode; "episode_known" is whether this value was given), "probability" (P(i) of the draw), "population" (N,
        the number of ids to draw from) and "priority_sum" (Σ p, see `Prioritized`). See "Fields on request" in
        docs/api/sampling.md.
    where : callable or None
        A function that gets an episode, and returns True if steps of this episode may be drawn. The function is called
        once for an ended episode, and for an open episode at every refresh that changes the store. The result for an
        ended episode must depend on the episode alone. If the result depends on `hidden_steps` or on the time, a
        resumed sampler draws other batches.
    rank, world_size : int
        Index of this trainer, and number of trainers that share the ids. A hash of an id decides to which share the id
        belongs, so an id never changes its share. Each id is in exactly one share, and the shares have about equal
        sizes. With `Rollouts`, a share has whole lanes.
    limiter : RateLimiter or None
        A limiter that makes `sample` wait while this trainer is too far ahead of the writers with the same limiter. The
        limiter's counts are in the store, which must be open with mode "a".
    refresh : bool
        Whether each call of `sample` refreshes the store first. False: you call `store.refresh()`.
    debug : bool
        Whether to overwrite the memory of batches that are no longer referenced, so that a pointer that outlives its
        tensor reads NaN.
    max_times_sampled : int or None
        The largest number of times that this sampler draws each id of a kind, as in Reverb; None: no limit. The ids
        that can still be drawn keep the ratios of their probabilities. `Rollouts` and a `Sweep` refuse this limit,
        because they decide how often each id is drawn.
    max_size : int or None
        This sampler draws from at most this number of ids of each kind, over all ranks; None: no limit. When this
        number is reached, each new id replaces an old id. The old id is never drawn again, but the store keeps its
        steps. `Rollouts` and a `Sweep` refuse this limit.
    remover : {"oldest", "lowest_priority", "random"}
        Which id a new id replaces if `max_size` is reached, as in Reverb (Fifo, MinHeap, Uniform). "oldest" removes the
        id that was published first. "lowest_priority" removes the id with the lowest priority, and the oldest of
        several such ids. "random" is a reservoir: every id so far remains with the same probability (Vitter 1985,
        algorithm R). "lowest_priority" and "random" may remove the new id itself.
    transform : callable or sequence of callables, or None
        Transforms that change each batch before its delivery, in the given order. A transform is a `Normalize`,
        `RandomShift` or `ToFloat`, or a function of a batch that returns a batch or a dict of new fields. Transforms
        get all fields of the batch on its device, with weights of 1. After the transforms, the weights of the batch are
        multiplied by the weights of the draw. Transforms run in the thread that makes the batch. For a CUDA device,
        transforms run in the call that delivers the batch, on the caller's stream. `gather` does not transform.

    Raises
    ------
    ValueError
        An argument is invalid, or the view or `fields` names a field that the store lacks.
    StoreNotFound
        The path has no store.

    Examples
    --------
    >>> sampler = dr.Sampler("cartpole.replay", dr.Transitions(n_step=3), dr.Prioritized(), batch_size=64, seed=0)
    >>> batch = sampler.sample()
    >>> batch.obs.shape, batch.weight.max().item()
    (torch.Size([64, 4]), 1.0)
    >>> sampler.update_priorities(batch.index, td_error=torch.rand(64))  # no id was skipped
    0
    >>> sampler.view = dr.Transitions(n_step=1)  # from the next batch on
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
        # The batch sizes of the next batches. All batches except the first are made ahead.
        self._sizes: tuple[int, ...] = (self._batch_size,)
        self._prefetch = int_argument("prefetch", prefetch, 0)
        drawing = drawing_arguments(where, rank, world_size, max_times_sampled, max_size, remover)
        self._view, distribution = view_argument(view), distribution_argument(distribution)
        self._fields, self._transforms = fields, transform_argument(transform)
        self._refresh = bool(refresh)
        self._statistics = Statistics()
        self._closed = False
        self._change: Makers | None = None
        self._before: Rollback | None = None  # what to restore if a load fails; None: no load runs
        self._destination = Destination(device_argument(device), 2 + self._prefetch, debug)
        self._own_store = Store(store) if isinstance(store, str | os.PathLike) else None
        self._steps_when_closed: int | None = None
        # `self._own_store or store` would be wrong, because an empty store is false.
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
        arguments = self._fields, self._destination, self._transforms, self._prefetch, self._sizes[0]
        return Makers(view, self._store.schema, *arguments)

    def _set_makers(self, makers: Makers) -> None:
        self._view, self._makers, self._statistics.ids = makers.view, makers, None
        self._sizes = self._sizes[:1] * makers.planned

    def _expect(self, size: int) -> None:
        """Make batches of this size ahead from now on, in place of batches of the sampler's `batch_size`."""
        if self._prefetch:
            with self._lock:
                self._sizes = (size,)
                self.view = self._view

    def _sample_first(self, sizes: Sequence[int], beta: float | None) -> Batch:
        """Return a batch of `sizes[0]` items. Let threads make batches of the other sizes ahead."""
        with self._lock:
            self._sizes = tuple(sizes[: self._makers.planned])
            return self.sample(sizes[0], beta)

    def __repr__(self) -> str:
        return f"{self._planner.target.active} over {self.view}"

    @property
    def store(self) -> Store:
        """The sampler's store: the given store, or the store that the sampler opened at a path."""
        return self._store

    @property
    def view(self) -> View:
        """The meaning of an id. A new view applies from the next batch on; batches drawn ahead are drawn again."""
        return self._view if self._change is None else self._change.view

    @view.setter
    def view(self, view: View) -> None:
        makers = self._makers_of(view_argument(view))
        with self._lock:
            self._change = makers
            self._complete_change()

    def _complete_change(self) -> None:
        """Complete an interrupted change of the view, or undo an interrupted load of a state."""
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
        """The rule by which ids are drawn. A new rule applies to the next batch; batches drawn ahead are drawn again.

        When another distribution replaces a `Prioritized`, the priorities are kept, and `update_priorities` still sets
        priorities. A later `Prioritized` takes over the priorities.
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
        """The number of ids that can be drawn now, in this rank's share and in episodes that `where` allows.

        This number excludes ids that were sampled `max_times_sampled` times or removed for `max_size`. With `Rollouts`,
        it is the number of steps that were not drawn yet. Like `sample`, this first refreshes the store.
        """
        with self._lock:
            self._check_open()
            return self._planner.count(self._refresh)

    def ids(self) -> NDArray[np.int64]:
        """Return the ids that `sampleable` counts, (n,) int64, in the order of their steps' publication."""
        with self._lock:
            self._check_open()
            return self._planner.ids(self._refresh)

    def sample(self, batch_size: int | None = None, beta: float | None = None) -> Batch:
        """Draw and gather one batch.

        Parameters
        ----------
        batch_size : int or None
            Number of items in this batch; None: the sampler's `batch_size`. A batch of another size is drawn in this
            call, and delivered before the batches drawn ahead.
        beta : float or None
            Exponent of this batch's importance weights; None: the beta of the distribution.

        Raises
        ------
        NotEnoughData
            No step can be sampled, or `max_times_sampled` allows fewer items than the batch needs. Nothing is drawn.
        RateLimited
            The limiter's timeout passed. If a batch was already drawn, the next call with this batch size returns the
            batch. A batch of `Episodes` with too many steps for the limiter's `error_buffer` is dropped, and the
            message says so.
        StopIteration
            A `Sweep` has ended, which also ends `for batch in sampler`.
        ValueError
            `batch_size` is not a positive int, or `beta` is given to a distribution without weights. Also raised if a
            batch of `Episodes` has too many steps for the limiter's `error_buffer`, and the limiter has no timeout;
            this batch is dropped.
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
        """Report the steps of a planned batch to the limiter, and return the batch.

        If segments of the batch are gone, another batch is drawn in its place.
        """
        planner, makers, payments = self._planner, self._makers, self._payments
        active, item_steps = planner.target.active, makers.item_steps
        is_refused = False
        for attempt in range(ATTEMPTS):
            try:
                if attempt:
                    plan = planner.draw_again(plan)
                ids = plan.draw.ids
                size = len(ids)
                if not size:
                    raise StopIteration(f"{active} has drawn every id")
                if self._transforms:
                    makers.prepare((plan, *planner.queue))
                if item_steps is None:
                    steps = makers.gatherer.reader.count_steps(plan.snapshot, ids)
                else:
                    steps = item_steps * size
                # If the number of steps was known before the draw, `sample` has already reported the steps to the
                # limiter.
                if payments.limiter is not None and (item_steps is None or not active.sized):
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
                    plan.gathered = None  # if an interrupt comes now, the next call gathers the batch again
                if not self._transforms:
                    batch = makers.gatherer.to_batch(gathered, weights)
                else:
                    batch = makers.transformed(plan, gathered, weights)
            except SegmentGone:
                continue
            except Exception:
                # The plan is dropped, so that later calls do not read the same damaged row. A batch that the limiter
                # refused is kept: later draws may depend on it.
                if not is_refused:
                    planner.drop(plan)
                raise
            except BaseException:
                # After an interrupt, the batch is not delivered: the next call with this batch size gathers it again.
                plan.gathered = None
                raise
            payments.paid = 0
            statistics = self._statistics
            if not statistics.first:
                statistics.first = statistics.last = started
            statistics.batches += 1
            statistics.steps += steps
            statistics.planning += planned - started
            statistics.elsewhere += started - statistics.last
            statistics.ids, statistics.last = ids, perf_counter()
            planner.delivered(plan)
            return batch
        planner.rewind()
        raise SegmentGone("segments were evicted faster than they could be read")

    def gather(self, ids: Any = None, fields: Sequence[str] | None = None) -> Batch:
        """Gather the batch of exactly these ids, in their order.

        Values are as stored, neither transformed nor relabelled, and all weights are 1.

        Parameters
        ----------
        ids : array_like of int or Tensor or None
            Ids, (n,). None: the ids of the last delivered batch. Values are from the store's current snapshot.
        fields : sequence of str or None
            The fields of this batch, named as for `Sampler`. None: the fields of the sampler's batches.

        Raises
        ------
        InvalidIndex
            An id never existed, was evicted, or cannot be sampled with this view.
        NotEnoughData
            `ids` is None, and no batch was delivered since the sampler was made, a state was loaded, or the view was
            set.
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
        """Set the priorities of ids from their temporal-difference errors. If the call fails, nothing was changed.

        Parameters
        ----------
        index : array_like of int or Tensor
            Ids, such as a batch's `index`.
        td_error : array_like of float or Tensor
            One error of either sign for each id, (B,) or (B, 1). For sequences, the errors may be (B, L). Errors (B, L)
            give the priority eta · max |td| + (1 - eta) · mean |td| over the steps in the loss mask. A gradient is
            ignored. If an id is repeated, its last error counts.
        kind : tuple or None
            The kind of the ids, such as a batch's `kind`. None: the kind that a batch's `index` carries, or else the
            view's kind.

        Returns
        -------
        int
            The number of skipped ids. An id is skipped if it was evicted, if the view does not know it, or if its kind
            is not the view's kind.

        Raises
        ------
        ValueError
            `td_error` has another shape or a value that is not finite, or the sampler never had a `Prioritized`
            distribution.
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

        The state has:

        - the priorities (8 bytes for each id, and some numbers for each episode)
        - the number of batches (for schedules), and the state of the random numbers
        - the position in a `Sweep` or in `Rollouts`
        - the counts for `max_times_sampled`, and the ids that `max_size` keeps (16 bytes an id)
        - the statistics of transforms
        - the ids of batches that were drawn ahead, or refused by a limiter

        The arguments of the sampler, the view and the distribution are not in the state.
        """
        with self._lock:
            self._check_open()
            return {**as_tensors(self._state()), "store": self._store.uuid}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        With the same arguments, and the same steps in the store, the next batches are those of an uninterrupted run.

        Ids that the store no longer has are dropped, and new ids get the largest priority so far. If an id of a batch
        drawn ahead was evicted, this batch and all later batches are drawn again. Earlier batches keep their ids, but
        get current values of `age` and of fields that depend on later steps of open episodes.

        Raises
        ------
        ValueError
            `state` is not a sampler's state, or belongs to another store, distribution or kind of view. Also raised if
            `state` has undelivered batches, and was saved with another `batch_size`. Nothing is changed.
        """
        self._load(state)

    def save(self, name: str) -> None:
        """Save the state in the store, as the zarr group `samplers/<name>`, in place of an earlier group of this name.

        The state is durable when this returns. A crash leaves the old state or the new one.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        ValueError
            `name` has other characters than letters, digits, dots, dashes and underscores.
        StorageFull
            The disk is full. An earlier state is unchanged.
        """
        with self._lock:
            self._check_open()
            state = self._state()
        self._store.save_sampler_state(name, state)

    def load(self, name: str) -> None:
        """Continue from the state that was saved last under a name; see `load_state_dict`.

        Raises
        ------
        StoreNotFound
            The store has no state of that name.
        FormatError
            The state is damaged.
        ValueError
            `load_state_dict` refuses the state.
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
        """Load a state.

        `replace` must apply the changes that it gets, else the load is undone.
        """
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
        """Undo an incomplete load of a state; after an interrupt, the next call of the sampler does this."""
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
        """Return the number of batches until the end of a `Sweep`, if the store does not change.

        In the middle of a pass, the call takes as long as the draws that are left in the pass.

        Raises
        ------
        TypeError
            The distribution never ends.
        """
        with self._lock:
            self._check_open()
            left = self._planner.batches_left(self._batch_size, self._refresh)
        if left is None:
            raise TypeError(f"{self} never ends, so it has no len(): a sampler with dr.Sweep() has one")
        return left

    def __bool__(self) -> bool:
        """Return True, even if no batch is left and `len` returns 0."""
        return True

    def stats(self) -> dict[str, float]:
        """Return counts and times of the sampler, by name.

        - `batches`: the number of delivered batches
        - `steps`: the number of delivered steps of the environment (a window of 20 is 20 steps)
        - `steps_per_second`: delivered steps a second, since the first batch was requested
        - `replay_ratio`: delivered steps per step in the store (after `close`: in the store at that time)
        - `seconds_planning`: drawing ids, and waiting for a limiter
        - `seconds_waiting`: waiting for batches that are made ahead
        - `seconds_elsewhere`: in the trainer, between the calls of the sampler
        - `seconds_reading`, in any thread: waiting for the disk
        - `seconds_gathering`, in any thread: copying rows
        - `seconds_copying`, in any thread: copies to devices other than CUDA
        - `seconds_transforming`, in any thread: transforms
        - `population` and `priority_sum`: the current values of these fields of batches (see `Sampler`)
        - `steps_not_finite`, with a `Normalize`: the number of steps that its statistics leave out
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
        """End the threads and release memory. Batches stay valid. A store that the sampler opened is closed."""
        if isinstance(self._lock, _ForeignLock):
            return  # a forked child has no threads to end
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
    """Replaces a sampler's lock in a forked child, where a lock that another thread held is never released."""

    def __init__(self) -> None:
        self._parent = os.getppid()

    def __enter__(self) -> None:
        raise ReplayError(
            f"this sampler belongs to another process, number {self._parent}: make one there, with a seed or rank of "
            "its own, or give a DataLoader with workers a diskreplay.interop.torch.StoreDataset"
        )

    def __exit__(self, *_: object) -> None:
        pass  # there is no lock to release


# A forked child's samplers get a lock that raises, so no call has to compare process ids.
_alive = fork_listeners(lambda sampler: setattr(sampler, "_lock", _ForeignLock()))
