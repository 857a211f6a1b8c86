"""The sampler on real stores: while they are written, while they are evicted, by several threads."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.errors import SegmentGone

SCHEMA = dr.Schema(obs=dr.Field((3,), "float32"), action=dr.Field((), "int64"), episode={"seed": dr.Field((), "int64")})


def row(serial: int) -> np.ndarray:
    return np.full(3, serial, np.float32)


def append_steps(writer: Any, first: int, steps: int, end: bool = True, **kwargs: Any) -> None:
    """Append steps that are numbered by their action; the observation holds the number too."""
    for serial in range(first, first + steps):
        last = end and serial == first + steps - 1
        extra = kwargs if last else {}
        writer.append(row(serial), serial, float(serial), last, next_obs=row(serial + 1), **extra)


def check(batch: dr.Batch) -> None:
    """Check what every batch of numbered steps must hold."""
    fields = batch.numpy()
    np.testing.assert_array_equal(fields["obs"], fields["action"][:, None] * np.ones(3))
    np.testing.assert_array_equal(fields["next_obs"], fields["obs"] + fields["n_steps"][:, None])
    going_on = ~fields["terminated"]
    np.testing.assert_allclose(fields["discount"][going_on], 0.9 ** fields["n_steps"][going_on], rtol=1e-6, atol=1e-30)


@pytest.mark.slow
@pytest.mark.parametrize("segment_steps", [50, "episode"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_old_steps_leave_while_new_ones_come(tmp_store: Path, segment_steps: Any, prefetch: int) -> None:
    store = dr.create(tmp_store, SCHEMA, capacity=200, segment_steps=segment_steps)
    with store, store.writer() as writer:
        sampler = dr.Sampler(store, dr.Transitions(3, gamma=0.9), batch_size=32, seed=0, prefetch=prefetch)
        serial, rng = 0, np.random.default_rng(0)
        for _ in range(60):
            steps = int(rng.integers(1, 20))
            append_steps(writer, serial, steps)
            serial += steps
            batch = sampler.sample()
            check(batch)
            oldest = batch.action.min().item()
            assert oldest >= serial - 200 - 20 * (prefetch + 1)
        assert len(store) == 200
        whole = sampler.sample(4000).action
        assert whole.min() == serial - 200
        assert whole.max() == serial - 1


@pytest.mark.slow
def test_a_reader_that_meets_evicted_segments_draws_again(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA, capacity=300, segment_steps=60) as store, dr.open(tmp_store) as reader:
        writer = store.writer()
        append_steps(writer, 0, 30)
        reader.refresh()
        # It has mapped nothing yet, looks for nothing new, and all that it knows of is evicted.
        sampler = dr.Sampler(reader, dr.Transitions(gamma=0.9), batch_size=16, refresh=False)
        for i in range(1, 40):
            append_steps(writer, 30 * i, 30)
        batch = sampler.sample()
        check(batch)
        assert batch.action.min() >= 600
        with pytest.raises(dr.InvalidIndex, match="^id 0 is not in the store: it was evicted, or never existed$"):
            sampler.gather([0])


def test_where_chooses_by_what_an_episode_says(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        asked: list[int] = []

        def where(episode: dr.Episode) -> bool:
            asked.append(len(episode))
            return episode["seed"] is not None and int(episode["seed"]) % 2 == 1

        sampler = dr.Sampler(store, dr.Transitions(), batch_size=200, seed=0, where=where)
        for seed in range(6):
            append_steps(writer, 100 * seed, 5 + seed, episode={"seed": seed})
        assert {int(a) // 100 for a in sampler.sample().action} == {1, 3, 5}
        assert sorted(asked) == [5, 6, 7, 8, 9, 10]
        append_steps(writer, 700, 9, end=False)
        sampler.sample()
        sampler.sample()
        assert asked[6:] == [9]
        append_steps(writer, 709, 2, episode={"seed": 7})
        assert {int(a) // 100 for a in sampler.sample().action} == {1, 3, 5, 7}
        assert asked[6:] == [9, 11]
        with pytest.raises(dr.NotEnoughData, match="^the store has 56 steps, 0 of them sampleable as "):
            dr.Sampler(store, dr.Transitions(), where=lambda episode: False).sample()
        # Of episodes that were asked of, nothing is asked when others go, and hidden ones are not asked of.
        writer.close()
        assert store.evict(lambda episode: int(episode["seed"]) == 1) == 6
        sampler.sample()
        assert asked[6:] == [9, 11]
        store.resize(capacity=20)
        store.refresh()
        with dr.Sampler(store, dr.Transitions(), batch_size=200, seed=0, where=where) as other:
            other.sample()
        assert asked[8:] == [10, 11]


def test_where_that_raises_changes_nothing(tmp_store: Path) -> None:
    fails: list[bool] = []

    def where(episode: dr.Episode) -> bool:
        if fails and len(episode) == 4:
            raise RuntimeError("not now")
        return True

    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        append_steps(writer, 0, 3)
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=100, seed=0, where=where)
        assert sampler.sampleable == 3
        append_steps(writer, 10, 4)
        fails.append(True)
        with pytest.raises(RuntimeError, match="not now"):
            sampler.sample()
        fails.clear()
        assert set(sampler.sample().action.tolist()) == {0, 1, 2, 10, 11, 12, 13}


@pytest.mark.parametrize(
    ("distribution", "limits"),
    [(lambda: dr.Recency(1000), {}), (dr.Uniform, {"max_size": 30, "remover": "random"})],
    ids=["Recency", "max_size"],
)
def test_an_episode_that_where_refuses_at_its_end_is_not_drawn_any_more(
    tmp_store: Path, distribution: Any, limits: dict[str, Any]
) -> None:
    number = dr.Field((), "int64")
    arguments = {"batch_size": 40, "seed": 0, "where": lambda episode: episode["task"] != 1, **limits}
    with (
        dr.create(tmp_store, dr.Schema(obs=number, action=number, episode={"task": number})) as store,
        store.writer() as writer,
        dr.Sampler(store, dr.Transitions(), distribution(), **arguments) as sampler,
    ):
        for step in range(30):
            writer.append(step, 0, 0.0, False, next_obs=step + 1)
        assert len(sampler.sample().obs.unique()) > 10
        writer.append(30, 0, 0.0, True, next_obs=31, episode={"task": 1})
        writer.append_episode(np.arange(100, 131), np.zeros(30, int), np.zeros(30), terminated=True)
        assert sampler.sample().obs.min() >= 100
        ids = sampler.ids()
        assert sampler.gather(ids).obs.tolist() == list(range(100, 130))
        with dr.Sampler(store, dr.Transitions(), distribution(), **arguments) as other:
            other.load_state_dict(sampler.state_dict())
            assert other.sample().index.equal(sampler.sample().index)


def test_where_is_asked_of_a_newer_store_after_an_eviction(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        append_steps(writer, 0, 5)
        store.refresh()
        gone = [True, True]

        def where(episode: dr.Episode) -> bool:
            if gone and gone.pop():
                raise SegmentGone("gone")
            return True

        assert dr.Sampler(store, dr.Transitions(), batch_size=7, where=where).sample().batch_size == 7
        assert not gone


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_threads_sample_while_a_thread_writes(tmp_store: Path, shared: bool) -> None:
    store = dr.create(tmp_store, SCHEMA, capacity=150, segment_steps=40, chunk_bytes=256)
    with store, store.writer() as writer:
        append_steps(writer, 0, 50)
        one = dr.Sampler(store, dr.Transitions(3, gamma=0.9), batch_size=32)
        failures: list[BaseException] = []
        over = threading.Event()

        def sample() -> None:
            sampler = one if shared else dr.Sampler(store, dr.Transitions(3, gamma=0.9), batch_size=32)
            try:
                while not over.is_set():
                    check(sampler.sample())
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=sample) for _ in range(2)]
        for thread in threads:
            thread.start()
        for i in range(1, 12):
            append_steps(writer, 50 * i, 50)
        over.set()
        for thread in threads:
            thread.join()
        assert failures == []


def test_one_store_gives_every_n_and_not_a_byte_of_it_changes(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        for first, steps in ((0, 7), (7, 40), (47, 1)):
            append_steps(writer, first, steps, episode={"seed": first})
    before = {path: path.read_bytes() for path in tmp_store.rglob("*") if path.is_file()}
    with dr.open(tmp_store) as store:
        sampler = dr.Sampler(store, dr.Transitions(n_step=1, gamma=0.9), dr.Prioritized(), batch_size=64, seed=0)
        for n in (1, 3, 10, 1, 3, 10):
            sampler.view = dr.Transitions(n_step=n, gamma=0.9)
            batch = sampler.sample()
            check(batch)
            assert batch.n_steps.max() == n
            sampler.update_priorities(batch.index, batch.reward)
    assert {path: path.read_bytes() for path in tmp_store.rglob("*") if path.is_file()} == before


def test_a_path_is_opened_and_closed_with_the_sampler(tmp_store: Path) -> None:
    schema = dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"))
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        writer.append(0.0, 7, 1.0, True)
    for path in (tmp_store, str(tmp_store)):
        with dr.Sampler(path, dr.Transitions(), batch_size=2) as sampler:
            assert sampler.sample().action.tolist() == [7, 7]
        with pytest.raises(dr.ReplayError):
            sampler._store.refresh()
        sampler.close()
        found = sampler.stats()
        assert (found["batches"], found["steps"], found["replay_ratio"]) == (1, 2, 2.0)
    with pytest.raises(dr.StoreNotFound):
        dr.Sampler(tmp_store / "nowhere", dr.Transitions())
    for wrong in (dr.Store, None, 3):
        with pytest.raises(ValueError, match="^store must be a Store or its path, not "):
            dr.Sampler(wrong, dr.Transitions())


def test_a_path_is_closed_again_where_its_sampler_cannot_be_made(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dr.create(tmp_store, dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"))):
        pass
    closed = []
    monkeypatch.setattr(dr.Store, "close", lambda store: closed.append(store.path))
    with pytest.raises(ValueError, match="fields names 'nothing'"):
        dr.Sampler(tmp_store, dr.Transitions(), fields=["nothing"])
    with pytest.raises(dr.ReadOnlyError):
        dr.Sampler(tmp_store, dr.Transitions(), limiter=dr.RateLimiter(1.0, 1, 500))
    taken, owner = dr.Sweep(), dr.Uniform()
    taken.claim(owner)
    with pytest.raises(ValueError, match="another sampler"):
        dr.Sampler(tmp_store, dr.Transitions(), taken)
    assert closed == [tmp_store] * 3
