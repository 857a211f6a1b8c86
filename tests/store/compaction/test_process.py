"""The process that merges: how it rests, and when it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import diskreplay as dr
from diskreplay.format import layout
from diskreplay.store.compaction import process
from diskreplay.store.compaction.process import Pace, Stopped
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
        (0.02, 3.0, 0, 3.02),
        (0.02, 3.0, process._BEHIND // 4, 3.02 * 0.75),
        (0.02, 3.0, 2 * process._BEHIND, 0.0),
    ],
    ids=["worked little", "worked", "waited for the disk", "a little behind", "far behind"],
)
def test_it_rests_as_long_as_others_and_the_disk_need_but_keeps_up(
    pace: Pace, monkeypatch: pytest.MonkeyPatch, cpu: float, waited: float, segments: int, rested: float | None
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(pace.stopped, "wait", pauses.append)
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
    pace.stopped.set()
    with pytest.raises(Stopped):
        pace()
    with pytest.raises(Stopped):
        Pace(pace._counters, parent=-1)()


def test_it_says_nothing_of_a_store_that_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", process.__name__, str(tmp_path / "store"), str(os.getpid())]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
