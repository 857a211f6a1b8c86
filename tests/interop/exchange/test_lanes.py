"""Lanes of flat buffers: the order of rings, where episodes end, and which lane each was in."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from diskreplay import FormatError
from diskreplay.interop.exchange import lanes
from diskreplay.interop.exchange.lanes import breaks, differ, ring_order, with_final

NUMBERS = ["?", "u1", "i1", "i4", ">i4", "i8", "u8", "f2", "f4", ">f4", "f8", ">f8"]


def test_a_lane_breaks_where_a_step_does_not_lead_to_the_next_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    obs = np.zeros((6, 2, 3), np.float32)
    obs[:, 0, 0], obs[:, 1, 0] = range(6), range(10, 16)
    obs[2, 0, 1] = np.nan  # a NaN that stays is the same
    next_obs = np.roll(obs, -1, 0)
    next_obs[3, 1, 2] = 1
    expected = np.zeros((6, 2), bool)
    expected[3, 1] = True
    for block_bytes in (1, 100, 8 << 20):
        monkeypatch.setattr(lanes, "_BLOCK_BYTES", block_bytes)
        np.testing.assert_array_equal(breaks([obs], [next_obs], np.arange(6)), expected)
    rolled = ring_order(6, 2, is_full=True)
    np.testing.assert_array_equal(
        breaks([np.roll(obs, 2, 0)] * 2, [np.roll(next_obs, 2, 0)] * 2, rolled), expected, "in the order of time"
    )
    assert breaks([obs], [next_obs], rolled[:0]).shape == (0, 2)


def is_different(one: list[float], other: list[float], rounded: str | None) -> bool:
    """The rule of `differ` for a row: Python's numbers, then whether one row is the rounding of the other."""

    def same(a: list[float], b: list[float]) -> bool:
        return all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))

    if same(one, other):
        return False
    if rounded is None:
        return True
    with np.errstate(over="ignore"):
        low, lower = (np.array(row, "f8").astype(rounded).tolist() for row in (one, other))
    return not (same(low, lower) and (same(low, one) or same(lower, other)))


@given(
    values=st.lists(
        st.tuples(*[st.sampled_from([0.0, -0.0, 1.0, 1 / 3, float(np.float32(1 / 3)), 3.0, np.nan, np.inf])] * 4),
        min_size=1,
        max_size=6,
    ),
    first=st.sampled_from(NUMBERS),
    second=st.sampled_from(NUMBERS),
)
def test_observations_are_compared_by_value_whatever_their_dtypes(
    values: list[tuple[float, ...]], first: str, second: str
) -> None:
    with np.errstate(invalid="ignore"):
        one, other = (
            np.array(values, "f8")[:, part].astype(dtype) for part, dtype in ((slice(2), first), (slice(2, 4), second))
        )
    floats = [dtype for dtype in (one.dtype, other.dtype) if dtype.kind == "f"]
    narrow = min((dtype.newbyteorder("=") for dtype in floats), key=lambda dtype: dtype.itemsize, default=None)
    rounded = None if narrow is None else "f4" if len(floats) == 2 and narrow == "f8" else narrow.str
    expected = [is_different(*rows, rounded) for rows in zip(one.tolist(), other.tolist(), strict=True)]
    assert differ(one, other).tolist() == expected
    assert differ(other, one).tolist() == expected
    assert not differ(one, one).any()


def test_large_whole_numbers_are_told_apart_and_rows_without_values_are_equal() -> None:
    big = np.array([[2**63 + 1], [2**62 + 1]], "u8")
    assert differ(big, big.astype("i8")).tolist() == [True, False]
    assert differ(big, big - 1).all()
    assert differ(np.zeros((3, 0), "f4"), np.zeros((3, 0), "f8")).tolist() == [False] * 3
    assert differ(np.zeros((0, 2)), np.zeros((0, 2))).shape == (0,)


def test_a_final_observation_takes_the_dtype_of_the_others_if_that_holds_it() -> None:
    obs, third = np.zeros((2, 1), "f4"), np.array([[1 / 3]])
    found = with_final(obs, third, "next")
    assert (found.dtype, found.tolist()) == (np.float32, [[0], [0], [np.float32(1 / 3)]])
    assert with_final(obs.astype("i4"), np.array([[7.0]], ">f8"), "next").tolist() == [[0], [0], [7]]
    with pytest.raises(FormatError, match="^next has int64 values that uint8, the dtype of the observations, cannot"):
        with_final(obs.astype("u1"), np.array([[300]]), "next")
    with pytest.raises(FormatError, match=r"^observations have the shape \(6, 1\), and next ones \(6, 2\)$"):
        breaks([np.zeros((6, 1))], [np.zeros((6, 2))], np.arange(6))
