"""`diskreplay demo` as a process, and what it leaves however it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import diskreplay as dr

COMMAND = [sys.executable, "-m", "diskreplay", "demo"]
# It learns within seconds of its first thousand steps: on a busy machine before a test has seen those.
NEVER_DONE = """
import sys
from diskreplay.cli import dqn_per, main
dqn_per.ENOUGH_RETURN = float("inf")
sys.exit(main.main(["demo", *sys.argv[1:]]))
"""
ENDLESS = [sys.executable, "-c", NEVER_DONE]
PATIENCE_SECONDS = 600.0


def test_a_path_at_which_something_is_advises_a_command(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("demo", "--path", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        f"diskreplay: {tmp_path} exists already, and the demo makes a new store: choose another --path"
    )
    assert done.err.endswith(f"with `diskreplay inspect {tmp_path}`\n")


def collected(path: Path) -> int:
    with dr.open(path) as store:
        return len(store)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@contextmanager
def started_demo(folder: Path, *arguments: object, command: Sequence[str] = COMMAND) -> Iterator[subprocess.Popen]:
    """Run the demo as the leader of a session of its own, with the folder for its temporary files."""
    (folder / "tmp").mkdir()
    command = [*command, *map(str, arguments)]
    with subprocess.Popen(
        command,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell ignores it for what it starts in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            yield process
        finally:
            for pid in session_of(process.pid):
                os.kill(pid, signal.SIGKILL)


def session_of(leader: int) -> list[int]:
    """List the processes of a session."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        state, _, _, session = stat.rpartition(")")[2].split()[:4]
        if int(session) == leader and state != "Z":
            found.append(int(pid))
    return found


def nothing_is_left(folder: Path, leader: int) -> bool:
    # torch makes the folder of its compiler's cache by itself, and leaves it.
    left = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
    return session_of(leader) == [] and left == []


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize("how", ["it gives up", "SIGINT", "SIGTERM", "a collector dies", "the trainer is killed"])
def test_however_it_ends_nothing_runs_on_and_the_store_that_was_asked_for_is_left(tmp_path: Path, how: str) -> None:
    path, gives_up = tmp_path / "store", how == "it gives up"
    arguments = ["--max-seconds", 0] if gives_up else []
    command = COMMAND if gives_up else ENDLESS
    with started_demo(tmp_path, *arguments, "--path", path, command=command) as process:
        if not gives_up:
            wait_for(lambda: path.exists() and collected(path) >= 1000)
        if how == "a collector dies":
            os.kill(collectors_of(process.pid)[0], signal.SIGKILL)
        elif how == "the trainer is killed":
            process.kill()
            wait_for(lambda: session_of(process.pid) == [])
        elif not gives_up:
            os.killpg(process.pid, signal.Signals[how])
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        if how != "the trainer is killed":  # who takes the temporary files along
            assert "Traceback" not in err
            wait_for(lambda: nothing_is_left(tmp_path, process.pid))
    last = err.splitlines()[-1] if err else ""
    if gives_up:
        assert (process.returncode, out) == (1, "")
        assert last.startswith("diskreplay: not learnt: a mean return of nan over 20 episodes after ")
        assert last.endswith(f"; the store is kept at {path}")
    elif how == "a collector dies":
        assert process.returncode == 1
        killed = r"diskreplay: a collector died: the exit codes are \[(0, )*-9(, 0)*\]; the store is kept at "
        assert re.fullmatch(killed + re.escape(str(path)), last)
    elif how != "the trainer is killed":
        assert process.returncode == 128 + signal.Signals[how], err
    assert collected(path) >= (0 if gives_up else 1000)
    if how == "the trainer is killed":
        with dr.open(path) as store:
            assert {writer["state"] for writer in store.info()["writers"]} == {"closed"}


def collectors_of(leader: int) -> list[int]:
    """Return the processes of a session that collect."""
    found = [pid for pid in session_of(leader) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 4
    return found


@pytest.mark.slow
def test_it_learns_and_prints_what_inspect_prints(tmp_path: Path, run: Callable) -> None:
    path = tmp_path / "store"
    with started_demo(tmp_path, "--path", path) as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, err
        wait_for(lambda: nothing_is_left(tmp_path, process.pid))
    first, _, report = out.partition("\n\n")
    assert first.startswith("learnt: a mean return of ")
    assert report == run("inspect", path).out


def test_a_path_that_is_taken_is_refused(tmp_path: Path, run: Callable) -> None:
    dr.create(tmp_path / "store", dr.Schema(dr.Field((), "float32"), dr.Field((), "int64"))).close()
    done = run("demo", "--path", tmp_path / "store")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
