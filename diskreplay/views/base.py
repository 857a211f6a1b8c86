"""The base classes of views and of their readers, the memory of a batch, and threads that copy parts of it."""

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
ALIGNMENT = 64  # bytes, a cache line; copies to a device are also faster

EPISODE_KNOWN = "episode_known"
"""The field that is True for items whose episode has values of episode fields."""

# Kinds of advice for the system call `madvise`.
WILL_NEED = MADV_WILLNEED  # start to read the pages from disk
POPULATE_READ = 22  # read and map the pages before returning; Linux 5.14


@dataclass(frozen=True)
class Leaf:
    """One array of a batch: its path, such as ("obs", "image"), and the dtype and shape of one item."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one item."""
        return int(self.dtype.itemsize * prod(self.shape))


class Block:
    """The arrays of one batch of `size` items, one after the other in `memory`.

    `arrays[i]` is the array of leaf i, (size, *shape), at `addresses[i]`. A 0 follows the last address:
    `addresses[-1]` is 0, and kernels use the number -1 for a leaf that the batch lacks.
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
    """Return the offset in bytes of each leaf in the memory of a batch, and the size of that memory in bytes."""
    found, end = [], 0
    for leaf in leaves:
        found.append(end)
        end += -(-size * leaf.nbytes // ALIGNMENT) * ALIGNMENT
    return found, end


class Pages(NamedTuple):
    """Disjoint ranges of whole memory pages, in order: their start addresses, and their sizes in bytes.

    The addresses are valid while `held` is referenced.
    """

    starts: Ints
    sizes: Ints
    held: tuple[Any, ...] = ()

    def ask(self) -> None:
        """Start reading the pages from disk."""
        get_kernel("advise")(self.starts, self.sizes, WILL_NEED)

    def wait(self) -> None:
        """Return when the pages are in memory. Before Linux 5.14, return at once: the first access to a page waits."""
        get_kernel("advise")(self.starts, self.sizes, POPULATE_READ)


NO_PAGES = Pages(np.zeros(0, np.int64), np.zeros(0, np.int64))


PART = 512 << 10
"""Least bytes of a part that another thread copies: a thread takes a tenth of a millisecond to wake up."""

MOST_THREADS = 4
"""Most threads that copy one batch: more would exceed the bandwidth of most memory.

On a server with 16 processors, one thread copies 8 GB/s, two 13, four 18 and eight 21.
"""


class CopyThreads:
    """`count` threads that copy parts of a batch next to the calling thread. They start with the first copy.

    Callers use them for batches of at least `least` bytes. Between calls, `jobs` is empty, unless an interrupt ended
    `copy` early. Only one thread may call the methods.
    """

    def __init__(self, count: int) -> None:
        self.count, self.least = count, 2 * PART
        self._workers = Workers(count, "diskreplay-copy")
        self.jobs: list[Job[int]] = []

    def parts(self, nbytes: int) -> int:
        """Return the number of parts for a copy of `nbytes` bytes: 1 below `least`, at most one for each thread."""
        return max(1, min(self.count + 1, nbytes // PART))

    def copy(self, count: int, size: int, work: Callable[[int, int], int]) -> int:
        """Process items 0 to `size` - 1 in `count` parts: the first part in this thread, the others in free threads.

        `work(first, stop)` returns the first item that could not be processed, or -1. This method returns the same for
        all parts, when no thread works any more. If an interrupt ends it early, a thread may still work: call `settle`
        before changing any memory that `work` uses. `work` must hold references to that memory.
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
        """Wait until no thread works, after an interrupt of `copy`."""
        for job in self.jobs:
            job.withdraw()
        self.jobs = []

    def close(self) -> None:
        """End the threads."""
        self._workers.close()


def copying(held: tuple[Any, ...], kernel: Kernel, *arguments: Any) -> Callable[[int, int], int]:
    """Return the work for `CopyThreads.copy`: a call of a kernel with these arguments, the first item and the end.

    The work keeps `held` alive, the memory whose addresses the kernel uses: after an interrupt a thread may still copy.
    """
    return partial(_call, held, kernel, *arguments)


def _call(_held: tuple[Any, ...], kernel: Kernel, *arguments: Any) -> int:
    return int(kernel(*arguments))


def copy_threads(reserved: int) -> CopyThreads | None:
    """Return threads that copy, or None if no processor is left for them.

    `reserved` processors are left to other work.
    """
    count = min(MOST_THREADS, len(os.sched_getaffinity(0)) - reserved) - 1
    return CopyThreads(count) if count > 0 else None


class Reader:
    """A view bound to a schema and a choice of fields. Not thread-safe: it owns scratch memory.

    A reader has `leaves` and `paths`, and defines `fill`, `check` and `pages`. It defines `present` if the fields of a
    batch are not the leaves themselves, and `leaves_for` if the shapes of leaves depend on the ids.
    """

    leaves: Sequence[Leaf]  # the gathered arrays; if shapes depend on the ids, for items of one step
    paths: Sequence[Path]  # the fields of a batch, in order
    shows_leaves = True  # whether the fields are the leaves; else `present` makes the fields
    depends_on_ids = False  # whether `leaves_for` must be called for each batch
    fill_checks = False  # whether `fill` refuses the same ids as `check`, except evicted ones
    threads: CopyThreads | None = None  # copy parts of large batches
    # The user's value function: from observations, nested arrays (n, ...), to their values, (n,) or (n, 1).
    evaluate: Callable[[Any], Any] | None = None

    def for_device(self) -> "Reader":
        """Return the reader for batches that are copied to a device: this reader, or one with less to copy."""
        return self

    def leaves_for(self, snapshot: Snapshot, ids: Ints) -> Sequence[Leaf]:
        """Return the leaves of the batch of these ids."""
        return self.leaves

    def count_steps(self, snapshot: Snapshot, ids: Ints) -> int:
        """Return the number of environment steps in the items of these ids. Called if `View.item_steps` is None."""
        raise NotImplementedError(f"{type(self).__name__} must define count_steps")

    def seed(self, entropy: int | None) -> None:
        """Seed the random draws of the next `fill`, and only of that one."""

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the items of these ids into a block that has the leaves of `leaves_for`; all weights are 1.

        Raises InvalidIndex if no item can begin at an id. Other ids that the view does not offer are only found by
        `check`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define fill")

    def present(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the fields of a batch, in the order of `paths`, as views of the leaves' tensors."""
        return tensors

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Map the rows of these ids in wide leaves, with rows of at least `WIDE_ROW` bytes, and return their pages."""
        raise NotImplementedError(f"{type(self).__name__} must define pages")

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        """Raise InvalidIndex, with the id and the reason, if the view does not offer an id."""
        raise NotImplementedError(f"{type(self).__name__} must define check")


@runtime_checkable
class View(Protocol):
    """A view decides what one item of a batch is: a transition, a window or an episode. Immutable and thread-safe.

    `CONTRIBUTING.md` explains how to write a view. Abstract members must be defined; the others have defaults.
    """

    @property
    @abstractmethod
    def kind(self) -> tuple[Any, ...]:
        """The kind of the view's ids: views of the same kind share one table of priorities."""

    @property
    @abstractmethod
    def item_steps(self) -> int | None:
        """The number of environment steps in an item of a batch; None: it depends on the item."""

    @property
    @abstractmethod
    def starts(self) -> Starts:
        """The rule that selects the steps of an episode that start samples: the ids of these steps can be drawn."""

    @property
    def prefetchable(self) -> bool:
        """Whether batches may be made before they are delivered."""
        return True

    @property
    def random(self) -> bool:
        """Whether batches depend on random numbers in addition to the ids: then `Reader.seed` is called."""
        return False

    def own_distribution(self, episode_filter: "EpisodeFilter") -> "Distribution | None":
        """Return a new object of the only distribution that can draw the view's ids; None: any distribution can.

        `episode_filter` admits the episodes to draw from.
        """
        return None

    def crossing(self) -> "Crossing | None":
        """Return the finder of samples that cross the ends of episodes; None: samples stay in one episode."""
        return None

    @abstractmethod
    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Return a reader for a schema; `fields` names the fields of a batch, None: the default fields.

        Raises
        ------
        ValueError
            The schema lacks a field that the view needs, or that the view or `fields` names.
        """


def select(
    leaves: list[Leaf],
    fields: Sequence[str] | None,
    always: Sequence[str] = ("index", "weight"),
    on_request: Sequence[Leaf] = (),
) -> list[Leaf]:
    """Return the leaves that `fields` names: "obs" means all leaves below it, "obs/image" that leaf alone.

    None means all of `leaves`. In `fields`, the name "..." means all of `leaves`, so that leaves of `on_request` can be
    added. Names in `always` are added, and `EPISODE_KNOWN` with any episode field. Raises ValueError for an unknown
    name.
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
    """Return the schema's tree of each named batch field that contains a tuple."""
    parts = {"obs": schema.obs, "action": schema.action, "episode": schema.episode, **schema.extra}
    trees = {name: parts.get(name.removeprefix("next_")) for name in names}
    return {name: tree for name, tree in trees.items() if _has_tuple(tree)}


def _has_tuple(tree: Tree) -> bool:
    return isinstance(tree, tuple) or (isinstance(tree, dict) and any(map(_has_tuple, tree.values())))


def nested(paths: Sequence[Path], values: Sequence[Any], tuples: Mapping[str, Tree]) -> dict[str, Any]:
    """Return values as nested dicts by path; fields in `tuples`, see `tuple_fields`, get a `TupleRecord` per tuple."""
    tree: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        below = tree
        for key in path[:-1]:
            below = below.setdefault(key, {})
        below[path[-1]] = value
    for name, fields in tuples.items():
        tree[name] = with_tuples(fields, tree[name])
    return tree
