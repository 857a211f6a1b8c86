"""Compaction by itself: when it begins, that it keeps what is there, and that it ends with the store."""

import threading
import time
from pathlib import Path

import pytest

import diskreplay as dr
from diskreplay.store.compaction import background
from tests.testing.merged import folders
from tests.testing.support import append_numbered, serial_schema

THREAD = "diskreplay-compaction"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_FIRST_S", 0.01)
    monkeypatch.setattr(background, "_BETWEEN_S", 0.01)
    monkeypatch.setattr(background, "_SEALED", 4)
    monkeypatch.setattr("diskreplay.store.compaction.compaction._MANY", 10)


def write(store: dr.Store, episodes: int) -> None:
    with store.writer() as writer:
        for number in range(episodes):
            append_numbered(writer, range(5 * number, 5 * number + 5))


def serials(store: dr.Store) -> list[int]:
    store.refresh()
    return sorted(int(serial) for episode in store.episodes for serial in episode["serial"])


def ends(condition: object, seconds: float = 30.0) -> bool:
    """Wait until a condition holds."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.01)
    return bool(condition())  # type: ignore[operator]


def is_working() -> bool:
    return any(thread.name == THREAD for thread in threading.enumerate())


def test_many_short_segments_are_merged_and_nothing_else_changes(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        write(store, 40)
        assert ends(lambda: len(folders(tmp_store)) < 12)
        assert serials(store) == list(range(200))
        with dr.open(tmp_store) as reader:
            assert serials(reader) == list(range(200))
    assert not is_working()


@pytest.mark.parametrize("kwargs", [{"compaction": "manual"}, {}], ids=["manual", "few segments"])
def test_nothing_begins_where_it_is_not_wanted_or_does_not_pay(tmp_store: Path, kwargs: dict[str, str]) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps="episode", **kwargs) as store:  # type: ignore[arg-type]
        write(store, 40 if kwargs else 6)
        assert not is_working()
        assert len(folders(tmp_store)) == (40 if kwargs else 6)


def test_a_store_that_is_closed_in_the_middle_of_a_merge_is_whole(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_WORK_S", 0.0)
    for name in ("_REST_ALONE", "_REST_BESIDE_OTHERS"):
        monkeypatch.setattr(background, name, 1e9)  # the first rest lasts until the store is closed
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        write(store, 40)
        assert ends(is_working)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert not is_working()
    assert not list(tmp_store.glob("counters/next-*"))
    with dr.open(tmp_store) as store:
        assert serials(store) == list(range(200))


@pytest.mark.parametrize(
    ("others", "waited", "rested"),
    [
        (0.0, 0.0, 0.01 * background._REST_ALONE),
        (0.5, 0.0, 0.01 * background._REST_BESIDE_OTHERS),
        (0.5, 3.0, 3.01),
    ],
    ids=["alone", "beside others", "after waiting for the disk"],
)
def test_it_rests_as_long_as_others_and_the_disk_need(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch, others: float, waited: float, rested: float
) -> None:
    pauses: list[float] = []
    with dr.create(tmp_store, serial_schema()) as store:
        made = store._compaction
    monkeypatch.setattr(made, "_pause", pauses.append)
    begun = made._rested = background._Clocks(wall=10.0, process=5.0, thread=3.0)
    made._worked_at = 11.0
    for work in (background._WORK_S / 2, 0.01):
        now = background._Clocks(11.0 + work + waited, begun.process + others + work, begun.thread + work)
        monkeypatch.setattr(background._Clocks, "read", classmethod(lambda cls, now=now: now))
        made._rest()
    assert pauses == [pytest.approx(rested)]
