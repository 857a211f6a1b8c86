"""Data sets for `torch.utils.data.DataLoader`: batches of a growing store, or the items of a snapshot."""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.interop.step_values import row_of

with dr.MissingExtra.raised_for("a data set for a DataLoader", "torch"):
    from torch import distributed as dist
    from torch.utils.data import Dataset, IterableDataset, get_worker_info

PathLike = str | os.PathLike[str]


class StoreDataset(IterableDataset[dr.Batch]):
    """Batches of a store, drawn in the worker processes of a loader: ``DataLoader(dataset, batch_size=None)``.

    Each worker of each rank draws its own share of the ids with a `Sampler`. Shares are disjoint and about equal, and
    together have all ids, also while the store grows; see `rank` of `Sampler`. Steps that are added later are drawn,
    too. The data set ends with its distribution: in a `Sweep` of one pass, all workers and ranks together draw every id
    once.

    The trainer cannot update priorities, since the priorities are in the workers. For prioritized replay use a
    `Sampler`, with `prefetch`.

    Parameters
    ----------
    store : Store or path
        The store; each worker opens it with mode "r".
    view, distribution, batch_size, seed, fields, where, max_times_sampled, transform
        As for `Sampler`; each worker has its own copies. Spawned workers need arguments that can be pickled. With a
        seed, the batches of a worker depend only on the seed, the share and the store.
    rank, world_size : int or None
        The number of this process, and the number of processes that train together. None: the values of
        `torch.distributed` if it is initialized, otherwise one process.

    Raises
    ------
    ValueError
        An argument is invalid, or the view or `fields` names a field that the store lacks.
    StoreNotFound
        There is no store at the path.
    """

    def __init__(
        self,
        store: dr.Store | PathLike,
        view: Any,
        distribution: Any = None,
        *,
        batch_size: int = 256,
        seed: int | None = None,
        fields: Sequence[str] | None = None,
        where: Callable[[dr.Episode], bool] | None = None,
        max_times_sampled: int | None = None,
        transform: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError(f"give both rank and world_size, or neither: not {rank!r} and {world_size!r}")
        if rank is None or world_size is None:
            rank, world_size = _place()
        self._path, self._view, self._distribution = _path_of(store), view, distribution
        self._seed, self._rank, self._world_size, self._transform = seed, rank, world_size, transform
        self._arguments: dict[str, Any] = {
            "batch_size": batch_size,
            "fields": fields,
            "where": where,
            "max_times_sampled": max_times_sampled,
        }
        # Make a sampler to check the arguments: an invalid argument must raise an error here, not in a worker.
        self._sampler(rank, world_size).close()

    def __repr__(self) -> str:
        return f"StoreDataset({self._path!r}, {self._view})"

    def _sampler(self, rank: int, world_size: int) -> dr.Sampler:
        seed = None if self._seed is None else int(np.random.SeedSequence([self._seed, rank]).generate_state(1)[0])
        # A distribution and a transform may have state, so each sampler gets copies.
        distribution, transform = copy.deepcopy((self._distribution, self._transform))
        own: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world_size, "transform": transform}
        return dr.Sampler(self._path, self._view, distribution, **own, **self._arguments)

    def __iter__(self) -> Iterator[dr.Batch]:
        """Yield the batches of this worker. Each call starts from the beginning.

        Raises
        ------
        NotEnoughData
            There is no id to draw, in the store or in this worker's share.
        """
        rank, world_size = self._rank, self._world_size
        if (worker := get_worker_info()) is not None:
            rank, world_size = rank * worker.num_workers + worker.id, world_size * worker.num_workers
        with self._sampler(rank, world_size) as sampler:
            yield from sampler


class MapDataset(Dataset[Any]):
    """The items of a snapshot of a store, by number, for offline training.

    ``dataset[i]`` is one item: a dict of tensors without a leading axis. So a loader makes batches as usual:
    ``DataLoader(dataset, batch_size=256, shuffle=True)``. If ``numbers`` is a slice, a list or an array,
    ``dataset[numbers]`` is a `Batch`. This is many times faster than items one by one:
    ``DataLoader(dataset, batch_size=None, sampler=BatchSampler(RandomSampler(dataset), 256, drop_last=False))``.

    Steps that are added later are not in the data set. Reading an item that the store has evicted raises InvalidIndex.

    Parameters
    ----------
    store : Store or path
        The store; each process opens it with mode "r".
    view, fields, where
        As for `Sampler`. The view is `Transitions()`, `Sequences()` or `Episodes()`. Items lack the field ``weight``.

    Raises
    ------
    ValueError
        An argument is invalid, or the view or `fields` names a field that the store lacks.
    StoreNotFound
        There is no store at the path.
    """

    def __init__(
        self,
        store: dr.Store | PathLike,
        view: Any,
        *,
        fields: Sequence[str] | None = None,
        where: Callable[[dr.Episode], bool] | None = None,
    ) -> None:
        self._path, self._view, self._fields = _path_of(store), view, fields
        self._sampler: dr.Sampler | None = None
        self._pid = -1
        with dr.Sampler(self._path, view, fields=fields, where=where) as sampler:
            self.ids: NDArray[np.int64] = sampler.ids()

    def __repr__(self) -> str:
        return f"MapDataset({self._path!r}, {self._view}, {len(self)} items)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sampler": None, "_pid": -1}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: Any) -> Any:
        """Return the item with this number; for several numbers, a `Batch`.

        Raises IndexError for a number out of range.
        """
        if isinstance(number, int | np.integer):
            if not -len(self) <= number < len(self):
                raise IndexError(f"item {number} of {len(self)} does not exist")
            return self.__getitems__([int(number)])[0]
        return self._gather(self.ids[number if isinstance(number, slice) else np.asarray(number)])

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Return the items with these numbers, for a loader that collates them. The items are gathered by one call."""
        return _items(self._gather(self.ids[numbers]))

    def _gather(self, ids: NDArray[np.int64]) -> dr.Batch:
        if self._sampler is None or self._pid != os.getpid():
            self._sampler = dr.Sampler(self._path, self._view, fields=self._fields)
            self._pid = os.getpid()
        return self._sampler.gather(ids)


def _items(batch: dr.Batch) -> list[dict[str, Any]]:
    fields = {name: batch[name] for name in batch if name != "weight"}
    return [row_of(fields, i) for i in range(batch.batch_size)]


def _path_of(store: dr.Store | PathLike) -> str:
    return str(store.path if isinstance(store, dr.Store) else store)


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
