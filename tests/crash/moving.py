"""Four collectors that write while their store is copied or moved, and what has to be there of it afterwards.

What was appended, and when, each collector notes in memory that it shares with the test. What was durable at a moment
is read from the files themselves: rows of marks and of sealed segments, and the numbers of the steps in them.
"""

import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import diskreplay as dr
from tests.crash import workloads
from tests.testing.coded import Span, check_coded_parts, split_codes
from tests.testing.commands import repair
from tests.testing.filesystems import Disk
from tests.testing.on_disk import END_MARKER, OBSERVATION_ONLY, marks_of

_MOST_STEPS = 50_000
Spans = dict[tuple[int, int], list[Span]]


# --- collectors -------------------------------------------------------------------------------------------------------


class Collector:
    """A process that appends coded steps until it is killed: of one environment, or of several lanes.

    ``times`` holds when each step of each lane was appended, 0 for those that were not.
    """

    def __init__(self, path: Path, number: int, durability: Any, seed: Any) -> None:
        self.number = number
        self._kind = workloads.Vector if number % 2 else workloads.Single
        self.times = np.frombuffer(mmap.mmap(-1, 8 * self._kind.lanes * _MOST_STEPS), "f8")
        self.times = self.times.reshape(self._kind.lanes, _MOST_STEPS)
        self._error = path.with_name(f"collector-{number}.error")
        self._error.unlink(missing_ok=True)
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._collect(path, durability, random.Random(f"{seed} {number}"), parent)
            except BaseException:
                self._error.write_text(traceback.format_exc())
            finally:
                os._exit(1)

    def _collect(self, path: Path, durability: Any, rng: random.Random, parent: int) -> None:
        warnings.simplefilter("ignore")  # an episode that is appended whole cuts the open one
        with dr.open(path, "a") as store:
            some = self._kind(store, self.number, self._note, durability=durability)
            act = self._append_to_lanes if self._kind is workloads.Vector else self._append
            while os.getppid() == parent and self.steps.max() < _MOST_STEPS - 100:
                act(some, rng)
                time.sleep(rng.random() * 0.03)

    def _note(self, told: dict[str, list[int]]) -> None:
        now = time.monotonic()
        for lane, count in enumerate(told["counts"]):
            while count and self.times[lane, count - 1] == 0:
                self.times[lane, count - 1] = now
                count -= 1

    @staticmethod
    def _append(one: workloads.Single, rng: random.Random) -> None:
        chance = rng.random()
        if chance < 0.9:
            one.step(rng.choice(["terminated", "truncated"]) if rng.random() < 0.05 else "", known=rng.random() < 0.9)
        elif chance < 0.97:
            one.block(rng.randint(1, 12), terminated=rng.random() < 0.8, known=rng.random() < 0.8)
        else:
            one.end(known=rng.random() < 0.5)

    @staticmethod
    def _append_to_lanes(some: workloads.Vector, rng: random.Random) -> None:
        chance = rng.random()
        if chance < 0.95:
            lanes = range(some.lanes)
            ends, cuts, skip = ([lane for lane in lanes if rng.random() < share] for share in (0.03, 0.02, 0.1))
            some.step(ends, cuts=set(cuts) - set(ends), skip=skip, known=rng.random() < 0.9)
        elif chance < 0.98:
            some.block(rng.randrange(some.lanes), rng.randint(1, 12))
        else:
            some.end()

    @property
    def steps(self) -> Any:
        """How many steps each lane has appended."""
        return np.count_nonzero(self.times, axis=1)

    def check_alive(self) -> None:
        """Fail where it ended by itself."""
        if self._error.exists():
            raise AssertionError(f"collector {self.number} failed:\n{self._error.read_text()}")

    def kill(self) -> None:
        """Send SIGKILL; `wait` waits for its end."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> str:
        """Wait for its end; return how it failed, where it did before it was killed."""
        os.waitpid(self._pid, 0)
        return self._error.read_text() if self._error.exists() else ""


# --- what was durable -------------------------------------------------------------------------------------------------


def durable_steps(path: Path, *, synced: bool = False) -> Spans:
    """Return the steps of each (writer, lane) that are in sealed segments or marked, one span a segment.

    ``synced``: only those of marks that are on the disk themselves.
    """
    found: Spans = defaultdict(list)
    for segment in sorted((path / "segments").glob("[0-9]*")):
        attributes = json.loads((segment / "zarr.json").read_bytes())["attributes"]
        lanes, per_chunk = len(attributes["lanes"]), attributes["chunk_rows"]
        marks = marks_of(segment, lanes)
        if synced:
            on_disk = np.fromfile(segment / "durable/c.0", "<i8")
            marks = [mark for mark in marks if np.all(mark.rows <= on_disk)]
        rows = np.array(marks[-1].rows if marks else [0] * lanes)
        if attributes["sealed"] and not synced:
            rows = np.fromfile(segment / "committed/c.0", "<i8")
        flags = _read_rows(segment, "done", "", np.zeros((lanes, per_chunk["done"]), "u1"), rows.max())
        codes = _read_rows(segment, "action", ".0", np.zeros((lanes, per_chunk["action"], 2), "<i8"), rows.max())
        for lane in range(lanes):
            is_step = flags[lane, : rows[lane]] & (OBSERVATION_ONLY | END_MARKER) == 0
            if is_step.any():
                steps = codes[lane, : rows[lane], 0][is_step]
                writer, of_lane, counters = split_codes(steps)
                assert (np.diff(steps) == 1).all()
                found[int(writer[0]), int(of_lane[0])].append(Span(int(counters[0]), int(counters[-1]) + 1))
    return found


def mark_times(path: Path) -> dict[int, list[float]]:
    """Return when each writer has made its marks."""
    found: dict[int, list[float]] = defaultdict(list)
    for number, attributes in _segments(path).items():
        marks = marks_of(path / "segments" / number, len(attributes["lanes"]))
        found[attributes["writer"]] += [mark.time for mark in marks]
    return found


def _read_rows(segment: Path, leaf: str, suffix: str, chunk: Any, rows: int) -> Any:
    count = -(-int(rows) // chunk.shape[1])
    chunks = [np.fromfile(segment / f"{leaf}/c.0.{k}{suffix}", chunk.dtype).reshape(chunk.shape) for k in range(count)]
    return np.concatenate([*chunks, chunk[:, :0]], axis=1)


def count_steps(spans: Spans) -> int:
    """Count the steps in spans."""
    return sum(stop - first for parts in spans.values() for first, stop in parts)


def covers(shown: Spans, needed: Spans) -> bool:
    """Whether all steps that are needed are shown."""
    return all(
        any(span.first <= first and stop <= span.stop for span in shown.get(key, []))
        for key, parts in needed.items()
        for first, stop in parts
    )


# --- ways to move -----------------------------------------------------------------------------------------------------


def run(*command: Any, ok: Iterable[int] = (0,)) -> None:
    """Run a command; the test is skipped where it is not installed."""
    tool = shutil.which(command[0], path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([tool, *map(str, command[1:])], capture_output=True, text=True)
    assert done.returncode in ok, f"{command}: {done.returncode}\n{done.stderr}"


# Tools tell of files that vanish or change while they are read by these.
_MOVING = {"cp": (0, 1), "mv": (0, 1), "tar": (0, 1), "rsync": (0, 23, 24)}


Ok = Callable[[str], Iterable[int]]


def cp_a(source: Path, target: Path, ok: Ok) -> Path:
    run("cp", "-a", source, target, ok=ok("cp"))
    return target


def cp_r(source: Path, target: Path, ok: Ok) -> Path:
    run("cp", "-r", "--no-preserve=mode", source, target, ok=ok("cp"))
    return target


def tar(source: Path, target: Path, ok: Ok) -> Path:
    archive = target.with_name(f"{target.name}.tar")
    pack(source, archive, ok)
    unpack(archive, target)
    archive.unlink()
    return target


def pack(source: Path, archive: Path, ok: Ok) -> None:
    run("tar", "-C", source, "-cf", archive, ".", ok=ok("tar"))


def unpack(archive: Path, target: Path) -> None:
    target.mkdir()
    run("tar", "-C", target, "-xf", archive)


def rsync(source: Path, target: Path, ok: Ok) -> Path:
    run("rsync", "-a", f"{source}/", f"{target}/", ok=ok("rsync"))
    return target


def snapshot(source: Path, target: Path, ok: Ok) -> Path:
    """Take a snapshot of the subvolume that the store is in."""
    run("btrfs", "subvolume", "snapshot", source.parent, target)
    return target / source.name


def mv(source: Path, target: Path, ok: Ok) -> Path:
    run("mv", source, target, ok=ok("mv"))
    return target


def copy_volume(disk: Disk) -> Path:
    """Copy the image of a file system as it is at one moment, as a snapshot of a volume does."""
    assert disk.image is not None
    copy = disk.image.with_name("copy")
    run("fsfreeze", "--freeze", disk.path)
    try:
        run("cp", "--sparse=always", disk.image, copy)
    finally:
        run("fsfreeze", "--unfreeze", disk.path)
    return copy


COPIES = {"cp -a": cp_a, "cp -r": cp_r, "tar": tar, "rsync": rsync}


def quiet(tool: str) -> Iterable[int]:
    """The exit codes that a tool may have where nobody writes."""
    return (0,)


def busy(tool: str) -> Iterable[int]:
    """And those where somebody does."""
    return _MOVING[tool]


# --- what is there afterwards ----------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What became of a store: the steps shown, those kept that nothing proves, those set aside, and gaps in lanes."""

    shown: Spans
    unproven: int
    quarantined: int
    gaps: int


def check_moved(path: Path, needed: Spans, *, is_still: bool) -> Outcome:
    """Check a store that was moved: it shows what is needed, whole and in order, to readers, writers and repair.

    Where somebody wrote to it meanwhile (not ``is_still``), its counters may be older than its segments: a reader then
    leaves out segments that are shown from the first opening to write on.
    """
    shown = _shown(path)
    assert covers(shown, needed), f"needed {dict(needed)}, shown {shown}"
    assert all(parts[0].first == 0 for parts in shown.values()), shown
    with dr.open(path, "a"):
        pass
    unsealed = [number for number, attributes in _segments(path).items() if not attributes["sealed"]]
    assert not unsealed, f"segments {unsealed} are not sealed by opening to write"
    with dr.open(path) as store:
        steps = len(store)
    for _ in range(5):
        if not repair(path).actions:
            break
    else:
        raise AssertionError(f"repair finds no end: {repair(path).actions}")
    after = _shown(path)
    assert after == shown if is_still else covers(after, shown), f"shown to a reader {shown}, in the end {after}"
    assert steps == count_steps(after), f"{steps} steps after opening to write, after repair {after}"
    with dr.open(path) as store:
        problems = store.verify(deep=True)
        assert {problem.kind for problem in problems} <= {"unproven", "quarantine"}, problems
        quarantined = sum(entry.steps or 0 for entry in store.quarantine)
    unproven = sum(attributes.get("unproven_steps", 0) for attributes in _segments(path).values())
    return Outcome(shown, unproven, quarantined, sum(len(parts) - 1 for parts in shown.values()))


def _segments(path: Path) -> dict[str, dict[str, Any]]:
    documents = (path / "segments").glob("[0-9]*/zarr.json")
    return {document.parent.name: json.loads(document.read_bytes())["attributes"] for document in documents}


def _shown(path: Path) -> Spans:
    with dr.open(path) as store:
        return check_coded_parts(store)
