"""`diskreplay demo`: runs the example `dqn_per`: four processes play CartPole, and this process learns.

`diskreplay/cli/dqn_per.py` is a link to the example: a wheel does not include the folder of examples.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated

import typer

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.look.inspect import inspect
from diskreplay.errors import MissingExtra, StoreExists
from diskreplay.folders import is_taken

ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def demo(
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the network, the games and the draws.")] = 0,
    path: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Make the store here and keep it; default: remove it.")
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(min=0, callback=console.not_nan, help="Stop after this many seconds of learning.")
    ] = 300.0,
) -> None:
    """See a store at work: learn CartPole-v1 while four processes fill the store.

    Four collectors play with the newest policy and append their steps. The trainer samples 5-step transitions from the
    growing store, by priority, and trains a DQN. It stops when the greedy policy has a mean return of at least 475 over
    20 episodes. Then the demo prints the output of `inspect`. The exit code is 1 if no policy reaches this return in
    time.
    """
    if path is not None and is_taken(path):
        raise StoreExists(
            f"{text.clean(path)} exists already, and the demo makes a new store: choose another --path, or look at "
            f"this one with `diskreplay inspect {text.clean(path)}`"
        )
    started, give_up_at = time.monotonic(), math.inf
    kept = "" if path is None else f"; the store is kept at {text.clean(path)}"
    with (
        signals_noted() as check_signals,
        TemporaryDirectory(prefix="diskreplay-demo-", ignore_cleanup_errors=True) as folder,
    ):
        with MissingExtra.raised_for("the demo", "torch,gym"):
            if find_spec("numba") is None:  # the first sampler loads numba
                raise ImportError("No module named 'numba'")
            # not at the top: torch and gymnasium would slow down the start of every other command
            from diskreplay.cli import dqn_per
        where = path or Path(folder, "store")
        try:
            with (
                redirect_stdout(sys.stderr),
                dr.create(where, dqn_per.SCHEMA) as store,
                closing(dqn_per.train(store, seed, Path(folder, "checkpoint"))) as rounds,
            ):
                for learner in rounds:
                    check_signals()
                    if learner.updates:  # the time limit begins after the first update, which compiles kernels
                        give_up_at = min(give_up_at, time.monotonic() + max_seconds)
                    learnt = learner.mean_return >= dqn_per.ENOUGH_RETURN
                    if learnt or time.monotonic() >= give_up_at:
                        break
                verdict = (
                    f"a mean return of {text.number(learner.mean_return)} over {dqn_per.EVALUATION_EPISODES} episodes "
                    f"after {text.count(len(store))} steps and {text.count(learner.updates)} updates in "
                    f"{time.monotonic() - started:.1f} s"
                )
        except ChildProcessError as error:
            check_signals()  # a signal to the process group also ends the collectors, so look for a signal first
            console.complain(f"{text.one_line(error)}{kept}")
            raise typer.Exit(console.PROBLEMS) from None
        if not learnt:
            console.complain(f"not learnt: {verdict}{kept}")
            raise typer.Exit(console.PROBLEMS)
        console.emit(f"learnt: {verdict}\n")
        inspect(where)
        if path is None:
            console.emit("The store is removed; --path keeps it.")


@contextmanager
def signals_noted() -> Iterator[Callable[[], None]]:
    """Delay signals that would end the process, and yield a function that checks for such a signal.

    After a signal, the next call of the yielded function, or the end of the `with` block, raises SystemExit. At the
    first signal, the signal handler itself raises nothing: during compilation, an exception would crash the process,
    and in a finalizer, Python would ignore it. At a second signal, the handler raises SystemExit.
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
        with console.signals(ENDING, receive):
            yield check
    finally:
        check()
