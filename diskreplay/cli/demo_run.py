"""The trainer's process of the demo: starts and stops the collectors, runs the learner, shows how far it is."""

import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

import diskreplay as dr
from diskreplay.cli import console, demo_collector, text
from diskreplay.cli.inspect import inspect

if TYPE_CHECKING:
    from diskreplay.cli.demo_learner import Progress

COLLECTORS = 4
ENOUGH_RETURN = 475.0
CHUNK_BYTES = 1 << 20  # 65,536 observations of CartPole; a chunk takes its whole size while it is written
JOIN_SECONDS = 10.0
ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
LINE_SECONDS = 5.0  # between two lines of progress where there is no terminal to draw on


def run(seed: int, path: Path | None, max_seconds: float) -> bool:
    """Play, learn and tell what the store holds; return whether it was learnt, having said why if not."""
    started = time.monotonic()
    with ExitStack() as stack:
        check_signals = stack.enter_context(_signals_unwind())
        folder = Path(tempfile.mkdtemp(prefix="diskreplay-demo-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store_path = path or folder / "store"
        kept = "" if path is None else f"; the store is kept at {text.clean(path)}"
        try:
            last = _learn(store_path, folder, seed, started, max_seconds, check_signals)
        except CollectorDied as error:
            console.complain(f"{error}{kept}")
            return False
        verdict = (
            f"a mean return of {text.number(last.greedy_return)} over 20 episodes after {text.count(last.steps)} steps"
            f" and {text.count(last.updates)} updates in {time.monotonic() - started:.1f} s"
        )
        if not is_enough(last):
            console.complain(f"not learnt: {verdict}{kept}")
            return False
        console.emit(f"learnt: {verdict}\n")
        inspect(store_path)
        if path is None:
            console.emit("The store is removed; --path keeps it.")
        return True


def is_enough(progress: "Progress") -> bool:
    """Tell whether the greedy policy plays well enough to stop."""
    return progress.greedy_return is not None and progress.greedy_return >= ENOUGH_RETURN


def _learn(
    path: Path, folder: Path, seed: int, started: float, max_seconds: float, check_signals: Callable[[], None]
) -> "Progress":
    """Run collectors and learner until it is learnt or time is up; return the last progress."""
    display = Display(started)
    with (
        dr.create(path, demo_collector.schema(), chunk_bytes=CHUNK_BYTES) as store,
        display.drawn,
        Collectors(path, folder, seed) as collectors,
    ):
        # Here and not above: torch takes seconds to load, in which the collectors start.
        from diskreplay.cli.demo_learner import Progress, learn

        progress, learning_since = Progress(), None
        for progress in learn(store, collectors.policy_file, seed, COLLECTORS):
            check_signals()
            display.show(progress)
            if learning_since is None and progress.updates:  # torch is loaded, and kernels are compiled
                learning_since = time.monotonic()
            is_late = learning_since is not None and time.monotonic() - learning_since >= max_seconds
            if is_enough(progress) or is_late:
                break
            collectors.check()
    return progress


class CollectorDied(Exception):
    """A collector ended although nobody stopped it."""


class Collectors:
    """The collector processes; leaving the context stops them and waits for them, whatever happened."""

    def __init__(self, store_path: Path, folder: Path, seed: int) -> None:
        self.policy_file = folder / "policy.pickle"
        self._complaints = [folder / f"collector-{number}.txt" for number in range(COLLECTORS)]
        context = get_context("spawn")
        self._their_end, self._our_end = context.Pipe(duplex=False)
        self._processes = [
            context.Process(
                target=demo_collector.run,
                args=(store_path, self.policy_file, self._their_end, seed * COLLECTORS + number, complaint),
                name=f"diskreplay-collector-{number}",
                daemon=True,
            )
            for number, complaint in enumerate(self._complaints)
        ]

    def __enter__(self) -> Self:
        try:
            # Ctrl-C is not for processes that are born in this block: the trainer stops them in order.
            with console.signals({signal.SIGINT: signal.SIG_IGN}):
                for process in self._processes:
                    process.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raise CollectorDied, with what it left to say, if a collector is gone."""
        for number, (process, complaint) in enumerate(zip(self._processes, self._complaints, strict=True)):
            if process.exitcode is not None:
                reason = complaint.read_text() if complaint.exists() else f"exit code {process.exitcode}"
                raise CollectorDied(f"collector {number} died: {text.clean(' '.join(reason.split()))}")

    def stop(self) -> None:
        """Ask all to finish; end those that do not."""
        self._our_end.close()
        started = [process for process in self._processes if process.pid is not None]
        deadline = time.monotonic() + JOIN_SECONDS
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in started:
            process.kill()  # which is nothing to one that has ended
            process.join()
            process.close()
        self._their_end.close()


@contextmanager
def _signals_unwind() -> Iterator[Callable[[], None]]:
    """Make the signals that end a process end the block, so that nothing stays behind; yield a check for one.

    The check raises SystemExit after a signal, and so does the end of the block. The first signal raises nowhere else:
    in the middle of compiling, that crashes the process, and in a finalizer Python drops what is raised. A second one,
    of somebody who cannot wait for the check, raises where it comes.
    """
    received: list[int] = []

    def check() -> None:
        if received:
            sys.exit(128 + received[0])

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            check()

    try:
        with console.signals(dict.fromkeys(ENDING, receive)):
            yield check
    finally:
        check()


class Display:
    """Numbers that a terminal is drawn over with while it is `drawn`, or a line now and then elsewhere; on stderr."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._progress: Progress | None = None
        terminal = Console(stderr=True)
        self._next_line = math.inf if terminal.is_terminal else 0.0
        live = Live(get_renderable=self._draw, console=terminal, transient=True)
        self.drawn: AbstractContextManager[object] = live if terminal.is_terminal else nullcontext()

    def show(self, progress: "Progress") -> None:
        """Take note of the progress."""
        self._progress = progress
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            print(", ".join(f"{name} {value}" for name, value in self._rows()), file=sys.stderr, flush=True)

    def _rows(self) -> Iterator[tuple[str, str]]:
        progress = self._progress
        if progress is None:
            yield "collectors", "starting"
        else:
            yield "steps collected", text.count(progress.steps)
            yield "gradient steps", text.count(progress.updates)
            yield "epsilon", f"{progress.epsilon:.2f}"
            yield "loss", text.number(progress.loss)
            yield "greedy return", f"{text.number(progress.greedy_return)} of {ENOUGH_RETURN:.0f}"
        yield "elapsed", f"{time.monotonic() - self._started:.0f} s"

    def _draw(self) -> Table:
        table = console.facts(self._rows())
        reached = (self._progress.greedy_return if self._progress else None) or 0.0
        table.add_row("", ProgressBar(total=ENOUGH_RETURN, completed=min(reached, ENOUGH_RETURN), width=40))
        return table
