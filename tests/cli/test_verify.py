"""`verify` and `repair` on the command line: one line for each finding, exit codes, JSON, a bar."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from tests.cli.conftest import on_a_terminal
from tests.testing.on_disk import flip, segment_of
from tests.testing.support import append_numbered, serial_schema

REWARDS = "segments/00000000/reward/c.0.0"


@pytest.fixture
def filled(tmp_store: Path) -> Path:
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer() as writer:
        append_numbered(writer, range(5))
    return tmp_store


def test_a_whole_store_has_no_problems(run: Callable, filled: Path) -> None:
    assert run("verify", filled) == (0, "no problems\n", "")
    assert run("verify", filled, "--deep") == (0, "no problems\n", "")
    assert run("verify", filled, "--json") == (0, "[]\n", "")
    assert run("repair", filled) == (0, "nothing to repair\n", "")
    assert run("repair", filled, "--dry-run") == (0, "nothing to repair\n", "")


def test_a_finding_is_a_line_and_exit_code_1(run: Callable, filled: Path) -> None:
    flip(filled / REWARDS)
    (filled / "notes.txt").write_text("x")
    helps = f"`diskreplay repair {filled} --dry-run` shows the repairs"
    found = f"unexpected  notes.txt  does not belong in a store\n1 problem; {helps}\n"
    assert run("verify", filled) == (1, found, "")
    done = run("verify", filled, "--deep")
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines() == [
        "unexpected  notes.txt  does not belong in a store",
        f"checksum  {REWARDS}  does not match its checksum from sealing: rows 0 to 5 of lane 0",
        f"2 problems; {helps}",
    ]


def test_json_holds_the_same_findings(run: Callable, filled: Path) -> None:
    flip(filled / REWARDS)
    done = run("verify", filled, "--deep", "--json")
    assert done.code == 1
    (problem,) = json.loads(done.out)
    assert problem["kind"] == "checksum"
    assert problem["where"] == REWARDS
    assert set(problem) == {"kind", "where", "detail"}


def test_names_from_the_store_cannot_break_a_line(run: Callable, filled: Path) -> None:
    (filled / "a\n\x1b[2Jb").write_text("x")
    done = run("verify", filled)
    assert done.out.splitlines()[0].startswith("unexpected  a\\n\\x1b[2Jb  ")
    planned = run("repair", filled, "--dry-run")
    assert planned.out.splitlines()[0].startswith("would be quarantined  a\\n\\x1b[2Jb  ")
    flip(filled / REWARDS)
    run("repair", filled)
    record = filled / "counters/quarantine/segments/00000000.record.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"reason": "c\nd\x1b[2J"}))
    for command in ("verify", "repair", "inspect"):
        assert "c\\nd\\x1b[2J" in run(command, filled).out


def test_repair_says_what_it_would_do_and_does_it(run: Callable, filled: Path) -> None:
    flip(filled / REWARDS)
    would = run("repair", filled, "--dry-run")
    assert would.code == 1
    assert would.out.startswith("would be quarantined  segments/00000000  reward/c.0.0 does not match its checksum")
    assert run("verify", filled, "--deep").code == 1
    did = run("repair", filled)
    reason = "reward/c.0.0 does not match its checksum from sealing: rows 0 to 5 of lane 0"
    aside = (
        "in quarantine; --restore SEGMENT brings one back, --drop SEGMENT deletes it:\n"
        f"segment 0  counters/quarantine/segments/00000000  5 steps: {reason}\n"
    )
    assert did == (1, would.out.removeprefix("would be ") + aside, "")
    told = run("verify", filled, "--deep")
    assert (told.code, told.err) == (1, "")
    assert told.out.startswith("quarantine  counters/quarantine/segments/00000000  5 steps of writer 0 are set aside ")
    assert told.out.splitlines()[-1].startswith(f"1 problem; `diskreplay repair {filled} --restore SEGMENT` brings ")
    assert run("repair", filled) == (1, "nothing to repair\n" + aside, "")


@pytest.fixture
def with_one_aside(run: Callable, filled: Path) -> Path:
    """A store whose only segment was damaged and set aside, and is whole again."""
    flip(filled / REWARDS)
    run("repair", filled)
    flip(filled / "counters/quarantine" / REWARDS)
    return filled


def test_a_segment_is_brought_back_by_its_number(run: Callable, with_one_aside: Path) -> None:
    line = "restored  segments/00000000  from counters/quarantine/segments/00000000, 5 steps\n"
    would = run("repair", with_one_aside, "--restore", 0, "--dry-run")
    assert (would.code, would.out.splitlines()[0]) == (1, f"would be {line[:-1]}")
    assert run("repair", with_one_aside, "--restore", 0) == (0, line, "")
    assert run("verify", with_one_aside, "--deep") == (0, "no problems\n", "")
    again = run("repair", with_one_aside, "--restore", 0)
    assert (again.code, again.out) == (2, "")
    assert again.err.startswith("diskreplay: segment 0 is not in ")


def test_a_segment_is_deleted_only_when_it_is_named_and_agreed_to(run: Callable, with_one_aside: Path) -> None:
    place = with_one_aside / "counters/quarantine/segments/00000000"
    assert run("repair", with_one_aside, "--drop", 0, "--dry-run").out.startswith("would be deleted  segment 0  ")
    refused = run("repair", with_one_aside, "--drop", 0, "--json")
    assert (refused.code, json.loads(refused.out)["actions"]) == (1, [])
    assert refused.err == "diskreplay: not deleted; to delete it use --yes\n"
    refused = run("repair", with_one_aside, "--drop", 0)  # without a terminal nobody is asked
    assert (refused.code, refused.err) == (1, "")
    assert refused.out.startswith("not deleted  segment 0  ")
    assert refused.out.endswith("\nto delete it use --yes\n")
    assert place.exists()
    done = run("repair", with_one_aside, "--drop", 0, "--yes")
    assert done.code == 0
    assert done.out.strip().startswith("deleted  segment 0  counters/quarantine/segments/00000000  5 steps: ")
    assert not place.exists()
    assert run("verify", with_one_aside, "--deep") == (0, "no problems\n", "")
    assert run("repair", with_one_aside, "--drop", 0, "--yes").code == 2
    assert run("repair", with_one_aside, "--drop", 0, "--restore", 0).code == 2


@pytest.mark.parametrize("what", ["store", "counters"])
def test_nothing_is_deleted_through_a_link_nor_where_there_is_no_store(
    run: Callable, with_one_aside: Path, tmp_path: Path, what: str
) -> None:
    place = with_one_aside / "counters/quarantine/segments/00000000"
    other = tmp_path / "other"
    other.mkdir()
    if what == "store":
        dr.create(other / "x", dr.open(with_one_aside).schema).close()
        other = other / "x"
        shutil.rmtree(other / "counters")
    (other / "counters").symlink_to(with_one_aside / "counters")
    done = run("repair", other, "--drop", 0, "--yes")
    assert (done.code, done.out) == (2, "")
    assert ("is not a folder" if what == "store" else "is not a store") in done.err
    assert place.exists()
    assert "does not exist" in run("repair", tmp_path / "nowhere", "--drop", 0, "--yes").err


def test_inspect_counts_what_is_aside_apart(run: Callable, with_one_aside: Path) -> None:
    told = run("inspect", with_one_aside, "--json")
    assert told.code == 1
    info = json.loads(told.out)
    assert (info["steps"], info["steps_evicted"], info["quarantine"]["steps"]) == (0, 0, 5)
    shown = run("inspect", with_one_aside).out
    assert "quarantine  5 steps in 1 segment, " in shown
    assert "reward/c.0.0 does not match its checksum" in shown
    assert "evicted" not in shown


def test_inspect_names_a_damaged_segment(run: Callable, filled: Path) -> None:
    flip(filled / "segments/00000000/zarr.json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = run("inspect", filled)
    assert shown.code == 1
    assert shown.err.startswith(f"diskreplay: warning: segment 0 of {filled} is damaged, and its steps are left out")
    assert shown.err.count("\n") == 1  # and no line of Python
    assert "1 (1 damaged)" in shown.out
    assert f"`diskreplay repair {filled} --dry-run`" in " ".join(shown.out.split())


@pytest.fixture
def many(tmp_store: Path) -> Path:
    """A store of ten episodes of five steps, of which a damaged byte costs two."""
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64, segment_steps=60) as store, store.writer() as writer:
        for first in range(0, 50, 5):
            append_numbered(writer, range(first, first + 5))
    flip(tmp_store / "segments/00000000/reward/c.0.1")
    return tmp_store


def test_more_steps_than_may_be_lost_are_set_aside_only_when_asked_for(run: Callable, many: Path) -> None:
    done = run("repair", many, "--max-lost-steps", "9")
    assert done.code == 1
    assert done.out.splitlines()[0].startswith("refused  segments/00000000  reward/c.0.1 does not match")
    assert done.out.splitlines()[0].endswith("; 10 steps would be set aside, but only 9 may be")
    assert done.out.splitlines()[1] == "to set them aside use --yes, or a higher --max-lost-steps"
    assert run("verify", many, "--deep").code == 1
    done = run("repair", many, "--max-lost-steps", "9", "--yes")
    assert (done.code, done.err) == (1, "")
    assert done.out.startswith("rebuilt  segments/00000000  reward/c.0.1 does not match")
    assert "2 episodes, 10 steps lost, ids 6 to 17" in done.out
    again = run("repair", many)
    assert again.code == 1  # until somebody decides about what is in quarantine
    assert again.out.startswith("nothing to repair\nin quarantine; ")
    assert run("repair", many, "--drop", 0, "--yes").code == 0
    assert run("repair", many) == (0, "nothing to repair\n", "")


def test_what_repair_did_as_json(run: Callable, many: Path) -> None:
    def told(*arguments: object) -> tuple[int, dict[str, Any]]:
        done = run("repair", many, *arguments, "--json")
        assert done.err == ""
        return done.code, json.loads(done.out)

    code, would = told("--dry-run")
    assert (code, would["dry_run"], would["quarantine"]) == (1, True, [])
    assert [(action["what"], action["where"], action["steps"]) for action in would["actions"]] == [
        ("rebuilt", "segments/00000000", 10)
    ]
    assert would["left"][0]["kind"] == "checksum"
    code, refused = told("--max-lost-steps", 9)
    assert (code, [action["what"] for action in refused["actions"]]) == (1, ["refused"])
    code, did = told()
    assert (code, did["dry_run"], did["left"]) == (1, False, [])
    assert did["actions"][0]["detail"].startswith("reward/c.0.1 does not match")
    assert [(entry["segment"], entry["steps"]) for entry in did["quarantine"]] == [(0, 10)]
    code, dropped = told("--drop", 0, "--yes")
    assert (code, dropped["actions"][0]["what"], dropped["actions"][0]["steps"]) == (0, "deleted", 10)
    assert told() == (0, {"dry_run": False, "actions": [], "left": [], "quarantine": []})


def test_ten_thousand_steps_may_be_lost_without_asking(run: Callable, many: Path) -> None:
    assert "[default: 10000]" in run("repair", "--help").out
    assert run("repair", many).out.startswith("rebuilt  ")


ANSWERS = pytest.mark.parametrize(("answer", "is_yes"), [(b"y\n", True), (b"n\n", False)])


@pytest.mark.slow
@ANSWERS
def test_on_a_terminal_more_steps_are_set_aside_after_a_yes(many: Path, answer: bytes, is_yes: bool) -> None:
    code, out, asked = on_a_terminal(b"Continue? [y/N] ", answer, "repair", many, "--max-lost-steps", "9")
    assert b"10 steps more would be set aside. Continue?" in asked
    assert code == 1
    assert (b"rebuilt  segments/00000000" in out) == is_yes
    assert ((many / "counters/quarantine/segments/00000000").exists()) == is_yes


@pytest.mark.slow
@ANSWERS
def test_on_a_terminal_a_segment_is_deleted_after_a_yes(with_one_aside: Path, answer: bytes, is_yes: bool) -> None:
    code, out, asked = on_a_terminal(b"[y/N] ", answer, "repair", with_one_aside, "--drop", "0")
    assert b"Delete segment 0  " in asked
    assert code == 1 - is_yes
    assert out.lstrip().startswith(b"deleted  segment 0  " if is_yes else b"not deleted  segment 0  ")
    assert (with_one_aside / "counters/quarantine/segments/00000000").exists() != is_yes


def test_what_cannot_be_mended_is_told(run: Callable, filled: Path) -> None:
    flip(filled / "zarr.json")
    flip(filled / "evictions/document")
    done = run("repair", filled)
    assert done.code == 1
    assert done.out.splitlines()[1] == "not repaired; restore it from a backup:"
    assert done.out.splitlines()[2].startswith("checksum  zarr.json  ")


@pytest.mark.slow
def test_a_bar_goes_to_a_terminal_and_findings_do_not(filled: Path, run_in_terminal: Callable) -> None:
    for number in range(1, 4):
        shutil.copytree(filled / "segments/00000000", filled / f"segments/0000000{number}")
    done, shown = run_in_terminal("verify", filled, "--deep")
    assert done.returncode == 1  # the counters know of one segment
    assert b"Verifying segments" in shown
    assert b"\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith(b"3 problems; ")


def test_a_segment_without_steps_in_quarantine_is_no_problem(run: Callable, filled: Path) -> None:
    aside = filled / "counters/quarantine/segments/00000000"
    aside.parent.mkdir(parents=True)
    segment_of(filled).rename(aside)
    said = {"segment": 0, "path": "segments/00000000", "steps": 0, "reason": "by hand", "since": 0.0}
    aside.with_name("00000000.record.json").write_text(json.dumps(said))
    assert run("verify", filled, "--deep") == (0, "no problems\n", "")
    assert run("repair", filled).code == 0
    assert run("inspect", filled).code == 0


@pytest.mark.parametrize("damage", [b"{}", None])
def test_a_store_without_its_document_names_the_command_that_helps(
    run: Callable, filled: Path, damage: bytes | None
) -> None:
    document = filled / "zarr.json"
    before = document.read_bytes()
    document.unlink() if damage is None else document.write_bytes(damage)
    done = run("inspect", filled)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert f"`diskreplay repair {filled} --dry-run` tells what can be restored" in done.err
    assert run("repair", filled).code == 0
    assert document.read_bytes() == before
