"""The page of the command line: its commands run, and all commands are on it."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import diskreplay
from tests.cli.conftest import COMMANDS, write_small

ROOT = Path(diskreplay.__file__).parents[1]
PAGE = (ROOT / "docs/cli.md").read_text()
LINES = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
ELSEWHERE = {"demo", "inspect", "verify", "repair"}  # in docs/look.md


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path / "runs/a")
    for line in LINES:
        program, *arguments = shlex.split(line, comments=True)
        done = run(*arguments)
        assert (program, done.code, done.err) == ("diskreplay", 0, ""), line
        assert done.out, line


def test_every_command_is_on_the_page() -> None:
    shown = {shlex.split(line, comments=True)[1] for line in LINES}
    assert sorted(set(COMMANDS) - shown - ELSEWHERE) == [], "no bash block of docs/cli.md runs these commands"
    assert sorted((shown | ELSEWHERE) - set(COMMANDS)) == [], (
        "docs/cli.md shows commands that COMMANDS in tests/cli/conftest.py lacks"
    )


def names_in(said: str, before: str) -> set[str]:
    """Return the names that a refusal lists."""
    return set(re.findall(r"\w+", said.partition(before)[2].partition("(")[0]))


def test_every_name_of_an_expression_is_on_the_page(run: Callable, small: Path) -> None:
    known = names_in(run("episodes", small, "--where", "nope").err, "known are ")
    assert {"length", "seed"} < known
    assert known - {"seed", "lr", "goal"} <= set(re.findall(r"`(\w+)`", PAGE))


def test_what_is_sorted_by_or_plotted_on_any_page_is_known(run: Callable, small: Path) -> None:
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
    sorts = set(re.findall(r"diskreplay episodes [^\n`]*--sort[ =](\w+)", text))
    plots = set(re.findall(r"diskreplay plot [\w/.]+ (\w+)", text))
    assert sorts, "no page sorts"
    assert plots, "no page plots"
    for name in sorts:
        assert run("episodes", small, "--sort", name).code == 0
    assert plots <= names_in(run("plot", small, "nonsense").err, "is not one of ")
