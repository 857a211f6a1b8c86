"""All stores of a process share the mappings that it may have, and what the system refuses says what to do."""

import resource
import threading
import time
import weakref

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.kernels import gathering as cols
from diskreplay.reading import chunk_budget, chunk_table
from diskreplay.reading.chunk_table import ChunkTable
from tests.testing.support import append_numbered, mapped_files, run_python, serial_schema, serials

STEPS = 400
MOST = 60


@pytest.fixture
def paths(tmp_path):
    """Three stores of many small chunks."""
    found = []
    for name in "abc":
        found.append(tmp_path / name)
        with (
            dr.create(found[-1], serial_schema(), chunk_bytes=4096, segment_steps=32) as store,
            store.writer() as writer,
        ):
            for first in range(0, STEPS, 8):
                append_numbered(writer, range(first, first + 8))
    return found


@pytest.mark.slow
def test_stores_together_keep_to_the_number_of_mappings_of_a_process(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_budget, "MOST_MAPPINGS", MOST)
    monkeypatch.setattr(chunk_table, "LARGEST_READ", 0)
    stores = [dr.open(path) for path in paths]
    for _ in range(3):
        for store in stores:
            assert serials(store) == list(range(STEPS))
            assert len(mapped_files(tmp_path)) <= MOST
    assert len(mapped_files(paths[-1])) > 10  # the one that is used is not the one that lets go
    for store in stores:
        store.close()


@pytest.mark.slow(turns=4)
def test_samplers_in_threads_take_mappings_from_each_other_and_draw_what_is_there(paths, monkeypatch):
    monkeypatch.setattr(chunk_budget, "MOST_MAPPINGS", MOST)
    monkeypatch.setattr(chunk_table, "LARGEST_READ", 0)
    wrong = []

    def draw(path, seed):
        try:
            with dr.open(path) as store, dr.Sampler(store, dr.Transitions(), batch_size=64, seed=seed) as sampler:
                for _ in range(60):
                    batch = sampler.sample().numpy()
                    assert (batch["obs"] == batch["serial"][:, None]).all()
                    assert (batch["reward"] == batch["serial"]).all()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=draw, args=(path, seed)) for seed, path in enumerate(paths)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


REFUSED = """
import re, resource, sys
import numpy as np
import diskreplay as dr
from tests.crash.injection import in_child

path, other = sys.argv[1:3]
with dr.open(path) as store, dr.open(other) as idle:
    def read(store, n):
        return store.episodes[n].obs

    def limit(chunks):
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + int(chunks * (16 << 20)), -1))

    def work(tell):
        first = read(idle, 0)
        del first  # mapped still, and not in use
        limit(0.75)
        tell(int(read(store, 1)[0, 0]))  # in the place of the other store's
        kept = read(store, 0)  # in the place of its own
        tell(int(kept[0, 0]))
        try:
            read(idle, 1)
        except dr.ReplayError as error:
            tell(str(error))
        del kept
        tell(int(read(idle, 1)[0, 0]))

    told = in_child(work).told
assert told[:2] == [1, 0], told
assert re.fullmatch(
    r"this process has \\d+ files of stores mapped, and the system refuses another one: Cannot allocate memory. Close "
    r"stores and samplers, and release arrays and episodes, that are not needed any more; make stores with larger "
    r"chunk_bytes; or allow a process more memory, or more mappings \\(sysctl vm.max_map_count\\)",
    told[2],
), told
assert told[3] == 1, told
"""


def test_a_mapping_that_the_system_refuses_replaces_idle_ones_or_is_an_error_that_says_what_to_do(tmp_path):
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        pytest.skip("memory is limited here")
    schema = dr.Schema(obs=dr.Field((1 << 20,), "uint8"), action=dr.Field((), "int64"))
    for name in ("a", "b"):
        store = dr.create(tmp_path / name, schema, chunk_bytes=64 << 20, segment_steps=64)
        with store, store.writer() as writer:
            for episode in range(2):
                for t in range(16):  # a chunk
                    writer.append(np.full(1 << 20, episode, np.uint8), 0, 0.0, t == 15)
    assert run_python(REFUSED, tmp_path / "a", tmp_path / "b") == ""


@pytest.mark.slow
def test_who_has_addresses_of_a_table_that_grows_finds_that_there_are_others(paths, monkeypatch):
    store = dr.open(paths[0])
    tables = store.snapshot.tables
    table, add_places, asked, told = tables.leaves["done"], ChunkTable._add_places, threading.Event(), []

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
    table = tables.leaves["done"]
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
    assert {shifts for shifts, *_ in seen} == {1, 2, 3, 4, 5}


def test_the_next_chunk_is_mapped_of_what_is_read_and_of_nothing_else(tmp_path):
    with (
        dr.create(tmp_path / "store", serial_schema(), chunk_bytes=4096, segment_steps=100_000) as store,
        store.writer() as writer,
        dr.Sampler(store, dr.Transitions(), fields=["obs", "action"], batch_size=8) as sampler,
    ):
        append_numbered(writer, range(40), end="")
        sampler.sample()
        leaves = store.snapshot.tables.leaves
        rows = 1 << int(leaves["action"].shift[0])
        for stop in range(80, rows + 41, 40):
            append_numbered(writer, range(stop - 40, stop), end="")
            store.refresh()
            assert {name for name, leaf in leaves.items() if leaf.bases.any()} == {"obs", "action", "done"}
            for name in "obs", "action":
                leaf = leaves[name]
                first, last = int(leaf.first_chunk[0]), (stop - 1) >> int(leaf.shift[0])
                assert leaf.bases[first : first + last + 1].all(), (name, stop)
        assert last > 0


def test_an_interrupt_between_a_change_of_tables_and_its_note_leaves_addresses_that_stay_mapped(paths, monkeypatch):
    tables = dr.open(paths[0]).snapshot.tables
    table = tables.leaves["done"]
    row = np.array([[0], [0], [0], [0]])
    table.ensure(*row)
    before, _ = tables.addresses(["done"])

    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, tables.lock:
        patch.setattr(chunk_table.ChunkTables, "note_change", interrupt)
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
