"""`verify` and `repair` on the command line: one line for each finding, exit codes, JSON, a bar."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import diskreplay as dr
from diskreplay.cli.repair import action_line
from diskreplay.cli.verify import problem_lines
from diskreplay.store.repair import Action
from tests.testing.support import append_numbered, serial_schema

REWARDS = "segments/00000000/reward/c.0.0"


@pytest.fixture
def filled(tmp_store: Path) -> Path:
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer() as writer:
        append_numbered(writer, range(5))
    return tmp_store


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def test_a_whole_store_has_no_problems(run: Callable, filled: Path) -> None:
    assert run("verify", filled) == (0, "no problems\n", "")
    assert run("verify", filled, "--deep") == (0, "no problems\n", "")
    assert run("verify", filled, "--json") == (0, "[]\n", "")
    assert run("repair", filled) == (0, "nothing to repair\n", "")
    assert run("repair", filled, "--dry-run") == (0, "nothing to repair\n", "")


def test_a_finding_is_a_line_and_exit_code_1(run: Callable, filled: Path) -> None:
    flip(filled / REWARDS)
    (filled / "notes.txt").write_text("x")
    assert run("verify", filled) == (1, "unexpected  notes.txt  has no place in a store\n1 problem\n", "")
    done = run("verify", filled, "--deep")
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines() == [
        "unexpected  notes.txt  has no place in a store",
        f"checksum  {REWARDS}  does not fit the checksum that it was sealed with: rows 0 to 5 of lane 0",
        "2 problems",
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
    assert problem_lines([dr.Problem("size", "a\nb", "c\nd")]) == ["size  a\\nb  c\\nd"]
    assert action_line(Action("sealed", "a\nb", "c"), dry_run=False) == "sealed  a\\nb  c"


def test_repair_says_what_it_would_do_and_does_it(run: Callable, filled: Path) -> None:
    flip(filled / REWARDS)
    would = run("repair", filled, "--dry-run")
    assert would.code == 1
    assert would.out.startswith("would be quarantined  segments/00000000  reward/c.0.0 does not fit the checksum")
    assert run("verify", filled, "--deep").code == 1
    did = run("repair", filled)
    assert did == (1, would.out.removeprefix("would be "), "")
    assert run("verify", filled, "--deep").code == 0
    assert run("repair", filled).out == "nothing to repair\n"


def test_what_cannot_be_mended_is_told(run: Callable, filled: Path) -> None:
    flip(filled / "zarr.json")
    flip(filled / "hidden/document")
    done = run("repair", filled)
    assert done.code == 1
    assert done.out.splitlines()[1] == "not mended; restore it from a backup:"
    assert done.out.splitlines()[2].startswith("checksum  zarr.json  ")


@pytest.mark.parametrize("command", ["verify", "repair"])
@pytest.mark.parametrize("make", ["nothing", "file", "folder"])
def test_what_is_no_store_takes_one_line_and_exit_code_2(
    run: Callable, tmp_path: Path, make: str, command: str
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    done = run(command, tmp_path / make)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("diskreplay: ")
    assert done.err.count("\n") == 1
    assert str(tmp_path / make) in done.err
    assert "unexpected" not in done.err


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_the_commands_explain_themselves(run: Callable, command: str) -> None:
    done = run(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"Usage: diskreplay {command}" in done.out


def test_a_bar_goes_to_a_terminal_and_findings_do_not(filled: Path, run_in_terminal: Callable) -> None:
    for number in range(1, 4):
        shutil.copytree(filled / "segments/00000000", filled / f"segments/0000000{number}")
    done, shown = run_in_terminal("verify", filled, "--deep")
    assert done.returncode == 1  # the counters know of one segment
    assert b"Verifying segments" in shown
    assert b"\x1b" not in done.stdout
    assert done.stdout.endswith(b"3 problems\n")
