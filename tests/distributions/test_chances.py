"""Ids that a view does not know have no chance, whichever distribution is asked; samplers do not ask of these."""

from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.distributions.growing import everything, grown, population_of

PARTS: Any = [(dr.Prioritized, 1), (dr.Uniform, 1), (lambda: dr.Recency(20), 1), (lambda: dr.Sweep(passes=None), 1)]
DISTRIBUTIONS = {
    "uniform": dr.Uniform,
    "sweep": dr.Sweep,
    "recency": lambda: dr.Recency(20),
    "prioritized": dr.Prioritized,
    "by episode": dr.Stratified,
    "by task": lambda: dr.Stratified("episode/task"),
    "mixture": lambda: dr.Mixture([(make(), share) for make, share in PARTS]),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_ids_that_a_view_does_not_know_have_no_chance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskreplay.distributions.priorities.FIRST_PAGES", 1)
    store, distribution = grown(1, [[20, 19]], [26]), DISTRIBUTIONS[name]()
    store.values = {0: 7, 21: 7}
    # The first page of priorities is full: it ends with id 63, the newest one with three steps behind it.
    population = population_of(store, dr.Transitions(3))
    ids, unknown = everything(population), [20, 40, 64, 66, 67, 1 << 35, 1 << 50, 1 << 62, -1, -1 << 40]
    assert ids.tolist() == [*range(20), *range(21, 40), *range(41, 64)]
    for hidden in (0, 7, 25):
        store.frontier = hidden
        population.refresh(store.snapshot())
        found = distribution.chances(population, np.append(ids, unknown))
        assert found.sum() == pytest.approx(1)
        assert (found[: len(ids)][(ids >= hidden) & (ids < 40)] > 0).all()
        assert not found[: len(ids)][ids < hidden].any()
        assert not found[len(ids) :].any()
