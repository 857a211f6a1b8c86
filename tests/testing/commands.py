"""`diskreplay verify`, `repair` and `du`, run in this process: tests ask them of stores that need not open."""

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import diskreplay as dr
from diskreplay.__main__ import main as main


class Refused(Exception):
    """A command could not use the store, and printed this line."""


class Repaired(NamedTuple):
    """What `diskreplay repair` printed: actions, the problems that are left, and the entries of the quarantine."""

    actions: list[Any]
    left: list[dr.Problem]
    quarantine: list[Any]

    @property
    def steps_lost(self) -> int:
        """How many steps were set aside, or with a dry run would be."""
        return sum(action.steps for action in self.actions if action.what != "refused")

    @property
    def steps_refused(self) -> int:
        """How many steps would have been set aside that were more than may be."""
        return sum(action.steps for action in self.actions if action.what == "refused")


def run(name: str, path: Path, *options: object) -> Any:
    """Return the JSON that a command prints: of several lines, a list."""
    lines = run_lines(name, path, *options, "--json").splitlines()
    return [json.loads(line) for line in lines] if name == "watch" else json.loads("".join(lines))


def run_lines(name: str, path: Path, *options: object) -> str:
    """Return what a command prints. Raises Refused where its exit code is 2, and errors that it did not expect."""
    out, err = io.StringIO(), io.StringIO()
    traceback = mock.patch.dict(os.environ, {"DISKREPLAY_TRACEBACK": "1"})
    with traceback, redirect_stdout(out), redirect_stderr(err):
        code = main([name, str(path), *map(str, options)])
    if code not in (0, 1):
        raise Refused(err.getvalue().removeprefix("diskreplay: ").rstrip("\n"))
    return out.getvalue()


def verify(path: Path, *, deep: bool = False) -> list[dr.Problem]:
    """Return what `diskreplay verify` finds."""
    return [dr.Problem(**problem) for problem in run("verify", path, *["--deep"] * deep)]


def repair(
    path: Path,
    *,
    dry_run: bool = False,
    foreign: bool = False,
    salvage: bool = False,
    restore: int | None = None,
    max_lost_steps: int | None = None,
) -> Repaired:
    """Return what `diskreplay repair` did; the options are those of `Store.repair`."""
    options: list[object] = ["--yes"] if max_lost_steps is None else ["--max-lost-steps", max_lost_steps]
    options += ["--dry-run"] * dry_run + ["--foreign"] * foreign + ["--salvage"] * salvage
    options += [] if restore is None else ["--restore", restore]
    told = run("repair", path, *options)
    actions, quarantine = ([SimpleNamespace(**each) for each in told[key]] for key in ("actions", "quarantine"))
    return Repaired(actions, [dr.Problem(**problem) for problem in told["left"]], quarantine)


def bytes_of_fields(path: Path) -> dict[str, int]:
    """Return how many bytes each field takes, by `diskreplay du`."""
    return {row["field"]: row["bytes"] for row in run("du", path)["fields"]}


def drop(path: Path, segment: int) -> Any:
    """Delete a segment from quarantine by `diskreplay repair --drop`, and return the action that it printed."""
    (action,) = run("repair", path, "--drop", segment, "--yes")["actions"]
    return SimpleNamespace(**action)
