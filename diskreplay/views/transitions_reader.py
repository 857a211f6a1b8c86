"""How n-step transitions are gathered: find the windows, copy the leaves, sum the rewards."""

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import scan as rows
from diskreplay.kernels.table import chosen
from diskreplay.views import times
from diskreplay.views.arguments import frame_stack_depths, reward_leaves
from diskreplay.views.base import Block, Ints, Leaf, select
from diskreplay.views.bundle import SUMMED, Bundle, Part
from diskreplay.views.pages import NO_PAGES, Pages, Rows, wide_pages
from diskreplay.views.windows import Windows, refuse, refuse_evicted

if TYPE_CHECKING:
    from diskreplay.views.transitions import Transitions

# Rewards are summed this many steps at a time, so that a return over a long episode needs no memory of its length.
TILE_STEPS = 256

FLOAT32, INT64, BOOL = np.dtype("float32"), np.dtype("int64"), np.dtype("bool")
SCALARS = {"reward": FLOAT32, "discount": FLOAT32, "terminated": BOOL, "truncated": BOOL}


class Copy(NamedTuple):
    """A leaf of the store that fills a leaf of the batch, at the window's first step or (`following`) behind it."""

    source: str
    target: int
    stack: int
    observation: bool
    following: bool


class TransitionsReader:
    """Gathers `Transitions`. Not thread-safe: it owns scratch memory.

    `weights` are the fields that are summed: path, dtype and weight of each. `helper` is a thread that does half of
    large batches, None at first.
    """

    def __init__(self, view: "Transitions", schema: Any, fields: Sequence[str] | None) -> None:
        self._view = view
        self._n = -1 if view.n_step is None else view.n_step
        self.weights = reward_leaves(schema, view.reward)
        sources, leaves = _plan(view, schema)
        self.leaves: Sequence[Leaf] = tuple(select(leaves, fields, on_request=[times.LEAF]))
        place = {leaf.path: i for i, leaf in enumerate(self.leaves)}
        self.copies = [Copy(source, place[path], *how) for path, (source, *how) in sources.items() if path in place]
        self._time = place.get(times.PATH, -1)
        self._scalars = {name: place.get((name,), -1) for name in SCALARS}
        self._sums = bool(place.keys() & {(name,) for name in SCALARS})
        self._index, self._weight, self._k = place["index",], place["weight",], place.get(("n_steps",), -1)
        self._stack = max((copy.stack for copy in self.copies), default=1)
        summands = self.weights if self._sums else []
        self._bundle: Bundle | None = None
        if not summands or (0 < self._n <= TILE_STEPS and all(dtype in SUMMED for _, dtype, _ in summands)):
            self._bundle = Bundle(
                [Part(copy.source, *_bounds(copy), 1 - copy.stack, copy.stack, copy.target) for copy in self.copies],
                [(leaf, float(weight)) for leaf, _, weight in summands],
                {path[0]: i for path, i in place.items()},
                self._n, self._stack, bool(view.next_fields), view.gamma,
            )  # fmt: skip
        self._scratch = _Scratch(0)
        self.helper: Executor | None = None

    def fill(self, snapshot: Any, ids: Ints, block: Block) -> None:
        """Gather the transitions of these ids into the block.

        Raises
        ------
        InvalidIndex
            An id is not sampleable.
        """
        # In one call, where all is mapped and every id is sampleable: nearly always.
        bundle, helper = self._bundle, self.helper
        if bundle is None or not (
            bundle.gather(snapshot, ids, block, helper)
            or (bundle.map(snapshot, ids) and bundle.gather(snapshot, ids, block, helper))
        ):
            self._gather_by_leaf(snapshot, ids, block)
        if self._time >= 0:
            times.to_seconds(snapshot, ids, block.arrays[self._time])

    def pages(self, snapshot: Any, ids: Ints) -> Pages:
        """Return where the wide rows of these ids lie; what is not mapped yet is mapped. Any thread may ask."""
        windows, wanted = Windows(len(ids)), []
        if windows.find(snapshot, ids, self._n, self._stack, bool(self._view.next_fields)) >= 0:
            return NO_PAGES  # `fill` says what is wrong
        for copy in self.copies:
            row, stop = (windows.table[bound] for bound in _bounds(copy))
            wanted.append(Rows(copy.source, row, stop, 1 - copy.stack, copy.stack))
        return wide_pages(snapshot, windows, wanted)

    def _gather_by_leaf(self, snapshot: Any, ids: Ints, block: Block) -> None:
        """Gather leaf after leaf, mapping what is needed."""
        if self._scratch.size != len(ids):
            self._scratch = _Scratch(len(ids))
        windows = self._scratch.windows
        self._find(snapshot, ids, windows)
        for copy in self.copies:
            row, stop = (windows.table[bound] for bound in _bounds(copy))
            raw = block.raw[copy.target]
            windows.gather(snapshot, copy.source, row, stop, 1 - copy.stack, copy.stack, raw, self.helper)
        if self._sums:
            self._sum(snapshot, windows, block)
        block.arrays[self._index][:] = ids
        if self._k >= 0:
            block.arrays[self._k][:] = windows.k
        block.arrays[self._weight].fill(1.0)

    def check(self, snapshot: Any, ids: Ints) -> None:
        """Raise InvalidIndex, naming the id and the reason, where an id is not sampleable."""
        self._find(snapshot, ids, Windows(len(ids)))
        refuse_evicted(snapshot, ids)

    def _find(self, snapshot: Any, ids: Ints, windows: Windows) -> None:
        bad = windows.find(snapshot, ids, self._n, self._stack, bool(self._view.next_fields))
        if bad >= 0:
            raise refuse(snapshot, int(ids[bad]), self._view)

    def _sum(self, snapshot: Any, windows: Windows, block: Block) -> None:
        """Write reward, discount, terminated and truncated."""
        scratch, arrays = self._scratch, block.arrays
        outputs = [arrays[i] if i >= 0 else scratch.unwanted[name] for name, i in self._scalars.items()]
        longest = self._n if 0 < self._n <= TILE_STEPS else int(windows.k.max(initial=1))
        width = min(longest, TILE_STEPS)
        for start in range(0, longest, width):
            r = scratch.rewards(width)
            for number, (leaf, dtype, weight) in enumerate(self.weights):
                raw = scratch.raw(number, width * dtype.itemsize)
                windows.gather(snapshot, leaf, windows.row, windows.after, start, width, raw)
                if number == 0:
                    np.multiply(raw.view(dtype), weight, out=r)
                else:
                    r += raw.view(dtype) * weight
            chosen("nstep")(r, start, windows.k, windows.ends, self._view.gamma, scratch.total, scratch.scale, *outputs)


def _bounds(copy: Copy) -> tuple[int, int]:
    """Return the rows of the table of windows that say where the rows of a leaf begin, and where they stop."""
    if not copy.following:
        return rows.ROW, rows.AFTER
    return rows.AFTER, rows.OBS_STOP if copy.observation else rows.STEP_STOP


class _Scratch:
    """Memory for `size` windows."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.windows = Windows(size)
        self.total, self.scale = np.empty(size), np.empty(size)
        self.unwanted = {name: np.empty(size, dtype) for name, dtype in SCALARS.items()}
        self._rewards = np.empty((size, 0))
        self._raw: dict[int, NDArray[np.uint8]] = {}

    def rewards(self, width: int) -> NDArray[np.float64]:
        """Return (size, width) float64."""
        if self._rewards.shape[1] != width:
            self._rewards = np.empty((self.size, width))
        return self._rewards

    def raw(self, number: int, width: int) -> NDArray[np.uint8]:
        """Return (size, width) bytes for the field of this number."""
        if number not in self._raw or self._raw[number].shape[1] != width:
            self._raw[number] = np.empty((self.size, width), np.uint8)
        return self._raw[number]


def _plan(view: "Transitions", schema: Any) -> tuple[dict[tuple[str, ...], tuple[Any, ...]], list[Leaf]]:
    """Return how each leaf that is copied is filled, and all leaves of a batch in order."""
    steps = {path: field for path, field in schema.leaves.items() if not path.startswith("episode/")}
    parts: dict[str, dict[tuple[str, ...], Any]] = {}
    for source in steps:
        part = tuple(source.split("/"))
        # An extra field stands under its own name in a batch.
        name = part[1:] if part[0] == "extra" else part
        parts.setdefault(name[0], {})[name] = source
    unknown = [name for name in view.next_fields if name not in parts]
    if unknown:
        known = ", ".join(name for name in parts if name != "obs")
        raise ValueError(f"next_fields names {unknown[0]!r}; the step fields of this store are {known}")
    stacks = frame_stack_depths(view.frame_stack, parts["obs"])
    copies: dict[tuple[str, ...], tuple[Any, ...]] = {}
    leaves: list[Leaf] = []

    def add(name: str, following: bool) -> None:
        for path, source in parts[name].items():
            stack = stacks.get(path, 1)
            shape = (stack, *steps[source].shape) if stack > 1 else steps[source].shape
            target = (f"next_{path[0]}", *path[1:]) if following else path
            copies[target] = (source, stack, name == "obs", following)
            leaves.append(Leaf(target, steps[source].dtype, tuple(shape)))

    copies[times.PATH] = (times.SOURCE, 1, False, False)
    add("obs", False)
    add("action", False)
    leaves.append(Leaf(("reward",), FLOAT32))
    add("obs", True)
    leaves += [Leaf((name,), SCALARS[name]) for name in ("terminated", "truncated", "discount")]
    leaves += [Leaf(("n_steps",), INT64), Leaf(("index",), INT64), Leaf(("weight",), FLOAT32)]
    for extra in parts:
        if extra not in ("obs", "action", "reward"):
            add(extra, False)
    for following in view.next_fields:
        add(following, True)
    return copies, leaves
