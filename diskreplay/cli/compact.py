"""`diskreplay compact`: merges the segments of a store into packs, as `Store.compact` does."""

from typing import Annotated

import typer

import diskreplay as dr
from diskreplay.arguments import compression_level
from diskreplay.cli import console, text


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
    how = _parsed(compression)
    with dr.open(path, "r" if dry_run else "a") as store, console.bar("Merging", in_bytes=True) as progress:
        done = store.compact(how, progress, dry_run=dry_run)
    line, before = "nothing to merge", text.size(done["bytes_before"])
    if done["segments"]:
        line = f"{text.plural(done['segments'], 'segment')} of {text.plural(done['steps'], 'step')}, {before}"
        line = f"would be merged  {line}" if dry_run else f"merged  {line} before, {text.size(done['bytes_after'])} now"
    console.tell(done, [line], json=json)


def _parsed(compression: str | None) -> str | tuple[str, int] | None:
    """Return what `Store.compact` takes."""
    if compression is None:
        return None
    name, colon, level = compression.partition(":")
    try:
        found = (name, int(level)) if colon else name
        compression_level(found)
    except ValueError:
        raise typer.BadParameter(f"{compression!r} is not zstd or zstd:LEVEL, such as zstd:3") from None
    return found
