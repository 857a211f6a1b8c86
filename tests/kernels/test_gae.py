"""Advantages against the plain loop of the paper, and the kernel against its twin."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from diskreplay.ids import TERMINATED, TRUNCATED
from tests.kernels.pairs import KERNELS

NO_DISCOUNTS = np.zeros((0, 0))
seeds = st.integers(0, 2**32 - 1)
shares = st.sampled_from((0.0, 0.5, 0.9, 0.99, 1.0))
functions = [pytest.param(KERNELS["gae"][1], id="plain"), pytest.param(KERNELS["gae"][0], id="compiled")]


def problem(steps: int, columns: int, seed: int) -> tuple[np.ndarray, ...]:
    """Make rewards, values, next values and ends; the next values of terminated steps are not to be read."""
    rng = np.random.default_rng(seed)
    r, value, following = rng.standard_normal((3, steps, columns)) * 10.0 ** rng.integers(-2, 4)
    ends = rng.choice(np.array([0, 0, 0, TERMINATED, TRUNCATED, TERMINATED | TRUNCATED], np.uint8), (steps, columns))
    following[(ends & TERMINATED) != 0] = np.nan
    discounts = rng.choice((0.0, 0.5, 1.0), (steps, columns)) if seed % 2 else NO_DISCOUNTS
    return r, value, following, ends, discounts


def solve(function, r, value, following, ends, discounts, gamma, gae_lambda) -> tuple[np.ndarray, np.ndarray]:
    advantage, ret = np.full((2, *r.shape), 7, np.float32)
    function(r, value, following, ends, discounts, gamma, gae_lambda, np.full(r.shape[1], 7.0), advantage, ret)
    return advantage, ret


def reference(r, value, following, ends, discounts, gamma, gae_lambda) -> np.ndarray:
    """Sum (gamma * lambda)^l * delta_{t+l} forwards from each step, as equation 16 is written."""
    each = gamma * (discounts if discounts.size else np.ones(r.shape))
    out = np.zeros(r.shape)
    for n in range(r.shape[1]):
        for t in range(len(r)):
            for i in range(t, len(r)):
                bootstrap = 0.0 if ends[i, n] & TERMINATED else following[i, n]
                delta = r[i, n] + each[i, n] * bootstrap - value[i, n]
                out[t, n] += np.prod(each[t:i, n] * gae_lambda) * delta
                if ends[i, n]:
                    break
    return out


@pytest.mark.slow
@pytest.mark.parametrize("function", functions)
@given(st.integers(1, 25), st.integers(1, 5), shares, shares, seeds)
def test_advantages_are_those_of_equation_16(function, steps, columns, gamma, gae_lambda, seed) -> None:
    inputs = problem(steps, columns, seed)
    advantage, ret = solve(function, *inputs, gamma, gae_lambda)
    expected = reference(*inputs, gamma, gae_lambda)
    scale = np.abs(inputs[0]).max() + np.abs(inputs[1]).max()
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose(ret, expected + inputs[1], rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("function", functions)
def test_lambda_1_gives_the_discounted_return_less_the_value(function) -> None:
    r, value = np.ones((4, 1)), np.full((4, 1), 0.25)
    ends = np.array([[0], [0], [0], [TERMINATED]], np.uint8)
    advantage, ret = solve(function, r, value, np.roll(value, -1), ends, NO_DISCOUNTS, 0.5, 1.0)
    assert ret[:, 0].tolist() == [1.875, 1.75, 1.5, 1.0]
    assert advantage[:, 0].tolist() == [1.625, 1.5, 1.25, 0.75]


@pytest.mark.parametrize("function", functions)
def test_what_is_rounded_is_the_float64_sum(function) -> None:
    # 1 + 2^-24 + 2^-24 rounds to 1 if each sum is rounded, and to 1 + 2^-23 if their end is.
    r = np.array([[1.0], [2.0**-24], [2.0**-24]])
    ends = np.array([[0], [0], [TERMINATED]], np.uint8)
    advantage, _ = solve(function, r, np.zeros((3, 1)), np.zeros((3, 1)), ends, NO_DISCOUNTS, 1.0, 1.0)
    assert advantage[0, 0] == np.float32(1 + 2.0**-23)


@given(st.integers(1, 30), st.integers(1, 9), shares, shares, seeds)
def test_the_kernel_does_what_its_twin_does(steps, columns, gamma, gae_lambda, seed) -> None:
    inputs = problem(steps, columns, seed)
    fast, plain = (solve(function, *inputs, gamma, gae_lambda) for function in KERNELS["gae"])
    for one, other in zip(fast, plain, strict=True):
        np.testing.assert_array_equal(one, other)
