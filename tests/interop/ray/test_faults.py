"""Shards that are silent, die, or are restarted under a trainer's hands."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.interop.ray.in_process import Calls, InProcess, ShardedSampler, make_stores


def made(shards: InProcess, distribution: Any = None, **arguments: Any) -> ShardedSampler:
    return ShardedSampler(shards, dr.Transitions(), distribution, batch_size=32, seed=3, **arguments)


def test_a_silent_shard_is_waited_for_once_and_the_batch_is_whole(tmp_path: Path) -> None:
    with InProcess(make_stores(tmp_path, (20, 20, 20))) as shards, made(shards, deadline_s=60.0) as sampler:
        shards.handles[1].silent = True
        shards.down.add(1)
        for _ in range(20):
            batch = sampler.sample()
            assert batch.index.shape == (32, 2)
            assert set(batch.index[:, 0].tolist()) == {0, 2}
        assert isinstance(shards.calls, Calls)
        assert shards.calls.waits == [60.0]
        stats = sampler.stats()
        assert stats["missing"] == [1]
        assert stats["shards"][1]["missing"] == "silent for 60 s"
        assert stats["redrawn"] > 0
        assert stats["population"] == 40


def test_batches_asked_for_ahead_are_completed_by_the_others(tmp_path: Path) -> None:
    with InProcess(make_stores(tmp_path, (20, 20, 20))) as shards, made(shards, prefetch=6, deadline_s=60.0) as sampler:
        sampler.sample()
        shards.handles[2].silent = True
        shards.down.add(2)
        sizes = [len(sampler.sample()["index"]) for _ in range(20)]
        assert sizes == [32] * 20
        assert isinstance(shards.calls, Calls)
        assert len(shards.calls.waits) == 1


def test_a_shard_that_was_silent_is_back_when_it_answers(tmp_path: Path) -> None:
    with InProcess(make_stores(tmp_path, (20, 20))) as shards, made(shards) as sampler:
        shards.handles[1].silent = True
        shards.down.add(1)
        assert set(sampler.sample().index[:, 0].tolist()) == {0}
        shards.answer_again(1)
        while sampler.stats()["missing"]:
            sampler.sample()
        assert sampler.sampleable == 40
        assert set(sampler.sample().index[:, 0].tolist()) == {0, 1}


def test_without_any_shard_a_draw_waits_for_one_and_says_why_it_gave_up(tmp_path: Path) -> None:
    with InProcess(make_stores(tmp_path, (20,))) as shards, made(shards) as sampler:
        sampler._rounds._patience_s = 0.1
        shards.handles[0].silent = True
        shards.down.add(0)
        with pytest.raises(
            dr.ReplayError, match=r"^no shard has answered for 0\.1 s; the error of the first shard: silent for 0\.5 s$"
        ):
            sampler.sample()
        shards.answer_again(0)
        sampler._rounds._patience_s = 60.0
        assert len(sampler.sample()["index"]) == 32


def test_updates_of_a_missing_shard_are_counted_as_lost(tmp_path: Path) -> None:
    late = {"update_age_s": 3600.0}  # a thread sends none of them meanwhile
    with InProcess(make_stores(tmp_path, (20, 20))) as shards, made(shards, dr.Prioritized(), **late) as sampler:
        ids = sampler.ids()
        shards.handles[1].silent = True
        shards.down.add(1)
        sampler.sample()
        assert sampler.update_priorities(ids, np.ones(40)) == 20
        sampler.sample()  # where 0.1 s have passed, a request for the mass takes them along
        sampler.sample()  # whose answer is taken here
        stats = sampler.stats()
        assert (stats["updates_sent"], stats["updates_lost"]) == (20, 20)


def test_updates_that_no_draw_takes_along_are_sent_after_their_age(tmp_path: Path) -> None:
    often = {"update_age_s": 0.02}
    with InProcess(make_stores(tmp_path, (20,))) as shards, made(shards, dr.Prioritized(1.0, 0.0), **often) as sampler:
        sampler.update_priorities(sampler.ids(), np.full(20, 7.0))
        shard = shards.handles[0].shard
        assert shard is not None
        while shard._shared["default"].updates == 0:
            sampler._end.wait(0.01)
        with sampler._lock:
            assert shard._shared["default"].mass()[0] == pytest.approx(140.0, rel=1e-5)


def test_closing_sends_the_updates_that_wait(tmp_path: Path) -> None:
    with InProcess(make_stores(tmp_path, (20,))) as shards:
        with made(shards, dr.Prioritized(1.0, 0.0), update_age_s=3600.0) as sampler:
            sampler.update_priorities(sampler.ids(), np.full(20, 7.0))
        with made(shards, dr.Prioritized(1.0, 0.0)) as other:
            assert other.stats()["priority_sum"] == pytest.approx(140.0, rel=1e-5)


def test_an_error_of_a_shard_is_the_trainer_s(tmp_path: Path) -> None:
    with InProcess(make_stores(tmp_path, (20, 20))) as shards, made(shards) as sampler:
        shard = shards.handles[0].shard
        assert shard is not None
        assert shard._store is not None
        shard._store.close()
        with pytest.raises(dr.Closed):
            sampler.sample()


def test_a_shard_whose_steps_are_gone_is_no_longer_drawn_from(tmp_path: Path) -> None:
    paths = make_stores(tmp_path, (20, 20))
    with InProcess(paths) as shards, made(shards) as sampler:
        sampler.sample()
        with dr.open(paths[0], "a") as store:
            store.evict(lambda episode: True)
        for _ in range(3):
            assert set(sampler.sample().index[:, 0].tolist()) == {1}
        assert sampler.stats()["missing"] == []


def test_empty_shards_are_not_enough_data(tmp_path: Path) -> None:
    with InProcess(make_stores(tmp_path, (0, 0))) as shards, made(shards) as sampler:
        message = r"^2 shards have 0 steps sampleable as Transitions\(.*\); 1 is needed$"
        with pytest.raises(dr.NotEnoughData, match=message):
            sampler.sample()


def test_the_first_handle_of_an_actor_is_kept_since_it_ends_with_it(tmp_path: Path) -> None:
    class SameActor(InProcess):
        def make_actor(self, shard: int) -> Any:
            return Handle(super().make_actor(shard))

    class Handle:
        def __init__(self, actor: Any) -> None:
            self.actor = actor

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Handle) and other.actor is self.actor

        __hash__ = None  # type: ignore[assignment]

    with SameActor(make_stores(tmp_path, (4,))) as shards:
        first = shards.actor(0)
        shards.renew(0)
        assert shards.actor(0) is first
        shards.kill(0)
        shards.renew(0)
        assert shards.actor(0) is not first
