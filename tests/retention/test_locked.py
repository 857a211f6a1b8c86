"""What retention does under the store lock and what it makes up for: tests step in at functions of the package."""

import errno
import threading
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.errors import StorageFull
from diskreplay.testing import check_account
from tests.retention.test_evict import segments_on_disk, store, visible, write
from tests.testing import inner
from tests.testing.on_disk import WORDS
from tests.testing.support import append_numbered, serial_schema

assert store  # a fixture


def test_sealed_segments_are_not_read_while_the_store_is_locked(tmp_store, monkeypatch):
    with dr.create(tmp_store, serial_schema(), segment_steps=4) as store, store.writer() as writer:
        for first in range(0, 200, 5):
            append_numbered(writer, range(first, first + 5))
    read, held = [], []
    lock, reading = map(inner.real, (inner.EVICTION_LOCK, inner.EVICTION_READ))

    @contextmanager
    def locked(path):
        with lock(path):
            held.append(path)
            yield
            held.pop()

    monkeypatch.setattr(*inner.EVICTION_LOCK, locked)
    monkeypatch.setattr(*inner.EVICTION_READ, lambda *args: read.append(bool(held)) or reading(*args))
    with dr.open(tmp_store, "a") as store:
        assert len(store) == 200
    assert len(read) == len(segments_on_disk(tmp_store)) > 20
    assert not any(read)


def test_what_there_was_no_room_to_count_as_evicted_leaves_when_there_is(tmp_store, monkeypatch):
    real = inner.real(inner.SET_COUNTER)

    def set_counter(counters, word, value):
        if word == WORDS.index("evicted"):
            raise StorageFull(errno.ENOSPC, "no room")
        real(counters, word, value)

    with (
        dr.create(tmp_store, serial_schema(), capacity=20, segment_steps=10, chunk_bytes=1024) as store,
        store.writer() as writer,
    ):
        append_numbered(writer, range(20))
        with monkeypatch.context() as patch:
            patch.setattr(*inner.SET_COUNTER, set_counter)
            with suppress(StorageFull):
                for first in range(20, 60, 5):
                    append_numbered(writer, range(first, first + 5))
                writer.flush()
            # Where an append raised, what the thread is in the middle of must meet the full disk, too.
            with store._sealer._condition:
                assert store._sealer._condition.wait_for(lambda: store._sealer._runner is None, 60)
        assert list((tmp_store / "counters").glob("old-*"))
        following = visible(store)[-1] + 1
        append_numbered(writer, range(following, following + 3))
        writer.flush()
        assert not list((tmp_store / "counters").glob("old-*"))
        shown = visible(store)
        assert shown == list(range(shown[-1] - 19, shown[-1] + 1))
        check_account(store, following + 3)


def test_a_segment_that_there_was_no_room_to_seal_is_no_error_when_there_is(tmp_store, monkeypatch):
    refused = threading.Event()

    def seal_segments(root, infos, is_waited_for):
        refused.set()
        raise StorageFull(errno.ENOSPC, "no room")

    with dr.create(tmp_store, serial_schema(), segment_steps=10, chunk_bytes=1024) as store, store.writer() as writer:
        with monkeypatch.context() as patch:
            patch.setattr(*inner.SEAL_SEGMENTS, seal_segments)
            append_numbered(writer, range(14), end="terminated")
            append_numbered(writer, range(14, 16))
            assert refused.wait(60)
            with store._sealer._condition:
                assert store._sealer._condition.wait_for(lambda: store._sealer._runner is None, 60)
        writer.flush()
        assert store.info()["segments"][0]["state"] == "sealed"
        assert visible(store) == list(range(16))


def test_a_sampler_keeps_every_batch_that_it_has_planned(store, monkeypatch):
    inner.gather_in_threads(monkeypatch)
    write(store, 20)
    args = {"batch_size": 32, "seed": 3, "prefetch": 3}
    sampler, twin = (dr.Sampler(store, dr.Transitions(), **args) for _ in range(2))
    store.refresh()
    sampler.gather(np.concatenate([episode.ids for episode in store.episodes]))  # maps every chunk
    for _ in range(4):
        assert sampler.sample().index.tolist() == twin.sample().index.tolist()
    planned = [plan.draw.ids.tolist() for plan in twin._planner.queue]
    assert len(planned) == 3
    for plan in sampler._planner.queue:
        plan.gathered.result()  # once it has begun, it has what it needs
    assert store.evict(lambda episode: True) == 100
    assert segments_on_disk(store.path) == []
    for ids in planned:
        batch = sampler.sample().numpy()
        assert batch["index"].tolist() == ids
        assert (batch["obs"][:, 0] == batch["serial"]).all()
    with pytest.raises(dr.NotEnoughData):
        sampler.sample()
    sampler.close()
    twin.close()


@pytest.mark.slow(turns=4)
def test_thousands_of_segments_leave_in_parts_so_that_others_get_the_lock(tmp_store, monkeypatch):
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        write(store, 150, steps=1)
        held = []
        real = inner.real(inner.EVICTION_LOCK)
        monkeypatch.setattr(*inner.EVICTION_LOCK, lambda *args: held.append(args) or real(*args))
        assert store.evict(lambda episode: episode["serial"][0] % 150 < 140) == 140
        assert len(held) == 4  # to hide them, and to delete 64, 64 and 12
        assert segments_on_disk(tmp_store) == list(range(140, 150))
        assert store.info()["steps_evicted"] == 140
        assert store.verify(deep=True) == []
