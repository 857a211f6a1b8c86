"""The view of sequences: windows of steps inside episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diskreplay.format.schema import Schema
from diskreplay.kernels.runs import MOVED_BACK, PADDED, Starts
from diskreplay.sampling.number_arguments import int_argument
from diskreplay.views.arguments import bounded, described, frame_stack_argument, names, switch
from diskreplay.views.base import Reader, View


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
        An argument is none of these.
    """

    length: int = 80
    overlap: int = 40
    burn_in: int = 0
    pad: bool = True
    frame_stack: int | Mapping[str, int] = 1
    start_only: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", int_argument("length", self.length))
        if isinstance(self.overlap, int) and self.overlap >= self.length:
            raise ValueError(f"overlap must be less than length, {self.length}, not {self.overlap}")
        object.__setattr__(self, "overlap", bounded("overlap", self.overlap, 0, self.length - 1))
        if isinstance(self.burn_in, int) and self.burn_in > self.overlap:
            raise ValueError(
                f"burn_in must be at most overlap, {self.overlap}, not {self.burn_in}: "
                "steps would be in no window's loss"
            )
        object.__setattr__(self, "burn_in", bounded("burn_in", self.burn_in, 0, self.overlap))
        object.__setattr__(self, "pad", switch("pad", self.pad))
        object.__setattr__(self, "frame_stack", frame_stack_argument(self.frame_stack))
        object.__setattr__(self, "start_only", names("start_only", self.start_only))

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
        # Here and not above: the reader's kernels load numba, which nobody needs to make or describe a view.
        from diskreplay.views.sequences_reader import SequencesReader

        return SequencesReader(self, schema, fields)
