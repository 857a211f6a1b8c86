"""Parts of the cases of the slow tests, which `tools/test` runs in turn."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import PARTS, part_of_cases

CASES = dict.fromkeys(
    [*(f"a.py::test_many[{i}-{j}]" for i in range(200) for j in "xyz"), "a.py::test_two[0]", "a.py::test_two[1]"], 1
)


def test_consecutive_numbers_run_every_case() -> None:
    parts = [part_of_cases(CASES, 1234 + number) for number in range(PARTS)]
    assert set().union(*parts) == set(CASES)
    assert sum(case.startswith("a.py::test_many") for part in parts for case in part) == 600


def test_a_number_runs_the_same_cases_again_in_whatever_order_they_come() -> None:
    assert part_of_cases(CASES, 7) == part_of_cases(dict(reversed(CASES.items())), 7)


@pytest.mark.parametrize("number", range(PARTS))
def test_every_part_has_cases_of_every_test_and_values_of_every_parameter(number: int) -> None:
    part = part_of_cases(CASES | {"a.py::test_one": 1}, number)
    assert {case.partition("[")[0] for case in part} == {"a.py::test_many", "a.py::test_two", "a.py::test_one"}
    assert {case[-2] for case in part if "test_many" in case} == set("xyz")


@pytest.mark.parametrize(("cases", "parts"), [(1, 4), (3, 12), (5, PARTS), (40, PARTS)])
def test_a_case_of_a_test_with_four_turns_is_in_one_part_in_turn(cases: int, parts: int) -> None:
    names = [f"a.py::test_rare[{i}]" for i in range(cases)]
    found = [sorted(part_of_cases(dict.fromkeys(names, 4), number)) for number in range(parts)]
    assert sorted(case for part in found for case in part) == sorted(names)
    assert max(map(len, found)) == -(-cases // PARTS)


def test_tests_of_one_case_take_turns_in_different_parts() -> None:
    tests = {f"a.py::test_{i}": 4 for i in range(200)}
    assert all(30 < len(part_of_cases(tests, number)) < 70 for number in range(4))


@pytest.mark.slow(turns=4)
def test_the_option_runs_a_part(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_addoption, pytest_collection_modifyitems")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('i', range(48))\ndef test_it(i): pass\n"
        "@pytest.mark.slow(turns=4)\ndef test_rare(): pass\n"
        "@pytest.mark.parametrize('i', range(18))\ndef test_one(i): pass"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    outcomes = {"--part=5": "21 passed, 46 deselected", "--part=7": "22 passed, 45 deselected", "-rA": "67 passed"}
    for argument, outcome in outcomes.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", argument]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout.splitlines()[-1].startswith(f"{outcome} in "), done.stdout
