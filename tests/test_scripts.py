"""Scripts are what CI runs: they can be run, say what they do, and are in the table of CONTRIBUTING.md."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    path
    for path in [*sorted((ROOT / "tools").iterdir()), ROOT / "tools/bench/run", ROOT / ".ci/run"]
    if path.is_file() and not path.suffix and path.name != "_venv"
]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_runs_by_its_name_and_says_what_it_does(script: Path) -> None:
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert re.match(r"# [A-Z]", lines[1])
    assert "set -euo pipefail" in lines
    assert script.stat().st_mode & 0o111 == 0o111
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert f"| `{script.relative_to(ROOT)}` |" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ([], ["--part", "0"]),
        (["--all"], []),
        (["--all", "-x"], ["-x"]),
        (["tests/store", "-k", "roll"], ["tests/store", "-k", "roll"]),
    ],
    ids=" ".join,
)
def test_tests_run_in_part_whole_or_as_pytest_is_told(arguments: list[str], given: list[str], tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/test").write_text((ROOT / "tools/test").read_text())
    # In place of what sets up the environment: a folder that is no checkout, and what prints its arguments.
    (tmp_path / "tools/_venv").write_text(f"root={tmp_path}\npython=echo\n")
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    command = ["bash", str(tmp_path / "tools/test"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == [
        "-m",
        "pytest",
        "--numprocesses",
        str(len(os.sched_getaffinity(0)) + 1),
        "--dist",
        "worksteal",
        *given,
    ]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_hosted_ci_runs_nothing_but_these_scripts(workflow: Path) -> None:
    text = workflow.read_text()
    matrix = re.findall(r"script: \[(.*)\]", text)
    called = [run for run in re.findall(r"- run: (.*)", text) if run != "${{ matrix.script }}"]
    called += [script for scripts in matrix for script in scripts.split(", ")]
    assert called
    assert {run.split()[0] for run in called} <= {str(script.relative_to(ROOT)) for script in SCRIPTS}


def test_hosted_ci_runs_on_every_version_of_python_that_the_package_names() -> None:
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    (tested,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert re.findall(r"3\.\d+", tested) == named
