"""Batches that are refused where a store has fewer ids than items, as one from which another process evicts steps."""

from typing import Any

import pytest

import diskreplay as dr
from diskreplay.distributions.base import Distinct
from diskreplay.distributions.prioritized import PrioritizedOfEnough


@pytest.mark.parametrize("distribution", [Distinct(), PrioritizedOfEnough(alpha=0.6, beta=0.4)], ids=repr)
def test_too_few_ids_are_refused_with_both_numbers(grown: Any, distribution: Any) -> None:
    sampler = grown([[4], [3]]).sampler(distribution, fields=("index",))
    assert sampler.sample(7).batch_size == 7
    with pytest.raises(dr.NotEnoughData, match="^7 steps are sampleable, and a batch of 8 needs 8: add more$"):
        sampler.sample(8)
