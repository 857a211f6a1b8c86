import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import diskreplay as dr
from tests.testing.support import digest


def test_a_backup_is_the_store_and_is_told_in_one_line(run: Callable, small: Path) -> None:
    to = small.with_name("b")
    done = run("backup", small, to)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("backed up  1 segment of 80 steps, ")
    assert done.out.endswith(f" of them shared with the store  to {to}\n")
    assert digest(to) == digest(small)
    assert run("diff", small, to).code == 0
    assert run("verify", to, "--deep") == (0, "no problems\n", "")


def test_json_has_every_number(run: Callable, small: Path) -> None:
    to = small.with_name("b")
    done = run("backup", small, to, "--no-link", "--json")
    told = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert told.pop("bytes") == told.pop("bytes_copied") > 0
    assert (told.pop("steps"), told.pop("steps_inserted")) == (80, 80)
    others = ("steps_hidden", "steps_evicted", "steps_discarded", "steps_lost", "steps_in_quarantine")
    assert [told.pop(name) for name in others] == [0] * 5
    assert told == {"path": str(to), "segments": 1, "bytes_shared": 0, "problems": []}
    assert {file.stat().st_nlink for file in to.rglob("*") if file.is_file()} == {1}


def test_damage_is_a_line_each_and_exit_code_1(run: Callable, small: Path) -> None:
    name = "segments/00000000/reward/c.0.0"
    (small / name).chmod(0o644)
    with open(small / name, "r+b") as file:
        file.write(b"\xff")
    done = run("backup", small, small.with_name("b"))
    first, last = done.out.splitlines()
    assert (done.code, done.err) == (1, "")
    assert first == f"checksum  {name}  does not match its checksum; copied as it is"
    assert last.endswith("; 1 problem copied with it")


def test_what_cannot_be_done_is_one_line(run: Callable, small: Path) -> None:
    small.with_name("b").mkdir()
    done = run("backup", small, small.with_name("b"))
    assert done == (2, "", f"diskreplay: {small.with_name('b')} exists already; give the path of a new store\n")
    done = run("backup", small, small / "b")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "is inside the store" in done.err
    assert not list(small.parent.glob(".*"))


def test_an_interrupted_backup_says_how_to_go_on(run: Callable, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = small.with_name("b")

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", interrupt)  # one of which shares the blocks of a file
    monkeypatch.setattr(fcntl, "ioctl", interrupt)
    done = run("backup", small, to)
    assert (done.code, done.out) == (130, "")
    left = to.with_name(".b.backup")
    assert done.err == f"diskreplay: interrupted; repeat the command to continue, or delete {left}\n"
    monkeypatch.undo()
    assert run("backup", small, to).code == 0
    assert sorted(os.listdir(small.parent)) == ["b", "store"]


@pytest.mark.slow
def test_a_bar_of_bytes_is_on_a_terminal(
    run_in_terminal: Callable[..., tuple[subprocess.CompletedProcess[bytes], bytes]], small: Path
) -> None:
    done, shown = run_in_terminal("backup", small, small.with_name("b"))
    assert done.returncode == 0
    assert done.stdout.count(b"\n") == 1
    assert b"Copying" in shown
    assert b"kB" in shown
    with dr.open(small.with_name("b")) as backup:
        assert len(backup) == 80
