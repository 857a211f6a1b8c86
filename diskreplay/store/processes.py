"""The activity of a store's writers, samplers and rate limiters, as read from the files that they write."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, SegmentGone, StoreNotFound
from diskreplay.reading.snapshot import Snapshot
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.limiters import Inserted, StepCounter, limiter_names, steps_drawn
from diskreplay.segments.documents.root import Root
from diskreplay.segments.documents.state_files import Saved, read_plain, state_names
from diskreplay.segments.files.commit import read_lane_counter
from diskreplay.segments.segment import SegmentInfo
from diskreplay.store.info import segment_state
from diskreplay.writing.limiter import RateLimiter

CLOSED = "closed"
_STATES = ("dead", "foreign", "unknown", "writing", CLOSED)


class Rate:
    """The change per second of a number, over a window of ``window_s`` seconds; not thread-safe.

    A rate is measured from the last number before the window, or from the first number if all numbers are in the
    window. ``least_s`` is the minimum time in seconds between the first and the last number of a rate.
    """

    def __init__(self, window_s: float, least_s: float = 0.0) -> None:
        self._window_s, self._least_s = window_s, least_s
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, time: float, value: float) -> float | None:
        """Add a number and its time in seconds; return the change per second, or None before ``least_s`` seconds."""
        self._seen.append((time, value))
        while len(self._seen) > 2 and self._seen[1][0] <= time - self._window_s:
            self._seen.popleft()
        before, was = self._seen[0]
        return (value - was) / (time - before) if time > before and time - before >= self._least_s else None


@dataclass(frozen=True)
class WriterActivity:
    """The activity of a writer.

    `state` is one of these:

    - "writing",
    - "dead": the next process that opens the store with mode "a" seals the writer's segments,
    - "foreign": another machine writes, so this machine cannot find out whether the writer is alive,
    - "unknown": this process cannot test the locks of the segments,
    - "closed": the writer was closed after the first look.

    `segments` has the numbers of the writer's unsealed segments. `lanes` is the number of the writer's environments.
    `steps` is the number of all the writer's steps on disk. A power loss now would lose the steps that the writer
    appended in the last `durable_behind_s` seconds; None means that this time is unknown.
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
    """The writers that had unsealed segments or new steps at any look of `Activity`; not thread-safe."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._counted: Mapping[int, int] | None = None
        self._new: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._rates: dict[int, Rate] = {}
        self._appended: dict[int, int] = {}  # {writer: time of its newest row, in nanoseconds since the epoch}

    def read(self, now: float, snapshot: Snapshot, counter: StepCounter) -> list[WriterActivity]:
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
        """Update each writer's number of steps on disk, and its number of steps since the first look.

        ``steps`` has the number of steps of each segment, and ``writers`` has the writer of each segment.
        """
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
        # A segment may have been sealed since the steps were counted.
        unsealed = {info.number: state for info in own if (state := _state(info)) != "sealed"}
        states = set(unsealed.values())
        # Segments of a writer may have different states. The writer is "writing" if any of its segments is "writing".
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
    try:
        return segment_state(info)
    except FileNotFoundError:
        return "sealed"


def _newest_and_undurable(info: SegmentInfo, snapshot: Snapshot) -> tuple[int, int]:
    """Return the times of a segment's newest row and of its oldest row that is not durable.

    The times are in nanoseconds since the epoch. A time is 0 if no such row exists.
    """
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
    info: SegmentInfo, snapshot: Snapshot, rows: NDArray[np.int64], mask: NDArray[np.bool_]
) -> NDArray[np.int64]:
    lane = np.flatnonzero(mask)
    ids = (info.number << layout.POSITION_BITS) + rows[lane] * len(info.lanes) + lane
    times: NDArray[np.int64] = snapshot.times(ids)
    return times


# --- saved states of samplers, and rate limiters ---------------------------------------------------------------------


@dataclass(frozen=True)
class SavedSampler:
    """The state that a sampler saved last.

    `batches_per_second` is the rate between the last two saves that `Activity` has seen; None before the second save.
    """

    name: str
    seconds_since_save: float
    batches: int | None
    steps: int | None
    batches_per_second: float | None
    view: str | None
    distribution: str | None


class SavedSamplers:
    def __init__(self, root: Root) -> None:
        self._root = root
        self._rates: dict[str, Rate] = {}
        self._known: dict[str, tuple[Saved, float | None]] = {}

    def read(self, now: float) -> list[SavedSampler]:
        names = state_names(self._root)
        self._known = {name: known for name, known in self._known.items() if name in names}
        found = []
        for name in names:
            with suppress(FormatError, StoreNotFound, OSError):
                found.append(self._describe(name, now))
        return found

    def _describe(self, name: str, now: float) -> SavedSampler:
        saved = read_plain(self._root, name)
        before, rate = self._known.get(name, (None, None))
        batches = _count(saved.plain, "batches")
        if before is None or before.time != saved.time:
            rate = self._rates.setdefault(name, Rate(0.0)).add(saved.time, batches or 0)
            self._known[name] = saved, rate
        planner = saved.plain.get("planner") if isinstance(saved.plain, Mapping) else None
        sampler = planner if isinstance(planner, Mapping) else {}
        return SavedSampler(
            name,
            max(0.0, now - saved.time),
            batches,
            _count(saved.plain, "steps"),
            rate if rate is None or rate >= 0 else None,  # negative if two samplers save under this name
            *(str(sampler[key]) if key in sampler else None for key in ("view", "distribution")),
        )


def _count(tree: Any, name: str) -> int | None:
    value = tree.get(name) if isinstance(tree, Mapping) else None
    return value if isinstance(value, int) else None


@dataclass(frozen=True)
class LimiterCounts:
    """The counts of a rate limiter.

    `samples_until_held` is the number of steps that can be drawn before samplers have to wait. `inserts_until_held` is
    the number of steps that can be inserted before writers have to wait. `held` names who has to wait now: "samplers",
    "writers", "samplers and writers", or None. All three are None if the limiter was not passed to `Activity`: the
    arguments of limiters are not on disk.
    """

    name: str
    inserted: int
    drawn: int
    samples_per_insert: float | None
    drawn_per_second: float | None
    samples_until_held: int | None
    inserts_until_held: int | None
    held: str | None


class Limiters:
    def __init__(self, root: Root, known: Iterable[RateLimiter], window_s: float) -> None:
        self._root, self._window_s = root, window_s
        self._known = {limiter.name: limiter for limiter in known}
        self._rates: dict[str, Rate] = {}

    def read(self, now: float, inserted: Inserted) -> list[LimiterCounts]:
        found = []
        for name in limiter_names(self._root):
            with suppress(FormatError, OSError):
                drawn = steps_drawn(self._root, name)
                rate = self._rates.setdefault(name, Rate(self._window_s)).add(now, drawn)
                ratio = drawn / inserted.ever if inserted.ever else None
                bounds = _bounds(self._known.get(name), inserted, drawn)
                found.append(LimiterCounts(name, inserted.ever, drawn, ratio, rate, *bounds))
        return found


def _bounds(limiter: RateLimiter | None, inserted: Inserted, drawn: int) -> tuple[int | None, int | None, str | None]:
    if limiter is None:
        return None, None, None
    lead = inserted.ever * limiter.samples_per_insert - drawn
    samples = max(0, int(lead - (limiter.offset - limiter.error_buffer)))
    inserts = max(0, int((limiter.offset + limiter.error_buffer - lead) / limiter.samples_per_insert))
    may_draw, may_insert = limiter.may_draw(inserted, drawn, 1), limiter.may_insert(inserted, drawn)
    if inserted.held < limiter.min_size:
        samples, inserts = 0, max(inserts, limiter.min_size - inserted.held)
    held = [side for side, may in (("samplers", may_draw), ("writers", may_insert)) if not may]
    return samples, inserts, " and ".join(held) or None
