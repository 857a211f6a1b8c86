"""Try extras as users install them: the wheel with each extra in its own environment, its tests, and an uninstall.

The wheel is built from the sdist, and the tests of the sdist run. The requirements of an extra, and no other libraries,
are linked from the checkout's `.venv` if it has a version that fits; this avoids another installation of torch. pip
installs the rest.

Some extras allow several versions of a library. The tests of the checkout for the adapter, and the pages that use it,
run with the lowest of these versions, and with `--whole` also with the others. Each version is in a folder before the
checkout's `.venv` on the path. `tools/test` runs the tests with the newest version, in the `.venv`.

`--lowest` and `--newest` install, with uv, the lowest or the newest versions that `pyproject.toml` allows, on each
Python that `--python` names, and run more tests. `--table` saves the passed runs in `ranges.json`, and writes the table
of a page.

Extras are tried in parallel, one per processor. With `--whole`, they are tried one after the other: slow tests take
much memory.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import ranges
from tools.ranges import CORE, LOWEST, NEWEST

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "tools/constraints.txt"
NAMES = "tests/interop/test_foreign_names.py"  # the names that adapters use of their libraries
# Modules that must be importable with an extra, and tests that must pass with it.
TRIED = {
    CORE: ("diskreplay",),
    "torch": ("diskreplay.interop.torch", "tests/interop/test_torch.py"),
    "gym": ("diskreplay.interop.gymnasium",),  # its tests sample, too
    "sb3": ("diskreplay.interop.sb3", "tests/interop/test_sb3.py", NAMES),
    "torchrl": (
        "diskreplay.interop.torchrl",
        "tests/interop/test_torchrl.py",
        "tests/sampling/test_tensordicts.py",
        NAMES,
    ),
    "tianshou": ("diskreplay.interop.tianshou", "tests/interop/test_tianshou.py", NAMES),
    "ray": ("ray", "tests/interop/ray", "tests/store/test_ray_dataset.py"),
    "rllib": ("diskreplay.interop.rllib", "tests/interop/test_rllib.py", "tests/interop/test_local_ray.py", NAMES),
    "parquet": ("diskreplay.interop.parquet", "tests/interop/test_parquet.py"),
    "minari": ("diskreplay.interop.minari", "tests/interop/test_minari.py"),
    "lerobot": ("diskreplay.interop.lerobot", "tests/interop/lerobot"),
    "d4rl": ("diskreplay.interop.d4rl", "tests/interop/test_d4rl.py"),
    "rlds": ("diskreplay.interop.rlds", "tests/interop/test_rlds.py"),
    "wandb": ("diskreplay.interop.monitor", "tests/interop/test_monitor.py"),
    "jax": ("diskreplay.interop.jax", "tests/interop/test_jax.py"),
    "all": ("diskreplay.interop.sb3", "tests/interop", "tests/cli/test_plot.py"),
}
# Versions of an extra's library, the newest last, and the tests that run with each.
VERSIONS = {"gym": ("gymnasium==1.1.0", "gymnasium==1.2.2", "gymnasium==1.3.0", "gymnasium")}
PAGE = "tests/test_docs.py::test_the_snippets_of_a_page_run_one_after_the_other"
OF_GYMNASIUM = (
    *("tests/interop/test_gymnasium.py", "tests/interop/test_episode_values.py"),
    *("tests/interop/exchange/test_spaces.py", "tests/schema/test_schema.py"),
)
WITH_EACH = {
    "gym": (
        *OF_GYMNASIUM,
        f"{NAMES}::test_a_class_has_no_private_name_of_its_bases[gymnasium]",
        *(f"{PAGE}[README.md]", f"{PAGE}[record.md]"),
    )
}
MODULES = {"pillow": "PIL", "protobuf": "google"}
# Tests at each end of the ranges, if they differ from TRIED, and other extras that they need.
AT_ENDS = {
    CORE: (
        *("tests/segments/test_blocks.py", "tests/segments/test_values.py"),
        *(
            "tests/cli/test_main.py",
            "tests/cli/test_inspect.py",
            "tests/cli/test_episodes.py",
            "tests/cli/test_watch.py",
        ),
        "tests/interop/test_zarr_episodes.py",
    ),
    "torch": (
        *(f"tests/kernels/test_{part}.py" for part in ("cache", "draw", "gae", "public_numba", "runs", "sumtree")),
        *("tests/sampling/test_sampler.py", "tests/sampling/test_priorities.py", "tests/interop/test_torch.py"),
    ),
    "gym": (*OF_GYMNASIUM, NAMES),
    "zstd": (
        "tests/segments/test_packs.py",
        "tests/integrity/verify/test_check_packs.py",
        "tests/reading/test_packs.py",
    ),
    "pandas": ("tests/store/test_tables.py",),
    "xarray": ("tests/store/test_tables.py",),
    "plot": (
        *("tests/cli/test_plot.py", "tests/cli/test_chart.py", "tests/cli/report"),
        *("tests/cli/test_frames.py", "tests/test_pictures.py"),
    ),
    "video": ("tests/cli/test_frames.py", "tests/test_pictures.py"),
}
BESIDE = {"gym": ("torch",), "wandb": ("torch",), "plot": ("torch", "video"), "video": ("plot",)}
# Their bounds exclude some pinned versions. torch stays: linked libraries are not replaced.
WITHOUT_PINS = ("rllib", "tianshou")
NO_TESTS = 5  # pytest's exit code if all tests are deselected: tests of Tianshou are slow
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "packaging", "scipy")
# Requirements of the examples and tests of an extra that the extra does not have.
EXAMPLES = {"ray": ("gymnasium",), "wandb": ("prometheus-client", "tensorboard", "tensorboardx")}
# The work of a collector, without any extra.
COLLECT = """
import sys
import numpy as np
import diskreplay as dr
from diskreplay.cli.main import main

schema = dr.Schema.from_example(obs=np.zeros(3, np.float32), action=0)
with dr.create(sys.argv[1], schema) as store, store.writer() as writer:
    writer.append_episode(np.zeros((9, 3)), np.zeros(8, int), np.ones(8), terminated=True)
    store.refresh()
    assert store.episodes[0].total_reward == 8
sys.exit(main(["verify", "--deep", sys.argv[1]]) or main(["inspect", sys.argv[1]]))
"""
RECORD = """
import sys
import gymnasium as gym
import diskreplay as dr

env = gym.make("CartPole-v1")
with dr.create(sys.argv[1], dr.Schema.from_env(env)) as store:
    env = dr.RecordEpisodes(env, store)
    env.reset(seed=0)
    while not any(env.step(env.action_space.sample())[2:4]):
        pass
    env.close()
    assert store.refresh() > 5
"""
PROGRAMS = {"gym": RECORD}  # other extras run COLLECT


def run(
    *command: Any, cwd: Path = ROOT, path: str = "", fine: Sequence[int] = (0,), more: Mapping[str, str] | None = None
) -> None:
    """Run a command without the imports of this process; show its output if its exit code is not `fine`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env | ({"PYTHONPATH": path} if path else {}) | dict(more or {}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode not in fine:
        sys.exit(f"{done.stdout}\ntools/extras: {' '.join(map(str, command))} failed ({done.returncode})")


def build(scratch: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return the wheel, and the folder of the sdist without the package."""
    hatchling = scratch / "hatchling"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", hatchling, "hatchling")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", scratch, path=str(hatchling))
    (archive,) = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(scratch, filter="data")
    (folder,) = (path for path in scratch.glob("diskreplay-*") if path.is_dir())
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch, cwd=folder, path=str(hatchling))
    (folder / "diskreplay").rename(scratch / "source")  # no test may find it
    (wheel,) = scratch.glob("*.whl")
    return wheel, folder


class Environment:
    """An environment with the wheel, and with some of its extras."""

    def __init__(self, folder: Path, interpreter: str, wheel: Path) -> None:
        self.folder, self._wheel = folder, wheel
        self.python = folder / "bin/python"
        run(interpreter, "-m", "venv", "--without-pip", folder)

    def link(self, requirements: Iterable[str]) -> None:
        """Link requirements and their dependencies from the environment of this process."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        for distribution in closure(requirements, self._wheel):
            tops = {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
            for link in (site / top for top in sorted(tops)):
                if not link.exists():
                    link.symlink_to(str(distribution.locate_file(link.name)))

    def install(self, extra: str) -> None:
        """Install the wheel, with an extra or without, and the requirements of its tests."""
        what = str(self._wheel) + (f"[{extra}]" if extra != CORE else "")
        pins = () if extra in WITHOUT_PINS else ("-c", CONSTRAINTS)
        self._pip("install", "--quiet", *pins, what, *EXAMPLES.get(extra, ()))

    def uninstall(self) -> list[Path]:
        """Uninstall the package; return its remaining files."""
        self._pip("uninstall", "--quiet", "--yes", "diskreplay")
        return list(self.folder.rglob("*diskreplay*"))

    def _pip(self, *arguments: Any) -> None:
        run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, *arguments)


def closure(requirements: Iterable[str], wheel: Path) -> Iterator[metadata.Distribution]:
    """Yield the installed distributions that are required, directly or indirectly, in versions that fit."""
    waiting, seen = list(map(Requirement, requirements)), set()
    (info,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    own = metadata.PathDistribution(info)
    while waiting:
        required = waiting.pop()
        key = canonicalize_name(required.name), frozenset(required.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            found = own if key[0] == "diskreplay" else metadata.distribution(required.name)
        except metadata.PackageNotFoundError:
            continue
        if not required.specifier.contains(found.version, prereleases=True):
            continue
        if found is not own:
            yield found
        for line in found.requires or ():
            further = Requirement(line)
            extras = {"", *required.extras}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(further)


def interpreters() -> Iterator[str]:
    """Yield this Python, and one of each other installed version that the package supports."""
    yield sys.executable
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in {11, 12, 13, 14} - {sys.version_info.minor}:
        for each in (f"python3.{minor}", *map(str, versions.glob(f"3.{minor}.*/bin/python"))):
            try:
                subprocess.run([each, "-c", ""], check=True, stderr=subprocess.DEVNULL)
            except (OSError, subprocess.CalledProcessError):
                continue
            yield each
            break


class Resolver:
    """Installs the lowest or the newest versions of requirements with uv. It builds no package but named ones.

    Parameters
    ----------
    scratch : Path
        A folder for its files.
    overrides : iterable of str
        Requirements that replace the requirements of packages.
    """

    def __init__(self, scratch: Path, overrides: Iterable[str] = ()) -> None:
        import uv  # only this class needs it

        self._uv = uv.find_uv_bin()
        self._scratch, self._torch = scratch, scratch / "torch.txt"
        # Other builds take gigabytes. PIP_FIND_LINKS or UV_TORCH_BACKEND=cpu leads to this one.
        self._torch.write_text("\n".join([f"torch=={pins()['torch']}+cpu", *overrides]))
        places = os.environ.get("PIP_FIND_LINKS", "").split()
        self._options = ["--only-binary", ":all:", *(part for place in places for part in ("--find-links", place))]

    def install(
        self,
        python: Path,
        requirements: Iterable[str],
        end: str,
        *,
        torch: bool = True,
        built: Iterable[str] = (),
        without: Iterable[str] = (),
    ) -> None:
        """Install requirements into the environment of a Python.

        ``built`` names packages without wheels, which are built. ``without`` leaves out dependencies.
        """
        resolution = "lowest-direct" if end == LOWEST else "highest"
        sources = (part for name in built for part in ("--no-binary", name))
        command = (self._uv, "pip", "install", "--quiet", *self._options, *sources, "--resolution", resolution)
        with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=self._scratch) as excludes:
            excludes.write("\n".join([*without, *(() if torch else ("torch",))]))
            excludes.flush()
            of_torch = ("--overrides", self._torch) if torch else ()
            run(*command, *of_torch, "--excludes", excludes.name, "--python", python, *requirements)

    def has_torch(self, interpreter: str) -> bool:
        """Return whether a CPU build of torch is available for a Python."""
        command = (self._uv, "pip", "compile", "--quiet", "--no-deps", *self._options, "--python", interpreter)
        return subprocess.run([*command, str(self._torch)], capture_output=True, check=False).returncode == 0


class Python(NamedTuple):
    """An interpreter, its version such as 3.13, and whether a CPU build of torch is available for it."""

    path: str
    minor: str
    has_torch: bool


def pins() -> dict[str, str]:
    """Return the pinned version of each library."""
    found: list[tuple[str, str]] = re.findall(r"(?m)^([\w.-]+)==(\S+)$", CONSTRAINTS.read_text())
    return {str(canonicalize_name(name)): version for name, version in found}


def attempt_end(
    extra: str, end: str, python: Python, resolver: Resolver, wheel: Path, sdist: Path, scratch: Path, whole: bool
) -> ranges.Run | None:
    """Install an extra with the versions at an end of its ranges, run its tests, and return the run.

    Without a CPU build of torch, tests that need it skip, and an extra whose library needs torch does not run.
    """
    started, project = perf_counter(), ranges.Project.read()
    module, *tests = TRIED.get(extra, ("diskreplay",))
    minor, torch, needs_torch = python.minor, python.has_torch, project.needs(extra, "torch", python.minor)
    if not torch and extra != "torch" and needs_torch:
        print(f"{extra}, {end}, Python {minor}: not run, no CPU build of torch is available", flush=True)
        return None
    needed = list(dict.fromkeys(project.needed([extra, *BESIDE.get(extra, ())], minor)))
    tools = {*TEST_TOOLS, "google-crc32c", *EXAMPLES.get(extra, ())} - {Requirement(line).name for line in needed}
    try:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            environment = Environment(Path(folder) / "env", python.path, wheel)
            versions = pins()
            pinned = (f"{name}=={versions[name]}" for name in sorted(tools))
            resolver.install(environment.python, [*needed, *pinned, str(wheel)], end, torch=torch)
            if torch or not needs_torch:
                run(environment.python, "-c", f"import {module}", cwd=sdist)
            (site,) = environment.folder.glob("lib/python*/site-packages")
            there = {
                str(canonicalize_name(each.name)): each.version for each in metadata.distributions(path=[str(site)])
            }
            left_out = {each.name for extra in project.extras for each in project.own(extra)} - there.keys()
            modules = " ".join(sorted(MODULES.get(name, name.replace("-", "_")) for name in left_out))
            # Old libraries on new ones warn of features that the new ones will remove.
            warnings = ("-W", "default::DeprecationWarning") if end == LOWEST else ()
            chosen = () if whole else ("-m", "not slow")
            command = (environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *warnings, *chosen)
            more = {"DISKREPLAY_WITHOUT": modules}
            run(*command, *AT_ENDS.get(extra, tests), cwd=sdist, more=more, fine=(0, NO_TESTS))
    except SystemExit as error:
        sys.exit(f"{error}\ntools/extras: {extra}, {end}, Python {minor}: failed")
    ran = {each.name: there[each.name] for each in project.own(extra, minor) if each.name in there}
    print(f"{extra}, {end}, Python {minor}: {ran} in {perf_counter() - started:.0f} s", flush=True)
    return ranges.Run(extra, end, minor, f"{datetime.now(UTC):%Y-%m-%d}", ran, () if torch else ("torch",))


def minor_of(interpreter: str) -> str:
    """Return the version of a Python, such as 3.13."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def attempt(extra: str, interpreter: str, wheel: Path, sdist: Path, scratch: Path, whole: bool) -> None:
    """Install an extra, run its tests, the slow ones only if all are wanted, and uninstall."""
    started = perf_counter()
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        environment = Environment(Path(folder) / "env", interpreter, wheel)
        module, *tests = TRIED[extra]
        if interpreter == sys.executable:
            name = "diskreplay" if extra == CORE else f"diskreplay[{extra}]"
            environment.link([name, *(TEST_TOOLS if tests else ()), *EXAMPLES.get(extra, ())])
        environment.install(extra)
        installed = perf_counter() - started
        run(environment.python, "-W", "error", "-c", f"import {module}", cwd=sdist)
        program = PROGRAMS.get(extra, COLLECT)
        run(environment.python, "-W", "error", "-c", program, Path(folder) / "store", cwd=sdist)
        if tests:
            chosen = () if whole else ("-m", "not slow")
            command = (environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *tests)
            run(*command, cwd=sdist, fine=(0,) if whole else (0, NO_TESTS))
        if left := environment.uninstall():
            sys.exit(f"tools/extras: an uninstall leaves {', '.join(map(str, left))}")
    seconds = perf_counter() - started
    version = subprocess.run([interpreter, "-V"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{extra}, {version}: installed in {installed:.0f} s, all in {seconds:.0f} s", flush=True)


def attempt_version(extra: str, version: str, scratch: Path) -> None:
    """Run the tests for versions of an extra's library with one of them."""
    started = perf_counter()
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        # Its dependencies are in the .venv: the version there has the same ones.
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
        run(*pip, "--target", folder, version)
        (found,) = metadata.distributions(path=[folder])
        named = f"{found.name} {found.version}"
        if found.version == metadata.version(found.name):
            print(f"{extra} with {named}: the version of .venv, which tools/test tries", flush=True)
            return
        command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *WITH_EACH[extra])
        run(*command, path=f"{folder}{os.pathsep}{ROOT}")
    print(f"{extra} with {named}: {perf_counter() - started:.0f} s", flush=True)


def attempts(
    names: Iterable[str], wheel: Path, sdist: Path, scratch: Path, whole: bool
) -> Iterator[Callable[[], None]]:
    """Yield functions that try these extras, the longest first: versions of their libraries, then environments."""
    for extra in names:
        versions = VERSIONS.get(extra, ())
        for version in versions if whole else (*versions[:1], *versions[-1:]):
            yield partial(attempt_version, extra, version, scratch)
    for extra in names:
        for interpreter in interpreters() if whole and extra == CORE else [sys.executable]:
            yield partial(attempt, extra, interpreter, wheel, sdist, scratch, whole)


def attempts_at_ends(
    names: Iterable[str], ends: Iterable[str], pythons: Sequence[str], wheel: Path, sdist: Path, scratch: Path,
    whole: bool,
) -> Iterator[Callable[[], ranges.Run | None]]:  # fmt: skip
    """Yield functions that try extras at ends of their ranges on these Pythons."""
    resolver, here = Resolver(scratch), {minor_of(each): each for each in interpreters()}
    for minor in pythons:
        if minor not in here:
            sys.exit(f"tools/extras: there is no Python {minor} here, only {', '.join(sorted(here))}: install it")
    found = [Python(here[minor], minor, resolver.has_torch(here[minor])) for minor in pythons]
    for extra, python, end in product(names, found, ends):
        yield partial(attempt_end, extra, end, python, resolver, wheel, sdist, scratch, whole)


def main() -> None:
    """Try the extras of the command line."""
    extras = list(ranges.Project.read().extras)
    parser = argparse.ArgumentParser(prog="tools/extras", description=__doc__.splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="name",
        help=f"{', '.join(TRIED)}; with --lowest or --newest, {', '.join(extras)}, by default all",
    )
    more = "slow tests, versions between the lowest and the newest, and core on every installed Python"
    parser.add_argument("--whole", action="store_true", help=f"also {more}")
    for end in (LOWEST, NEWEST):
        text = f"instead, with the {end} versions that pyproject.toml allows"
        parser.add_argument(f"--{end}", dest="ends", action="append_const", const=end, default=[], help=text)
    parser.add_argument("--python", action="append", help="a Python for --lowest and --newest, such as 3.13; this one")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="save passed runs, and write their table into a page"
    )
    arguments = parser.parse_args()
    if not (arguments.names or arguments.ends):
        parser.error("name an extra, or give --lowest or --newest for every extra that has ranges")
    if unknown := set(arguments.names).difference(extras if arguments.ends else TRIED):
        parser.error(f"there is no {' or '.join(sorted(unknown))} to try: see --help")
    if arguments.table and not arguments.ends:
        parser.error("--table saves runs of --lowest and --newest: give one of these, too")
    with (
        tempfile.TemporaryDirectory(prefix="diskreplay-extras-") as folder,
        ThreadPoolExecutor(1 if arguments.whole else os.cpu_count()) as pool,
    ):
        tried = (*build(Path(folder)), Path(folder), arguments.whole)
        pythons, failed = arguments.python or [minor_of(sys.executable)], []
        waiting: Iterable[Callable[[], ranges.Run | None]]
        if arguments.ends:
            waiting = attempts_at_ends(arguments.names or extras, arguments.ends, pythons, *tried)
        else:
            waiting = attempts(arguments.names, *tried)
        for attempted in as_completed([pool.submit(each) for each in waiting]):
            try:
                done = attempted.result()
            except SystemExit as error:
                if not arguments.ends:  # cancel the ones that have not begun
                    pool.shutdown(cancel_futures=True)
                    raise
                print(error, flush=True)
                failed.append(str(error).splitlines()[-1])
            else:
                if done is not None and arguments.table:
                    ranges.save([done])
    if arguments.table:
        ranges.write_table(arguments.table)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
