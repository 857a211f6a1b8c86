"""The base classes of views and readers, the memory of a batch, and threads that copy parts of a batch."""

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
from diskreplay.kernels.table import Kernel, get_kernel
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema, Tree, with_tuples
from diskreplay.workers import Job, Workers

if TYPE_CHECKING:
    from diskreplay.distributions.base import Distribution
    from diskreplay.distributions.population import Crossing
    from diskreplay.distributions.snapshot import EpisodeFilter

Path = tuple[str, ...]

FLOAT32, INT64, BOOL = np.dtype("float32"), np.dtype("int64"), np.dtype("bool")
ALIGNMENT = 64  # the size of a cache line in bytes: arrays that start at a cache line are copied to a device faster

EPISODE_KNOWN = "episode_known"
"""The name of a bool field of batches: True for an item if the store has values of its episode's fields."""

# Kinds of advice for the system call `madvise`.
WILL_NEED = MADV_WILLNEED  # start to read the pages from disk
POPULATE_READ = 22  # read and map the pages before returning; since Linux 5.14


@dataclass(frozen=True)
class Leaf:
    """One array of a batch: its path, such as ("obs", "image"), and the dtype and shape of one item."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return int(self.dtype.itemsize * prod(self.shape))


class Block:
    """The arrays of one batch of `size` items, one after the other in `memory`; None: in new memory.

    `arrays[i]` is the array of leaf i, (size, *shape), and `addresses[i]` is the address of this array. `addresses`
    ends with an additional 0. Kernels use the number -1 for a leaf that the batch lacks, and find this 0 as
    `addresses[-1]`.
    """

    def __init__(self, leaves: Sequence[Leaf], size: int, memory: NDArray[np.uint8] | None = None) -> None:
        self.leaves = leaves
        self.size = size
        self.offsets, self.nbytes = offsets(leaves, size)
        self.memory = np.empty(self.nbytes, np.uint8) if memory is None else memory
        start = self.memory.ctypes.data
        self.addresses = np.array([*(start + at for at in self.offsets), 0], np.int64)
        self.arrays = [
            np.ndarray((size, *leaf.shape), leaf.dtype, self.memory, at)
            for leaf, at in zip(leaves, self.offsets, strict=True)
        ]


def offsets(leaves: Sequence[Leaf], size: int) -> tuple[list[int], int]:
    """Return the offset in bytes of each leaf in the memory of a batch, and the size of that memory in bytes."""
    found, end = [], 0
    for leaf in leaves:
        found.append(end)
        end += -(-size * leaf.nbytes // ALIGNMENT) * ALIGNMENT
    return found, end


class Pages(NamedTuple):
    """Disjoint ranges of memory pages, sorted by address. `sizes` is in bytes.

    The addresses in `starts` are valid while `held` is referenced.
    """

    starts: Ints
    sizes: Ints
    held: tuple[Any, ...] = ()

    def ask(self) -> None:
        get_kernel("advise")(self.starts, self.sizes, WILL_NEED)

    def wait(self) -> None:
        """Wait until the pages are in memory.

        Before Linux 5.14, this method returns at once, and the first access to each page waits for the disk.
        """
        get_kernel("advise")(self.starts, self.sizes, POPULATE_READ)


NO_PAGES = Pages(np.zeros(0, np.int64), np.zeros(0, np.int64))


PART = 512 << 10
"""The smallest number of bytes to give to another thread. To wake a thread takes a tenth of a millisecond."""

MOST_THREADS = 4
"""The largest number of threads that copy one batch: most machines have no memory bandwidth for more.

On a server with 16 processors, one thread copies 8 GB/s, two threads 13 GB/s, four 18 GB/s and eight 21 GB/s.
"""


class CopyThreads:
    """`count` threads that copy parts of a batch, in addition to the calling thread.

    The first call of `copy` starts the threads.

    Callers use the threads only for batches of `least` or more bytes. Between calls of `copy`, the list `jobs` is
    empty, unless an interrupt ended the last call early. Only one thread may call the methods.
    """

    def __init__(self, count: int) -> None:
        self.count, self.least = count, 2 * PART
        self._workers = Workers(count, "diskreplay-copy")
        self.jobs: list[Job[int]] = []

    def parts(self, nbytes: int) -> int:
        """Return the number of parts of a copy of `nbytes` bytes: 1 below `least` bytes, else at most `count` + 1."""
        return max(1, min(self.count + 1, nbytes // PART))

    def copy(self, count: int, size: int, work: Callable[[int, int], int]) -> int:
        """Process items 0 to `size` - 1 in `count` parts: the first part in this thread, the others in free threads.

        When the first part is done, this thread also processes parts that no other thread has begun.
        `work(first, stop)` returns the first item of its part that could not be processed, or -1. This method waits for
        all parts, and returns the first unprocessed item of all parts, or -1. If an interrupt ends this method early, a
        thread may still be working: call `settle` before changing any memory that `work` uses. `work` must hold
        references to the memory that it uses.
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
        """After an interrupt of `copy`, wait until all threads are idle."""
        for job in self.jobs:
            job.withdraw()
        self.jobs = []

    def close(self) -> None:
        self._workers.close()


def copying(held: tuple[Any, ...], kernel: Kernel, *arguments: Any) -> Callable[[int, int], int]:
    """Return the function ``work(first, stop)`` for `CopyThreads.copy` that calls ``kernel(*arguments, first, stop)``.

    The function keeps `held` alive, because `held` owns the memory that the kernel reads and writes. After an
    interrupt, a thread may still be copying.
    """
    return partial(_call, held, kernel, *arguments)


def _call(_held: tuple[Any, ...], kernel: Kernel, *arguments: Any) -> int:
    return int(kernel(*arguments))


def copy_threads(reserved: int) -> CopyThreads | None:
    """Return threads that copy, or None if no processor is left for them.

    `reserved` is the number of processors to leave for other work.
    """
    count = min(MOST_THREADS, len(os.sched_getaffinity(0)) - reserved) - 1
    return CopyThreads(count) if count > 0 else None


class Reader:
    """Gathers batches of one view for one schema and one choice of fields. Not thread-safe: it owns scratch memory.

    A reader has `leaves` and `paths`, and defines `fill`, `check` and `pages`. A reader also defines `present` if the
    fields of a batch differ from the gathered leaves, and `leaves_for` if the shapes of leaves depend on the ids.
    """

    leaves: Sequence[Leaf]  # the arrays to gather; if shapes depend on the ids, the arrays for items of one step
    paths: Sequence[Path]  # the paths of a batch's fields, in the order of the batch
    shows_leaves = True  # whether the leaves are the fields; if not, `present` makes fields from the leaves
    depends_on_ids = False  # whether `leaves_for` must be called for each batch
    fill_checks = False  # whether `fill` refuses all ids that `check` refuses, except evicted ids
    threads: CopyThreads | None = None  # the threads that copy parts of large batches, if any
    # The user's value function. Its argument is n observations, as nested arrays (n, ...). It returns n values, (n,) or
    # (n, 1).
    evaluate: Callable[[Any], Any] | None = None

    def for_device(self) -> "Reader":
        """Return the reader for batches that are copied to a device: this reader, or a reader with smaller blocks."""
        return self

    def leaves_for(self, snapshot: Snapshot, ids: Ints) -> Sequence[Leaf]:
        return self.leaves

    def count_steps(self, snapshot: Snapshot, ids: Ints) -> int:
        """Return the number of environment steps in the items of these ids.

        Samplers call this if `View.item_steps` is None.
        """
        raise NotImplementedError(f"{type(self).__name__} must define count_steps")

    def seed(self, entropy: int | None) -> None:
        """Seed the random draws of the next call of `fill`; later calls draw nothing unless `seed` is called again.

        With `entropy` None, the next call draws nothing.
        """

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the items of these ids into a block that has the leaves of `leaves_for`. All weights are 1.

        Raises InvalidIndex if no item can be gathered at an id. Some readers also gather items for ids that the view
        does not offer. `check` refuses these ids.
        """
        raise NotImplementedError(f"{type(self).__name__} must define fill")

    def present(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the fields of a batch, in the order of `paths`, as views of the leaves' tensors."""
        return tensors

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Map these ids' rows of at least `WIDE_ROW` bytes into memory, and return the memory pages of these rows."""
        raise NotImplementedError(f"{type(self).__name__} must define pages")

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        """Raise InvalidIndex, with the id and the reason, if no item of the view begins at an id."""
        raise NotImplementedError(f"{type(self).__name__} must define check")


@runtime_checkable
class View(Protocol):
    """A view decides what one item of a batch is: a transition, a window or an episode.

    A view is immutable and thread-safe. `CONTRIBUTING.md` explains how to write a view. Abstract members must be
    defined; the other members have defaults.
    """

    @property
    @abstractmethod
    def kind(self) -> tuple[Any, ...]:
        """The kind of the view's ids: views of the same kind share one table of priorities."""

    @property
    @abstractmethod
    def item_steps(self) -> int | None:
        """The number of environment steps in each item of a batch; None if this number differs between items."""

    @property
    @abstractmethod
    def starts(self) -> Starts:
        """The rule that selects the steps at which an item can start. The ids of these steps can be drawn."""

    @property
    def prefetchable(self) -> bool:
        """Whether the sampler may make batches ahead, before the caller asks for them."""
        return True

    @property
    def random(self) -> bool:
        """Whether batches depend on random numbers in addition to the ids. If so, `Reader.seed` is called."""
        return False

    def own_distribution(self, episode_filter: "EpisodeFilter") -> "Distribution | None":
        """If only one kind of distribution can draw the view's ids, return a new distribution of this kind, else None.

        `episode_filter` admits the episodes to draw from.
        """
        return None

    def crossing(self) -> "Crossing | None":
        """Return an object that finds the first steps of items that span several episodes; None: no item does."""
        return None

    @abstractmethod
    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Return a reader for a schema; `fields` names the fields of a batch, None: the default fields.

        Raises
        ------
        ValueError
            The schema lacks a field that the view needs or names, or `fields` names an unknown field.
        """


def select(
    leaves: list[Leaf],
    fields: Sequence[str] | None,
    always: Sequence[str] = ("index", "weight"),
    on_request: Sequence[Leaf] = (),
) -> list[Leaf]:
    """Return the leaves that `fields` names: "obs" means all leaves below "obs", and "obs/image" means only that leaf.

    `fields` None means all of `leaves`. The name "..." in `fields` means all of `leaves`, so that other names can add
    leaves of `on_request`. The leaves listed in `always` are added. `EPISODE_KNOWN` is added if `fields` lists an
    episode field. Raises ValueError for an unknown name.
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
    """Return {name: tree of the schema} for the batch fields in `names` whose tree contains a tuple."""
    parts = {"obs": schema.obs, "action": schema.action, "episode": schema.episode, **schema.extra}
    trees = {name: parts.get(name.removeprefix("next_")) for name in names}
    return {name: tree for name, tree in trees.items() if _has_tuple(tree)}


def _has_tuple(tree: Tree) -> bool:
    return isinstance(tree, tuple) or (isinstance(tree, dict) and any(map(_has_tuple, tree.values())))


def nested(paths: Sequence[Path], values: Sequence[Any], tuples: Mapping[str, Tree]) -> dict[str, Any]:
    """Return nested dicts with `values`, one value for each path.

    Fields in `tuples`, the result of `tuple_fields`, have a `TupleRecord` in place of each tuple.
    """
    tree: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        below = tree
        for key in path[:-1]:
            below = below.setdefault(key, {})
        below[path[-1]] = value
    for name, fields in tuples.items():
        tree[name] = with_tuples(fields, tree[name])
    return tree
