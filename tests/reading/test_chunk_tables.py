"""Tables of chunks: who has addresses of one that changes, and other threads while it is filled."""

import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.kernels import gathering as cols
from diskreplay.reading.chunk_table import ChunkTable, ChunkTables
from tests.reading.test_mappings import paths
from tests.reading.test_packs import store
from tests.testing.support import append_numbered, serial_schema

assert [paths, store]  # fixtures


@pytest.mark.slow
def test_who_has_addresses_of_a_table_that_grows_finds_that_there_are_others(paths, monkeypatch):
    store = dr.open(paths[0])
    tables = store.snapshot.tables
    table, add_places, asked, told = tables.leaf("done"), ChunkTable._add_places, threading.Event(), []

    def ask():
        asked.set()
        told.append(tables.addresses(["done"]))

    other = threading.Thread(target=ask)

    def add_and_look(self, *places):
        other.start()
        assert asked.wait(60)
        time.sleep(0.05)  # time to be told too early
        assert not told  # before all is replaced, nobody is told anything
        assert tables.held is held  # and who has addresses finds them good
        add_places(self, *places)

    monkeypatch.setattr(ChunkTable, "_add_places", add_and_look)
    held, (before,) = tables.addresses(["done"])
    was = [array.copy() for array in before]
    table.ensure(*np.array([[0], [0], [0], [1 << int(table.shift[0])]]))
    other.join()
    (now_held, (now,)) = told[0]
    assert now_held is tables.held is not held
    assert all(one is not another for one, another in zip(before[:2], now[:2], strict=True))
    assert len(now[3]) > len(before[3])
    first, chunks, _, bases = now
    assert bases[first[0] : first[0] + 2].all()  # an address that is filled in later is there
    assert chunks[0] >= 2
    for array, copy in zip(before, was, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_a_line_of_a_table_is_made_once_for_the_same_arrays(paths):
    tables = dr.open(paths[0]).snapshot.tables
    table = tables.leaf("done")
    _, ((before, arrays),) = tables.lines(["done"])
    _, ((again, _),) = tables.lines(["done"])
    assert again is before
    assert before[[cols.FIRST_CHUNK, cols.CHUNKS, cols.SHIFT, cols.BASES]].tolist() == [
        array.ctypes.data for array in arrays
    ]
    table.ensure(*np.array([[0], [0], [0], [1 << int(table.shift[0])]]))  # more chunks than there was room for
    held, ((now, arrays),) = tables.lines(["done"])
    assert held is tables.held
    assert now is not before
    assert now[cols.BASES] == arrays[3].ctypes.data == table.bases.ctypes.data
    assert now[[cols.BASES_SIZE, cols.ROW_BYTES]].tolist() == [len(table.bases), 1]


def test_tables_tell_of_new_segments_when_all_that_is_known_of_them_is_there(tmp_path, monkeypatch):
    # As above: who finds the same `held` does not look at the arrays again.
    add_places, seen = ChunkTable._add_places, []

    def add_and_look(self, *places):
        held = self._tables.held
        add_places(self, *places)
        assert self._tables.held is held
        seen.append([len(array) for array in (self.shift, self.first_chunk, self.chunks, self.used, self.how)])
        assert seen[-1] == [len(self.shift)] * 3 + [len(self.bases)] * 2
        assert (self.first_chunk + self.chunks).max(initial=0) == len(self.bases)

    monkeypatch.setattr(ChunkTable, "_add_places", add_and_look)
    with dr.create(tmp_path / "store", serial_schema(), segment_steps="episode") as store:
        for first in range(0, 40, 10):
            with store.writer() as writer:
                append_numbered(writer, range(first, first + 10))
            store.refresh()
        assert store.compact()["segments"] == 4
        store.refresh()
    assert {shifts for shifts, *_ in seen} == {0, 1, 2, 3, 4, 5}


def test_an_interrupt_between_a_change_of_tables_and_its_note_leaves_addresses_that_stay_mapped(paths, monkeypatch):
    tables = dr.open(paths[0]).snapshot.tables
    table = tables.leaf("done")
    row = np.array([[0], [0], [0], [0]])
    table.ensure(*row)
    before, _ = tables.addresses(["done"])

    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, tables.lock:
        patch.setattr(ChunkTables, "note_change", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.release(np.flatnonzero(table.bases))
    table.ensure(*row)  # into arrays that nobody was told of
    held, ((_, _, _, bases),) = tables.addresses(["done"])
    assert held is not before
    assert held is tables.held
    assert bases.any()
    mapped = weakref.ref(next(iter(table.holder.values())))
    with tables.lock:
        table.release(np.flatnonzero(table.bases))
    assert mapped() is not None  # as long as what was returned with its address is referenced
    del held
    assert mapped() is None


def test_no_other_thread_looks_at_tables_that_are_being_filled(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[bool] = []

    def look(tables: ChunkTables) -> None:
        locked.append(not tables.lock.acquire(blocking=False))
        if not locked[-1]:
            tables.lock.release()

    def looked_at(change: Any) -> Any:
        def look_and_change(self: ChunkTable, *places: Any) -> None:
            other = threading.Thread(target=look, args=[self._tables])
            other.start()
            other.join()
            change(self, *places)

        return look_and_change

    with dr.open(store.path) as reader:
        for leaf in store.schema.leaves:
            reader.snapshot.leaf(leaf)  # tables are made at their first use
        store.compact()
        for name in ("_add_places", "release"):
            monkeypatch.setattr(ChunkTable, name, looked_at(getattr(ChunkTable, name)))
        reader.refresh()
        monkeypatch.undo()
    assert len(locked) > 10
    assert all(locked)
