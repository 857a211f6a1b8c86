"""Powers and weights against arithmetic of higher precision, and against their twins."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.kernels.pairs import KERNELS

seeds = st.integers(0, 2**32 - 1)
exponents = st.floats(0, 6) | st.sampled_from((0.0, 0.4, 0.5, 0.6, 1.0, 1e300))
kinds = [pytest.param(1, id="plain"), pytest.param(0, id="compiled")]


def power(kind: int, values: list[float], exponent: float, low: float = -1022.0, high: float = 1023.0) -> list[float]:
    out = np.full(len(values), np.nan)
    KERNELS["powers"][kind](np.array(values), exponent, low, high, np.empty(len(values)), out)
    return out.tolist()


@pytest.mark.parametrize("kind", kinds)
@given(st.floats(0, 6), seeds)
def test_powers_of_numbers_of_any_size(kind: int, exponent: float, seed: int) -> None:
    values = (10.0 ** np.random.default_rng(seed).uniform(-300, 300, 50)).tolist()
    for value, found in zip(values, power(kind, values, exponent, -600.0, 600.0), strict=True):
        want = min(max(exponent * math.log2(value), -600.0), 600.0)
        assert math.log2(found) == pytest.approx(want, abs=1e-12, rel=1e-14)


@pytest.mark.parametrize("kind", kinds)
@given(st.integers(0, 5), seeds)
def test_whole_powers_of_common_numbers_are_off_by_few_units_in_the_last_place(
    kind: int, exponent: int, seed: int
) -> None:
    values = (10.0 ** np.random.default_rng(seed).uniform(-6, 3, 20)).tolist()
    for value, found in zip(values, power(kind, values, float(exponent)), strict=True):
        exact = Fraction(value) ** exponent
        bits = abs(exponent * math.log2(value))
        assert abs(Fraction(found) / exact - 1) < (3 + bits) * 2.0**-52


@pytest.mark.parametrize("kind", kinds)
def test_powers_of_one_of_two_and_to_nothing_are_exact(kind: int) -> None:
    assert power(kind, [1.0, 1e-300, 5.0], 0.0) == [1.0, 1.0, 1.0]
    assert power(kind, [1.0, 1.0], 0.6) == power(kind, [1.0, 1.0], 1e300) == [1.0, 1.0]
    assert power(kind, [2.0, 0.25, 2.0**-1000], 1.0) == [2.0, 0.25, 2.0**-1000]
    assert power(kind, [3.0, 0.1], 1e300, -963.0, 963.0) == [2.0**963, 2.0**-963]
    assert power(kind, [], 0.6) == []


@pytest.mark.parametrize("kind", kinds)
@given(st.floats(0, 4), seeds, st.booleans())
def test_weights_are_shares_of_the_smallest_chance(kind: int, exponent: float, seed: int, of_all: bool) -> None:
    chances = 10.0 ** np.random.default_rng(seed).uniform(-20, 0, 50)
    least = chances.min() / 3 if of_all else 0.0
    found = np.zeros(50, np.float32)
    KERNELS["weights"][kind](chances, least, exponent, np.empty((3, 50)), found)
    np.testing.assert_allclose(found, ((least or chances.min()) / chances) ** exponent, rtol=1e-6, atol=1e-37)
    assert found.max() <= 1.0
    assert of_all or found[chances.argmin()] == 1.0


@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("missing", [np.nan, -np.nan])
def test_a_chance_that_is_no_number_leaves_the_other_weights_alone(kind: int, missing: float) -> None:
    found = np.zeros(3, np.float32)
    KERNELS["weights"][kind](np.array([0.1, missing, 0.2]), 0.0, 1.0, np.empty((3, 3)), found)
    assert found[[0, 2]].tolist() == [1.0, 0.5]


@given(exponents, st.integers(0, 600), seeds)
def test_the_twins_agree_bit_for_bit(exponent: float, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = 10.0 ** rng.uniform(-300, 300, size)
    out = np.zeros((2, size))
    for kind in (0, 1):
        KERNELS["powers"][kind](values, exponent, -963.0, 963.0, np.empty(size), out[kind])
    np.testing.assert_array_equal(*out)
    chances, least = 10.0 ** rng.uniform(-300, 0, size), float(rng.choice((0.0, 1e-301, 5e-324)))
    weights = np.zeros((2, size), np.float32)
    for kind in (0, 1):
        KERNELS["weights"][kind](chances, least, exponent, np.empty((3, size)), weights[kind])
    np.testing.assert_array_equal(*weights)
