"""Threads that make large batches ahead of their delivery, while the trainer computes."""

from collections.abc import Iterable, Sequence
from functools import partial
from threading import Lock
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.errors import SegmentGone
from diskreplay.sampling.batch import Batch
from diskreplay.sampling.gatherer import Destination, Gathered, Gatherer
from diskreplay.sampling.planner import ATTEMPTS, Plan, Planner, check_draw_fields
from diskreplay.sampling.transforms import Pipeline, Transform
from diskreplay.schema.schema import Schema
from diskreplay.store.store import Store
from diskreplay.views.base import Pages, View, copy_threads, offsets
from diskreplay.workers import Job, Workers

# A thread makes a batch only if the batch has at least this number of bytes. A smaller batch is made in the call that
# delivers it, because to wake another thread would be slower.
LEAST_FOR_A_THREAD = 256 << 10


class Prefetcher:
    """Makes planned batches in threads. Not thread-safe: a sampler calls it under its lock.

    Batches are made in the order of their plans. One thread requests the pages of each plan from disk as soon as it
    gets the plan. A second thread waits for the pages, and copies the rows with the gatherer's own threads. If the
    system cannot start threads, the caller of `wait` makes the batch. A lock guards the gatherer, which is not
    thread-safe.
    """

    def __init__(self, gatherer: Gatherer) -> None:
        self.gatherer = gatherer
        self._asking = Workers(1, "diskreplay-read")
        self._making = Workers(1, "diskreplay-gather")
        self._gathering = Lock()
        self.seconds_waiting = 0.0

    def begin(self, plans: Iterable[Plan], first: Plan) -> None:
        """Start to make the batches of these plans, except batches that an earlier call has started.

        `first` is the plan of the batch to deliver. If no earlier call has started this batch, the caller makes the
        batch.
        """
        for plan in plans:
            if plan.gathered is None and plan is not first:
                disk = self.gatherer.disk
                asked = None
                if disk.cold:
                    asked = self._asking.begin(Job(partial(disk.ask, plan.snapshot, plan.draw.ids)))
                make = partial(_make, self._gathering, self.gatherer, plan, asked)
                # If an interrupt comes before this assignment, the job still runs, and a later call starts another job
                # for the plan.
                plan.gathered = self._making.begin(Job(make))

    def wait(self, gathered: Job[Gathered | Batch]) -> Gathered | Batch:
        """Return a job's result (a `Batch` if the job applied transforms), or raise the job's exception."""
        started = perf_counter()
        found = gathered.result()
        self.seconds_waiting += perf_counter() - started
        return found

    def close(self) -> None:
        for threads in (self._making, self._asking, self.gatherer):
            threads.close()


def _make(gathering: Lock, gatherer: Gatherer, plan: Plan, asked: Job[Pages] | None) -> Gathered | Batch:
    pages = None if asked is None else asked.result()
    with gathering:
        gathered = gatherer.gather(plan.snapshot, plan.draw.ids, plan.entropy, plan.draw_info, pages)
        # Transforms on a CUDA device run on the stream of the call that delivers the batch.
        if plan.prepared is None or gatherer.device_copy is not None:
            return gathered
        return gatherer.transformed(gathered, plan.prepared, plan.entropy)


class Makers:
    """Makes batches of one view: ahead of their delivery (`prefetcher`), or when they are delivered (`gatherer`).

    `prefetcher` is None if `prefetch` is 0, the view is not `prefetchable`, or batches are too small. `planned` is the
    number of batches whose ids are drawn: the next batch, and the batches made ahead.
    """

    def __init__(
        self,
        view: View,
        schema: Schema,
        fields: Sequence[str] | None,
        destination: Destination,
        transforms: Sequence[Transform],
        prefetch: int,
        size: int,
    ) -> None:
        arguments = view, schema, fields, destination
        self._pipeline = Pipeline([(one, one.bind(schema, view)) for one in transforms])
        self.gatherer = Gatherer(*arguments, threads=copy_threads(reserved=0), pipeline=self._pipeline)
        self.prefetcher: Prefetcher | None = None
        self.view, self.item_steps, self._destination = view, view.item_steps, destination
        self.planned = 1
        if prefetch and view.prefetchable and _is_large(self.gatherer, size):
            # One processor is left to the trainer.
            ahead = Gatherer(*arguments, threads=copy_threads(reserved=1), pipeline=self._pipeline)
            self.prefetcher, self.planned = Prefetcher(ahead), 1 + prefetch

    def batch_of(
        self, ids: NDArray[np.int64], store: Store, planner: Planner, fields: Sequence[str] | None = None
    ) -> Batch:
        """Return the batch of exactly these ids, untransformed; try again if a segment is evicted meanwhile."""
        gatherer = self.gatherer
        if fields is not None:
            gatherer = Gatherer(self.view, store.schema, fields, self._destination)
        reader, drawn = gatherer.reader, list(gatherer.draw_fields)
        check_draw_fields(drawn, planner.target.distribution)
        for _ in range(ATTEMPTS):
            try:
                snapshot = store.snapshot
                if not reader.fill_checks or len(snapshot.evictions):
                    reader.check(snapshot, ids)
                draw_info = planner.current_draw_info(drawn, ids, snapshot) if drawn else None
                return gatherer.to_batch(gatherer.gather(snapshot, ids, draw_info=draw_info))
            except SegmentGone:
                store.refresh()  # with the new snapshot, an evicted id raises InvalidIndex
        raise SegmentGone("segments were evicted faster than they could be read")

    def prepare(self, plans: Iterable[Plan]) -> None:
        """If a plan lacks `prepared`, give it the transforms' statistics. `plans` are in draw order."""
        for plan in plans:
            if plan.prepared is None:
                plan.prepared = self._pipeline.prepare(plan.snapshot)

    def transformed(self, plan: Plan, gathered: Gathered | Batch, weights: NDArray[np.float32] | None) -> Batch:
        """Return the transformed batch of a plan, with these weights; a thread may have transformed it already."""
        batch = gathered
        if not isinstance(batch, Batch):
            batch = self.gatherer.transformed(batch, plan.prepared, plan.entropy)
        if weights is None or "weight" not in batch:
            return batch
        ones = batch["weight"]
        return batch.replaced({"weight": ones * torch.as_tensor(weights, device=ones.device)})

    def seconds(self) -> dict[str, float]:
        gatherers, waiting = [self.gatherer], 0.0
        if self.prefetcher is not None:
            gatherers.append(self.prefetcher.gatherer)
            waiting = self.prefetcher.seconds_waiting
        return {
            "seconds_waiting": waiting,
            "seconds_reading": sum(gatherer.disk.seconds for gatherer in gatherers),
            "seconds_gathering": sum(gatherer.seconds_gathering for gatherer in gatherers),
            "seconds_copying": sum(gatherer.seconds_copying for gatherer in gatherers),
            "seconds_transforming": sum(gatherer.seconds_transforming for gatherer in gatherers),
        }

    def close(self) -> None:
        if self.prefetcher is not None:
            self.prefetcher.close()
        self.gatherer.close()


def _is_large(gatherer: Gatherer, size: int) -> bool:
    reader = gatherer.reader
    if reader.depends_on_ids or gatherer.device_copy is not None:
        return True
    return offsets(reader.leaves, size)[1] >= LEAST_FOR_A_THREAD
