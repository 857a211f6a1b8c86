"""`diskreplay backup`, `compact` and `evict`: copy a store, merge its segments, and hide episodes of it."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import diskreplay as dr
from diskreplay.arguments import compression_level
from diskreplay.cli import console, text
from diskreplay.cli.copy import Target
from diskreplay.cli.repair import problem_lines
from diskreplay.cli.where import Required, compile_where, matching
from diskreplay.integrity.backup.backup import back_up, unfinished_path
from diskreplay.integrity.backup.copying import Backup
from diskreplay.segments.documents.root import read_root
from diskreplay.store.eviction import chosen_episodes


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


def compact(
    path: console.StorePath,
    compression: Annotated[
        str | None,
        typer.Option(
            "--compression", metavar="zstd[:LEVEL]", help="How wide fields are compressed; else as the store was made."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, only tell what would be merged.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of a line.")] = False,
) -> None:
    """Merge sealed segments into packs: fewer files, and a store of many short segments opens and samples faster.

    Ids, episodes, priorities and saved states stay as they are, and other processes may write and sample meanwhile.
    Segments that are being written, damaged ones, and such that fill half of a pack are left as they are.
    """
    how = parse_compression(compression)
    with dr.open(path, "r" if dry_run else "a") as store, console.bar("Merging", in_bytes=True) as progress:
        done = store.compact(how, progress, dry_run=dry_run)
    line, before = "nothing to merge", text.size(done["bytes_before"])
    if done["segments"]:
        line = f"{text.plural(done['segments'], 'segment')} of {text.plural(done['steps'], 'step')}, {before}"
        line = f"would be merged  {line}" if dry_run else f"merged  {line} before, {text.size(done['bytes_after'])} now"
    console.tell(done, [line], json=json)


def parse_compression(compression: str | None) -> str | tuple[str, int] | None:
    """Return what `Store.compact` and `create` take."""
    if compression is None:
        return None
    name, colon, level = compression.partition(":")
    try:
        found = (name, int(level)) if colon else name
        compression_level(found)
    except ValueError:
        raise typer.BadParameter(f"{compression!r} is not zstd or zstd:LEVEL, such as zstd:3") from None
    return found


def evict(
    path: console.StorePath,
    where: Required,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, only tell what would be evicted.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Evict the episodes that meet an expression, for good.

    They are hidden at once, in every process; their bytes are deleted when nothing else is left in their segment.
    Episodes of segments that are still being written stay. Asks on the terminal, unless there is --yes; exit code 1 if
    nothing was evicted for lack of a yes.
    """
    with dr.open(path, "r" if dry_run else "a") as store:
        condition = compile_where(where, store.schema)
        snapshot = store.snapshot
        chosen = chosen_episodes(snapshot, condition)
        what = f"{text.plural(len(chosen), 'episode')} of {text.plural(sum(chosen.values()), 'step')}"
        staying = sum(matching(store.episodes, condition)) - len(chosen)
        if staying:
            console.complain(f"{text.plural(staying, 'episode')} of segments that are being written would stay")
        if dry_run:
            console.emit(f"would be evicted  {what}")
        elif not chosen:
            console.emit("nothing to evict")
        elif yes or console.ask(f"Evict {what} for good?"):
            console.emit(f"evicted  {text.plural(store.evict(condition), 'step')}")
        else:
            console.emit(f"not evicted  {what}\nto evict them say --yes")
            raise typer.Exit(console.PROBLEMS)
