"""Steps that were inserted are counted exactly, also while a segment is being deleted."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from diskreplay.segments.damage import quarantine
from diskreplay.segments.documents import layout, limiters
from diskreplay.segments.documents.eviction_list import evicted_by_removals, removed_path
from diskreplay.segments.documents.limiters import StepCounter
from diskreplay.segments.documents.root import Root, read_root
from tests.testing.support import append_numbered, serial_schema


@pytest.fixture
def root(tmp_store: Path) -> Root:
    """A store of 50 steps in segments of five, of which the first 30 were deleted."""
    with dr.create(tmp_store, serial_schema(), capacity=20, segment_steps=5, compaction="manual") as store:
        with store.writer() as writer:
            for first in range(0, 50, 5):
                append_numbered(writer, range(first, first + 5))
        store._sealer.drain()
    found = read_root(tmp_store)
    assert evicted_by_removals(found) == 0
    return found


def change(root: Root) -> None:
    """Have the counters be read again."""
    counters = root.counters(writable=True)
    counters.set(layout.NEXT_SEGMENT, int(counters.read()[layout.NEXT_SEGMENT]) + 1)


def move_away(root: Root) -> int:
    """Do the first half of a deletion; return what the counter of evicted steps has to be."""
    evicted = root.counters().evicted_after(5)
    oldest = min(int(path.name) for path in root.segments_folder.glob("0*"))
    os.rename(root.segment_path(oldest), removed_path(root.counters_folder, oldest, evicted))
    assert evicted_by_removals(root) == evicted
    return evicted


def test_a_segment_that_has_left_and_is_not_counted_yet_is_counted(root: Root, monkeypatch: Any) -> None:
    """For long, where the process that moved it has died; nobody waits."""
    monkeypatch.setattr(limiters.time, "sleep", None)
    counters, counter = root.counters(writable=True), StepCounter(root)
    evicted = move_away(root)
    assert counter.read().ever == 50
    change(root)
    assert counter.read().ever == 50
    counters.set(layout.STEPS_EVICTED, evicted)
    assert counter.read().ever == StepCounter(root).read().ever == 50
    with dr.open(root.path, mode="a"):
        assert evicted_by_removals(root) == 0
    assert counter.read().ever == StepCounter(root).read().ever == 50


@pytest.mark.parametrize("is_first", [True, False])
def test_a_segment_that_leaves_while_segments_are_read_is_counted_once(
    root: Root, monkeypatch: Any, is_first: bool
) -> None:
    counter = StepCounter(root)
    read_segments, calls = counter._read_segments, []

    def read(end: int) -> None:
        calls.append(end)
        if len(calls) == 1 and is_first:
            move_away(root)
        read_segments(end)
        if len(calls) == 1 and not is_first:
            move_away(root)

    assert counter.read().ever == 50
    change(root)
    monkeypatch.setattr(counter, "_read_segments", read)
    assert counter.read().ever == 50
    assert len(calls) == 2


def test_a_segment_that_leaves_quarantine_is_counted_once(root: Root, monkeypatch: Any) -> None:
    oldest = min(int(path.name) for path in root.segments_folder.glob("0*"))
    quarantine.move_aside(root.folder, layout.segment_folder(oldest), "tried")
    (entry,) = quarantine.read_quarantine(root.folder)
    counter, seen = StepCounter(root), []
    assert counter.read().ever == 50
    sync_folder = quarantine.sync_folder

    def sync(path: Path) -> None:  # between the renaming and the counting
        change(root)
        seen.append((counter.read().ever, StepCounter(root).read().ever))
        sync_folder(path)

    monkeypatch.setattr(quarantine, "sync_folder", sync)
    shutil.rmtree(quarantine.take_out(root.folder, entry))
    assert seen == [(50, 50)]
    assert counter.read().ever == StepCounter(root).read().ever == 50


def test_of_segments_that_leave_at_every_attempt_none_is_counted_twice(root: Root, monkeypatch: Any) -> None:
    monkeypatch.setattr(limiters, "_ATTEMPTS", 2)
    counters, counter = root.counters(writable=True), StepCounter(root)
    counter._begin()
    read_evictions = counter._read_evictions

    def read(count: int) -> None:
        read_evictions(count)
        counters.set(layout.STEPS_EVICTED, max(30, evicted_by_removals(root)))
        move_away(root)

    with monkeypatch.context() as patch:
        patch.setattr(counter, "_read_evictions", read)
        assert counter.read().ever <= 50
    assert counter.read().ever == StepCounter(root).read().ever == 50
