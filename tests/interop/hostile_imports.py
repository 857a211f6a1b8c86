"""Imports mutations of a data set in a process of its own, with bounds on memory and time.

    python -m tests.interop.hostile_imports minari some/folder NAME 30

The folder holds the data set NAME, as another library wrote it. Each mutation is imported, or refused by one error of
the package, of one line. A crash, a hang or a large allocation ends the process, which has printed the mutation.
"""

import faulthandler
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings

import diskreplay as dr
from tests.segments.hostile import apply, foreign_changes

MOST_S = 60  # for one mutation, which takes some hundredths of a second
MOST_BYTES = 2 << 30  # beyond what the process had mapped when it had imported the data set itself


def check(format_name: str, folder: Path, name: str, examples: int) -> None:
    """Import the data set, and mutations of it."""
    importer: Any = import_module(f"diskreplay.interop.{format_name}").import_dataset
    scratch = Path(tempfile.mkdtemp(prefix="hostile-", dir=folder.parent))
    assert importer(folder / name, scratch / "whole").episodes

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(foreign_changes(folder))
    def mutated(planned: list[tuple]) -> None:
        with tempfile.TemporaryDirectory(dir=scratch) as copies:
            copy, store = Path(copies) / "set", Path(copies) / "store"
            shutil.copytree(folder, copy)
            for change in planned:
                apply(copy, change, Path(copies) / "outside")
            # The alarm ends the process: no handler of Python's would run while a library waits.
            print(planned, flush=True)
            signal.alarm(MOST_S)
            said = None
            try:
                importer(copy / name, store)
            except dr.ReplayError as error:
                said = str(error)
            signal.alarm(0)
            if said is not None:
                assert "\n" not in said
                return
            with dr.open(store) as opened:
                assert opened.verify(deep=True) == []

    limit = mapped_bytes() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of h5py, zarr and zipfile, about what is strange
        mutated()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_BYTES // 2


def mapped_bytes() -> int:
    """Return how many bytes this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    faulthandler.enable()
    check(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
