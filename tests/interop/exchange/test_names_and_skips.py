"""Options of an import in every format: features have the names of the data set, and skipped ones are not read."""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop import npz
from tests.interop.round_trips import adapter

BOX = {"type": "Box", "low": -1.0, "high": 1.0}
SCHEMA = dr.Schema(
    obs={"arm": dr.Field((3,), "float32"), "eye": dr.Field((8, 8, 3), "uint8")}, action=dr.Field((2,), "float32", BOX)
)


class Names(NamedTuple):
    """The names of the observations and the reward in a data set."""

    arm: str
    eye: str
    reward: str


NAMES: Mapping[str, Names] = {
    "d4rl": Names("observations/arm", "observations/eye", "rewards"),
    "dreamer": Names("arm", "eye", "reward"),
    "lerobot": Names("observation.arm", "observation.images.eye", "next.reward"),
    "minari": Names("observations/arm", "observations/eye", "rewards"),
    "npz": Names("obs/arm", "obs/eye", "reward"),
    "parquet": Names("obs/arm", "obs/eye", "reward"),
    "rlds": Names("observation/arm", "observation/eye", "reward"),
    "robomimic": Names("obs/arm", "obs/eye", "rewards"),
    "sb3_pickle": Names("observations/arm", "observations/eye", "rewards"),
    "torchrl_memmap": Names("arm", "eye", "next/reward"),
    "zarr_episodes": Names("arm", "eye", "reward"),
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two observations, and rewards that are not zero."""
    rng, path = np.random.default_rng(0), tmp_path / "store"
    with dr.create(path, SCHEMA) as made, made.writer() as writer:
        for count in (3, 5):
            obs = {
                "arm": rng.random((count + 1, 3), np.float32),
                "eye": rng.integers(256, size=(count + 1, 8, 8, 3), dtype=np.uint8),
            }
            writer.append_episode(obs, rng.random((count, 2), np.float32), np.ones(count), terminated=True)
    return path


@pytest.mark.parametrize("scheme", NAMES)
def test_options_take_the_names_of_the_data_set(scheme: str, store: Path, tmp_path: Path) -> None:
    module, names, target = adapter(scheme), NAMES[scheme], tmp_path / "set.bin"
    module.export_dataset(store, target)
    options: dict[str, Any] = {"skip": [names.eye, names.reward], "rename": {names.arm: "obs/joints"}}
    done = module.import_dataset(target, tmp_path / "back", dtype={"obs/joints": "float64"}, **options)
    assert {names.eye, names.reward} <= set(done.not_kept)
    with dr.open(store) as old, dr.open(tmp_path / "back") as new:
        assert [path for path in new.schema.step_leaves if path.startswith("obs")] == ["obs/joints"]
        assert new.schema.reward == dr.Field((), "float32")
        for one, other in zip(old.episodes, new.episodes, strict=True):
            assert other.reward.tolist() == [0.0] * len(one), "no feature is the reward"
            np.testing.assert_array_equal(other.obs["joints"][: len(one)], one.obs["arm"][: len(one)])
            np.testing.assert_array_equal(other.action, one.action)


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str, names_of: Callable[..., list[str]]) -> set[str]:
    """Note the names that calls of a method read."""
    read, method = set[str](), getattr(owner, name)

    def noting(*arguments: Any) -> Any:
        read.update(names_of(*arguments))
        return method(*arguments)

    patch.setattr(owner, name, noting)
    return read


def test_skipped_arrays_of_npz_are_not_read(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npz.export_dataset(store, tmp_path / "set")
    rows = {"obs": np.zeros((4, 2)), "actions": np.zeros((4, 1)), "wide": np.zeros((4, 9)), "other": np.ones(4)}
    np.savez(tmp_path / "flat.npz", **rows, dones=np.arange(4) % 2)
    (tmp_path / "files").mkdir()
    np.savez(tmp_path / "files/a.npz", **rows)
    read = noted(monkeypatch, zipfile.ZipFile, "open", lambda _, member, *__: [member.filename.removesuffix(".npy")])
    npz.import_dataset(tmp_path / "set", tmp_path / "a", skip="obs/eye")
    assert "obs/arm" in read
    for source in ("flat.npz", "files"):
        npz.import_dataset(tmp_path / source, tmp_path / f"{source}-store", skip=["wide"])
        assert "other" in read
    assert not {"obs/eye", "wide"} & read


def test_skipped_columns_of_parquet_are_not_read(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = adapter("parquet")
    pq = pytest.importorskip("pyarrow.parquet")
    module.export_dataset(store, tmp_path / "set")
    read = noted(monkeypatch, pq.ParquetFile, "read", lambda _, columns: columns)
    module.import_dataset(tmp_path / "set", tmp_path / "a", skip="obs/eye")
    assert "obs/arm" in read
    assert "obs/eye" not in read


def test_skipped_arrays_of_d4rl_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, h5py = adapter("d4rl"), pytest.importorskip("h5py")
    with h5py.File(tmp_path / "set.hdf5", "w") as file:
        file["observations"], file["actions"], file["rewards"] = np.zeros((6, 2)), np.zeros((6, 1)), np.ones(6)
        file["terminals"], file["infos/wide"], file["infos/other"] = np.arange(6) % 3 == 2, np.ones((6, 9)), np.ones(6)
    read = noted(monkeypatch, h5py.Dataset, "__getitem__", lambda array, *_: [array.name])
    module.import_dataset(tmp_path / "set.hdf5", tmp_path / "a", skip="infos/wide")
    assert "/infos/other" in read
    assert "/infos/wide" not in read
