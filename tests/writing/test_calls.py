"""What one step costs in the project's own calls: each is a place that a reader of the code has to look at."""

from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.calls import calls, check


@pytest.mark.parametrize("given", [True, False])
def test_a_step_takes_few_calls_in_few_files(tmp_store: Path, given: bool) -> None:
    schema = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"))
    obs = np.zeros(4, np.float32)
    with dr.create(tmp_store, schema) as store, store.writer() as writer:

        def append(terminated: bool = False) -> None:
            writer.append(obs, 0, 0.0, terminated, next_obs=obs if given else None)

        for _ in range(50):
            append()
        for _ in range(3):
            check(calls(append), 6, 3)
            check(calls(lambda: append(terminated=True)), 12, 3)
            check(calls(append), 9, 3)
