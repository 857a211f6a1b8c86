"""Where a command's text goes: results to stdout, bars to stderr and only to a terminal."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# What a pipe gets instead of the 80 columns that rich would assume: tables there are for grep, not for a screen.
PIPE_WIDTH = 200
BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports of `yes | head`

PROBLEMS = 1  # the exit code of a command that found some

StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="The folder of the store.")]
"""The argument of every command that looks at a store."""

Report = Callable[[int, int], None]


def show(*parts: RenderableType) -> None:
    """Print rich tables and text to stdout."""
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    _write(lambda: console.print(*parts, sep="\n"))


def emit(text: str) -> None:
    """Print text for a program to stdout, exactly as it is."""
    _write(lambda: print(text, file=sys.stdout))


def _write(write: Callable[[], None]) -> None:
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, a pager) has seen enough. Without this Python complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None


def complain(message: str) -> None:
    """Print one line to stderr."""
    try:
        print(f"diskreplay: {message}", file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody can hear; the exit code still tells


def ask(question: str) -> bool:
    """Ask who sits at the terminal, and tell whether the answer was yes; without a terminal nobody is asked: no."""
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def bar(title: str) -> Iterator[Report]:
    """Show a bar on a terminal while the block works; the block reports with `progress(done, total)`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
