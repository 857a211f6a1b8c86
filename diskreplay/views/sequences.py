"""Windows of steps inside episodes, and whole episodes: the views and their readers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.number_arguments import fraction, int_argument, int_or_none
from diskreplay.errors import InvalidIndex
from diskreplay.ids import CUT, FIRST, TERMINATED, TRUNCATED, Ints
from diskreplay.kernels import gathering as cols
from diskreplay.kernels.runs import DROPPED, FIRST_ONLY, MOVED_BACK, PADDED, Starts
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema
from diskreplay.views.arguments import check_fields, described, names, reward_leaves, stack_depths, switch
from diskreplay.views.base import Block, Leaf, Pages, Reader, View
from diskreplay.views.crossing import CrossingReader, CrossingStarts
from diskreplay.views.gather_plan import LONGEST, GatherPlan
from diskreplay.views.requested import FLAGS, Requested, window_layout, write_fields
from diskreplay.views.successors import EpisodeFinder
from diskreplay.views.windows import TO_THE_END, Bounds, Copy, Windows, refuse_evicted, windows_of

# The default number of steps that windows share (Kapturowski et al. 2019, section 2.3).
OVERLAP = 40

# The largest number of window lengths for which a reader keeps its leaves: batches of `Episodes` have many lengths.
KEPT_LAYOUTS = 64


@dataclass(frozen=True, repr=False)
class Sequences(View):
    """Windows of `length` steps of one episode, for recurrent agents: an id names the first step of a window.

    Windows start at steps 0, stride, 2 stride, ... of each episode, up to the first window that reaches the episode's
    end. The stride is length - overlap: every step is in some window, and ``overlap=length - 1`` gives every full
    window. A window of an open episode can be drawn once it is full. Kapturowski et al. 2019 (R2D2, section 2.3) use
    length 80, overlap 40 and a burn-in of up to 40.

    The batch has `obs`, `next_obs`, `action`, `reward`, `terminated`, `truncated`, `is_first`, `mask`, `loss_mask` and
    the extra fields, all (batch, length, ...), and `index` and `weight`, (batch,). `obs` and `next_obs` share memory.
    Padding after an episode's end is zeros and False, except that the first padded `obs` is the final observation.
    `mask` is true at real steps. `loss_mask` leaves out the burn-in, except in a window at its episode's start, where
    the initial state is exact. `is_first` marks the step after a reset of the environment. The continuation of an
    episode that was cut for its length begins without a reset, so windows at its start have a burn-in.

    With `cross_episodes`, as in Dreamer (Hafner et al. 2023), a window continues in the next episodes of its lane, and
    `is_first` marks the resets inside the window. Windows start at steps 0, stride, 2 stride, ... of each episode, as
    soon as the lane has all `length` steps of the window. All windows are full. Windows also hold the last step of
    episodes that were truncated without a final observation. Windows continue across a writer's segments and across
    evicted episodes, but not across an episode that the sampler's `where` leaves out. `loss_mask` leaves out the
    burn-in steps before the window's first reset. `next_obs` is in a batch only if the sampler's `fields` names it.
    `next_obs` and `obs` do not share memory. At an episode's end, `next_obs` is the final observation, or zeros if the
    store does not have it.

    The view is immutable: any thread may use it, and several samplers may share it.

    Parameters
    ----------
    length : int
        Number of steps in a window.
    overlap : int or None
        Number of steps that a window shares with the next window, 0 to length - 1. None: length - stride if `stride` is
        given, else 40.
    burn_in : int
        Number of steps at a window's start that only warm up a recurrent state, 0 to `overlap`. With this limit, each
        step is in the loss of some window. If `stride` is given, the limit is length - 1, and each step is in the loss
        of some window only if burn_in <= length - stride.
    pad : bool or "drop"
        What happens to an episode's last window if this window would reach beyond the episode's end. True: the window
        is padded. False: the window moves back, so that it ends with the episode. "drop": the window is left out. An
        episode shorter than `length` gives one padded window, or no window with "drop".
    frame_stack : int or dict
        Number of frames in each observation, oldest first, (batch, length, frame_stack, *shape). Stacks share the
        memory of their frames. Stacks show earlier frames of the episode; before the episode's start, the first frame
        repeats. Padding is added frame by frame, so the first padded stacks still show the episode's last frames. See
        `Transitions`.
    start_only : sequence of str
        Extra fields that are read only at a window's first step, (batch, ...), such as a stored recurrent state.
    stride : int or None
        Number of steps from one window's start to the next. A stride above `length` leaves out steps between windows.
        None: length - overlap.
    cross_episodes : bool
        Whether windows cross the ends of episodes; see above. If True, no window is partial, and `pad` must not be
        False. ``Sequences(64, stride=1, cross_episodes=True)`` draws uniformly from all windows of 64 steps.
    align : {"start", "end"}
        The place from which windows are counted: an episode's start or its end. With "end", the last window ends with
        the episode, and the other windows end stride, 2 stride, ... steps earlier. Open episodes have no windows, since
        their end is not known. If the earliest window would begin before the episode, this window begins with the
        episode, or is left out if `pad` is "drop".
    gamma : float
        Discount per step of the field `discounted_return_to_go`, 0 to 1; nothing else is discounted.

    Raises
    ------
    ValueError
        An argument is invalid.

    Examples
    --------
    >>> sampler = dr.Sampler("cartpole.replay", dr.Sequences(length=8, overlap=4, burn_in=2), batch_size=16)
    >>> batch = sampler.sample()
    >>> batch.obs.shape, batch.mask.shape
    (torch.Size([16, 8, 4]), torch.Size([16, 8]))
    """

    length: int = 80
    overlap: int | None = None
    burn_in: int = 0
    pad: bool | str = True
    frame_stack: int | Mapping[str, int] = 1
    start_only: Sequence[str] = ()
    stride: int | None = None
    cross_episodes: bool = False
    align: str = "start"
    gamma: float = 0.99

    def __post_init__(self) -> None:
        check_fields(self, length=int_argument, stride=partial(int_or_none, none="length - overlap"))
        if self.stride is None:
            self._check_overlap()
        elif self.overlap is not None and self.overlap != self.length - self.stride:
            raise ValueError(
                f"windows of length={self.length} and stride={self.stride} share {self.length - self.stride} steps, "
                f"not overlap={self.overlap!r}: give overlap or stride alone"
            )
        most = self.length - 1 if self.overlap is None else self.overlap
        check_fields(self, burn_in=partial(int_argument, least=0, most=most))
        if not isinstance(self.pad, bool | np.bool_) and self.pad != "drop":
            raise ValueError(f'pad must be True, False or "drop", not {self.pad!r}')
        if self.align not in ("start", "end"):
            raise ValueError(f'align must be "start" or "end", not {self.align!r}')
        check_fields(self, frame_stack=stack_depths, start_only=names, cross_episodes=switch, gamma=fraction)
        if self.cross_episodes and (not self.pad or self.align == "end"):
            raise ValueError(
                'windows with cross_episodes do not end with an episode: do not give pad=False or align="end"'
            )

    def _check_overlap(self) -> None:
        default = f" (the default): give one, such as overlap={self.length // 2}" if self.overlap is None else ""
        if self.overlap is None:
            object.__setattr__(self, "overlap", OVERLAP)
        assert self.overlap is not None
        if isinstance(self.overlap, int) and self.overlap >= self.length:
            raise ValueError(f"overlap must be less than length, {self.length}, not {self.overlap}{default}")
        check_fields(self, overlap=partial(int_argument, least=0, most=self.length - 1))
        if isinstance(self.burn_in, int) and self.burn_in > self.overlap:
            raise ValueError(
                f"burn_in must be at most overlap, {self.overlap}, not {self.burn_in}: "
                "steps would be in no window's loss"
            )

    def __repr__(self) -> str:
        return described(self, ("length",))

    @property
    def kind(self) -> tuple[Any, ...]:
        """The kind of the view's ids: views with the same windows share a table of priorities."""
        overlap = self.length - self.starts.step
        if self.cross_episodes:
            return ("sequences", self.length, overlap, True, "cross_episodes")
        if self.align == "end":
            return ("sequences", self.length, overlap, self.pad == "drop", "end")
        return ("sequences", self.length, overlap, self.pad)

    @property
    def item_steps(self) -> int:
        """The number of environment steps in a window, `length`."""
        return self.length

    @property
    def starts(self) -> Starts:
        """The rule that says at which steps of an episode windows start.

        In an open episode, windows start only where they are full and the observation after them is known.
        """
        step = self.length - (self.overlap or 0) if self.stride is None else self.stride
        if self.cross_episodes:
            return Starts(step=step)  # this rule selects from the steps that `CrossingStarts` finds
        if self.align == "end":
            return Starts(self.length, step, DROPPED if self.pad == "drop" else MOVED_BACK, from_end=True)
        last = DROPPED if self.pad == "drop" else PADDED if self.pad else MOVED_BACK
        return Starts(self.length, step, last, open_rows=self.length + 1)

    def crossing(self) -> CrossingStarts | None:
        """Return an object that finds where windows across several episodes start; None without `cross_episodes`."""
        return CrossingStarts(self.length) if self.cross_episodes else None

    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Return a reader for a schema; `fields` names the fields of a batch, None: the default fields."""
        if self.cross_episodes:
            layout = window_layout(schema, fields, self.frame_stack, self.start_only, shares_frames=False)
            return CrossingReader(self, schema, *layout, self.length, self.burn_in, self.gamma)
        return SequencesReader(self, schema, fields)


@dataclass(frozen=True, repr=False)
class Episodes(View):
    """Whole ended episodes: an id names the first step of an episode.

    The batch has the fields of `Sequences`, (batch, L, ...), where L is the length of the batch's longest episode in
    steps. An episode is not sampled if the store's capacity hides its first steps.

    The view is immutable: any thread may use it, and several samplers may share it.

    Parameters
    ----------
    max_length : int or None
        Largest number of steps of an item: of a longer episode, only the first `max_length` steps are gathered. With
        None, all steps are gathered, so one long episode pads all other items of its batch to its own length.
    gamma : float
        Discount per step of the field `discounted_return_to_go`, 0 to 1; nothing else is discounted.

    Raises
    ------
    ValueError
        An argument is invalid.

    Examples
    --------
    >>> sampler = dr.Sampler("cartpole.replay", dr.Episodes(max_length=10), batch_size=4)
    >>> sampler.sample().reward.shape[0]
    4
    """

    max_length: int | None = None
    gamma: float = 0.99

    def __post_init__(self) -> None:
        check_fields(self, max_length=partial(int_or_none, none="no limit"), gamma=fraction)

    def __repr__(self) -> str:
        return described(self, ())

    @property
    def kind(self) -> tuple[str]:
        """The kind of the view's ids: all episodes share one table of priorities, for every `max_length`."""
        return ("episodes",)

    @property
    def item_steps(self) -> None:
        """None: the number of environment steps depends on the episode."""
        return None

    @property
    def starts(self) -> Starts:
        """The rule that selects the first step of each ended episode."""
        return Starts(last=FIRST_ONLY)

    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Return a reader for a schema; `fields` names the fields of a batch, None: the default fields."""
        return EpisodesReader(self, schema, fields)


class _StepsReader(Reader):
    """Gathers windows of up to `length` steps. Not thread-safe: it owns scratch memory.

    The observations of an item are one array of frames, (stack - 1 + length + 1, *shape). The array has earlier frames
    for the first stacks, the frame of each step, and the frame after the last step. `obs` and `next_obs` share the
    memory of this array.

    Whether a window of the view starts at an id depends on the number of earlier steps in the episode. Only `check`
    counts these steps, and refuses the id if no window starts there.

    A derived reader defines `check`, and an `__init__` that sets `leaves` to `_leaves(length)`. If a field needs
    another shape or other values than in this class, the derived reader overrides `present`.
    """

    shows_leaves = False

    def __init__(
        self,
        view: View,
        schema: Schema,
        fields: Sequence[str] | None,
        length: int,
        burn_in: int = 0,
        frame_stack: int | Mapping[str, int] = 1,
        start_only: Sequence[str] = (),
        gamma: float = 1.0,
    ) -> None:
        self._kinds, self._shown = window_layout(schema, fields, frame_stack, start_only)
        self.paths = [field.path for field in self._shown]
        self._layouts: dict[int, tuple[Leaf, ...]] = {}
        self._bounds = Bounds(length, max((kind.stack for kind in self._kinds), default=1) or 1)
        self._burn_in, self._length = burn_in, LONGEST
        self._place = place = {kind.value.path: number for number, kind in enumerate(self._kinds)}
        computed = {name: place[name,] for name in ("index", "weight")}
        self._plan = GatherPlan(self._copies(LONGEST), view, self._bounds, computed=computed)
        self._has_flags = any((name,) in place for name in FLAGS)
        self._finder = EpisodeFinder()
        self._requested = Requested(schema, place, reward_leaves(schema, None), gamma).if_any()

    def _leaves(self, length: int) -> tuple[Leaf, ...]:
        """Return the leaves of windows with `length` steps; later calls return the same object, to reuse memory."""
        if length not in self._layouts:
            if len(self._layouts) == KEPT_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[length] = tuple(kind.leaf(length) for kind in self._kinds)
        return self._layouts[length]

    def _copies(self, length: int) -> list[Copy]:
        found = []
        for target, kind in enumerate(self._kinds):
            if kind.source is None:
                continue
            if kind.stack:
                stop, offset, count = cols.FRAMES_STOP, 1 - kind.stack, length + kind.stack
            else:
                stop, offset, count = cols.AFTER, 0, length if kind.each_step else 1
            found.append(Copy(kind.source, cols.ROW, stop, offset, count, target))
        return found

    def _length_of(self, leaves: Sequence[Leaf]) -> int:
        """Return the window length that `leaves` were made for; 0 if no leaf has a value for each step."""
        for kind, leaf in zip(self._kinds, leaves, strict=True):
            if kind.each_step:
                return leaf.shape[0] - kind.stack
        return 0

    def present(self, tensors: Sequence[Any]) -> list[Any]:
        return [shown.of(tensors[shown.leaf]) for shown in self._shown]

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather a window for each id; the shapes of the block's leaves set the number of steps in a window."""
        length = self._length_of(block.leaves)
        if length != self._length:
            self._length = -1
            self._plan.set_lengths([copy.length for copy in self._copies(length)])
            self._length = length
        self._plan.gather(snapshot, ids, block, self.threads)
        if self._has_flags:
            self._mark(block, length)
        if self._requested is not None:
            self._requested.fill(snapshot, ids, block, self._plan.windows.k)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        return self._plan.pages(snapshot, ids)

    def _mark(self, block: Block, length: int) -> None:
        windows, step = self._plan.windows, np.arange(length)
        real, is_last = step < windows.k[:, None], step == windows.k[:, None] - 1
        # The first step of a continuation after a length cut has the flags FIRST and CUT: the environment was not reset
        # there.
        resets = ((windows.ends & (FIRST | CUT)) == FIRST)[:, None]
        made = {
            "mask": real,
            "loss_mask": real & ((step >= self._burn_in) | resets),
            "is_first": (step == 0) & resets,
            "terminated": is_last & (windows.ends[:, None] & TERMINATED != 0),
            "truncated": is_last & (windows.ends[:, None] & TRUNCATED != 0),
        }
        write_fields(block, self._place, made)


class SequencesReader(_StepsReader):
    def __init__(self, view: Sequences, schema: Schema, fields: Sequence[str] | None) -> None:
        super().__init__(view, schema, fields, view.length, view.burn_in, view.frame_stack, view.start_only, view.gamma)
        self.leaves = self._leaves(view.length)
        self._view = view

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        view, from_end = self._view, self._view.starts.from_end
        windows = windows_of(snapshot, ids, Bounds(TO_THE_END if from_end else view.length), view)
        refuse_evicted(snapshot, ids)
        before = self._finder.steps_before(snapshot, ids)
        good = self._from_end(windows, before) if from_end else self._from_start(snapshot, ids, windows, before)
        if not good.all():
            odd = good.argmin()
            raise InvalidIndex(
                f"id {ids[odd]} is step {before[odd]} of its episode, and no window of {view} starts there"
            )

    def _from_start(self, snapshot: Snapshot, ids: Ints, windows: Windows, before: Ints) -> NDArray[np.bool_]:
        """Return a mask of the ids at which windows start; `before` counts the earlier steps in each id's episode."""
        length, step, last = self._view.starts[:3]
        whole = windows.k == length
        # A window may be partial only if the previous window ends before the episode's end.
        partial_ones = (before == 0) | ((last == PADDED) & (windows.k > length - step))
        good: NDArray[np.bool_] = (before % step == 0) & (whole | (partial_ones & (last != DROPPED)))
        odd = np.flatnonzero(~good & whole & (step - before % step < length))
        if len(odd) and last == MOVED_BACK:
            good[odd] = self._moved_back(snapshot, ids[odd])
        return good

    def _from_end(self, windows: Windows, before: Ints) -> NDArray[np.bool_]:
        """Return a mask of the ids at which windows start.

        `windows` reach to the episode's end. `before` has the number of earlier steps in each id's episode.
        """
        length, step, last = self._view.starts[:3]
        rest = (before + windows.k - length) % step
        moved = (before == 0) & (last == MOVED_BACK) & ((windows.k < length) | (step < length + rest))
        good: NDArray[np.bool_] = moved | ((windows.k >= length) & ((windows.k - length) % step == 0))
        return good

    def _moved_back(self, snapshot: Snapshot, ids: Ints) -> NDArray[np.bool_]:
        """Return a mask of the ids whose window of `length` steps ends with the last step of an ended episode."""
        length = self._view.length
        moved, longer = np.zeros(len(ids), np.bool_), Windows(1)
        for i in range(len(ids)):
            moved[i] = longer.find(snapshot, ids[i : i + 1], length + 1, 1, False) < 0 and longer.k[0] == length
        return moved


class EpisodesReader(_StepsReader):
    depends_on_ids = True

    def __init__(self, view: Episodes, schema: Schema, fields: Sequence[str] | None) -> None:
        length = TO_THE_END if view.max_length is None else view.max_length
        super().__init__(view, schema, fields, length, gamma=view.gamma)
        self.leaves = self._leaves(1)
        self._view = view

    def count_steps(self, snapshot: Snapshot, ids: Ints) -> int:
        return int(windows_of(snapshot, ids, self._bounds, self._view).k.sum())

    def leaves_for(self, snapshot: Snapshot, ids: Ints) -> Sequence[Leaf]:
        return self._leaves(int(windows_of(snapshot, ids, self._bounds, self._view).k.max(initial=1)))

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        windows_of(snapshot, ids, Bounds(TO_THE_END), self._view)
        refuse_evicted(snapshot, ids)
        before = self._finder.steps_before(snapshot, ids)
        inside = np.flatnonzero(before)
        if len(inside):
            first = inside[0]
            raise InvalidIndex(f"id {ids[first]} is step {before[first]} of its episode; {self._view} start at step 0")
