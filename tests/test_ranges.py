"""Tests ran at both ends of the allowed ranges, and the page on installing has the versions."""

import json
import re
import sys
import zipfile
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
from packaging.version import Version

from tools import environments, ranges
from tools.ranges import LOWEST, NEWEST, NOT_RUN, Project, Run

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.13")
PROJECT, RUNS = Project.read(), ranges.load()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(run.key))
def test_the_versions_of_a_run_are_at_its_end_of_the_range(run: Run) -> None:
    allowed = {each.name: each.specifier for each in PROJECT.own(run.extra, run.python)}
    assert run.versions.keys() == allowed.keys() - set(run.without)
    for name, version in run.versions.items():
        assert allowed[name].contains(version)
        if run.end == LOWEST:
            (lowest,) = (each.version for each in allowed[name] if each.operator == ">=")
            assert Version(Version(version).public) == Version(lowest)


@pytest.mark.parametrize("extra", PROJECT.extras)
def test_an_extra_ran_at_both_ends_or_it_is_listed_why_not(extra: str) -> None:
    ran = {(run.end, run.python) for run in RUNS if run.extra == extra}
    assert ran == {(end, python) for end, python in product(ranges.ENDS, PYTHONS) if (extra, python) not in NOT_RUN}


def test_the_page_has_the_table_of_the_runs() -> None:
    page = (ROOT / "docs/install.md").read_text()
    assert f"{ranges.BEGIN}\n{ranges.table(PROJECT, RUNS, NOT_RUN)}\n{ranges.END}" in page


def test_the_page_has_the_size_of_each_extra():
    page = (ROOT / "docs/install.md").read_text()
    table = page.partition("## Extras and their sizes")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`[^|]*) \|[^|]*\| ([^|]*) \|$", table)
    sizes = {
        name: size for names, found in rows for name, size in zip(names.split(", "), found.split(", "), strict=True)
    }
    assert sizes.keys() == {f"`{extra}`" for extra in ["all", *PROJECT.extras] if extra != "core"}
    assert [size for size in sizes.values() if not re.fullmatch(r"[\d.]+ [MG]B", size)] == []


def test_every_night_the_ends_of_all_ranges_run() -> None:
    night = (ROOT / "tools/nightly").read_text()
    assert f"--lowest --newest --python {' --python '.join(PYTHONS)}" in night


FILE = """
[project]
name = "tool"
dependencies = ["core>=1; python_version < '3.13'", "core>=2; python_version >= '3.13'"]
optional-dependencies = {one = ["toy[fast]>=1.1,<3"], two = ["tool[one]", "other>=4"], test = ["pytest"]}
"""


def project(folder: Path) -> Project:
    (folder / "pyproject.toml").write_text(FILE)
    return Project.read(folder / "pyproject.toml")


def test_an_extra_needs_what_the_core_and_the_extras_that_it_names_need(tmp_path: Path) -> None:
    found = project(tmp_path)
    assert list(found.extras) == ["core", "one", "two"]
    assert [list(found.needed([extra], "3.11")) for extra in found.extras] == [
        ["core>=1"],
        ["core>=1", "toy[fast]<3,>=1.1"],
        ["core>=1", "other>=4", "toy[fast]<3,>=1.1"],
    ]
    assert next(found.needed(["core"], "3.13")) == "core>=2"
    assert found.needs("two", "toy", "3.11")
    assert not found.needs("one", "other", "3.11")


def test_a_row_says_which_versions_ran_on_which_python(tmp_path: Path) -> None:
    runs = [
        Run("core", LOWEST, "3.11", "2030-01-02", {"core": "1.0"}),
        Run("core", LOWEST, "3.13", "2030-01-02", {"core": "2.0"}),
        Run("core", NEWEST, "3.13", "2030-01-03", {"core": "2.5"}),
        Run("core", NEWEST, "3.11", "2030-01-03", {"core": "2.5"}),
        Run("one", LOWEST, "3.11", "2030-01-02", {"toy": "1.1"}),
    ]
    not_run = {("one", "3.13"): "no wheel", ("two", "3.13"): "no wheel", ("two", "3.11"): "no time"}
    assert ranges.table(project(tmp_path), runs, not_run).splitlines()[2:] == [
        "| core | core | `>=1` if `python_version < '3.13'`, `>=2` if `python_version >= '3.13'` "
        "| 1.0 (3.11); 2.0 (3.13) | 2.5 (3.11, 3.13) | 2030-01-02, 2030-01-03 |",
        "| toy | one | `>=1.1,<3` | 1.1 (3.11) | not run | 2030-01-02 |",
        "| other | two | `>=4` | not run | not run | – |",
        "",
        "- Not run: one on 3.13, two on 3.13: no wheel.",
        "- Not run: two on 3.11: no time.",
    ]


def test_a_run_takes_the_place_of_an_earlier_one_of_its_kind(tmp_path: Path) -> None:
    first, second = (Run("core", LOWEST, "3.11", date, {"core": "1.0"}) for date in ("2030-01-01", "2030-01-02"))
    other = Run("core", LOWEST, "3.13", "2030-01-01", {}, ("torch",))
    ranges.save([first, other], tmp_path / "runs.json")
    ranges.save([second], tmp_path / "runs.json")
    assert ranges.load(tmp_path / "runs.json") == [second, other]
    assert len(json.loads((tmp_path / "runs.json").read_text())) == 2


def make_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", "\n".join(lines))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("end", "versions"), [(LOWEST, {"toy": "1.1", "below": "2.0"}), (NEWEST, {"toy": "2.0", "below": "2.0"})]
)
def test_an_end_is_the_lowest_or_the_newest_of_what_is_declared_with_the_newest_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, versions: dict[str, str]
) -> None:
    pytest.importorskip("uv", reason="needs uv")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("1.0", "1.1", "2.0", "3.0"):
        make_wheel(wheels, "toy", version, "below>=1")
    for version in ("1.0", "2.0"):
        make_wheel(wheels, "below", version)
    for name, value in {"PIP_FIND_LINKS": wheels, "UV_NO_INDEX": 1, "UV_OFFLINE": 1, "UV_NO_CACHE": 1}.items():
        monkeypatch.setenv(name, str(value))
    environment = environments.Environment(tmp_path / "env", sys.executable, wheels)
    resolver = environments.Resolver(tmp_path)
    resolver.install(environment.python, ["toy>=1.1,<3"], end)
    (site,) = environment.folder.glob("lib/python*/site-packages")
    assert {each.name: each.version for each in metadata.distributions(path=[str(site)])} == versions
    assert not resolver.has_torch(sys.executable)  # not among these
