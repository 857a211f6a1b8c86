"""The sampler over fake stores: arguments, draws, snapshots, prefetching, evictions, threads."""

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr
from diskreplay.errors import SegmentGone
from tests.views.fakes import FLAT_SCHEMA, Segment, Snapshot, Store, episode


def snapshot_of(lengths: list[int], schema: dr.Schema = FLAT_SCHEMA, **kwargs: Any) -> Snapshot:
    rng = np.random.default_rng(0)
    return Snapshot(
        schema, [Segment([[episode(schema, steps, "terminated", True, rng) for steps in lengths]])], **kwargs
    )


class Nearly:
    """Something with these attributes, and so nearly an argument."""

    def __init__(self, *names: str) -> None:
        self.__dict__.update(dict.fromkeys(names))

    def __repr__(self) -> str:
        return "nearly"


@pytest.fixture
def store() -> Store:
    return Store(snapshot_of([5, 30, 12]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an int of at least 1, not 0"),
        ({"batch_size": 2.0}, "batch_size must be an int of at least 1, not 2.0"),
        ({"batch_size": True}, "batch_size must be an int of at least 1, not True"),
        ({"prefetch": -1}, "prefetch must be an int of at least 0, not -1"),
        ({"rank": 2, "world_size": 2}, "rank must be less than world_size, 2, not 2"),
        ({"world_size": 0}, "world_size must be an int of at least 1, not 0"),
        *(
            ({"max_times_sampled": wrong}, f"max_times_sampled must be an int of at least 1, not {wrong!r}")
            for wrong in (0, -1, 1.0, True, "2")
        ),
        ({"max_size": 0}, "max_size must be an int of at least 1, not 0"),
        (
            {"max_size": 5, "remover": "newest"},
            'remover must be "oldest", "lowest_priority" or "random", not \'newest\'',
        ),
        ({"remover": "random"}, "remover='random' needs max_size: give both, or leave it out"),
        (
            {"max_size": 5, "remover": "lowest_priority"},
            'remover="lowest_priority" needs priorities, and Uniform() has none',
        ),
        (
            {"max_size": 5, "distribution": dr.Sweep()},
            "max_size does not apply to Sweep(passes=1), which sets the number of times for each id itself: "
            "leave it out",
        ),
        (
            {"where": "length > 3"},
            "where must be a function of an episode, such as lambda episode: episode.total_reward > 20, "
            "not 'length > 3'",
        ),
        ({"distribution": "uniform"}, "distribution must be a distribution such as Uniform(), not 'uniform'"),
        ({"view": 5}, "view must be a view such as Transitions(), not 5"),
        # Most of a view, and most of a store: they would do without the rest until it is asked for.
        ({"view": Nearly("starts", "reader")}, "view must be a view such as Transitions(), not nearly"),
        ({"store": Nearly("snapshot", "refresh")}, "store must be a Store or its path, not nearly"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(store: Store, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Sampler(**{"store": store, "view": dr.Transitions(), **arguments})


def test_the_seed_makes_the_draws(store: Store) -> None:
    def draws(seed: int | None) -> list[int]:
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=20, seed=seed)
        return [i for _ in range(3) for i in sampler.sample().index.tolist()]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert draws(None) != draws(None)


def test_a_batch_of_another_size_may_be_asked_for(store: Store) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=4)
    assert [sampler.sample(size).batch_size for size in (None, 1, 700, None)] == [4, 1, 700, 4]
    for size in (0, -3, 1.0, "2", True):
        with pytest.raises(ValueError, match="^batch_size must be an int of at least 1"):
            sampler.sample(size)


def test_beta_means_nothing_to_uniform_draws(store: Store) -> None:
    with pytest.raises(ValueError, match=r"^beta means nothing to Uniform\(\), whose weights are all 1: leave it out$"):
        dr.Sampler(store, dr.Transitions()).sample(beta=0.5)


def test_weights_are_those_of_the_distribution(store: Store) -> None:
    class Halves(dr.Uniform):
        weighted = True

        def weigh(self, draw: Any, beta: float | None, batches: int = 0) -> np.ndarray:
            return np.full(len(draw.ids), 0.5 if beta is None else beta, np.float32)

    sampler = dr.Sampler(store, dr.Transitions(), Halves(), batch_size=3)
    assert sampler.sample().weight.tolist() == [0.5] * 3
    assert sampler.sample(beta=0.25).weight.tolist() == [0.25] * 3


def test_a_distribution_may_give_ids_with_gaps_in_memory(store: Store) -> None:
    class EverySecond(dr.Uniform):
        def draw(self, population: Any, size: int, rng: np.random.Generator) -> Any:
            return replace(drawn := super().draw(population, 2 * size, rng), ids=drawn.ids[::2])

    samplers = [
        dr.Sampler(store, dr.Transitions(), rule, batch_size=size, seed=0)
        for rule, size in ((EverySecond(), 8), (dr.Uniform(), 16))
    ]
    for _ in range(3):  # chunks are mapped by the first batch
        half, whole = (sampler.sample() for sampler in samplers)
        assert half.index.tolist() == whole.index[::2].tolist()
        assert half.obs.equal(whole.obs[::2])


def test_an_empty_store_is_not_enough_data() -> None:
    sampler = dr.Sampler(Store(Snapshot(FLAT_SCHEMA, [])), dr.Transitions())
    message = f"the store has 0 steps, 0 of them sampleable as {dr.Transitions()}; 1 is needed"
    with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}$"):
        sampler.sample()


def test_steps_that_are_not_sampleable_yet_are_counted() -> None:
    rng = np.random.default_rng(0)
    store = Store(Snapshot(FLAT_SCHEMA, [Segment([[episode(FLAT_SCHEMA, 3, "open", True, rng)]])]))
    with pytest.raises(dr.NotEnoughData, match="^the store has 3 steps, 0 of them sampleable as "):
        dr.Sampler(store, dr.Transitions(4)).sample()
    assert dr.Sampler(store, dr.Transitions(3), batch_size=2).sample().n_steps.tolist() == [3, 3]


def test_one_sampleable_step_is_enough_for_any_batch() -> None:
    assert dr.Sampler(Store(snapshot_of([1])), dr.Transitions(), batch_size=64).sample().batch_size == 64


def test_gather_gives_exactly_these_ids_in_their_order(store: Store) -> None:
    sampler = dr.Sampler(store, dr.Transitions(2), batch_size=8, seed=0)
    batch = sampler.sample()
    for ids in (batch.index, batch.index.numpy(), batch.index.tolist(), batch.index.numpy().astype("u8")):
        again = sampler.gather(ids)
        for name in batch.keys():  # noqa: SIM118  (a batch iterates over its names too)
            assert again[name].equal(batch[name])
    assert sampler.gather([]).batch_size == 0
    assert sampler.gather(sorted(store.snapshot.model)[3:5]).index.tolist() == sorted(store.snapshot.model)[3:5]


def test_gather_without_ids_gives_the_last_batch_that_was_delivered(store: Store) -> None:
    sampler = dr.Sampler(store, dr.Transitions(2), batch_size=8, prefetch=2, seed=0)
    for size in (None, 8, 3):
        batch = sampler.sample(size)
        again = sampler.gather()
        assert again.keys() == batch.keys()
        assert all(again[name].equal(batch[name]) for name in batch.keys())  # noqa: SIM118


def test_gather_without_ids_does_not_look_for_new_steps() -> None:
    store = Store(snapshot_of([5]), [snapshot_of([5]), snapshot_of([30])])
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0)
    index, looked = sampler.sample().index, store.snapshot
    assert sampler.gather().index.equal(index)
    assert store.snapshot is looked
    sampler.gather(index)
    assert store.snapshot is not looked


def test_gather_without_ids_needs_a_batch_of_the_view_and_of_this_run(store: Store) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0)
    state = sampler.state_dict()

    def set_view() -> None:
        sampler.view = dr.Transitions(2)

    for change in (lambda: None, set_view, lambda: sampler.load_state_dict(state)):
        change()
        with pytest.raises(dr.NotEnoughData, match=r"^no batch was delivered yet: draw one first, or give ids$"):
            sampler.gather()
        sampler.sample()
        assert sampler.gather().batch_size == 8


def test_a_sampler_names_its_store(store: Store) -> None:
    assert dr.Sampler(store, dr.Transitions()).store is store


@pytest.mark.parametrize("ids", [[5], [-1], [[2 << 35]], [0.5], np.array([2**64 - 1], np.uint64), ["a"]])
def test_gather_refuses_what_is_no_id(store: Store, ids: Any) -> None:
    with pytest.raises(dr.InvalidIndex):
        dr.Sampler(store, dr.Transitions()).gather(ids)


def test_the_view_is_changed_at_run_time(store: Store) -> None:
    sampler = dr.Sampler(store, dr.Transitions(1), batch_size=64, seed=0)
    assert sampler.sample().n_steps.max() == 1
    sampler.view = dr.Transitions(5)
    assert sampler.view == dr.Transitions(5)
    assert sampler.sample().n_steps.max() == 5
    with pytest.raises(ValueError, match="^frame_stack names 'image'"):
        sampler.view = dr.Transitions(frame_stack={"image": 2})
    assert sampler.view == dr.Transitions(5)
    sampler.distribution = dr.Uniform()
    assert sampler.sample().n_steps.max() == 5


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("large", [True, False])
def test_a_batch_is_what_it_was_planned_from(prefetch: int, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    least = 70_000 if large else 80_000  # a batch takes 75 kB
    monkeypatch.setattr("diskreplay.sampling.prefetcher.LEAST_FOR_A_THREAD", least)
    rng = np.random.default_rng(0)
    growing = [episode(FLAT_SCHEMA, 5 * (i + 1), "open", True, rng) for i in range(12)]
    snapshots = [Snapshot(FLAT_SCHEMA, [Segment([[made]])]) for made in growing]
    store = Store(snapshots[0], snapshots[1:])
    with dr.Sampler(store, dr.Transitions(), batch_size=1000, prefetch=prefetch, seed=0) as sampler:
        for i in range(8):
            batch = sampler.sample()
            assert store.snapshot is snapshots[1 + i + (prefetch if large else 0)]
            # It holds what the store held when it was drawn.
            assert batch.index.max() == (2 << 35) + 5 * (i + 2) - 1
            assert set(batch.action.tolist()) == {int(step.action["action"]) for step in growing[i + 1].steps}


def test_changing_the_view_drops_what_was_planned() -> None:
    lane = [episode(FLAT_SCHEMA, 9, "open", True, np.random.default_rng(0))]
    sampler = dr.Sampler(
        Store(Snapshot(FLAT_SCHEMA, [Segment([lane])])), dr.Transitions(1), batch_size=64, prefetch=4, seed=0
    )
    assert sampler.sample().index.max() == (2 << 35) + 8
    sampler.view = dr.Transitions(9)
    # Of what was drawn ahead, only the first step has a window of nine.
    assert set(sampler.sample().index.tolist()) == {2 << 35}


class Vanishing(Snapshot):
    """Its segment files are gone: nothing can be mapped."""

    def leaf(self, path: str) -> Any:
        raise SegmentGone("gone")


def test_a_batch_whose_segment_is_gone_is_drawn_again() -> None:
    gone, left = Vanishing(FLAT_SCHEMA, snapshot_of([4]).segments), snapshot_of([9])
    store = Store(gone, [gone, gone, left])
    assert dr.Sampler(store, dr.Transitions(), batch_size=5, refresh=False).sample().batch_size == 5
    assert store.snapshot is left


def test_a_batch_that_is_drawn_again_counts_the_steps_that_it_has() -> None:
    store = Store(snapshot_of([4]), [snapshot_of([9])])
    sampler = dr.Sampler(store, dr.Episodes(), batch_size=3, refresh=False)
    reader: Any = sampler._makers.gatherer.reader
    fill = reader.fill

    def gone_at_first(*args: Any) -> None:
        reader.fill = fill
        raise SegmentGone("gone")

    reader.fill = gone_at_first
    assert sampler.sample().obs.shape[:2] == (3, 9)
    assert sampler.stats()["steps"] == 27


@pytest.mark.parametrize("view", [dr.Episodes(), dr.Transitions()])
def test_a_sweep_that_has_nothing_left_after_an_eviction_ends(view: Any) -> None:
    segments = snapshot_of([4]).segments
    store = Store(Vanishing(FLAT_SCHEMA, segments), [Snapshot(FLAT_SCHEMA, [None, *snapshot_of([1]).segments])])
    sampler = dr.Sampler(store, view, dr.Sweep(passes=1), batch_size=50, refresh=False)
    with pytest.raises(StopIteration):
        sampler.sample()
    assert sampler.stats()["batches"] == 0


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("size", [None, 2])
def test_a_sweep_gives_what_is_left_of_a_batch_whose_segment_is_gone(prefetch: int, size: int | None) -> None:
    two = [*snapshot_of([5]).segments, *snapshot_of([6]).segments]
    left = Snapshot(FLAT_SCHEMA, [None, two[1]])
    store = Store(Vanishing(FLAT_SCHEMA, two), [left] * 9)
    sampler = dr.Sampler(
        store, dr.Transitions(), dr.Sweep(passes=1), batch_size=3, refresh=False, prefetch=prefetch, seed=1
    )
    given = []
    with suppress(StopIteration):
        while True:
            given.append(sampler.sample(size).index.tolist())
    assert sorted(step for ids in given for step in ids) == sorted(left.model)
    assert all(given)
    if not prefetch:  # else a batch behind the first may have been full already
        assert {len(ids) for ids in given} == {size or 3}


@pytest.mark.parametrize("at", ["count_steps", "fill"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("size", [None, 4])
def test_an_interrupt_loses_no_id_of_a_sweep(at: str, prefetch: int, size: int | None) -> None:
    snapshot = snapshot_of([3] * 11)
    view = dr.Episodes() if at == "count_steps" else dr.Transitions()
    sampler = dr.Sampler(Store(snapshot), view, dr.Sweep(passes=1), batch_size=2, prefetch=prefetch, seed=0)
    reader, method = sampler._makers.gatherer.reader, getattr(sampler._makers.gatherer.reader, at)
    calls = []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) in (2, 3):
            raise KeyboardInterrupt
        return method(*args)

    setattr(reader, at, interrupted)
    given, interrupts = [], 0
    while True:
        try:
            given += sampler.sample(size).index.tolist()
        except KeyboardInterrupt:
            interrupts += 1
        except StopIteration:
            break
    assert interrupts == 2
    assert len(given) == (11 if at == "count_steps" else 33) == len(set(given))
    assert sampler.stats()["steps"] == 33


def test_gather_of_an_id_whose_segment_is_gone_is_an_invalid_index() -> None:
    gone = Vanishing(FLAT_SCHEMA, snapshot_of([4]).segments)
    store = Store(gone, [gone, Snapshot(FLAT_SCHEMA, [None])])
    with pytest.raises(dr.InvalidIndex, match=f"^id {2 << 35} is not in the store: it was evicted, or never existed$"):
        dr.Sampler(store, dr.Transitions()).gather([2 << 35])


def test_stats_count_batches_and_steps(store: Store) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=10)
    assert sampler.stats()["steps_per_second"] == 0.0
    for _ in range(4):
        sampler.sample()
    stats = sampler.stats()
    assert (stats["batches"], stats["steps"], stats["replay_ratio"]) == (4, 40, 40 / 47)
    assert stats["steps_per_second"] > 0
    assert stats["seconds_planning"] > 0
    assert stats["seconds_gathering"] > 0
    assert stats["seconds_copying"] == 0


def test_a_device_gets_copies(store: Store) -> None:
    for view in (dr.Transitions(), dr.Transitions(frame_stack=3)):
        with (
            dr.Sampler(store, view, batch_size=4, seed=0, device="meta") as elsewhere,
            dr.Sampler(store, view, batch_size=4, seed=0) as here,
        ):
            batch, like = elsewhere.sample(), here.sample()
            assert list(batch) == list(like)
            for name in like:
                assert batch[name].device.type == "meta"
                assert (batch[name].shape, batch[name].dtype) == (like[name].shape, like[name].dtype)
                assert batch[name].is_contiguous()


class Weighing(dr.Uniform):
    """Weighs with whatever it is given."""

    weighted = True

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def weigh(self, draw: Any, beta: Any, batches: int = 0) -> Any:
        return self.weights


@pytest.mark.parametrize("weights", [np.arange(4.0), [0, 1, 2, 3], np.arange(4, dtype=np.float32)], ids=repr)
def test_weights_of_any_sort_become_float32(store: Any, weights: Any) -> None:
    batch = dr.Sampler(store, dr.Transitions(), Weighing(weights), batch_size=4).sample()
    assert batch.weight.dtype == torch.float32
    assert batch.weight.tolist() == [0, 1, 2, 3]


def test_weights_that_are_too_few_are_refused(store: Any) -> None:
    with pytest.raises(ValueError, match="could not broadcast"):
        dr.Sampler(store, dr.Transitions(), Weighing(np.ones(3, np.float32)), batch_size=4).sample()


def test_a_closed_sampler_refuses_and_its_batches_stay(store: Store) -> None:
    with dr.Sampler(store, dr.Transitions(), batch_size=4, seed=0) as sampler:
        batch = sampler.sample()
        was = batch.obs.clone()
    for call in (sampler.sample, lambda: sampler.gather([2 << 35])):
        with pytest.raises(dr.Closed, match="^this sampler is closed; make another$"):
            call()
    assert batch.obs.equal(was)
    sampler.close()


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", 99, "mps:7"])
def test_a_device_that_torch_cannot_use_is_refused_with_those_that_it_can(tmp_store, device):
    with dr.create(tmp_store, dr.Schema(dr.Field((), "f4"), dr.Field((), "f4"))) as store, store.writer() as writer:
        writer.append_episode(np.zeros(3), np.zeros(2), np.zeros(2), terminated=True)
        writer.flush()
        store.refresh()
        said = r'^torch cannot use device=.* here; choose one of "cpu".*, or leave it out$'
        with pytest.raises(ValueError, match=said):
            dr.Sampler(store, dr.Transitions(), device=device)
        with dr.Sampler(store, dr.Transitions(), batch_size=1) as sampler, pytest.raises(ValueError, match=said):
            sampler.sample().to(device)
    with pytest.raises(ValueError, match=said):
        dr.ReplayBuffer(8, (2,), (1,), device=device)
