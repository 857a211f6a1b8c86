"""The process that merges: how it rests, and when it ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import diskreplay as dr
from diskreplay.format import layout
from diskreplay.store.compaction import process
from diskreplay.store.compaction.process import Pace, Stopped
from tests.store.compaction.test_background import MANY, write
from tests.testing.support import serial_schema


@pytest.fixture
def pace(tmp_store: Path) -> Pace:
    with dr.create(tmp_store, serial_schema()) as store:
        return Pace(store._root.counters(writable=False), os.getppid())


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
    pace.look()
    pace._looked_at = pace._counters.peek(layout.NEXT_SEGMENT) - segments
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
        Pace(pace._counters, parent=-1)()


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
    command = [sys.executable, "-m", process.__name__, uuid, str(os.getpid())]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_store, env=path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert sorted(tmp_store.rglob("*")) == before
