"""Windows of steps inside episodes, and whole episodes: the views, and how they are gathered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import InvalidIndex
from diskreplay.format.schema import Schema
from diskreplay.ids import CUT, FIRST, TERMINATED, TRUNCATED
from diskreplay.kernels.runs import FIRST_ONLY, MOVED_BACK, PADDED, Starts
from diskreplay.kernels.table import chosen
from diskreplay.sampling.number_arguments import int_argument, int_or_none
from diskreplay.store.reading.snapshot import Snapshot
from diskreplay.views.arguments import check_fields, described, names, stack_depths, switch
from diskreplay.views.base import Block, Ints, Leaf, Reader, View
from diskreplay.views.gather_plan import LONGEST, GatherPlan
from diskreplay.views.page_ranges import Pages
from diskreplay.views.step_layout import FLAGS, StepLayout
from diskreplay.views.windows import (
    ATTEMPTS,
    TO_THE_END,
    Bounds,
    Windows,
    refuse,
    refuse_evicted,
    windows_of,
)


@dataclass(frozen=True, repr=False)
class Sequences(View):
    """Windows of `length` steps of one episode, for recurrent agents: an id is that of a window's first step.

    Windows start at steps 0, stride, 2 stride, ... of each episode, stride = length - overlap, up to the first that
    reaches the episode's end: every step is in some window, and with ``overlap=length - 1`` every full window is
    there. A window of an open episode exists once it is full. Kapturowski et al. 2019 (R2D2, section 2.3) use length
    80, overlap 40 and a burn-in of up to 40.

    The batch has `obs`, `next_obs`, `action`, `reward`, `terminated`, `truncated`, `is_first`, `mask`, `loss_mask` and
    the extra fields, all (batch, length, ...), and `index` and `weight`, (batch,). `obs` and `next_obs` share memory.
    What lies behind an episode's end is zeros and False, but the first padded `obs` is the final observation. `mask`
    is true at real steps; `loss_mask` leaves out the burn-in, except in a window that starts its episode: there the
    initial state is exact. `is_first` marks the step after a reset of the environment. An episode that continues one
    cut for its length has none, and windows at its start have a burn-in.

    Immutable: any thread may use it, and several samplers may share it.

    Parameters
    ----------
    length : int
        Steps of a window.
    overlap : int
        Steps that a window shares with the next one, 0 to length - 1.
    burn_in : int
        Steps at a window's start that only warm up a recurrent state, 0 to `overlap`.
    pad : bool
        How an episode's last window is made full: with padding, or (False) moved back to end at the episode's end. An
        episode shorter than `length` is one padded window in both cases.
    frame_stack : int or dict
        Frames of each observation, oldest first, (batch, length, frame_stack, *shape), as views of frames that are
        gathered once; stacks read earlier frames of the episode, and before its start the first frame repeats. Padding
        is by frame: stacks just behind the end still show the last frames. See `Transitions`.
    start_only : sequence of str
        Extra fields that are read at a window's first step only, (batch, ...): a stored recurrent state.

    Raises
    ------
    ValueError
        An argument is invalid.
    """

    length: int = 80
    overlap: int = 40
    burn_in: int = 0
    pad: bool = True
    frame_stack: int | Mapping[str, int] = 1
    start_only: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(self, length=int_argument)
        if isinstance(self.overlap, int) and self.overlap >= self.length:
            raise ValueError(f"overlap must be less than length, {self.length}, not {self.overlap}")
        check_fields(self, overlap=partial(int_argument, least=0, most=self.length - 1))
        if isinstance(self.burn_in, int) and self.burn_in > self.overlap:
            raise ValueError(
                f"burn_in must be at most overlap, {self.overlap}, not {self.burn_in}: "
                "steps would be in no window's loss"
            )
        check_fields(self, burn_in=partial(int_argument, least=0, most=self.overlap), pad=switch)
        check_fields(self, frame_stack=stack_depths, start_only=names)

    @property
    def stride(self) -> int:
        """Steps from one window's start to the next."""
        return self.length - self.overlap

    def __repr__(self) -> str:
        return described(self, ("length", "overlap"))

    @property
    def kind(self) -> tuple[str, int, int, bool]:
        """Sequences of one length, overlap and pad share a table of priorities."""
        return ("sequences", self.length, self.overlap, self.pad)

    @property
    def item_steps(self) -> int:
        """Those of a whole window."""
        return self.length

    @property
    def starts(self) -> Starts:
        """The windows' first steps; those of open episodes are full, with the observation behind them."""
        return Starts(self.length, self.stride, PADDED if self.pad else MOVED_BACK, open_rows=self.length + 1)

    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Bind the view to a schema; `fields` names what a batch holds, None all."""
        return SequencesReader(self, schema, fields)


@dataclass(frozen=True, repr=False)
class Episodes(View):
    """Whole ended episodes: an id is that of an episode's first step.

    The batch has the fields of `Sequences`, (batch, L, ...), where L is the length of its longest episode, in steps.
    An episode whose first steps a capacity has hidden is not sampled.

    Immutable: any thread may use it, and several samplers may share it.

    Parameters
    ----------
    max_length : int or None
        Of longer episodes only the first `max_length` steps are gathered. None: all of them; then one long episode
        makes every item of its batch as long.

    Raises
    ------
    ValueError
        `max_length` is invalid.
    """

    max_length: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, max_length=partial(int_or_none, none="no limit"))

    def __repr__(self) -> str:
        return described(self, ())

    @property
    def kind(self) -> tuple[str]:
        """All episodes share one table of priorities, whatever their `max_length`."""
        return ("episodes",)

    @property
    def item_steps(self) -> None:
        """None: as many as the episode has."""
        return None

    @property
    def starts(self) -> Starts:
        """The first step of each ended episode."""
        return Starts(last=FIRST_ONLY)

    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Bind the view to a schema; `fields` names what a batch holds, None all."""
        return EpisodesReader(self, schema, fields)


class _StepsReader(Reader):
    """Gathers windows of up to `length` steps, in blocks of a layout. Not thread-safe: it owns scratch memory.

    Whether such windows of the view begin at the ids is left to `check`: it has to look back to the episode's first
    step.
    """

    shows_leaves = False

    def __init__(self, view: View, layout: StepLayout, length: int, burn_in: int = 0) -> None:
        self._layout, self._bounds, self._burn_in = layout, Bounds(length, layout.stack), burn_in
        self.paths = layout.paths
        computed = {name: layout.place[name,] for name in ("index", "weight")}
        self._length = LONGEST
        self._plan = GatherPlan(layout.copies(self._length), view, self._bounds, computed=computed)
        self._wanted = {name: layout.place[name,] for name in FLAGS if (name,) in layout.place}

    def present(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the fields of a batch, in the order of `paths`, as views of the leaves' tensors."""
        return self._layout.present(tensors)

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the steps from each id on, as many as the block has room for."""
        length = self._layout.length(block.leaves)
        if length != self._length:
            self._length = -1
            self._plan.set_lengths([copy.length for copy in self._layout.copies(length)])
            self._length = length
        self._plan.gather(snapshot, ids, block, self.helper)
        if self._wanted:
            self._mark(block, length)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return where the wide rows of the steps from each id on lie; what is not mapped yet is mapped."""
        return self._plan.pages(snapshot, ids)

    def _mark(self, block: Block, length: int) -> None:
        """Say which steps are real and how they end."""
        windows, arrays = self._plan.windows, {name: block.arrays[at] for name, at in self._wanted.items()}
        step = np.arange(length)
        real = step < windows.k[:, None]
        # A continuation after a length cut has both: the environment was not reset there.
        resets = (windows.ends & (FIRST | CUT)) == FIRST
        if "mask" in arrays:
            arrays["mask"][:] = real
        if "loss_mask" in arrays:
            arrays["loss_mask"][:] = real & ((step >= self._burn_in) | resets[:, None])
        if "is_first" in arrays:
            arrays["is_first"][:] = (step == 0) & resets[:, None]
        for name, bit in (("terminated", TERMINATED), ("truncated", TRUNCATED)):
            if name in arrays:
                arrays[name][:] = (step == windows.k[:, None] - 1) & ((windows.ends & bit) != 0)[:, None]


class SequencesReader(_StepsReader):
    """Gathers `Sequences`. Not thread-safe: it owns scratch memory."""

    def __init__(self, view: Sequences, schema: Schema, fields: Sequence[str] | None) -> None:
        layout = StepLayout(schema, fields, view.frame_stack, view.start_only)
        super().__init__(view, layout, view.length, view.burn_in)
        self.leaves = layout.leaves(view.length)
        self._view = view

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
        moved: NDArray[np.bool_] = windows.k[odd] == length
        longer = Windows(1)
        for i in np.flatnonzero(moved):
            step_id = ids[odd[i : i + 1]]
            moved[i] = longer.find(snapshot, step_id, length + 1, 1, False) < 0 and longer.k[0] == length
        return moved


class EpisodesReader(_StepsReader):
    """Gathers `Episodes`. Not thread-safe: it owns scratch memory."""

    depends_on_ids = True

    def __init__(self, view: Episodes, schema: Schema, fields: Sequence[str] | None) -> None:
        super().__init__(view, StepLayout(schema, fields), TO_THE_END if view.max_length is None else view.max_length)
        self.leaves = self._layout.leaves(1)
        self._view = view

    def count_steps(self, snapshot: Snapshot, ids: Ints) -> int:
        """Return how many steps the batch of these ids has."""
        return int(windows_of(snapshot, ids, self._bounds, self._view).k.sum())

    def leaves_for(self, snapshot: Snapshot, ids: Ints) -> Sequence[Leaf]:
        """Return the leaves of the batch of these ids, as long as its longest episode; InvalidIndex as of `fill`."""
        return self._layout.leaves(int(windows_of(snapshot, ids, self._bounds, self._view).k.max(initial=1)))

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        """Raise InvalidIndex, naming the id and the reason, where no ended episode begins at an id."""
        windows = windows_of(snapshot, ids, Bounds(TO_THE_END), self._view)
        refuse_evicted(snapshot, ids)
        before = _steps_before(snapshot, windows, ids, self._view)
        inside = np.flatnonzero(before)
        if len(inside):
            first = inside[0]
            raise InvalidIndex(f"id {ids[first]} is step {before[first]} of its episode; {self._view} start at step 0")


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
