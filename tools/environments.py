"""Try extras as users get them: the wheel with each in an environment of its own, its tests, and an uninstall.

The wheel is built of the sdist, whose tests run. What an extra needs, and nothing else, is linked from the checkout's
`.venv` where it is there in a version that fits, so that torch is not installed again; pip installs the rest.

Some extras allow several versions of a library. The checkout's tests of the adapter, and the pages that use it, run
with these versions, too: in the checkout's `.venv`, each version in a folder before it.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "tools/constraints.txt"
CORE = "core"
# What must be importable with an extra, and the tests that then have to pass.
TRIED = {
    CORE: ("diskreplay",),
    "torch": ("diskreplay.interop.torch", "tests/interop/test_torch.py"),
    "gym": ("diskreplay.interop.gymnasium",),  # whose tests sample, too
    "sb3": ("diskreplay.interop.sb3", "tests/interop/test_sb3.py"),
    "torchrl": ("diskreplay.interop.torchrl", "tests/interop/test_torchrl.py", "tests/loading/test_tensordicts.py"),
    "tianshou": ("diskreplay.interop.tianshou", "tests/interop/test_tianshou.py"),
    "ray": ("ray", "tests/interop/ray", "tests/store/test_ray_dataset.py"),
    "rllib": ("diskreplay.interop.rllib", "tests/interop/test_rllib.py", "tests/interop/test_local_ray.py"),
    "parquet": ("diskreplay.interop.parquet", "tests/interop/test_parquet.py"),
    "minari": ("diskreplay.interop.minari", "tests/interop/test_minari.py"),
    "lerobot": ("diskreplay.interop.lerobot", "tests/interop/lerobot"),
    "d4rl": ("diskreplay.interop.d4rl", "tests/interop/test_d4rl.py"),
    "rlds": ("diskreplay.interop.rlds", "tests/interop/test_rlds.py"),
    "all": ("diskreplay.interop.sb3", "tests/interop", "tests/cli/test_plot.py"),
}
# Versions of an extra's library, the newest last, and the tests that run with each.
VERSIONS = {"gym": ("gymnasium==1.1.0", "gymnasium==1.2.2", "gymnasium==1.3.0", "gymnasium")}
PAGE = "tests/test_docs.py::test_the_snippets_of_a_page_run_one_after_the_other"
WITH_EACH = {
    "gym": (
        *("tests/interop/test_gymnasium.py", "tests/interop/exchange/test_spaces.py", "tests/format/test_schema.py"),
        *(f"{PAGE}[README.md]", f"{PAGE}[record.md]"),
    )
}
# Their bounds exclude some of the versions that are pinned. torch stays: what is linked is not replaced.
WITHOUT_PINS = ("rllib", "tianshou")
NO_TESTS = 5  # pytest's code where all are deselected: those of Tianshou are slow
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "packaging", "scipy")
EXAMPLES = {"ray": ("gymnasium",)}  # what the examples of an extra that its tests run need beside it
# A collector's day, without any extra.
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
PROGRAMS = {"gym": RECORD}  # of the others, COLLECT


def run(*command: Any, cwd: Path = ROOT, path: str = "", fine: Sequence[int] = (0,)) -> None:
    """Run a command without the imports that this process has; what it prints is shown where its code is not `fine`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env | ({"PYTHONPATH": path} if path else {}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode not in fine:
        sys.exit(f"{done.stdout}\ntools/extras: {' '.join(map(str, command))} failed ({done.returncode})")


def build(scratch: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel of it; return the wheel and the folder of the sdist, without the package."""
    hatchling = scratch / "hatchling"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", hatchling, "hatchling")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", scratch, path=str(hatchling))
    (archive,) = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(scratch, filter="data")
    (folder,) = (path for path in scratch.glob("diskreplay-*") if path.is_dir())
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch, cwd=folder, path=str(hatchling))
    (folder / "diskreplay").rename(scratch / "source")  # where no test finds it
    (wheel,) = scratch.glob("*.whl")
    return wheel, folder


class Environment:
    """An environment with the wheel, and with some of its extras."""

    def __init__(self, folder: Path, interpreter: str, wheel: Path) -> None:
        self.folder, self._wheel = folder, wheel
        self.python = folder / "bin/python"
        run(interpreter, "-m", "venv", "--without-pip", folder)

    def link(self, requirements: Iterable[str]) -> None:
        """Link what is required, and what that requires, from the environment of this process."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        for distribution in closure(requirements, self._wheel):
            tops = {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
            for link in (site / top for top in sorted(tops)):
                if not link.exists():
                    link.symlink_to(str(distribution.locate_file(link.name)))

    def install(self, extra: str) -> None:
        """Install the wheel, with an extra or with none."""
        what = str(self._wheel) + (f"[{extra}]" if extra != CORE else "")
        pins = () if extra in WITHOUT_PINS else ("-c", CONSTRAINTS)
        self._pip("install", "--quiet", *pins, what)

    def uninstall(self) -> list[Path]:
        """Uninstall the package; return what is left of it."""
        self._pip("uninstall", "--quiet", "--yes", "diskreplay")
        return list(self.folder.rglob("*diskreplay*"))

    def _pip(self, *arguments: Any) -> None:
        run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, *arguments)


def closure(requirements: Iterable[str], wheel: Path) -> Iterator[metadata.Distribution]:
    """Yield the distributions here that are required, directly or not, in versions that fit."""
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
    """Yield this Python, and one of each other version that is installed here and that the package supports."""
    yield sys.executable
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in {11, 12, 13} - {sys.version_info.minor}:
        for each in (f"python3.{minor}", *map(str, versions.glob(f"3.{minor}.*/bin/python"))):
            try:
                subprocess.run([each, "-c", ""], check=True, stderr=subprocess.DEVNULL)
            except (OSError, subprocess.CalledProcessError):
                continue
            yield each
            break


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
        # Its dependencies are in the .venv: the version there needs the same.
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
        run(*pip, "--target", folder, version)
        (found,) = metadata.distributions(path=[folder])
        named = f"{found.name} {found.version}"
        command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *WITH_EACH[extra])
        run(*command, path=f"{folder}{os.pathsep}{ROOT}")
    print(f"{extra} with {named}: {perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    """Try what the command line names."""
    parser = argparse.ArgumentParser(prog="tools/extras", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=TRIED, metavar="name", help=", ".join(TRIED))
    parser.add_argument("--whole", action="store_true", help="the slow tests, too, and core on every Python there is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diskreplay-extras-") as folder:
        wheel, sdist = build(Path(folder))
        for extra in arguments.names:
            for interpreter in interpreters() if arguments.whole and extra == CORE else [sys.executable]:
                attempt(extra, interpreter, wheel, sdist, Path(folder), arguments.whole)
            for version in VERSIONS.get(extra, ()):
                attempt_version(extra, version, Path(folder))


if __name__ == "__main__":
    main()
