"""Where a command's text goes: results to stdout, bars to stderr and only to a terminal."""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Annotated, Literal

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from diskreplay import markup
from diskreplay.cli.text import aligned, count
from diskreplay.markup import Html

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


def columns(headers: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> str:
    """Set rows in columns as `text.aligned` does; each as a paragraph where a terminal is too narrow for that."""
    lines = aligned(headers, rows, left)
    console = Console(file=sys.stdout)
    if not console.is_terminal or len(lines.partition("\n")[0]) <= console.width:
        return lines
    named = ("  ".join(f"{name} {cell}" for name, cell in zip(headers, row, strict=True) if cell) for row in rows)
    return "\n".join(fill(row, console.width, break_long_words=False, break_on_hyphens=False) for row in named)


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
def bar(title: str, *, in_bytes: bool = False) -> Iterator[Report]:
    """Show a bar on a terminal while the block works; the block reports with `progress(done, total)`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn(title), BarColumn(), amount, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class TextTable(Table):
    """A table that becomes a paragraph a row where a terminal is too narrow for its words side by side."""

    def __init__(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], total: int) -> None:
        super().__init__(title=title, title_justify="left", title_style="bold", caption_justify="left", box=None)
        if total > len(rows):
            self.caption = f"{count(total - len(rows))} more; --all lists every one"
        self._given, self._cells, self._total = headers, rows, total
        self._headers = [header.lstrip(">") for header in headers]
        for header, name in zip(headers, self._headers, strict=True):
            side: Literal["left", "right"] = "right" if header.startswith(">") else "left"
            self.add_column(name, justify=side, header_style="dim", overflow="fold")
        for row in rows:
            self.add_row(*map(Text, row))  # and not str: rich would take [red] in a name for markup

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = zip(self._headers, *self._cells, strict=True)
        needed = sum(2 + max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns)
        if needed <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        yield Text(str(self.title), style="bold")
        for row in self._cells:
            named = zip(self._headers, row, strict=True)
            yield Text("  ".join(f"{name} {cell}".strip() for name, cell in named), overflow="fold")
        if self.caption:
            yield Text(str(self.caption))

    def html(self) -> Html:
        """Return the table as HTML, without its title."""
        return markup.table(self._given, [[*map(markup.text, row)] for row in self._cells], self._total)


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], total: int = 0) -> TextTable:
    """Build a table, with the columns of numbers, whose headers begin with >, to the right; ``total`` rows exist."""
    return TextTable(title, headers, rows, total)
