"""When `diskreplay demo` gives up, and how it ends at a signal."""

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from diskreplay.cli import demo, dqn_per


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
