"""The background thread that seals segments, many at once, so that no collector waits for a disk."""

import threading
import time
from collections.abc import Callable
from typing import Any

from diskreplay.errors import StorageFull, StoreLocked
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.durable import NotWritten
from diskreplay.segments.files.locks import Lock, try_lock
from diskreplay.segments.sealing import seal_segments
from diskreplay.segments.segment import DAMAGE, SegmentInfo, read_segment
from diskreplay.writing.marker import Marker

# Each waiting segment holds the descriptor of its lock.
_MOST_WAITING = 128
# With a segment for each episode, syncs one after the other would slow down their making: a batch waits for more.
_FULL_BATCH = 64
_BATCH_WAIT_S = 0.5
# Between two looks for whether whoever holds a segment's lock has sealed it: it syncs, which takes as long at least.
_POLL_S = 0.01


class Sealer:
    """Seals segments handed to it, in the order they came.

    ``after`` is called when some were. ``marker`` marks those that writers have left, until they are sealed.

    Concurrency: any thread of the process that made it. The thread lives while there is work.
    """

    def __init__(self, root: Root, after: Callable[[], Any], marker: Marker) -> None:
        self._root, self._after, self._marker = root, after, marker
        self._condition = threading.Condition()
        self._waiting: list[tuple[SegmentInfo, Lock]] = []
        self._batch_wait_s = _BATCH_WAIT_S if root.segment_steps == "episode" else 0.0
        self._seals_at_once = False
        self._runner: int | None = None  # the thread that is sealing
        self._error: BaseException | None = None
        # Until there is room again. The locks of marked segments are held until `drain` has raised the error.
        self._postponed: dict[int, tuple[SegmentInfo, Lock | None, StorageFull]] = {}
        self._is_behind = False  # there was no room for what follows sealing
        self._of_dead_writers: set[int] = set()
        self._delayed: dict[int, Callable[[], None]] = {}  # by the number of the segment

    def submit(
        self,
        info: SegmentInfo,
        lock: Lock,
        *,
        of_dead_writer: bool = False,
        publish_delayed: Callable[[], None] | None = None,
    ) -> None:
        """Take over an unsealed segment with its lock; waits while too many are waiting.

        ``publish_delayed`` publishes what a full disk has delayed, or raises StorageFull where there is still no room.
        It is called before the segment is sealed.

        One that was submitted before is not sealed again: after an interrupt nobody knows whether it was.

        One of a dead writer that turns out to be damaged is left as it is: readers warn of it, and repair is asked for
        by hand. What this process wrote itself has to be sealed.
        """
        if of_dead_writer:
            self._of_dead_writers.add(info.number)
        if publish_delayed is not None:
            self._delayed[info.number] = publish_delayed
        with self._condition:
            while len(self._waiting) >= _MOST_WAITING and self._runner is not None:
                self._condition.wait()
            self._waiting.append((info, lock))
            self._condition.notify_all()
            if self._runner is None:
                self._begin()

    def _begin(self) -> None:
        """Start a thread that seals, unless another one does; a signal's handler may raise before it is there."""
        try:
            # A daemon: an interpreter that ends without close() leaves the segment to the next process.
            threading.Thread(target=self._run, name="diskreplay-sealer", daemon=True).start()
        except RuntimeError:
            # The interpreter is ending, which from Python 3.12 on begins no threads: seal in this one.
            self._seals_at_once = True
            self._run()

    def drain(self) -> None:
        """Wait until everything is sealed.

        Raises StorageFull where there is no room to seal a segment: it is whole and readable, the next call tries
        again, as does the next open with mode "a". Raises OSError with what else kept a segment from being sealed; the
        next process with write access, or the next open with mode "a", seals it.
        """
        self._resubmit_postponed()
        with self._condition:
            self._seals_at_once = True
            self._condition.notify_all()
            while self._runner != threading.get_ident() and self._has_work:
                if self._runner is None:
                    self._begin()
                if self._has_work:  # else this thread has done it: there is no other one
                    self._condition.wait()
        self._seals_at_once = False
        with self._condition:
            postponed = self._postponed
            self._postponed = {number: (info, None, full) for number, (info, _, full) in postponed.items()}
        # Others may seal what is postponed as soon as there is room.
        self._release([(info, lock) for info, lock, _ in postponed.values() if lock is not None])
        error, self._error = self._error, None
        if error is not None:
            # Once more: while the store was being deleted, it was still there.
            raise self._root.reason(error)
        for _, _, full in postponed.values():
            raise full
        if self._is_behind:
            self._after()
            self._is_behind = False

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting) or self._runner is not None

    def _resubmit_postponed(self) -> None:
        with self._condition:
            postponed, self._postponed = self._postponed, {}
        for info, lock, _ in postponed.values():
            if lock is None:
                self._resubmit(info)
            else:
                self.submit(info, lock)

    def _resubmit(self, info: SegmentInfo) -> None:
        """Submit a segment again whose lock was released, or wait for whoever seals it meanwhile."""
        try:
            while not read_segment(self._root, info.number).sealed:
                if (lock := try_lock(info.lock_path)) is None:
                    time.sleep(_POLL_S)
                elif read_segment(self._root, info.number).sealed:
                    lock.release()
                else:
                    self.submit(info, lock)
                    return
        except FileNotFoundError:
            pass  # sealed, and evicted

    def _seal(self, batch: list[tuple[SegmentInfo, Lock]], held: set[int]) -> None:
        """Seal segments; add the numbers of postponed ones that keep their locks to ``held``."""
        infos = [info for info, _ in batch]
        self._marker.wait()
        try:
            self._seal_published(infos)
        except NotWritten as error:
            self._error = self._root.reason(error)
        except BaseException:
            # One of them may be damaged; the others need not wait for it.
            for info, lock in batch:
                try:
                    if not read_segment(self._root, info.number).sealed:
                        self._seal_published([info])
                except BaseException as error:
                    if isinstance(error, DAMAGE) and info.number in self._of_dead_writers:
                        continue
                    reason = self._root.reason(error)
                    if isinstance(reason, StorageFull):
                        # A segment of a dead writer is not marked. There may be more of these than descriptors.
                        is_held = self._marker.has_left(info.number)
                        held |= {info.number} if is_held else set()
                        with self._condition:
                            self._postponed[info.number] = info, lock if is_held else None, reason
                    else:
                        self._error = reason

    def _seal_published(self, infos: list[SegmentInfo]) -> None:
        """Seal segments after all that was appended to them is published."""
        for info in infos:
            if (publish_delayed := self._delayed.get(info.number)) is not None:
                publish_delayed()
                del self._delayed[info.number]
        seal_segments(self._root, infos, is_waited_for=lambda: self._seals_at_once)

    def _release(self, some: list[tuple[SegmentInfo, Lock]]) -> None:
        self._marker.forget([info.number for info, _ in some])
        for _, lock in some:
            lock.release()

    def _run(self) -> None:
        """Seal until nothing is waiting, unless another thread does so."""
        with self._condition:
            if self._runner is not None:
                return
            self._runner = threading.get_ident()
        try:
            self._seal_all()
        finally:
            with self._condition:
                if self._runner == threading.get_ident():
                    self._runner = None
                self._condition.notify_all()

    def _seal_all(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._seals_at_once or len(self._waiting) >= _FULL_BATCH, self._batch_wait_s
                )
                batch, self._waiting = self._waiting, []
                self._condition.notify_all()
                if not batch:
                    self._runner = None  # before the condition is free: who submits from now on begins another one
                    return
            held = set[int]()
            try:
                self._seal(list({lock: (info, lock) for info, lock in batch if not lock.is_released}.values()), held)
            finally:
                # By now `drain` may have submitted a postponed segment again, with its lock.
                self._release([(info, lock) for info, lock in batch if info.number not in held])
            try:
                self._after()
            except StoreLocked:
                pass  # what has to leave does so after the next segment
            except StorageFull:
                self._is_behind = True  # `drain` tries again: there may be room by then
            except BaseException as error:
                self._error = self._root.reason(error)
