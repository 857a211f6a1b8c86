"""Parts of the cases of the slow tests, which `tools/test` runs in turn."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import PARTS, part_of_cases

CASES = [*(f"a.py::test_many[{i}-{j}]" for i in range(40) for j in "xyz"), "a.py::test_two[0]", "a.py::test_two[1]"]


def test_consecutive_numbers_run_every_case() -> None:
    parts = [part_of_cases(CASES, 1234 + number) for number in range(PARTS)]
    assert set().union(*parts) == set(CASES)
    assert sum(case.startswith("a.py::test_many") for part in parts for case in part) == 120


def test_a_number_runs_the_same_cases_again_in_whatever_order_they_come() -> None:
    assert part_of_cases(CASES, 7) == part_of_cases(CASES[::-1], 7)


@pytest.mark.parametrize("number", range(PARTS))
def test_every_part_has_cases_of_every_test_and_values_of_every_parameter(number: int) -> None:
    part = part_of_cases([*CASES, "a.py::test_one"], number)
    assert {case.partition("[")[0] for case in part} == {"a.py::test_many", "a.py::test_two", "a.py::test_one"}
    assert {case[-2] for case in part if "test_many" in case} == set("xyz")


@pytest.mark.slow
def test_the_option_runs_a_part(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_addoption, pytest_collection_modifyitems")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('i', range(24))\ndef test_it(i): pass\n"
        "@pytest.mark.parametrize('i', range(18))\ndef test_one(i): pass"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    for arguments, outcome in [(["--part", "5"], "21 passed, 21 deselected"), ([], "42 passed")]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout.splitlines()[-1].startswith(f"{outcome} in "), done.stdout
