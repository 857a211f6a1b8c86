"""Writers and samplers that a limiter keeps in step."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

SCHEMA = dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with dr.create(tmp_path / "store", SCHEMA) as store:
        yield store


def append(writer: Any, steps: int) -> None:
    for t in range(steps):
        writer.append(0.0, t, 1.0, False, next_obs=0.0)


def test_both_sides_stop_where_the_rule_says(store: Any) -> None:
    limiter = dr.RateLimiter(2.0, min_size=10, error_buffer=8, timeout=0.0)
    writer = store.writer(limiter=limiter)
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=4, seed=0, limiter=limiter)
    append(writer, 9)
    with pytest.raises(dr.RateLimited, match="drawing begins at 10"):
        sampler.sample()
    # inserted * 2 - drawn is kept within 20 +- 8
    append(writer, 5)
    with pytest.raises(dr.RateLimited, match="insert a step"):
        append(writer, 1)
    assert store.refresh() == 14
    drawn = 0
    while True:
        try:
            drawn += sampler.sample().batch_size
        except dr.RateLimited:
            break
    assert drawn == 16
    append(writer, 4)  # the writer was not closed by the refusals
    writer.end_episode()
    assert sampler.sample().batch_size == 4
    assert sampler.stats()["batches"] == 5
    writer.close()


def test_a_refused_batch_is_the_next_one(store: Any) -> None:
    with store.writer() as writer:
        append(writer, 30)
    limiter = dr.RateLimiter(1.0, min_size=1, error_buffer=20, timeout=0.0)
    limited = dr.Sampler(store, dr.Transitions(), batch_size=10, seed=3, limiter=limiter, refresh=False)
    free = dr.Sampler(store, dr.Transitions(), batch_size=10, seed=3, refresh=False)
    store.refresh()
    expected = [free.sample().index.tolist() for _ in range(5)]
    got = [limited.sample().index.tolist() for _ in range(4)]
    with pytest.raises(dr.RateLimited):
        limited.sample()
    with store.writer() as writer:
        append(writer, 10)
    assert [*got, limited.sample().index.tolist()] == expected


@pytest.mark.slow
def test_vectors_and_whole_episodes_wait_too(store: Any) -> None:
    limiter = dr.RateLimiter(1.0, min_size=1, error_buffer=4, timeout=0.0)
    with store.writer(2, limiter=limiter) as writer:
        writer.append(np.zeros(2), [0, 0], np.ones(2), [False] * 2, [False] * 2)
        writer.append_episode(0, np.zeros(6), np.zeros(5, int), np.ones(5), terminated=True)
        with pytest.raises(dr.RateLimited):
            writer.append(np.zeros(2), [0, 0], np.ones(2), [False] * 2, [False] * 2)
        with pytest.raises(dr.RateLimited):
            writer.append_episode(0, np.zeros(6), np.zeros(5, int), np.ones(5), terminated=True)
    store.refresh()
    assert len(store) == 7


def test_a_waiting_writer_goes_on_when_a_sampler_draws(store: Any) -> None:
    limiter = dr.RateLimiter(1.0, min_size=4, error_buffer=4, timeout=30.0)
    writer = store.writer(limiter=limiter)
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=4, seed=0, limiter=limiter)
    thread = threading.Thread(target=append, args=(writer, 40))
    thread.start()
    for _ in range(9):
        sampler.sample()
    thread.join()
    writer.close()
    store.refresh()
    assert len(store) == 40
    writer.close()


def test_a_limiter_needs_a_store_that_can_be_written(store: Any) -> None:
    with dr.open(store.path) as reader, pytest.raises(dr.ReadOnlyError, match='mode "a"'):
        dr.Sampler(reader, dr.Transitions(), batch_size=4, limiter=dr.RateLimiter(1.0, 1, 4))
    with pytest.raises(ValueError, match="could wait for each other"):
        dr.Sampler(store, dr.Transitions(), batch_size=400, limiter=dr.RateLimiter(1.0, 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("view", "steps"), [(dr.Sequences(4, 2), 4), (dr.Episodes(), 5), (dr.Episodes(3), 3)])
def test_windows_and_episodes_count_as_the_steps_they_have(store: Any, view: Any, steps: int) -> None:
    with store.writer() as writer:
        for _ in range(20):
            for t in range(5):
                writer.append(0.0, t, 1.0, t == 4, next_obs=0.0)
    store.refresh()
    limiter = dr.RateLimiter(1.0, min_size=1, error_buffer=40, timeout=0.0)
    sampler = dr.Sampler(store, view, batch_size=6, seed=0, limiter=limiter)
    # inserted - drawn is kept above 1 - 40
    batches = [sampler.sample() for _ in range(139 // (6 * steps))]
    for _ in range(2):
        with pytest.raises(dr.RateLimited):
            sampler.sample()
    found = sampler.stats()
    assert found["steps"] == len(batches) * 6 * steps
    assert found["replay_ratio"] == found["steps"] / 100
    # What was refused is the next batch.
    free = dr.Sampler(store, view, batch_size=6, seed=0)
    assert [b.index.tolist() for b in batches] == [free.sample().index.tolist() for _ in batches]
    following = free.sample().index.tolist()
    if view.item_steps is None:  # the same for a batch of another size, which is drawn apart
        with pytest.raises(dr.RateLimited):
            sampler.sample(batch_size=9)
        apart = free.sample(batch_size=9).index.tolist()
        sampler._payments.limiter = None
        assert sampler.sample(batch_size=9).index.tolist() == apart
    sampler._payments.limiter = None
    assert sampler.sample().index.tolist() == following


def append_episodes(store: Any, lengths: list[int]) -> None:
    with store.writer() as writer:
        for length in lengths:
            for t in range(length):
                writer.append(0.0, t, 1.0, t == length - 1, next_obs=0.0)
    store.refresh()


@pytest.mark.slow
@pytest.mark.parametrize(("timeout", "error"), [(None, ValueError), (0.0, dr.RateLimited)])
@pytest.mark.parametrize("size", [None, 1])
def test_a_batch_that_never_fits_is_named_and_dropped(store: Any, timeout: Any, error: Any, size: int | None) -> None:
    append_episodes(store, [5, 5, 40, 5, 5])
    limiter = dr.RateLimiter(1.0, min_size=1, error_buffer=10, timeout=timeout)
    other = dr.Sampler(store, dr.Transitions(), batch_size=1, seed=0, limiter=limiter)
    for _ in range(31):  # inserted - drawn is kept above 1 - 10: 40 steps are 2 too many from now on
        other.sample()
    sampler = dr.Sampler(store, dr.Episodes(), dr.Sweep(passes=1), batch_size=2 if size else 1, seed=0, limiter=limiter)
    long = store.episodes[2].ids[0]
    given, refused = [], []
    for _ in range(5):
        try:
            given += sampler.sample(size).index.tolist()
        except error as found:
            refused.append(str(found))
    assert len(refused) == 1
    assert refused[0].endswith(
        f". The drawn batch, 1 items from id {long} on, might wait for ever and is dropped: the next call "
        "draws another one"
    )
    assert sorted(given) == [e.ids[0] for e in store.episodes if e.ids[0] != long]
    with pytest.raises(StopIteration):
        sampler.sample(size)


def refused_sampler(store: Any, distribution: Any, **kwargs: Any) -> Any:
    """Return a sampler of episodes after its limiter has refused batches of 3 and of 9."""
    limiter = dr.RateLimiter(1.0, min_size=1, error_buffer=50, timeout=0.0)
    sampler = dr.Sampler(store, dr.Episodes(), distribution, batch_size=3, seed=0, limiter=limiter, **kwargs)
    sampler._payments.limiter._slots[0] += 1000
    for size in (9, None):
        with pytest.raises(dr.RateLimited):
            sampler.sample(size)
    return sampler


def test_a_refused_batch_of_a_sweep_that_ends_is_not_lost(store: Any) -> None:
    append_episodes(store, [5] * 7)
    limiter = dr.RateLimiter(1.0, min_size=1, error_buffer=50, timeout=0.0)
    sampler = dr.Sampler(store, dr.Episodes(), dr.Sweep(passes=1), batch_size=3, seed=0, limiter=limiter)
    sampler._payments.limiter._slots[0] += 1000
    for _ in range(2):
        with pytest.raises(dr.RateLimited):
            sampler.sample(9)
    sampler._payments.limiter = None
    assert sorted(sampler.sample(9).index.tolist()) == [e.ids[0] for e in store.episodes]
    with pytest.raises(StopIteration):
        sampler.sample(9)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("distribution", [dr.Uniform, lambda: dr.Sweep(passes=None), dr.Prioritized])
def test_refused_batches_are_saved_and_go_on_to_the_bit(store: Any, prefetch: int, distribution: Any) -> None:
    append_episodes(store, [5, 3, 4] * 4)
    one = refused_sampler(store, distribution(), prefetch=prefetch)
    one.save("run")
    others = [dr.Sampler(store, dr.Episodes(), distribution(), batch_size=3, seed=i, prefetch=prefetch) for i in (8, 9)]
    others[0].load("run")
    others[1].load_state_dict(one.state_dict())
    for again in (others[0].state_dict(), others[1].state_dict()):
        assert repr(again) == repr(one.state_dict())
    one._payments.limiter = None
    for size in (9, None, 9, None, None):
        expected = one.sample(size)
        for other in others:
            got = other.sample(size)
            assert got.index.tolist() == expected.index.tolist()
            assert got.weight.tolist() == expected.weight.tolist()
    assert store.verify(deep=True) == []


def test_a_state_with_refused_batches_needs_the_batch_size_and_its_ids(store: Any) -> None:
    append_episodes(store, [5] * 12)
    state = refused_sampler(store, dr.Sweep(passes=1)).state_dict()
    state["planner"]["plans"] = []
    with pytest.raises(ValueError, match="batch_size=3, and the sampler's is 9"):
        dr.Sampler(store, dr.Episodes(), dr.Sweep(passes=1), batch_size=9).load_state_dict(state)
    ids = state["planner"]["refused"][0]["ids"]
    ids[4] = 1 << 60  # one that is gone: then another batch is drawn, of what is left
    sampler = dr.Sampler(store, dr.Episodes(), dr.Sweep(passes=1), batch_size=3)
    sampler.load_state_dict(state)
    assert sampler.sample(9).index.tolist() == [*ids[:4].tolist(), *ids[5:].tolist()]
    with pytest.raises(StopIteration):
        sampler.sample(9)
    for wrong in (3, [{}], [{**state["planner"]["refused"][0], "asked": "x"}]):
        state["planner"]["refused"] = wrong
        with pytest.raises(ValueError, match="this is not a state of a sampler"):
            sampler.load_state_dict(state)


@pytest.mark.parametrize("state_of", [dr.Uniform(), dr.Prioritized()])
def test_a_state_whose_text_is_nested_beyond_all_stacks_is_refused(store: Any, state_of: Any) -> None:
    append_episodes(store, [5] * 2)
    sampler = dr.Sampler(store, dr.Transitions(), state_of, batch_size=3)
    state = sampler.state_dict()
    state["planner"]["rng"] = "[" * 200_000
    with pytest.raises(ValueError, match="this is not a state of a sampler: more than 200 levels of nested"):
        sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="is not a kind of id"):
        dr.Prioritized().load_state_dict({"[" * 200_000: {}})
