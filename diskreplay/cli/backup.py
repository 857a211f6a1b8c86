"""`diskreplay backup`: a consistent copy of a store that others write."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from diskreplay.cli import console, text
from diskreplay.cli.copy import Target
from diskreplay.cli.verify import problem_lines
from diskreplay.integrity.backup.account import Backup
from diskreplay.integrity.backup.backup import back_up
from diskreplay.integrity.backup.unfinished import unfinished_path
from diskreplay.segments.documents.root import read_root


def backup(
    path: console.StorePath,
    to: Target,
    no_link: Annotated[
        bool, typer.Option("--no-link", help="Copy every byte: share no blocks and no files with the store.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of a line.")] = False,
) -> None:
    """Make a consistent copy of a store, also while others write it.

    The copy is the store as it is at one moment, with all ids, limits, priorities and saved states; open episodes are
    cut ones there. Sealed data share their blocks with the copy (reflink) or are hard links where the file system can,
    and are copied elsewhere; their checksums are read. It appears whole, when all is copied. A command that was
    interrupted, or found the disk full, goes on where it was when it is repeated. Exit code 1 if something in the store
    is damaged: it is copied as it is.
    """
    try:
        with console.bar("Copying", in_bytes=True) as progress:
            made = back_up(read_root(path.absolute()), to, link=not no_link, progress=progress)
    except KeyboardInterrupt:
        if unfinished_path(to.absolute()).exists():
            left = text.clean(unfinished_path(to))
            console.complain(f"interrupted; the same command goes on where it was, or delete {left}")
        raise
    lines = [*problem_lines(made.problems), summary(made, to)]
    console.tell(asdict(made), lines, json=json, problems=made.problems)


def summary(made: Backup, to: Path) -> str:
    """Give the last line: what was backed up, and how much of it is shared with the store."""
    what = f"{text.plural(made.segments, 'segment')} of {text.plural(made.steps, 'step')}"
    shared = f", {text.size(made.bytes_shared)} of them shared with the store" if made.bytes_shared else ""
    line = f"backed up  {what}, {text.size(made.bytes)}{shared}  to {text.clean(to)}"
    return f"{line}; {text.plural(len(made.problems), 'problem')} copied with it" if made.problems else line
