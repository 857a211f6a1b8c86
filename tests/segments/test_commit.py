"""Counters that are stored by position: all of a store or nothing, and what is shown already is made up for."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from diskreplay.errors import StorageFull
from diskreplay.segments.documents.layout import NEXT_SEGMENT, STEPS_EVICTED
from diskreplay.segments.files import commit
from diskreplay.segments.files.commit import CountersByPosition, StoreCounters
from tests.crash.injection import Point, failing

LANES = 1024  # two pages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "c.0").write_bytes(bytes(8 * LANES))
    return tmp_path / "c.0"


def on_disk(path: Path) -> list[int]:
    return np.frombuffer(path.read_bytes(), "<i8").tolist()


def is_write(point: Point) -> bool:
    return point.name == "pwrite"


def test_numbers_lanes_and_slices_are_stored_as_in_an_array(path: Path) -> None:
    counters, expected = CountersByPosition(str(path), LANES), np.zeros(LANES, np.int64)
    for key, value in ((3, 7), (np.array([1, 900]), np.array([5, 6])), (slice(None), 9), (3, 9)):
        counters.data[key] = expected[key] = value
        assert on_disk(path) == expected.tolist() == counters.copy().tolist()
    assert counters[900] == 9


def test_a_store_that_finds_no_room_changes_nothing_and_may_be_repeated(path: Path) -> None:
    counters = CountersByPosition(str(path), LANES)
    counters[5] = 1
    with failing(is_write), pytest.raises(StorageFull):
        counters[5] = 2
    assert on_disk(path)[5] == counters[5] == 1
    counters.store_owed(late=False)  # nothing is owed
    assert on_disk(path)[5] == 1
    counters[5] = 2
    assert on_disk(path)[5] == 2


def test_a_late_store_that_finds_no_room_is_made_up_for_by_the_next_one(path: Path) -> None:
    counters = CountersByPosition(str(path), LANES, late=True)
    with failing(is_write):
        counters[5] = 2
        counters[6] = 3
    assert on_disk(path)[5:7] == [0, 0]
    counters[7] = 4
    assert on_disk(path)[5:8] == [2, 3, 4]


def test_a_store_to_two_pages_of_which_one_finds_room_is_completed_by_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, real = CountersByPosition(str(path), LANES), os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if offset >= 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: 4096 - offset], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        counters[:] = 1
        assert on_disk(path) == [1] * 512 + [0] * 512
        with pytest.raises(StorageFull):
            counters.store_owed(late=False)
    counters.store_owed(late=False)
    assert on_disk(path) == [1] * LANES


def test_a_word_of_the_store_and_its_complement_are_stored_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "keeps_reservations", lambda path: False)
    path = tmp_path / "c.0"
    path.write_bytes(StoreCounters.fresh())
    counters = StoreCounters(str(path), writable=True)
    counters.set(NEXT_SEGMENT, 4)
    before = path.read_bytes()
    with failing(is_write), pytest.raises(StorageFull):
        counters.set(STEPS_EVICTED, 9)
    assert path.read_bytes() == before == counters.raw()
    counters.set(STEPS_EVICTED, 9)
    reader = StoreCounters(str(path))
    assert reader.read().tolist() == counters.read().tolist() == [4, 0, 0, 9, *[0] * 12]
