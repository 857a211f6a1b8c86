"""Batches of planned ids: made when they are asked for, or before, large ones in a thread."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.loading.batch import Batch
from diskreplay.loading.gatherer import Destination, Gathered, Gatherer
from diskreplay.loading.planner import Plan
from diskreplay.views.base import View, offsets
from diskreplay.views.halves import helping_thread
from diskreplay.views.pages import Pages
from diskreplay.views.rollouts import Rollouts

# Bytes. A smaller batch is made faster than another thread can be told to make it.
LEAST_FOR_A_THREAD = 256 << 10
# Batches that are made ahead are made in one go where they take no more than this: so much stays in a core's caches.
MOST_TOGETHER = 512 << 10


class Delivery:
    """Makes the batches of one view. One thread at a time: a sampler's, under its lock.

    What is made ahead is made in the order of its plans, and no more of it is in memory than there are plans. There are
    two threads for it, which start with the first large batch: one has the disk read what a plan needs as soon as there
    is the plan, the other waits for that and copies. A third copies half of what is large and was not made ahead.

    Parameters
    ----------
    view, schema, fields, destination
        See `Gatherer`.
    size : int
        Items of a batch that is made ahead.
    ahead : int
        How many batches are made ahead at most; 0: `begin` will not be called.

    Attributes
    ----------
    together : bool
        Whether batches that are drawn together are made together: small ones.
    """

    def __init__(
        self,
        view: View,
        schema: Any,
        fields: Sequence[str] | None,
        destination: Destination,
        size: int,
        ahead: int,
    ) -> None:
        # Readers are not thread-safe: the one serves the caller, the other the thread.
        self._now = self._later = Gatherer(view, schema, fields, destination)
        if ahead:
            self._later = Gatherer(view, schema, fields, destination)
        self.reader = self._now.reader
        self._copying: ThreadPoolExecutor | None = None
        if hasattr(self.reader, "helper"):
            # Not for batches made ahead: the trainer has use for the other processor meanwhile.
            self.reader.helper = self._copying = helping_thread()
        self._in_thread = destination.courier is not None or hasattr(self.reader, "leaves_for")
        small = offsets(self.reader.leaves, size * (ahead + 1))[1] <= MOST_TOGETHER
        # Rollouts are given in turn and not drawn; what is relabeled depends on random numbers of each batch's own.
        only_ids = not isinstance(view, Rollouts) and getattr(view, "relabel", None) is None
        self.together = ahead > 0 and small and only_ids and not self._in_thread
        self._asking = ThreadPoolExecutor(1, "diskreplay-read")
        self._making = ThreadPoolExecutor(1, "diskreplay-gather")
        self.seconds_waiting = 0.0

    def begin(self, due: Plan, later: Iterable[Plan]) -> None:
        """Make ahead what comes behind the batch that is due, where that was not begun; or all, if they are small."""
        if not self.together:
            for plan in later:
                if plan.gathered is None:
                    plan.gathered = self._begin(plan)
        elif due.gathered is None:
            self._make_together([due, *later])

    def _make_together(self, plans: Sequence[Plan]) -> None:
        """Make the batches of as many plans as are alike: those behind them wait until one of them is due."""
        snapshot, size = plans[0].snapshot, len(plans[0].draw.ids)
        alike = list(takewhile(lambda plan: plan.snapshot is snapshot and len(plan.draw.ids) == size, plans))
        ids = np.concatenate([plan.draw.ids for plan in alike])
        with suppress(Exception):  # which is raised again when the batch is due
            for plan, made in zip(alike, self._now.gather_together(snapshot, ids, len(alike)), strict=True):
                plan.gathered = made

    def _begin(self, plan: Plan) -> Future[Gathered] | Gathered | None:
        ids = plan.draw.ids
        if not self._in_thread and offsets(self.reader.leaves, len(ids))[1] < LEAST_FOR_A_THREAD:
            with suppress(Exception):  # which is raised again when the batch is due
                return self._now.gather(plan.snapshot, ids, plan.entropy)
            return None
        asked = self._asking.submit(self._later.disk.ask, plan.snapshot, ids) if self._later.disk.cold else None
        return self._making.submit(_make, self._later, plan.snapshot, ids, plan.entropy, asked)

    def batch(self, plan: Plan, weights: NDArray[np.float32] | None) -> Batch:
        """Return the batch of a plan, after waiting for it if it was begun.

        Raises
        ------
        SegmentGone
            A segment has been evicted since it was planned.
        Exception
            What the thread raised.
        """
        gathered = plan.gathered
        if gathered is None:
            gathered = self._now.gather(plan.snapshot, plan.draw.ids, plan.entropy)
        elif isinstance(gathered, Future):
            started = perf_counter()
            gathered = gathered.result()
            self.seconds_waiting += perf_counter() - started
        return self._now.show(gathered, weights)

    def gather(self, snapshot: Any, ids: NDArray[np.int64]) -> Batch:
        """Return the batch of these ids as they are stored; see `Gatherer.gather`."""
        return self._now.show(self._now.gather(snapshot, ids))

    def seconds(self) -> dict[str, float]:
        """Return where time went; see `Sampler.stats`."""
        both = {self._now, self._later}
        return {
            "seconds_waiting": self.seconds_waiting,
            "seconds_reading": sum(gatherer.disk.seconds for gatherer in both),
            "seconds_gathering": sum(gatherer.seconds_gathering for gatherer in both),
            "seconds_copying": sum(gatherer.seconds_copying for gatherer in both),
        }

    def close(self) -> None:
        """End the threads; what they have not begun is dropped."""
        for thread in (self._asking, self._making, self._copying):
            if thread is not None:
                thread.shutdown(wait=True, cancel_futures=True)


def _make(
    gatherer: Gatherer, snapshot: Any, ids: NDArray[np.int64], entropy: int | None, asked: Future[Pages] | None
) -> Gathered:
    return gatherer.gather(snapshot, ids, entropy, None if asked is None else asked.result())
