"""What a rate limiter counts of a store, by what it says when it refuses a batch."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

import diskreplay as dr


class Counted(NamedTuple):
    """Steps inserted ever, and those that are still there."""

    ever: int
    held: int


class LimiterCounts:
    """A sampler whose limiter refuses every batch, and says what it has counted. It follows the store as it changes."""

    def __init__(self, path: Path) -> None:
        limiter = dr.RateLimiter(1.0, 1 << 60, 0.0, name="counts", timeout=0.0)
        self._sampler = dr.Sampler(dr.open(path, "a"), dr.Transitions(), batch_size=1, limiter=limiter)

    def read(self) -> Counted:
        """Return the counts of now."""
        with pytest.raises(dr.RateLimited) as told:
            self._sampler.sample()
        (numbers,) = re.findall(r" (\d+) steps were inserted and 0 drawn; the store holds (\d+),", str(told.value))
        return Counted(*map(int, numbers))


def count_anew(path: Path) -> Counted:
    """Return what a limiter counts that was not there before."""
    return LimiterCounts(path).read()
