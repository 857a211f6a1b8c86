"""Backups while a store changes: each test steps in at a function of the package."""

import errno
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from tests.crash.workloads import Single, Vector, create
from tests.integrity.backup.test_backup import Interrupted, content, ignore, numbered, to
from tests.testing import inner
from tests.testing.coded import check_coded_store
from tests.testing.on_disk import is_locked
from tests.testing.support import append_numbered, digest

assert to  # a fixture


def test_sealed_segments_are_copied_once_and_before_the_lock_is_taken(
    tmp_store: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, copy_sealed = [], inner.real(inner.COPY_SEALED)

    def copy(info: Any, *args: Any) -> None:
        copied.append((info.number, is_locked(tmp_store / "counters/lock")))
        copy_sealed(info, *args)

    monkeypatch.setattr(*inner.COPY_SEALED, copy)
    with numbered(tmp_store) as store:
        store.backup(to)
    assert copied == [(number, False) for number in range(4)]


def test_a_segment_that_vanishes_before_it_is_copied_makes_another_moment(
    tmp_store: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with numbered(tmp_store) as store, store.writer() as writer:
        append_numbered(writer, [40], end="")
        copy_live, moments = inner.real(inner.COPY_LIVE), []

        def vanish(*args):
            moments.append(len(store))
            if len(moments) < inner.BACKUP_MOMENTS:
                append_numbered(writer, [40 + len(moments)], end="")
                raise inner.SegmentVanished
            # The last one holds the lock.
            assert is_locked(tmp_store / "counters/lock")
            return copy_live(*args)

        monkeypatch.setattr(*inner.COPY_LIVE, vanish)
        assert store.backup(to).steps == 40 + inner.BACKUP_MOMENTS
        assert len(moments) == inner.BACKUP_MOMENTS
        monkeypatch.setattr(*inner.COPY_LIVE, lambda *_: (_ for _ in ()).throw(inner.SegmentVanished))
        with pytest.raises(dr.StoreLocked, match="were moved while they were copied; try again"):
            store.backup(to.with_name("never"))
        writer.close()


def test_a_segment_that_is_sealed_meanwhile_is_copied_up_to_the_moment(
    tmp_store: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create(tmp_store, capacity=None) as store:
        one = Single(store, 1, ignore)
        for _ in range(3):
            one.step()
        copy_live = inner.real(inner.COPY_LIVE)

        def seal(*args):
            one.step("terminated")
            one.close()
            return copy_live(*args)

        monkeypatch.setattr(*inner.COPY_LIVE, seal)
        store.backup(to)
        with dr.open(to) as backup:
            (span,) = check_coded_store(backup).values()
            assert span.stop == 3
            assert backup.verify(deep=True) == []


def test_a_live_segment_of_an_interrupted_backup_is_copied_anew(
    tmp_store: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with numbered(tmp_store) as store, store.writer() as writer:
        append_numbered(writer, [40, 41], end="")
        monkeypatch.setattr(*inner.BACKUP_SYNC, lambda _: (_ for _ in ()).throw(Interrupted))
        with pytest.raises(Interrupted):
            store.backup(to)
        monkeypatch.undo()
        append_numbered(writer, [42])
        writer.close()
        assert store.backup(to).steps == 43
        assert content(to) == content(tmp_store)
        assert digest(to) == digest(tmp_store)


def test_a_store_whose_lock_cannot_be_taken_is_said(tmp_store: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with numbered(tmp_store, 5) as store:
        monkeypatch.setattr(*inner.BACKUP_LOCK, refuse)
        with pytest.raises(dr.ReadOnlyError, match="a backup takes the lock of the store for a moment"):
            store.backup(to)


def test_a_lane_that_moves_on_while_counters_are_read_has_no_gap(
    tmp_store: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_live = inner.real(inner.READ_LIVE)
    with create(tmp_store, capacity=None) as store:
        one, some = Single(store, 1, ignore, durability="none"), Vector(store, 2, ignore, durability="none")
        one.step()
        some.step()

        def read(info: Any) -> Any:
            for _ in range(15):
                some.step([0])
                one.step("terminated")
            return read_live(info)

        monkeypatch.setattr(*inner.READ_LIVE, read)
        # Writers make their next segments under the store lock, and this thread is theirs, too.
        monkeypatch.setattr(*inner.BACKUP_LOCK, lambda path: nullcontext())
        store.backup(to)
        one.close()
        some.close()
    with dr.open(to) as backup:
        check_coded_store(backup)
        assert backup.verify(deep=True) == []
