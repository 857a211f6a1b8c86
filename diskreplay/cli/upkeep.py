"""`diskreplay backup`, `compact` and `evict`: copy a store, merge its segments, and evict episodes."""

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
        bool, typer.Option("--no-link", help="Copy every byte; share no blocks or files with the store.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of a line.")] = False,
) -> None:
    """Make a consistent copy of a store; other processes may write to the store meanwhile.

    The copy has the state of the store at one moment, with all ids, limits, priorities and saved states. Open episodes
    are cut in the copy. Sealed data are not copied if the file system can share their blocks (reflink) or can make hard
    links to their files. The command checks the checksums of sealed data. The copy appears at its path when it is
    complete. Repeat the command to continue after an interruption or a full disk. Damaged files are copied unchanged,
    and the exit code is 1.
    """
    try:
        with console.bar("Copying", in_bytes=True) as progress:
            made = back_up(read_root(path.absolute()), to, link=not no_link, progress=progress)
    except KeyboardInterrupt:
        if unfinished_path(to.absolute()).exists():
            unfinished = text.clean(unfinished_path(to))
            console.complain(f"interrupted; repeat the command to continue, or delete {unfinished}")
        raise
    lines = [*problem_lines(made.problems), summary(made, to)]
    console.tell(asdict(made), lines, json=json, problems=made.problems)


def summary(made: Backup, to: Path) -> str:
    amount = f"{text.plural(made.segments, 'segment')} of {text.plural(made.steps, 'step')}"
    shared = f", {text.size(made.bytes_shared)} of them shared with the store" if made.bytes_shared else ""
    line = f"backed up  {amount}, {text.size(made.bytes)}{shared}  to {text.clean(to)}"
    return f"{line}; {text.plural(len(made.problems), 'problem')} copied with it" if made.problems else line


def compact(
    path: console.StorePath,
    compression: Annotated[
        str | None,
        typer.Option(
            "--compression",
            metavar="zstd[:LEVEL]",
            help="Compression of large fields, such as images; default: as in the store.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; only print the number of segments.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of a line.")] = False,
) -> None:
    """Merge sealed segments into packs. A store with many short segments then has fewer files and is faster.

    Ids, episodes, priorities and saved states do not change. Meanwhile, other processes may write and sample. A segment
    is not merged if a writer still writes to it, if it is damaged, or if it fills more than half a pack.
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
        bool, typer.Option("--dry-run", help="Change nothing; only print the number of episodes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Evict the episodes that meet an expression, for good.

    Evicted episodes disappear at once in every process. The bytes of a segment are deleted when all its episodes are
    evicted or hidden. An episode is not evicted while a writer writes to its segment. The command asks on the terminal
    before it evicts, unless --yes is given. If the user does not answer yes, the exit code is 1.
    """
    with dr.open(path, "r" if dry_run else "a") as store:
        condition = compile_where(where, store.schema)
        snapshot = store.snapshot
        chosen = chosen_episodes(snapshot, condition)
        amount = f"{text.plural(len(chosen), 'episode')} of {text.plural(sum(chosen.values()), 'step')}"
        staying = sum(matching(store.episodes, condition)) - len(chosen)
        if staying:
            console.complain(f"{text.plural(staying, 'episode')} would stay, in segments that still have a writer")
        if dry_run:
            console.emit(f"would be evicted  {amount}")
        elif not chosen:
            console.emit("nothing to evict")
        elif yes or console.ask(f"Evict {amount} for good?"):
            console.emit(f"evicted  {text.plural(store.evict(condition), 'step')}")
        else:
            console.emit(f"not evicted  {amount}\nto evict them use --yes")
            raise typer.Exit(console.PROBLEMS)
