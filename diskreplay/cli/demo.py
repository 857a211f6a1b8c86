"""`diskreplay demo`: four processes play CartPole into one store while this one learns from it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from diskreplay.cli import console, text
from diskreplay.errors import MissingExtra, StoreExists

NOT_LEARNT = 1


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
    with MissingExtra.raised_for("the demo", "torch,gym"):
        for library in ("torch", "numba"):  # not loaded here: the collectors start meanwhile
            if find_spec(library) is None:
                raise ImportError(f"No module named {library!r}")
        # Here and not above: gymnasium and multiprocessing would slow the start of every other command.
        from diskreplay.cli import demo_run

    if not demo_run.run(seed, path, max_seconds):
        raise typer.Exit(NOT_LEARNT)
