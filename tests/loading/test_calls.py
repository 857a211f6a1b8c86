"""What a small uniform batch costs in the project's own calls: each is a place that its reader has to look at."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

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
    files = {path for path, _ in made}
    assert (made.total() <= most_calls, len(files) <= most_files) == (True, True), sorted(made.items())


@pytest.mark.parametrize("n_step", [1, 5])
def test_a_small_batch_takes_few_calls_in_few_files(tmp_store: Path, n_step: int) -> None:
    schema = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"))
    obs = np.zeros(4, np.float32)
    with dr.create(tmp_store, schema) as store, store.writer() as writer:

        def append() -> None:
            writer.append(obs, 0, 0.0, False, next_obs=obs)

        with dr.Sampler(store, dr.Transitions(n_step=n_step), batch_size=256, seed=0) as sampler:
            for _ in range(n_step):
                append()
            for _ in range(50):
                append()
                batch = sampler.sample()
            check(calls(sampler.sample), 25, 13)
            append()
            check(calls(sampler.sample), 45, 16)
            assert len(batch) == 256
