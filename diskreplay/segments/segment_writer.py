"""Writing rows of one segment: reserve, write, publish."""

import threading
from collections.abc import Callable, Iterator, Mapping as Named, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import ReplayError
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

# By field: the chunk as items, and what added to a lane's row gives the number of the row's item.
Window = dict[str, tuple[NDArray[Any], Ints]]


def _numbers(array: Counters) -> Any:
    """Return an array as Python's own numbers, which are read and stored in half of numpy's time."""
    return array.data


class SegmentWriter:
    """The write side of one open segment.

    Rows are reserved by `reserve`, written by `write`, and visible to readers with `publish`. A step is a row of one
    lane, an episode successive rows of one, the step of a vector one row of each of many. Values of an episode have
    rows of their own: `reserve_values`, `write_values`, and what `publish` is told has values.

    ``in_blocks`` says that rows come many at a time, which mappings do not pay for.

    Concurrency: one thread of one process, the one that holds the segment's lock. It never takes that lock itself.
    """

    def __init__(self, info: SegmentInfo, lock: Lock, *, in_blocks: bool = False) -> None:
        self.info, self.number, self.lock = info, info.number, lock
        lanes = len(info.lanes)
        self._in_blocks = in_blocks and len(info.arrays) <= MOST_DESCRIPTORS
        # Where reserved blocks are not kept, a store to mapped memory could end the process: all goes by position.
        self._keeps = keeps_reservations(info.path)
        every = {leaf: self._column(leaf) for leaf in info.arrays}
        self.columns = {leaf: column for leaf, column in every.items() if not info.arrays[leaf].is_of_episodes}
        self._value_columns = {leaf: column for leaf, column in every.items() if leaf not in self.columns}
        self._open_counters()
        self._lane_rows = np.zeros(lanes, np.int64)
        # The same as Python's own numbers. An item of such a view is one aligned 8-byte store, as numpy's is.
        self.rows = _numbers(self._lane_rows)
        self.final_rows = np.full(lanes, -1)  # the newest row of each lane that is behind the last step of an episode
        self.total_rows = 0
        self._values = np.zeros(lanes, np.int64)  # how many episodes of each lane have values
        self._reserved_values = np.zeros(lanes, np.int64)
        # What the values of an episode take, in steps: unless its rows are given, a segment is full by its bytes.
        root = info.root
        self._value_steps = 0 if isinstance(root.segment_steps, int) else root.value_bytes // root.step_bytes
        self._reserved = np.zeros(lanes, np.int64)  # rows below this have their blocks in every field
        self._least_reserved = 0
        # For many lanes at once: no lane has more rows than `most_rows`, and until one has as many as `_window_stop`
        # each field in `_window` has the next two rows of all lanes in one mapped chunk.
        self.every_lane = np.arange(lanes)
        self.most_rows = 0
        self._window_stop = 0
        self._window: Window = {}
        self.reserved = _numbers(self._reserved)
        # How far any lane may have come since the segment was opened, and at which distance more is reserved ahead.
        self._growth, self._ahead_at = 0, 0
        self._reserving = threading.Lock()  # a thread in the background reserves, and whoever needs rows at once
        self._is_needed = False  # whether rows are needed at once
        self._marking = threading.Lock()  # a thread in the background makes marks, and whoever flushes
        self._durable: DurableRows | None = None
        self._marked = np.zeros(lanes, np.int64)  # the rows of each lane that a mark covers
        self._is_closed = False

    def _column(self, leaf: str) -> Column:
        array = self.info.arrays[leaf]
        by_position = self._in_blocks or array.row_bytes >= WIDE_ROW_BYTES or not self._keeps
        return Column(self.info, array, by_position, self._keeps)

    def _open_counters(self) -> None:
        lanes = len(self.info.lanes)
        self.committed = open_lane_counter(f"{self.info.path}/{layout.COMMITTED}", lanes)
        # Late, it leaves a step without the observation behind it for a while; committed is what publishes the step.
        self.observed = open_lane_counter(f"{self.info.path}/{layout.OBSERVED}", lanes, late=True)

    def reserve(self, lane: int, row: int, stop: int = 0) -> None:
        """Make sure that ``row`` of a lane can be written in every field; rows up to ``stop`` follow at once.

        Raises StorageFull where there is no room; nothing that was committed is touched, and the call may be repeated.
        """
        if row < self.reserved[lane]:
            return
        self._is_needed = True
        with self._reserving:
            self._is_needed = False
            _reserve(self.columns, lane, row, stop, self._lane_rows)
            self._note_reserved()
        self._ahead_at = self._growth

    def _note_reserved(self) -> None:
        reserved = np.min([column.reserved for column in self.columns.values()], axis=0)
        # A new array at once: the thread that appends reads it while another one reserves.
        self._reserved, self.reserved, self._least_reserved = reserved, _numbers(reserved), int(reserved.min())

    @property
    def wants_reserving(self) -> bool:
        """Whether one of several lanes may have come so far that `reserve_ahead` has something to do."""
        return self._growth >= self._ahead_at and len(self.every_lane) > 1

    def begin_reserving(self) -> None:
        """Let `wants_reserving` be False until `reserve_ahead` is done."""
        self._ahead_at = _NEVER

    def reserve_ahead(self, lanes: Ints) -> None:
        """Reserve the rows that some lanes will need soon.

        Where there is no room this ends: the call of `reserve` that needs the rows raises the error. It also ends where
        such a call waits.

        Concurrency: any thread, also while another one appends.
        """
        growth, rows = self._growth, self._lane_rows.copy()
        until = _NEVER
        try:
            with self._reserving:
                for column in self.columns.values():
                    while not (self._is_closed or self._is_needed) and column.reserve_ahead(lanes, rows):
                        self._note_reserved()
                    if self._is_closed or self._is_needed:
                        return
                    # Not by the thread that appends: to unmap takes a millisecond.
                    column.unmap_before(int(rows.min()))
                    until = min(until, int(column.rows_until_wanting(lanes, rows).min(initial=_NEVER)))
        except (OSError, ReplayError):
            return
        # In each step a lane gets two rows at most.
        self._ahead_at = growth + until

    def reserve_rows(self, lane: int, row: int, stop: int) -> None:
        """Reserve the rows ``[row, stop)``; see `reserve`."""
        while row < stop:
            self.reserve(lane, row, stop)
            row = self.reserved[lane]

    def reserve_values(self, lane: int) -> None:
        """Make sure that values of another episode of a lane can be written; errors as for `reserve`."""
        row = int(self._values[lane])
        if row < self._reserved_values[lane]:
            return
        _reserve(self._value_columns, lane, row, 0, self._values)
        np.min([column.reserved for column in self._value_columns.values()], axis=0, out=self._reserved_values)

    def lacks_values(self, lanes: Any) -> Any:
        """Tell whether values of another episode of a lane cannot be written yet, or of each of some lanes."""
        return self._values[lanes] >= self._reserved_values[lanes]

    def reserve_next(self, lanes: Ints, count: Ints | int) -> None:
        """Reserve the next ``count`` rows of each of some lanes; see `reserve`."""
        while len(short := lanes[self.lacks_room(lanes, count)]):
            lane = int(short[0])
            self.reserve(lane, self.reserved[lane])

    def has_room(self) -> bool:
        """Tell whether the next two rows of every lane are reserved; in doubt, no."""
        if self.most_rows + 2 > self._least_reserved:
            self.most_rows = int(self._lane_rows.max())
        return self.most_rows + 2 <= self._least_reserved

    def lacks_room(self, lanes: Ints, count: Ints | int) -> NDArray[np.bool_]:
        """Tell for each of some lanes whether any of its next ``count`` rows is not reserved."""
        return self._lane_rows[lanes] + count > self._reserved[lanes]

    def rows_of(self, lanes: Ints | None) -> Ints:
        """Return the rows of some lanes, None for all."""
        return self._lane_rows.copy() if lanes is None else self._lane_rows[lanes]

    @overload
    def write(self, lanes: int, rows: int, fields: Named[str, Any]) -> None: ...
    @overload
    def write(
        self, lanes: Ints | None, rows: Ints, fields: Named[str, NDArray[Any]], kernel: Kernel | None = None
    ) -> None: ...
    def write(self, lanes: Any, rows: Any, fields: Named[str, Any], kernel: Kernel | None = None) -> None:
        """Write rows in several fields; nobody sees them before `publish`.

        Of one lane, successive rows from ``rows`` on, ``(n, *shape)`` in each field, or a row's item: its bytes, or a
        number or array without axes that fits the dtype. Of an array of lanes, or of all with None, one row each, which
        is one of the next two of its lane. They are reserved. Of many lanes, ``kernel`` does it where it is given and
        all fields are mapped: `kernels.copying.write_lanes`. Raises StorageFull where reserved blocks are not kept and
        there is no room; the call may be repeated.
        """
        if isinstance(rows, int):
            for leaf, value in fields.items():
                column = self.columns[leaf]
                if isinstance(value, np.ndarray):
                    column.write_block(lanes, rows, value)
                else:
                    column.write_row(lanes, rows, value)
            return
        if kernel is not None and len(rows) > CLOSE_LANES and (found := self._record_of(rows, fields)) is not None:
            record, _held = found
            kernel(self.every_lane if lanes is None else lanes, rows, record, len(fields))
            return
        window = self._find_window()
        places: dict[int, list[Places]] = {}
        base_before = at = None
        for leaf, value in fields.items():
            column = self.columns[leaf]
            if leaf in window:
                chunk, base = window[leaf]
                if base is not base_before:
                    base_before, at = base, rows + (base if lanes is None else base[lanes])
                chunk[at] = column.items(value)
                continue
            if column.shift not in places:
                places[column.shift] = find_places(self.every_lane if lanes is None else lanes, rows, column.shift)
            column.write_lanes(places[column.shift], column.items(value))

    def _record_of(self, rows: Ints, fields: Named[str, NDArray[Any]]) -> tuple[Ints, list[Any]] | None:
        """Return fields as `copying.write_lanes` takes them, and what holds their memory; None: not all is mapped."""
        first, last = int(rows.min()), int(rows.max())
        heads, bases, held = list[int](), list[int](), list[Any]()
        for leaf, value in fields.items():
            column = self.columns[leaf]
            items, chunks = column.items(value), column.mapped_chunks(first, last)
            if chunks is None or items.dtype != column.item or len(items) != len(rows):
                return None
            place = 5 * len(fields) + len(bases)
            heads += first >> column.shift, column.shift, column.row_bytes, items.ctypes.data, place
            bases += [chunk.address for chunk in chunks]
            held += items, chunks
        return np.array(heads + bases, np.int64), held

    @overload
    def write_values(self, lanes: int, fields: Named[str, Any]) -> None: ...
    @overload
    def write_values(self, lanes: Ints, fields: Named[str, NDArray[Any]]) -> None: ...
    def write_values(self, lanes: Any, fields: Named[str, Any]) -> None:
        """Write the values of an episode that ends in a lane, or in each of some; fields that are not given are zeros.

        There is room for them. Items and errors are those of `write`; nobody sees them before `publish`.
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
        """Return where the mapped fields' next two rows of all lanes are, for fields that have them in one chunk."""
        if self.most_rows + 1 < self._window_stop:
            return self._window
        low, high = int(self._lane_rows.min()), int(self._lane_rows.max())
        self.most_rows, self._window_stop, self._window = high, _NEVER, {}
        bases: dict[int, Ints] = {}
        for leaf, column in self.columns.items():
            chunk = low >> column.shift
            # Another look where the first of the chunks in here ends, or at the next rows where one is not in here.
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
        """Make the first ``rows`` rows of a lane visible, of each of some lanes, or of all with None: all are written.

        ``added`` of them are new, in all: any number in one lane, one or two in each of several. The observation behind
        them is visible where ``observed`` says so. ``valued`` is the lane of an episode whose values were written with
        them, or those of several. ``late``: other lanes of the same step are visible already, so this
        cannot be refused any more. Raises StorageFull where reserved blocks are not kept and there is no room; nothing
        is visible.
        """
        every, lanes = lanes is None, self.every_lane if lanes is None else lanes
        if late and isinstance(self.committed, CountersByPosition):
            self.committed.store(lanes, rows, late=True)
        else:
            # By index: numpy stores such items one by one, 8 aligned bytes each, and never as a block of bytes.
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
        # Readers load `observed` first: one past `committed` then means the observation after just these rows.
        if observed is True:
            self.observed[lanes] = rows + 1
        elif observed is not False:
            self.observed[lanes[observed]] = rows[observed] + 1

    def note_values(self, lanes: int | Ints) -> None:
        """Note that the values that were written last for a lane, or for each of some, are published."""
        self._values[lanes] += 1
        self.total_rows += self._value_steps * (1 if isinstance(lanes, int) else len(lanes))

    def publish_delayed(self, *, late: bool = False) -> None:
        """Publish what had to be published late; StorageFull where there is still no room and it may not be later.

        Concurrency: the thread that appends.
        """
        if isinstance(self.committed, CountersByPosition):
            self.committed.store_owed(late=late)
        if isinstance(self.observed, CountersByPosition):
            self.observed.store_owed(late=True)

    def mark(self) -> None:
        """Bring everything published to the disk, and say so in the segment's log of marks.

        Concurrency: any thread of the process, also while another one appends. Raises StorageFull where there is no
        room for the mark: everything that was committed is there, and the call may be repeated. After the system's
        OSError it is unknown what the disk holds.
        """
        with self._marking:
            rows = self.committed.copy()
            self._log().mark(rows)
            self._marked = rows

    @property
    def has_unmarked(self) -> bool:
        """Whether rows are published that no mark covers. Any thread may ask."""
        return bool((self.committed.copy() != self._marked).any())

    def _log(self) -> DurableRows:
        """Return what makes marks; the caller keeps it until the mark is made, since `close` may drop it meanwhile."""
        if self._is_closed:
            return DurableRows(self.info, is_left=True)  # which keeps no file open
        durable = self._durable = self._durable or DurableRows(self.info, self._bring_in)
        if self._is_closed:  # meanwhile
            self._durable = None
        return durable

    def _bring_in(self, leaf: str) -> None:
        """Make the pages of the next rows of an array ready to be stored to, which a sync has write-protected.

        Otherwise the next step of all lanes is a fault for each of them.
        """
        with suppress(OSError):  # no room for a page of several lanes: who stores to it finds that out
            if (column := self.columns.get(leaf)) is not None:
                column.bring_in(self._lane_rows.copy())

    def add_priority(self) -> None:
        """Add the array of initial priorities; the rows so far have none. Raises as `SegmentInfo.with_priority`.

        Concurrency: the thread that appends. It waits for a mark that is being made: each mark is of all arrays.
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
        """Take the number and the folder that the segment got, after it was opened as a draft."""
        self.info, self.number = info, info.number
        for column in (*self.columns.values(), *self._value_columns.values()):
            column.info = info
        if not self._keeps:
            self._open_counters()  # by position they are opened by their path

    def close(self) -> list[Mapping]:
        """Release every chunk, as `release` does. The lock stays: the sealer needs it."""
        self._is_closed = True
        with self._reserving:  # from here on nothing is reserved
            return self.release()

    def release(self) -> list[Mapping]:
        """Release every chunk while no thread reserves: `close` waits for it, and a forked child has none.

        The returned mappings are unmapped with the last reference to them.
        """
        self._is_closed = True
        self._window, self._window_stop, self._durable = {}, 0, None
        self.publish_delayed(late=True)
        every = (*self.columns.values(), *self._value_columns.values())
        return [mapping for column in every for mapping in column.close()]


def _reserve(columns: Named[str, Column], lane: int, row: int, stop: int, rows: Ints) -> None:
    """Reserve rows of a lane as `Column.reserve` does, and release the chunks before the ``rows`` of every lane."""
    first = int(rows.min())
    for column in columns.values():
        column.reserve(lane, row, stop, rows)
        column.unmap_before(first)
        column.close_before(first)


def mark_together(segments: Sequence[SegmentWriter], sync: Callable[[], None]) -> dict[SegmentWriter, Exception]:
    """Mark segments as `SegmentWriter.mark` does, with two syncs of their file system for all of them.

    ``sync`` makes everything durable that was written before it. Returns what went wrong with single segments, which
    are not marked; the others are. Raises what ``sync`` raises: it is unknown what the disk holds.

    Concurrency: one thread at a time.
    """
    failed: dict[SegmentWriter, Exception] = {}
    with ExitStack() as marking:
        for segment in segments:
            marking.enter_context(segment._marking)
        logs = {}
        for segment in segments:
            rows = segment.committed.copy()
            with _noted(segment, failed):
                log = segment._log()
                log.prepare(rows)
                logs[segment] = log, rows
        sync()
        for segment, (log, rows) in logs.items():
            with _noted(segment, failed):
                log.append(rows)
        sync()
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
        failed[segment] = error
