"""What opening a store costs in the project's own calls: each is a place that a reader of the code has to look at."""

from pathlib import Path

import numpy as np

import diskreplay as dr
from tests.testing.calls import calls, check


def test_opening_a_store_takes_few_calls_in_few_files(tmp_store: Path) -> None:
    schema = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"))
    obs = np.zeros(4, np.float32)
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        for step in range(50):
            writer.append(obs, 0, 0.0, step % 10 == 9, next_obs=obs)
    opened = [dr.open(tmp_store)]  # imports the names, and reads what a process reads once
    check(calls(lambda: opened.append(dr.open(tmp_store))), 307, 28)
    for store in opened:
        assert len(store) == 50
        store.close()
