"""Stores of many schemas go through each format and come back, but for the names that the export reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.interop.round_trips import CASES, EPISODES, NEEDS, StopAt, check_round_trip, content, make_store

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


def adapter(scheme: str) -> Any:
    """The module of a format; the test is skipped without its library."""
    scheme = scheme.split()[0]
    if scheme in NEEDS:
        pytest.importorskip(NEEDS[scheme], reason=f"needs {NEEDS[scheme]}")
    return import_module(f"diskreplay.interop.{scheme}")


PAIRS = [
    pytest.param(scheme, case, marks=[] if scheme in FAST or case == "nested" else pytest.mark.slow)
    for scheme in FORMATS
    for case in CASES
]


@pytest.mark.parametrize(("scheme", "case"), PAIRS)
def test_a_round_trip_keeps_every_value_that_it_does_not_name(tmp_path: Path, scheme: str, case: str) -> None:
    module, expected = adapter(scheme), FORMATS[scheme]
    renamed = {**expected.renamed}
    if scheme == "dreamer" and case == "images":
        renamed["obs"] = "obs/image"
    store = make_store(tmp_path / "store", case, priorities=case == "nested")
    target = tmp_path / expected.name
    would = module.export_dataset(store, target, dry_run=True, **expected.options)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
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
    assert {path.name for path in tmp_path.iterdir()} == {expected.name, f"{expected.name}-back", "store"}


@pytest.mark.parametrize("scheme", [*FORMATS, "minari", "sb3_pickle"])
def test_an_interrupted_import_continues_in_any_format(tmp_path: Path, scheme: str) -> None:
    module, target = adapter(scheme), tmp_path / ("set.zip" if "zip" in scheme else "set")
    module.export_dataset(make_store(tmp_path / "store", "vectors", EPISODES * 2), target)
    with pytest.raises(KeyboardInterrupt):
        module.import_dataset(target, tmp_path / "a", progress=StopAt(25))
    resumed, whole = (module.import_dataset(target, tmp_path / name) for name in "ab")
    assert resumed.resumed > 0
    assert resumed.episodes + resumed.resumed == whole.episodes
    assert content(tmp_path / "a") == content(tmp_path / "b")
