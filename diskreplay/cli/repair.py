"""`diskreplay verify` and `repair`: find damage in a store, repair it, and print a line for each problem or action."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from diskreplay.cli import console, text
from diskreplay.integrity.repair.remedies import Action, Repaired
from diskreplay.integrity.repair.repair import repair as repair_store
from diskreplay.integrity.repair.restore import drop_segment
from diskreplay.integrity.verify.verify import Problem, verify as find_problems
from diskreplay.segments.damage.quarantine import Quarantined


def verify(
    path: console.StorePath,
    deep: Annotated[bool, typer.Option("--deep", help="Read every sealed chunk and check its checksum.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of lines.")] = False,
) -> None:
    """Check a store for damage.

    Checks the structure, the sizes of files, the metadata against the schema, and the flags of rows against the
    counters. With --deep, also checks the checksums of all sealed data. Prints a line for each problem: kind, file,
    description. Nothing is written, and other processes may write to the store meanwhile. Exit code 1 if there is a
    problem.
    """
    with console.bar("Verifying segments", in_bytes=deep) as progress:
        problems = find_problems(path, deep=deep, progress=progress)
    lines = [*problem_lines(problems), summary(problems, text.clean(path))]
    console.tell([asdict(problem) for problem in problems], lines, json=json, problems=problems)


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    return [f"{problem.kind}  {text.clean(problem.where)}  {text.clean(problem.detail)}" for problem in problems]


def summary(problems: Sequence[Problem], path: str) -> str:
    if not problems:
        return "no problems"
    helps = "--dry-run` shows the repairs"
    if all(problem.kind == "quarantine" for problem in problems):
        helps = "--restore SEGMENT` brings a segment back, --drop deletes it"
    return f"{text.plural(len(problems), 'problem')}; `diskreplay repair {path} {helps}"


MOST_LOST = 10_000
"""The maximum number of steps that `repair` sets aside (moves to quarantine) without asking."""


def repair(
    path: console.StorePath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; only list the actions.")] = False,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Also seal segments of other machines; their writers must be dead.")
    ] = False,
    salvage: Annotated[bool, typer.Option("--salvage", help="Also add unproven steps that look whole.")] = False,
    max_lost_steps: Annotated[
        int,
        typer.Option("--max-lost-steps", min=0, metavar="N", help="Ask before more than N steps are set aside."),
    ] = MOST_LOST,
    restore: Annotated[
        int | None,
        typer.Option("--restore", metavar="SEGMENT", min=0, help="Only bring this segment back from quarantine."),
    ] = None,
    drop: Annotated[
        int | None,
        typer.Option("--drop", metavar="SEGMENT", min=0, help="Only delete this segment from quarantine, for good."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before steps are set aside or --drop deletes.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of lines.")] = False,
) -> None:
    """Repair a damaged store.

    Reads everything, like verify --deep. Damaged metadata is rewritten from other files, if possible. A segment with
    damaged rows is rebuilt from its intact episodes, with the same ids. The damaged segment, other damaged files, and
    files that do not belong in a store are set aside: moved to counters/quarantine in the store. Segments of dead
    writers are sealed. Nothing is deleted except unfinished files of dead processes, and the segment that --drop names.
    Segments of living writers are left alone. The command asks on the terminal, unless --yes is given, before it sets
    aside more steps than --max-lost-steps. Exit code 1 if steps were set aside or are in quarantine, or if a problem
    remains. With --dry-run, exit code 1 if there is a problem.
    """
    if drop is not None:
        if restore is not None:
            raise typer.BadParameter("--restore and --drop exclude each other")
        _drop(path, drop, dry_run=dry_run, yes=yes, json=json)
        return

    def run(limit: int | None) -> Repaired:
        with console.bar("Verifying segments", in_bytes=True) as progress:
            done = repair_store(
                path,
                dry_run=dry_run,
                foreign=foreign,
                salvage=salvage,
                restore=restore,
                max_lost_steps=limit,
                progress=progress,
            )
        if not json:
            console.emit("\n".join(report_lines(done, dry_run)))
        return done

    done = run(None if yes or dry_run else max_lost_steps)
    actions, lost = done.actions, done.steps_lost
    refused = text.plural(done.steps_refused, "step")
    if done.steps_refused and console.ask(f"{refused} more would be set aside. Continue?"):
        before = [action for action in actions if action.what != "refused"]
        done = run(None)
        actions, lost = before + done.actions, lost + done.steps_lost
    if json:
        console.emit(text.to_json(record_of(actions, done, dry_run)))
    if done.left or lost or done.steps_refused or aside(done.quarantine):
        raise typer.Exit(console.PROBLEMS)


def aside(quarantine: Sequence[Quarantined]) -> list[Quarantined]:
    """Return the segments in quarantine that have steps."""
    return [entry for entry in quarantine if entry.segment is not None and entry.steps != 0]


def report_lines(done: Repaired, dry_run: bool) -> list[str]:
    lines = [action_line(action, dry_run) for action in done.actions] or ["nothing to repair"]
    if done.steps_refused:
        lines.append("to set them aside use --yes, or a higher --max-lost-steps")
    unproven = [problem for problem in done.left if problem.kind == "unproven"]
    others = [problem for problem in done.left if problem.kind != "unproven"]
    if others and not dry_run:
        lines += ["not repaired; restore it from a backup:", *problem_lines(others)]
    if unproven and not dry_run:
        lines += ["unproven steps, kept but not shown; --salvage adds steps that look whole:", *problem_lines(unproven)]
    if entries := aside(done.quarantine):
        lines += [
            "in quarantine; --restore SEGMENT brings one back, --drop SEGMENT deletes it:",
            *map(entry_line, entries),
        ]
    return lines


def record_of(actions: Sequence[Action], done: Repaired, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "actions": [asdict(action) for action in actions],
        "left": [asdict(problem) for problem in done.left],
        "quarantine": [asdict(entry) for entry in done.quarantine],
    }


def _drop(path: Path, number: int, *, dry_run: bool, yes: bool, json: bool) -> None:
    entry = drop_segment(path, number, dry_run=True)
    actions, lines = [Action("deleted", entry.where, entry.reason, entry.steps or 0)], [f"deleted  {entry_line(entry)}"]
    if dry_run:
        lines = [f"would be {lines[0]}"]
    elif yes or console.ask(f"Delete {entry_line(entry)} for good?"):
        drop_segment(path, number)
    else:
        actions, lines = [], [f"not {lines[0]}", "to delete it use --yes"]
        if json:
            console.complain("not deleted; to delete it use --yes")
    console.tell(record_of(actions, Repaired(), dry_run), lines, json=json, problems=not actions)


def entry_line(entry: Quarantined) -> str:
    steps = "unknown steps" if entry.steps is None else text.plural(entry.steps, "step")
    return f"segment {entry.segment}  {text.clean(entry.where)}  {steps}: {text.clean(entry.reason)}"


def action_line(action: Action, dry_run: bool) -> str:
    done = f"would be {action.what}" if dry_run else action.what
    return f"{done}  {text.clean(action.where)}  {text.clean(action.detail)}"
