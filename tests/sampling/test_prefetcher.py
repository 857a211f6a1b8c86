"""Batches that are made ahead: the same batches in the same order, by threads that leave nothing behind."""

import gc
import os
import pickle
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.conftest import own_threads
from tests.crash.injection import in_child
from tests.sampling.inner import WARM_BATCHES, disk_reads
from tests.testing.support import resident_pages, run_python

SCHEMA = dr.Schema(
    obs={"image": dr.Field((40, 40), "uint8"), "number": dr.Field((), "int64")},
    action=dr.Field((), "int64"),
    episode={"task": dr.Field((), "int64")},
)
VIEWS = (
    dr.Transitions(3, frame_stack={"image": 4}),
    dr.Transitions((1, 5), frame_stack={"image": 2}),
    dr.Sequences(length=20, overlap=10),
    dr.Sequences(length=9, stride=4, align="end"),
    dr.Sequences(length=20, stride=3, cross_episodes=True),
    dr.Episodes(),
)
ACROSS = dr.Sequences(length=6, stride=2, cross_episodes=True)


def append(writer: Any, first: int, steps: int) -> None:
    """Append an episode whose observations hold their numbers."""
    numbers = np.arange(first, first + steps + 1)
    images = np.broadcast_to((numbers % 251)[:, None, None], (steps + 1, 40, 40)).astype(np.uint8)
    obs, task = {"image": images, "number": numbers}, {"task": first // 100 % 3}
    writer.append_episode(obs, numbers[:-1], np.ones(steps, np.float32), terminated=True, episode=task)


@pytest.fixture
def store(tmp_store: Path) -> Any:
    with dr.create(tmp_store, SCHEMA, chunk_bytes=64 << 10, segment_steps=200) as store:
        with store.writer() as writer:
            for number in range(12):
                append(writer, 100 * number, 30 + 5 * number)
        yield store


def threads() -> set[str]:
    return {name.rsplit("_")[0] for name in own_threads()}


def contents(batch: dr.Batch) -> list[bytes]:
    def flat(tree: Any) -> list[bytes]:
        if isinstance(tree, dict):
            return [part for below in tree.values() for part in flat(below)]
        return [str(tree.shape).encode(), tree.tobytes()]

    return flat(batch.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("ahead", [1, 4])
def test_what_threads_make_is_what_the_caller_would_have_made(store: Any, view: Any, ahead: int) -> None:
    with (
        dr.Sampler(store, view, dr.Prioritized(), batch_size=128, seed=3) as plain,
        dr.Sampler(store, view, dr.Prioritized(), batch_size=128, seed=3, prefetch=ahead) as made_ahead,
    ):
        held = []
        for number in range(20):
            expected, batch = plain.sample(), made_ahead.sample()
            assert contents(expected) == contents(batch)
            held = [*held[-3:], (batch, contents(batch))]
            assert all(contents(old) == was for old, was in held)
            if number == 10:
                plain.gather(expected.index), made_ahead.gather(expected.index)
        assert threads() - {"diskreplay-copy"} == {"diskreplay-gather", "diskreplay-read"}
    assert threads() == set()


DISTRIBUTIONS = (
    dr.Uniform, dr.Prioritized, lambda: dr.Prioritized(normalize="store", stratified=False), lambda: dr.Recency(100),
    lambda: dr.Sweep(passes=None), lambda: dr.Sweep(passes=None, order="time"),
    dr.Stratified, lambda: dr.Stratified("episode/task"),
    lambda: dr.Mixture([(dr.Sweep(None), 0.5), (dr.Prioritized(), 0.5)]),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("threads_make_all")
@pytest.mark.parametrize("view", [dr.Transitions(2), dr.Sequences(length=5, overlap=2), ACROSS], ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda make: repr(make()))
@pytest.mark.parametrize("rank", [{}, {"rank": 1, "world_size": 2}], ids=["alone", "a rank"])
def test_what_is_drawn_ahead_is_what_would_have_been_drawn(
    store: Any, view: Any, distribution: Any, rank: dict[str, int]
) -> None:
    kwargs: Any = {"batch_size": 5, "seed": 3, "fields": ("obs/number", "action", "reward"), **rank}
    with (
        dr.Sampler(store, view, distribution(), **kwargs) as plain,
        dr.Sampler(store, view, distribution(), prefetch=3, debug=True, **kwargs) as ahead,
    ):
        if plain.distribution.weighted:
            for sampler in (plain, ahead):  # before anything is drawn: weights differ
                ids = sampler.ids()
                sampler.update_priorities(ids, np.random.default_rng(0).standard_normal(len(ids)))
        held = []
        for number in range(30):
            expected, batch = plain.sample(), ahead.sample()
            assert contents(expected) == contents(batch)
            held = [*held[-5:], (batch, contents(batch))]
            assert all(contents(old) == was for old, was in held)
            if number % 7 == 6:
                assert contents(plain.gather(expected.index)) == contents(ahead.gather(expected.index))
        assert len(set(expected.weight.tolist())) > 1 or not plain.distribution.weighted


@pytest.mark.usefixtures("threads_make_all")
def test_priorities_count_from_the_next_batch_that_is_drawn(store: Any) -> None:
    with dr.Sampler(store, dr.Transitions(), dr.Prioritized(alpha=1.0), batch_size=8, prefetch=3, seed=0) as sampler:
        batches = [sampler.sample()]
        only = batches[0].index[:1]
        everything = sampler.ids()
        sampler.update_priorities(everything, np.zeros(len(everything)))
        sampler.update_priorities(only, np.array([1e6]))
        batches += [sampler.sample() for _ in range(5)]
        alike = [set(batch.index.tolist()) == set(only.tolist()) for batch in batches]
        assert alike == [False] * 4 + [True] * 2


@pytest.mark.parametrize("size", [8, 1024])
def test_what_was_drawn_ahead_is_delivered_by_a_sampler_that_draws_nothing_ahead(store: Any, size: int) -> None:
    with (
        dr.Sampler(store, dr.Transitions(), batch_size=size, prefetch=8, seed=0) as ahead,
        dr.Sampler(store, dr.Transitions(), batch_size=size, seed=1) as plain,
    ):
        ahead.sample()
        plain.load_state_dict(ahead.state_dict())
        for _ in range(12):
            assert contents(plain.sample()) == contents(ahead.sample())
        assert threads() - {"diskreplay-copy"} == (set() if size == 8 else {"diskreplay-gather", "diskreplay-read"})
        ahead.close()
        assert threads() - {"diskreplay-copy"} == set()


@pytest.mark.usefixtures("threads_make_all")
def test_updates_of_batches_drawn_ahead_are_the_same_in_any_order(store: Any) -> None:
    """Their places are remembered batch by batch; an id's place found anew is the same."""
    found = []
    for shuffled in (False, True):
        errors = np.random.default_rng(0)
        with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=16, prefetch=3, seed=0) as sampler:
            batches = []
            for _ in range(12):
                index, error = sampler.sample().index.numpy(), errors.standard_normal(16)
                last = np.array([np.flatnonzero(index == one)[-1] for one in index])  # what counts of an id named twice
                order = np.roll(np.arange(16), 5) if shuffled else np.arange(16)
                assert sampler.update_priorities(index[order], error[last][order]) == 0
                batches.append(index.tolist())
            found.append(batches)
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize(("processors", "helps"), [(2, True), (1, False)])
def test_a_second_thread_copies_where_there_is_a_processor_for_it(
    store: Any, view: Any, processors: int, helps: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(processors)))
    # Two threads share a batch of 1 MiB or more. This many items of two images are as large.
    with dr.Sampler(store, view, batch_size=512, seed=0) as sampler:
        sampler.sample()
        assert ("diskreplay-copy" in threads()) == helps
    assert threads() == set()


def test_small_batches_are_made_when_they_are_asked_for(store: Any) -> None:
    others = threads()  # of tests before, which may be about to end
    with dr.Sampler(store, dr.Transitions(), batch_size=4, prefetch=3) as sampler:
        for _ in range(5):
            sampler.sample()
        assert threads() <= others
        assert not sampler._planner.queue


@pytest.mark.slow
@pytest.mark.usefixtures("threads_make_all")
@pytest.mark.parametrize("size", [8, 300])
def test_planned_batches_outlive_their_steps(tmp_store: Path, size: int) -> None:
    with dr.create(tmp_store, SCHEMA, capacity=100, chunk_bytes=64 << 10, segment_steps=50) as store:
        writer = store.writer()
        append(writer, 0, 90)
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=size, seed=0, prefetch=3)
        sampler.sample()
        for plan in sampler._planner.queue:
            plan.gathered.result()  # once it has begun, it has what it needs
        planned = [plan.draw.ids.tolist() for plan in sampler._planner.queue]
        for first in range(100, 1000, 100):
            append(writer, first, 90)
        assert store.refresh() > 0
        assert min(planned[0]) < store.episodes[0].ids[0]
        for ids in planned:
            batch = sampler.sample()
            assert batch.index.tolist() == ids
            assert (batch.obs["image"][:, 0, 0] == batch.obs["number"] % 251).all()
        assert sampler.sample().obs["number"].min() >= 880
        sampler.close()
        writer.close()


def test_no_more_memory_than_there_are_plans(store: Any) -> None:
    with dr.Sampler(store, dr.Transitions(), batch_size=300, prefetch=3) as sampler:
        for _ in range(30):
            sampler.sample()
        assert len(sampler._destination.pool) <= 3 + 2 + 1


def test_what_a_thread_raises_is_raised_to_the_caller(tmp_store: Path) -> None:
    goal = dr.Field((1,), "float32")
    goals = {"observation": dr.Field((3000,), "uint8"), "achieved_goal": goal, "desired_goal": goal}
    raised = threading.Event()

    def reward(achieved: Any, desired: Any, info: Any = None) -> Any:
        if raised.is_set():
            raise ArithmeticError("no reward today")
        return np.zeros(len(achieved), np.float32)

    with dr.create(tmp_store, dr.Schema(obs=goals, action=dr.Field((), "int64"))) as store:
        with store.writer() as writer:
            obs = {"observation": np.zeros((51, 3000), np.uint8), "achieved_goal": np.zeros((51, 1), "f4")}
            obs["desired_goal"] = obs["achieved_goal"]
            writer.append_episode(obs, np.zeros(50, int), np.zeros(50, "f4"), terminated=True)
        view = dr.Transitions(relabel=dr.Hindsight(reward_fn=reward))
        with dr.Sampler(store, view, batch_size=128, prefetch=2, seed=0) as sampler:
            sampler.sample()
            for plan in sampler._planner.queue:
                plan.gathered.result()
            raised.set()
            for _ in range(2):
                sampler.sample()
            for plan in sampler._planner.queue:
                with suppress(ArithmeticError):
                    plan.gathered.result()  # which waits for the thread
            raised.clear()
            for _ in range(2):
                with pytest.raises(ArithmeticError, match="no reward today"):
                    sampler.sample()
            assert sampler.sample().batch_size == 128


def test_a_new_view_begins_anew_and_a_dropped_sampler_ends_its_threads(store: Any) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=300, prefetch=2, seed=0)
    sampler.sample()
    gathered = sampler.stats()["seconds_gathering"]
    sampler.view = dr.Transitions(2)
    assert set(sampler.sample().n_steps.tolist()) == {1, 2}
    assert sampler.stats()["seconds_gathering"] > gathered > 0
    del sampler
    gc.collect()  # the check that follows every test looks for threads


@pytest.mark.slow(turns=4)
def test_the_interpreter_ends_with_a_sampler_in_the_middle(store: Any) -> None:
    code = (
        "import sys, diskreplay as dr\n"
        "sampler = dr.Sampler(dr.open(sys.argv[1]), dr.Transitions(), batch_size=3000, prefetch=5)\n"
        "sampler.sample()\n"
        "print('done')\n"
    )
    assert run_python(code, store.path) == "done\n"


def test_a_sampler_belongs_to_one_process(store: Any) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=300, prefetch=2)
    sampler.sample()
    with pytest.raises(TypeError, match="a sampler cannot be sent to another process: make one there"):
        pickle.dumps(sampler)

    def child(_: Any) -> None:
        with sampler, pytest.raises(dr.ReplayError, match="belongs to another process"):
            sampler.sample()

    with sampler._lock:  # which nobody will release in the child
        in_child(child)
    sampler.sample()
    sampler.close()


def test_the_disk_is_asked_for_exactly_the_pages_until_all_is_in_memory(store: Any, monkeypatch: Any) -> None:
    with disk_reads() as disk, dr.Sampler(store, dr.Transitions(), batch_size=2, seed=0) as sampler:
        for _ in range(WARM_BATCHES + 10):
            sampler.sample()
        assert len(disk.asked) == WARM_BATCHES
        assert (
            0 < min(disk.asked) <= max(disk.asked) <= 2 * 2 * 2 * 4096
        )  # items; frames of 1,600 bytes, on one page or two
        fill = sampler._makers.gatherer.reader.fill

        def fill_from_disk(*args: Any) -> None:
            disk.blocks += 1
            fill(*args)

        monkeypatch.setattr(sampler._makers.gatherer.reader, "fill", fill_from_disk)
        sampler.sample()
        assert len(disk.asked) == WARM_BATCHES
        monkeypatch.setattr(sampler._makers.gatherer.reader, "fill", fill)
        sampler.sample()
        assert len(disk.asked) == WARM_BATCHES + 1


def test_a_wide_field_is_read_page_by_page_and_an_episode_at_once(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA, chunk_bytes=1 << 20) as store:
        with store.writer() as writer:
            append(writer, 0, 400)
        store.refresh()
        episode = store.episodes[0]
        assert episode.obs["image"].shape == (401, 40, 40)
        table = store.snapshot.leaf("obs/image")
        base = int(table.bases[table.bases > 0][0])
        assert table.wide
        assert not store.snapshot.leaf("obs/number").wide
        assert "rr" in _flags(base)
        assert resident_pages(base) == 0
        assert episode.obs["image"][200, 0, 0] == 200
        assert 0 < resident_pages(base) < 400 * 1600 // 4096


def _flags(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that begins there."""
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        next(line for line in lines if line.startswith(f"{address:x}-"))
        return next(line for line in lines if line.startswith("VmFlags:")).split()[1:]
