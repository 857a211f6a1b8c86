"""Runs with the lowest and the newest versions that the project allows, and their table for users.

`tools/extras --lowest --newest` runs, and `ranges.json` keeps the last run of each extra, end and Python.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
CORE = "core"
ENDS = LOWEST, NEWEST = "lowest", "newest"
RUNS = ROOT / "tools/ranges.json"
BEGIN, END = "<!-- tools/extras --table -->\n", "<!-- end -->\n"
# Extras that did not run on a Python, and the reason.
_NO_TORCH = "no CPU build of torch was there"
NOT_RUN = {
    **{(extra, "3.13"): _NO_TORCH for extra in ("sb3", "torchrl", "tianshou", "ray", "rllib", "jax")},
    ("all", "3.14"): "wheels of every dependency are there, and no interpreter was",
}
NOT_FOR_USERS = ("all", "bench", "docs", "fuzz", "test")


@dataclass(frozen=True)
class Run:
    """A run of an extra's tests: versions of its own dependencies, and libraries that could not be installed."""

    extra: str
    end: str
    python: str
    date: str
    versions: dict[str, str]
    without: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """The key under which a later run replaces this one."""
        return self.extra, self.end, self.python


@dataclass(frozen=True)
class Project:
    """The requirements of the core and of each extra in `pyproject.toml`."""

    name: str
    extras: dict[str, list[Requirement]]

    @classmethod
    def read(cls, path: Path = ROOT / "pyproject.toml") -> "Project":
        """Read a `pyproject.toml`."""
        found = tomllib.loads(path.read_text())["project"]
        lines = {CORE: found["dependencies"], **found["optional-dependencies"]}
        extras = {extra: list(map(Requirement, lines[extra])) for extra in lines if extra not in NOT_FOR_USERS}
        return cls(found["name"], extras)

    def own(self, extra: str, python: str | None = None) -> Iterator[Requirement]:
        """Yield the requirements of an extra itself: all of them, or the ones for a Python such as 3.13."""
        environment = {"python_version": python or "", "python_full_version": f"{python}.0"}
        for each in self.extras[extra]:
            if each.name != self.name and (python is None or each.marker is None or each.marker.evaluate(environment)):
                yield each

    def needed(self, extras: Iterable[str], python: str) -> Iterator[str]:
        """Yield the requirements of the core, of extras and of the extras they name on a Python, without markers."""
        for extra in dict.fromkeys((CORE, *self._with_named(extras))):
            for each in self.own(extra, python):
                brackets = f"[{','.join(sorted(each.extras))}]" if each.extras else ""
                yield f"{each.name}{brackets}{each.specifier}"

    def needs(self, extra: str, name: str, python: str) -> bool:
        """Return whether an extra, or one that it names, requires a library."""
        return name in {Requirement(line).name for line in self.needed([extra], python)}

    def _with_named(self, extras: Iterable[str]) -> Iterator[str]:
        for extra in extras:
            yield extra
            for each in self.extras[extra]:
                if each.name == self.name:
                    yield from self._with_named(each.extras)


def load(path: Path = RUNS) -> list[Run]:
    """Return the last run of each extra, end and Python."""
    if not path.exists():
        return []
    return [Run(**{**entry, "without": tuple(entry["without"])}) for entry in json.loads(path.read_text())]


def save(runs: Iterable[Run], path: Path = RUNS) -> None:
    """Add runs to a file. A run replaces an earlier one of the same extra, end and Python."""
    kept = {run.key: run for run in (*load(path), *runs)}
    lines = (json.dumps(asdict(kept[key]), sort_keys=True) for key in sorted(kept))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def table(project: Project, runs: Iterable[Run], not_run: Mapping[tuple[str, str], str]) -> str:
    """Return a table in Markdown: each dependency with its range and the tested ends, then a list of missing runs."""
    declared = [(extra, each) for extra in project.extras for each in project.own(extra)]
    rows = ["| Dependency | Needed by | Range | Lowest | Newest | Run on |", "| --- | --- | --- | --- | --- | --- |"]
    runs = list(runs)
    for name in dict.fromkeys(each.name for _, each in declared):
        extras = dict.fromkeys(extra for extra, each in declared if each.name == name)
        allowed = dict.fromkeys(shown(each) for _, each in declared if each.name == name)
        ran = [run for run in runs if run.extra in extras and name in run.versions]
        ends = (
            by_python({run.python: run.versions[name] for run in ran if run.end == end}) for end in (LOWEST, NEWEST)
        )
        dates = sorted({run.date for run in ran})
        rows.append(f"| {' | '.join((name, ', '.join(extras), ', '.join(allowed), *ends, ', '.join(dates) or '–'))} |")
    reasons = dict.fromkeys(not_run.values())
    cases = {
        reason: [f"{extra} on {python}" for (extra, python), why in not_run.items() if why == reason]
        for reason in reasons
    }
    rows += ["", *(f"- Not run: {', '.join(cases[reason])}: {reason}." for reason in reasons)]
    return "\n".join(rows).rstrip() + "\n"


def shown(requirement: Requirement) -> str:
    """Return a range, and its marker."""
    specifiers = ",".join(sorted(map(str, requirement.specifier), reverse=True))
    marker = str(requirement.marker or "").replace('"', "'")
    return f"`{specifiers}`" + (f" if `{marker}`" if marker else "")


def by_python(versions: dict[str, str]) -> str:
    """Return the versions that ran, each with its Pythons."""
    pythons: dict[str, list[str]] = {}
    for python in sorted(versions, key=Version):
        pythons.setdefault(versions[python], []).append(python)
    return "; ".join(f"{version} ({', '.join(on)})" for version, on in pythons.items()) or "not run"


def write_table(page: Path) -> None:
    """Write the table between the marks of a page."""
    before, found, rest = page.read_text().partition(BEGIN)
    _, also_found, after = rest.partition(END)
    if not (found and also_found):
        raise ValueError(f"{page} has no lines {BEGIN.strip()} and {END.strip()}: add them where the table goes")
    page.write_text(f"{before}{BEGIN}\n{table(Project.read(), load(), NOT_RUN)}\n{END}{after}")
