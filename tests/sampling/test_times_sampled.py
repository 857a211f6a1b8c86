"""Samplers with `max_times_sampled`: on stores that grow and evict, among ranks, saved and loaded."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from tests.sampling.test_sampler_states import (
    DISTRIBUTIONS as ALL,
    VIEWS,
    bits,
    collected,
    learn,
    map_all,
    through_torch,
)

pytestmark = pytest.mark.usefixtures("threads_make_all")

NAMES = ("uniform", "prioritized", "recency", "by episode", "by task")
DISTRIBUTIONS = {name: ALL[name] for name in NAMES} | {
    "mixture": lambda: dr.Mixture([(dr.Uniform(), 0.5), (dr.Prioritized(), 0.5)])
}


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("view", ["transitions", "sequences", "episodes"])
def test_no_id_comes_more_often_and_a_saved_sampler_goes_on(
    tmp_store: Path, view: str, name: str, prefetch: int
) -> None:
    found, number = Counter[int](), 0
    with collected(tmp_store, 60, capacity=300, segment_steps=90) as (store, collector):

        def made() -> Any:
            return dr.Sampler(
                store, VIEWS[view](), DISTRIBUTIONS[name](), batch_size=8, prefetch=prefetch, seed=5,
                max_times_sampled=2,
            )  # fmt: skip

        one, waited = made(), 0
        for _ in range(120):
            try:
                batch = one.sample()
            except dr.NotEnoughData:
                waited += 1
                collector.grow(6)
                map_all(store)
                continue
            found.update(batch.index.tolist())
            learn(one, batch, number)
            number += 1
        assert waited > 3
        assert max(found.values()) == 2
        one.save("run")
        others = [made(), made()]
        others[0].load("run")
        others[1].load_state_dict(through_torch(one.state_dict()))
        for _ in range(15):
            try:
                batches = [sampler.sample() for sampler in (one, *others)]
            except dr.NotEnoughData:
                for sampler in others:
                    with pytest.raises(dr.NotEnoughData):
                        sampler.sample()
                collector.grow(6)
                map_all(store)
                continue
            assert bits(batches[1]) == bits(batches[0]) == bits(batches[2])
            found.update(batches[0].index.tolist())
            for sampler, batch in zip((one, *others), batches, strict=True):
                learn(sampler, batch, number)
            number += 1
        assert max(found.values()) == 2
        for sampler in (one, *others):
            sampler.close()


def test_counts_stay_when_view_and_distribution_are_set(tmp_store: Path) -> None:
    with collected(tmp_store, 40) as (store, _):
        sampler = dr.Sampler(store, VIEWS["transitions"](), batch_size=8, prefetch=3, seed=0, max_times_sampled=1)
        found: list[int] = []
        for distribution in (dr.Uniform(), dr.Prioritized(), dr.Recency(30)):
            sampler.distribution = distribution
            for _ in range(3):
                found += sampler.sample().index.tolist()
            sampler.view = VIEWS["sequences"]()  # another kind of id: counted apart
            sampler.sample()
            sampler.view = VIEWS["transitions"]()
        assert len(set(found)) == len(found) == 72


@pytest.mark.parametrize(
    ("view", "distribution"),
    [
        ("rollouts", None),
        ("transitions", dr.Sweep()),
        ("episodes", dr.Mixture([(dr.Sweep(None), 1), (dr.Uniform(), 1)])),
    ],
)
def test_what_has_a_number_of_times_of_its_own_takes_no_other(tmp_store: Path, view: str, distribution: Any) -> None:
    with collected(tmp_store, 10) as (store, _):
        with pytest.raises(ValueError, match="^max_times_sampled does not apply to .*: leave it out$"):
            dr.Sampler(store, VIEWS[view](), distribution, max_times_sampled=3)
        sampler = dr.Sampler(store, VIEWS["transitions"](), max_times_sampled=3, batch_size=4)
        before = sampler.view, sampler.distribution
        with pytest.raises(ValueError, match="^max_times_sampled does not apply to .*: leave it out$"):
            setattr(sampler, *(("view", VIEWS[view]()) if distribution is None else ("distribution", distribution)))
        assert (sampler.view, sampler.distribution) == before
        assert sampler.sample().batch_size == 4


def test_a_state_from_before_counts_starts_at_zero(tmp_store: Path) -> None:
    with collected(tmp_store, 20) as (store, _):
        plain = dr.Sampler(store, VIEWS["transitions"](), batch_size=8, seed=0)
        plain.sample()
        sampler = dr.Sampler(store, VIEWS["transitions"](), batch_size=8, seed=0, max_times_sampled=1)
        state = plain.state_dict()
        sampler.load_state_dict(state)
        assert sampler.sample().batch_size == 8
        del state["planner"]["times"]
        sampler.load_state_dict(state)
        assert sampler.sample().batch_size == 8


def test_an_interrupt_and_a_lost_segment_count_nothing(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskreplay.distributions.restricted._OVERDRAWS", (1,))  # and then from a list of what is left
    with collected(tmp_store, 20) as (store, _):
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0, prefetch=0, max_times_sampled=1)
        reader: Any = sampler._makers.gatherer.reader
        found = Counter[int]()
        fill, raised = reader.fill, [KeyboardInterrupt(), dr.SegmentGone("gone"), ValueError("damaged")]

        def failing(*args: Any) -> None:
            error = raised.pop() if raised and len(found) == len(store) - 1 else None
            if error is not None:
                raise error
            fill(*args)

        reader.fill = failing
        while True:
            try:
                found.update(sampler.sample(1).index.tolist())
            except dr.NotEnoughData:
                break
            except (KeyboardInterrupt, ValueError):
                continue
        assert not raised
        assert len(found) == len(store)
        assert set(found.values()) == {1}
