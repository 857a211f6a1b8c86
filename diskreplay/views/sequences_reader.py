"""How sequences and whole episodes are gathered: find the windows, copy the leaves, mark what is real."""

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import InvalidIndex
from diskreplay.format.schema import Schema
from diskreplay.ids import CUT, FIRST, TERMINATED, TRUNCATED
from diskreplay.kernels.table import chosen
from diskreplay.store.reading.snapshot import Snapshot
from diskreplay.views.base import Block, CountingReader, Ints, Leaf, Reader
from diskreplay.views.gather_plan import GatherPlan
from diskreplay.views.page_ranges import NO_PAGES, Pages, wide_pages
from diskreplay.views.step_layout import FLAGS, StepLayout
from diskreplay.views.windows import ATTEMPTS, TIME, Bounds, Windows, refuse, refuse_evicted, to_seconds, windows_of

if TYPE_CHECKING:
    from diskreplay.views.episodes import Episodes
    from diskreplay.views.sequences import Sequences

TO_THE_END = -1  # as many steps as the episode has


class SequencesReader(Reader):
    """Gathers `Sequences`. Not thread-safe: it owns scratch memory."""

    shows_leaves = False

    def __init__(self, view: "Sequences", schema: Schema, fields: Sequence[str] | None) -> None:
        self._view = view
        self._layout = StepLayout(schema, fields, view.frame_stack, view.start_only)
        self._windows = _WindowsOfSteps(self._layout, view, view.length)
        self.leaves: Sequence[Leaf] = self._layout.leaves(view.length)
        self.paths = self._layout.paths

    def present(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the fields of a batch, in the order of `paths`, as views of the leaves' tensors."""
        return self._layout.present(tensors)

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the windows that begin at these ids into the block.

        Whether they are starts of the view is left to `check`: it would have to look back to the episode's first step.
        """
        self._windows.fill(snapshot, ids, block, self._view.burn_in, self.helper)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return where the wide rows of these windows lie; what is not mapped yet is mapped. Any thread may ask."""
        return self._windows.pages(snapshot, ids)

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        """Raise InvalidIndex, naming the id and the reason, where none of the view's windows begins at an id."""
        view = self._view
        windows = windows_of(snapshot, ids, Bounds(view.length), view)
        refuse_evicted(snapshot, ids)
        before = _steps_before(snapshot, windows, ids, view)
        # The first window that reaches the end is the last: the one before it must have stopped short of it.
        whole = windows.k == view.length
        regular = (before % view.stride == 0) & (whole | (before == 0) | (view.pad & (windows.k > view.overlap)))
        odd = np.flatnonzero(~regular)
        if len(odd) and not view.pad:
            odd = odd[~self._moved_back(snapshot, ids, windows, odd)]
        if len(odd):
            raise InvalidIndex(
                f"id {ids[odd[0]]} is step {before[odd[0]]} of its episode, and no window of {view} starts there"
            )

    def _moved_back(self, snapshot: Snapshot, ids: Ints, windows: Windows, odd: Ints) -> NDArray[np.bool_]:
        """Tell which windows end with their episode: one step more cannot be had, and the episode is not open."""
        length = self._view.length
        moved = windows.k[odd] == length
        longer = Windows(1)
        for i in np.flatnonzero(moved):
            step_id = ids[odd[i : i + 1]]
            moved[i] = longer.find(snapshot, step_id, length + 1, 1, False) < 0 and longer.k[0] == length
        return moved


class EpisodesReader(CountingReader):
    """Gathers `Episodes`. Not thread-safe: it owns scratch memory."""

    shows_leaves = False
    depends_on_ids = True

    def __init__(self, view: "Episodes", schema: Schema, fields: Sequence[str] | None) -> None:
        self._view = view
        self._layout = StepLayout(schema, fields)
        self._steps = TO_THE_END if view.max_length is None else view.max_length
        self._windows = _WindowsOfSteps(self._layout, view, self._steps)
        self.leaves: Sequence[Leaf] = self._layout.leaves(1)
        self.paths = self._layout.paths

    def count_steps(self, snapshot: Snapshot, ids: Ints) -> int:
        """Return how many steps the batch of these ids has."""
        return int(windows_of(snapshot, ids, Bounds(self._steps), self._view).k.sum())

    def leaves_for(self, snapshot: Snapshot, ids: Ints) -> Sequence[Leaf]:
        """Return the leaves of the batch of these ids, as long as its longest episode; InvalidIndex as of `fill`."""
        return self._layout.leaves(int(windows_of(snapshot, ids, Bounds(self._steps), self._view).k.max(initial=1)))

    def present(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the fields of a batch, in the order of `paths`, as views of the leaves' tensors."""
        return self._layout.present(tensors)

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the steps from these ids on; whether episodes begin there and have ended is left to `check`."""
        self._windows.fill(snapshot, ids, block, 0, self.helper)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return where the wide rows of these episodes lie; what is not mapped yet is mapped. Any thread may ask."""
        return self._windows.pages(snapshot, ids)

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        """Raise InvalidIndex, naming the id and the reason, where no ended episode begins at an id."""
        windows = windows_of(snapshot, ids, Bounds(TO_THE_END), self._view)
        refuse_evicted(snapshot, ids)
        before = _steps_before(snapshot, windows, ids, self._view)
        inside = np.flatnonzero(before)
        if len(inside):
            first = inside[0]
            raise InvalidIndex(f"id {ids[first]} is step {before[first]} of its episode; {self._view} start at step 0")


class _WindowsOfSteps:
    """Copies windows of steps into blocks of a layout, and marks which steps are real and how they end."""

    def __init__(self, layout: StepLayout, view: Any, n: int) -> None:
        self._layout, self._bounds = layout, Bounds(n, layout.stack)
        computed = {name: layout.place[name,] for name in ("index", "weight")}
        self._length = 1
        self._plan = GatherPlan(layout.copies(self._length), view, self._bounds, computed=computed)
        self._time = layout.place.get(TIME.path, -1)
        self._wanted = {name: layout.place[name,] for name in FLAGS if (name,) in layout.place}

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block, burn_in: int, helper: Executor | None) -> None:
        """Gather the steps from each id on, as many as the block has room for."""
        length = self._layout.length(block.leaves)
        if length != self._length:
            self._length = -1
            self._plan.set_lengths([copy.length for copy in self._layout.copies(length)])
            self._length = length
        self._plan.gather(snapshot, ids, block, helper)
        if self._time >= 0:
            to_seconds(snapshot, ids, block.arrays[self._time])
        if self._wanted:
            self._mark(block, length, burn_in)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return where the wide rows of the steps from each id on lie; any thread may ask."""
        windows = Windows(len(ids))
        if windows.find(snapshot, ids, *self._bounds) >= 0:
            return NO_PAGES  # `fill` says what is wrong
        return wide_pages(snapshot, windows, self._layout.copies(int(windows.k.max(initial=0))))

    def _mark(self, block: Block, length: int, burn_in: int) -> None:
        windows, arrays = self._plan.windows, {name: block.arrays[at] for name, at in self._wanted.items()}
        step = np.arange(length)
        real = step < windows.k[:, None]
        # A continuation after a length cut has both: the environment was not reset there.
        resets = (windows.ends & (FIRST | CUT)) == FIRST
        if "mask" in arrays:
            arrays["mask"][:] = real
        if "loss_mask" in arrays:
            arrays["loss_mask"][:] = real & ((step >= burn_in) | resets[:, None])
        if "is_first" in arrays:
            arrays["is_first"][:] = (step == 0) & resets[:, None]
        for name, bit in (("terminated", TERMINATED), ("truncated", TRUNCATED)):
            if name in arrays:
                arrays[name][:] = (step == windows.k[:, None] - 1) & ((windows.ends & bit) != 0)[:, None]


def _steps_before(snapshot: Snapshot, windows: Windows, ids: Ints, view: Any) -> Ints:
    """Return how many steps of its episode come before each window, hidden ones included."""
    before, flags = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.uint8)
    done = snapshot.leaf("done")
    bad = 0
    for _ in range(ATTEMPTS):
        _held, chunks, first_chunk, bases = done.addresses()
        bad = chosen("episode_offset")(
            windows.slot, windows.lane, windows.row, first_chunk, chunks, done.shift, snapshot.lanes, bases,
            before, flags,
        )  # fmt: skip
        if bad < 0:
            return before
        done.ensure(windows.slot, np.zeros_like(windows.row), windows.row)
    raise refuse(snapshot, int(ids[bad]), view)
