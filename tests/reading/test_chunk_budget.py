"""What is mapped or read of chunks stays within what a process may have, and batches are the same whatever leaves."""

import errno
import os
import shutil

import numpy as np
import pytest

import diskreplay as dr
from tests.conftest import mapped_files
from tests.crash.injection import in_child
from tests.reading.inner import are_read, count_mappings, limit, make_room, mapping_of_chunks, new_arenas, read_bytes
from tests.testing.support import append_numbered, serial_schema, serials

EPISODES, STEPS = 60, 8
SMALL_BLOCK = 16 << 10


def make(path, **options):
    with dr.create(path, serial_schema(), segment_steps="episode", **options) as store, store.writer() as writer:
        for episode in range(EPISODES):
            append_numbered(writer, range(episode * STEPS, (episode + 1) * STEPS))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A store of a segment an episode."""
    return make(tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(autouse=True)
def _new_arenas(monkeypatch):
    """Memory of this test alone."""
    new_arenas(monkeypatch)


def draw(sampler, batches):
    return [sampler.sample().numpy() for _ in range(batches)]


def sampler_of(store, seed=0):
    return dr.Sampler(store, dr.Transitions(n_step=2), batch_size=32, seed=seed)


def expected(path, batches, seed=0):
    with dr.open(path) as store, sampler_of(store, seed) as sampler:
        return draw(sampler, batches)


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def only_mapped(monkeypatch):
    limit(monkeypatch, largest_read_bytes=0)


def test_small_chunks_of_sealed_segments_are_read_and_not_mapped(path):
    with dr.open(path) as store, sampler_of(store) as sampler:
        draw(sampler, 20)
        assert not [file for file in mapped_files(str(path)) if "/segments/" in file]
        assert read_bytes() > 0
    del sampler, store
    assert read_bytes() == 0


def test_chunks_that_may_change_or_are_large_or_have_wide_rows_are_mapped(tmp_path):
    schema = dr.Schema(
        obs={"wide": dr.Field((1024,), "uint8"), "narrow": dr.Field((1,), "uint8")}, action=dr.Field((), "int64")
    )
    path = tmp_path / "store"

    def mapped():
        return {file.split("/")[-2] for file in mapped_files(str(path)) if "/c.0.0" in file}

    with dr.create(path, schema, segment_steps=32) as store, store.writer() as writer:
        for step in range(20):
            obs = {"wide": np.full(1024, step, np.uint8), "narrow": np.array([step], np.uint8)}
            writer.append(obs, step, 0.0, step % 10 == 9)
        with dr.open(path) as reader:
            for episode in reader.episodes:
                assert (episode.obs["narrow"] == episode.obs["wide"][:, :1]).all()
            assert {"narrow", "wide"} <= mapped()
            del episode
    assert read_bytes() == 0
    with dr.open(path) as reader:
        for episode in reader.episodes:
            assert (episode.obs["narrow"] == episode.obs["wide"][:, :1]).all()
        assert mapped() == {"wide"}
        assert read_bytes() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mappings", "blocks"), [(40, 0), (5, 0), (30_000, 5), (30, 5), (5, 2)], ids=lambda number: str(number)
)
def test_batches_are_the_same_while_chunks_leave_and_come_back(path, monkeypatch, mappings, blocks):
    wanted = expected(path, 40)
    limit(monkeypatch, block_bytes=SMALL_BLOCK, mappings=mappings, read_bytes=blocks * SMALL_BLOCK)
    new_arenas(monkeypatch)
    with dr.open(path) as store, sampler_of(store) as sampler:
        for batch in wanted:
            assert_equal(draw(sampler, 1), [batch])
            assert read_bytes() <= blocks * SMALL_BLOCK


def test_what_was_asked_for_longest_ago_leaves_first(path, monkeypatch):
    only_mapped(monkeypatch)
    with dr.open(path) as store:
        episodes = store.episodes

        def mapped():
            return {
                int(file.split("/segments/")[1].split("/")[0]) for file in mapped_files(str(path)) if "/obs/" in file
            }

        assert len(episodes[0].obs) == STEPS + 1  # which also maps what reading one takes
        most = count_mappings() + 16
        limit(monkeypatch, mappings=most)
        for number in range(1, EPISODES):
            assert episodes[0].obs[0, 0] == 0
            assert episodes[number].obs[0, 0] == number * STEPS
            assert count_mappings() <= most
        assert {0, EPISODES - 1, EPISODES - 2, EPISODES - 3} <= mapped()
        assert not {1, 2, 3} & mapped()


def test_a_chunk_that_was_read_and_is_mapped_later_may_leave_as_one(path, monkeypatch):
    with dr.open(path) as store:
        table = store.snapshot.leaf("obs")
        assert [episode.obs[0, 0] for episode in store.episodes] == [*range(0, EPISODES * STEPS, STEPS)]
        assert are_read(table)
        store.snapshot.tables.forget()
        only_mapped(monkeypatch)
        assert [episode.obs[0, 0] for episode in store.episodes] == [*range(0, EPISODES * STEPS, STEPS)]
        assert not are_read(table)


@pytest.mark.slow
@pytest.mark.parametrize("reads", [True, False])
def test_two_stores_of_a_process_share_what_it_may_have(path, tmp_path, monkeypatch, reads):
    other = make(tmp_path / "other")
    wanted = [expected(path, 30), expected(other, 30, seed=1)]
    most = 6 * SMALL_BLOCK if reads else 0
    limit(monkeypatch, block_bytes=SMALL_BLOCK, mappings=50, read_bytes=most)
    new_arenas(monkeypatch)
    with dr.open(path) as a, dr.open(other) as b, sampler_of(a) as first, sampler_of(b, 1) as second:
        for one, two in zip(*wanted, strict=True):
            assert_equal(draw(first, 1), [one])
            assert_equal(draw(second, 1), [two])
            assert read_bytes() <= most
        # The needs of a single call come first; what is left is within the limit again with the next that maps one.
        make_room()
        assert count_mappings() < 50


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [0, 1, 45])
def test_a_system_that_refuses_mappings_is_not_what_a_user_sees(path, monkeypatch, allowed):
    wanted = expected(path, 40)
    only_mapped(monkeypatch)
    with dr.open(path) as store, sampler_of(store) as sampler:
        refused, most = [], count_mappings() + allowed

        def refuse(*arguments):
            if count_mappings() >= most:
                refused.append(arguments)
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return real(*arguments)

        real = mapping_of_chunks(monkeypatch, refuse)
        assert_equal(draw(sampler, 40), wanted)
        assert refused
        monkeypatch.undo()
        assert_equal(draw(sampler, 1), expected(path, 41)[40:])


def test_chunks_that_may_change_are_never_copied_when_mappings_are_refused(tmp_path, monkeypatch):
    with dr.create(tmp_path / "store", serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(STEPS))
        with dr.open(tmp_path / "store") as reader:
            mapping_of_chunks(monkeypatch, refuse_all)
            with pytest.raises(dr.ReplayError, match="the system refuses another one"):
                _ = reader.episodes[0].obs
            monkeypatch.undo()
            assert reader.episodes[0].obs[0, 0] == 0


def refuse_all(*arguments):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_arrays_stay_what_they_are_when_their_chunks_leave(path, monkeypatch):
    limit(monkeypatch, block_bytes=SMALL_BLOCK, mappings=20, read_bytes=3 * SMALL_BLOCK)
    new_arenas(monkeypatch)
    with dr.open(path) as store:
        kept = [episode.obs for episode in store.episodes]
        for _ in range(3):
            for episode in store.episodes:
                assert len(episode["serial"]) == STEPS
    for number, obs in enumerate(kept):
        assert obs[:STEPS, 0].tolist() == list(range(number * STEPS, (number + 1) * STEPS))


def test_a_forked_child_reads_for_itself_and_its_parent_goes_on(path):
    wanted = expected(path, 20)
    with dr.open(path) as store, sampler_of(store) as sampler:
        assert_equal(draw(sampler, 10), wanted[:10])

        def work(tell):
            assert read_bytes() == 0
            tell(serials(store) == list(range(EPISODES * STEPS)))
            tell(read_bytes() > 0)

        assert in_child(work).told == [True, True]
        assert_equal(draw(sampler, 10), wanted[10:])


def test_a_segment_that_is_dropped_gives_its_memory_back(path, tmp_path):
    copy = shutil.copytree(path, tmp_path / "copy")
    with dr.open(copy) as reader, dr.open(copy, "a") as store:
        assert sum(len(episode["serial"]) for episode in reader.episodes) == EPISODES * STEPS
        assert read_bytes() > 0
        assert store.evict(lambda episode: True) == EPISODES * STEPS
        reader.refresh()
        assert len(reader) == 0
        del store
        assert read_bytes() == 0


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "short", "link"])
def test_a_chunk_that_is_damaged_after_opening_is_named_when_it_is_read(tmp_path, damage):
    path = make(tmp_path / "store")
    chunk = next((path / "segments" / "00000007" / "obs").glob("c.*"))
    with dr.open(path) as store:
        data = chunk.read_bytes()
        os.chmod(chunk, 0o600)
        chunk.unlink()
        if damage == "short":
            chunk.write_bytes(data[:-1])
        elif damage == "link":
            chunk.symlink_to(path / "segments" / "00000008" / "obs" / chunk.name)
        message = {"missing": "is missing", "short": "bytes where", "link": "is a symbolic link"}[damage]
        with pytest.raises(dr.FormatError, match=message):
            _ = store.episodes[7].obs
        assert store.episodes[8].obs[0, 0] == 8 * STEPS
