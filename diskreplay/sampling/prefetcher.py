"""Large batches made ahead by threads, while the trainer computes."""

from collections.abc import Iterable
from functools import partial
from threading import Lock
from time import perf_counter

from diskreplay.sampling.batch import Batch
from diskreplay.sampling.gatherer import Gathered, Gatherer
from diskreplay.sampling.planner import Plan
from diskreplay.views.base import Pages, offsets
from diskreplay.workers import Job, Workers

# Bytes. A smaller batch is made faster than another thread can be told to make it: it is made when it is asked for.
# To make eight small ones at once saved a seventh of their time, and every eighth call paid for all.
LEAST_FOR_A_THREAD = 256 << 10


class Prefetcher:
    """Makes batches of plans in threads. One thread at a time calls it: a sampler's, under its lock.

    They are made in the order of their plans, and no more of them are in memory than there are plans. There are two
    threads, which start with the first plan: one has the disk read what a plan needs as soon as there is the plan, the
    other waits for that and copies, with the gatherer's own threads. Where the system has no room for these, the caller
    makes a batch when it waits for it. The gatherer is not thread-safe: it makes one batch at a time, under a lock.
    """

    def __init__(self, gatherer: Gatherer) -> None:
        self.gatherer = gatherer
        self._asking = Workers(1, "diskreplay-read")
        self._making = Workers(1, "diskreplay-gather")
        self._gathering = Lock()
        self.seconds_waiting = 0.0

    def begin(self, plans: Iterable[Plan]) -> None:
        """Begin to make the batches of these plans, where that was not begun."""
        for plan in plans:
            if plan.gathered is None:
                disk = self.gatherer.disk
                asked = None
                if disk.cold:
                    asked = self._asking.begin(Job(partial(disk.ask, plan.snapshot, plan.draw.ids)))
                make = partial(_make, self._gathering, self.gatherer, plan, asked)
                # Last: what an interrupt keeps from being noted here is made, and made again.
                plan.gathered = self._making.begin(Job(make))

    def wait(self, gathered: Job[Gathered | Batch]) -> Gathered | Batch:
        """Return the batch of a plan that was begun, a `Batch` if transforms are done, or raise what the thread did."""
        started = perf_counter()
        found = gathered.result()
        self.seconds_waiting += perf_counter() - started
        return found

    def close(self) -> None:
        """End the threads; what they have not begun is dropped."""
        for threads in (self._making, self._asking, self.gatherer):
            threads.close()


def is_large(gatherer: Gatherer, size: int) -> bool:
    """Whether it is worth it to have a thread make batches of so many items."""
    reader = gatherer.reader
    if reader.depends_on_ids or gatherer.device_copy is not None:
        return True
    return offsets(reader.leaves, size)[1] >= LEAST_FOR_A_THREAD


def _make(gathering: Lock, gatherer: Gatherer, plan: Plan, asked: Job[Pages] | None) -> Gathered | Batch:
    pages = None if asked is None else asked.result()
    with gathering:
        gathered = gatherer.gather(plan.snapshot, plan.draw.ids, plan.entropy, plan.told, pages)
        # What computes on a CUDA device does so on the stream of the call that delivers.
        if plan.prepared is None or gatherer.device_copy is not None:
            return gathered
        return gatherer.transformed(gathered, plan.prepared, plan.entropy)
