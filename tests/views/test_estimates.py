"""Advantages of steps in memory, against a plain loop."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from diskreplay.views.rollouts import advantages


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_those_of_a_plain_loop(steps: int, lanes: int, seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.standard_normal((2, steps, lanes)).astype("f4")
    last, dones = rng.standard_normal(lanes), (rng.random((steps, lanes)) < 0.3).astype("f4")
    found, returns = advantages(rewards, values, last, dones, gamma, lam)
    run = np.zeros(lanes)
    for t in reversed(range(steps)):
        following = last if t == steps - 1 else values[t + 1].astype("f8")
        goes_on = 1 - dones[t].astype("f8")
        run = rewards[t].astype("f8") + gamma * following * goes_on - values[t] + gamma * lam * goes_on * run
        np.testing.assert_allclose(found[t], run, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(returns[t], run + values[t], rtol=1e-6, atol=1e-6)
    assert found.dtype == returns.dtype == np.float32


@pytest.mark.parametrize("numbers", [{"gamma": 1.5, "gae_lambda": 0.9}, {"gamma": 0.9, "gae_lambda": -0.1}])
def test_numbers_out_of_range_are_refused(numbers: dict[str, float]) -> None:
    ones = np.ones((2, 1))
    with pytest.raises(ValueError, match="must be a number from 0 to 1"):
        advantages(ones, ones, np.ones(1), ones, **numbers)
