"""Samplers that end: how long they are, in the order of time too, and in a DataLoader."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import diskreplay as dr

pytestmark = pytest.mark.usefixtures("threads_make_all")

SCHEMA = dr.Schema(obs=dr.Field((), "int64"), action=dr.Field((), "int64"))
LANES = 3


def append(one: Any, several: Any, first: int, calls: int, rng: np.random.Generator) -> None:
    """Append steps whose action says in which order they were published; those of one call are alike."""
    for call in range(first, first + calls):
        ends = rng.random(LANES + 1) < 0.1
        if rng.random() < 0.5:
            one.append(0, call, 0.0, bool(ends[LANES]), next_obs=0)
        obs, mask = np.zeros(LANES, np.int64), rng.random(LANES) < 0.6
        several.append(obs, obs + call, np.zeros(LANES), ends[:LANES], ends[:LANES] < 0, next_obs=obs, mask=mask)


@pytest.fixture
def store(tmp_store: Path) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    with (
        dr.create(tmp_store, SCHEMA, segment_steps=40) as store,
        store.writer() as one,
        store.writer(LANES) as several,
    ):
        append(one, several, 0, 120, rng)
        store.refresh()
        yield store


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("order", ["random", "time"])
def test_one_pass_gives_every_id_once_and_its_len_counts_down(store: Any, order: str, prefetch: int) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), dr.Sweep(order=order), batch_size=32, seed=0, prefetch=prefetch)
    with sampler:
        batches, left = [], [len(sampler)]
        for batch in sampler:
            batches.append(batch)
            left.append(len(sampler))
        assert left == list(range(len(batches), -1, -1))
        assert sampler  # though none is left
    ids = np.concatenate([batch.index.numpy() for batch in batches])
    assert len(set(ids.tolist())) == len(ids) == len(store) > 250
    assert [batch.batch_size for batch in batches[:-1]] == [32] * (len(batches) - 1)
    published = np.concatenate([batch.action.numpy() for batch in batches])
    assert (np.diff(published) >= 0).all() == (order == "time")


@pytest.mark.slow
@pytest.mark.parametrize("view", [dr.Transitions(3), dr.Sequences(5, 2, pad=False), dr.Episodes()], ids=str)
@pytest.mark.parametrize(("block", "piece"), [(1 << 16, 1 << 12), (7, 3), (1, 1)])
def test_items_of_any_view_come_oldest_first_and_ranks_keep_to_their_share(
    store: Any, view: Any, block: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskreplay.distributions.sweep._SORTED_AT_ONCE", block)
    monkeypatch.setattr("diskreplay.distributions.sweep._PIECE", piece)
    every: list[int] = []
    for rank in range(2):
        sweep = dr.Sweep(passes=2, order="time")
        with dr.Sampler(store, view, sweep, batch_size=16, rank=rank, world_size=2) as sampler:
            count, ids, batches = len(sampler), sampler.ids().tolist(), list(sampler)
        assert len(batches) == count > 0
        # Of steps of one time that with the least id comes first.
        assert [int(i) for batch in batches for i in batch.index] == ids + ids
        begins = np.concatenate([batch.action.numpy().reshape(batch.batch_size, -1)[:, 0] for batch in batches])
        assert (np.diff(begins[: len(ids)]) >= 0).all()
        every += ids
    assert len(set(every)) == len(every)
    with dr.Sampler(store, view, dr.Sweep(), batch_size=16) as sampler:
        assert sorted(every) == sorted(int(i) for batch in sampler for i in batch.index)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "time"])
def test_passes_follow_a_store_that_grows_and_loses_its_oldest_steps(tmp_store: Path, order: str) -> None:
    rng = np.random.default_rng(1)
    with (
        dr.create(tmp_store, SCHEMA, capacity=150, segment_steps=30) as store,
        store.writer() as one,
        store.writer(LANES) as several,
    ):
        append(one, several, 0, 100, rng)
        sampler = dr.Sampler(store, dr.Transitions(), dr.Sweep(passes=2, order=order), batch_size=40, seed=0)
        drawn = [int(i) for _ in range(2) for i in sampler.sample().index]
        append(one, several, 100, 20, rng)
        batches = len(sampler)
        rest = list(sampler)
        assert len(rest) == batches
        drawn += [int(i) for batch in rest for i in batch.index]
        counts = np.unique(drawn, return_counts=True)[1]
        now = dr.Sampler(store, dr.Transitions(), dr.Sweep(), batch_size=500, seed=0).sample().index.tolist()
        assert len(now) == len(store) == 150
        # Once more in the second pass: what is there is given, what was there before once more if it was given.
        assert set(now) <= set(drawn)
        assert counts.max() == 2


def test_an_endless_sampler_has_no_len(store: Any) -> None:
    for distribution in (dr.Uniform(), dr.Prioritized(), dr.Sweep(passes=None)):
        with dr.Sampler(store, dr.Transitions(), distribution, batch_size=16) as sampler:
            message = f"{sampler} never ends, so it has no len(): a sampler with dr.Sweep() has one"
            with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
                len(sampler)
            assert sampler


def test_an_empty_store_has_no_batches(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, dr.Sampler(store, dr.Transitions(), dr.Sweep()) as sampler:
        assert len(sampler) == 0
        with pytest.raises(dr.NotEnoughData):
            sampler.sample()


def test_a_data_loader_gives_the_batches_of_its_sampler_until_they_end(store: Any) -> None:
    def made() -> dr.Sampler:
        return dr.Sampler(store, dr.Transitions(), dr.Sweep(passes=2), batch_size=50, seed=3)

    with made() as plain, made() as loaded:
        loader = DataLoader(loaded, batch_size=None)
        assert len(loader) == len(plain)
        pairs = list(zip(plain, loader, strict=True))
    assert len(pairs) == -(-2 * len(store) // 50)
    for expected, batch in pairs:
        assert expected.index.tolist() == batch.index.tolist()
        assert expected.obs.tolist() == batch.obs.tolist()


def test_a_data_loader_of_an_endless_sampler_goes_on(store: Any) -> None:
    with dr.Sampler(store, dr.Transitions(), batch_size=8) as one:
        for sampler in (one, dr.MixedSampler([(one, 1.0)], batch_size=8)):
            loader = DataLoader(sampler, batch_size=None)
            assert [batch.batch_size for batch, _ in zip(loader, range(20), strict=False)] == [8] * 20
            with pytest.raises(TypeError):
                len(loader)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "time"])
@pytest.mark.parametrize("deleted", [False, True])
def test_a_resumed_pass_gives_what_is_left_of_batches_drawn_ahead_that_lost_ids(
    tmp_store: Path, order: str, deleted: bool
) -> None:
    rng = np.random.default_rng(1)
    with (
        dr.create(tmp_store, SCHEMA, capacity=150, segment_steps=20) as store,
        store.writer() as one,
        store.writer(LANES) as several,
    ):
        append(one, several, 0, 100, rng)

        def made() -> dr.Sampler:
            return dr.Sampler(store, dr.Transitions(), dr.Sweep(order=order), batch_size=10, seed=0, prefetch=4)

        with made() as sampler:
            began = sampler.ids().tolist()
            before = sampler.sample().index.tolist()
            ids = set(sampler.gather(before).index.tolist())
            sampler.save("run")
            state_of_plans = [plan.draw.ids.tolist() for plan in sampler._planner.queue]
        append(one, several, 100, 60 if deleted else 8, rng)
        with made() as sampler:
            sampler.load("run")
            rest = [int(i) for batch in sampler for i in batch.index]
        assert len(set(rest)) == len(rest)
        with dr.Sampler(store, dr.Transitions(), dr.Sweep(), batch_size=500) as every:
            now = set(every.sample().index.tolist())
        assert any(i not in now for plan in state_of_plans for i in plan)
        assert set(rest) == now.intersection(began) - ids


def test_another_view_of_the_same_ids_goes_on_with_the_pass(store: Any) -> None:
    with dr.Sampler(store, dr.Transitions(), dr.Sweep(), batch_size=20, seed=0, prefetch=3) as sampler:
        drawn = sampler.sample().index.tolist()
        count = len(sampler)
        sampler.view = dr.Transitions(frame_stack=2)
        assert len(sampler) == count
        rest = list(sampler)
    assert len(rest) == count
    drawn += [int(i) for batch in rest for i in batch.index]
    assert len(set(drawn)) == len(drawn) == len(store)
