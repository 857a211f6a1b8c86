"""A linear schedule goes from its start to its end and stays there."""

import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

import diskreplay as dr


@given(st.floats(-5, 5), st.floats(-5, 5), st.integers(1, 1_000), st.integers(0, 3_000))
def test_it_is_a_straight_line_and_then_flat(start: float, end: float, steps: int, batches: int) -> None:
    schedule = dr.Linear(start, end, steps)
    assert schedule(0) == start
    assert schedule(steps + batches) == end
    done = min(batches, steps)
    assert schedule(done) * steps == pytest.approx(start * (steps - done) + end * done, abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.4, 1.0, 0), "steps must be an int of at least 1, not 0"),
        ((0.4, 1.0, 2.0), "steps must be an int of at least 1, not 2.0"),
        ((0.4, 1.0, True), "steps must be an int of at least 1, not True"),
        (("a", 1.0, 2), "start must be a finite number, not 'a'"),
        ((0.4, float("inf"), 2), "end must be a finite number, not inf"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Linear(*arguments)
