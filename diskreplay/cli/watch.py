"""`diskreplay watch`: what happens in a store, live."""

import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count as numbers
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.watch_view import log_line, view
from diskreplay.store.activity.activity import Activity, Look


def watch(
    path: console.StorePath,
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            min=0.1,
            max=86400,
            callback=console.not_nan,
            metavar="SECONDS",
            help="Seconds between two looks.",
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, print what is seen, and stop.")] = False,
    count: Annotated[int | None, typer.Option("--count", min=1, metavar="N", help="Stop after N looks.")] = None,
    limiter: Annotated[
        list[str] | None,
        typer.Option(
            "--limiter",
            metavar="NAME=SPI:MIN:BUFFER",
            help="The samples_per_insert, min_size and error_buffer that a rate limiter was given, to see who waits; "
            "again for more.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object a look, each on a line.")] = False,
) -> None:
    """Watch a store while others write to it.

    Steps and steps/s, of each writer when it appended last and how much of that is not yet durable, episodes that
    ended, what samplers have saved, rate limiters, the disk and when it is full, what leaves, and problems. On a
    terminal it is drawn again at each look until Ctrl-C; elsewhere each look is a line. Nothing is written. Of samplers
    only what is on disk is seen: states that they saved, and what they drew under a rate limiter.
    """
    limiters = [read_limiter(given) for given in limiter or ()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dr.DamagedSegmentWarning)  # the problems say it
        with console.bar("Measuring segments") as progress:
            activity = Activity(path, limiters, progress)
        with activity:
            first = activity.look()  # so that those that follow have rates
            if not (once or json) and sys.stdout.isatty():
                _draw(first, _look_again(activity, interval, count and count - 1))
                return
            for look in _look_again(activity, interval, 1 if once else count):
                if json:
                    console.emit(text.to_json(asdict(look), indent=None))
                elif once:
                    console.show(view(look))
                else:
                    console.emit(log_line(look))


def read_limiter(given: str) -> dr.RateLimiter:
    """Read ``NAME=SPI:MIN:BUFFER``; BadParameter where it is not that."""
    name, _, numbers = given.partition("=")
    try:
        samples_per_insert, min_size, error_buffer = numbers.split(":")
        return dr.RateLimiter(float(samples_per_insert), int(min_size), float(error_buffer), name=name, timeout=0.0)
    except ValueError as error:
        raise typer.BadParameter(
            f"--limiter is NAME=SAMPLES_PER_INSERT:MIN_SIZE:ERROR_BUFFER, such as default=4:1000:2000, not "
            f"{given!r} ({error})"
        ) from None


def _look_again(activity: Activity, interval: float, count: int | None) -> Iterator[Look]:
    """Yield looks, each an interval after the one before; the first is an interval from now."""
    next_at = time.monotonic()
    for _ in numbers() if count is None else range(count):
        next_at = max(next_at + interval, time.monotonic())
        time.sleep(max(0.0, next_at - time.monotonic()))
        yield activity.look()


def _draw(look: Look, looks: Iterator[Look]) -> None:
    """Draw looks over each other on the whole terminal, until interrupted; what was seen last stays on it."""
    terminal = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    try:
        with (
            # It draws by itself, too, as the size of the terminal may change.
            Live(get_renderable=lambda: view(look, terminal.height), console=terminal, screen=True) as live,
            # What ends the process ends the block, which gives the terminal back.
            console.signals((signal.SIGTERM, signal.SIGHUP), _end),
        ):
            live.refresh()
            for look in looks:  # noqa: B007 - which the view shows
                live.refresh()
    finally:
        console.show(view(look))


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
