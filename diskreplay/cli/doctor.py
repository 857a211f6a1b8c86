"""`diskreplay doctor`: describes the libraries and the machine for a bug report, and finds problems.

The tested versions of libraries are read from the metadata of the package.
"""

import os
import platform
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.reading.chunk_budget import MOST_MAPPINGS
from diskreplay.segments.files.durable import file_system_type, network_warning
from diskreplay.segments.files.machine import check_platform

# Features of processors: the first two speed up checksums, and the others speed up compiled kernels.
_FEATURES = ("sse4_2", "pclmulqdq", "avx2", "bmi1", "bmi2", "fma", "avx512f", "avx512bw")
_SHM = "/dev/shm"
# The command reports smaller numbers as problems: the free bytes of a disk, the bytes of shared memory (Docker gives 64
# MB), and the file descriptors of a process.
_LITTLE_DISK, _LITTLE_SHM, _FEW_DESCRIPTORS = 10**9, 256 * 2**20, 1024
# The command does not report the libraries of these extras.
_DEVELOPMENT = {"all", "bench", "docs", "fuzz", "test"}
_PYTHON = re.compile(r"Programming Language :: Python :: (\d+\.\d+)")


class Library(NamedTuple):
    """A library that the package or one of its extras needs.

    ``version`` is None if the library is not installed. ``is_core`` is true if the package itself needs the library.
    """

    version: str | None
    tested: SpecifierSet
    is_core: bool

    @property
    def is_tested(self) -> bool:
        return self.version is None or self.tested.contains(self.version, prereleases=True)


def doctor(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder of stores.")] = Path("."),
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of tables.")] = False,
) -> None:
    """Describe this machine for a bug report.

    Prints versions, the processor, the file system of PATH (default: the current folder), the cache of compiled
    kernels, /dev/shm and limits of a process. Each problem is a line that says what to do. Nothing is written, except
    that a missing cache folder is made. Exit code 1 if the package cannot be used here.
    """
    if not path.exists():
        raise typer.BadParameter(f"{str(path)!r} does not exist; name a folder", param_hint="'PATH'")
    found = examine(path)
    shown = () if json else ((name, text.clean(value)) for name, value in lines(found))
    console.tell(found, console.facts(shown), json=json, problems=not found["usable"])


def examine(path: Path) -> dict[str, Any]:
    libraries = known_libraries()
    found: dict[str, Any] = versions_of_this_process(libraries) | {
        "tested": {name: str(library.tested) for name, library in libraries.items()},
        "cpu": _cpu(),
        "file_system": _file_system(path.resolve()),
        "shm": _space(_SHM),
        "limits": _limits(),
        "numba": _numba(),
    }
    fatal = list(_fatal(libraries))
    return found | {"usable": not fatal, "problems": [*fatal, *_untested(libraries), *_problems(found)]}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _is_linux() -> bool:
    return os.uname().sysname == "Linux"


def _cpu() -> dict[str, Any]:
    first = _read("/proc/cpuinfo").partition("\n\n")[0]
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = re.match(r"(\d+) ([1-9]\d*)", _read("/sys/fs/cgroup/cpu.max"))  # the CPU quota of a container
    flags = fields.get("flags", "").split()
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": cores,
        "quota_cores": int(quota[1]) / int(quota[2]) if quota else None,
        "features": [name for name in _FEATURES if name in flags],
    }


def _space(path: str) -> dict[str, int] | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return {"bytes": status.f_blocks * status.f_frsize, "free_bytes": status.f_bavail * status.f_frsize}


def _file_system(path: Path) -> dict[str, Any]:
    # The type is in the struct statfs of Linux. Other systems do not have this struct.
    kind = file_system_type(path) if _is_linux() else "unknown"
    mount_point, options = _mount(path)
    return {
        "path": str(path),
        "type": kind,
        "mount_point": mount_point,
        "options": options,
        "network": network_warning(kind, path) is not None,
        "writable": os.access(path, os.W_OK),
        **(_space(str(path)) or {"bytes": None, "free_bytes": None}),
    }


def _mount(path: Path) -> tuple[str | None, list[str]]:
    found: tuple[str | None, list[str]] = None, []
    for line in _read("/proc/self/mountinfo").splitlines():
        # The fields of a line of mountinfo: number, parent, device, root, mount point, options, optional fields, "-",
        # type, source, options of all mounts.
        before, _, after = line.partition(" - ")
        with suppress(IndexError):
            escaped, options, shared = before.split(" ")[4], before.split(" ")[5], after.split(" ")[2]
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), escaped)
            # If two file systems are mounted on one folder, the second one is in use.
            if path.is_relative_to(point) and len(point) >= len(found[0] or ""):
                names = dict.fromkeys([*options.split(","), *shared.split(",")])
                # An option with a slash is the path of a folder, such as lowerdir=/var/lib: leave it out.
                found = point, [name for name in names if "/" not in name]
    return found


def _limits() -> dict[str, int | None]:
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    mappings = _read("/proc/sys/vm/max_map_count").strip()
    return {
        "descriptors": soft,
        "most_descriptors": hard,
        "mappings": int(mappings) if mappings.isdecimal() else None,
    }


def _numba() -> dict[str, Any]:
    folder = why = kept = error = None
    try:
        from diskreplay.kernels import cache  # imported here, because this loads numba

        folder, why = cache.find_folder()
        kept = None if folder is None else cache.count_kept(folder)
    except Exception as failure:  # an import with an incompatible library may raise anything
        error = text.one_line(failure)
    return {
        "error": error,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NUMBA_")},
        "cache": folder,
        "cache_error": why or None,
        "kernels_kept": kept,
    }


def _fatal(libraries: Mapping[str, Library]) -> Iterator[str]:
    try:
        check_platform()
    except dr.ReplayError as error:
        yield f"{error}: use a supported machine"
    for name, library in libraries.items():
        if library.is_core and library.version is None:
            yield f'{name} is not installed, and diskreplay needs it: pip install "{name}{library.tested}"'


def _problems(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each problem, with advice. The package still works with these problems."""
    disk, shm, limits, numba = found["file_system"], found["shm"], found["limits"], found["numba"]
    if warning := network_warning(disk["type"], disk["path"]):
        yield warning
    if not disk["writable"]:
        yield f"{disk['path']} cannot be written by this user: stores there can only be read, choose another folder"
    if disk["bytes"] and disk["free_bytes"] < _LITTLE_DISK:
        yield (
            f"{disk['path']} has {text.size(disk['free_bytes'])} free: make room, or limit stores with capacity_bytes="
        )
    if _is_linux() and (shm is None or shm["bytes"] < _LITTLE_SHM):
        yield (
            f"{_SHM} {'does not exist' if shm is None else 'has ' + text.size(shm['bytes'])}; workers of a "
            "DataLoader need it: give the container --shm-size=8g, or use a Sampler with prefetch= instead of workers"
        )
    if limits["descriptors"] is not None and limits["descriptors"] < _FEW_DESCRIPTORS:
        yield f"a process may have only {limits['descriptors']:,} files open: allow more (ulimit -n {_FEW_DESCRIPTORS})"
    if limits["mappings"] is not None and limits["mappings"] < 2 * MOST_MAPPINGS:
        yield (
            f"a process may have only {limits['mappings']:,} mappings, but stores keep up to {MOST_MAPPINGS:,}: "
            "allow more (sysctl vm.max_map_count=65530)"
        )
    if numba["error"] is not None and "numba" in found["libraries"]:
        yield f'numba cannot be loaded ({numba["error"]}): pip install --force-reinstall "diskreplay[torch]"'
    if numba["cache_error"] is not None:
        yield numba["cache_error"]
    if numba["variables"].get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        yield "NUMBA_DISABLE_JIT is set, so kernels run as plain Python, much slower: unset it"


def _untested(libraries: Mapping[str, Library]) -> Iterator[str]:
    pythons, python = tested_pythons(), platform.python_version()
    if not pythons:
        yield f"{os.path.dirname(dr.__file__)} is not installed, so tested versions are unknown: install it with pip"
    elif ".".join(python.split(".")[:2]) not in pythons:
        yield f"Python {python} is outside of the tested versions ({', '.join(pythons)}): use one of these"
    for name, library in libraries.items():
        if not library.is_tested:
            yield (
                f"{name} {library.version} is outside of the tested versions ({library.tested}): "
                f'pip install "{name}{library.tested}"'
            )


def lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    cpu, disk, shm, limits, numba = (found[name] for name in ("cpu", "file_system", "shm", "limits", "numba"))
    yield "diskreplay", f"{found['diskreplay']}, Python {found['python']}, {found['platform']}"
    yield "libraries", ", ".join(f"{name} {version}" for name, version in found["libraries"].items())
    quota = "" if cpu["quota_cores"] is None else f" (a quota of {text.number(cpu['quota_cores'])})"
    yield "processor", ", ".join([f"{cpu['model']}, {text.plural(cpu['cores'], 'core')}{quota}", *cpu["features"]])
    yield "path", disk["path"]
    shared = ["possibly mounted by several machines"] if disk["network"] else []
    free = f"{text.size(disk['free_bytes'])} of {text.size(disk['bytes'])} free"
    yield "file system", ", ".join([disk["type"], *shared, free, *disk["options"]])
    yield _SHM, "missing" if shm is None else f"{text.size(shm['free_bytes'])} of {text.size(shm['bytes'])} free"
    yield (
        "limits",
        f"{_limit(limits['descriptors'])} descriptors (at most {_limit(limits['most_descriptors'])}), "
        f"{text.count(limits['mappings'])} mappings",
    )
    state = found["libraries"].get("numba", 'not installed, but samplers need it: pip install "diskreplay[torch]"')
    yield "numba", ", ".join([state, *(f"{name}={value}" for name, value in numba["variables"].items())])
    if numba["cache"] is not None:
        yield "kernels", f"{numba['kernels_kept']} compiled in {numba['cache']}"
    for problem in found["problems"]:
        yield "problem", problem
    if not found["problems"]:
        yield "problems", "none"


def _limit(number: int | None) -> str:
    return "unlimited" if number is None else text.count(number)


# --- versions ---------------------------------------------------------------------------------------------------------


def versions_of_this_process(known: Mapping[str, Library]) -> dict[str, object]:
    return {
        "diskreplay": dr.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: found.version for name, found in known.items() if found.version is not None},
    }


def known_libraries() -> dict[str, Library]:
    """Return the libraries that the package and its extras need; {} if the metadata of the package are missing."""
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
    return [found[1] for line in _metadata().get_all("Classifier", []) if (found := _PYTHON.fullmatch(line))]


def _metadata() -> metadata.PackageMetadata | Message:
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
