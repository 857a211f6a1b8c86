"""Exports mark the steps that a capacity hides, in every format, and only if there are some."""

import json
import shutil
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.cli.exchange import SCHEMES
from tests.interop.round_trips import PLAIN, SCHEMAS, StopAt, content, make_store

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


def of_minari(target: Path, name: str) -> np.ndarray:
    with pytest.importorskip("h5py").File(target / "data/main_data.hdf5") as file:
        rows = [file[f"episode_{n}/infos/{name}"][...] for n in range(len(file))]
    assert not any(each[0] for each in rows), "the first row belongs to the reset"
    return np.concatenate([each[1:] for each in rows])


def of_torchrl(target: Path, name: str) -> np.ndarray:
    return np.fromfile(target / f"storage/{name}.memmap", bool)


def of_rlds(target: Path, name: str) -> np.ndarray:
    """Read as a data set of others, whose features are extra fields."""
    from diskreplay.interop.rlds import import_dataset

    alone, back = target.with_name("alone"), target.with_name("alone-back")
    shutil.copytree(target, alone, ignore=shutil.ignore_patterns("diskreplay"))
    import_dataset(alone, back)
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
    "sb3_pickle": None,
    "torchrl_memmap": of_torchrl,
    "zarr_episodes": of_zarr,
}
"""What reads the marks of each format; None: it has no place for them."""

NEEDS = {
    **{"d4rl": "h5py", "lerobot": "av", "minari": "minari", "parquet": "pyarrow"},
    **{"rlds": "google.protobuf", "sb3_pickle": "stable_baselines3"},
}
# A column of their own, which every export has.
OWN = {"npz", "parquet"}


@pytest.fixture(params=sorted(SCHEMES))
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


def check(scheme: str, store: Path, hidden: np.ndarray, name: str, **options: Any) -> None:
    """Export a store, read the marks, and import it again, which gives the same store."""
    target, back, module = store.with_name("set.bin"), store.with_name("back"), module_of(scheme)
    exported = module.export_dataset(store, target, **options)
    read = READERS[scheme]
    if read is None:
        with np.load(Path(exported.side_folder) / "00000000.npz") as kept:
            count = len(kept["0/hidden"])
            assert kept["0/hidden"].tolist() == hidden[:count].tolist()
        assert not hidden[count:].any()
        number = np.count_nonzero(hidden)
        assert not_held(exported)["hidden"] == (
            f"{number} steps are hidden from samplers: a replay buffer has no place for it"
        )
    else:
        assert "hidden" not in not_held(exported)
        assert read(target, name).tolist() == hidden.tolist()
        assert (exported.side_folder is None) is (scheme in OWN)
    module.import_dataset(target, back)
    with dr.open(back) as imported, dr.open(store) as origin:
        assert imported.schema == origin.schema
        assert imported.verify(deep=True) == []
    assert content(back) == content(store)


def test_hidden_steps_are_marked_and_imports_ignore_the_marks(scheme: str, tmp_path: Path) -> None:
    store = long_store(tmp_path / "store")
    check(scheme, store, hide(store), "hidden")


def test_the_name_changes_if_an_extra_field_has_it(scheme: str, tmp_path: Path) -> None:
    store = long_store(tmp_path / "store", schema=with_extra("hidden"))
    check(scheme, store, hide(store), "hidden" if scheme in OWN else "is_hidden")


def test_a_resumed_export_has_the_marks_of_all_episodes(scheme: str, tmp_path: Path) -> None:
    store = long_store(tmp_path / "store")
    hidden = hide(store)
    with pytest.raises(KeyboardInterrupt):
        module_of(scheme).export_dataset(store, tmp_path / "set.bin", progress=StopAt(15))
    check(scheme, store, hidden, "hidden")


def test_without_hidden_steps_nothing_is_marked(scheme: str, tmp_path: Path) -> None:
    store = long_store(tmp_path / "store")
    exported = module_of(scheme).export_dataset(store, tmp_path / "set.bin")
    assert "hidden" not in not_held(exported)
    if exported.side_folder is not None:
        assert "hidden" not in json.loads((Path(exported.side_folder) / "export.json").read_text())
    read = READERS[scheme]
    if scheme in OWN:
        assert not read(tmp_path / "set.bin", "hidden").any()
    elif read is not None:
        with pytest.raises((KeyError, OSError, dr.ReplayError)):
            read(tmp_path / "set.bin", "hidden")


def test_steps_that_are_hidden_while_an_export_is_interrupted_are_named(scheme: str, tmp_path: Path) -> None:
    store, target, module = long_store(tmp_path / "store"), tmp_path / "set.bin", module_of(scheme)
    with pytest.raises(KeyboardInterrupt):
        module.export_dataset(store, target, progress=StopAt(15))
    with dr.open(store, "a") as opened:
        opened.resize(capacity=len(opened) - 1)
    exported = module.export_dataset(store, target)
    if scheme not in OWN:
        why = "none was when the export began" if READERS[scheme] else "a replay buffer has no place for it"
        assert not_held(exported)["hidden"] == f"1 step is hidden from samplers: {why}"
    module.import_dataset(target, tmp_path / "back")
    assert content(tmp_path / "back") == content(store)


def test_a_format_without_a_free_name_keeps_the_marks_in_the_side_folder(tmp_path: Path) -> None:
    dreamer, store = module_of("dreamer"), long_store(tmp_path / "store", schema=with_extra("hidden", "is_hidden"))
    hidden = hide(store)
    exported = dreamer.export_dataset(store, tmp_path / "set", dry_run=True)
    assert not_held(exported)["hidden"] == (
        f"{np.count_nonzero(hidden)} steps are hidden from samplers: the store has an extra field is_hidden"
    )
    assert dreamer.export_dataset(store, tmp_path / "set") == exported
    dreamer.import_dataset(tmp_path / "set", tmp_path / "back")
    assert content(tmp_path / "back") == content(store)


def test_without_its_side_folder_a_data_set_has_the_marks_as_an_extra_field(tmp_path: Path) -> None:
    dreamer, store = module_of("dreamer"), long_store(tmp_path / "store")
    hidden = hide(store)
    shutil.rmtree(dreamer.export_dataset(store, tmp_path / "set").side_folder)
    dreamer.import_dataset(tmp_path / "set", tmp_path / "back")
    with dr.open(tmp_path / "back") as back:
        assert np.concatenate([episode["hidden"] for episode in back.episodes]).tolist() == hidden.tolist()
