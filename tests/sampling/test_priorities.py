"""Samplers with priorities, and samplers of samplers: what is drawn, updated, switched and mixed."""

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr
from tests.testing.device import Device

SCHEMA = dr.Schema(obs=dr.Field((2,), "float32"), action=dr.Field((), "int64"))


def filled(path: Path, lengths: tuple[int, ...], action: int = 0) -> Any:
    store = dr.create(path, SCHEMA)
    with store.writer() as writer:
        for steps in lengths:
            obs = np.random.default_rng(steps).standard_normal((steps + 1, 2), dtype=np.float32)
            writer.append_episode(obs, np.full(steps, action), np.ones(steps, np.float32), terminated=True)
    store.refresh()
    return store


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with filled(tmp_path / "store", (30, 80, 20)) as store:
        yield store


def shares(sampler: Any, draws: int = 40) -> dict[int, float]:
    ids = torch.cat([sampler.sample().index for _ in range(draws)]).tolist()
    return {i: ids.count(i) / len(ids) for i in set(ids)}


@pytest.mark.parametrize("form", [lambda td: td, lambda td: td[:, None], torch.from_numpy])
def test_updated_steps_are_drawn_in_proportion(store: Any, form: Any) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(alpha=1.0, beta=1.0), batch_size=130, seed=0)
    ids = sampler.sample().index.unique()
    td = np.full(len(ids), 1e-9)
    td[0] = -5.0
    assert sampler.update_priorities(ids, form(td)) == 0
    others = np.array([i for episode in store.episodes for i in episode.ids if i not in ids.tolist()])
    assert sampler.update_priorities(others, np.zeros(len(others))) == 0
    assert shares(sampler)[int(ids[0])] > 0.99


def test_a_schedule_counts_delivered_batches(store: Any) -> None:
    schedule = dr.Linear(0.0, 1.0, 3)
    sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(alpha=1.0, beta=schedule), batch_size=32, seed=0)
    ids, errors = np.concatenate([e.ids for e in store.episodes]), np.arange(130.0) + 1
    sampler.update_priorities(ids, errors)
    for beta in (0.0, 1 / 3, 2 / 3, 1.0):
        batch = sampler.sample()
        priorities = errors[np.searchsorted(ids, batch.index.numpy())]
        np.testing.assert_allclose(batch.weight.numpy(), (priorities.min() / priorities) ** beta, rtol=1e-5)
        assert beta == 0.0 or batch.weight.min() < 1.0


def test_priorities_outlive_switches_of_view_and_distribution(store: Any) -> None:
    sampler = dr.Sampler(store, dr.Transitions(n_step=5), dr.Prioritized(alpha=1.0), batch_size=64, seed=0)
    assert repr(sampler) == "Prioritized(alpha=1, beta=0.4) over Transitions(n_step=5)"
    ids = np.concatenate([episode.ids for episode in store.episodes])
    sampler.update_priorities(ids, np.where(ids == ids[7], 1.0, 0.0))
    sampler.view, sampler.distribution = dr.Transitions(n_step=1), dr.Uniform()
    assert float(sampler.sample().weight.min()) == 1.0
    assert max(shares(sampler).values()) < 0.1
    sampler.view = dr.Sequences(length=10, overlap=5)
    assert sampler.sample().obs.shape == (64, 10, 2)
    sampler.view, sampler.distribution = dr.Transitions(), dr.Prioritized(alpha=1.0, beta=1.0)
    assert shares(sampler)[int(ids[7])] > 0.99


def test_updates_without_priorities_are_refused(store: Any) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=8)
    with pytest.raises(ValueError, match=r"Uniform\(\) has no priorities"):
        sampler.update_priorities(sampler.sample().index, np.ones(8))


def test_a_distribution_with_state_belongs_to_one_sampler(store: Any) -> None:
    distribution = dr.Prioritized()
    sampler = dr.Sampler(store, dr.Transitions(), distribution)
    message = "this Prioritized holds the state of another sampler: make a new Prioritized for each sampler"
    for taken in (distribution, dr.Mixture([(dr.Uniform(), 1), (distribution, 1)])):
        with pytest.raises(ValueError, match=f"^{message}$"):
            dr.Sampler(store, dr.Transitions(), taken)
    sampler.distribution = distribution


def test_mixed_batches_hold_fixed_shares_and_updates_find_their_way(store: Any, tmp_path: Path) -> None:
    with filled(tmp_path / "other", (50,), action=1) as other:
        own = dr.Sampler(store, dr.Transitions(), dr.Prioritized(alpha=1.0), seed=0)
        demonstrations = dr.Sampler(other, dr.Transitions(), dr.Prioritized(alpha=1.0), seed=1)
        mixed = dr.MixedSampler([(own, 3), (demonstrations, 1)], batch_size=64, seed=0)
        batch = mixed.sample()
        assert batch.action.tolist() == [0] * 48 + [1] * 16
        assert mixed.gather(batch.index.flip(0)).obs.equal(batch.obs.flip(0))
        best = batch.index[-1:]
        every = mixed.gather(batch.index.unique()).index
        assert mixed.update_priorities(every, torch.where(every == best, 100.0, 0.0)) == 0
        assert (mixed.sample().index[48:] == best).float().mean() > 0.5
        counts = [int(mixed.sample(3).action.sum()) for _ in range(200)]
        assert set(counts) == {0, 1}
        assert 0.6 < np.mean(counts) < 0.9
        with pytest.raises(dr.InvalidIndex, match="belongs to none of the 2 samplers"):
            mixed.update_priorities([2 << 58], [1.0])


def test_mixed_samplers_refuse_what_does_not_fit(store: Any) -> None:
    plain = dr.Sampler(store, dr.Transitions())
    for bad in ([], [plain], [(plain, 0.0)], [(store, 1.0)], [(plain, float("nan"))]):
        with pytest.raises(ValueError, match=r"samplers must be|shares must be"):
            dr.MixedSampler(bad)


def test_a_batch_knows_what_its_ids_are_ids_of(store: Any) -> None:
    sampler = dr.Sampler(store, dr.Transitions(n_step=3), dr.Prioritized(), batch_size=8, seed=0)
    batch = sampler.sample()
    assert batch.kind == sampler.view.kind == ("transitions",)
    made = [batch.to("cpu"), *batch.minibatches(3), batch.select([0, 1]), copy.deepcopy(batch)]
    copies = [batch, *made, pickle.loads(pickle.dumps(batch))]
    assert [other.kind for other in copies] == [batch.kind] * 8
    assert sampler.gather(batch.index.numpy()).kind == batch.kind
    sampler.view = dr.Sequences(length=10, overlap=5)
    assert sampler.sample().kind == ("sequences", 10, 5, True)
    skipped = [sampler.update_priorities(other.index, np.ones(other.batch_size)) for other in copies]
    assert skipped == [other.batch_size for other in copies] == [8, 8, 3, 3, 2, 2, 8, 8]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_late_update_of_another_kind_is_skipped_and_counted(store: Any, prefetch: int) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(alpha=1.0), batch_size=64, seed=0, prefetch=prefetch)
    late = sampler.sample()
    sampler.view = dr.Sequences(length=10, overlap=5)
    before = sampler.state_dict()["planner"]["state"]
    starts = set(sampler.ids().tolist())
    both = starts & set(late.index.tolist())
    assert 4 < len(both) < len(starts) / 2

    def share() -> float:
        return sum(part for step_id, part in shares(sampler).items() if step_id in both)

    td = np.full(64, 1e3)
    assert sampler.update_priorities(late.index, td) == 64
    assert sampler.update_priorities(late.to("cpu").index, td) == 64
    assert sampler.update_priorities(late.index.numpy(), td, kind=late.kind) == 64
    assert share() < 0.6
    assert {kind: table["given"].any() for kind, table in before.items()} == {'["transitions"]': False}
    # Ids of which nothing says what they are ids of are taken for those of the view.
    assert sampler.update_priorities(late.index.numpy(), td) < 64
    assert share() > 0.98
    with pytest.raises(ValueError, match="kind must be the kind of a batch or view"):
        sampler.update_priorities(late.index, td, kind="transitions")  # type: ignore[arg-type]
    sampler.distribution = dr.Uniform()
    sampler.view = dr.Transitions()
    assert sampler.update_priorities(late.index, td) == 0


def test_a_mixed_sampler_skips_what_is_of_another_kind(store: Any, tmp_path: Path) -> None:
    with filled(tmp_path / "other", (50,), action=1) as other:
        parts = [dr.Sampler(each, dr.Transitions(), dr.Prioritized(), seed=0) for each in (store, other)]
        mixed = dr.MixedSampler([(parts[0], 1), (parts[1], 1)], batch_size=64, seed=0)
        batch = mixed.sample()
        assert batch.kind == ("mixed", ("transitions",), ("transitions",))
        assert mixed.gather(batch.index).kind == batch.kind
        assert mixed.update_priorities(batch.index, np.ones(64)) == 0
        alone = parts[0].sample(64)
        assert parts[0].update_priorities(batch.index, np.ones(64)) == 64
        assert mixed.update_priorities(alone.index, np.ones(64)) == 64
        parts[1].view = dr.Sequences(length=10, overlap=5)
        assert mixed.update_priorities(batch.index, np.ones(64)) == 32
        assert mixed.update_priorities(batch.index.numpy(), np.ones(64), kind=batch.kind) == 32


def test_no_thread_that_copies_outlives_its_sampler(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskreplay.views.base.PART", 1)
    with dr.create(tmp_store, SCHEMA) as store:
        with store.writer() as writer:
            obs, ones = np.zeros((51, 2)), np.ones(50)
            writer.append_episode(obs, np.zeros(50, int), ones, terminated=True, priority=ones)
        store.refresh()
        # Kept: what only the collector ends has not ended.
        sampler = dr.Sampler(store, dr.Sequences(5, 2), dr.Prioritized(), batch_size=8, seed=0)
        with sampler:
            batch = sampler.sample()
            sampler.update_priorities(batch.index, np.ones((8, 5)))
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("diskreplay-copy")]


def test_ids_and_errors_of_a_device_are_waited_for_once(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", device.current)
    sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(alpha=1.0, beta=1.0), batch_size=130, seed=0)
    ids = sampler.ids()
    errors = np.where(ids == ids[7], 3.0, 1e-9)
    assert sampler.update_priorities(device.tensor(ids), device.tensor(errors)) == 0
    assert device.stream.waits == 1
    assert shares(sampler)[int(ids[7])] > 0.99
    mixed = dr.MixedSampler([(sampler, 1)], batch_size=8, seed=0)
    assert mixed.update_priorities(device.tensor(ids), device.tensor(errors[::-1].copy())) == 0
    assert device.stream.waits == 2
    assert shares(sampler)[int(ids[-8])] > 0.99
