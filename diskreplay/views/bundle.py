"""Leaves that are gathered in one call, and where the table of each was seen last."""

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import numpy as np

from diskreplay.kernels import scan as rows, transitions as kernel
from diskreplay.kernels.stream import STREAMED
from diskreplay.kernels.table import chosen
from diskreplay.views.base import Block, Ints, LeafTable
from diskreplay.views.halves import SHARED, in_halves
from diskreplay.views.windows import Windows, map_rows

SUMMED = (np.dtype("float32"), np.dtype("float64"))
"""Dtypes of the fields that a bundle can sum."""


# Of all tables in a few microseconds.
_holder, _bases = attrgetter("holder"), attrgetter("bases")


class Part(NamedTuple):
    """A leaf that is copied: `length` rows from `offset` behind row `begin` of the windows on, zeros from `stop` on."""

    leaf: str
    begin: int
    stop: int
    offset: int
    length: int
    target: int


class Bundle:
    """Gathers leaves, and sums fields over windows of up to `n` steps. Not thread-safe: it owns scratch memory.

    Parameters
    ----------
    parts : sequence of Part
        What is copied, and to which array of a block.
    summands : sequence of (str, float)
        Scalar fields of a `SUMMED` dtype, and the weight of each in the sum.
    computed : dict of str to int
        The arrays of a block for what `kernels.transitions.COMPUTED` names; -1 or absent where it has none.
    n, stack, whole
        As of `Windows.find`.
    gamma : float
        The discount.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        summands: Sequence[tuple[str, float]],
        computed: dict[str, int],
        n: int,
        stack: int,
        whole: bool,
        gamma: float,
    ) -> None:
        every = [*parts, *(Part(leaf, rows.ROW, rows.AFTER, 0, n, -1) for leaf, _ in summands)]
        self._leaves = [*(part.leaf for part in every), "done"]
        self._bounds = n, stack, whole
        self._gamma = gamma
        self._weights = np.array([weight for _, weight in summands], np.float64)
        targets = [part.target for part in parts] + [computed.get(name, -1) for name in kernel.COMPUTED]
        self._targets = np.array(targets, np.int64)
        self._plan = np.zeros((len(every), kernel.PLAN_COLUMNS), np.int64)
        for line, part in zip(self._plan, every, strict=True):
            line[kernel.ROW_WINDOW], line[kernel.STOP_WINDOW] = part.begin, part.stop
            line[kernel.OFFSET], line[kernel.LENGTH] = part.offset, part.length
        self._shares: dict[int, _Share] = {}  # by their first items
        self._split: tuple[int, bool] | None = None  # what the shares are made for: items, and whether there are two
        self._item_bytes = np.zeros(0, np.int64)  # of each leaf of a block
        self._snapshot: Any = None
        self._tables: list[LeafTable] = []
        # Arrays and not their addresses alone: a new array may lie where an old one was.
        self._seen: list[tuple[Ints, ...]] = []
        self._seen_bases: list[Any] = [None] * len(self._leaves)
        self._state: tuple[Any, ...] = ()

    def gather(self, snapshot: Any, ids: Ints, block: Block, helper: Executor | None = None) -> bool:
        """Copy and sum the windows of these ids into the arrays of a block.

        With a helper, it does half of a large block. Returns False where an id has no window, or something has to be
        mapped first.
        """
        if snapshot is not self._snapshot:
            self._follow(snapshot)
        # Held while raw addresses are in use, and read first: see `LeafTable.addresses`.
        held: list[Any] = list(map(_holder, self._tables))
        if any(map(is_not, map(_bases, self._tables), self._seen_bases)):
            held.append(self._look())
        splits = helper is not None and block.nbytes >= SHARED and len(ids) > 1
        if self._split != (len(ids), splits):
            self._prepare(block, splits)
        if splits:
            return in_halves(helper, len(ids), partial(self._gather, ids, block)) < 0
        return self._gather(ids, block, 0, len(ids)) < 0

    def _gather(self, ids: Ints, block: Block, first: int, stop: int) -> int:
        share = self._shares[first]
        places = block.addresses + first * self._item_bytes if first else block.addresses
        bad: int = chosen("transitions")(
            ids[first:stop], *self._state, *self._seen[-1], share.windows.table, share.windows.ends,
            share.plan, share.sources, self._gamma, self._weights, places, self._targets, block.nbytes >= STREAMED,
        )  # fmt: skip
        return bad if bad < 0 else first + bad

    def map(self, snapshot: Any, ids: Ints) -> bool:
        """Map what the windows of these ids may need; False where an id has none, or windows have no end."""
        n, stack, _ = self._bounds
        return n > 0 and map_rows(snapshot, self._leaves[:-1], ids, n, stack)

    def _prepare(self, block: Block, split: bool) -> None:
        """Make scratch memory for blocks of this size."""
        sizes = {0: block.size // 2, block.size // 2: -(-block.size // 2)} if split else {0: block.size}
        self._shares = {first: _Share(self._plan, len(self._weights), size) for first, size in sizes.items()}
        self._item_bytes = np.array([leaf.nbytes for leaf in block.leaves], np.int64)
        self._split = block.size, split

    def _follow(self, snapshot: Any) -> None:
        """Use a new snapshot: most often its segments, and so its tables, are those of the one before."""
        if self._snapshot is None or snapshot.lanes is not self._snapshot.lanes:
            tables = [snapshot.leaf(leaf) for leaf in self._leaves]
            if tables != self._tables:
                self._tables, self._seen_bases = tables, [None] * len(tables)
        self._state = (
            *self._bounds, snapshot.origin, snapshot.oldest, snapshot.lanes, snapshot.lane_base,
            snapshot.committed, snapshot.observed, snapshot.sealed,
        )  # fmt: skip
        self._snapshot = snapshot

    def _look(self) -> list[Any]:
        """Follow tables that have grown; return what keeps their rows mapped."""
        held, self._seen = [], []
        for number, table in enumerate(self._tables):
            holder, chunks, first_chunk, bases = table.addresses()
            shift = np.ascontiguousarray(table.shift)
            held.append(holder)
            self._seen.append((first_chunk, chunks, shift, bases))
            self._seen_bases[number] = bases
        for line, table, (first_chunk, chunks, shift, bases) in zip(self._plan, self._tables, self._seen, strict=False):
            line[kernel.FIRST_CHUNK], line[kernel.CHUNKS] = first_chunk.ctypes.data, chunks.ctypes.data
            line[kernel.SHIFT], line[kernel.BASES] = shift.ctypes.data, bases.ctypes.data
            line[kernel.SLOTS] = min(len(first_chunk), len(chunks), len(shift))
            line[kernel.BASES_SIZE], line[kernel.ROW_BYTES] = len(bases), table.row_bytes
        for share in self._shares.values():
            share.plan[:, : kernel.ROW_WINDOW] = self._plan[:, : kernel.ROW_WINDOW]
        return held


class _Share:
    """Scratch memory for so many items of a block, and the plan with its addresses."""

    def __init__(self, plan: Ints, summands: int, size: int) -> None:
        self.windows = Windows(size)
        self.plan = plan.copy()
        self.sources = np.empty((len(plan), size), np.int64)
        summed = self.plan[len(plan) - summands :]
        self._summed = np.empty((summands, size * int(summed[:, kernel.LENGTH].max(initial=0))))
        for line, memory in zip(summed, self._summed, strict=True):
            line[kernel.SCRATCH] = memory.ctypes.data
