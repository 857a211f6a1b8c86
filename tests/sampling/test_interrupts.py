"""Interrupts at every line of a sampler: later batches are right, nothing waits for ever, no thread is left."""

import copy
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.testing.nested import flat
from tests.crash.injection import is_interrupted
from tests.testing.support import wait_until
from tests.tiers import whole_or_part

SCHEMA = dr.Schema(
    obs={"image": dr.Field((20, 20), "uint8"), "number": dr.Field((), "int64")}, action=dr.Field((), "int64")
)


@pytest.fixture(autouse=True)
def threads_do_all(threads_make_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches are made ahead, copied in parts, and decompressed by several threads, as large ones are."""
    monkeypatch.setattr("diskreplay.views.base.PART", 1)
    monkeypatch.setattr("diskreplay.reading.decompression._LEAST", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))


def make(path: Path, compression: str | None) -> None:
    """Make a store of 12 episodes whose images and actions say which observation they are of."""
    with dr.create(path, SCHEMA, chunk_bytes=64 << 10, segment_steps=200, compression=compression) as store:
        with store.writer() as writer:
            for first in range(0, 1200, 100):
                steps = 30 + first // 20
                numbers = np.arange(first, first + steps + 1)
                images = np.broadcast_to((numbers % 251)[:, None, None], (steps + 1, 20, 20)).astype(np.uint8)
                obs = {"image": images, "number": numbers}
                writer.append_episode(obs, numbers[:-1], np.ones(steps, np.float32), terminated=True)
        if compression is not None:
            store.compact()


@pytest.fixture(params=[None, "zstd"], ids=["raw", "zstd"])
def path(request: pytest.FixtureRequest, tmp_store: Path) -> Path:
    if request.param is not None:
        pytest.importorskip("zstandard")
    make(tmp_store, request.param)
    return tmp_store


def numbers_by_id(path: Path) -> dict[int, int]:
    """Return which observation each step begins with."""
    with dr.open(path) as store:
        return {
            step: number
            for episode in store.episodes
            for step, number in zip(episode.ids.tolist(), episode.obs["number"].tolist(), strict=False)
        }


def check(batch: dr.Batch, numbers: dict[int, int]) -> None:
    """See that each item of a batch of transitions is what its id says."""
    wanted = np.array([numbers[step] for step in batch.index.tolist()])
    later = wanted + batch.n_steps.numpy()
    for obs, number in ((batch.obs, wanted), (batch.next_obs, later)):
        np.testing.assert_array_equal(obs["number"].numpy(), number)
        np.testing.assert_array_equal(
            obs["image"].numpy(), np.broadcast_to(number[:, None, None] % 251, (len(number), 20, 20))
        )
    np.testing.assert_array_equal(batch.action.numpy(), wanted)


def lines_of(step: int) -> Iterator[int]:
    """Yield lines from the first on, each so many behind the one before."""
    return itertools.count(0, step)


def own_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("diskreplay") and "decompress" not in name]


@pytest.mark.slow
@pytest.mark.leaks("an interrupt may come between the opening of a file and the assignment of its descriptor")
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_batches_after_an_interrupt_of_the_first_ones_are_right(path: Path, prefetch: int) -> None:
    """At every line of the first two batches, which map and decompress for the first time."""
    numbers = numbers_by_id(path)
    for line in lines_of(whole_or_part(3, 211)):
        with dr.open(path) as store:
            sampler = dr.Sampler(store, dr.Transitions(), batch_size=32, prefetch=prefetch, seed=line)
            was_interrupted = is_interrupted(lambda: [sampler.sample() for _ in range(2)], line)  # noqa: B023
            for _ in range(2 + prefetch):
                check(sampler.sample(), numbers)
            sampler.close()
            assert own_threads() == []
        if not was_interrupted:
            break
    assert line > 300


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_after_an_interrupt_are_right(path: Path, prefetch: int) -> None:
    """Interrupt after interrupt, of one sampler."""
    numbers = numbers_by_id(path)
    with dr.Sampler(path, dr.Transitions(), batch_size=16, prefetch=prefetch, seed=0) as sampler:
        check(sampler.sample(), numbers)
        for line in lines_of(whole_or_part(1, 3)):
            was_interrupted = is_interrupted(sampler.sample, line)
            for _ in range(2):
                check(sampler.sample(), numbers)
            if not was_interrupted:
                break
        assert line > 30


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_update_of_priorities_that_was_interrupted_can_be_repeated(tmp_store: Path, prefetch: int) -> None:
    """Then each id has the chance that it has where nothing was interrupted."""
    make(tmp_store, None)
    numbers = numbers_by_id(tmp_store)
    ids, errors = np.array(list(numbers)), np.random.default_rng(0)
    kwargs: Any = {"batch_size": 16, "fields": ("...", "probability"), "refresh": False}
    with (
        dr.Sampler(tmp_store, dr.Transitions(), dr.Prioritized(), prefetch=prefetch, seed=0, **kwargs) as sampler,
        dr.Sampler(tmp_store, dr.Transitions(), dr.Prioritized(), seed=0, **kwargs) as plain,
    ):
        for each in (sampler, plain):
            each.sample()
        for line in lines_of(1):
            some, error = errors.choice(ids, 20, replace=False), errors.random(20)
            was_interrupted = is_interrupted(lambda: sampler.update_priorities(some, error), line)  # noqa: B023
            for each in (sampler, plain):
                each.update_priorities(some, error)
            check(sampler.sample(), numbers)
            chances = [each.gather(ids)["probability"].numpy() for each in (sampler, plain)]
            np.testing.assert_allclose(*chances, rtol=1e-9)
            if not was_interrupted:
                break
        assert line > 10


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_change_of_the_view_is_made_or_not(tmp_store: Path, prefetch: int) -> None:
    make(tmp_store, None)
    numbers = numbers_by_id(tmp_store)
    for line in lines_of(whole_or_part(1, 23)):
        with dr.Sampler(tmp_store, dr.Transitions(), batch_size=64, prefetch=prefetch, seed=0) as sampler:
            sampler.sample()
            was_interrupted = is_interrupted(lambda: setattr(sampler, "view", dr.Transitions(3)), line)
            for _ in range(2):
                batch = sampler.sample()
                check(batch, numbers)
                assert (batch.n_steps.max() > 1) == (sampler.view.n_step == 3)
        if not was_interrupted:
            break
    assert line > 30


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kwargs", [{"distribution": dr.Sweep(1)}, {"max_times_sampled": 1}], ids=str)
def test_ids_that_come_once_come_after_an_interrupt(tmp_store: Path, prefetch: int, kwargs: dict[str, Any]) -> None:
    make(tmp_store, None)
    with dr.open(tmp_store) as store, dr.Sampler(store, dr.Transitions()) as every:
        wanted = every.ids()
        for line in lines_of(whole_or_part(1, 7)):
            seen: list[int] = []
            given: Any = {"batch_size": 230, "prefetch": prefetch, **copy.deepcopy(kwargs)}
            with dr.Sampler(store, dr.Transitions(), seed=0, **given) as sampler:
                was_interrupted = is_interrupted(sampler.sample, line)
                is_counted = sampler.stats()["batches"] > 0  # delivered, or about to be
                with suppress(StopIteration, dr.NotEnoughData):
                    while True:
                        seen += sampler.sample().index.flatten().tolist()
            if not was_interrupted:
                break
            assert len(set(seen)) == len(seen)
            assert is_counted or set(seen) == set(wanted.tolist())
        assert line > 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [
        {"distribution": dr.Recency(3000)},
        {"distribution": dr.Recency(30)},  # of which each episode is several blocks
        {"max_size": 100},
        {"max_size": 100, "remover": "random"},
        {"max_size": 100, "remover": "lowest_priority", "distribution": dr.Prioritized()},
    ],
    ids=str,
)
def test_ids_that_come_when_an_interrupt_does_are_there_once(tmp_store: Path, kwargs: dict[str, Any]) -> None:
    given: dict[str, Any] = {"fields": ("probability",), "batch_size": 4, "refresh": True}
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:

        def grow(steps: int) -> None:
            obs = {"image": np.zeros((steps + 1, 20, 20), np.uint8), "number": np.arange(steps + 1)}
            writer.append_episode(obs, np.arange(steps), np.ones(steps, np.float32), terminated=True)

        grow(120)
        sampler, other = (dr.Sampler(store, dr.Transitions(), **copy.deepcopy(kwargs), **given) for _ in range(2))
        sampler.sample()
        for line in lines_of(whole_or_part(1, 7)):
            grow(2)
            was_interrupted = is_interrupted(sampler.sample, line)
            sampler.sample()
            ids = sampler.ids()
            assert len(np.unique(ids)) == len(ids)
            if "max_size" in kwargs:
                assert len(ids) == 100
            else:
                newest = ids[-10:]
                assert (sampler.gather(newest).probability > 0).all(), f"line {line}"
                assert float(sampler.gather(ids).probability.sum()) == pytest.approx(1)
            other.load_state_dict(sampler.state_dict())
            if not was_interrupted:
                break
        assert line > 100
        for one in (sampler, other):
            one.close()


DISTRIBUTIONS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "uniform": (dr.Uniform, {}),
    "prioritized": (dr.Prioritized, {}),
    "recency": (lambda: dr.Recency(100), {}),
    "sweep": (lambda: dr.Sweep(None), {}),
    "sweep by time": (lambda: dr.Sweep(None, order="time"), {}),
    "mixture": (lambda: dr.Mixture([(dr.Sweep(None), 0.3), (dr.Recency(100), 0.3), (dr.Prioritized(), 0.4)]), {}),
    "stratified": (dr.Stratified, {}),
    "at most": (dr.Uniform, {"max_times_sampled": 4}),
    "bounded": (dr.Prioritized, {"max_size": 300, "remover": "random", "max_times_sampled": 4}),
    "normalized": (dr.Prioritized, {"transform": "normalize"}),
}


def bits(batch: dr.Batch) -> dict[str, bytes]:
    """Return what a batch holds, to the bit."""
    return {name: leaf.tobytes() for name, leaf in flat(batch.numpy(), "").items()}


def learn(sampler: Any, number: int) -> dict[str, bytes]:
    """Draw a batch and update priorities by its number; return the batch."""
    batch = sampler.sample()
    if not isinstance(sampler, dr.Sampler) or sampler.distribution.weighted:
        sampler.update_priorities(batch.index, np.random.default_rng(number).standard_normal(len(batch.index)))
    return bits(batch)


def loads_wholly_or_not(sampler: Any, step: int) -> None:
    """Interrupt `load_state_dict` at many lines; what comes then is what would have come before it, or after it."""
    learn(sampler, 0)
    one = sampler.state_dict()
    for number in range(3):
        learn(sampler, number)
    other = sampler.state_dict()

    def after(load: Callable[[], object]) -> list[dict[str, bytes]]:
        """Return the batches after a load that other batches came before."""
        sampler.load_state_dict(one)
        learn(sampler, 7)
        load()
        return [learn(sampler, number) for number in range(8, 11)]

    before, loaded = after(lambda: None), after(lambda: sampler.load_state_dict(other))
    assert before != loaded
    seen = set()
    for line in lines_of(step):
        interrupted: list[bool] = []
        found = after(lambda: interrupted.append(is_interrupted(lambda: sampler.load_state_dict(other), line)))  # noqa: B023
        assert found in (before, loaded), f"line {line}"
        seen.add(found == loaded)
        if not interrupted[0]:
            break
    assert seen == {False, True}
    assert line > 30


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_state_is_loaded_wholly_or_not(tmp_store: Path, distribution: str, prefetch: int) -> None:
    make(tmp_store, None)
    made, kwargs = DISTRIBUTIONS[distribution]
    transform = {"transform": dr.Normalize(obs=False, reward=True)} if "transform" in kwargs else {}
    kwargs = {**kwargs, **transform, "batch_size": 16, "prefetch": prefetch, "seed": 0}
    with dr.Sampler(tmp_store, dr.Transitions(), made(), **kwargs) as sampler:
        loads_wholly_or_not(sampler, whole_or_part(1, 61))


def test_the_states_of_mixed_samplers_are_loaded_wholly_or_not(tmp_store: Path) -> None:
    make(tmp_store, None)
    with dr.open(tmp_store) as store:
        samplers = [
            dr.Sampler(store, dr.Transitions(), distribution, batch_size=8, prefetch=prefetch, seed=0)
            for distribution, prefetch in ((dr.Prioritized(), 2), (dr.Sweep(None), 0), (dr.Prioritized(), 0))
        ]
        mixed = dr.MixedSampler([(sampler, 1.0) for sampler in samplers], batch_size=16, seed=0)
        loads_wholly_or_not(mixed, whole_or_part(1, 101))
        for sampler in samplers:
            sampler.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_that_are_gathered_after_an_interrupt_are_right(path: Path, prefetch: int) -> None:
    numbers = numbers_by_id(path)
    ids = np.array(list(numbers))[::7]
    with dr.Sampler(path, dr.Transitions(), batch_size=16, prefetch=prefetch, seed=0) as sampler:
        sampler.sample()
        for line in lines_of(whole_or_part(1, 3)):
            was_interrupted = is_interrupted(lambda: sampler.gather(np.roll(ids, line)), line)  # noqa: B023
            check(sampler.gather(ids), numbers)
            check(sampler.sample(), numbers)
            if not was_interrupted:
                break
        assert line > 20


@pytest.mark.slow
@pytest.mark.leaks("an interrupt may come between the opening of a file and the assignment of its descriptor")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_sampler_whose_close_was_interrupted_can_be_closed(path: Path, prefetch: int) -> None:
    """It ends its threads, and closes the store that it opened."""
    for line in lines_of(whole_or_part(1, 13)):
        sampler = dr.Sampler(path, dr.Transitions(), batch_size=16, prefetch=prefetch, seed=0)
        sampler.sample()
        was_interrupted = is_interrupted(sampler.close, line)
        sampler.close()
        # Python takes a thread for ended whose `join` was interrupted: the second call does not wait for it.
        wait_until(lambda: not own_threads(), 60)
        with pytest.raises(dr.Closed):
            sampler.sample()
        with pytest.raises(dr.Closed):
            sampler._store.refresh()
        if not was_interrupted:
            break
    assert line > 50


@pytest.mark.slow(turns=4)
def test_a_data_set_of_a_loader_goes_on_after_an_interrupt_in_a_worker(path: Path) -> None:
    from torch.utils.data import DataLoader

    from diskreplay.interop.torch import StoreDataset

    class Interrupted(StoreDataset):
        """Interrupts two batches at one line after the other, and gives what comes then."""

        def __iter__(self) -> Iterator[dr.Batch]:
            for line in lines_of(whole_or_part(7, 499)):
                batches = super().__iter__()
                was_interrupted = is_interrupted(lambda: [next(batches) for _ in range(2)], line)  # noqa: B023
                batches = super().__iter__()
                yield from itertools.islice(batches, 2)
                if not was_interrupted:
                    return

    numbers = numbers_by_id(path)
    data = Interrupted(path, dr.Transitions(), batch_size=32, seed=0)
    count = 0
    # TorchRL, which another test may have imported, has processes spawned.
    for batch in DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork"):
        check(batch, numbers)
        count += 1
    assert count > 8
