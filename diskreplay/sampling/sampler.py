"""The sampler: a store, a view and a distribution multiplied into batches."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from diskreplay.device_tensors import fetched
from diskreplay.distributions.base import Distribution
from diskreplay.distributions.number_arguments import int_argument
from diskreplay.errors import Closed, RateLimited, ReplayError, SegmentGone
from diskreplay.kernels.table import of_sampler
from diskreplay.reading.episodes import Episode
from diskreplay.sampling.arguments import (
    bound_arguments,
    check_meaning,
    device_argument,
    distribution_argument,
    errors_argument,
    ids_argument,
    kind_argument,
    share_argument,
    store_argument,
    view_argument,
)
from diskreplay.sampling.batch import Batch, Kind, kind_of
from diskreplay.sampling.gatherer import Destination, Gathered, Gatherer
from diskreplay.sampling.planner import ATTEMPTS, Plan, Planner
from diskreplay.sampling.prefetcher import Prefetcher, is_large
from diskreplay.sampling.sampler_states import (
    VERSION as STATE_VERSION,
    Change,
    as_arrays,
    as_tensors,
    own_state,
    replace_attributes,
)
from diskreplay.sampling.statistics import Statistics
from diskreplay.sampling.transforms import (
    Pipeline,
    TransformLike,
    load_transforms,
    transform_argument,
    transforms_state,
)
from diskreplay.store.store import Store
from diskreplay.views.base import View, copy_threads
from diskreplay.workers import told_of_forks
from diskreplay.writing.limiter import RateLimiter

# One line says what is active: when a sampler is made, and when its view or distribution is set.
_logger = logging.getLogger("diskreplay")


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
        share = share_argument(rank, world_size)
        if max_times_sampled is not None:
            max_times_sampled = int_argument("max_times_sampled", max_times_sampled)
        max_size, remover = bound_arguments(max_size, remover)
        if where is not None and not callable(where):
            raise ValueError(f"where must be a function of an episode, not {where!r}")
        self._view, distribution = view_argument(view), distribution_argument(distribution)
        device = device_argument(device)
        if limiter is not None:
            limiter.check_batch(self._batch_size * (view.item_steps or 1))
        self._fields, self._transforms = fields, transform_argument(transform)
        self._refresh = bool(refresh)
        self._statistics = Statistics()
        self._closed = False
        self._paid = 0
        self._change: tuple[View, Gatherer, Prefetcher | None] | None = None
        self._before: tuple[Any, list[dict[str, Any]]] | None = None  # the states before a load that is not complete
        self._destination = Destination(device, 2 + self._prefetch, debug)
        self._own_store = Store(store) if isinstance(store, str | os.PathLike) else None
        self._steps_when_closed: int | None = None
        # An empty store is false.
        self._store = store_argument(store) if self._own_store is None else self._own_store
        try:
            self._store.follow_compiled(of_sampler(distribution.weighted))
            _alive.add(self)
            self._lock: Any = threading.RLock()
            self._limiter = None if limiter is None else limiter.attach(self._store)
            for one in self._transforms:
                one.claim(self)
            self._set_gatherers(*self._make_gatherers(view))
            self._planner = Planner(
                self._store,
                view,
                distribution,
                seed=seed,
                where=where,
                share=share,
                max_times_sampled=max_times_sampled,
                max_size=max_size,
                remover=remover,
                tells=list(self._gatherer.drawn),
                random=any(one.random for one in self._transforms),
            )
        except BaseException:
            if self._own_store is not None:
                self._own_store.close()
            raise
        _logger.info("%s", self)

    def _make_gatherers(self, view: View) -> tuple[Gatherer, Prefetcher | None]:
        """Return what makes batches of a view, and what makes them ahead, where that is worth it."""
        schema = self._store.schema
        arguments = view, schema, self._fields, self._destination
        pipeline = Pipeline([(one, one.bind(schema, view)) for one in self._transforms])
        gatherer = Gatherer(*arguments, threads=copy_threads(beside=0), pipeline=pipeline)
        if not self._prefetch or not view.prefetchable or not is_large(gatherer, self._sizes[0]):
            return gatherer, None
        # Beside the trainer, which has use for a processor.
        return gatherer, Prefetcher(Gatherer(*arguments, threads=copy_threads(beside=1), pipeline=pipeline))

    def _set_gatherers(self, gatherer: Gatherer, prefetcher: Prefetcher | None) -> None:
        self._gatherer, self._prefetcher = gatherer, prefetcher
        self._planned = 1 if prefetcher is None else 1 + self._prefetch
        self._sizes = self._sizes[:1] * self._planned
        self._item_steps = self._view.item_steps

    def _expect(self, size: int) -> None:
        """Make ready for batches of another size than the sampler's own, where batches are made ahead."""
        if self._prefetch:
            with self._lock:
                self._sizes = (size,)
                self.view = self._view

    def _sample_first(self, sizes: Sequence[int], beta: float | None) -> Batch:
        """Draw a batch of the first of these sizes; where batches are made ahead, those are next."""
        with self._lock:
            self._sizes = tuple(sizes[: self._planned])
            return self.sample(sizes[0], beta)

    def _seconds(self) -> dict[str, float]:
        """Return where the time went of the batches of this view; see `stats`."""
        makers, waiting = [self._gatherer], 0.0
        if self._prefetcher is not None:
            makers.append(self._prefetcher.gatherer)
            waiting = self._prefetcher.seconds_waiting
        return {
            "seconds_waiting": waiting,
            "seconds_reading": sum(maker.disk.seconds for maker in makers),
            "seconds_gathering": sum(maker.seconds_gathering for maker in makers),
            "seconds_copying": sum(maker.seconds_copying for maker in makers),
            "seconds_transforming": sum(maker.seconds_transforming for maker in makers),
        }

    def _end_threads(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._gatherer.close()

    def __repr__(self) -> str:
        return f"{self._planner.target.active} over {self.view}"

    @property
    def view(self) -> View:
        """What an id means. Setting it changes what the next batch holds; batches drawn ahead are drawn again."""
        return self._view if self._change is None else self._change[0]

    @view.setter
    def view(self, view: View) -> None:
        made = self._make_gatherers(view_argument(view))
        with self._lock:
            self._change = (view, *made)
            self._complete_change()

    def _complete_change(self) -> None:
        """Set the view that was given last, where an interrupt came before it was set.

        First take back a state that an interrupt kept from being loaded wholly.
        """
        self._go_back()
        if self._change is None:
            return
        view, gatherer, prefetcher = self._change
        try:
            self._planner.set_target(view, self._planner.target.distribution)
        except Exception:
            self._change = None
            raise
        self._statistics.keep(self._seconds())
        self._end_threads()
        self._view = view
        self._set_gatherers(gatherer, prefetcher)
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
            self._check_open()
            planner = self._planner
            if batch_size is not None or beta is not None:
                check_meaning(planner.target.active, self._view, batch_size, beta)
            started = perf_counter()
            if self._limiter is not None and planner.target.active.sized and self._item_steps is not None:
                self._pay(size * self._item_steps)
            if size == self._sizes[0]:
                return self._deliver(planner.next(self._sizes, self._refresh), size, None, beta, started)
            return self._deliver(planner.draw_apart(size, self._refresh), size, size, beta, started)

    def _deliver(self, plan: Plan, size: int, apart: int | None, beta: float | None, started: float) -> Batch:
        """Pay for the batch of a plan and gather it, another one if its segments have gone."""
        planner, active = self._planner, self._planner.target.active
        is_refused = False
        for attempt in range(ATTEMPTS):
            try:
                if attempt:
                    plan = planner.draw_again(plan, size)
                if not len(plan.draw.ids):
                    raise StopIteration(f"{active} has drawn every id")
                if self._transforms:
                    self._prepare(plan)
                ids, item_steps = plan.draw.ids, self._item_steps
                if item_steps is None:
                    steps = self._gatherer.reader.count_steps(plan.snapshot, ids)
                else:
                    steps = item_steps * len(ids)
                if self._limiter is not None:
                    is_refused = True
                    self._pay_for(plan, steps)
                    is_refused = False
                planned = perf_counter()
                weights = active.weigh(plan.draw, beta, self._statistics.batches) if active.weighted else None
                if self._prefetcher is not None and apart is None and not attempt:
                    self._prefetcher.begin(ahead for ahead in planner.queue if ahead is not plan)
                gathered = plan.gathered
                if gathered is None:
                    gathered = self._gatherer.gather(plan.snapshot, ids, plan.entropy, plan.told)
                elif self._prefetcher is not None:
                    gathered = self._prefetcher.wait(gathered)
                    plan.gathered = None  # what is made of it now may change it: an interrupt has it gathered again
                if not self._transforms:
                    batch = self._gatherer.to_batch(gathered, weights)
                else:
                    batch = self._transformed(gathered, plan, weights)
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
            self._paid = 0
            counts = self._statistics
            if not counts.first:
                counts.first = counts.last = started
            counts.batches += 1
            counts.steps += steps
            counts.planning += planned - started
            counts.elsewhere += started - counts.last
            counts.last = perf_counter()
            planner.delivered(plan)
            return batch
        planner.rewind()
        raise SegmentGone("segments were evicted faster than they could be read")

    def _prepare(self, plan: Plan) -> None:
        """Tell transforms of this plan and those drawn ahead, in the order of the draws."""
        pipeline = self._gatherer.pipeline
        for drawn in (plan, *self._planner.queue):
            if drawn.prepared is None:
                drawn.prepared = pipeline.prepare(drawn.snapshot)

    def _transformed(self, gathered: Gathered | Batch, plan: Plan, weights: NDArray[np.float32] | None) -> Batch:
        """Return what transforms make of the batch of a plan, unless a thread did, with these weights."""
        batch = gathered
        if not isinstance(batch, Batch):
            batch = self._gatherer.transformed(batch, plan.prepared, plan.entropy)
        if weights is None or "weight" not in batch:
            return batch
        ones = batch["weight"]
        return batch.replaced({"weight": ones * torch.as_tensor(weights, device=ones.device)})

    def gather(self, ids: Any) -> Batch:
        """Gather the batch of exactly these ids, in their order, as they are stored; all weights are 1.

        Nothing is transformed or relabelled.

        Parameters
        ----------
        ids : array_like of int or Tensor
            Ids, one axis.

        Raises
        ------
        InvalidIndex
            An id never existed, was evicted, or cannot be sampled with this view.
        """
        wanted = ids_argument(ids)
        with self._lock:
            self._check_open()
            if self._refresh:
                self._store.refresh()
            for _ in range(ATTEMPTS):
                try:
                    snapshot = self._store.snapshot
                    reader = self._gatherer.reader
                    if not reader.fill_checks or len(snapshot.evictions):
                        reader.check(snapshot, wanted)
                    told = self._planner.tell_now(wanted, snapshot) if self._planner.tells else None
                    return self._gatherer.to_batch(self._gatherer.gather(snapshot, wanted, told=told))
                except SegmentGone:
                    self._store.refresh()  # which makes an evicted id an InvalidIndex
            raise SegmentGone("segments were evicted faster than they could be read")

    def _pay(self, steps: int) -> None:
        """Wait until the limiter lets so many steps be drawn; what a failed call has paid for counts for the next."""
        if self._limiter is not None and steps > self._paid:
            self._limiter.draw(steps - self._paid)
            self._paid = steps

    def _pay_for(self, plan: Plan, steps: int) -> None:
        """Pay for a batch that is drawn. One that is refused is the next one of its size, unless it never may be."""
        if self._planner.target.active.sized and self._item_steps is not None:
            return  # it was paid for before
        limiter, due = self._limiter, steps - self._paid
        try:
            self._pay(steps)
        except Exception as error:
            # Those very types: what a damaged store raises is a ValueError, too.
            is_refusal = type(error) in (RateLimited, ValueError) and self._planner.target.active.sized
            if is_refusal and limiter is not None and not limiter.limiter.fits(due):
                self._planner.drop(plan)
                raise type(error)(
                    f"{error}. The batch that was drawn, {len(plan.draw.ids)} items from id {plan.draw.ids[0]} on, "
                    "might wait for ever and is dropped: the next call draws another one"
                ) from error
            self._planner.rewind()
            raise

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
        own = {"version": STATE_VERSION, "batch_size": self._batch_size, "paid": self._paid}
        transforms = transforms_state(self._transforms)
        counts = self._statistics.state_dict()
        return {**own, **counts, "planner": self._planner.state_dict(), "transforms": transforms}

    def _load(self, state: Any, replace: Callable[[Sequence[Change]], None] = replace_attributes) -> None:
        """Go on from a state where `replace` replaces the attributes that it is given, else from where it was."""
        with self._lock:
            self._check_open()
            state = as_arrays(state)
            counts = own_state(state, self._batch_size, self._store.uuid)
            self._before = self._planner.target.distribution.place(), transforms_state(self._transforms)
            try:
                load_transforms(self._transforms, state.get("transforms") or [])
                planner = self._planner.loaded(state["planner"], self._refresh)
                statistics = self._statistics.resumed(counts["batches"], counts["steps"])
                own = {"_paid": counts["paid"], "_statistics": statistics, "_before": None}
                replace([(self._planner, vars(planner)), (self, own)])
            finally:
                self._go_back()

    def _go_back(self) -> None:
        """Take back a state that was not loaded wholly; an interrupt leaves it to the next call."""
        if self._before is None:
            return
        place, transforms = self._before
        self._planner.target.distribution.go_back(place)
        load_transforms(self._transforms, transforms)
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
            found = self._statistics.report(steps, self._seconds())
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
            self._end_threads()
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
_alive = told_of_forks(lambda sampler: setattr(sampler, "_lock", _ForeignLock()))
