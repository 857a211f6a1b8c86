"""`diskreplay verify`: what is wrong with a store, one line each."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from diskreplay.cli import console, text
from diskreplay.integrity.verify.verify import Problem, verify as find_problems


def verify(
    path: console.StorePath,
    deep: Annotated[bool, typer.Option("--deep", help="Read every sealed chunk and check its checksum.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of lines.")] = False,
) -> None:
    """Look for what is wrong with a store.

    Checks its structure, the sizes of its files, its metadata against its schema, and its flags against its counters;
    with --deep also the checksums of all that is sealed. Prints a line for each finding: kind, where, what. Nothing is
    written, and a store that is being written can be verified. Exit code 1 if there is any finding.
    """
    with console.bar("Verifying segments", in_bytes=deep) as progress:
        problems = find_problems(path, deep=deep, progress=progress)
    lines = [*problem_lines(problems), summary(problems, text.clean(path))]
    console.tell([asdict(problem) for problem in problems], lines, json=json, problems=problems)


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """Give a line for each finding: kind, where, what."""
    return [f"{problem.kind}  {text.clean(problem.where)}  {text.clean(problem.detail)}" for problem in problems]


def summary(problems: Sequence[Problem], path: str) -> str:
    """Give the last line: how many there are, and which command helps."""
    if not problems:
        return "no problems"
    helps = "--dry-run` tells what would be repaired"
    if all(problem.kind == "quarantine" for problem in problems):
        helps = "--restore SEGMENT` brings a segment back, --drop deletes it"
    return f"{text.plural(len(problems), 'problem')}; `diskreplay repair {path} {helps}"
