import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import diskreplay as dr
from diskreplay.cli import text
from diskreplay.cli.look.watch import log_line, view
from diskreplay.store.activity import Disk, Look, RetentionActivity
from diskreplay.store.processes import LimiterCounts, SavedSampler, WriterActivity

LOOK = Look(
    path="/data/runs/a",
    time=1767225600.0,
    steps=1_234_567,
    steps_hidden=700_000,
    steps_evicted=65_421,
    steps_discarded=0,
    steps_lost=0,
    steps_in_quarantine=12,
    inserted=2_000_000,
    steps_per_second=1234.567,
    episodes=5_000,
    episodes_open=4,
    episodes_per_second=3.5,
    newest_episodes=100,
    mean_total_reward=31.25,
    writers=[
        WriterActivity(7, "dead", (12,), 1, 40, 0.0, 600.0, None),
        WriterActivity(8, "writing", (13, 14), 512, 4_000_000, 51_200.0, 0.01, 2.5),
        WriterActivity(9, "closed", (), 0, 12, 0.0, 3.0, None),
    ],
    samplers=[
        SavedSampler("learner", 90.0, 1_000, 256_000, 12.5, "Transitions(n_step=5)", "Prioritized"),
        SavedSampler("odd", 7.0, None, None, None, None, None),
    ],
    limiters=[
        LimiterCounts("default", 2_000_000, 7_500_000, 3.75, 4_000.0, 120, 0, "writers"),
        LimiterCounts("other", 2_000_000, 10, 5e-6, None, None, None, None),
    ],
    disk=Disk(12_345_678_901, 99_000_000_000, 3_600_000_000.0, 99_000.0),
    retention=RetentionActivity(2_000_000, 10**11, 86_400.0, 0.617, 620.0, 765_433, 12.5, 7_000.0),
    problems=["writer 7 died; the next process that opens the store for writing, or repair, seals segment 12"],
)
AT_FIRST = replace(
    LOOK,
    steps_per_second=None,
    episodes_per_second=None,
    newest_episodes=0,
    mean_total_reward=None,
    writers=[],
    samplers=[],
    limiters=[],
    disk=Disk(0, 10, None, None),
    retention=RetentionActivity(None, None, None, None, None, 0, None, None),
    steps_in_quarantine=0,
    problems=[],
)


def shown(look: Look, width: int, height: int | None = None) -> str:
    console = Console(width=width, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(view(look, height))
    return capture.get()


def test_everything_that_a_look_tells_is_shown() -> None:
    words = " ".join(shown(LOOK, 200).split())
    for expected in (
        "/data/runs/a",
        "1,234,567, 2,000,000 inserted, 700,000 hidden, 65,421 evicted, 1,235/s",
        "5,000 ended, 4 open, 3.5/s; mean total_reward of the newest 100: 31.25",
        "12.3 GB, 99.0 GB free, +3.6 GB an hour; the disk is full in 28 h",
        "keeps 2,000,000 steps, 100.0 GB, 24 h: 62% used, all in 10 min; 12.5/s leave, the oldest first; the oldest "
        "step is 117 min old",
        "12 steps, in no other class",
        "writer 7 died",
        "7 dead 12 1 0 40 10 min ago -",
        "8 writing 13, 14 512 51,200 4,000,000 0.0 s ago all but 2.5 s",
        "9 closed - 0 0 12 3.0 s ago -",
        "default 7,500,000 4,000 3.75 120 0 writers",
        "other 10 - 0 - - -",
        "learner 90 s ago 1,000 12.5 256,000 Transitions(n_step=5) by Prioritized",
        "odd 7.0 s ago - - - - by -",
    ):
        assert expected in words


def test_the_first_look_at_an_idle_store_is_short() -> None:
    words = " ".join(shown(AT_FIRST, 80).split())
    assert "1,234,567, 2,000,000 inserted, 700,000 hidden, 65,421 evicted, -" in words
    assert "on disk 0 B, 10 B free retention keeps everything" in words
    assert "writers" not in words


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_view_fits_every_terminal_and_splits_no_word(width: int) -> None:
    lines = shown(LOOK, width, 24).splitlines()
    assert max(map(len, lines)) <= width
    assert set(" ".join(lines).split()) <= set(shown(LOOK, 200).split())


def test_a_small_terminal_leaves_rows_out_and_says_how_many() -> None:
    many = replace(LOOK, writers=[replace(LOOK.writers[1], writer=i) for i in range(100)])
    assert "97 more" in shown(many, 120, 10)
    assert "70 more" in shown(many, 120, 50)
    assert "more" not in shown(many, 120)


def test_a_line_tells_the_most_important() -> None:
    got = log_line(LOOK)
    assert re.match(r"\d\d:\d\d:\d\d  steps 1,234,567  1,235/s  writing 1  episodes 5,000  total_reward 31.25", got)
    assert got.endswith("on disk 12.3 GB  free 99.0 GB  leaving 12.5/s  held writers (default)  problems 1")
    assert log_line(AT_FIRST).endswith("total_reward -  on disk 0 B  free 10 B")


def test_nothing_in_a_store_is_obeyed_by_the_terminal() -> None:
    evil = replace(
        LOOK,
        path="/x\x1b[2J",
        problems=["\x1b]0;x\a"],
        samplers=[replace(LOOK.samplers[0], view="\x1b[1m", name="a")],
    )
    assert "\x1b" not in shown(evil, 200) + log_line(evil)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other at once."""
    monkeypatch.setattr("diskreplay.cli.look.watch.time.sleep", lambda seconds: None)


@pytest.mark.usefixtures("quick")
def test_without_a_terminal_each_look_is_a_line(run: Callable, small: Path) -> None:
    done = run("watch", small, "--count", 3)
    assert (done.code, done.err) == (0, "")
    assert len(done.out.splitlines()) == 3
    assert all("  steps 80  0/s  writing 0  episodes 6  total_reward " in row for row in done.out.splitlines())


@pytest.mark.usefixtures("quick")
def test_json_is_an_object_a_line_and_once_shows_all(run: Callable, small: Path) -> None:
    done = run("watch", small, "--json", "--count", 2)
    looks = [json.loads(row) for row in done.out.splitlines()]
    assert [(look["steps"], look["steps_per_second"], look["retention"]["capacity"]) for look in looks] == [
        (80, 0.0, 1000)
    ] * 2
    assert looks[0].keys() == vars(LOOK).keys()
    done = run("watch", small, "--once")
    assert (done.code, done.err) == (0, "")
    assert "keeps 1,000 steps: 8% used" in done.out


@pytest.mark.usefixtures("quick")
def test_what_cannot_be_watched_takes_one_line(run: Callable, small: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([tmp_path / "nowhere"], "nowhere does not exist"),
        ([small, "--limiter", "default=1:2"], "--limiter is NAME=SAMPLES_PER_INSERT:MIN_SIZE:ERROR_BUFFER"),
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

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            shutil.rmtree(small)

    monkeypatch.setattr("diskreplay.cli.look.watch.time.sleep", sleep)
    done = run("watch", small)
    assert (done.code, len(done.out.splitlines()), done.err.count("\n")) == (2, 2, 1)
    assert "was deleted" in done.err


@pytest.mark.usefixtures("quick")
def test_a_damaged_store_is_watched_with_its_problems(run: Callable, small: Path) -> None:
    (small / "segments/00000000/zarr.json").write_text("{")
    done = run("watch", small, "--count", 1)
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
def test_a_signal_that_ends_it_gives_the_terminal_back(growing: dr.Writer, tmp_store: Path) -> None:
    terminal = Terminal("watch", tmp_store, "--interval", 60)
    try:
        terminal.wait_for("1, 1 inserted")
        terminal.process.send_signal(signal.SIGTERM)
    finally:
        code = terminal.end()
    assert code == 128 + signal.SIGTERM
    assert terminal.drawn.index("\x1b[?1049h") < terminal.drawn.index("\x1b[?1049l")


def test_durations_and_rates_are_for_people() -> None:
    cases = [(None, "-"), (0.04, "0.0 s"), (9.96, "10.0 s"), (90, "90 s"), (119.9, "120 s"), (7199, "120 min")]
    cases += [(86400, "24 h"), (86400 * 365, "365 days")]
    for seconds, expected in cases:
        assert text.duration(seconds) == expected
    for rate, expected in [(None, "-"), (0.0, "0/s"), (1234.567, "1,235/s"), (0.123456, "0.1235/s")]:
        assert text.rate(rate) == expected
