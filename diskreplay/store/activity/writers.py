"""The writers of a store: where each writes, how fast, and how far behind what it made durable is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, SegmentGone
from diskreplay.reading.snapshot import Snapshot
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.limiters import StepCounter
from diskreplay.segments.files.commit import read_lane_counter
from diskreplay.segments.segment import SegmentInfo
from diskreplay.store.activity.rates import Rate
from diskreplay.store.info import segment_state

CLOSED = "closed"
_STATES = ("dead", "foreign", "unknown", "writing", CLOSED)


@dataclass(frozen=True)
class WriterActivity:
    """What a writer does.

    `state` is "writing", "dead" (its segment waits for the next process that opens the store with mode "a"), "foreign",
    "unknown", or "closed" of one that closed since the first look. `segments` are those that it has not sealed, `lanes`
    how many environments it writes for. `steps` counts all its segments on disk. A loss of power now would take
    what it appended in the last `durable_behind_s` seconds: None where that is not known.
    """

    writer: int
    state: str
    segments: tuple[int, ...]
    lanes: int
    steps: int
    steps_per_second: float | None
    seconds_since_append: float | None
    durable_behind_s: float | None


class Writers:
    """The writers that were seen writing since the first look. Not thread-safe."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._counted: Mapping[int, int] | None = None
        self._new: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._rates: dict[int, Rate] = {}
        self._appended: dict[int, int] = {}  # when each published its newest row, in nanoseconds since the epoch

    def read(self, now: float, snapshot: Snapshot, counter: StepCounter) -> list[WriterActivity]:
        """Return what each does, those that need attention first, by the last count of the store's steps."""
        own: dict[int, list[SegmentInfo]] = {}
        for info in counter.growing():
            own.setdefault(info.writer, []).append(info)
        self._count(counter.by_segment(), counter.writers())
        for writer in own:
            self._new.setdefault(writer, 0)
        found = []
        for writer, new in self._new.items():
            rate = self._rates.setdefault(writer, Rate(self._window_s)).add(now, new)
            found.append(self._describe(writer, own.get(writer, []), now, rate, snapshot))
        return sorted(found, key=lambda one: (_STATES.index(one.state), one.writer))

    def _count(self, steps: Mapping[int, int], writers: Mapping[int, int]) -> None:
        """Count the steps of each writer on disk, and its new steps since the look before."""
        before, self._counted = self._counted, steps
        self._steps = {}
        for number, writer in writers.items():
            self._steps[writer] = self._steps.get(writer, 0) + steps[number]
            more = 0 if before is None else steps[number] - before.get(number, 0)
            if more > 0:
                self._new[writer] = self._new.get(writer, 0) + more

    def _describe(
        self, writer: int, own: Sequence[SegmentInfo], now: float, rate: float | None, snapshot: Snapshot
    ) -> WriterActivity:
        # Some may have been sealed since they were counted.
        unsealed = {info.number: state for info in own if (state := _state(info)) != "sealed"}
        states = set(unsealed.values())
        # One that writes has segments that it fills one after the other.
        state = "writing" if "writing" in states else min(states, key=_STATES.index, default=CLOSED)
        behind: list[int] = []
        for info in own:
            last, undurable = _newest_and_undurable(info, snapshot)
            self._appended[writer] = max(self._appended.get(writer, 0), last)
            behind += [undurable] if undurable else []
        appended, now_ns = self._appended.get(writer, 0), int(now * 1e9)
        behind_s = max(0, now_ns - min(behind, default=now_ns)) / 1e9 if state == "writing" else None
        return WriterActivity(
            writer,
            state,
            tuple(unsealed),
            max((len(info.lanes) for info in own), default=0),
            self._steps.get(writer, 0),
            rate,
            max(0, now_ns - appended) / 1e9 if appended else None,
            behind_s,
        )


def _state(info: SegmentInfo) -> str:
    """Return the state of a segment that was not sealed a moment ago; one that has left since was sealed."""
    try:
        return segment_state(info)
    except FileNotFoundError:
        return "sealed"


def _newest_and_undurable(info: SegmentInfo, snapshot: Snapshot) -> tuple[int, int]:
    """Return when the newest row of a segment was published, and the oldest that is not durable; 0 where none is."""
    slot, lanes = info.number - snapshot.origin, len(info.lanes)
    if not 0 <= slot < len(snapshot.lanes) or snapshot.lanes[slot] != lanes:
        return 0, 0
    base = int(snapshot.lane_base[slot])
    rows = snapshot.committed[base : base + lanes]
    try:
        durable = np.minimum(read_lane_counter(f"{info.path}/{layout.DURABLE}", lanes), rows)
        newest, oldest = (
            _times(info, snapshot, at, has) for at, has in ((rows - 1, rows > 0), (durable, durable < rows))
        )
    except (SegmentGone, FormatError, OSError):
        return 0, 0
    return int(newest.max(initial=0)), int(oldest.min()) if len(oldest) else 0


def _times(
    info: SegmentInfo, snapshot: Snapshot, rows: NDArray[np.int64], which: NDArray[np.bool_]
) -> NDArray[np.int64]:
    lane = np.flatnonzero(which)
    ids = (info.number << layout.POSITION_BITS) + rows[lane] * len(info.lanes) + lane
    times: NDArray[np.int64] = snapshot.times(ids)
    return times
