"""The output of commands: results on stdout or in a file, and progress on stderr."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from types import FrameType
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from diskreplay.cli.text import aligned, count, duration, size, to_json
from diskreplay.interop.exchange.progress import Amount
from diskreplay.segments.files.durable import write_atomic

# The width of tables in a pipe, in characters. With rich's default of 80, long lines would be folded, and grep would
# not find their text.
PIPE_WIDTH = 200
BROKEN_PIPE = 141  # the exit code that a shell reports for a broken pipe: 128 + SIGPIPE

PROBLEMS = 1  # the exit code of a command that found problems

StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="The folder of the store.")]
SECONDS_A_LINE = 30.0  # seconds between two lines of progress, if stderr is not a terminal

Report = Callable[[int, int], None]
Row = TypeVar("Row")


def not_nan(value: float) -> float:
    """Refuse NaN: typer before 0.29 accepts NaN for an option with bounds."""
    if value != value:
        raise typer.BadParameter("nan is not a number")
    return value


def show(*parts: RenderableType) -> None:
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    _write(lambda: console.print(*parts, sep="\n"))


def emit(text: str) -> None:
    """Print text to stdout unchanged, so that a program can read it."""
    _write(lambda: print(text, file=sys.stdout))


def save(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old file or the new file. A pipe is written directly."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
    else:
        write_atomic(target, data)


def tell(record: Any, shown: Iterable[str] | Group | Table, *, json: bool, problems: object = None) -> None:
    """Print ``shown``, or ``record`` as JSON if ``json`` is true. Exit with code 1 if there are ``problems``."""
    if json:
        emit(to_json(record))
    elif isinstance(shown, (Group, Table)):
        show(shown)
    else:
        emit("\n".join(shown))
    if problems:
        raise typer.Exit(PROBLEMS)


def facts(lines: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in lines:
        table.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    return table


def _write(write: Callable[[], None]) -> None:
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has closed the pipe. Without the next line, Python would print an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None


def columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the text of a table; on a terminal that is narrower than the table, each row is a paragraph."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        return "\n".join(aligned(headers, rows))
    lines = aligned(headers, rows, console.width)
    return "\n".join(fill(line, console.width, break_long_words=False, break_on_hyphens=False) for line in lines)


def complain(message: str) -> None:
    try:
        print(f"diskreplay: {message}", file=sys.stderr, flush=True)
    except OSError:
        pass  # stderr is closed; the exit code still reports the error


def ask(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def bar(title: str, *, in_bytes: bool = False) -> Iterator[Report]:
    """Show a progress bar on a terminal during the `with` block.

    The block calls the yielded function with the amount done and the total.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn(title), BarColumn(), amount, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def transfer(title: str) -> Iterator[Callable[[Amount, Amount], None]]:
    """Show how many episodes and bytes are finished, and the time left, during the `with` block.

    The block calls the yielded function with the amount done and the total. A terminal shows a bar. Another output,
    such as the log of a job, gets a line every 30 seconds.
    """
    console, last_line = Console(stderr=True), time.monotonic()
    columns = (TextColumn(title), BarColumn(), _Amounts())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None, amounts=None)

        def report(done: Amount, total: Amount) -> None:
            nonlocal last_line
            progress.update(task, completed=done.nbytes, total=total.nbytes, amounts=(done, total))
            if not console.is_terminal and time.monotonic() - last_line >= SECONDS_A_LINE:
                last_line = time.monotonic()
                complain(f"{title.lower()}: {_amounts(progress.tasks[0])}")

        yield report


class _Amounts(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_amounts(task))


def _amounts(task: Task) -> str:
    """Return text such as "12 of 80 episodes, 1.2 GB of 8.0 GB, 3 min left"."""
    if task.fields["amounts"] is None:
        return ""
    done, total = task.fields["amounts"]
    parts = [
        f"{count(done.episodes)} of {count(total.episodes)} episodes",
        f"{size(done.nbytes)} of {size(total.nbytes)}",
    ]
    left = task.time_remaining
    return ", ".join(parts if left is None else [*parts, f"{duration(left)} left"])


@contextmanager
def signals(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call ``handler`` for these signals during the `with` block, if the block runs in the main thread.

    Signals that the process ignores, as with nohup, stay ignored.
    """
    in_main = threading.current_thread() is threading.main_thread()
    wanted = [number for number in numbers if in_main and signal.getsignal(number) is not signal.SIG_IGN]
    previous = [(number, signal.signal(number, handler)) for number in wanted]
    try:
        yield
    finally:
        for number, before in previous:
            signal.signal(number, before)


class TextTable:
    """A table for rich; on a terminal that is narrower than the table, each row is a paragraph.

    ``columns`` maps each header to a function that returns the text of a row in this column. Columns whose headers
    begin with > are aligned to the right. At most ``limit`` rows are shown. If there are more rows, the last line has
    the number of rows that are not shown. It ends with ``hint``: the option that shows all rows.
    """

    def __init__(
        self,
        title: str,
        columns: Mapping[str, Callable[[Row], str]],
        rows: Sequence[Row],
        limit: int | None = None,
        hint: str = "; --all lists every one",
    ) -> None:
        self._title, self.headers, self.total, self._hint = title, [*columns], len(rows), hint
        self.cells = [[say(row) for say in columns.values()] for row in rows[:limit]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._title, style="bold")
        # In a str, rich would take [red] for markup.
        yield from (Text(line, overflow="fold") for line in aligned(self.headers, self.cells, options.max_width))
        if self.total > len(self.cells):
            yield Text(f"{count(self.total - len(self.cells))} more{self._hint}")
