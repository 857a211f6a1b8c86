"""Data sets for loaders: every id once over all workers and ranks, and the items of a store by number."""

import json
import multiprocessing
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import diskreplay as dr
from diskreplay.interop.torch import MapDataset, StoreDataset
from tests.testing.support import append_numbered, serial_schema

STEPS = 2000


def filled(path, steps=STEPS):
    store = dr.create(path, serial_schema())
    with store.writer() as writer:
        for first in range(0, steps, 50):
            append_numbered(writer, range(first, first + 50), end="terminated")
    store.refresh()
    return store


def every_id(store):
    return np.sort(np.concatenate([episode.ids for episode in store.episodes]))


def loader(dataset, workers):
    # Some libraries, TorchRL among them, have processes spawned from the moment they are imported.
    return DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context="fork" if workers else None
    )


def test_reprs_say_what_is_drawn_from_where(tmp_store):
    with filled(tmp_store, 50) as store:
        batches, items = StoreDataset(store, dr.Transitions()), MapDataset(store, dr.Transitions(n_step=2))
        assert repr(batches) == f"StoreDataset('{store.path}', Transitions(n_step=1))"
        assert repr(items) == f"MapDataset('{store.path}', Transitions(n_step=2), 50 items)"


def test_a_sampler_in_a_worker_names_the_data_set_to_use(tmp_store):
    with filled(tmp_store, 50) as store, dr.Sampler(store, dr.Transitions()) as sampler:

        def draw():
            return next(iter(loader(sampler, 1)))

        said = r"make one there, with a seed or rank of its own, or give a DataLoader with workers a .*\.StoreDataset"
        with pytest.raises(dr.ReplayError, match=said) as refused:
            draw()
        # The traceback keeps the iterator. If the garbage collector ends it, torch waits 5 s for the worker.
        traceback.clear_frames(refused.tb)


@pytest.mark.parametrize("workers", [0, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2))])
def test_a_sweep_gives_every_id_once_over_all_workers(tmp_store, workers):
    with filled(tmp_store) as store:
        dataset = StoreDataset(store, dr.Transitions(), dr.Sweep(), batch_size=64, seed=0)
        for _ in range(2):  # each iteration begins anew
            batches = list(loader(dataset, workers))
            assert all(type(batch) is dr.Batch for batch in batches)
            ids = np.concatenate([batch.index.numpy() for batch in batches])
            np.testing.assert_array_equal(np.sort(ids), every_id(store))
            serial = np.concatenate([batch.serial.numpy() for batch in batches])
            np.testing.assert_array_equal(np.sort(serial), np.arange(STEPS))


@pytest.mark.slow
def test_workers_have_even_shares_that_do_not_overlap_while_the_store_grows(tmp_store):
    with filled(tmp_store, 1000) as store, store.writer() as writer:
        dataset = StoreDataset(tmp_store, dr.Transitions(), batch_size=256, seed=0)
        # A worker's batches come in turn.
        batches = iter(loader(dataset, 2))
        seen = [set(), set()]
        for number in range(60):
            seen[number % 2] |= set(next(batches).index.tolist())
            if number == 20:
                append_numbered(writer, range(1000, 2000), end="terminated")
        store.refresh()
        assert not seen[0] & seen[1]
        assert len(seen[0] | seen[1]) > 0.95 * len(store) > 1800
        assert abs(len(seen[0]) - len(seen[1])) < 5 * np.sqrt(len(store)) / 2


@pytest.mark.slow
def test_a_seed_makes_the_batches(tmp_store):
    with filled(tmp_store) as store:

        def drawn(seed):
            dataset = StoreDataset(store, dr.Transitions(), dr.Prioritized(), batch_size=32, seed=seed)
            batches = iter(loader(dataset, 2))
            return [next(batches).index.tolist() for _ in range(6)]

        first = drawn(3)
        assert first == drawn(3) != drawn(4)
        assert first[0] != first[1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_transforms_run_in_the_workers(tmp_store, workers):
    def doubled(batch):
        return {"serial": batch.serial * 2}

    with filled(tmp_store, 500) as store:
        transform = [dr.Normalize(), doubled]
        dataset = StoreDataset(store, dr.Transitions(), dr.Sweep(), batch_size=64, seed=0, transform=transform)
        for _ in range(2):
            batches = list(loader(dataset, workers))
            serial = np.concatenate([batch.serial.numpy() for batch in batches])
            np.testing.assert_array_equal(np.sort(serial), 2 * np.arange(500))
            # Observations are their numbers: normalised, they are the same in all workers.
            obs = np.concatenate([batch.obs[:, 0].numpy() for batch in batches])
            expected = (serial / 2 - 249.5) / np.sqrt((500**2 - 1) / 12)
            np.testing.assert_allclose(obs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("kind", [StoreDataset, MapDataset])
def test_what_is_spawned_opens_the_store_itself(tmp_store, kind):
    with filled(tmp_store, 200) as store:
        of_batches = kind is StoreDataset
        sweep = {"distribution": dr.Sweep(), "batch_size": 16} if of_batches else {}
        dataset = kind(store, dr.Sequences(10, 5), **sweep)
        size = None if of_batches else 16
        batches = DataLoader(dataset, batch_size=size, num_workers=1, multiprocessing_context="spawn")
        ids = np.concatenate([batch["index"].numpy() for batch in batches])
        with dr.Sampler(store, dr.Sequences(10, 5)) as sampler:
            np.testing.assert_array_equal(np.sort(ids), np.sort(sampler.ids()))


RANK = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
from torch.utils.data import DataLoader
import diskreplay as dr
from diskreplay.interop.torch import StoreDataset

path, rendezvous, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
init = "file://" + rendezvous
dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timedelta(minutes=2))
loader = DataLoader(StoreDataset(path, dr.Transitions(), dr.Sweep(), batch_size=50), batch_size=None, num_workers=2)
print(json.dumps([i for batch in loader for i in batch.index.tolist()]))
dist.destroy_process_group()
"""


@pytest.mark.slow(turns=4)
def test_ranks_of_a_process_group_share_the_ids(tmp_path):
    with filled(tmp_path / "store") as store:
        command = [sys.executable, "-c", RANK, str(tmp_path / "store"), str(tmp_path / "rendezvous")]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
            for rank in range(2)
        ]
        found = [json.loads(process.communicate(timeout=600)[0]) for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0]
        np.testing.assert_array_equal(np.sort(found[0] + found[1]), every_id(store))
        assert abs(len(found[0]) - len(found[1])) < 5 * np.sqrt(STEPS) / 2


def test_what_is_invalid_is_refused_before_a_worker_starts(tmp_store):
    with pytest.raises(dr.StoreNotFound):
        StoreDataset(tmp_store, dr.Transitions())
    with filled(tmp_store, 50) as store:
        with pytest.raises(ValueError, match="batch_size"):
            StoreDataset(store, dr.Transitions(), batch_size=0)
        with pytest.raises(ValueError, match="give both rank and world_size, or neither: not 1 and None"):
            StoreDataset(store, dr.Transitions(), rank=1)
        with pytest.raises(ValueError, match="nothing_of_the_kind"):
            MapDataset(store, dr.Transitions(), fields=["nothing_of_the_kind"])


# --- items by number -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [dr.Transitions(n_step=3), dr.Sequences(20, 10), dr.Episodes()], ids=str)
def test_items_are_those_of_the_sampler_by_number(tmp_store, view):
    with filled(tmp_store) as store, dr.Sampler(store, view) as sampler:
        dataset = MapDataset(store, view)
        np.testing.assert_array_equal(dataset.ids, sampler.ids())
        assert len(dataset) == sampler.sampleable
        numbers = [3, 0, len(dataset) - 1, 3]
        batch, expected = dataset[numbers], sampler.gather(sampler.ids()[numbers])
        for name in expected:
            assert torch.equal(batch[name], expected[name])
        item = dataset[-1]
        assert item.keys() == set(expected) - {"weight"}
        assert all(torch.equal(item[name], expected[name][2]) for name in item)
        assert torch.equal(dataset[:2].index, torch.from_numpy(sampler.ids()[:2]))
        with pytest.raises(IndexError, match=f"item {len(dataset)} of {len(dataset)}"):
            dataset[len(dataset)]


def test_a_loader_batches_and_shuffles_items_or_asks_for_batches(tmp_store):
    with filled(tmp_store) as store:
        dataset = MapDataset(store, dr.Transitions())
        dataset[0]  # a forked worker does not use this process's sampler
        context = multiprocessing.get_context("fork")
        collated = DataLoader(dataset, batch_size=100, shuffle=True, num_workers=2, multiprocessing_context=context)
        whole = BatchSampler(RandomSampler(dataset), 100, drop_last=False)
        batched = DataLoader(dataset, batch_size=None, sampler=whole, num_workers=2, multiprocessing_context=context)
        for loader in (collated, batched):
            found = list(loader)
            assert [len(batch["serial"]) for batch in found] == [100] * 20
            serial = torch.cat([batch["serial"] for batch in found])
            np.testing.assert_array_equal(np.sort(serial.numpy()), np.arange(STEPS))
            assert not torch.equal(serial, serial.sort().values)


def test_it_is_the_store_as_it_was(tmp_store):
    with filled(tmp_store, 100) as store, store.writer() as writer:
        dataset = MapDataset(store, dr.Transitions(), where=lambda episode: episode["serial"][0] >= 50)
        append_numbered(writer, range(100, 150), end="terminated")
        assert sorted(dataset[:]["serial"].tolist()) == list(range(50, 100))
        store.resize(capacity=1)
        with pytest.raises(dr.InvalidIndex):
            dataset[0]
