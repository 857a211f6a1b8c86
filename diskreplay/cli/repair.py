"""`diskreplay repair`: mends what can be mended, and says what it did, one line each."""

from pathlib import Path
from typing import Annotated

import typer

from diskreplay.cli import console, text
from diskreplay.cli.verify import PROBLEMS, problem_lines
from diskreplay.store.repair import Action, repair as mend


def repair(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of the store.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, only tell what would be done.")] = False,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Seal segments of other machines too; their writers must be dead.")
    ] = False,
) -> None:
    """Mend what can be mended of a store.

    Reads everything as verify --deep does. Metadata that follows from the rest is written anew, damaged segments and
    what has no place in a store are moved to counters/quarantine inside it, and segments of dead writers are sealed.
    Nothing is deleted but what processes that died left half made or half evicted. What a living writer holds is left
    alone. Exit code 1 if something is wrong that could not be mended, or with --dry-run if anything is wrong.
    """
    with console.bar("Verifying segments") as progress:
        done = mend(path, dry_run=dry_run, foreign=foreign, progress=progress)
    lines = [action_line(action, dry_run) for action in done.actions] or ["nothing to repair"]
    if done.left and not dry_run:
        lines += ["not mended; restore it from a backup:", *problem_lines(done.left)]
    console.emit("\n".join(lines))
    if done.left:
        raise typer.Exit(PROBLEMS)


def action_line(action: Action, dry_run: bool) -> str:
    """Give what was done, or would be: what, where, and why or what became of it."""
    what = f"would be {action.what}" if dry_run else action.what
    return f"{what}  {text.clean(action.where)}  {text.clean(action.detail)}"
