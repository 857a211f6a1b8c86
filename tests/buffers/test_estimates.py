"""Advantages of steps in tensors, against the sum that defines them."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from diskreplay.buffers.estimates import advantages


@given(
    steps=st.integers(1, 12),
    lanes=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    has_left=st.booleans(),
)
def test_advantages_are_the_discounted_sums_of_errors(
    steps: int, lanes: int, seed: int, gamma: float, lam: float, has_left: bool
) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.standard_normal((2, steps, lanes)).astype("f4")
    last, final = rng.standard_normal(lanes), rng.standard_normal((steps, lanes))
    done = rng.random((steps, lanes)) < 0.3
    left = (rng.random((steps, lanes)) < 0.3 * has_left) & ~done
    expected = np.zeros((steps, lanes))
    for t, lane in np.ndindex(steps, lanes):
        for k in range(t, steps):  # equation 16, term by term
            behind = last[lane] if k == steps - 1 else float(values[k + 1, lane])
            behind = 0.0 if done[k, lane] else final[k, lane] if left[k, lane] else behind
            error = float(rewards[k, lane]) + gamma * behind - float(values[k, lane])
            expected[t, lane] += (gamma * lam) ** (k - t) * error
            if done[k, lane] or left[k, lane]:
                break
    # The values behind an end are not read.
    last[done[-1] | left[-1]] = np.nan
    final[~left] = np.nan
    numbers = [torch.from_numpy(array) for array in (rewards, values, last, done)]
    ends = [torch.from_numpy(array) for array in (left, final)] if has_left else []
    found, returns = advantages(*numbers, gamma, lam, *ends)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(returns, expected + values, rtol=1e-6, atol=1e-6)
    assert found.dtype == returns.dtype == torch.float32


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("name", ["rewards", "values"])
def test_a_nan_stays_in_its_episode(name: str, is_left: bool) -> None:
    rng = np.random.default_rng(0)
    numbers = {key: rng.standard_normal((6, 2)).astype("f4") for key in ("rewards", "values")}
    end = np.zeros((6, 2), np.bool_)
    end[2, 0] = True  # episodes of the first column are steps 0 to 2, and 3 to 5
    ends = [torch.from_numpy(array) for array in (end, rng.standard_normal((6, 2)))] if is_left else []

    def computed() -> list[np.ndarray]:
        tensors = [torch.from_numpy(numbers[key].copy()) for key in ("rewards", "values")]
        done = torch.from_numpy(end & (not is_left))
        return [found.numpy() for found in advantages(*tensors, torch.ones(2), done, 0.9, 0.8, *ends)]

    without = computed()
    numbers[name][3, 0] = np.nan
    for found, expected in zip(computed(), without, strict=True):
        np.testing.assert_array_equal(np.isnan(found[:, 0]), [False, False, False, True, False, False])
        np.testing.assert_array_equal(found[:3], expected[:3])
        np.testing.assert_array_equal(found[:, 1], expected[:, 1])


@pytest.mark.parametrize("numbers", [{"gamma": 1.5, "gae_lambda": 0.9}, {"gamma": 0.9, "gae_lambda": -0.1}])
def test_numbers_out_of_range_are_refused(numbers: dict[str, float]) -> None:
    ones = torch.ones((2, 1))
    with pytest.raises(ValueError, match="must be a number from 0 to 1"):
        advantages(ones, ones, torch.ones(1), ones > 0, **numbers)
