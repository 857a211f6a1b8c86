import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import diskreplay as dr
from diskreplay.cli import demo, dqn_per

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


def test_the_time_to_give_up_counts_from_the_first_update(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(demo, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def train(*_: object) -> Iterator[SimpleNamespace]:
        for seconds, updates in ((1000, 0), (1000, 25), (3, 50), (3, 75), (3, 100)):
            now[0] += seconds
            yield SimpleNamespace(updates=updates, mean_return=math.nan)

    monkeypatch.setattr(dqn_per, "train", train)
    assert run("demo", "--max-seconds", 6) == (
        1,
        "",
        "diskreplay: not learnt: a mean return of nan over 20 episodes after 0 steps and 75 updates in 2006.0 s\n",
    )


def test_a_collector_that_dies_is_one_line_with_its_reason(
    run: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(updates=0, mean_return=math.nan)
        raise ChildProcessError("a collector died: StorageFull: the disk\nis full")

    monkeypatch.setattr(dqn_per, "train", train)
    path = tmp_path / "store"
    reason = f"diskreplay: a collector died: StorageFull: the disk is full; the store is kept at {path}\n"
    assert run("demo", "--path", path) == (1, "", reason)


def test_a_path_at_which_something_is_advises_a_command(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("demo", "--path", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        f"diskreplay: {tmp_path} exists already, and the demo makes a new store: give it another --path"
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
def makes_another_error() -> Iterator[None]:
    """Do as a library does that turns whatever is raised in it into an error of its own."""
    try:
        yield
    except SystemExit:
        raise OSError("something was raised") from None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_block_whatever_becomes_of_what_it_raises(number: int) -> None:
    before = signal.signal(number, signal.default_int_handler)  # it may have been ignored from the start
    try:
        with pytest.raises(SystemExit) as raised, demo.signals_noted(), makes_another_error():
            os.kill(os.getpid(), number)
        assert raised.value.code == 128 + number
        with pytest.raises(SystemExit) as raised, demo.signals_noted(), suppress(SystemExit):
            os.kill(os.getpid(), number)
        assert raised.value.code == 128 + number
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


class SignalledWhenFinalized:
    """Something of which the finalizer is interrupted by a signal: what the signal's handler raises is dropped."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        for _ in range(1000):  # the handler runs between two steps of the interpreter
            pass


def finalize_and_go_on(number: int, check: Callable[[], None], went_on: list[str]) -> None:
    check()
    SignalledWhenFinalized(number)
    went_on.append("to the check")
    check()
    went_on.append("beyond it")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_a_finalizer_ends_the_block_at_the_next_check_and_prints_nothing(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, signal.default_int_handler)
    went_on: list[str] = []
    try:
        with pytest.raises(SystemExit) as raised, demo.signals_noted() as check:
            finalize_and_go_on(number, check, went_on)
        assert (raised.value.code, went_on) == (128 + number, ["to the check"])
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert capfd.readouterr() == ("", "")


def send_each(numbers: Sequence[int], went_on: list[int]) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
        went_on.append(number)


def test_a_second_signal_does_not_wait_for_a_check() -> None:
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]  # one may have been ignored
    went_on: list[int] = []
    try:
        with pytest.raises(SystemExit) as raised, demo.signals_noted():
            send_each(numbers, went_on)
        assert (raised.value.code, went_on) == (128 + signal.SIGTERM, [signal.SIGTERM])
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with demo.signals_noted():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, handler)


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
    assert len(found) == dqn_per.COLLECTORS
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
    dr.create(tmp_path / "store", dqn_per.SCHEMA).close()
    done = run("demo", "--path", tmp_path / "store")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
