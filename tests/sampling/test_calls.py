"""What a small uniform batch costs in the project's own calls: each is a place that its reader has to look at."""

from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.calls import calls, check


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
            check(calls(sampler.sample), 20, 12)
            append()
            check(calls(sampler.sample), 24, 13)
            assert batch.batch_size == 256
