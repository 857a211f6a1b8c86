"""`diskreplay repair`: mends what can be mended, and says what it did, one line each."""

from pathlib import Path
from typing import Annotated

import typer

from diskreplay.cli import console, text
from diskreplay.cli.verify import PROBLEMS, problem_lines
from diskreplay.store.repair import Action, Repaired, repair as mend

MOST_LOST = 10_000
"""Steps that are set aside without asking."""


def repair(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of the store.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, only tell what would be done.")] = False,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Seal segments of other machines too; their writers must be dead.")
    ] = False,
    max_lost_steps: Annotated[
        int,
        typer.Option("--max-lost-steps", min=0, metavar="N", help="Set no more than N steps aside without asking."),
    ] = MOST_LOST,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, however many steps are set aside.")] = False,
) -> None:
    """Mend what can be mended of a store.

    Reads everything as verify --deep does. Metadata that follows from the rest is written anew. A segment with damaged
    rows is rebuilt with the episodes that are whole, under the same ids. What is damaged, and what has no place in a
    store, is moved to counters/quarantine inside it, and segments of dead writers are sealed. Nothing is deleted but
    what processes that died left half made or half evicted. What a living writer holds is left alone. More steps than
    --max-lost-steps are set aside only after a yes on the terminal, or with --yes. Exit code 1 if steps were set aside
    or something is wrong that could not be mended, or with --dry-run if anything is wrong.
    """
    limit = None if yes or dry_run else max_lost_steps
    done = _repair(path, dry_run, foreign, limit)
    _tell(done, dry_run)
    steps_lost = done.steps_lost
    refused = text.plural(done.steps_refused, "step")
    if done.steps_refused and console.ask(f"{refused} more would be set aside. Go on?"):
        done = _repair(path, dry_run, foreign, None)
        steps_lost += done.steps_lost
        _tell(done, dry_run)
    if done.left or steps_lost or done.steps_refused:
        raise typer.Exit(PROBLEMS)


def _repair(path: Path, dry_run: bool, foreign: bool, limit: int | None) -> Repaired:
    with console.bar("Verifying segments") as progress:
        return mend(path, dry_run=dry_run, foreign=foreign, max_lost_steps=limit, progress=progress)


def _tell(done: Repaired, dry_run: bool) -> None:
    lines = [action_line(action, dry_run) for action in done.actions] or ["nothing to repair"]
    if done.steps_refused:
        lines.append("to set them aside say --yes, or a higher --max-lost-steps")
    if done.left and not dry_run:
        lines += ["not mended; restore it from a backup:", *problem_lines(done.left)]
    console.emit("\n".join(lines))


def action_line(action: Action, dry_run: bool) -> str:
    """Give what was done, or would be: what, where, and why or what became of it."""
    what = f"would be {action.what}" if dry_run else action.what
    return f"{what}  {text.clean(action.where)}  {text.clean(action.detail)}"
