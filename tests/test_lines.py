"""What tools/lines counts, on a package of two modules and their tests."""

import ast
import json
import subprocess
from pathlib import Path

import pytest

from tools import lines
from tools.lines import Part, Size

ROOT = Path(__file__).parents[1]
BASE = '''"""A view."""

from diskreplay.views import windows

NAME = """two
# lines"""
"""What a view is called."""


class View:
    """A view."""

    # It has one method.
    def draw(self, n):  # of n steps
        """Draw."""
        return [x for x in windows.all(n) if x or (n and not x)]
'''
WINDOWS = """from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskreplay.views.base import View


def all(n):
    def inner():
        return 0 if n else 1

    return inner()
"""


@pytest.fixture
def report(tmp_path: Path) -> lines.Report:
    sources = {
        "package/__init__.py": "import os\n",
        "package/views/__init__.py": "",
        "package/views/base.py": BASE,
        "package/views/windows.py": WINDOWS,
        "tests/tiers.py": "FAST = 1\n",
        "tests/views/test_base.py": "from diskreplay.views.base import View\n\nassert View\n",
        "tests/views/test_public.py": "import diskreplay as dr\nfrom diskreplay.errors import ReplayError\n",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return lines.measure(tmp_path / "package", tmp_path / "tests")


def test_lines_are_counted_by_folder_without_docstrings_comments_and_blanks(report: lines.Report) -> None:
    assert report.parts == {".": Part(1, 1, 1, 0), "views": Part(3, 6 + 7, 2 + 2, 2)}
    assert report.total() == Part(4, 14, 5, 2)
    assert report.total(without=("views",)) == Part(1, 1, 1, 0)


def test_a_circle_of_imports_is_named_though_one_is_for_types(report: lines.Report) -> None:
    assert report.circles == [["views.base", "views.windows"]]


def test_the_largest_classes_and_functions_are_named(report: lines.Report) -> None:
    assert report.classes == [Size(3, "views/base.py:View")]
    draw = "views/base.py:View.draw"
    all_, inner = "views/windows.py:all", "views/windows.py:all.inner"
    assert report.functions == [Size(4, all_), Size(2, inner), Size(2, draw)]
    assert report.complexities == [Size(5, draw), Size(2, inner), Size(1, all_)]


def test_the_table_has_a_line_for_each_figure(report: lines.Report) -> None:
    rows = [row.split() for row in lines.table(report).splitlines()]
    assert ["views", "3", "13", "4", "2"] in rows
    assert ["all", "4", "14", "5", "2"] in rows
    assert ["views.base,", "views.windows"] in rows
    assert ["largest", "complexities", "5", "views/base.py:View.draw"] in rows


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("pass", 1),
        ("if a:\n  pass\nelif b:\n  pass\nelse:\n  pass", 3),
        ("for x in a:\n  pass\nelse:\n  pass", 3),
        ("while a and b or c:\n  pass", 4),
        ("try:\n  pass\nexcept OSError:\n  pass\nexcept ValueError:\n  pass\nelse:\n  pass\nfinally:\n  pass", 4),
        ("with a:\n  assert b", 2),
        ("return {x for x in a if b for y in x}", 4),
        ("match a:\n  case 1:\n    pass\n  case 2:\n    pass\n  case _:\n    pass", 3),
        ("return lambda: a if b else c", 2),
        ("class A:\n  x = a if b else c", 1),
    ],
)
def test_complexity_is_one_more_than_the_branches(body: str, expected: int) -> None:
    indented = "".join(f"  {line}\n" for line in body.splitlines())
    ((_, function), *_) = lines.definitions(ast.parse(f"def f():\n{indented}"))
    assert lines.complexity(function) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import diskreplay as dr", False),
        ("from diskreplay import Store, Sampler", False),
        ("from diskreplay.interop.sb3 import DiskReplayBuffer", False),
        ("from diskreplay.interop import npz", False),
        ("from diskreplay.testing.model import Model", False),
        ("from tests.fakes import Store", False),
        ("from diskreplay import markup", True),
        ("from diskreplay.interop.step_values import flat", True),
        ("from diskreplay.interop.exchange import foreign", True),
        ("def f():\n  import diskreplay.store.store", True),
        ("importlib.import_module('diskreplay.kernels.table')", True),
    ],
)
def test_what_users_do_not_import_is_inner(source: str, expected: bool) -> None:
    assert lines.imports_inner(ast.parse(source), lines.public_modules()) is expected


@pytest.mark.slow
def test_the_script_counts_this_checkout() -> None:
    done = subprocess.run([ROOT / "tools/lines", "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["total"]["modules"] == len([*(ROOT / "diskreplay").rglob("*.py")])
    assert found["circles"] == []
    assert all(0 <= part["inner_tests"] <= part["tests"] for part in found["parts"].values())
