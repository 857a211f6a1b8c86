"""Transitions whose stacks of frames are made where a batch ends up: on the way there, each frame of an item is once.

The stacks of obs and next_obs, n steps apart, share frames where n is less than their depth: together they show n +
depth different ones, not two times depth. The frames of an item are gathered as one run, and both stacks are picked
out of it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from diskreplay.format.schema import Schema
from diskreplay.kernels import gathering as rows
from diskreplay.store.reading.snapshot import Snapshot
from diskreplay.views.base import BOOL, INT64, Block, Ints, Leaf, Path, Reader
from diskreplay.views.page_ranges import Pages
from diskreplay.views.transitions import Transitions, TransitionsReader
from diskreplay.views.windows import Copy


class _Stacks(NamedTuple):
    """A leaf of the store, its stacks in a batch, and their depth."""

    source: str
    obs: Path
    next_obs: Path
    depth: int


class DeviceFrameStack(Reader):
    """Gathers what `reader` does, with frames that are there once. Not thread-safe: it owns scratch memory."""

    shows_leaves = False

    def __init__(self, view: Transitions, schema: Schema, reader: TransitionsReader, stacks: list[_Stacks]) -> None:
        self._view, self._reader, self._stacks = view, reader, stacks
        self.paths = reader.paths
        later = {path for stacks in self._stacks for path in (stacks.obs, stacks.next_obs)}
        self._rest = TransitionsReader(view, schema, ["/".join(path) for path in self.paths if path not in later])
        shown = {leaf.path: leaf for leaf in reader.leaves}
        self.leaves: Sequence[Leaf] = (
            *self._rest.leaves,
            Leaf(("is final",), BOOL),
            *(Leaf(("first of next", s.source), INT64, (s.depth,)) for s in self._stacks),
            *(Leaf(("frames", s.source), *_run(shown[s.obs], self._steps)) for s in self._stacks),
        )
        self._at = len(self._rest.leaves)
        targets = enumerate(stacks, self._at + 1 + len(stacks))
        runs = [(s.source, rows.ROW, rows.FRAMES_STOP, 1 - s.depth, self._steps + s.depth, at) for at, s in targets]
        self._rest.plan([Copy(*run) for run in runs])

    @classmethod
    def of(cls, view: Any, schema: Schema, reader: Reader) -> "DeviceFrameStack | None":
        """Return one for a view's reader, None where no stacks share frames."""
        if not isinstance(reader, TransitionsReader):
            return None
        stacks = _shared(view, reader)
        return cls(view, schema, reader, stacks) if stacks else None

    @property
    def _steps(self) -> int:
        assert self._view.n_step is not None
        return self._view.n_step

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the transitions of these ids into the block."""
        self._rest.helper = self.helper
        self._rest.fill(snapshot, ids, block)
        windows = self._rest.windows
        block.arrays[self._at][:] = windows.obs_stop > 0
        for number, stacks in enumerate(self._stacks, self._at + 1):
            first = np.arange(len(ids)) * (self._steps + stacks.depth) + windows.k
            block.arrays[number][:] = first[:, None] + np.arange(stacks.depth)

    def present(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the fields of a batch, in the order of `paths`, wherever these tensors of the leaves are."""
        at, count = self._at, len(self._stacks)
        shown = dict(zip((leaf.path for leaf in self._rest.leaves), tensors, strict=False))
        known = tensors[at]
        for number, stacks in enumerate(self._stacks, at + 1):
            places, frames = tensors[number], tensors[number + count]
            shown[stacks.obs] = frames[:, : stacks.depth].contiguous()
            picked = frames.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)
            # There is no observation behind the last step of some episodes.
            each = known.view(-1, *[1] * (picked.dim() - 1))
            shown[stacks.next_obs] = picked.where(each, picked.new_zeros(()))
        return [shown[path] for path in self.paths]

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return where the wide rows of these ids lie; see `TransitionsReader.pages`."""
        return self._reader.pages(snapshot, ids)

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        """Raise InvalidIndex, naming the id and the reason, where an id is not sampleable."""
        self._reader.check(snapshot, ids)


def _run(leaf: Leaf, steps: int) -> tuple[Any, tuple[int, ...]]:
    """Return dtype and shape of the frames of a stack and of so many steps behind it."""
    depth, *shape = leaf.shape
    return leaf.dtype, (depth + steps, *shape)


def _shared(view: Transitions, reader: TransitionsReader) -> list[_Stacks]:
    """Return the stacks of which a batch shows both, with frames in common."""
    n = view.n_step
    if n is None:
        return []
    deep = [copy for copy in reader.copies if copy.leaf.split("/")[0] == "obs" and copy.length > n]
    following = {copy.leaf: copy for copy in deep if copy.begin == rows.AFTER}
    paths = reader.paths
    return [
        _Stacks(copy.leaf, paths[copy.target], paths[following[copy.leaf].target], copy.length)
        for copy in deep
        if copy.begin == rows.ROW and copy.leaf in following
    ]
