"""Writes rows of one segment in three stages: reserve, write, publish."""

import threading
from collections.abc import Callable, Iterator, Mapping as Named, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import ReplayError, StorageFull
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.layout import CLOSE_LANES, WIDE_ROW_BYTES
from diskreplay.segments.files.commit import Counters, CountersByPosition, open_lane_counter
from diskreplay.segments.files.durable import keeps_reservations
from diskreplay.segments.files.locks import Lock
from diskreplay.segments.files.mapping import Mapping
from diskreplay.segments.marks import DurableRows
from diskreplay.segments.segment import SegmentInfo
from diskreplay.segments.segment_column import MOST_DESCRIPTORS, Column, Ints, Places, find_places

_NEVER = 1 << 62

Kernel = Callable[..., Any]

# Maps a field to one of its chunks, as a 1-d array of rows, and to an offset for each lane. In the chunk, row r of a
# lane has index r + offset.
Window = dict[str, tuple[NDArray[Any], Ints]]


def _numbers(array: Counters) -> Any:
    """Return an array as a memoryview, because reading or writing a single number takes half as long as in NumPy."""
    return array.data


class SegmentWriter:
    """Writes rows to one open segment.

    `reserve` reserves rows, `write` writes them, and `publish` makes them visible to readers. For arrays of episode
    fields, `reserve_values` and `write_values` do the same. `publish` receives the lanes with new values.

    ``in_blocks``: each call writes many rows, with pwrite, because mapping chunks would take longer.

    Concurrency: one thread of one process, which holds the segment's lock. This class never takes that lock itself.
    """

    def __init__(self, info: SegmentInfo, lock: Lock, *, in_blocks: bool = False) -> None:
        self.info, self.number, self.lock = info, info.number, lock
        lanes = len(info.lanes)
        self._in_blocks = in_blocks and len(info.arrays) <= MOST_DESCRIPTORS
        # On some file systems, a write to a reserved block can find the disk full. In mapped memory, such a write would
        # kill the process, so all values are written with `pwrite` there.
        self._keeps = keeps_reservations(info.path)
        every = {leaf: self._column(leaf) for leaf in info.arrays}
        self.columns = {leaf: column for leaf, column in every.items() if not info.arrays[leaf].is_of_episodes}
        self._value_columns = {leaf: column for leaf, column in every.items() if leaf not in self.columns}
        self._open_counters()
        self._lane_rows = np.zeros(lanes, np.int64)
        # Setting an element of this memoryview is one aligned 8-byte write.
        self.rows = _numbers(self._lane_rows)
        self.final_rows = np.full(lanes, -1)  # by lane: the newest row that has no step; -1: none
        self.total_rows = 0
        self._values = np.zeros(lanes, np.int64)  # by lane: the number of rows in arrays of episode fields
        self._reserved_values = np.zeros(lanes, np.int64)
        root = info.root
        # How many steps take as many bytes as the values of one episode; 0 if segments are limited by steps.
        self._value_steps = 0 if isinstance(root.segment_steps, int) else root.value_bytes // root.step_bytes
        self._reserved = np.zeros(lanes, np.int64)  # by lane: each field has disk blocks for this many rows
        self._least_reserved = 0
        # No lane has more than `most_rows` rows. `_window` has, for each field, a mapped chunk with the next two rows
        # of every lane. `_window` is valid while these rows come before row `_window_stop` of each lane.
        self.every_lane = np.arange(lanes)
        self.most_rows = 0
        self._window_stop = 0
        self._window: Window = {}
        self.reserved = _numbers(self._reserved)
        # No lane has gained more than `_growth` rows since this object was made. When `_growth` reaches `_ahead_at`,
        # rows are reserved ahead.
        self._growth, self._ahead_at = 0, 0
        # By lane: see `note_left`. A value only changes to True. A thread that reads an old value keeps chunks mapped.
        self._has_left = np.zeros(lanes, np.bool_)
        self._reserving = threading.Lock()  # held while a background thread or the appending thread reserves rows
        self._is_needed = False  # whether the appending thread waits for rows
        self._marking = threading.Lock()  # held while any thread makes a mark
        self._durable: DurableRows | None = None
        self._marked = np.zeros(lanes, np.int64)  # by lane: the number of rows that marks cover
        self._failure: Exception | None = None  # see `has_failed`
        self._is_closed = False

    def _column(self, leaf: str) -> Column:
        array = self.info.arrays[leaf]
        by_position = self._in_blocks or array.row_bytes >= WIDE_ROW_BYTES or not self._keeps
        return Column(self.info, array, by_position, self._keeps)

    def _open_counters(self) -> None:
        lanes = len(self.info.lanes)
        self.committed = open_lane_counter(f"{self.info.path}/{layout.COMMITTED}", lanes)
        # `late`: on a full disk, a write to this counter is delayed and raises no error. While the write is delayed,
        # the newest step has no next observation.
        self.observed = open_lane_counter(f"{self.info.path}/{layout.OBSERVED}", lanes, late=True)

    def reserve(self, lane: int, row: int, stop: int = 0) -> None:
        """Reserve disk blocks for ``row`` of a lane in every field, and if possible for the rows up to ``stop``.

        Raises StorageFull if the disk has no room. Committed rows are untouched, and the call may be repeated.
        """
        if row < self.reserved[lane]:
            return
        self._is_needed = True
        with self._reserving:
            self._is_needed = False
            _reserve(self.columns, lane, row, stop, self._lane_rows, self._staying())
            self._note_reserved()
        self._ahead_at = self._growth

    def _note_reserved(self) -> None:
        reserved = np.min([column.reserved for column in self.columns.values()], axis=0)
        # The old array is replaced, not changed, because the appending thread may be reading it.
        self._reserved, self.reserved, self._least_reserved = reserved, _numbers(reserved), int(reserved.min())

    def note_left(self, lane: int) -> None:
        """Record that a lane moved to another segment for good: its chunks may be unmapped."""
        self._has_left[lane] = True

    def _staying(self) -> Ints:
        return np.flatnonzero(~self._has_left)

    @property
    def wants_reserving(self) -> bool:
        """Whether `reserve_ahead` may have rows to reserve, because lanes have grown. False for a single lane."""
        return self._growth >= self._ahead_at and len(self.every_lane) > 1

    def begin_reserving(self) -> None:
        self._ahead_at = _NEVER

    def reserve_ahead(self, lanes: Ints) -> None:
        """Reserve the rows that some lanes will need soon.

        On a full disk, the call returns early without an error: the later call of `reserve` that needs these rows
        raises the error. The call also returns early if a call of `reserve` is waiting.

        Concurrency: any thread, also while another thread appends.
        """
        growth, rows = self._growth, self._lane_rows.copy()
        until = _NEVER
        try:
            with self._reserving:
                staying = self._staying()
                lanes = lanes[~self._has_left[lanes]]
                for column in self.columns.values():
                    while not (self._is_closed or self._is_needed) and column.reserve_ahead(lanes, rows):
                        self._note_reserved()
                    if self._is_closed or self._is_needed:
                        return
                    # Chunks are unmapped here and not in the appending thread, because unmapping takes a millisecond.
                    column.unmap_unused(rows, staying)
                    until = min(until, int(column.rows_until_wanting(lanes, rows).min(initial=_NEVER)))
        except (OSError, ReplayError):
            return
        self._ahead_at = growth + until

    def reserve_rows(self, lane: int, row: int, stop: int) -> None:
        while row < stop:
            self.reserve(lane, row, stop)
            row = self.reserved[lane]

    def reserve_values(self, lane: int) -> None:
        """Reserve disk blocks for the values of a lane's next episode; errors as for `reserve`."""
        row = int(self._values[lane])
        if row < self._reserved_values[lane]:
            return
        _reserve(self._value_columns, lane, row, 0, self._values, self._staying())
        np.min([column.reserved for column in self._value_columns.values()], axis=0, out=self._reserved_values)

    def lacks_values(self) -> NDArray[np.bool_]:
        return self._values >= self._reserved_values

    def reserve_next(self, lanes: NDArray[np.bool_], count: Ints | int) -> None:
        while len(short := np.flatnonzero(lanes & self.lacks_room(count))):
            lane = int(short[0])
            self.reserve(lane, self.reserved[lane])

    def has_room(self) -> bool:
        """Return whether the next two rows of every lane are reserved; the result may be False although they are."""
        if self.most_rows + 2 > self._least_reserved:
            self.most_rows = int(self._lane_rows.max())
        return self.most_rows + 2 <= self._least_reserved

    def lacks_room(self, count: Ints | int) -> NDArray[np.bool_]:
        return self._lane_rows + count > self._reserved

    def rows_of(self, lanes: Ints | None) -> Ints:
        return self._lane_rows.copy() if lanes is None else self._lane_rows[lanes]

    @overload
    def write(self, lanes: int, rows: int, fields: Named[str, Any]) -> None: ...
    @overload
    def write(
        self,
        lanes: Ints | None,
        rows: Ints,
        fields: Named[str, NDArray[Any]],
        *,
        picked: Ints | None = None,
        kernel: Kernel | None = None,
    ) -> None: ...
    def write(
        self,
        lanes: Any,
        rows: Any,
        fields: Named[str, Any],
        *,
        picked: Ints | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        """Write rows in several fields; the rows must be reserved, and are invisible before `publish`.

        If ``lanes`` is one lane, the value of a field is an array ``(n, *shape)`` of successive rows, from row ``rows``
        on. The value may also be a single row: the row's bytes, or a number or 0-d array that fits the dtype.

        If ``lanes`` is an array of lanes, or None for all lanes, one row is written to each lane. Row ``rows[i]`` of
        lane ``lanes[i]`` becomes row ``picked[i]`` of a field's value; it is one of the lane's next two rows. Without
        ``picked``, the value of each field has one row per lane. ``kernel`` is `kernels.copying.write_lanes` or None;
        it writes many lanes at once in the fields that are mapped.

        Raises StorageFull if the file system keeps no reservations and has no room; the call may be repeated.
        """
        if isinstance(rows, int):
            for leaf, value in fields.items():
                column = self.columns[leaf]
                if isinstance(value, np.ndarray):
                    column.write_block(lanes, rows, value)
                else:
                    column.write_row(lanes, rows, value)
            return
        if kernel is not None and len(rows) > CLOSE_LANES:
            fields = self._write_mapped(lanes, rows, fields, picked, kernel)
            if not fields:
                return
        window = self._find_window()
        places: dict[int, list[Places]] = {}
        base_before = at = None
        for leaf, value in fields.items():
            column = self.columns[leaf]
            items = column.items(value) if picked is None else column.items(value)[picked]
            if leaf in window:
                chunk, base = window[leaf]
                if base is not base_before:
                    base_before, at = base, rows + (base if lanes is None else base[lanes])
                chunk[at] = items
                continue
            if column.shift not in places:
                places[column.shift] = find_places(self.every_lane if lanes is None else lanes, rows, column.shift)
            column.write_lanes(places[column.shift], items)

    def _write_mapped(
        self, lanes: Ints | None, rows: Ints, fields: Named[str, NDArray[Any]], picked: Ints | None, kernel: Kernel
    ) -> dict[str, NDArray[Any]]:
        """Write rows with `copying.write_lanes`, and return the fields that it cannot write.

        These are fields with a row in a chunk that is not mapped, or with values of another dtype, or another number of
        rows.
        """
        lanes = self.every_lane if lanes is None else lanes
        picked = self.every_lane[: len(rows)] if picked is None else picked
        first, last, least = int(rows.min()), int(rows.max()), int(picked.max()) + 1
        found: list[tuple[Column, NDArray[Any], list[Mapping | None]]] = []
        used: dict[int, list[int]] = {}
        others: dict[str, NDArray[Any]] = {}
        for leaf, value in fields.items():
            column = self.columns[leaf]
            items, chunks = column.items(value), column.mapped_chunks(rows, first, last, used)
            if chunks is None or items.dtype != column.item or not least <= len(items) == len(value):
                others[leaf] = value
            else:
                found.append((column, items, chunks))
        heads: list[int] = []
        bases: list[int] = []
        for column, items, chunks in found:
            place = 5 * len(found) + len(bases)
            heads += first >> column.shift, column.shift, column.row_bytes, items.ctypes.data, place
            bases += [0 if chunk is None else chunk.address for chunk in chunks]
        kernel(lanes, rows, picked, np.array(heads + bases, np.int64), len(found))
        return others

    @overload
    def write_values(self, lanes: int, fields: Named[str, Any]) -> None: ...
    @overload
    def write_values(self, lanes: Ints, fields: Named[str, NDArray[Any]]) -> None: ...
    def write_values(self, lanes: Any, fields: Named[str, Any]) -> None:
        """Write the values of the episode that ends in a lane, or in each of some lanes; a missing field gets zeros.

        The rows must be reserved with `reserve_values`. Values and errors are as for `write`. The values are invisible
        before `publish`.
        """
        rows = self._values[lanes]
        for leaf, column in self._value_columns.items():
            value = fields.get(leaf)
            if isinstance(lanes, int):
                column.write_row(lanes, int(rows), column.zero if value is None else value)
            else:
                items = np.zeros(len(lanes), column.item) if value is None else column.items(value)
                column.write_lanes(find_places(lanes, rows, column.shift), items)

    def _find_window(self) -> Window:
        """Return the `Window` for the next two rows of all lanes; a field is missing if no mapped chunk has them."""
        if self.most_rows + 1 < self._window_stop:
            return self._window
        low, high = int(self._lane_rows.min()), int(self._lane_rows.max())
        self.most_rows, self._window_stop, self._window = high, _NEVER, {}
        bases: dict[int, Ints] = {}
        for leaf, column in self.columns.items():
            chunk = low >> column.shift
            # The result is valid until a lane reaches the end of one of the chunks. If a field is missing, the result
            # is valid only for the next two rows.
            inside = (high + 1) >> column.shift == chunk and chunk in column.chunks
            column.close_before(low)
            self._window_stop = min(self._window_stop, (chunk + 1) << column.shift if inside else high + 2)
            if inside:
                base = bases.setdefault(column.shift, (self.every_lane - chunk) << column.shift)
                self._window[leaf] = column.chunks[chunk], base
        return self._window

    @overload
    def publish(self, lanes: int, rows: int, added: int, observed: bool = False, valued: int | None = None) -> None: ...
    @overload
    def publish(
        self,
        lanes: Ints | None,
        rows: Ints,
        added: int,
        observed: bool | NDArray[np.bool_],
        valued: Ints | None,
        *,
        late: bool,
    ) -> None: ...
    def publish(
        self, lanes: Any, rows: Any, added: int, observed: Any = False, valued: Any = None, *, late: bool = False
    ) -> None:
        """Make the first ``rows`` rows of a lane visible, or the first ``rows[i]`` rows of each ``lanes[i]``.

        ``lanes`` may be None for all lanes. The rows must have been written. ``added`` is the number of new rows in
        total: any number in one lane, one or two in each of several lanes. ``observed`` tells whether the observation
        after these rows becomes visible too: one bool for all lanes, or one for each. ``valued`` is the lane, or the
        lanes, with new values of an episode to make visible.

        ``late``: other lanes of the same step are visible already, so this call must not fail. On a full disk, the rows
        become visible later. Without ``late``, raises StorageFull if the file system keeps no reservations and has no
        room; no new row is visible.
        """
        every, lanes = lanes is None, self.every_lane if lanes is None else lanes
        if late and isinstance(self.committed, CountersByPosition):
            self.committed.store(lanes, rows, late=True)
        else:
            # The numbers are assigned by index, even for all lanes: NumPy then writes each number as 8 aligned bytes.
            # So no reader sees a part of a number.
            self.committed[lanes] = rows
        self.total_rows += added
        self._lane_rows[... if every else lanes] = rows
        if valued is not None:
            self.note_values(valued)
        if isinstance(rows, int):
            self.most_rows = max(self.most_rows, rows)
            self._growth += added
        else:
            grown = 1 if added == len(lanes) else 2
            self.most_rows += grown
            self._growth += grown
        # Readers read `observed` first: if it is one more than `committed`, the observation that follows the committed
        # rows is visible.
        if observed is True:
            self.observed[lanes] = rows + 1
        elif observed is not False:
            self.observed[lanes[observed]] = rows[observed] + 1

    def note_values(self, lanes: int | Ints) -> None:
        """Record that the last written values of a lane, or of each of some lanes, are published."""
        self._values[lanes] += 1
        self.total_rows += self._value_steps * (1 if isinstance(lanes, int) else len(lanes))

    def publish_delayed(self, *, late: bool = False) -> None:
        """Publish the rows that calls of `publish` with ``late`` left unpublished because the disk was full.

        Raises StorageFull if the disk is still full and ``late`` is False. Only the appending thread may call this.
        """
        if isinstance(self.committed, CountersByPosition):
            self.committed.store_owed(late=late)
        if isinstance(self.observed, CountersByPosition):
            self.observed.store_owed(late=True)

    def mark(self) -> None:
        """Make all published rows durable, and append a mark of these rows to the segment's log.

        Concurrency: any thread of the process, also while another thread appends. Raises StorageFull if the disk has no
        room for the mark: all published rows are durable, and the call may be repeated. If the system raises an
        OSError, it is unknown which rows are durable, and every later call raises the same error.
        """
        with self._marking:
            self.check_marks()
            rows = self.committed.copy()
            try:
                self._log().mark(rows)
            except Exception as error:
                self._note_failure(error)
                raise
            self._marked = rows

    def _note_failure(self, error: Exception) -> None:
        # An error without a number is not the system's: a signal handler may raise TimeoutError.
        is_of_system = isinstance(error, OSError) and error.errno is not None
        if is_of_system and not isinstance(error, (StorageFull, FileNotFoundError)):
            self._failure = self._failure or error

    def check_marks(self) -> None:
        """Raise the error of a mark that failed: see `has_failed`."""
        if self._failure is not None:
            raise self._failure

    @property
    def has_failed(self) -> bool:
        """Whether the system refused a mark, but not for room. After a failed sync, a later sync proves nothing."""
        return self._failure is not None

    @property
    def has_unmarked(self) -> bool:
        """Whether published rows exist that no mark covers, and a mark may be made. Any thread may read this."""
        return self._failure is None and bool((self.committed.copy() != self._marked).any())

    def _log(self) -> DurableRows:
        """Return the object that makes marks; the caller must keep it alive, because `close` may drop it."""
        if self._is_closed:
            return DurableRows(self.info, is_left=True)  # closes its files when the caller drops it
        durable = self._durable = self._durable or DurableRows(self.info, self._prefault)
        if self._is_closed:  # another thread has called `close` meanwhile
            self._durable = None
        return durable

    def _prefault(self, leaf: str) -> None:
        """Touch the pages of an array's next rows after a sync, because a sync write-protects these pages.

        If the pages were not touched, the next step of all lanes would cause a page fault for each lane.
        """
        with suppress(OSError):  # the disk is full; touching the pages only saves time
            if (column := self.columns.get(leaf)) is not None:
                column.prefault(np.where(self._has_left, _NEVER, self._lane_rows))

    def add_priority(self) -> None:
        """Add the array of initial priorities, with zeros in all existing rows.

        Errors as for `SegmentInfo.with_priority`. Only the appending thread may call this. The call waits for a mark in
        progress, because each mark covers all arrays.
        """
        with self._marking:
            self.info = self.info.with_priority(int(self._lane_rows.max()))
            self._durable = None
        with self._reserving:
            column = self.columns[layout.PRIORITY] = self._column(layout.PRIORITY)
            column.begin(self._lane_rows)
            self._note_reserved()
        self._window_stop = 0

    def place(self, info: SegmentInfo) -> None:
        """Use ``info`` from now on: it has the number and the folder that `place_segment` gave this segment."""
        self.info, self.number = info, info.number
        for column in (*self.columns.values(), *self._value_columns.values()):
            column.info = info
        if not self._keeps:
            self._open_counters()  # a `CountersByPosition` opens its file by path, and the path has changed

    def close(self) -> list[Mapping]:
        """Release every chunk and return the mappings, as `release` does; keep the lock, because sealing needs it."""
        self._is_closed = True
        with self._reserving:  # nothing is reserved after this
            return self.release()

    def release(self) -> list[Mapping]:
        """Release every chunk, and return the mappings of the chunks: each is unmapped when nothing refers to it.

        No other thread may reserve rows during the call: `close` waits for such threads, and a forked child has only
        one thread.
        """
        self._is_closed = True
        self._window, self._window_stop, self._durable = {}, 0, None
        self.publish_delayed(late=True)
        every = (*self.columns.values(), *self._value_columns.values())
        return [mapping for column in every for mapping in column.close()]


def _reserve(columns: Named[str, Column], lane: int, row: int, stop: int, rows: Ints, staying: Ints) -> None:
    first = int(rows[staying].min())
    for column in columns.values():
        column.reserve(lane, row, stop, rows)
        column.unmap_unused(rows, staying)
        column.close_before(first)


def mark_together(segments: Sequence[SegmentWriter], sync: Callable[[], None]) -> dict[SegmentWriter, Exception]:
    """Make a mark of each segment as `SegmentWriter.mark` does, but with only two syncs, of the whole file system.

    ``sync`` makes all earlier writes durable. Returns the errors of segments that could not be marked. Raises the
    errors of ``sync``; after such an error, it is unknown which rows are durable. One thread at a time may call this.
    """
    failed: dict[SegmentWriter, Exception] = {}

    def sync_all() -> None:
        try:
            sync()
        except Exception as error:
            for segment in segments:
                segment._note_failure(error)
            raise

    with ExitStack() as marking:
        for segment in segments:
            marking.enter_context(segment._marking)
        logs = {}
        for segment in segments:
            rows = segment.committed.copy()
            with _noted(segment, failed):
                segment.check_marks()
                log = segment._log()
                log.prepare(rows)
                logs[segment] = log, rows
        sync_all()
        for segment, (log, rows) in logs.items():
            with _noted(segment, failed):
                log.append(rows)
        sync_all()
        for segment, (log, rows) in logs.items():
            if segment not in failed:
                log.finish(rows)
                segment._marked = rows
    return failed


@contextmanager
def _noted(segment: SegmentWriter, failed: dict[SegmentWriter, Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        segment._note_failure(error)
        failed[segment] = error
