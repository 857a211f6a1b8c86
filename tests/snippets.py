"""Runs the snippets of a page, one after the other and in one process, as a reader would.

- A python snippet is executed; the names of earlier ones on the page are there. What the comment of a `print` says, up
  to a semicolon, is what it prints.
- One with the title of a file, ```python title="train.py"```, is saved under that name, for a bash snippet to run.
- One whose title begins with "Before" is the code of another library: it compiles, and is not run.
- The store of the five-minute start, cartpole.replay, is there where a page uses it and does not make it.
- A bash snippet is run; `pip install` is not, but the extras that it names exist.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Large, or with RLlib (tree): their snippets are left out where they are not installed.
OPTIONAL = {"jax", "ray", "tensorboard", "tianshou", "tensordict", "torchrl", "tree", "wandb"}
START = ROOT / "docs/start.md"
FENCE = re.compile(r'^```(python|bash)(?: title="([^"\n]*)")?\n(.*?)^```$', re.S | re.M)
EXPECTED = re.compile(r"^\s*print\(.*\)  # ([^;\n]+)", re.M)
PROGRAMS = {"diskreplay": "-m diskreplay", "python": "", "torchrun": "-m torch.distributed.run"}


class Snippet(NamedTuple):
    """One block of code: where it begins, in which language, and the title that says what is done with it."""

    line: int
    language: str
    title: str
    code: str

    @property
    def is_file(self) -> bool:
        return self.title.endswith(".py")

    @property
    def is_before(self) -> bool:
        return self.title.startswith("Before")

    def missing(self) -> set[str]:
        """Tell which optional libraries it imports that are not there."""
        named = set(re.findall(r"(?m)^\s*(?:from|import) (\w+)", self.code))
        for adapter in re.findall(r"diskreplay\.interop\.(\w+)", self.code):
            named.add(adapter)
        if ".to_tensordict(" in self.code:
            named.add("tensordict")
        if ".to_ray_dataset(" in self.code:
            named.add("ray")
        if "torch.utils.tensorboard" in self.code:
            named.add("tensorboard")
        if "ray.rllib" in self.code:
            named.add("tree")
        return {name for name in named & OPTIONAL if find_spec(name) is None}


def snippets(page: Path) -> list[Snippet]:
    """List the python and bash snippets of a page."""
    text = page.read_text(encoding="utf-8")
    return [Snippet(text[: found.start()].count("\n") + 1, *found.groups("")) for found in FENCE.finditer(text)]


def run_page(page: Path, folder: Path) -> None:
    """Run a page in this process, in an empty folder; what is printed goes to the file `output` beside it."""
    os.chdir(folder)
    with open(folder.with_name("output"), "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    warnings.filterwarnings("error", category=UserWarning, module="diskreplay")
    os.environ["OMP_NUM_THREADS"] = "1"  # pages run beside other tests
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    text = page.read_text(encoding="utf-8")
    if "cartpole.replay" in text and 'create("cartpole.replay"' not in text:
        _run_python(snippets(START)[0], START, {})
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in snippets(page):
        if snippet.missing() or snippet.is_before:
            continue
        if snippet.is_file:
            Path(snippet.title).write_text(snippet.code)
        elif snippet.language == "python":
            _run_python(snippet, page, names)
        else:
            _run_bash(snippet.code, folder)


def _run_python(snippet: Snippet, page: Path, names: dict[str, object]) -> None:
    code = "\n" * snippet.line + snippet.code  # so that a traceback names the page's line
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(page), "exec"), names)
    lines = iter(printed.getvalue().splitlines())
    for expected in EXPECTED.findall(snippet.code):
        assert expected.strip() in lines, f"{page.name}, below line {snippet.line}: {expected!r} is not printed there"


def _run_bash(code: str, folder: Path) -> None:
    lines = code.splitlines()
    if all(re.match(r"diskreplay [^|&<>$]*$|pip install |#|$", line) for line in lines):
        for line in lines:
            _run_command(shlex.split(line, comments=True))
        return
    programs = folder.with_name("bin")
    programs.mkdir(exist_ok=True)
    for name, arguments in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-euo", "pipefail", "-c", code], env=env, check=True, timeout=600)


def _run_command(words: list[str]) -> None:
    from tests.testing.commands import main

    if words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"\[(.*?)\]", words[2])
        assert set(",".join(named).split(",")) <= {*extras, ""}, words
    elif words:
        assert main(words[1:]) == 0, words
