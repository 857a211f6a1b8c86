"""The sampler: a store, a view and a distribution multiplied into batches."""

import threading
from collections.abc import Callable, Sequence
from numbers import Integral
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.errors import InvalidIndex
from diskreplay.loading.batch import Batch
from diskreplay.loading.planner import ATTEMPTS, Plan, Planner
from diskreplay.loading.ring import Ring
from diskreplay.loading.statistics import Statistics
from diskreplay.sampling.base import Distribution
from diskreplay.sampling.uniform import Uniform
from diskreplay.store.snapshot import SegmentGone
from diskreplay.views.base import Reader, View, nested


class Sampler:
    """Draws ids of a store with a distribution and gathers what a view says they mean.

    Any thread may call any method; calls of one sampler run one after the other. Several samplers may share a store.

    Parameters
    ----------
    store : Store
        Where the steps are. The sampler does not close it.
    view : View
        What an id means, `Transitions(...)` for example.
    distribution : Distribution
        Which ids are drawn; None is `Uniform()`.
    batch_size : int
        Items of a batch.
    device : torch.device or str or None
        Where batches are delivered; None is the CPU.
    prefetch : int
        Batches whose ids are drawn ahead. Batch i is drawn inside the call that delivers batch i - prefetch, and holds
        what the store held then.
    seed : int or None
        Makes the draws a function of the seed and the calls; None is different each time.
    fields : sequence of str or None
        What a batch holds, beside index and weight: "obs" with all below it, "obs/image" alone. None is all.
    where : callable or None
        A predicate over episodes; steps of others are not drawn. It is asked once of an ended episode, and of an open
        one at every refresh that changed something.
    rank, world_size : int
        This trainer's share: of all ids, those whose position modulo `world_size` is `rank`. Shares do not overlap.
    refresh : bool
        Whether each batch looks for new steps first. If not, call `store.refresh()`.
    debug : bool
        Overwrite the memory of batches that are gone, so that a pointer kept without its tensor shows.

    Raises
    ------
    ValueError
        An argument is none of these, or the view or `fields` names something that the store has not.
    """

    def __init__(
        self,
        store: Any,
        view: View,
        distribution: Distribution | None = None,
        *,
        batch_size: int = 256,
        device: torch.device | str | None = None,
        prefetch: int = 0,
        seed: int | None = None,
        fields: Sequence[str] | None = None,
        where: Callable[[Any], bool] | None = None,
        rank: int = 0,
        world_size: int = 1,
        refresh: bool = True,
        debug: bool = False,
    ) -> None:
        self._batch_size = _int("batch_size", batch_size, 1)
        self._prefetch = _int("prefetch", prefetch, 0)
        world_size, rank = _int("world_size", world_size, 1), _int("rank", rank, 0)
        if rank >= world_size:
            raise ValueError(f"rank must be less than world_size, {world_size}, not {rank}")
        if where is not None and not callable(where):
            raise ValueError(f"where must be a function of an episode, not {where!r}")
        self._store = store
        self._fields = fields
        self._refresh = bool(refresh)
        self._device = torch.device("cpu" if device is None else device)
        self._lock = threading.RLock()
        self._ring = Ring(debug=debug)
        self._statistics = Statistics()
        self._closed = False
        self._use(_view(view), view.reader(store.schema, fields))
        self._planner = Planner(
            store, view, _distribution(distribution), seed=seed, where=where, rank=rank, world_size=world_size
        )

    def _use(self, view: View, reader: Reader) -> None:
        self._view, self._reader = view, reader
        self._paths = [leaf.path for leaf in reader.leaves]
        self._names = [path[0] for path in self._paths] if all(len(path) == 1 for path in self._paths) else None
        self._weight = self._paths.index(("weight",))

    @property
    def view(self) -> View:
        """What an id means. Setting it changes what the next batch holds; batches drawn ahead are drawn again."""
        return self._view

    @view.setter
    def view(self, view: View) -> None:
        reader = _view(view).reader(self._store.schema, self._fields)
        with self._lock:
            self._planner.aim(view, self._planner.distribution)
            self._use(view, reader)

    @property
    def distribution(self) -> Distribution:
        """Which ids are drawn. Setting it counts from the next batch on; batches drawn ahead are drawn again."""
        return self._planner.distribution

    @distribution.setter
    def distribution(self, distribution: Distribution) -> None:
        with self._lock:
            self._planner.aim(self._view, _distribution(distribution))

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
            No step is sampleable.
        ValueError
            `batch_size` is no positive int; `beta` is given to a distribution without weights.
        """
        size = self._batch_size if batch_size is None else _int("batch_size", batch_size, 1)
        with self._lock:
            self._check_open()
            distribution = self._planner.distribution
            if beta is not None and not distribution.weighted:
                raise ValueError(f"beta means nothing to {distribution}, whose weights are all 1: leave it out")
            started = perf_counter()
            if size == self._batch_size:
                plan = self._planner.next(size, self._prefetch, self._refresh)
            else:
                plan = self._planner.draw(size, self._refresh)
            planned = perf_counter()
            batch = self._deliver(plan, size, beta)
            self._statistics.count(size, started, planned, perf_counter())
            return batch

    def gather(self, ids: Any) -> Batch:
        """Gather the batch of exactly these ids, in their order; all weights are 1.

        Parameters
        ----------
        ids : array_like of int or Tensor
            Ids, one axis.

        Raises
        ------
        InvalidIndex
            An id never existed, was evicted, or cannot be sampled with this view.
        """
        wanted = _ids(ids)
        with self._lock:
            self._check_open()
            if self._refresh:
                self._store.refresh()
            for _ in range(ATTEMPTS):
                try:
                    return self._gathered(self._store.snapshot, wanted, None)
                except SegmentGone:
                    self._store.refresh()  # which makes an evicted id an InvalidIndex
            raise SegmentGone("segments were evicted faster than they could be read")

    def _deliver(self, plan: Plan, size: int, beta: float | None) -> Batch:
        for _ in range(ATTEMPTS):
            try:
                weights = self._planner.distribution.weigh(plan.draw, beta)
                return self._gathered(plan.snapshot, plan.draw.ids, weights)
            except SegmentGone:
                plan = self._planner.draw(size, refresh=True)
        raise SegmentGone("segments were evicted faster than they could be read")

    def _gathered(self, snapshot: Any, ids: NDArray[np.int64], weights: NDArray[np.float32] | None) -> Batch:
        """Gather into free memory, wrap it, and copy it to the device."""
        slot = self._ring.take(self._reader.leaves, len(ids))
        self._reader.fill(snapshot, ids, slot.block)
        arrays = slot.block.arrays
        if weights is None:
            arrays[self._weight].fill(1.0)
        else:
            arrays[self._weight][:] = weights
        batch = Batch(dict(zip(self._names, arrays)) if self._names else nested(self._paths, arrays))  # noqa: B905
        if self._device.type == "cpu":
            return batch
        started = perf_counter()
        batch = batch.to(self._device)
        self._statistics.copied(perf_counter() - started)
        return batch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self.sample()

    def stats(self) -> dict[str, float]:
        """Return what the sampler has done so far.

        `batches` and `steps` delivered; `steps_per_second` since the first batch was asked for; `replay_ratio`, steps
        delivered per step that is in the store now; `seconds_planning`, `seconds_gathering` and `seconds_copying`.
        """
        with self._lock:
            return self._statistics.report(len(self._store.snapshot))

    def close(self) -> None:
        """Let go of memory. Batches stay valid; the store stays open."""
        with self._lock:
            self._closed = True
            self._planner.aim(self._view, self._planner.distribution)
            self._ring.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this sampler is closed")


def _int(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, not {value!r}")
    return int(value)


def _view(view: Any) -> View:
    if not (hasattr(view, "runs") and hasattr(view, "reader")):
        raise ValueError(f"view must be a view such as Transitions(), not {view!r}")
    checked: View = view
    return checked


def _distribution(distribution: Any) -> Distribution:
    if distribution is None:
        return Uniform()
    if not (hasattr(distribution, "draw") and hasattr(distribution, "weigh")):
        raise ValueError(f"distribution must be one such as Uniform(), not {distribution!r}")
    checked: Distribution = distribution
    return checked


def _ids(ids: Any) -> NDArray[np.int64]:
    if isinstance(ids, torch.Tensor):
        ids = ids.detach().cpu().numpy()
    given = np.asarray(ids)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidIndex(f"ids must be integers with one axis, not {given.dtype}{list(given.shape)}")
    if given.dtype.kind == "u" and given.size and int(given.max()) > np.iinfo(np.int64).max:
        raise InvalidIndex(f"id {given.max()} never existed")
    return np.ascontiguousarray(given, np.int64)
