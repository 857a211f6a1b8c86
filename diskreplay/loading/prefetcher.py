"""Large batches made ahead by threads, while the trainer computes."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from diskreplay.loading.batch import Batch
from diskreplay.loading.gatherer import Gathered, Gatherer
from diskreplay.loading.planner import Plan
from diskreplay.views.base import offsets
from diskreplay.views.page_ranges import Pages

# Bytes. A smaller batch is made faster than another thread can be told to make it: it is made when it is asked for.
LEAST_FOR_A_THREAD = 256 << 10


class Prefetcher:
    """Makes batches of plans in threads. One thread at a time calls it: a sampler's, under its lock.

    They are made in the order of their plans, and no more of them are in memory than there are plans. There are two
    threads, which start with the first plan: one has the disk read what a plan needs as soon as there is the plan, the
    other waits for that and copies, with the gatherer's own threads. Nobody else uses the gatherer: it is not
    thread-safe.
    """

    def __init__(self, gatherer: Gatherer) -> None:
        self.gatherer = gatherer
        self._asking = ThreadPoolExecutor(1, "diskreplay-read")
        self._making = ThreadPoolExecutor(1, "diskreplay-gather")
        self.seconds_waiting = 0.0

    def begin(self, plans: Iterable[Plan]) -> None:
        """Begin to make the batches of these plans, where that was not begun."""
        for plan in plans:
            if plan.gathered is None:
                disk = self.gatherer.disk
                asked = self._asking.submit(disk.ask, plan.snapshot, plan.draw.ids) if disk.cold else None
                plan.gathered = self._making.submit(_make, self.gatherer, plan, asked)

    def wait(self, gathered: Future[Gathered | Batch]) -> Gathered | Batch:
        """Return the batch of a plan that was begun, a `Batch` if transforms are done, or raise what the thread did."""
        started = perf_counter()
        found = gathered.result()
        self.seconds_waiting += perf_counter() - started
        return found

    def close(self) -> None:
        """End the threads; what they have not begun is dropped."""
        for thread in (self._asking, self._making):
            thread.shutdown(wait=True, cancel_futures=True)
        self.gatherer.close()


def is_large(gatherer: Gatherer, size: int) -> bool:
    """Whether it is worth it to have a thread make batches of so many items."""
    reader = gatherer.reader
    if reader.depends_on_ids or gatherer.device_copy is not None:
        return True
    return offsets(reader.leaves, size)[1] >= LEAST_FOR_A_THREAD


def _make(gatherer: Gatherer, plan: Plan, asked: Future[Pages] | None) -> Gathered | Batch:
    pages = None if asked is None else asked.result()
    gathered = gatherer.gather(plan.snapshot, plan.draw.ids, plan.entropy, plan.told, pages)
    # What computes on a CUDA device does so on the stream of the call that delivers.
    if plan.prepared is None or gatherer.device_copy is not None:
        return gathered
    return gatherer.transformed(gathered, plan.prepared, plan.entropy)
