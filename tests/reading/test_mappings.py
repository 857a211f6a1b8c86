"""All stores of a process share the mappings that it may have, and what the system refuses says what to do."""

import resource
import threading

import numpy as np
import pytest

import diskreplay as dr
from tests.reading.inner import limit
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
    limit(monkeypatch, mappings=MOST, largest_read_bytes=0)
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
    limit(monkeypatch, mappings=MOST, largest_read_bytes=0)
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
