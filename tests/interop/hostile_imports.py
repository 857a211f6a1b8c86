"""Import mutations of a data set, and report everything that is wrong with an import.

    python -m tests.interop.hostile_imports minari some/folder NAME 0 1000

The folder holds the data set NAME, as another library wrote it. A mutation has a number, which always makes the same
one. A child process imports mutations with bounds on memory and time. A crash or a hang ends that process, and another
one continues with the next mutation.

These imports are right:

- An error of the package, in one printable line that names the data set or an option.
- A store without damage. The library of the format reads the same values in the files.
- With ``on_error="skip"``, a store of the other episodes, and the name of each one that was left out.

An import changes no file of the data set, writes to its store alone, and lets no library print or warn.
"""

import contextlib
import faulthandler
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import diskreplay as dr
from tests.interop.mutations import mutate
from tests.interop.plain_values import plain_values
from tests.interop.round_trips import content
from tests.testing.commands import main

MOST_S = 60  # a mutation takes some hundredths of a second
MOST_BYTES = 3 << 29  # on top of the memory that the process had before the mutation
_CLI_EVERY, _SKIP_EVERY, _AGAIN_EVERY = 8, 4, 4


class Checker:
    """Mutations of one data set.

    Parameters
    ----------
    format_name : str
        A module of `diskreplay.interop`.
    original : Path
        The folder that the data set lies in.
    name : str
        The data set.
    scratch : Path
        A folder for copies.
    """

    def __init__(self, format_name: str, original: Path, name: str, scratch: Path) -> None:
        self._format, self._original, self._name, self._scratch = format_name, original, name, scratch
        self._import: Any = import_module(f"diskreplay.interop.{format_name}").import_dataset
        whole = scratch / "whole"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a data set without observations
            assert self._import(original / name, whole).episodes
        self._whole = content(whole)
        with dr.open(whole) as store:
            self._leaves = dict(store.schema.step_leaves)
        self._compared = set(self._leaves) - set(self._unknown_values(whole, original))
        # A pickle of Stable-Baselines3 has no reader that runs no code.
        assert self._compared or format_name == "sb3_pickle", "add a reader to READERS of tests/interop/plain_values.py"

    def check(self, number: int) -> tuple[list[str], dict[str, Any]]:
        """Import a mutation in several ways; return the faults, and the outcome of each way."""
        rng = Random(f"{self._format} {number}")
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            root, stores = Path(folder) / "set", Path(folder) / "stores"
            shutil.copytree(self._original, root)
            stores.mkdir()
            did = mutate(root, rng, Path(folder) / "outside")
            options = self._options(rng)
            print(json.dumps({"number": number, "did": did, "options": str(options)}), flush=True)
            wrong: list[str] = []
            before = _listing(Path(folder))
            whole = self._imported(root, stores / "raise", options, wrong)
            some = whole
            if isinstance(whole, Exception) or number % _SKIP_EVERY == 0:
                some = self._imported(root, stores / "skip", {**options, "on_error": "skip"}, wrong)
            self._compare(root, stores, whole, some, options, wrong)
            if number % _CLI_EVERY == 0:
                self._check_command(root, stores / "command", wrong)
            outcomes = {"raise": self._outcome(whole, stores / "raise"), "skip": self._outcome(some, stores / "skip")}
            shutil.rmtree(stores / "skip", ignore_errors=True)
            shutil.rmtree(stores / "command", ignore_errors=True)
            if number % _AGAIN_EVERY == 0 and isinstance(whole, Exception) and not options:
                self._check_again(root, stores / "raise", wrong)
            elif before != (now := _listing(Path(folder))):
                wrong.append(f"files changed: {before ^ now}")
        return wrong, outcomes

    def _options(self, rng: Random) -> dict[str, Any]:
        path = rng.choice(sorted(self._leaves))
        return rng.choice(
            (
                *({}, {}, {}, {}, {"extra": []}, {"compression": "zstd"}),
                {"skip": [path.rpartition("/")[2]]},
                {"dtype": {path: rng.choice(("float32:unsafe", "float64", "uint8:unsafe"))}},
                {"where": lambda episode: len(episode) > 2 and episode.total_reward < 1e30},
            )
        )

    def _imported(self, root: Path, store: Path, options: dict[str, Any], wrong: list[str]) -> Any:
        """Return the record of an import, or the error."""
        try:
            with _quiet(str(root), wrong):
                return self._import(root / self._name, store, **options)
        except dr.ReplayError as error:
            said = str(error)
            if "\n" in said or "\x1b" in said or len(said) > 2000:
                wrong.append(f"not one line: {said[:300]!r}")
            if not any(name in said for name in (str(root), *options)):
                wrong.append(f"names no file: {said}")
            return error
        except Exception as error:
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            at = "" if place is None else f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
            wrong.append(f"{type(error).__name__} at {at}: {error}"[:600])
            return error

    def _compare(
        self, root: Path, stores: Path, whole: Any, some: Any, options: dict[str, Any], wrong: list[str]
    ) -> None:
        for result, store in ((whole, stores / "raise"), (some, stores / "skip")):
            if not isinstance(result, Exception) and store.exists():
                with dr.open(store) as opened:
                    # With all episodes, the second store is compared with the first one.
                    if (store.name == "raise" or result.skipped) and (said := opened.verify(deep=True)):
                        wrong.append(f"verify: {said[0]}")
                    if opened.num_episodes != result.episodes:
                        wrong.append("the record has another count of episodes than the store")
                if "dtype" not in options:
                    unknown = [path for path in self._unknown_values(store, root) if path in self._compared]
                    wrong += [f"values of {path} that the library does not read" for path in unknown]
        if not isinstance(whole, Exception):
            if isinstance(some, Exception):
                wrong.append(f"skip fails where raise does not: {some}")
            elif some is not whole and content(stores / "raise") != content(stores / "skip"):
                wrong.append("skip imports other values than raise")
        elif not isinstance(some, Exception) and not some.skipped:
            wrong.append(f"nothing is named as skipped, where raise fails: {whole}")

    def _outcome(self, result: Any, store: Path) -> str:
        if isinstance(result, Exception):
            return type(result).__name__
        if result.skipped:
            return "some episodes"
        if not store.exists():
            return "not tried"
        found = content(store)
        if found == self._whole:
            return "the same values"
        return "other values" if _ends(found) == _ends(self._whole) else "other episodes"

    def _unknown_values(self, store: Path, root: Path) -> list[str]:
        """Return the leaves with an episode whose rows are not, as they are, in the files."""
        known = plain_values(root / self._name)
        unknown = list[str]()
        with dr.open(store) as opened:
            for path in opened.schema.step_leaves:
                for episode in opened.episodes:
                    rows = np.ascontiguousarray(episode.rows(path)[: len(episode)])
                    if not any(_has(each, rows) for each in known):
                        unknown.append(path)
                        break
        return unknown

    def _check_command(self, root: Path, store: Path, wrong: list[str]) -> None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["import", f"{self._format}:{root / self._name}", str(store)])
        lines = [line for line in err.getvalue().splitlines() if not line.startswith("diskreplay: warning: ")]
        if code not in (0, 1, 2) or (code != 0) != bool(lines) or len(lines) > 1 or "Traceback" in err.getvalue():
            wrong.append(f"the command returned {code} and said {err.getvalue()[:300]!r}")

    def _check_again(self, root: Path, store: Path, wrong: list[str]) -> None:
        """Import the whole data set into a store whose import has failed."""
        shutil.rmtree(root)
        shutil.copytree(self._original, root)
        try:
            with _quiet(str(root), wrong):
                self._import(root / self._name, store)
        except (dr.StoreExists, dr.SchemaError):  # it was begun with other values, or a schema that was damaged
            return
        if content(store) != self._whole:
            wrong.append("resumed with other values")


def _ends(episodes: list[Any]) -> list[Any]:
    """Return how long each episode is, and how it ended."""
    return [
        (how, terminated, truncated, len(values["reward"][2])) for how, terminated, truncated, values, _ in episodes
    ]


def _has(known: np.ndarray, rows: np.ndarray) -> bool:
    """Tell whether rows are one behind another in an array, as they are or by their values."""
    if not rows.any() or rows.tobytes() in known.tobytes():  # zeros may stand for missing values
        return True
    with np.errstate(all="ignore"):
        return known.dtype.kind in "biuf" and rows.tobytes() in known.astype(rows.dtype).tobytes()


def _listing(folder: Path) -> set[tuple[str, int, int]]:
    """Return the files of a folder outside of its stores, by their sizes and times of change."""
    found = set[tuple[str, int, int]]()
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if parts[0] != "stores" or (len(parts) == 2 and parts[1] not in ("raise", "skip", "command")):
            status = path.lstat()
            found.add((str(path), status.st_size if path.is_file() else 0, status.st_mtime_ns * path.is_file()))
    return found


@contextlib.contextmanager
def _quiet(root: str, wrong: list[str]) -> Iterator[None]:
    """Add everything that a block prints, and each warning that does not name the data set, to the faults."""
    with tempfile.TemporaryFile() as printed, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        sys.stderr.flush()
        own = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            wrong += [
                f"{each.category.__name__}: {each.message}"[:300] for each in warned if root not in str(each.message)
            ]
            printed.seek(0)
            if said := printed.read(300):
                wrong.append(f"printed {said!r}")


def check_numbers(format_name: str, original: Path, name: str, first: int, stop: int) -> None:
    """Check mutations in this process, with bounds; print a line before and a line after each."""
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=original.parent) as scratch:
        checker = Checker(format_name, original, name, Path(scratch))
        limit = (4 << 30) + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for number in range(first, stop):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
            before = _memory("VmRSS")
            # The alarm ends the process: no handler of Python's would run while a library waits.
            signal.alarm(MOST_S)
            try:
                wrong, outcomes = checker.check(number)
            except Exception as error:
                wrong, outcomes = ["".join(traceback.format_exception(error))[-1500:]], {"raise": "?", "skip": "?"}
            signal.alarm(0)
            if (took := _memory("VmHWM") - before) > MOST_BYTES:
                wrong.append(f"took {took >> 20} MiB")
            print(
                json.dumps({"number": number, "wrong": list(dict.fromkeys(wrong)), **outcomes, "MiB": took >> 20}),
                flush=True,
            )


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def run(
    format_name: str, original: Path, name: str, first: int, stop: int
) -> tuple[dict[int, dict[str, Any]], Counter[str]]:
    """Check mutations in child processes; return the faulty ones by number, and counts of outcomes."""
    found, counts = dict[int, dict[str, Any]](), Counter[str]()
    begin = first
    while first < stop:
        arguments = [format_name, original, name, first, stop, "here"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.interop.hostile_imports", *map(str, arguments)],
            capture_output=True,
            text=True,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        begun = {line["number"]: line for line in lines if "did" in line}
        for line in lines:
            if "wrong" in line:
                counts.update([f"raise: {line['raise']}", f"skip: {line['skip']}"])
                counts["MiB at most"] = max(counts["MiB at most"], line["MiB"])
                if line["wrong"]:
                    found[line["number"]] = {**begun.get(line["number"], {}), **line}
        if done.returncode == 0:
            break
        if not lines and first == begin:
            raise RuntimeError(f"the data set itself cannot be imported: {done.stderr[-3000:]}")
        last = lines[-1]["number"] if lines else first
        found[last] = {
            **begun.get(last, {}),
            "number": last,
            "wrong": [f"ended with {done.returncode}: {done.stderr[-1500:]}"],
        }
        counts["ended"] += 1
        first = last + 1
    return found, counts


if __name__ == "__main__":
    faulthandler.enable()
    asked = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    if sys.argv[6:] == ["here"]:
        check_numbers(*asked)
    else:
        wrongs, counted = run(*asked)
        for each in wrongs.values():
            print(json.dumps(each))
        print(dict(counted), file=sys.stderr)
