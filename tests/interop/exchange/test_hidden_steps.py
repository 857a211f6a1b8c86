"""Exports mark the steps that a capacity hides, in every format, and only if there are some."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.interop.round_trips import PLAIN, SCHEMAS, SCHEMES, adapter, content, make_store

SCHEMA = SCHEMAS["vectors"]
# A column of their own, which every export has, and no place for marks.
OWN, NONE = {"npz", "parquet"}, {"sb3_pickle"}


def marks_in_files(scheme: str, target: Path) -> np.ndarray:
    """Read the column of a format of its own; an import reads the marks of the others, as an extra field."""
    if scheme == "npz":
        return np.concatenate([np.load(file)["hidden"] for file in sorted(target.glob("*.npz"))])
    return pytest.importorskip("pyarrow.parquet").read_table(target / "steps")["hidden"].to_numpy()


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


def check(scheme: str, store: Path, hidden: np.ndarray, name: str, folder: Path) -> None:
    """Export a store and import it again: its steps are visible, and the marks of other formats are a field."""
    target, back, module = folder / "set.bin", folder / "back", adapter(scheme)
    exported = module.export_dataset(store, target)
    number = np.count_nonzero(hidden)
    if scheme in NONE and number:
        assert not_held(exported)["hidden"] == (
            f"{number} steps are hidden from samplers: a replay buffer has no place for it"
        )
    else:
        assert "hidden" not in not_held(exported)
    module.import_dataset(target, back)
    with dr.open(back) as imported:
        assert len(imported) == len(hidden)
        assert imported.verify(deep=True) == []
        fields = [leaf for leaf in imported.schema.step_leaves if leaf.rpartition("/")[2] == name and scheme not in OWN]
        assert len(fields) == (number > 0 and scheme not in OWN | NONE)
        for field in fields:
            assert np.concatenate([episode.rows(field) for episode in imported.episodes]).tolist() == hidden.tolist()
    if scheme in OWN:
        assert content(back) == content(store)
        assert marks_in_files(scheme, target).tolist() == hidden.tolist()


@pytest.fixture(scope="module", params=[(), ("hidden",)], ids=["no extra fields", "hidden"])
def partially_hidden(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, np.ndarray]:
    """A store with these extra fields, and which of its steps are hidden. No test changes it."""
    store = long_store(tmp_path_factory.mktemp("hidden") / "store", schema=with_extra(*request.param))
    return store, hide(store)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_hidden_steps_are_marked_and_visible_to_an_import(
    scheme: str, partially_hidden: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    """The name of the marks changes if an extra field has it."""
    store, hidden = partially_hidden
    with dr.open(store) as opened:
        is_taken = "hidden" in opened.schema.extra and scheme not in OWN
    check(scheme, store, hidden, "is_hidden" if is_taken else "hidden", tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_hidden_steps_nothing_is_marked(scheme: str, kept_store: Callable[..., Path], tmp_path: Path) -> None:
    store = kept_store("vectors", PLAIN)
    with dr.open(store) as opened:
        check(scheme, store, np.zeros(len(opened), bool), "hidden", tmp_path)


def test_a_format_without_a_free_name_names_the_marks_as_lost(tmp_path: Path) -> None:
    dreamer, store = adapter("dreamer"), long_store(tmp_path / "store", schema=with_extra("hidden", "is_hidden"))
    hidden = hide(store)
    exported = dreamer.export_dataset(store, tmp_path / "set")
    assert not_held(exported)["hidden"] == (
        f"{np.count_nonzero(hidden)} steps are hidden from samplers: the store has an extra field is_hidden"
    )
