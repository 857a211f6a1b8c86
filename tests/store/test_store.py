"""Store: create, open, refresh, snapshots."""

import pickle

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.support import append_numbered, digest, run_python, serial_schema, serials


def filled(path, episodes=3, steps=4, **kwargs):
    with dr.create(path, serial_schema(), **kwargs) as store, store.writer() as writer:
        for first in range(0, episodes * steps, steps):
            append_numbered(writer, range(first, first + steps))


def test_progress_of_reading_rewards_is_in_bytes(tmp_store, monkeypatch):
    monkeypatch.setattr("diskreplay.store.info._ROWS_AT_ONCE", 8)
    with dr.create(tmp_store, serial_schema()) as store:
        with store.writer() as writer:
            for start in range(0, 20, 5):
                append_numbered(writer, range(start, start + 5))
        store.refresh()
        told: list[tuple[int, int]] = []
        table = store.episode_table(progress=lambda done, total: told.append((done, total)))
    nbytes = 20 * store.schema.reward.row_bytes
    assert len(told) > 1
    assert told == sorted(told)
    assert {total for _, total in told} == {nbytes}
    assert told[-1][0] == nbytes
    assert table["total_reward"].sum() == sum(range(20))


def test_a_new_store_is_empty(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store:
        assert (len(store), store.num_episodes, len(store.episodes)) == (0, 0, 0)
        assert store.schema == serial_schema()
        assert str(store.path) == str(tmp_store)


def test_a_new_store_may_take_an_empty_folder_that_is_there(tmp_path):
    with dr.create(tmp_path, serial_schema()) as store:
        assert len(store) == 0


def test_a_full_disk_is_not_taken_for_a_store_in_an_empty_folder_that_is_there(tmp_path):
    """A limit of the size of files fails the same calls as a full disk."""
    said = run_python(
        """
import resource, sys, diskreplay as dr
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    dr.create(sys.argv[1], dr.Schema(dr.Field((), "f4"), dr.Field((), "f4")))
except dr.StorageFull as error:
    print(error)
""",
        str(tmp_path),
    )
    assert "is larger than its file system" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_not_taken_for_room(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(dr.StoreExists, match=f"^{path} exists already"):
            dr.create(path, serial_schema())


def test_a_path_may_be_a_string(tmp_store):
    filled(str(tmp_store))
    with dr.open(str(tmp_store)) as store:
        assert len(store) == 12


def test_create_with_exist_ok_opens_what_is_there_for_writing(tmp_store):
    filled(tmp_store)
    with dr.create(tmp_store, serial_schema(), exist_ok=True) as store:
        assert len(store) == 12
        with store.writer() as writer:
            append_numbered(writer, range(12, 14))
        store.refresh()
        assert len(store) == 14


def test_refresh_returns_the_number_of_steps_that_became_visible(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store, dr.open(tmp_store) as reader, store.writer() as writer:
        assert reader.refresh() == 0
        append_numbered(writer, range(3))
        assert (len(reader), reader.refresh(), len(reader)) == (0, 3, 3)
        append_numbered(writer, range(3, 8), end="open")
        assert (reader.refresh(), reader.refresh(), len(reader)) == (5, 0, 8)


def test_a_store_pickles_as_its_path_and_mode(tmp_store):
    filled(tmp_store)
    with dr.open(tmp_store) as store:
        data = pickle.dumps(store)
        assert len(data) < 2000
        with pickle.loads(data) as copy:
            assert serials(copy) == serials(store)
            with pytest.raises(dr.ReadOnlyError):
                copy.writer()


def test_closing_twice_is_fine(tmp_store):
    store = dr.create(tmp_store, serial_schema())
    store.close()
    store.close()

    assert tmp_store.exists()


def test_a_reader_writes_nothing(tmp_store):
    filled(tmp_store, chunk_bytes=64)
    before = digest(tmp_store)
    with dr.open(tmp_store) as store:
        store.refresh()
        store.info()
        assert serials(store) == list(range(12))

    assert digest(tmp_store) == before


@pytest.mark.slow
@pytest.mark.parametrize("n_step", [1, 3, 10])
def test_sampling_changes_no_file(tmp_store, n_step):
    filled(tmp_store, steps=12)
    before = digest(tmp_store)
    with dr.open(tmp_store) as store:
        sampler = dr.Sampler(store, dr.Transitions(n_step=n_step), batch_size=64, seed=0)
        rewards = sampler.sample().numpy()["reward"]
        sampler.close()

    assert np.isfinite(rewards).all()
    assert digest(tmp_store) == before


def test_rows_are_seen_through_a_mapping_that_was_made_before_they_were_written(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store, dr.open(tmp_store) as reader, store.writer() as writer:
        append_numbered(writer, range(3), end="open")
        reader.refresh()
        first = reader.episodes[0].obs
        append_numbered(writer, range(3, 6), end="open")
        reader.refresh()
        later = reader.episodes[0].obs

        assert later[:, 0].tolist() == list(range(7))
        assert np.shares_memory(first, later)


def test_a_corrupt_store_object_cannot_be_used_after_close(tmp_store):
    filled(tmp_store)
    store = dr.open(tmp_store, mode="a")
    store.close()

    with pytest.raises(dr.ReplayError):
        store.writer()


def test_info_without_total_rewards_reads_no_reward(tmp_store, monkeypatch):
    filled(tmp_store)
    with dr.open(tmp_store) as store:
        whole = store.info()
        monkeypatch.setattr("diskreplay.store.info.sum_rewards", None)
        assert store.info(total_reward=False) == {**whole, "total_reward": None}
        assert whole["total_reward"]["count"] == 3


def test_a_store_and_its_backup_may_have_names_of_255_bytes(tmp_path):
    with dr.create(tmp_path / ("a" * 255), serial_schema()) as store:
        store.backup(tmp_path / ("b" * 255))
    assert sorted(len(path.name) for path in tmp_path.iterdir()) == [255, 255]
