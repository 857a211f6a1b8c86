"""Backups of stores with packs: whatever is merged while they are made, no step is lost and none is there twice."""

from pathlib import Path

import pytest

import diskreplay as dr
from tests.testing import inner, packed
from tests.testing.commands import verify
from tests.testing.support import digest


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "backup"


@pytest.fixture
def store(tmp_store: Path):
    """A store of sealed segments, not merged yet."""
    packed.write_segments(tmp_store)
    with dr.open(tmp_store, "a") as store:
        store.evict(lambda episode: 7 in episode["serial"])
        yield store


def test_a_pack_is_copied_byte_for_byte(store, to):
    store.compact()
    store.evict(lambda episode: 17 in episode["serial"])
    made = store.backup(to)
    assert digest(to / "segments") == digest(store.path / "segments")
    assert (made.segments, made.steps, made.problems) == (1, len(store), [])
    assert packed.shown(to) == packed.shown(store.path)


def test_segments_whose_rows_are_in_a_pack_are_not_copied(store, to, monkeypatch):
    packed.keep_members(monkeypatch)
    store.compact()
    made = store.backup(to)
    assert len(list((store.path / "segments").glob("0*"))) > 1
    assert (made.segments, made.steps) == (1, len(store))
    assert packed.shown(to) == packed.shown(store.path)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stage", ["ahead", "moment"])
def test_segments_may_be_merged_while_a_backup_is_made(store, to, monkeypatch, stage, when):
    """All are merged when the first of them is copied, without the lock or after a moment was chosen."""
    merged = []
    steps = len(store)

    def merge(instead):
        def merge_once(*args):
            if when == "after":
                instead(*args)
            if not merged:
                merged.append(store.compact()["segments"])
            if when == "before":
                instead(*args)

        return merge_once

    point = {"ahead": inner.COPY_SEALED, "moment": inner.COMPLETE_BACKUP}[stage]
    monkeypatch.setattr(*point, merge(inner.real(point)))
    made = store.backup(to)
    assert merged[0] > 5
    assert (made.steps, made.problems) == (steps, [])
    assert packed.shown(to) == packed.shown(store.path)
    assert verify(to, deep=True) == []
    with dr.open(to) as copy:
        assert copy.info()["steps_evicted"] == store.info()["steps_evicted"]
