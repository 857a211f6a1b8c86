"""The installed versions of the package's libraries, and the tested ranges, which its metadata has."""

import platform
import re
from collections.abc import Mapping
from email.message import Message
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import diskreplay as dr

# Extras for the development of the package.
_DEVELOPMENT = {"all", "bench", "docs", "fuzz", "test"}
_PYTHON = re.compile(r"Programming Language :: Python :: (\d+\.\d+)")


class Library(NamedTuple):
    """A library that the package or one of its extras uses."""

    version: str | None
    tested: SpecifierSet
    is_core: bool

    @property
    def is_tested(self) -> bool:
        """Whether the installed version, if there is one, is among the tested ones."""
        return self.version is None or self.tested.contains(self.version, prereleases=True)


def of_this_process(known: Mapping[str, Library]) -> dict[str, object]:
    """Return versions for a program: of the package, Python and the system, and of the installed libraries."""
    return {
        "diskreplay": dr.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: found.version for name, found in known.items() if found.version is not None},
    }


def libraries() -> dict[str, Library]:
    """Return the libraries of the core and the extras by name; none if the package has no metadata."""
    known = _metadata()
    extras = {"", *known.get_all("Provides-Extra", [])} - _DEVELOPMENT
    tested: dict[str, SpecifierSet] = {}
    core = set()
    for line in known.get_all("Requires-Dist", []):
        needed = Requirement(line)
        name = canonicalize_name(needed.name)
        within = {extra for extra in extras if _applies(needed, extra)}
        if within:
            tested[name] = tested.get(name, SpecifierSet()) & needed.specifier
        if "" in within:
            core.add(name)
    return {name: Library(_installed(name), tested[name], name in core) for name in sorted(tested)}


def tested_pythons() -> list[str]:
    """Return the tested minor versions of Python; none if the package has no metadata."""
    return [found[1] for line in _metadata().get_all("Classifier", []) if (found := _PYTHON.fullmatch(line))]


def _metadata() -> metadata.PackageMetadata | Message:
    """Return the metadata of the package; none if it is not installed."""
    try:
        return metadata.metadata("diskreplay")
    except metadata.PackageNotFoundError:
        return Message()


def _applies(needed: Requirement, extra: str) -> bool:
    return needed.marker is None or needed.marker.evaluate({"extra": extra})


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
