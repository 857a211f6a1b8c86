"""What every view has: where its samples start, a reader that gathers them, and threads that copy with it."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from mmap import MADV_WILLNEED
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import Ints
from diskreplay.kernels.runs import Starts as Starts
from diskreplay.kernels.table import Kernel, chosen
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema, Tree, with_tuples
from diskreplay.workers import Job, Workers

if TYPE_CHECKING:
    from diskreplay.distributions.base import Distribution
    from diskreplay.distributions.population import Crossing
    from diskreplay.distributions.snapshot import EpisodeFilter

Path = tuple[str, ...]

FLOAT32, INT64, BOOL = np.dtype("float32"), np.dtype("int64"), np.dtype("bool")
ALIGNMENT = 64  # a cache line, and what a copy to a device likes

EPISODE_KNOWN = "episode_known"
"""The field that says of which items the values of their episodes were given."""

# Advice of `madvise`.
WILL_NEED = MADV_WILLNEED  # start to read the pages from disk
POPULATE_READ = 22  # wait until they are there, and map them; Linux 5.14


@dataclass(frozen=True)
class Leaf:
    """One array of a batch by name: ("obs",) or ("obs", "image")."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one item."""
        return int(self.dtype.itemsize * prod(self.shape))


class Block:
    """The arrays of one batch of `size` items, laid out one after the other in `memory`.

    `arrays[i]` is (size, *shape) of leaf i, at `addresses[i]`; behind these addresses is a 0.
    """

    def __init__(self, leaves: Sequence[Leaf], size: int, memory: NDArray[np.uint8]) -> None:
        self.leaves = leaves
        self.size = size
        self.memory = memory
        self.offsets, self.nbytes = offsets(leaves, size)
        start = memory.ctypes.data
        self.addresses = np.array([*(start + at for at in self.offsets), 0], np.int64)
        self.arrays = [
            np.ndarray((size, *leaf.shape), leaf.dtype, memory, at)
            for leaf, at in zip(leaves, self.offsets, strict=True)
        ]


def offsets(leaves: Sequence[Leaf], size: int) -> tuple[list[int], int]:
    """Return where each leaf of a batch starts in its memory, and the bytes of the whole."""
    found, end = [], 0
    for leaf in leaves:
        found.append(end)
        end += -(-size * leaf.nbytes // ALIGNMENT) * ALIGNMENT
    return found, end


class Pages(NamedTuple):
    """Ranges of whole pages, in order and apart from each other: addresses and bytes.

    The addresses are good while ``held`` is referenced.
    """

    starts: Ints
    sizes: Ints
    held: tuple[Any, ...] = ()

    def ask(self) -> None:
        """Have them read from disk while the caller goes on."""
        chosen("advise")(self.starts, self.sizes, WILL_NEED)

    def wait(self) -> None:
        """Return when they are in memory; where the system cannot say, whoever reads them waits."""
        chosen("advise")(self.starts, self.sizes, POPULATE_READ)


NO_PAGES = Pages(np.zeros(0, np.int64), np.zeros(0, np.int64))


PART = 512 << 10
"""Bytes from which on a part is worth it: another thread takes a tenth of a millisecond to wake up."""

MOST_THREADS = 4
"""Threads that copy one batch, at the most: as many as most memory has bandwidth for.

On a server with 16 processors, one copies 8 GB/s, two 13, four 18 and eight 21.
"""


class CopyThreads:
    """So many threads, beside the one that asks, for parts of what it copies. They start when they are needed.

    ``least`` is the number of bytes from which on they are worth it; ``jobs`` is empty unless an interrupt came while
    they copied. One thread asks.
    """

    def __init__(self, count: int) -> None:
        self.count, self.least = count, 2 * PART
        self._workers = Workers(count, "diskreplay-copy")
        self.jobs: list[Job[int]] = []

    def parts(self, nbytes: int) -> int:
        """Return in how many parts it is worth it to copy so many bytes: 1 below ``least``."""
        return max(1, min(self.count + 1, nbytes // PART))

    def copy(self, count: int, size: int, work: Callable[[int, int], int]) -> int:
        """Do the items 0 to below `size` in so many parts, all but the first in other threads where these have time.

        ``work(first, stop)`` returns the first item that it could not do, or -1; so does this. When it returns, nobody
        works any more. After an interrupt somebody may: `settle` before anything that `work` uses is changed. Of what
        it uses, `work` holds references.
        """
        self.settle()
        bounds = [part * size // count for part in range(count + 1)]
        self.jobs = [Job(partial(work, first, stop)) for first, stop in pairwise(bounds[1:])]
        try:
            for job in self.jobs:
                self._workers.begin(job)
            bad = work(0, bounds[1])
        finally:
            for job in self.jobs:
                job.withdraw()
        every = [bad, *(job.result() for job in self.jobs)]
        self.jobs = []
        return next((bad for bad in every if bad >= 0), -1)

    def settle(self) -> None:
        """Return when nobody works any more: an interrupt may have kept `copy` from waiting for that."""
        for job in self.jobs:
            job.withdraw()
        self.jobs = []

    def close(self) -> None:
        """End the threads."""
        self._workers.close()


def copying(held: tuple[Any, ...], kernel: Kernel, *arguments: Any) -> Callable[[int, int], int]:
    """Return the work of threads: a kernel that is called with these arguments, the first item and the last but one.

    A thread that an interrupt leaves copying keeps `held` alive: all that the kernel has addresses of.
    """
    return partial(_call, held, kernel, *arguments)


def _call(_held: tuple[Any, ...], kernel: Kernel, *arguments: Any) -> int:
    return int(kernel(*arguments))


def copy_threads(beside: int) -> CopyThreads | None:
    """Return threads that copy; None where the process may use no other processor than the one that asks.

    So many processors are left to what goes on beside the copying.
    """
    count = min(MOST_THREADS, len(os.sched_getaffinity(0)) - beside) - 1
    return CopyThreads(count) if count > 0 else None


class Reader:
    """A view bound to a schema and a choice of fields. Not thread-safe: it owns scratch memory.

    A reader has `leaves` and `paths`, and defines `fill`, `check` and `pages`. Where batches show the leaves in another
    form it defines `present`, where they are as long as their ids say `leaves_for`.
    """

    leaves: Sequence[Leaf]  # what is gathered; where that depends on the ids of a batch, for one of one-step items
    paths: Sequence[Path]  # the fields of a batch, in order
    shows_leaves = True  # whether the fields are the leaves as they are; if not, `present` makes them
    depends_on_ids = False  # whether `leaves_for` must be asked for the leaves of each batch
    fill_checks = False  # whether `fill` refuses what `check` does, but for episodes that were evicted by hand
    threads: CopyThreads | None = None  # which do parts of what is large
    # What the view calls with observations, nested arrays (n, ...), to get their values, (n,) or (n, 1).
    evaluate: Callable[[Any], Any] | None = None

    def for_device(self) -> "Reader":
        """Return what gathers batches that are copied to a device: itself, or what has less to copy."""
        return self

    def leaves_for(self, snapshot: Snapshot, ids: Ints) -> Sequence[Leaf]:
        """Return the leaves of the batch of these ids."""
        return self.leaves

    def count_steps(self, snapshot: Snapshot, ids: Ints) -> int:
        """Return how many steps of the environment the items of these ids count for; of views without `item_steps`."""
        raise NotImplementedError(f"{type(self).__name__} must define count_steps")

    def seed(self, entropy: int | None) -> None:
        """Say what the next `fill`, and no later one, draws from, where the view draws something itself."""

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the items of these ids into a block of `leaves_for`; all weights are 1.

        Raises InvalidIndex where no item can begin at an id; whether one of the view's does is left to `check`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define fill")

    def present(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the fields of a batch, in the order of `paths`, as views of the leaves' tensors."""
        return tensors

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return where the wide rows of these ids lie; what is not mapped yet is mapped."""
        raise NotImplementedError(f"{type(self).__name__} must define pages")

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        """Raise InvalidIndex, naming the id and the reason, where an id is not one of the view's."""
        raise NotImplementedError(f"{type(self).__name__} must define check")


@runtime_checkable
class View(Protocol):
    """What an id means. Immutable; any thread may use it.

    `CONTRIBUTING.md` says how to write one. What is abstract here must be defined, the rest is the default of most.
    """

    @property
    @abstractmethod
    def kind(self) -> tuple[Any, ...]:
        """What its ids are ids of: views of one kind share one table of priorities."""

    @property
    @abstractmethod
    def item_steps(self) -> int | None:
        """Steps of the environment that an item of a batch counts for; None: that depends on the item."""

    @property
    @abstractmethod
    def starts(self) -> Starts:
        """At which steps of episodes its samples start: the ids that can be drawn."""

    @property
    def prefetchable(self) -> bool:
        """Whether batches may be made some batches before they are delivered."""
        return True

    @property
    def random(self) -> bool:
        """Whether batches depend on more than their ids, on random numbers: then its reader is given a seed."""
        return False

    def own_distribution(self, episode_filter: "EpisodeFilter") -> "Distribution | None":
        """Return a new distribution of the view's own, which alone fits its ids; None: any distribution does.

        `episode_filter` tells which episodes count.
        """
        return None

    def crossing(self) -> "Crossing | None":
        """Return what tells at which steps samples start that run across episodes' ends; None: they stay in one."""
        return None

    @abstractmethod
    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Bind the view to a schema; `fields` names what a batch holds, None all.

        Raises
        ------
        ValueError
            The view or `fields` names something that the schema has not, or the view needs what it has not.
        """


def select(
    leaves: list[Leaf],
    fields: Sequence[str] | None,
    always: Sequence[str] = ("index", "weight"),
    on_request: Sequence[Leaf] = (),
) -> list[Leaf]:
    """Keep the leaves that `fields` names: "obs" with all below it, or "obs/image" alone; None and "...": all.

    Those of `on_request` are there only where they are named, and `EPISODE_KNOWN` where any of an episode's values is.
    Raises ValueError where a name is not one of the batch's.
    """
    if fields is None:
        return leaves
    default, leaves = leaves, [*leaves, *on_request]
    if isinstance(fields, str) or not all(isinstance(name, str) for name in fields):
        raise ValueError(f"fields must be a sequence of names, not {fields!r}")
    chosen = [tuple(name.split("/")) for name in (*fields, *always) if name != "..."]
    if "..." in fields:
        chosen += [leaf.path for leaf in default]
    for path in chosen:
        if not any(leaf.path[: len(path)] == path for leaf in leaves):
            known = sorted({leaf.path[0] for leaf in leaves})
            raise ValueError(f"fields names {'/'.join(path)!r}, and a batch has {', '.join(known)}")
    if any(path[0] == "episode" for path in chosen):
        chosen.append((EPISODE_KNOWN,))
    return [leaf for leaf in leaves if any(leaf.path[: len(path)] == path for path in chosen)]


def tuple_fields(names: Iterable[str], schema: Schema) -> dict[str, Tree]:
    """Return the schema's trees of those of a batch's fields that have a tuple somewhere."""
    parts = {"obs": schema.obs, "action": schema.action, "episode": schema.episode, **schema.extra}
    trees = {name: parts.get(name.removeprefix("next_")) for name in names}
    return {name: tree for name, tree in trees.items() if _has_tuple(tree)}


def _has_tuple(tree: Tree) -> bool:
    return isinstance(tree, tuple) or (isinstance(tree, dict) and any(map(_has_tuple, tree.values())))


def nested(paths: Sequence[Path], values: Sequence[Any], tuples: Mapping[str, Tree]) -> dict[str, Any]:
    """Return the values of a batch's fields as nested dicts by path, and as `TupleRecord` where `tuple_fields` say."""
    tree: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        below = tree
        for key in path[:-1]:
            below = below.setdefault(key, {})
        below[path[-1]] = value
    for name, fields in tuples.items():
        tree[name] = with_tuples(fields, tree[name])
    return tree
