"""The base of views: starts of samples, readers that gather them, and threads that copy."""

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
ALIGNMENT = 64  # a cache line; copies to a device are faster, too

EPISODE_KNOWN = "episode_known"
"""The field that is True for items whose episode has values of episode fields."""

# Advice of `madvise`.
WILL_NEED = MADV_WILLNEED  # start to read the pages from disk
POPULATE_READ = 22  # read and map the pages before returning; Linux 5.14


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
    """The arrays of one batch of `size` items, one after the other in `memory`.

    `arrays[i]` is the array of leaf i, (size, *shape), at `addresses[i]`. The last address is followed by a 0.
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
    """Return the offset of each leaf in the memory of a batch, and the bytes of the whole."""
    found, end = [], 0
    for leaf in leaves:
        found.append(end)
        end += -(-size * leaf.nbytes // ALIGNMENT) * ALIGNMENT
    return found, end


class Pages(NamedTuple):
    """Disjoint ranges of whole pages, in order: addresses and bytes.

    The addresses are valid while `held` is referenced.
    """

    starts: Ints
    sizes: Ints
    held: tuple[Any, ...] = ()

    def ask(self) -> None:
        """Start reading the pages from disk."""
        get_kernel("advise")(self.starts, self.sizes, WILL_NEED)

    def wait(self) -> None:
        """Return when the pages are in memory. On an older kernel, the first access waits instead."""
        get_kernel("advise")(self.starts, self.sizes, POPULATE_READ)


NO_PAGES = Pages(np.zeros(0, np.int64), np.zeros(0, np.int64))


PART = 512 << 10
"""Least bytes of a part for another thread, which takes a tenth of a millisecond to wake up."""

MOST_THREADS = 4
"""Most threads that copy one batch: more would exceed the bandwidth of most memory.

On a server with 16 processors, one copies 8 GB/s, two 13, four 18 and eight 21.
"""


class CopyThreads:
    """`count` threads that copy parts of a batch next to the calling thread. They start when they are needed.

    They are used from `least` bytes on. `jobs` is empty unless an interrupt came while they copied. Only one thread may
    call.
    """

    def __init__(self, count: int) -> None:
        self.count, self.least = count, 2 * PART
        self._workers = Workers(count, "diskreplay-copy")
        self.jobs: list[Job[int]] = []

    def parts(self, nbytes: int) -> int:
        """Return into how many parts to divide a copy of `nbytes`: 1 below `least`."""
        return max(1, min(self.count + 1, nbytes // PART))

    def copy(self, count: int, size: int, work: Callable[[int, int], int]) -> int:
        """Process items 0 to `size` - 1 in `count` parts, the first one here and the others in free threads.

        `work(first, stop)` returns the first item that it could not process, or -1; so does this method. No thread
        works after it returns. After an interrupt a thread may still work: call `settle` before changing anything that
        `work` uses. `work` holds references to all of that.
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

    It keeps `held` alive, the memory whose addresses the kernel has: a thread may still copy after an interrupt.
    """
    return partial(_call, held, kernel, *arguments)


def _call(_held: tuple[Any, ...], kernel: Kernel, *arguments: Any) -> int:
    return int(kernel(*arguments))


def copy_threads(reserved: int) -> CopyThreads | None:
    """Return threads that copy, or None if the process has no processor left for them.

    `reserved` processors are left to other work.
    """
    count = min(MOST_THREADS, len(os.sched_getaffinity(0)) - reserved) - 1
    return CopyThreads(count) if count > 0 else None


class Reader:
    """A view bound to a schema and a choice of fields. Not thread-safe: it owns scratch memory.

    A reader has `leaves` and `paths`, and defines `fill`, `check` and `pages`. It defines `present` if batches show the
    leaves in another form, and `leaves_for` if their length depends on the ids.
    """

    leaves: Sequence[Leaf]  # the gathered arrays; if they depend on the ids, for items of one step
    paths: Sequence[Path]  # the fields of a batch, in order
    shows_leaves = True  # whether the fields are the leaves; else `present` makes them
    depends_on_ids = False  # whether `leaves_for` must be called for each batch
    fill_checks = False  # whether `fill` refuses the same ids as `check`, except evicted ones
    threads: CopyThreads | None = None  # copy parts of large batches
    # Returns the values, (n,) or (n, 1), of observations, nested arrays (n, ...).
    evaluate: Callable[[Any], Any] | None = None

    def for_device(self) -> "Reader":
        """Return the reader for batches that are copied to a device: itself, or one with less to copy."""
        return self

    def leaves_for(self, snapshot: Snapshot, ids: Ints) -> Sequence[Leaf]:
        """Return the leaves of the batch of these ids."""
        return self.leaves

    def count_steps(self, snapshot: Snapshot, ids: Ints) -> int:
        """Return the number of environment steps in the items of these ids, for views without `item_steps`."""
        raise NotImplementedError(f"{type(self).__name__} must define count_steps")

    def seed(self, entropy: int | None) -> None:
        """Seed the random draws of the next `fill`, and only of that one."""

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the items of these ids into a block of `leaves_for`; all weights are 1.

        Raises InvalidIndex if no item can begin at an id. `check` finds the other ids that the view does not offer.
        """
        raise NotImplementedError(f"{type(self).__name__} must define fill")

    def present(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the fields of a batch, in the order of `paths`, as views of the leaves' tensors."""
        return tensors

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return the pages of the wide rows of these ids, and map them."""
        raise NotImplementedError(f"{type(self).__name__} must define pages")

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        """Raise InvalidIndex, with the id and the reason, if the view does not offer an id."""
        raise NotImplementedError(f"{type(self).__name__} must define check")


@runtime_checkable
class View(Protocol):
    """A view decides what one item of a batch is: a transition, a window or an episode. Immutable and thread-safe.

    `CONTRIBUTING.md` says how to write one. Abstract members must be defined; the others have defaults.
    """

    @property
    @abstractmethod
    def kind(self) -> tuple[Any, ...]:
        """The kind of its ids: views of the same kind share one table of priorities."""

    @property
    @abstractmethod
    def item_steps(self) -> int | None:
        """The number of environment steps in an item of a batch; None: it depends on the item."""

    @property
    @abstractmethod
    def starts(self) -> Starts:
        """The rule for the steps of an episode that start samples: the ids that can be drawn."""

    @property
    def prefetchable(self) -> bool:
        """Whether batches may be made before they are delivered."""
        return True

    @property
    def random(self) -> bool:
        """Whether batches also depend on random numbers: then its reader gets a seed."""
        return False

    def own_distribution(self, episode_filter: "EpisodeFilter") -> "Distribution | None":
        """Return a new distribution of the view's own, the only one that fits its ids; None: any distribution fits.

        `episode_filter` admits episodes.
        """
        return None

    def crossing(self) -> "Crossing | None":
        """Return the finder of samples that cross the ends of episodes; None: samples stay in one episode."""
        return None

    @abstractmethod
    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Bind the view to a schema; `fields` names the fields of a batch, None: all.

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
    """Keep the leaves that `fields` names: "obs" with all leaves below it, or "obs/image" alone.

    None: the default leaves. `"..."` stands for them when names of `on_request` are added. `EPISODE_KNOWN` is added
    with any episode field. ValueError if a batch does not have a name.
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
    """Return the schema's trees of the batch fields that contain a tuple."""
    parts = {"obs": schema.obs, "action": schema.action, "episode": schema.episode, **schema.extra}
    trees = {name: parts.get(name.removeprefix("next_")) for name in names}
    return {name: tree for name, tree in trees.items() if _has_tuple(tree)}


def _has_tuple(tree: Tree) -> bool:
    return isinstance(tree, tuple) or (isinstance(tree, dict) and any(map(_has_tuple, tree.values())))


def nested(paths: Sequence[Path], values: Sequence[Any], tuples: Mapping[str, Tree]) -> dict[str, Any]:
    """Return the fields of a batch as nested dicts by path, and as `TupleRecord` for tuples in `tuple_fields`."""
    tree: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        below = tree
        for key in path[:-1]:
            below = below.setdefault(key, {})
        below[path[-1]] = value
    for name, fields in tuples.items():
        tree[name] = with_tuples(fields, tree[name])
    return tree
