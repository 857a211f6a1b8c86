"""Each public view and distribution is in the tables by which tests run all of them."""

import inspect

import pytest

import diskreplay as dr
from diskreplay.distributions.base import Distribution
from diskreplay.views.base import View
from tests.kernels import test_starts
from tests.sampling import test_prefetcher, test_sampler_states
from tests.views import test_page_ranges, test_requested

TABLES = [
    (View, test_sampler_states, [make() for make in test_sampler_states.VIEWS.values()], set[type]()),
    (View, test_starts, test_starts.VIEWS, set[type]()),
    (View, test_prefetcher, test_prefetcher.VIEWS, {dr.Rollouts}),  # not made ahead
    (View, test_page_ranges, test_page_ranges.VIEWS, {dr.Rollouts}),  # they request no pages
    (View, test_requested, test_requested.VIEWS, {dr.Rollouts}),  # their fields are tested by columns
    (Distribution, test_sampler_states, [make() for make in test_sampler_states.DISTRIBUTIONS.values()], set[type]()),
    (Distribution, test_prefetcher, [make() for make in test_prefetcher.DISTRIBUTIONS], set[type]()),
]


@pytest.mark.parametrize(("base", "module", "table", "without"), TABLES)
def test_no_public_class_is_missing_in_a_table(base: type, module: object, table: list[object], without: set[type]):
    public = {kind for name in dr.__all__ if inspect.isclass(kind := getattr(dr, name)) and base in kind.__mro__}
    assert len(public) > 3
    missing = public - without - set(map(type, table))
    assert missing == set(), f"add these to the table of {base.__name__}s in {module.__name__}"
