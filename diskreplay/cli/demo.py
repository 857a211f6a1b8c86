"""`diskreplay demo`: runs the example `dqn_per`, in which four processes play CartPole while this one learns.

`diskreplay/cli/dqn_per.py` is a link to the example: a wheel holds no examples, and this way there is one text.
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

ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def demo(
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the network, the games and the draws.")] = 0,
    path: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Make the store here and keep it; otherwise it is removed.")
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(min=0, callback=console.not_nan, help="Give up after so many seconds of learning.")
    ] = 300.0,
) -> None:
    """See a store at work: learn CartPole-v1 while four processes fill the store.

    Each of four collectors appends what it plays with the newest policy. The trainer samples 5-step transitions from
    the growing store, by priority, and learns a DQN, until the greedy policy's mean return over 20 episodes is 475 or
    more. Then it prints what `inspect` prints. The exit code is 1 where it did not learn in time.
    """
    if path is not None and path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise StoreExists(
            f"{text.clean(path)} exists already, and the demo makes a new store: give it another --path, or look at "
            f"this one with `diskreplay inspect {text.clean(path)}`"
        )
    started, give_up_at = time.monotonic(), math.inf
    kept = "" if path is None else f"; the store is kept at {text.clean(path)}"
    with (
        signals_noted() as check_signals,
        TemporaryDirectory(prefix="diskreplay-demo-", ignore_cleanup_errors=True) as folder,
    ):
        with MissingExtra.raised_for("the demo", "torch,gym"):
            if find_spec("numba") is None:  # which the first sampler loads
                raise ImportError("No module named 'numba'")
            # Here and not above: torch and gymnasium would slow the start of every other command.
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
                    if learner.updates:  # kernels are compiled
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
            check_signals()  # one to all processes ends the collectors, too
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
        with console.signals(ENDING, receive):
            yield check
    finally:
        check()
