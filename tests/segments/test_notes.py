"""Notes of a store: JSON documents that it keeps, and that nothing else looks at."""

import shutil
import warnings
from pathlib import Path

import pytest
import zarr

import diskreplay as dr
from tests.testing.support import append_numbered, serial_schema

NOTE = {"source": "cartpole", "texts": ["a", 'quoted "b"', "ü"], "numbers": [1, 2.5, None, True]}


@pytest.fixture
def noted(tmp_store: Path) -> Path:
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(20))
        store.write_note("first", {"old": 1})
        store.write_note("first", NOTE)
        store.write_note("second", [])
    return tmp_store


def test_a_note_is_read_back_by_other_processes_and_replaced_as_a_whole(noted: Path) -> None:
    with dr.open(noted) as store:
        assert store.note_names() == ["first", "second"]
        assert store.read_note("first") == NOTE
        assert store.read_note("second") == []
        assert store.read_note("third") is None


def test_a_store_without_notes_has_none(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema()) as store:
        assert store.note_names() == []
        assert store.read_note("first") is None


def test_verify_repair_zarr_and_moves_tolerate_notes(noted: Path) -> None:
    moved = noted.with_name("moved")
    shutil.copytree(noted, moved)
    with dr.open(moved, "a") as store:
        assert store.verify(deep=True) == []
        assert store.repair() == []
        assert store.read_note("first") == NOTE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {name for name, _ in zarr.open_group(moved, mode="r").members(max_depth=None)} >= {"counters"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("", 1, "a name is 1 to 100 letters.* this one is ''"),
        ("../x", 1, "a name is 1 to 100 letters.* this one is '../x'"),
        ("x", float("nan"), "the note 'x' is not JSON: .*"),
        ("x", {"a": object()}, "the note 'x' is not JSON: .*"),
    ],
)
def test_what_is_no_note_is_refused(noted: Path, name: str, value: object, said: str) -> None:
    with dr.open(noted, "a") as store:
        with pytest.raises(ValueError, match=f"^{said}$"):
            store.write_note(name, value)
        assert store.note_names() == ["first", "second"]


def test_a_store_that_was_opened_to_read_gets_no_note(noted: Path) -> None:
    with dr.open(noted) as store, pytest.raises(dr.ReadOnlyError):
        store.write_note("first", 1)


@pytest.mark.parametrize("damage", [b"", b"{}", b"note"])
def test_a_damaged_note_is_found_and_set_aside(noted: Path, damage: bytes) -> None:
    path = noted / "counters/notes/first.json"
    data = path.read_bytes()
    path.write_bytes(damage if damage != b"note" else data.replace(b"cartpole", b"cartpola"))
    with dr.open(noted, "a") as store:
        (problem,) = store.verify()
        assert (problem.kind, problem.where) == ("checksum", "counters/notes/first.json")
        with pytest.raises(dr.FormatError, match="or set it aside with `diskreplay repair`$"):
            store.read_note("first")
        store.repair()
        assert store.verify(deep=True) == []
        assert store.note_names() == ["second"]
        assert len(list(store.episodes)) > 0


def test_what_is_no_note_has_no_place_in_the_folder(noted: Path) -> None:
    folder = noted / "counters/notes"
    (folder / "text.txt").write_text("x")
    (folder / "link.json").symlink_to("first.json")
    (folder / ".first.json.1.tmp").write_text("")
    with dr.open(noted) as store:
        found = {(problem.kind, problem.where) for problem in store.verify()}
    assert found == {("unexpected", "counters/notes/text.txt"), ("type", "counters/notes/link.json")}
