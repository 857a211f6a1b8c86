"""Advantages against the plain loop of the paper, and the kernel against its twin."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from diskreplay.ids import TERMINATED, TRUNCATED
from diskreplay.kernels.gathering import KINDS
from diskreplay.kernels.returns import SCRATCH_ROWS
from tests.kernels.pairs import KERNELS

seeds = st.integers(0, 2**32 - 1)
shares = st.sampled_from((0.0, 0.5, 0.9, 0.99, 1.0))
functions = [pytest.param(KERNELS["gae"][1], id="plain"), pytest.param(KERNELS["gae"][0], id="compiled")]
DTYPES = ("f2", "f4", "f8", "i1", "i4", "u2", "u8")


class Problem(NamedTuple):
    """The stored fields of a rollout, (steps, columns), and how its steps end; a summand comes with its weight."""

    value: np.ndarray
    next_value: np.ndarray | None
    discount: np.ndarray | None
    summands: list[tuple[np.ndarray, float]]
    ends: np.ndarray
    bootstraps: np.ndarray

    @classmethod
    def random(cls, steps: int, columns: int, seed: int) -> "Problem":
        """Make a problem; the bootstraps that are not to be read are NaN."""
        rng = np.random.default_rng(seed)

        def field(scale: float) -> np.ndarray:
            return (np.abs(rng.standard_normal((steps, columns))) * scale).astype(rng.choice(DTYPES))

        ends = rng.choice(
            np.array([0, 0, 0, TERMINATED, TRUNCATED, TERMINATED | TRUNCATED], np.uint8), (steps, columns)
        )
        is_read = ends & TRUNCATED != 0
        is_read[-1] = True
        bootstraps = np.where(is_read & (ends & TERMINATED == 0), 10 * rng.standard_normal((steps, columns)), np.nan)
        next_value, discount = (field(1.0) if rng.random() < 0.5 else None for _ in range(2))
        summands = [(field(30.0), float(rng.choice((1.0, -0.5)))) for _ in range(rng.integers(1, 4))]
        return cls(field(20.0), next_value, discount, summands, ends, bootstraps)

    @property
    def rewards(self) -> np.ndarray:
        """The weighted sums of the summands, in float64."""
        return np.sum([column.astype(np.float64) * weight for column, weight in self.summands], axis=0)

    def solve(self, function: Any, gamma: float, gae_lambda: float, wanted: tuple[bool, ...] = (True,) * 3) -> Any:
        """Return the rewards, the advantages and the returns as `function` computes them; 7 where it writes nothing."""
        lines = []
        for column, weight in [(self.value, 1.0), (self.next_value, 1.0), (self.discount, 1.0), *self.summands]:
            kind = (
                (0, 0, 0) if column is None else (column.ctypes.data, KINDS.index(column.dtype.kind), column.itemsize)
            )
            lines.append((*kind, int(np.float64(weight).view(np.int64))))
        found, scratch = np.full((3, *self.ends.shape), 7, np.float32), np.full((SCRATCH_ROWS, self.ends.shape[1]), 7.0)
        out = np.array([array.ctypes.data if some else 0 for array, some in zip(found, wanted, strict=True)])
        function(np.array(lines), self.ends, self.bootstraps, gamma, gae_lambda, scratch, out)
        return found


def reference(problem: Problem, gamma: float, gae_lambda: float) -> np.ndarray:
    """Sum (gamma * lambda)^l * delta_{t+l} forwards from each step, as equation 16 is written."""
    r, value, ends = problem.rewards, problem.value.astype(np.float64), problem.ends
    each = gamma * (np.ones(r.shape) if problem.discount is None else problem.discount.astype(np.float64))
    out = np.zeros(r.shape)
    for n in range(r.shape[1]):
        for t in range(len(r)):
            for i in range(t, len(r)):
                if ends[i, n] & TERMINATED:
                    bootstrap = 0.0
                elif ends[i, n] & TRUNCATED or i == len(r) - 1:
                    bootstrap = problem.bootstraps[i, n]
                elif problem.next_value is None:
                    bootstrap = value[i + 1, n]
                else:
                    bootstrap = float(problem.next_value[i, n])
                out[t, n] += np.prod(each[t:i, n] * gae_lambda) * (r[i, n] + each[i, n] * bootstrap - value[i, n])
                if ends[i, n]:
                    break
    return out


def made(r: Any, value: Any, ends: Any, bootstrap: float = 0.0) -> Problem:
    """Return a problem of one column."""
    r, value = (np.array(column, np.float64)[:, None] for column in (r, value))
    return Problem(value, None, None, [(r, 1.0)], np.array(ends, np.uint8)[:, None], np.full(r.shape, bootstrap))


@pytest.mark.slow
@pytest.mark.parametrize("function", functions)
@given(st.integers(1, 25), st.integers(1, 5), shares, shares, seeds)
def test_advantages_are_those_of_equation_16(function, steps, columns, gamma, gae_lambda, seed) -> None:
    problem = Problem.random(steps, columns, seed)
    reward, advantage, ret = problem.solve(function, gamma, gae_lambda)
    expected = reference(problem, gamma, gae_lambda)
    scale = max(1.0, np.abs(expected).max(), np.abs(problem.rewards).max(), np.abs(problem.value).max())
    np.testing.assert_array_equal(reward, problem.rewards.astype(np.float32))
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose(ret, expected + problem.value, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("function", functions)
def test_lambda_1_gives_the_discounted_return_less_the_value(function) -> None:
    problem = made(np.ones(4), np.full(4, 0.25), [0, 0, 0, TERMINATED])
    _, advantage, ret = problem.solve(function, 0.5, 1.0)
    assert ret[:, 0].tolist() == [1.875, 1.75, 1.5, 1.0]
    assert advantage[:, 0].tolist() == [1.625, 1.5, 1.25, 0.75]


@pytest.mark.parametrize("function", functions)
def test_what_is_rounded_is_the_float64_sum(function) -> None:
    # 1 + 2^-24 + 2^-24 rounds to 1 if each sum is rounded, and to 1 + 2^-23 if their end is.
    problem = made([1.0, 2.0**-24, 2.0**-24], np.zeros(3), [0, 0, TERMINATED])
    _, advantage, _ = problem.solve(function, 1.0, 1.0)
    assert advantage[0, 0] == np.float32(1 + 2.0**-23)


@given(st.integers(1, 30), st.integers(1, 9), shares, shares, st.tuples(*[st.booleans()] * 3), seeds)
def test_the_kernel_does_what_its_twin_does(steps, columns, gamma, gae_lambda, wanted, seed) -> None:
    problem = Problem.random(steps, columns, seed)
    fast, plain = (problem.solve(function, gamma, gae_lambda, wanted) for function in KERNELS["gae"])
    np.testing.assert_array_equal(fast, plain)
