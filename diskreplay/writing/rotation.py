"""The open segments of a writer, the segment of each lane, and the moves of lanes to the next segment.

Background threads make the next segment and reserve rows, so that no append waits for files.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from mmap import PAGESIZE

from diskreplay.errors import ReplayError, StorageFull, StoreNotFound
from diskreplay.ids import Ints
from diskreplay.retention.retention import Retention
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.mapping import Mapping
from diskreplay.segments.segment import DRAFT, Size, draft_segment, remove_draft
from diskreplay.segments.segment_writer import SegmentWriter
from diskreplay.workers import Job, Workers, fork_listeners
from diskreplay.writing.append_cursor import Lane
from diskreplay.writing.marker import DEFAULT_DURABILITY_S, Durability, Marker
from diskreplay.writing.sealer import Sealer

# --- the next segment, made in the background ------------------------------------------------------------------------


class Preallocator:
    """Makes the writer's next segment, with disk blocks for its first chunks, before it is needed.

    Before `acquire`, this segment has no number and is not in the folder of segments, so readers do not see it. If the
    process dies, the folder of the segment stays on disk, and its lock is free: the next process that opens the store
    with mode "a" removes the folder.

    One thread makes the segment, and ends when the segment is made. A second thread runs from its first task until
    `close`. It reserves the next rows of lanes (see `SegmentWriter.reserve_ahead`), and unmaps segments to which the
    writer appends no more.

    Concurrency: used by the thread that uses the writer.
    """

    def __init__(self, root: Root, retention: Retention) -> None:
        self._root, self._retention = root, retention
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._made: SegmentWriter | None = None
        self._reserver = Workers(1, "diskreplay-reserver")

    def request(self, writer: int, lanes: Sequence[int], size: Size, has_priority: bool = False) -> None:
        if self._thread is None and self._made is None:
            # A daemon thread: if the interpreter ends without close(), the next process removes the unfinished segment.
            self._thread = threading.Thread(
                target=self._make, args=(writer, lanes, size, has_priority), name="diskreplay-preallocator", daemon=True
            )
            self._thread.start()

    def _make(self, writer: int, lanes: Sequence[int], size: Size, has_priority: bool) -> None:
        building = f"{self._root.counters_folder}/{DRAFT}{writer}-{os.getpid()}-{time.monotonic_ns()}"
        try:
            clock = self._retention.clock()
            info, lock = draft_segment(self._root, building, writer, lanes, size, clock, has_priority)
            try:
                segment = SegmentWriter(info, lock)
                for lane in range(len(lanes)):
                    segment.reserve(lane, 0)
            except BaseException:
                remove_draft(info, lock)
                raise
            self._made = segment
        except (OSError, ReplayError):
            # The disk is full, or the folder is gone. A later call that needs a segment makes a segment itself, and
            # raises the error.
            pass

    def _wait(self) -> SegmentWriter | None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        made, self._made = self._made, None
        return made

    def acquire(self) -> SegmentWriter | None:
        """Give a number to the segment that was made in advance, move the segment into the store, and return it.

        Returns None if no segment was made in advance, or if it cannot be moved into the store. Then the caller makes a
        segment itself: this may succeed, or raises the error. If the segment is still being made, the call waits for
        it.

        Raises StoreLocked if another process has held the store lock for a minute, and StoreNotFound if the store was
        deleted or replaced since it was opened.
        """
        segment = self._wait()
        if segment is None:
            return None
        try:
            segment.place(self._retention.place(segment.info))
        except BaseException as error:
            self._remove(segment)
            if isinstance(error, OSError) and not isinstance(error, StoreNotFound):
                return None
            raise
        return segment

    def discard(self) -> bool:
        """Delete the segment that was made or is being made in advance; return whether there was one.

        The result is also True for a segment that did not fit on the disk: the blocks that it took are free now.
        """
        if os.getpid() != self._pid:
            return False  # a forked child's copy: the segment belongs to the parent
        begun = self._thread is not None
        segment = self._wait()
        if segment is not None:
            self._remove(segment)
        return begun or segment is not None

    def unmap(self) -> None:
        if self._made is not None:
            self._made.release()

    def reserve_ahead(self, segment: SegmentWriter, lanes: Ints) -> None:
        segment.begin_reserving()
        self._reserver.begin(Job(lambda: segment.reserve_ahead(lanes)))

    def unmap_later(self, held: list[Mapping]) -> None:
        """Unmap chunks of a segment in the background, because this takes milliseconds per chunk.

        The list ``held`` must have the only references to the mappings of the chunks. If no thread can be started, the
        chunks are unmapped at once.
        """
        self._reserver.begin(Job(held.clear))

    def close(self) -> None:
        self.discard()
        self._reserver.close()

    def _remove(self, segment: SegmentWriter) -> None:
        segment.close()
        remove_draft(segment.info, segment.lock)


# --- the segment of each lane ----------------------------------------------------------------------------------------

# A lane without appends keeps an older segment open. When the newest segment has _MOST_TARGETS times the rows of a full
# segment, the lane's episode is cut.
_MOST_TARGETS = 16

# A segment for one episode of unknown length has chunks of 256 rows.
_UNKNOWN = Size(256)
# {number of rows: the minimum number of bytes of a chunk with at least this many rows}. Each chunk is a file, and a
# file takes as much time as thousands of steps. Chunks of less than 128 rows have no minimum: if a whole segment was in
# one page, damage to this page would destroy all rows.
_LEAST_BYTES = {128: PAGESIZE, 1024: 128 << 10}

# If a quarter of the newest segment was filled in less than this many seconds, the next segment is not made in the
# background. It would not be ready before the newest segment is full.
LEAST_QUARTER_S = 0.05


# A forked child unmaps the segments of its parent's writers, because a deleted segment takes disk space while it is
# mapped.
_alive = fork_listeners(lambda rotation: rotation.unmap())


class Rotation:
    """The open segments of one writer: at most two, or one per lane with ``segment_steps="episode"``.

    ``cut`` is a function that cuts a lane's open episode. Concurrency: as for `EpisodeWriter`.
    """

    def __init__(
        self,
        root: Root,
        lanes: list[Lane],
        retention: Retention,
        sealer: Sealer,
        cut: Callable[[Lane], None],
    ) -> None:
        self._root, self._retention, self._sealer = root, retention, sealer
        self._lanes, self._cut = lanes, cut
        self.segment_per_episode = root.segment_steps == "episode"
        self._target = layout.target_rows(
            1 if self.segment_per_episode else len(lanes),
            root.step_bytes,
            root.limits.capacity,
            root.limits.capacity_bytes,
            root.segment_steps,
        )
        self._most_lane_rows = layout.most_lane_rows(len(lanes))
        self.has_priority = False  # whether new segments get the array of priorities
        self._first_number: int | None = None
        self.newest: SegmentWriter | None = None
        self.preallocator = Preallocator(root, retention)
        self._has_preallocated = False  # whether `preallocate` has nothing left to do for `newest`
        self._newest_since = 0.0
        self.by_number: dict[int, SegmentWriter] = {}
        self._members: dict[int, set[Lane]] = {}  # {segment number: the lanes that write to the segment}
        _alive.add(self)
        self.changes = 0  # how many times a segment was opened or released
        self.waits_for_sealing = False  # whether segments were submitted for sealing since the last flush
        self.failure: Exception | None = None  # an error of a mark
        # Held while `failure` changes, and the writer refuses calls or accepts them. Signal handlers take it again.
        self.failing = threading.RLock()
        self._seals = True
        self._marker: Marker | None = None
        self._refuse_calls: Callable[[], Callable[[], None] | None] = lambda: None

    @property
    def open(self) -> list[SegmentWriter]:
        return list(self.by_number.values())

    def begin_marking(
        self, marker: Marker, durability: Durability, refuse_calls: Callable[[], Callable[[], None] | None]
    ) -> None:
        """Make published rows durable in the background, until `abandon`.

        ``refuse_calls`` is a weak reference to a function that is called if a mark fails.
        """
        if durability != "none":
            self._marker, self._refuse_calls = marker, refuse_calls
            marker.add(self, DEFAULT_DURABILITY_S if durability == "episode" else float(durability))

    def fail(self, error: Exception) -> None:
        with self.failing:
            if self.failure is None or isinstance(self.failure, StorageFull):  # no later error hides a failed sync
                self.failure = error
            if (refuse_calls := self._refuse_calls()) is not None:
                refuse_calls()

    def check_failure(self) -> None:
        """Raise the error of a mark, if there is one other than StorageFull."""
        if self.failure is not None and not isinstance(self.failure, StorageFull):
            raise self.failure
        for segment in self.open:  # an interrupt may have come before `fail`
            segment.check_marks()

    # --- the end of a segment ----------------------------------------------------------------------------------------

    def has_to_end(self, segment: SegmentWriter) -> bool:
        """Return whether the open episodes in a segment must be cut, so that the segment can be sealed."""
        newest = self.newest
        if newest is not None and segment is not newest:
            return self._holds(newest, 1)
        return self._holds(segment, 2) and self._may_leave(segment)

    def _holds(self, segment: SegmentWriter, targets: int) -> bool:
        return segment.total_rows >= targets * self._target or segment.most_rows >= targets * self._most_lane_rows

    def has_room_for_episode(self) -> bool:
        newest = self.newest
        return newest is not None and not self._is_full(newest, 1)

    def _is_full(self, segment: SegmentWriter, rows: int) -> bool:
        if self._holds(segment, 1):
            return True
        total, most = segment.total_rows, segment.most_rows
        return total > 0 and (total + rows > 2 * self._target or most + rows > 2 * self._most_lane_rows)

    def _older_lanes(self) -> list[Lane]:
        newest = self.newest
        return [] if newest is None else [lane for n, m in self._members.items() if n != newest.number for lane in m]

    def row_limits(self) -> tuple[int, int]:
        """Return the arguments ``limit`` and ``begin_limit`` of an `AppendCursor`, for a writer with one lane.

        When the next row is ``limit`` or later, call `preallocate` and `has_to_end` before each step. When the next row
        is ``begin_limit`` or later, call `assign_segment` before a step that begins an episode.
        """
        if self.segment_per_episode:
            return 2 * self._target, 1
        limit = 2 * self._target if self._has_preallocated else max(1, self._target // 4)
        return limit, min(limit, self._target)

    def begin_priorities(self) -> None:
        for segment in self.open:
            self._add_priority(segment)
        self.has_priority = True

    def _add_priority(self, segment: SegmentWriter) -> None:
        if layout.PRIORITY not in segment.columns:
            self._retention.add_priority(segment.add_priority)

    # --- moving ------------------------------------------------------------------------------------------------------

    def assign_segment(self, lane: Lane, rows: int) -> None:
        """Move a lane without an open episode to a segment with room for ``rows`` rows, if needed."""
        segment = lane.segment
        if self.segment_per_episode:
            if segment is None or segment.rows[0]:
                size = Size(layout.ceil_power_of_two(rows), rows) if rows > 1 else _UNKNOWN
                self._move(lane, self._open([lane.number], size))
            return
        newest = self.newest
        # At most two segments may be open. While lanes write to the older segment, this lane moves to the newest, even
        # to a full one. Open episodes in the older segment are cut at the next appends of their lanes.
        if newest is None or (self._is_full(newest, rows) and self._may_leave(newest)):
            newest = self._begin_next()
        self._move(lane, newest)

    def _may_leave(self, newest: SegmentWriter) -> bool:
        """Return whether the segment after ``newest`` may be opened."""
        return self._holds(newest, _MOST_TARGETS) or not self._older_lanes()

    def _begin_next(self) -> SegmentWriter:
        """Open the next segment, cut the episodes in the older segment, and move all lanes without an open episode."""
        for straggler in [lane for lane in self._older_lanes() if lane.open]:
            resumes_at = straggler.pending
            self._cut(straggler)
            straggler.continues, straggler.resumes_at = True, resumes_at
        newest = self.newest = self._open([lane.number for lane in self._lanes], self._size())
        self._has_preallocated, self._newest_since = False, time.monotonic()
        for lane in self._lanes:
            if not lane.open:
                self._move(lane, newest)
        return newest

    def preallocate(self) -> None:
        newest = self.newest
        if self._has_preallocated or newest is None or 4 * newest.total_rows < self._target:
            return
        self._has_preallocated = True
        if self._first_number is not None and time.monotonic() - self._newest_since >= LEAST_QUARTER_S:
            self.preallocator.request(self._first_number, newest.info.lanes, self._size(), self.has_priority)

    def _size(self) -> Size:
        # The disk blocks of a chunk are reserved together with the first row. A chunk has only a quarter of the
        # segment's rows, so that few reserved blocks stay unused.
        rows = layout.floor_power_of_two(self._target // len(self._lanes) // 4)
        if len(self._lanes) > layout.CLOSE_LANES:
            close = layout.floor_power_of_two(layout.CLOSE_ROWS // len(self._lanes))
            return Size(min(rows, max(close, layout.LEAST_CLOSE_ROWS)))
        return Size(rows, least_bytes=max((least for some, least in _LEAST_BYTES.items() if rows >= some), default=0))

    def _open(self, lanes: list[int], size: Size) -> SegmentWriter:
        segment = None if self.segment_per_episode else self.preallocator.acquire()
        if segment is None:
            info, lock = self._retention.new_segment(self._first_number, lanes, size, self.has_priority)
            segment = SegmentWriter(info, lock, in_blocks=size.rows is not None)
        elif self.has_priority:
            try:
                self._add_priority(segment)  # `request` may have been called before `begin_priorities`
            except BaseException:
                segment.close()
                self._hand_over(segment)
                raise
        if self._first_number is None:
            self._first_number = segment.number
        self._members[segment.number] = set()
        self.by_number[segment.number] = segment
        self.changes += 1
        return segment

    def _move(self, lane: Lane, segment: SegmentWriter) -> None:
        if lane.segment is segment:
            return
        before, at = lane.segment, lane.at
        lane.segment, lane.cursor = segment, None
        lane.at = segment.info.lanes.index(lane.number) if self.segment_per_episode else lane.number
        self._members[segment.number].add(lane)
        if before is not None:
            before.note_left(at)
            self._members[before.number].discard(lane)
            if not self._members[before.number]:
                self._leave(before)

    def _leave(self, segment: SegmentWriter, *, seal: bool = True, ends: bool = False) -> None:
        """Close a segment that no lane writes to; submit it to the `Sealer`, or release its lock if ``seal`` is False.

        The chunks of a segment with several lanes are unmapped in the background. If ``ends`` is True, the writer is
        being closed, and the chunks are unmapped at once.

        If an interrupt ends a call, it is safe to call again.
        """
        self.changes += 1
        if self._marker is not None and seal:
            self._marker.leave(self, segment)
        held = segment.close()
        if len(segment.info.lanes) > 1 and not ends:
            self.preallocator.unmap_later(held)
        del held
        if seal:
            self.waits_for_sealing = True
            self._hand_over(segment)
        else:
            segment.lock.release()
        # The segment is removed last: after an interrupt, the segment is still in `open`, and this method is called
        # again.
        self._members.pop(segment.number, None)
        self.by_number.pop(segment.number, None)

    def _hand_over(self, segment: SegmentWriter) -> None:
        """Submit a closed segment to the `Sealer`, with the function that publishes its delayed rows."""
        self._sealer.submit(segment.info, segment.lock, publish_delayed=segment.publish_delayed)

    def unmap(self) -> None:
        """Unmap all segments in a forked child, after the child's copies of the locks were released."""
        self._marker = None  # the marker belongs to the parent
        for lane in self._lanes:
            lane.cursor = None
        for segment in self.by_number.values():
            segment.release()
        self.preallocator.unmap()

    def abandon(self, *, seal: bool = True) -> None:
        """Close every segment as it is, even with open episodes, and submit it to the `Sealer`.

        With ``seal=False``, the segments are not submitted: their locks are released, and the next process seals them.
        The call may be repeated after an interrupt. After a call with ``seal=False``, no later call submits segments.
        """
        seal = self._seals = self._seals and seal
        if self._marker is not None and not seal:
            self._marker.remove(self)  # marking must end before another process can seal a segment
        try:
            for lane in self._lanes:
                lane.segment = lane.cursor = None
            for segment in self.open:
                self._leave(segment, seal=seal, ends=True)
            self.preallocator.close()
        finally:
            if self._marker is not None:
                self._marker.remove(self)
