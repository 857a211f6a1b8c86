"""Exports mark the steps that a capacity hides, in every format, and only if there are some."""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.interop.round_trips import NEEDS, PLAIN, SCHEMAS, SCHEMES, content, make_store

SCHEMA = SCHEMAS["vectors"]
Marks = Callable[[Path, str], np.ndarray]


def of_npz(target: Path, name: str) -> np.ndarray:
    return np.concatenate([np.load(file)[name] for file in sorted(target.glob("*.npz"))])


def of_dreamer(target: Path, name: str) -> np.ndarray:
    rows = [np.load(file)[f"log_{name}"] for file in sorted(target.glob("*.npz"))]
    assert not any(each[0] for each in rows), "the first row has no step before it"
    return np.concatenate([each[1:] for each in rows])


def of_parquet(target: Path, name: str) -> np.ndarray:
    return pytest.importorskip("pyarrow.parquet").read_table(target / "steps")[name].to_numpy()


def of_lerobot(target: Path, name: str) -> np.ndarray:
    feature = json.loads((target / "meta/info.json").read_text())["features"][name]
    assert (feature["dtype"], feature["shape"]) == ("bool", [1])
    tables = [
        pytest.importorskip("pyarrow.parquet").read_table(path) for path in sorted(target.glob("data/*/*.parquet"))
    ]
    return np.concatenate([table[name].to_numpy() for table in tables])


def of_zarr(target: Path, name: str) -> np.ndarray:
    import zarr

    return zarr.open_group(target, mode="r")[f"data/{name}"][...]


def of_d4rl(target: Path, name: str) -> np.ndarray:
    with pytest.importorskip("h5py").File(target) as file:
        return file[name][...]


def of_robomimic(target: Path, name: str) -> np.ndarray:
    with pytest.importorskip("h5py").File(target) as file:
        return np.concatenate([file[f"data/demo_{n}/{name}"][...] for n in range(len(file["data"]))])


def of_minari(target: Path, name: str) -> np.ndarray:
    with pytest.importorskip("h5py").File(target / "data/main_data.hdf5") as file:
        rows = [file[f"episode_{n}/infos/{name}"][...] for n in range(len(file))]
    assert not any(each[0] for each in rows), "the first row belongs to the reset"
    return np.concatenate([each[1:] for each in rows])


def of_torchrl(target: Path, name: str) -> np.ndarray:
    return np.fromfile(target / f"storage/{name}.memmap", bool)


def of_rlds(target: Path, name: str) -> np.ndarray:
    rlds, back = module_of("rlds"), target.with_name("alone")
    rlds.import_dataset(target, back)
    with dr.open(back) as store:
        return np.concatenate([episode[name] for episode in store.episodes])


READERS: Mapping[str, Marks | None] = {
    "d4rl": of_d4rl,
    "dreamer": of_dreamer,
    "lerobot": of_lerobot,
    "minari": of_minari,
    "npz": of_npz,
    "parquet": of_parquet,
    "rlds": of_rlds,
    "robomimic": of_robomimic,
    "sb3_pickle": None,
    "torchrl_memmap": of_torchrl,
    "zarr_episodes": of_zarr,
}
"""What reads the marks of each format; None: it has no place for them."""

# A column of their own, which every export has.
OWN = {"npz", "parquet"}


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    return request.param


def module_of(scheme: str) -> ModuleType:
    return import_module(f"diskreplay.interop.{scheme}")


def hide(path: Path) -> np.ndarray:
    """Hide the first episode and a part of the second; return which of the steps that are left are hidden."""
    with dr.open(path, "a") as store:
        store.resize(capacity=len(store) - len(store.episodes[0]) - 2)
        store.refresh()
        hidden = np.concatenate([np.arange(len(each)) < each.hidden_steps for each in store.episodes])
    assert 0 < hidden.sum() < len(hidden)
    return hidden


def long_store(path: Path, **options: Any) -> Path:
    return make_store(path, "vectors", [(4, "terminated", True), (9, "truncated", True), *PLAIN], **options)


def with_extra(*names: str) -> dr.Schema:
    return dr.Schema(SCHEMA.obs, SCHEMA.action, extra=dict.fromkeys(names, dr.Field((2,), "float32")))


def not_held(exported: Any) -> dict[str, str]:
    return {each.name: each.reason for each in exported.not_held}


def check(scheme: str, store: Path, hidden: np.ndarray, name: str) -> None:
    """Export a store, read the marks, and import it again: its steps are visible, and other formats' marks a field."""
    target, back, module = store.with_name("set.bin"), store.with_name("back"), module_of(scheme)
    exported = module.export_dataset(store, target)
    read = READERS[scheme]
    if read is None:
        number = np.count_nonzero(hidden)
        assert not_held(exported)["hidden"] == (
            f"{number} steps are hidden from samplers: a replay buffer has no place for it"
        )
    else:
        assert "hidden" not in not_held(exported)
        assert read(target, name).tolist() == hidden.tolist()
    module.import_dataset(target, back)
    with dr.open(back) as imported:
        assert len(imported) == len(hidden)
        assert imported.verify(deep=True) == []
        fields = {leaf.rpartition("/")[2] for leaf in imported.schema.step_leaves}
    if scheme in OWN:
        assert content(back) == content(store)
    else:
        assert (name in fields) is (read is not None)


def test_hidden_steps_are_marked_and_visible_to_an_import(scheme: str, tmp_path: Path) -> None:
    store = long_store(tmp_path / "store")
    check(scheme, store, hide(store), "hidden")


def test_the_name_changes_if_an_extra_field_has_it(scheme: str, tmp_path: Path) -> None:
    store = long_store(tmp_path / "store", schema=with_extra("hidden"))
    check(scheme, store, hide(store), "hidden" if scheme in OWN else "is_hidden")


def test_without_hidden_steps_nothing_is_marked(scheme: str, tmp_path: Path) -> None:
    store = long_store(tmp_path / "store")
    exported = module_of(scheme).export_dataset(store, tmp_path / "set.bin")
    assert "hidden" not in not_held(exported)
    read = READERS[scheme]
    if scheme in OWN:
        assert not read(tmp_path / "set.bin", "hidden").any()
    elif read is not None:
        with pytest.raises((KeyError, OSError, dr.ReplayError)):
            read(tmp_path / "set.bin", "hidden")


def test_a_format_without_a_free_name_names_the_marks_as_lost(tmp_path: Path) -> None:
    dreamer, store = module_of("dreamer"), long_store(tmp_path / "store", schema=with_extra("hidden", "is_hidden"))
    hidden = hide(store)
    exported = dreamer.export_dataset(store, tmp_path / "set")
    assert not_held(exported)["hidden"] == (
        f"{np.count_nonzero(hidden)} steps are hidden from samplers: the store has an extra field is_hidden"
    )


def test_marks_are_an_extra_field_of_an_import(tmp_path: Path) -> None:
    dreamer, store = module_of("dreamer"), long_store(tmp_path / "store")
    hidden = hide(store)
    dreamer.export_dataset(store, tmp_path / "set")
    dreamer.import_dataset(tmp_path / "set", tmp_path / "back")
    with dr.open(tmp_path / "back") as back:
        assert np.concatenate([episode["hidden"] for episode in back.episodes]).tolist() == hidden.tolist()
