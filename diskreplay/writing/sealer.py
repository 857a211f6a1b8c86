"""The background thread that seals segments, many at once, so that no collecting process waits for a disk."""

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

# The maximum number of segments in the queue. Each segment in the queue keeps a lock file open.
_MOST_WAITING = 128
# Sealing begins when the queue has _FULL_BATCH segments, or after _BATCH_WAIT_S seconds. Syncing each of many short
# segments alone would slow writers down.
_FULL_BATCH = 64
_BATCH_WAIT_S = 0.5
# While another process holds a segment's lock, this process checks every _POLL_S seconds whether the segment is sealed.
_POLL_S = 0.01


class Sealer:
    """Seals segments in the order of their submission.

    ``after`` is called after each batch of segments. ``marker`` marks a segment of a writer of this process until the
    segment is sealed, even if the writer appends no more to it.

    Concurrency: any thread of the process that made the `Sealer`. The sealing thread runs while there is work.
    """

    def __init__(self, root: Root, after: Callable[[], Any], marker: Marker) -> None:
        self._root, self._after, self._marker = root, after, marker
        self._condition = threading.Condition()
        self._waiting: list[tuple[SegmentInfo, Lock]] = []
        self._batch_wait_s = _BATCH_WAIT_S if root.segment_steps == "episode" else 0.0
        self._seals_at_once = False
        self._runner: int | None = None  # the thread that is sealing
        self._error: BaseException | None = None
        # {segment number: (attributes, lock, error)} of segments that could not be sealed, as the disk was full. If a
        # segment is still marked, its lock is held until `drain` raises the error. The lock is None if it was released.
        self._postponed: dict[int, tuple[SegmentInfo, Lock | None, StorageFull]] = {}
        self._is_behind = False  # whether the last call of ``after`` found no room on the disk
        self._of_dead_writers: set[int] = set()
        self._delayed: dict[int, Callable[[], None]] = {}  # the ``publish_delayed`` of each segment, by segment number

    def submit(
        self,
        info: SegmentInfo,
        lock: Lock,
        *,
        of_dead_writer: bool = False,
        publish_delayed: Callable[[], None] | None = None,
    ) -> None:
        """Add an unsealed segment and its lock to the queue; if the queue is full, first wait for room in it.

        ``publish_delayed`` is called before the segment is sealed. This function publishes rows that were not published
        because the disk was full, or raises StorageFull if the disk still has no room.

        The caller may submit a segment twice, for example after an interrupt: it is sealed once.

        A damaged segment of a dead writer stays unsealed: readers warn of it, and ``diskreplay repair`` mends it.
        If a segment that this process wrote cannot be sealed, `drain` raises the error.
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
        """Start a thread that seals the segments in the queue, and ends at once if another thread is sealing."""
        try:
            # A daemon thread: if the interpreter ends without close(), the next process seals the segment.
            threading.Thread(target=self._run, name="diskreplay-sealer", daemon=True).start()
        except RuntimeError:
            # The interpreter is ending and, from Python 3.12 on, starts no more threads: seal in this thread.
            self._seals_at_once = True
            self._run()

    def drain(self) -> None:
        """Wait until all submitted segments are sealed.

        Raises StorageFull if the disk has no room to seal a segment. The rows of the segment are intact and readable.
        The next call, or the next process that opens the store with mode "a", tries to seal the segment again. If a
        segment was not sealed because of another error, `drain` raises this error. The next process that opens the
        store with mode "a" seals the segment.
        """
        self._resubmit_postponed()
        self.wait()
        with self._condition:
            postponed = self._postponed
            self._postponed = {number: (info, None, full) for number, (info, _, full) in postponed.items()}
        # The locks are released, so that any process can seal the postponed segments when the disk has room.
        failed = self._release([(info, lock) for info, lock, _ in postponed.values() if lock is not None])
        with self._condition:
            for number in failed:
                self._postponed.pop(number, None)
        error, self._error = self._error, None
        if error is not None:
            # If the store was deleted, `reason` returns an error that says so.
            raise self._root.reason(error)
        for _, _, full in postponed.values():
            raise full
        if self._is_behind:
            self._after()
            self._is_behind = False

    def wait(self) -> None:
        """Wait until no segment is in the queue. Errors are left to `drain`."""
        with self._condition:
            self._seals_at_once = True
            self._condition.notify_all()
            while self._runner != threading.get_ident() and self._has_work:
                if self._runner is None:
                    self._begin()
                if self._has_work:  # `_begin` may have sealed all segments in this thread
                    self._condition.wait()
        self._seals_at_once = False

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
        """Lock a segment and submit it again, or wait until another process has sealed the segment."""
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
            pass  # the segment was sealed and evicted

    def _seal(self, batch: list[tuple[SegmentInfo, Lock]], held: set[int]) -> None:
        """Seal a batch of segments; add to ``held`` the number of each segment that stays unsealed and locked."""
        self._marker.wait()
        for failed in [info.number for info, _ in batch if self._marker.has_failed(info.number)]:
            self._delayed.pop(failed, None)  # the segment is not sealed, and its writer raises the error of the mark
        batch = [(info, lock) for info, lock in batch if not self._marker.has_failed(info.number)]
        if not batch:
            return
        infos = [info for info, _ in batch]
        try:
            self._seal_published(infos)
        except NotWritten as error:
            self._error = self._root.reason(error)
        except BaseException:
            # One of the segments may be damaged: seal them one by one.
            for info, lock in batch:
                try:
                    if not read_segment(self._root, info.number).sealed:
                        self._seal_published([info])
                except BaseException as error:
                    if isinstance(error, DAMAGE) and info.number in self._of_dead_writers:
                        continue
                    reason = self._root.reason(error)
                    if isinstance(reason, StorageFull):
                        # Only segments that are still marked keep their locks. The locks of dead writers' segments are
                        # released: each lock is an open file, and there may be many locks.
                        is_held = self._marker.has_left(info.number)
                        held |= {info.number} if is_held else set()
                        with self._condition:
                            self._postponed[info.number] = info, lock if is_held else None, reason
                    else:
                        self._error = reason

    def _seal_published(self, infos: list[SegmentInfo]) -> None:
        for info in infos:
            if (publish_delayed := self._delayed.get(info.number)) is not None:
                publish_delayed()
                del self._delayed[info.number]
        seal_segments(self._root, infos, is_waited_for=lambda: self._seals_at_once)

    def _release(self, some: list[tuple[SegmentInfo, Lock]]) -> list[int]:
        failed = self._marker.forget([info.number for info, _ in some])
        for _, lock in some:
            lock.release()
        return failed

    def _run(self) -> None:
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
                    self._runner = None  # set under the lock, so that the next `submit` starts a new thread
                    return
            held = set[int]()
            try:
                self._seal(list({lock: (info, lock) for info, lock in batch if not lock.is_released}.values()), held)
            finally:
                # The locks of segments in `held` are kept, because `drain` may have submitted these segments again.
                self._release([(info, lock) for info, lock in batch if info.number not in held])
            try:
                self._after()
            except StoreLocked:
                pass  # the next batch calls `after` again
            except StorageFull:
                self._is_behind = True  # `drain` calls `after` again
            except BaseException as error:
                self._error = self._root.reason(error)
