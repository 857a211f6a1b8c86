"""Data sets of NumPy files: every value of a store goes there and comes back."""

import json
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop.npz import export_dataset, import_dataset
from tests.interop.round_trips import content, make_store


def test_a_file_of_an_episode_is_read_by_numpy_alone(tmp_path: Path) -> None:
    make_store(tmp_path / "store", "nested")
    export_dataset(tmp_path / "store", tmp_path / "set")
    with np.load(tmp_path / "set/episode-00000001.npz") as file, dr.open(tmp_path / "store") as store:
        episode = store.episodes[1]
        np.testing.assert_array_equal(file["obs/image"], episode.obs["image"])
        np.testing.assert_array_equal(file["episode/task/level"], episode["task"]["level"])
        assert (file["terminated"], file["truncated"]) == (True, False)
    assert json.loads((tmp_path / "set/dataset.json").read_text())["steps"] == 40


def test_a_file_that_begins_as_an_archive_and_is_none_is_refused_and_closed(tmp_path: Path) -> None:
    make_store(tmp_path / "store", "vectors")
    export_dataset(tmp_path / "store", tmp_path / "set")
    file = tmp_path / "set/episode-00000000.npz"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(dr.FormatError, match="episode-00000000.npz cannot be read: BadZipFile: File is not a zip"):
        import_dataset(tmp_path / "set", tmp_path / "back")


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dr.StoreNotFound, match="set is not a whole data set of the format npz: it has no dataset.json"):
        import_dataset(tmp_path / "set", tmp_path / "store")
    make_store(tmp_path / "store", "vectors")
    export_dataset(tmp_path / "store", tmp_path / "set")
    (tmp_path / "set/episode-00000002.npz").write_bytes(b"PK")
    with pytest.raises(dr.FormatError, match="episode-00000002.npz cannot be read: "):
        import_dataset(tmp_path / "set", tmp_path / "back")
    (tmp_path / "set/dataset.json").write_text("{")
    with pytest.raises(dr.FormatError, match="dataset.json is not JSON: "):
        import_dataset(tmp_path / "set", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert content(tmp_path / "back") == content(tmp_path / "store")[:2]
