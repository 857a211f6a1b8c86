"""Measure the cost of durability, which a background thread provides, for an append."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns, sleep
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from diskreplay.segments.segment_writer import SegmentWriter
from diskreplay.writing.marker import MarkedWriter
from tools.bench.data import FRAME_SCHEMA, SCHEMA, single_frames, single_steps
from tools.bench.harness import Contestant, Report, Seconds, Table, Target, in_turn, number


class Size(NamedTuple):
    """The seconds of a contestant in a round, and the least time from one step to the next."""

    seconds: float
    step_us: float
    frame_us: float
    capacity: int


FULL, TINY = Size(1.5, 20, 500, 200_000), Size(0.05, 20, 500, 2_000)
DURABILITIES: tuple[float, ...] = (0.5, 5.0)
NONE = 'durability="none"'
AGAIN = f"{NONE}, again"  # shows the difference of two equal rows
SYNCED = f"{NONE}, synced by another process"  # the cost of the disk, without a marking thread
BATCH = 5  # rounds of a store; then a new one, in another order: its place on disk may be slow
POOL = 4096
FRAMES = 5  # a store of frames has this many times fewer steps
SEGMENT_STEPS = 62_500  # as in a store of a million steps; half of a smaller store here
MEAN, TAIL = 1.03, 1.5


class Shape(NamedTuple):
    """The kind of step, and of environment: it computes in this thread, or waits for another process."""

    name: str
    schema: dr.Schema
    steps: list[tuple[Any, ...]]
    every_us: float
    capacity: int
    waits: bool = False


def _shapes(size: Size) -> Iterator[Shape]:
    yield Shape("obs (4,) float32", SCHEMA, list(single_steps(POOL, 10, 500)), size.step_us, size.capacity)
    steps = list(single_frames(POOL, 10, 500))
    frames = Shape("obs (84, 84) uint8", FRAME_SCHEMA, steps, size.frame_us, size.capacity // FRAMES)
    yield frames
    yield frames._replace(name=f"{frames.name}, waiting", waits=True)


def _paced(append: Any, steps: Iterator[tuple[Any, ...]], seconds: float, shape: Shape) -> Seconds:
    """Append for some seconds, at most a step each `every_us`; return the seconds of each append."""
    clock, every = perf_counter_ns, int(shape.every_us * 1000)
    taken = []
    now = clock()
    end, due = now + int(seconds * 1e9), now
    while now < end:
        if shape.waits and now < due:
            sleep((due - now) / 1e9)
        while clock() < due:
            pass
        step = next(steps)
        started = clock()
        append(*step)
        now = clock()
        taken.append(now - started)
        due = max(due + every, now)
    return np.array(taken, np.float64) / 1e9


def _sync(path: Path, wanted: Any, every_s: float) -> None:
    """Sync the newest segments of a store at intervals, while an event is set."""
    while True:
        wanted.wait()
        sleep(every_s)
        for segment in sorted((path / "segments").iterdir())[-2:] if wanted.is_set() else ():
            for chunk in segment.rglob("c.*"):
                with suppress(FileNotFoundError):
                    fd = os.open(chunk, os.O_RDONLY)
                    os.fdatasync(fd)
                    os.close(fd)


@contextmanager
def _synced_by_another(path: Path, every_s: float) -> Iterator[Any]:
    """Yield an event: while it is set, another process syncs the store."""
    context = get_context("spawn")
    wanted = context.Event()
    process = context.Process(target=_sync, args=(path, wanted, every_s), daemon=True)
    process.start()
    try:
        yield wanted
    finally:
        process.kill()
        process.join()


class _Switched:
    """The open segments of a writer; the marking thread finds them only while this is switched on."""

    def __init__(self, segments: MarkedWriter) -> None:
        self._segments, self.on = segments, False

    @property
    def open(self) -> Iterable[SegmentWriter]:
        return self._segments.open if self.on else ()

    def fail(self, error: Exception) -> None:
        self._segments.fail(error)


def _contestants(stack: ExitStack, path: Path, shape: Shape, seconds: float) -> list[Contestant]:
    """Return contestants that share a full store and its writer; each switches its own feature on for a round."""
    segment_steps = min(SEGMENT_STEPS, shape.capacity // 2)
    store = stack.enter_context(dr.create(path, shape.schema, capacity=shape.capacity, segment_steps=segment_steps))
    writer = stack.enter_context(store.writer(durability="none"))
    steps = cycle(shape.steps)
    for _ in range(shape.capacity):
        writer.append(*next(steps))
    segments, marker = writer._episode_writer.rotation, store._marker

    def contestant(name: str, switch: Callable[[bool], None]) -> Contestant:
        def one_round() -> Seconds:
            switch(True)
            taken = _paced(writer.append, steps, seconds, shape)
            switch(False)
            # Remaining steps must not be written, or marked, in the time of the next contestant.
            for segment in segments.open:
                segment.mark()
            os.sync()
            return taken

        return Contestant(name, one_round)

    def marked(durability: float) -> Contestant:
        switched = _Switched(segments)
        marker.add(switched, durability)
        stack.callback(marker.remove, switched)
        return contestant(f"{durability=}", partial(setattr, switched, "on"))

    wanted = stack.enter_context(_synced_by_another(path, min(DURABILITIES)))
    return [
        contestant(NONE, lambda _: None),
        contestant(AGAIN, lambda _: None),
        contestant(SYNCED, lambda on: wanted.set() if on else wanted.clear()),
        *map(marked, DURABILITIES),
    ]


def _measured(shape: Shape, seconds: float, rounds: int, folder: Path) -> dict[str, list[Seconds]]:
    """Return the seconds of each append in each round, by contestant; every few rounds, make a new store."""
    taken: dict[str, list[Seconds]] = defaultdict(list)
    for done in range(0, rounds, BATCH):
        with TemporaryDirectory(dir=folder) as stores, ExitStack() as stack:
            contestants = _contestants(stack, Path(stores) / "store", shape, seconds)
            turn = done // BATCH % len(contestants)
            ordered = contestants[turn:] + contestants[:turn]
            for name, each in in_turn(ordered, min(BATCH, rounds - done)).items():
                taken[name] += each
    return taken


def _one_shape(shape: Shape, seconds: float, rounds: int, folder: Path) -> tuple[Table, list[Target]]:
    taken = _measured(shape, seconds, rounds, folder)
    means, tails = (
        {name: np.array([figure(calls) for calls in each]) * 1e6 for name, each in taken.items()}
        for figure in (np.mean, lambda calls: np.percentile(calls, 99.9))
    )
    mean_of_none, tail_of_none = ((each[NONE] + each[AGAIN]) / 2 for each in (means, tails))
    rows, targets = [], []
    for name, each in taken.items():
        mean, tail = np.median(means[name] / mean_of_none), np.median(tails[name] / tail_of_none)
        calls = np.concatenate(each) * 1e6
        cells = [np.median(calls), calls.mean(), np.median(tails[name]), calls.max() / 1e3, mean, tail]
        rows.append([name, *map(number, cells), f"{len(calls):,}"])
        if name not in (NONE, AGAIN, SYNCED):
            what = f"{shape.name}, {name}, beside none: "
            targets.append(Target(what + "mean", float(mean), MEAN, "times"))
            targets.append(Target(what + "99.9th percentile", float(tail), TAIL, "times"))
    header = ["median µs", "mean µs", "p99.9 µs", "slowest ms", "mean, times", "p99.9, times", "calls"]
    return Table([f"one append, {shape.name}", *header], rows), targets


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Append small steps and frames to a store, in turn with marks and without."""
    made = [_one_shape(shape, size.seconds, rounds, folder) for shape in _shapes(size)]
    return Report(
        "Durability",
        [table for table, _ in made],
        [target for _, more in made for target in more],
        [
            f"Each appends for {size.seconds:g} s in a round, a step each {size.step_us:g} µs or a frame each "
            f"{size.frame_us:g} µs at most, as an environment gives them, next_obs given; only the call is timed. "
            f"The store is full before that. A segment has {SEGMENT_STEPS:,} steps, as in a store of a million, or "
            "half of its store where that has fewer.",
            "All rows are of one writer of one store, made with durability none; the marking thread finds its segments "
            "only in the turns of those that have marks. So nothing differs but the marks: two stores differ by more, "
            f"by where they are. Every {BATCH} rounds there is a new store. After each turn everything is marked and "
            "brought to the disk, so that none pays for another: the system brings nothing of durability none to the "
            "disk in its own time.",
            "The environment runs in the thread that appends and holds the GIL; the one called waiting sleeps, as for "
            "another process. The marking thread needs the GIL for an instant after each system call.",
            f"In the row that says so another process syncs the newest chunks every {min(DURABILITIES):g} s and does "
            "nothing else: what the disk and its journal cost an append, whoever asks for it.",
            "The two last columns before the count are medians of the ratios to the mean of both rows of durability "
            "none, round by round; how far those two differ is chance.",
        ],
    )
