"""Batches of planned ids: made when they are asked for, or before, large ones in a thread."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice, takewhile
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

# Bytes. A smaller batch is made faster than another thread can be told to make it.
LEAST_FOR_A_THREAD = 256 << 10
# Small batches that are made ahead are made as many in one go as take no more than this: it stays in a core's caches.
MOST_AT_ONCE = 512 << 10


class Delivery:
    """Makes the batches of one view. One thread at a time: a sampler's, under its lock.

    What is made ahead is made in the order of its plans, and no more of it is in memory than there are plans. Small
    batches are made by the caller, several at once. For large ones there are two threads, which start with the first:
    one has the disk read what a plan needs as soon as there is the plan, the other waits for that and copies. A third
    copies half of what is large and was not made ahead.

    Parameters
    ----------
    view, schema, fields, destination
        See `Gatherer`.
    size : int
        Items of a batch that is made ahead.
    ahead : int
        How many batches are made ahead at most; 0: `begin` must not be called.

    Attributes
    ----------
    at_once : int
        How many batches are made in one go, where they hold nothing that is drawn beside their ids; 1: large ones.
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
            # Not for what a thread makes ahead: the trainer has use for the other processor meanwhile.
            self.reader.helper = self._copying = helping_thread()
        self._in_thread = destination.courier is not None or hasattr(self.reader, "leaves_for")
        nbytes = offsets(self.reader.leaves, size)[1]
        in_caches = 1 if self._in_thread or destination.device.type != "cpu" else MOST_AT_ONCE // max(nbytes, 1)
        self.at_once = max(1, min(ahead + 1, in_caches))
        self._asking = ThreadPoolExecutor(1, "diskreplay-read")
        self._making = ThreadPoolExecutor(1, "diskreplay-gather")
        self.seconds_waiting = 0.0

    def begin(self, due: Plan, later: Iterable[Plan]) -> None:
        """Make ahead what comes behind the batch that is due, where that was not begun; small ones with that batch."""
        if self.at_once == 1 or due.entropy is not None:
            for plan in later:
                if plan.gathered is None:
                    plan.gathered = self._begin(plan)
        elif due.gathered is None:
            self._make_at_once(list(islice(later, self.at_once - 1)), due)

    def _make_at_once(self, later: list[Plan], due: Plan) -> None:
        """Make the batch that is due and those behind it that are as large; all have been planned from one snapshot."""
        size = len(due.draw.ids)
        alike = [due, *takewhile(lambda plan: len(plan.draw.ids) == size, later)]
        ids = np.concatenate([plan.draw.ids for plan in alike])
        with suppress(Exception):  # which is raised again when the batch is due
            for plan, made in zip(alike, self._now.gather_batches(due.snapshot, ids, len(alike)), strict=True):
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
