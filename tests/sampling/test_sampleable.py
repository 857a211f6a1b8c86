"""How many ids a sampler can draw now, and which: against the episodes of a model, over writers, ranks and views."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.testing.model import ModelEpisode
from diskreplay.testing.reference import window_starts
from tests.testing.collected import SCHEMA, Collected

VIEWS: dict[Any, Any] = {
    dr.Transitions(): lambda episode: episode.sampleable(1),
    dr.Transitions(n_step=3): lambda episode: episode.sampleable(3),
    dr.Transitions(n_step=None): lambda episode: episode.sampleable(None),
    dr.Sequences(8, 4): lambda episode: window_starts(episode, 8, 4),
    dr.Sequences(5, 2, pad=False): lambda episode: window_starts(episode, 5, 3, pad=False),
    dr.Episodes(): lambda episode: [0] if episode.ended and not episode.hidden and episode.window_end else [],
}


@pytest.fixture(params=[None, 150], ids=["unbounded", "capacity 150"])
def collected(tmp_store: Path, request: Any) -> Any:
    with dr.create(tmp_store, SCHEMA, capacity=request.param, segment_steps=40) as store:
        yield Collected(store, np.random.default_rng(0))


@pytest.mark.slow
def test_the_ids_are_those_of_the_model_while_the_store_grows_and_evicts(collected: Any) -> None:
    compared = 0
    samplers = {view: dr.Sampler(collected.store.path, view) for view in VIEWS}
    for number in range(6):
        if number == 5:
            collected.close()
        else:
            collected.append(30)
        collected.trim(150)
        for view, sampler in samplers.items():
            expected = collected.ids(VIEWS[view])
            assert sampler.sampleable == len(expected)
            found = sampler.ids()
            assert (found.dtype, found.tolist()) == (np.int64, expected)
            compared += len(expected)
    assert compared > 2500
    for sampler in samplers.values():
        sampler.close()


def test_an_empty_store_has_none(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, dr.Sampler(store, dr.Transitions()) as sampler:
        assert sampler.sampleable == 0
        assert sampler.ids().tolist() == []
        with store.writer() as writer:
            for _ in range(10):
                writer.append(np.zeros(1, "f4"), 0, 0.0, False, serial=0, value=0.0, bonus=0.0)
            assert len(store) == 0
            assert (sampler.sampleable, len(sampler.ids()), len(store)) == (9, 9, 10)


def test_without_refresh_it_looks_for_nothing_new(collected: Any) -> None:
    with dr.Sampler(collected.store.path, dr.Transitions(), refresh=False) as sampler:
        collected.append(5)
        assert sampler.sampleable == 0


@pytest.mark.slow
def test_ranks_share_the_ids_and_where_leaves_some_out(collected: Any) -> None:
    collected.append(100)
    collected.close()
    collected.trim(150)

    def is_long(episode: dr.Episode | ModelEpisode) -> bool:
        return len(episode.steps if isinstance(episode, ModelEpisode) else episode) > 8  # hidden steps too

    kwargs: Any = {"batch_size": 64, "seed": 0, "where": is_long}
    expected = collected.ids(VIEWS[dr.Transitions()], is_long)
    ranks = [dr.Sampler(collected.store, dr.Transitions(), rank=r, world_size=3, **kwargs) for r in range(3)]
    ids = [rank.ids().tolist() for rank in ranks]
    assert [rank.sampleable for rank in ranks] == list(map(len, ids))
    assert min(map(len, ids)) > len(expected) // 5 > 5
    assert sorted(ids[0] + ids[1] + ids[2]) == sorted(expected)
    order = {step_id: place for place, step_id in enumerate(expected)}
    for rank, mine in zip(ranks, ids, strict=True):
        assert mine == sorted(mine, key=order.__getitem__)
        drawn = {i for _ in range(40) for i in rank.sample().index.tolist()}
        assert drawn == set(mine)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [{}, {"rank": 1, "world_size": 2}], ids=["alone", "a rank"])
def test_those_that_were_sampled_often_enough_do_not_count(collected: Any, rank: Any) -> None:
    collected.append(40)
    kwargs: Any = {"batch_size": 20, "seed": 0, "max_times_sampled": 2, **rank}
    with dr.Sampler(collected.store, dr.Transitions(), **kwargs) as sampler:
        left, total = sampler.sampleable, 0
        every = sampler.ids().tolist()
        times = dict.fromkeys(every, 0)
        while True:
            try:
                drawn = sampler.sample()
            except dr.NotEnoughData:
                break
            for step_id in drawn.index.tolist():
                times[step_id] += 1
            total += 20
            left = sampler.sampleable
            assert sampler.ids().tolist() == [step_id for step_id in every if times[step_id] < 2]
            assert left == sum(count < 2 for count in times.values())
        assert 2 * len(every) - 20 < total <= 2 * len(every)


def test_of_rollouts_the_steps_count_that_were_not_given(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer(num_envs=3) as writer:

        def append(steps: int) -> None:
            for _ in range(steps):
                obs, zeros = np.zeros((3, 1), "f4"), np.zeros(3)
                extra = {"serial": zeros.astype(int), "value": zeros, "bonus": zeros}
                writer.append(obs, zeros.astype(int), zeros, zeros > 0, zeros > 0, obs, **extra)

        append(10)
        with dr.Sampler(store, dr.Rollouts(4, next_value="value")) as sampler:
            every = sampler.ids().tolist()
            assert sampler.sampleable == len(every) == 30
            given = sampler.sample().index.numpy().ravel().tolist()
            assert given == every[:12]
            assert (sampler.sampleable, sampler.ids().tolist()) == (18, every[12:])
            append(1)
            assert (sampler.sampleable, len(sampler.ids())) == (21, 21)
            with dr.Sampler(store, dr.Rollouts(4, next_value="value"), rank=1, world_size=2) as rank:
                assert rank.sampleable == 11
