"""The process that merges: how it rests, how short it holds the store lock, and when it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import diskreplay as dr
from diskreplay.segments.documents import layout
from diskreplay.segments.files.locks import is_held
from diskreplay.writing.merging import background, compaction, process
from diskreplay.writing.merging.background import MERGED
from diskreplay.writing.merging.process import Pace, Stopped
from tests.crash.injection import Point, intercepted
from tests.testing.merged import folders
from tests.testing.support import serial_schema
from tests.writing.merging.test_background import MANY, write


@pytest.fixture
def pace(tmp_store: Path) -> Pace:
    with dr.create(tmp_store, serial_schema()) as store:
        return Pace(store._root.counters(writable=False), os.getppid(), 0)


@pytest.mark.parametrize(
    ("cpu", "waited", "segments", "rested"),
    [
        (process._WORK_S / 2, 3.0, 0, None),
        (0.02, 0.0, 0, 0.02 * process._REST),
        (0.02, 0.3, 0, 0.32),
        (0.02, 3.0, 0, process._MOST_S),
        (0.02, 0.3, process._BEHIND // 4, 0.32 * 0.75),
        (0.02, 0.3, 2 * process._BEHIND, 0.0),
    ],
    ids=["worked little", "worked", "waited for the disk", "waited long", "a little behind", "far behind"],
)
def test_it_rests_as_long_as_others_and_the_disk_need_but_keeps_up(
    pace: Pace, monkeypatch: pytest.MonkeyPatch, cpu: float, waited: float, segments: int, rested: float | None
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(pace, "_rest", pauses.append)
    monkeypatch.setattr(process.time, "process_time", lambda: 5.0)
    monkeypatch.setattr(process.time, "monotonic", lambda: 10.0)
    pace._begin_work()
    pace._since = pace._counters.peek(layout.NEXT_SEGMENT) - segments
    monkeypatch.setattr(process.time, "process_time", lambda: 5.0 + cpu)
    monkeypatch.setattr(process.time, "monotonic", lambda: 10.0 + cpu + waited)
    pace()
    assert pauses == ([] if rested is None else [pytest.approx(rested)])


def test_it_stops_when_told_and_when_its_parent_is_gone(pace: Pace) -> None:
    pace()
    began = time.monotonic()
    pace._rest(0.2)
    assert time.monotonic() - began >= 0.2
    pace.stop(15, None)
    pace._rest(1e9)
    with pytest.raises(Stopped):
        pace()
    with pytest.raises(Stopped):
        Pace(pace._counters, parent=-1, since=0)()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no store", "another store", "manual"])
def test_it_leaves_alone_what_is_not_its_store(tmp_store: Path, kind: str) -> None:
    tmp_store.mkdir()
    uuid = "of another"
    if kind != "no store":
        tmp_store.rmdir()
        how = "manual" if kind == "manual" else "auto"
        with dr.create(tmp_store, serial_schema(), segment_steps="episode", compaction=how) as store:
            uuid = store.uuid if kind == "manual" else uuid
            write(store, MANY)
    before = sorted(tmp_store.rglob("*"))
    assert merge(tmp_store, uuid) == 0
    assert sorted(tmp_store.rglob("*")) == before


def merge(path: Path, uuid: str) -> int:
    """Run such a process, which says nothing; return how it ended."""
    command = [sys.executable, "-m", process.__name__, uuid, str(os.getpid()), "0"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=path, env=env)
    assert (ended.stdout, ended.stderr) == ("", "")
    return ended.returncode


@pytest.fixture
def unmerged(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> dr.Store:
    """A closed store of limited bytes, with enough segments to be merged."""
    monkeypatch.setattr(background, "_FIRST_S", 3600.0)
    with dr.create(tmp_store, serial_schema(), segment_steps="episode", capacity_bytes=1 << 30) as store:
        write(store, MANY)
    return store


def test_it_looks_once_and_tells_whether_it_merged_any(unmerged: dr.Store) -> None:
    path = Path(unmerged.path)
    assert merge(path, unmerged.uuid) == MERGED
    assert len(folders(path)) == 1
    assert merge(path, unmerged.uuid) == 0


def run_here(store: dr.Store, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Do the work of such a process in this one, without a rest."""
    monkeypatch.setattr(Pace, "_rest", lambda self, seconds: None)
    monkeypatch.chdir(store.path)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return process.main(store.uuid, str(os.getppid()), "0")
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_it_does_no_more_than_renames_and_counters_under_the_store_lock(
    unmerged: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for the disk, or for the processor, everybody who needs the lock would wait for it, too."""
    path = Path(unmerged.path)
    lock, done = path / "counters/lock", {True: set[str](), False: set[str]()}

    def note(point: Point) -> None:
        is_elsewhere = point.name == "open" and "segments/" not in str(point.args[0])
        is_nothing = point.name == "rmdir" and not point.kwargs and not os.path.lexists(point.args[0])
        if not is_elsewhere and not is_nothing:
            done[bool(is_held(lock))].add(point.name)

    with intercepted(note):
        assert run_here(unmerged, monkeypatch)
    assert len(folders(path)) == 1
    assert {"open", "fsync", "unlink", "rmdir"} <= done[False]
    assert "rename" in done[True]
    assert not done[True] & {"open", "fsync", "fdatasync", "syncfs", "unlink", "rmdir", "write", "pwrite"}


def test_it_begins_no_further_pack_when_its_turn_is_over(unmerged: dr.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "_MANY", 8)
    monkeypatch.setattr(compaction, "_TURN_S", 0.0)
    monkeypatch.setattr(compaction, "most_rows", lambda *_: 100)
    left = [MANY]
    while run_here(unmerged, monkeypatch):
        left.append(len(folders(Path(unmerged.path))))
    assert left == [70, 55, 40, 25, 10]


@pytest.mark.parametrize(
    ("kwargs", "segments"),
    [
        ({}, background._BEGUN),
        ({"compression": "zstd"}, 1),  # 4 GiB each
        ({"compression": "zstd", "segment_steps": 1000}, background._BEGUN),
        ({"compression": "zstd", "segment_steps": "episode"}, background._BEGUN),
        ({"compression": "zstd", "segment_steps": 1_000_000}, 6),
    ],
)
def test_segments_are_looked_at_again_when_there_may_be_enough(
    tmp_store: Path, kwargs: dict[str, object], segments: int
) -> None:
    with dr.create(tmp_store, serial_schema(), **kwargs) as store:  # type: ignore[arg-type]
        root = store._root
        made = background.BackgroundCompaction(root, root.counters(writable=False), lambda: False)
    assert made._between == segments
