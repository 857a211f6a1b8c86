"""Data sets of Parquet: every value of a store goes there and comes back, and other readers understand the tables."""

import json
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr

pytest.importorskip("pyarrow", reason="needs pyarrow")

from diskreplay.interop import parquet
from diskreplay.interop.parquet import export_dataset, import_dataset
from tests.interop.round_trips import EPISODES, StopAt, check_round_trip, content, make_store


def test_many_files_with_priorities_of_some_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_FILE_BYTES", 3000)
    store = make_store(tmp_path / "store", "images", EPISODES * 3, priorities=True)
    check_round_trip(store, tmp_path / "set", export_dataset, import_dataset, compression="zstd")
    assert len(list((tmp_path / "set/steps").iterdir())) > 10


def test_pandas_reads_the_tables(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    make_store(tmp_path / "store", "nested")
    export_dataset(tmp_path / "store", tmp_path / "set")
    steps, episodes = (pandas.read_parquet(tmp_path / "set" / name) for name in ("steps", "episodes"))
    assert steps.groupby("episode").size().tolist() == [steps for steps, *_ in EPISODES] == episodes["length"].tolist()
    with dr.open(tmp_path / "store") as store:
        assert steps["reward"].tolist() == [float(r) for episode in store.episodes for r in episode.reward]
        assert steps["obs/image"][0].shape == (4,)
        np.testing.assert_array_equal(np.stack(steps["action/move"][:3]), store.episodes[0].action["move"])
        seeds = [episode["seed"] for episode in store.episodes]
    assert [None if np.isnan(seed) else seed for seed in episodes["episode/seed"]] == [
        None if seed is None else float(seed) for seed in seeds
    ]


def test_an_interrupted_import_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_FILE_BYTES", 200)
    store = make_store(tmp_path / "store", "vectors", EPISODES * 2)
    export_dataset(store, tmp_path / "set")
    with pytest.raises(KeyboardInterrupt):
        import_dataset(tmp_path / "set", tmp_path / "back", progress=StopAt(41))
    assert import_dataset(tmp_path / "set", tmp_path / "back").resumed > 0
    assert content(tmp_path / "back") == content(store)


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dr.StoreNotFound, match="set is not a whole data set of the format parquet"):
        import_dataset(tmp_path / "set", tmp_path / "back")
    make_store(tmp_path / "store", "vectors")
    export_dataset(tmp_path / "store", tmp_path / "set")
    (tmp_path / "set/steps/00000000.parquet").write_bytes(b"PAR1")
    with pytest.raises(dr.FormatError, match="steps/00000000.parquet cannot be read: "):
        import_dataset(tmp_path / "set", tmp_path / "back")
    document = json.loads((tmp_path / "set/dataset.json").read_text())
    (tmp_path / "set/dataset.json").write_text(json.dumps({**document, "format": "npz"}))
    with pytest.raises(dr.FormatError, match="is a data set of the format npz, not parquet$"):
        import_dataset(tmp_path / "set", tmp_path / "back2")


@pytest.mark.parametrize("lacking", [0, 2, len(EPISODES) - 1])
@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_file_of_episodes_that_lacks_costs_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: int, damage: str
) -> None:
    monkeypatch.setattr(parquet, "_FILE_BYTES", 1)  # an episode a file
    make_store(tmp_path / "store", "vectors")
    export_dataset(tmp_path / "store", tmp_path / "set")
    file = tmp_path / f"set/episodes/{lacking:08d}.parquet"
    file.unlink() if damage == "missing" else file.write_bytes(b"")
    with pytest.raises(dr.FormatError, match=f"no file of episode {lacking}$" if damage == "missing" else file.name):
        import_dataset(tmp_path / "set", tmp_path / "refused")
    done = import_dataset(tmp_path / "set", tmp_path / "left", on_error="skip")
    assert [what for what, _ in done.skipped] == [f"episode {lacking}"]
    with dr.open(tmp_path / "store") as before, dr.open(tmp_path / "left") as after:
        wanted = [episode for number, episode in enumerate(before.episodes) if number != lacking]
        for episode, found in zip(wanted, after.episodes, strict=True):
            np.testing.assert_array_equal(found.reward, episode.reward, strict=True)
