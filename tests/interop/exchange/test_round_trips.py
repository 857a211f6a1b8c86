"""Stores of many schemas go through each format and come back, but for the names that the export reports."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import diskreplay
from tests.interop.exchange.test_names_and_skips import NAMES
from tests.interop.round_trips import CASES, EPISODES, SCHEMES, StopAt, adapter, check_round_trip, content
from tests.interop.test_hostile_imports import ORIGINALS

OF_EPISODES = {"episode/seed", "episode/goal", "episode/task/level"}


@dataclass(frozen=True)
class Expected:
    """What a format cannot hold of every case, and of "nested", and where an import finds leaves again."""

    always: set[str] = field(default_factory=set)
    nested: set[str] = field(default_factory=set)
    renamed: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = "set"


FORMATS = {
    "npz": Expected(),
    "parquet": Expected(),
    "zarr_episodes": Expected(),
    "zarr_episodes in a zip file": Expected(name="set.zip"),
    "torchrl_memmap": Expected({"cut", "no_final_obs", "schema"}, OF_EPISODES | {"priority"}),
    "rlds": Expected({"ends", "no_final_obs", "schema"}, OF_EPISODES | {"priority"}),
    "d4rl": Expected({"cut", "no_final_obs", "schema"}, OF_EPISODES | {"priority"}),
    "robomimic": Expected({"ends", "no_final_obs", "schema"}, {"priority"}),
    "dreamer": Expected(
        {"ends", "no_final_obs", "schema"},
        OF_EPISODES | {"priority"},
        {"obs": "obs/obs", "extra/log_prob": "extra/prob", "extra/hidden/h": "extra/hidden_h"},
        {"one_hot": False},
    ),
    "lerobot": Expected(
        {"final_obs", "schema"},
        {"priority"},
        {"extra/hidden/h": "extra/hidden.h", "episode/task/level": "episode/task.level"},
    ),
}
FAST = {"npz", "parquet", "d4rl", "lerobot"}  # for all cases; of others one is


ELSEWHERE = {"minari", "sb3_pickle"}  # their round trips are in their own test modules

TABLES = {
    "SCHEMES of tests/interop/round_trips.py": {*SCHEMES},
    "FORMATS or ELSEWHERE of tests/interop/exchange/test_round_trips.py": {scheme.split()[0] for scheme in FORMATS}
    | ELSEWHERE,
    "NAMES of tests/interop/exchange/test_names_and_skips.py": {*NAMES},
    "ORIGINALS of tests/interop/test_hostile_imports.py": {scheme for scheme, _ in ORIGINALS.values()},
    "the table of docs/data.md": {
        *re.findall(r"(?m)^\| `(\w+):", (Path(diskreplay.__file__).parents[1] / "docs/data.md").read_text())
    },
}


@pytest.mark.parametrize("table", TABLES)
def test_every_format_is_in_the_tables_that_its_tests_and_its_users_read(table: str) -> None:
    folder = Path(diskreplay.__file__).parent / "interop"
    modules = [path for path in folder.rglob("*.py") if "\ndef import_dataset(" in path.read_text()]
    formats = {path.parent.name if path.stem == "__init__" else path.stem for path in modules}
    assert sorted(formats - TABLES[table]) == [], f"{table} lacks these formats"
    assert sorted(TABLES[table] - formats) == [], f"{table} has formats without a module"


PAIRS = [
    pytest.param(scheme, case, marks=[] if scheme in FAST or case == "nested" else pytest.mark.slow)
    for scheme in FORMATS
    for case in CASES
]


@pytest.mark.parametrize(("scheme", "case"), PAIRS)
def test_a_round_trip_keeps_every_value_that_it_does_not_name(
    tmp_path: Path, kept_store: Callable[..., Path], scheme: str, case: str
) -> None:
    module, expected = adapter(scheme.split()[0]), FORMATS[scheme]
    renamed = {**expected.renamed}
    if scheme == "dreamer" and case == "images":
        renamed["obs"] = "obs/image"
    store = kept_store(case, priorities=case == "nested")
    target = tmp_path / expected.name
    would = module.export_dataset(store, target, dry_run=True, **expected.options)
    assert list(tmp_path.iterdir()) == []
    exported = check_round_trip(
        store,
        target,
        module.export_dataset,
        module.import_dataset,
        lambda path: renamed.get(path, path),
        **expected.options,
    )
    assert {name for name, _ in exported.not_held} == expected.always | (expected.nested if case == "nested" else set())
    assert (exported.lossy, would) == ([], exported)
    assert {path.name for path in tmp_path.iterdir()} == {expected.name, f"{expected.name}-back"}


@pytest.mark.parametrize("scheme", [*FORMATS, "minari", "sb3_pickle"])
def test_an_interrupted_import_continues_in_any_format(
    tmp_path: Path, kept_store: Callable[..., Path], scheme: str
) -> None:
    module, target = adapter(scheme.split()[0]), tmp_path / ("set.zip" if "zip" in scheme else "set")
    module.export_dataset(kept_store("vectors", EPISODES * 2), target)
    with pytest.raises(KeyboardInterrupt):
        module.import_dataset(target, tmp_path / "a", progress=StopAt(25))
    resumed, whole = (module.import_dataset(target, tmp_path / name) for name in "ab")
    assert resumed.resumed > 0
    assert resumed.episodes + resumed.resumed == whole.episodes
    assert content(tmp_path / "a") == content(tmp_path / "b")
