"""Writers that are interrupted, dropped or find no room: tests step in at functions of the package."""

import errno
import os
import threading
import time

import pytest

import diskreplay as dr
from diskreplay.errors import StorageFull
from tests.crash.injection import Interrupt
from tests.testing import inner
from tests.testing.on_disk import WORDS
from tests.testing.support import append_numbered, serial_schema, serials
from tests.writing.test_dropped import wait_until_sealed
from tests.writing.test_preallocation import _ahead_at_once, drafts, half_fill, store

assert _ahead_at_once, store  # fixtures


@pytest.mark.parametrize(("at", "kept"), [(inner.PUBLISH_ROWS, 4), (inner.WRITE_ROWS, 3)], ids=["publish", "write"])
def test_a_writer_that_is_interrupted_inside_an_append_closes_and_keeps_what_was_published(
    store, monkeypatch, at, kept
):
    writer = store.writer()
    append_numbered(writer, range(3), end="open")
    real = inner.real(at)

    def interrupted(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(*inner.APPEND_ROW, lambda *step: False)  # which is interrupted elsewhere
        patch.setattr(*at, interrupted)
        with pytest.raises(Interrupt):
            append_numbered(writer, [3])
    with pytest.raises(dr.WriterClosed):
        append_numbered(writer, [4])
    store.close()
    with dr.open(store.path) as reader:
        (episode,) = reader.episodes
        assert episode["serial"].tolist() == list(range(kept))
        assert len(episode.obs) == len(episode) + 1


def test_a_writer_that_cannot_close_does_not_keep_the_others_from_it(store, monkeypatch):
    writers = [store.writer() for _ in range(3)]
    for i, writer in enumerate(writers):
        append_numbered(writer, range(10 * i, 10 * i + 3))
    bad = writers[1]
    monkeypatch.setattr(bad, "close", lambda: (_ for _ in ()).throw(dr.StorageFull(errno.ENOSPC, "full")))
    with pytest.raises(dr.StorageFull):
        store.close()
    monkeypatch.undo()
    seal = inner.real(inner.SEAL_SEGMENTS)
    monkeypatch.setattr(*inner.SEAL_SEGMENTS, lambda *a, **k: (time.sleep(0.2), seal(*a, **k)))
    bad.close()  # waits for it, though the store was closed before
    with dr.open(store.path) as reader:
        assert [s["state"] for s in reader.info()["segments"]] == ["sealed"] * 3


def test_a_writer_that_is_dropped_in_the_middle_of_anything_is_sealed(tmp_store):
    """The collector may come while this thread holds any lock, and another thread waits for that."""
    with dr.create(tmp_store, serial_schema()) as store:
        writer = store.writer()
        append_numbered(writer, [1])
        with pytest.warns(ResourceWarning), store._sealer._condition, inner.taking_locks:
            del writer
        wait_until_sealed(tmp_store)
        assert store.info()["segments"][0]["state"] == "sealed"
    # What sealed it may be on its way out.
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("diskreplay-sealer")]:
        thread.join(10)
        assert not thread.is_alive()


def test_one_that_there_is_no_room_to_count_leaves_nothing(store, monkeypatch):
    real_set, real_rename = inner.real(inner.SET_COUNTER), os.rename
    refused = []

    def set_counter(counters, word, value):
        if word == WORDS.index("next_segment") and not refused:
            refused.append(value)
            raise StorageFull(errno.ENOSPC, "no room")
        real_set(counters, word, value)

    def rename(source, target):
        if "next-" in str(target):
            raise OSError(errno.ENOSPC, "no room for a name")
        real_rename(source, target)

    with store.writer() as writer:
        following = half_fill(writer)
        assert len(drafts(store)) == 1
        monkeypatch.setattr(*inner.SET_COUNTER, set_counter)
        monkeypatch.setattr(os, "rename", rename)
        append_numbered(writer, range(following, 100))
    assert refused
    store.refresh()
    assert serials(store) == list(range(100))
    assert {segment["state"] for segment in store.info()["segments"]} == {"sealed"}
