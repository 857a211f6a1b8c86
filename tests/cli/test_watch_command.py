"""`diskreplay watch` on a terminal and without one."""

import ctypes
import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from tests.testing.support import wait_until


def test_without_a_terminal_each_look_is_a_line(run: Callable, small: Path) -> None:
    done = run("watch", small, "--interval", 0.1, "--count", 3)
    assert (done.code, done.err) == (0, "")
    assert len(done.out.splitlines()) == 3
    assert all("  steps 80  0/s  writing 0  episodes 6  total_reward " in row for row in done.out.splitlines())


def test_json_is_an_object_a_line_and_once_shows_all(run: Callable, small: Path) -> None:
    done = run("watch", small, "--interval", 0.1, "--json", "--count", 2)
    looks = [json.loads(row) for row in done.out.splitlines()]
    assert [(look["steps"], look["steps_per_second"], look["retention"]["capacity"]) for look in looks] == [
        (80, 0.0, 1000)
    ] * 2
    assert looks[0].keys() == {
        *("path", "time", "steps", "steps_hidden", "steps_evicted", "steps_discarded", "steps_lost"),
        *("steps_in_quarantine", "inserted", "steps_per_second", "episodes", "episodes_open", "episodes_per_second"),
        *("newest_episodes", "mean_total_reward", "writers", "samplers", "limiters", "disk", "retention", "problems"),
    }
    done = run("watch", small, "--interval", 0.1, "--once")
    assert (done.code, done.err) == (0, "")
    assert "keeps 1,000 steps: 8% used" in done.out


def test_what_cannot_be_watched_takes_one_line(run: Callable, small: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([tmp_path / "nowhere"], "nowhere does not exist"),
        ([small, "--limiter", "default=1:2"], "--limiter must be NAME=SAMPLES_PER_INSERT:MIN_SIZE:ERROR_BUFFER"),
        ([small, "--limiter", "/=1:2:3"], "name must be letters"),
        ([small, "--limiter", "a=-1:2:3"], "samples_per_insert must be a positive number"),
        ([small, "--interval", 0], "--interval"),
        ([small, "--count", 0], "--count"),
    ):
        done = run("watch", *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert message in done.err


def test_a_store_that_goes_ends_it_with_one_line(run: Callable, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def sleep(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(seconds)
        looks.append(seconds)
        if len(looks) == 3:
            shutil.rmtree(small)

    monkeypatch.setattr("diskreplay.cli.look.watch.time.sleep", sleep)
    done = run("watch", small, "--interval", 0.1)
    assert (done.code, len(done.out.splitlines()), done.err.count("\n")) == (2, 2, 1)
    assert "was deleted" in done.err


def test_a_damaged_store_is_watched_with_its_problems(run: Callable, small: Path) -> None:
    (small / "segments/00000000/zarr.json").write_text("{")
    done = run("watch", small, "--interval", 0.1, "--count", 1)
    assert (done.code, done.err) == (0, "")
    assert "problems 1" in done.out


class Terminal:
    """A process on a terminal of its own, and what it has drawn."""

    def __init__(self, *arguments: object) -> None:
        self._outer, inner = pty.openpty()
        self.resize(100, 30)
        command = [sys.executable, "-m", "diskreplay", *map(str, arguments)]
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment | {"TERM": "xterm"},
            start_new_session=True,
            # Else it is ignored where the tests run in the background of a script.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(inner)
        self.drawn = ""
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        while True:
            try:
                self.drawn += os.read(self._outer, 65536).decode(errors="replace")
            except OSError:  # the process has ended
                return

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._outer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, what: str, since: int = 0) -> None:
        until = time.monotonic() + 600
        while what not in self.drawn[since:]:
            assert time.monotonic() < until, self.drawn[since:]
            time.sleep(0.02)

    def end(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self._reading.join()
            os.close(self._outer)


@pytest.fixture
def growing(tmp_store: Path) -> Iterator[Any]:
    schema = dr.Schema(dr.Field((), "float32"), dr.Field((), "int64"))
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        writer.append(0.0, 0, 1.0, False, next_obs=0.0)
        yield writer


@pytest.mark.slow
def test_a_terminal_is_drawn_over_until_ctrl_c_and_given_back(growing: dr.Writer, tmp_store: Path) -> None:
    terminal = Terminal("watch", tmp_store, "--interval", 0.1)
    try:
        terminal.wait_for("1, 1 inserted")
        assert "\x1b[?1049h" in terminal.drawn
        for _ in range(41):
            growing.append(0.0, 0, 1.0, False, next_obs=0.0)
        terminal.wait_for("42, 42 inserted")
        at = len(terminal.drawn)
        terminal.resize(40, 12)
        terminal.process.send_signal(signal.SIGWINCH)  # which the kernel sends to the group of a controlling terminal
        terminal.wait_for("writer 0  state writing", at)
        at = len(terminal.drawn)
        terminal.process.send_signal(signal.SIGINT)
    finally:
        code = terminal.end()
    assert code == 130
    after = terminal.drawn[at:].split("\x1b[?1049l")[-1]
    assert "42, 42 inserted" in after  # what was seen last stays
    assert "Traceback" not in after


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [True, False])
def test_a_signal_that_ends_it_gives_the_terminal_back(interrupts: bool, growing: dr.Writer, tmp_store: Path) -> None:
    terminal = Terminal("watch", tmp_store, "--interval", 3600)
    try:
        terminal.wait_for("1, 1 inserted")
        if interrupts:
            terminal.process.send_signal(signal.SIGTERM)
        else:  # as a signal that arrives just before the sleep: to another thread, so that it interrupts no sleep
            process = terminal.process.pid
            wait_until(lambda: len(os.listdir(f"/proc/{process}/task")) > 1)
            other = next(task for task in map(int, os.listdir(f"/proc/{process}/task")) if task != process)
            assert ctypes.CDLL(None).tgkill(process, other, signal.SIGTERM) == 0
    finally:
        code = terminal.end()
    assert code == 128 + signal.SIGTERM
    assert terminal.drawn.index("\x1b[?1049h") < terminal.drawn.index("\x1b[?1049l")
