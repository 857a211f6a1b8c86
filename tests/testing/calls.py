"""Counting the project's own calls: each is a place that a reader of the code has to look at."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import diskreplay as dr

PACKAGE = f"{Path(dr.__file__).parent}/"
KERNELS = f"{PACKAGE}kernels/"  # which are compiled: a call of one is seen, too, but there is nothing behind it


def calls(function: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Count the calls of functions of the package that one call makes, by file and name."""
    made: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE) and not path.startswith(KERNELS):
            made[path.removeprefix(PACKAGE), frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return made


def check(made: Counter[tuple[str, str]], most_calls: int, most_files: int) -> None:
    """Fail with the calls if there are too many, or in too many files."""
    files = {path for path, _ in made}
    assert (made.total() <= most_calls, len(files) <= most_files) == (True, True), sorted(made.items())
