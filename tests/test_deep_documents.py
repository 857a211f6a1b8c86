"""JSON that is nested too deeply is refused wherever it is read: in stores, states and data sets."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import diskreplay as dr
from tests.interop.round_trips import make_store
from tests.interop.test_hostile_imports import make_lerobot, make_memmap, make_npz, make_parquet, make_zarr
from tests.testing.commands import verify
from tests.testing.on_disk import reseal

MOST_DEPTH = 200


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


DEEP = nested(MOST_DEPTH + 1)  # far less than what makes a RecursionError


# --- stores ----------------------------------------------------------------------------------------------------------


def make(path: Path, count: int = 20) -> dr.Store:
    store = dr.create(path, dr.Schema(obs=dr.Field((2,), "float32"), action=dr.Field((), "int64")))
    with store.writer() as writer:
        steps = np.arange(count)
        writer.append_episode(np.zeros((count + 1, 2)), steps, steps.astype("f4"), terminated=True)
    store.refresh()
    return store


@pytest.mark.parametrize("below", ["", "segments/00000000/"])
def test_documents_of_a_store(tmp_store: Path, below: str) -> None:
    make(tmp_store).close()
    file = tmp_store / below / "zarr.json"
    file.chmod(0o644)
    reseal(file, lambda attributes: attributes.update(a=json.loads(DEEP)))
    problems = verify(tmp_store)
    assert any(f"more than {MOST_DEPTH} levels" in str(problem) for problem in problems), problems
    if not below:
        with pytest.raises(dr.FormatError, match=f"is not readable metadata .more than {MOST_DEPTH} levels"):
            dr.open(tmp_store)


def replaced(tree: Any, key: str, change: Callable[[dict[str, Any]], object]) -> int:
    """Change each dict that has a key, anywhere in a state; return how many had it."""
    if not isinstance(tree, dict | list):
        return 0
    if isinstance(tree, dict) and key in tree:
        change(tree)
        return 1
    return sum(replaced(below, key, change) for below in (tree.values() if isinstance(tree, dict) else tree))


def set_text(key: str, tree: dict[str, Any]) -> None:
    tree[key] = DEEP


def rename(key: str, tree: dict[str, Any]) -> None:
    tree[DEEP] = tree.pop(key)


KIND = '["transitions"]'
STATES: dict[str, tuple[Any, dict[str, Any], str, Callable[[str, dict[str, Any]], None]]] = {
    "rng": (dr.Uniform, {}, "rng", set_text),
    "priorities": (dr.Prioritized, {}, KIND, rename),
    "sweep": (lambda: dr.Sweep(None), {}, "first", lambda _, tree: set_text("kind", tree)),
    "times": (dr.Uniform, {"max_times_sampled": 9}, KIND, rename),
    "indices": (dr.Uniform, {"max_size": 9}, KIND, rename),
}


@pytest.mark.parametrize("what", STATES)
def test_saved_states(tmp_store: Path, what: str) -> None:
    made, kwargs, key, change = STATES[what]
    with make(tmp_store) as store, dr.Sampler(store, dr.Transitions(), made(), batch_size=4, **kwargs) as sampler:
        sampler.sample()
        state = sampler.state_dict()
        assert replaced(state["planner"], key, partial(change, key))
        with pytest.raises(ValueError, match="this is not a state|is not a kind of id"):
            sampler.load_state_dict(state)
        if what == "rng":
            mixed = dr.MixedSampler([(sampler, 1.0)], batch_size=4)
            with pytest.raises(ValueError, match=f"not a state of a mixed sampler: more than {MOST_DEPTH} levels"):
                mixed.load_state_dict({**mixed.state_dict(), "rng": DEEP})


def test_the_space_of_a_field() -> None:
    with pytest.raises(dr.SchemaError, match=f"plain JSON only: more than {MOST_DEPTH} levels"):
        dr.Field((2,), "float32", space={"a": json.loads(DEEP)})


# --- data sets -------------------------------------------------------------------------------------------------------

DATA_SETS: dict[str, tuple[str, Callable[[Path], str], str]] = {
    "description of npz": ("npz", lambda folder: make_npz(folder, "own"), "*.json"),
    "description of parquet": ("parquet", make_parquet, "*.json"),
    "torchrl": ("torchrl_memmap", make_memmap, "*.json"),
    "lerobot 2.1": ("lerobot", lambda folder: make_lerobot(folder, "2.1", False), "info.json"),
    "lerobot 2.1 lines": ("lerobot", lambda folder: make_lerobot(folder, "2.1", False), "episodes.jsonl"),
    "zarr 2": ("zarr_episodes", lambda folder: make_zarr(folder, 2), ".zarray"),
    "zarr 3": ("zarr_episodes", lambda folder: make_zarr(folder, 3), "data/*/zarr.json"),
    "rlds features": ("rlds", lambda folder: copy_rlds(folder), "features.json"),
    "rlds info": ("rlds", lambda folder: copy_rlds(folder), "dataset_info.json"),
}


def copy_rlds(folder: Path) -> str:
    pytest.importorskip("google.protobuf", reason="needs protobuf")
    shutil.copytree(Path(__file__).parent / "interop/rlds_sample", folder / "set")
    return "set"


@pytest.mark.parametrize("case", DATA_SETS)
def test_documents_of_data_sets(tmp_path: Path, case: str) -> None:
    format_name, make_set, pattern = DATA_SETS[case]
    (tmp_path / "original").mkdir()
    place = tmp_path / "original" / make_set(tmp_path / "original")
    found = sorted(place.rglob(pattern))
    assert found
    for file in found:
        file.write_text("".join(f'{{"a": {DEEP}, {line[1:]}\n' for line in [file.read_text().strip()]))
    module = import_module(f"diskreplay.interop.{format_name}")
    with pytest.raises(dr.FormatError, match=f"more than {MOST_DEPTH} levels"):
        module.import_dataset(place, tmp_path / "imported")


@pytest.mark.parametrize("format_name", ["npz", "parquet"])
def test_notes_of_episodes(tmp_path: Path, format_name: str) -> None:
    module = import_module(f"diskreplay.interop.{format_name}")
    place = tmp_path / "set"
    module.export_dataset(make_store(tmp_path / "store", "vectors", priorities=True), place)
    changed = 0
    for file in place.rglob("*.npz"):
        with np.load(file) as saved:
            arrays = {name: saved[name] for name in saved.files}
        np.savez(file, **{**arrays, "notes": np.frombuffer(DEEP.encode(), np.uint8)})
        changed += 1
    for file in place.rglob("*.parquet"):
        table = pq.read_table(file)
        if "notes" in table.column_names:
            at = table.column_names.index("notes")
            notes = pa.array([DEEP] * len(table), pa.string())
            pq.write_table(table.set_column(at, "notes", notes), file)
            changed += 1
    assert changed
    with pytest.raises(dr.FormatError, match=f"more than {MOST_DEPTH} levels"):
        module.import_dataset(place, tmp_path / "imported")
