from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.cli.report.charts import statistics_of, statistics_of_fields
from diskreplay.cli.report.sample import read_episodes, sample_steps


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float64"])
def test_numbers_are_described_by_all_their_elements(dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 5, (40, 3)).astype(dtype)
    found = statistics_of(values)
    assert (found.count, found.least, found.greatest) == (120, values.min(), values.max())
    assert found.mean == pytest.approx(values.astype("f8").mean())
    assert found.deviation == pytest.approx(values.astype("f8").std())
    assert found.zeros == pytest.approx((values == 0).mean())
    assert found.not_finite == 0
    assert found.histogram is not None
    assert found.histogram.sum() == 120


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    found = statistics_of(np.array([0.0, np.nan, 4.0, np.inf]))
    assert (found.least, found.mean, found.greatest, found.zeros, found.not_finite) == (0, 2, 4, 0.25, 0.5)
    nothing = statistics_of(np.full(3, np.nan))
    assert (nothing.mean, nothing.not_finite, nothing.histogram) == (None, 1.0, None)
    assert statistics_of(np.zeros(0)).count == 0


@pytest.mark.parametrize("value", [1e308, -1e308, 2.0**62, 1e-320, 1e17])
def test_the_largest_and_least_numbers_have_a_histogram(value: float) -> None:
    for values in ([value], [value, value], [value, -value], [0.0, value]):
        found = statistics_of(np.array(values))
        assert found.histogram is not None
        assert found.greatest == max(values)


def test_values_of_an_episode_that_has_just_left_are_not_counted(
    vectors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise dr.SegmentGone("segment 0 was evicted")

    with dr.open(vectors) as store:
        steps, episodes = sample_steps(store, None), read_episodes(store, None, lambda done, total: None)
        monkeypatch.setattr(type(store.snapshot), "episode_values", gone)
        found = {path: each.count for path, _, each in statistics_of_fields(store, steps, episodes)}
    assert found["episode/policy"] == 0
