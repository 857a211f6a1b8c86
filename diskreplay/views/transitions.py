"""n-step transitions: the view, its readers, and a generator of n-step experiences from any stream of steps."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from diskreplay.distributions.number_arguments import fraction, int_argument, int_or_none
from diskreplay.errors import InvalidIndex
from diskreplay.ids import TERMINATED, Ints
from diskreplay.kernels import gathering as cols
from diskreplay.kernels.runs import Starts
from diskreplay.reading.episodes import Episode
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema, TupleRecord
from diskreplay.views.arguments import (
    check_fields,
    described,
    discount_leaf,
    name_or_none,
    names,
    reward_leaves,
    stack_depths,
    weights_or_none,
)
from diskreplay.views.base import BOOL, FLOAT32, INT64, Block, Leaf, Pages, Path, Reader, View, select
from diskreplay.views.gather_plan import LONGEST, GatherPlan, RandomSteps
from diskreplay.views.hindsight import Hindsight, HindsightReader, ReturnsReader
from diskreplay.views.requested import Requested, each_item, each_step
from diskreplay.views.windows import (
    TIME,
    TIME_SOURCE,
    TO_THE_END,
    Bounds,
    Copy,
    Windows,
    refuse_evicted,
    step_fields,
    windows_of,
)
from diskreplay.writing.casting import as_flag

SCALARS = {"reward": FLOAT32, "discount": FLOAT32, "terminated": BOOL, "truncated": BOOL}


@dataclass(frozen=True, repr=False)
class Transitions(View):
    """n-step transitions: an id names the first step.

    The view is immutable: any thread may use it, and several samplers may share it.

    Parameters
    ----------
    n_step : int, (int, int) or None
        Number of steps in the return. The return has fewer steps if the episode ends first. None: all steps to the end
        of the episode (the Monte-Carlo return). With None, only ended episodes are sampled. A pair, such as (1, 5), is
        the smallest and the largest number. Each item draws its number of steps from this range, with equal
        probabilities. The batch has the drawn numbers as `n_steps`. The largest number decides which steps can be
        sampled, and `Sampler.gather` uses the largest number for all items.
    gamma : float
        Discount per step, 0 to 1.
    frame_stack : int or dict
        Number of frames in each observation, oldest first, (batch, frame_stack, *shape). In a stack that reaches back
        beyond the episode's start, the first frame repeats. If the episode continues an episode that was cut for its
        length, stacks show frames of the cut episode instead, while the segment of that episode exists. An int applies
        to every observation leaf; a dict has a number for each named leaf ("image", "camera/left"). 1 adds no axis.
    reward : dict or None
        Weights of the fields whose sum is the reward, by name: "reward" and scalar extra fields. None: {"reward": 1.0}.
    next_fields : sequence of str
        Step fields whose value n steps later is also in the batch, as next_<name>: ("action",) for SARSA. If a window
        ends with its episode, there is no such later step: the values are zeros, and `next_mask`, (batch,) bool, is
        False.
    relabel : Hindsight or None
        The rule by which goals are replaced by goals that the episode reached. With `relabel`, only ended episodes are
        sampled, since the later goals of an open episode are not known. `Sampler.gather` ignores `relabel` and returns
        stored values.
    next_missing : {"mask", "drop"}
        What happens to windows that end with their episode, if the episode did not terminate. The discount of such a
        window is not 0, but the window has no next fields to bootstrap from. "mask": such windows are sampled, with
        `next_mask` False. "drop": such windows are not sampled.
    discount : str or None
        A scalar extra field with the environment's discount d of each step, such as `dm_env.TimeStep.discount`. d
        multiplies `gamma` step by step: the `reward` of a batch is the sum over i < k of r_{t+i} times the product over
        j < i of gamma d_{t+j}. The `discount` of a batch is this product over j < k, or 0 if the episode terminated.

    Raises
    ------
    ValueError
        An argument is invalid.

    Examples
    --------
    >>> sampler = dr.Sampler("cartpole.replay", dr.Transitions(n_step=5, gamma=0.99, frame_stack=4), batch_size=32)
    >>> batch = sampler.sample()
    >>> batch.obs.shape, batch.reward.shape, batch.discount.shape
    (torch.Size([32, 4, 4]), torch.Size([32]), torch.Size([32]))
    """

    n_step: int | tuple[int, int] | None = 1
    gamma: float = 0.99
    frame_stack: int | Mapping[str, int] = 1
    reward: Mapping[str, float] | None = None
    next_fields: Sequence[str] = ()
    relabel: Hindsight | None = None
    next_missing: str = "mask"
    discount: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, n_step=_steps_argument, gamma=fraction)
        check_fields(self, frame_stack=stack_depths, reward=weights_or_none, next_fields=names, discount=name_or_none)
        if "obs" in self.next_fields:
            raise ValueError("next_fields must not name 'obs': a batch always has next_obs")
        if self.relabel is not None and not isinstance(self.relabel, Hindsight):
            raise ValueError(f"relabel must be None or Hindsight(...), not {self.relabel!r}")
        if self.next_missing not in ("mask", "drop"):
            raise ValueError(f'next_missing must be "mask" or "drop", not {self.next_missing!r}')
        if self.drops and not self.next_fields:
            raise ValueError('next_missing="drop" needs next_fields: without them nothing can be missing')

    def __repr__(self) -> str:
        return described(self, ("n_step",))

    @property
    def drops(self) -> bool:
        """Whether windows without next fields are left out, unless their episode terminated."""
        return self.next_missing == "drop"

    @property
    def most_steps(self) -> int | None:
        """The largest number of steps of a return; None: all steps to the episode's end."""
        return self.n_step[1] if isinstance(self.n_step, tuple) else self.n_step

    @property
    def kind(self) -> tuple[str]:
        """The kind of the view's ids: all transitions share one table of priorities, for every n and gamma."""
        return ("transitions",)

    @property
    def item_steps(self) -> int:
        """The number of environment steps in an item: 1, since only the first step of a transition counts."""
        return 1

    @property
    def starts(self) -> Starts:
        """The rule that selects every step with a complete n-step window."""
        n = LONGEST if self.most_steps is None else self.most_steps
        followed = n if self.drops else 0
        if self.most_steps is None or self.relabel is not None:
            return Starts(followed=followed)
        return Starts(open_rows=n + 1, observed=not self.next_fields, followed=followed)

    @property
    def random(self) -> bool:
        """Whether batches depend on random numbers: goals are replaced, or numbers of steps are drawn."""
        return self.relabel is not None or isinstance(self.n_step, tuple)

    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Return a reader for a schema. With `relabel`, observations must be goal-conditioned."""
        reader = TransitionsReader(self, schema, fields)
        return reader if self.relabel is None else HindsightReader(self.relabel, reader, schema)


class TransitionsReader(ReturnsReader):
    """Gathers batches of the view `Transitions`. Only `pages` is thread-safe: the reader owns scratch memory."""

    view: Transitions

    def __init__(self, view: Transitions, schema: Schema, fields: Sequence[str] | None) -> None:
        self.view, self.schema, self.gamma, self.fill_checks = view, schema, view.gamma, not view.drops
        self.weights = reward_leaves(schema, view.reward)
        sources, leaves = _plan(view, schema)
        on_request = [*each_step(schema), *each_item(schema)]
        self.leaves: Sequence[Leaf] = tuple(select(leaves, fields, on_request=on_request))
        self.paths = [leaf.path for leaf in self.leaves]
        place = {path: i for i, path in enumerate(self.paths)}
        self.copies = [copy._replace(target=place[path]) for path, copy in sources.items() if path in place]
        self._computed = {path[0]: i for path, i in place.items()}
        self._next_mask = self._computed.get("next_mask", -1)
        self.discount = discount_leaf(schema, view.discount)
        self._summands = self.weights if place.keys() & {(name,) for name in SCALARS} else []
        self._requested = Requested(schema, place, self.weights, view.gamma, self.discount).if_any()
        self.plan()

    def plan(self, more: Sequence[Copy] = ()) -> None:
        """Make the gather plan that `fill` uses; the plan also has the copies in `more`.

        In the `Block` that `fill` gets, the arrays for the copies in `more` come after the arrays for `leaves`.
        """
        view, copies = self.view, [*self.copies, *more]
        stack = max((1 - copy.offset for copy in copies), default=1)
        n = TO_THE_END if view.most_steps is None else view.most_steps
        self._bounds = Bounds(n, stack, bool(view.next_fields))
        make = partial(RandomSteps, view.n_step[0]) if isinstance(view.n_step, tuple) else GatherPlan
        self._plan = make(copies, view, self._bounds, self._summands, view.gamma, self.discount, self._computed)

    def for_device(self) -> Reader:
        stacks = _shared(self)
        return DeviceFrameStack(self, stacks) if stacks else self

    @property
    def windows(self) -> Windows:
        return self._plan.windows

    def seed(self, entropy: int | None) -> None:
        if isinstance(self._plan, RandomSteps):
            self._plan.seed(entropy)

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        self._plan.gather(snapshot, ids, block, self.threads)
        if self._next_mask >= 0:
            block.arrays[self._next_mask][:] = self.windows.step_stop > 0
        if self._requested is not None:
            self._requested.fill(snapshot, ids, block)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        return self._plan.pages(snapshot, ids)

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        windows = windows_of(snapshot, ids, self._bounds, self.view)
        refuse_evicted(snapshot, ids)
        missing = (windows.step_stop == 0) & (windows.ends & TERMINATED == 0)
        if self.view.drops and missing.any():
            raise InvalidIndex(
                f"id {ids[missing.argmax()]} cannot be sampled as {self.view}: its window ends with its episode, "
                "without next fields"
            )


def _steps_argument(name: str, value: Any) -> int | tuple[int, int] | None:
    if not isinstance(value, tuple | list):
        return int_or_none(name, value, none="the return to the end, or (least, most)")
    if len(value) != 2:
        raise ValueError(f"{name} as a pair must be (least, most), not {value!r}")
    least = int_argument(f"{name}[0]", value[0])
    most = int_argument(f"{name}[1]", value[1], least=least)
    return most if least == most else (least, most)


def _plan(view: Transitions, schema: Schema) -> tuple[dict[Path, Copy], list[Leaf]]:
    """Return {path: `Copy`} for the leaves that are read from the store, and all leaves of a batch in their order."""
    fields = step_fields(schema, view.frame_stack)
    unknown = [name for name in view.next_fields if name not in fields]
    if unknown:
        known = ", ".join(name for name in fields if name != "obs")
        raise ValueError(f"next_fields names {unknown[0]!r}; the step fields of this store are {known}")
    copies = {TIME.path: Copy(TIME_SOURCE, cols.ROW, cols.AFTER, 0, 1, -1)}
    leaves: list[Leaf] = []

    def add(name: str, following: bool) -> None:
        begin, stop = cols.ROW, cols.AFTER
        if following:
            begin, stop = cols.AFTER, cols.OBS_STOP if name == "obs" else cols.STEP_STOP
        for field in fields[name]:
            path = (f"next_{name}", *field.path[1:]) if following else field.path
            copies[path] = field.copy(-1)._replace(begin=begin, stop=stop)
            leaves.append(replace(field.leaf, path=path))

    add("obs", False)
    add("action", False)
    leaves.append(Leaf(("reward",), FLOAT32))
    add("obs", True)
    leaves += [Leaf((name,), SCALARS[name]) for name in ("terminated", "truncated", "discount")]
    leaves += [Leaf(("n_steps",), INT64), Leaf(("index",), INT64), Leaf(("weight",), FLOAT32)]
    for extra in fields:
        if extra not in ("obs", "action", "reward"):
            add(extra, False)
    for following in view.next_fields:
        add(following, True)
    if view.next_fields:
        leaves.append(Leaf(("next_mask",), BOOL))
    return copies, leaves


class _Stacks(NamedTuple):
    source: str
    obs: Path
    next_obs: Path
    depth: int


class DeviceFrameStack(Reader):
    """Gathers the batches of `reader` with single frames; the device makes stacks from the frames.

    Only `pages` is thread-safe.

    The stacks of `obs` and `next_obs` are n steps apart. If n is less than the depth of the stacks, the two stacks of
    an item share frames. Together, they show n + depth different frames. Only the different frames are gathered and
    copied to the device. The device makes both stacks from these frames.
    """

    shows_leaves = False

    def __init__(self, reader: TransitionsReader, stacks: list[_Stacks]) -> None:
        view, self._reader, self._stacks = reader.view, reader, stacks
        assert view.most_steps is not None  # with Monte-Carlo returns, stacks share no frames
        self._steps = view.most_steps
        self.paths = reader.paths
        later = {path for s in stacks for path in (s.obs, s.next_obs)}
        others = ["/".join(path) for path in self.paths if path not in later]
        self._rest = TransitionsReader(view, reader.schema, others)
        shown = {leaf.path: leaf for leaf in reader.leaves}
        self.leaves: Sequence[Leaf] = (
            *self._rest.leaves,
            Leaf(("is final",), BOOL),
            *(Leaf(("first of next", s.source), INT64, (s.depth,)) for s in stacks),
            *(replace(shown[s.obs], path=("frames", s.source), shape=self._run(shown[s.obs])) for s in stacks),
        )
        self._at = len(self._rest.leaves)
        targets = enumerate(stacks, self._at + 1 + len(stacks))
        runs = [(s.source, cols.ROW, cols.FRAMES_STOP, 1 - s.depth, self._steps + s.depth, at) for at, s in targets]
        self._rest.plan([Copy(*run) for run in runs])

    def _run(self, stack: Leaf) -> tuple[int, ...]:
        """Return the shape of the different frames of an item; their number is the depth of a stack plus n."""
        return stack.shape[0] + self._steps, *stack.shape[1:]

    def seed(self, entropy: int | None) -> None:
        self._rest.seed(entropy)

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        self._rest.threads = self.threads
        self._rest.fill(snapshot, ids, block)
        windows = self._rest.windows
        block.arrays[self._at][:] = windows.obs_stop > 0
        for number, stacks in enumerate(self._stacks, self._at + 1):
            first = np.arange(len(ids)) * (self._steps + stacks.depth) + windows.k
            block.arrays[number][:] = first[:, None] + np.arange(stacks.depth)

    def present(self, tensors: Sequence[Any]) -> list[Any]:
        at, count = self._at, len(self._stacks)
        shown = dict(zip((leaf.path for leaf in self._rest.leaves), tensors, strict=False))
        known = tensors[at]
        for number, stacks in enumerate(self._stacks, at + 1):
            places, frames = tensors[number], tensors[number + count]
            shown[stacks.obs] = frames[:, : stacks.depth].contiguous()
            picked = frames.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)
            # If a window ends with an episode that has no final observation, the next observation is zeros.
            each = known.view(-1, *[1] * (picked.dim() - 1))
            shown[stacks.next_obs] = picked.where(each, picked.new_zeros(()))
        return [shown[path] for path in self.paths]

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        return self._reader.pages(snapshot, ids)

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        self._reader.check(snapshot, ids)


def _shared(reader: TransitionsReader) -> list[_Stacks]:
    """Return the observation leaves whose stacks in `obs` and `next_obs` share frames."""
    n = reader.view.most_steps
    if n is None:
        return []
    deep = [copy for copy in reader.copies if copy.leaf.split("/")[0] == "obs" and copy.length > n]
    following = {copy.leaf: copy for copy in deep if copy.begin == cols.AFTER}
    paths = reader.paths
    return [
        _Stacks(copy.leaf, paths[copy.target], paths[following[copy.leaf].target], copy.length)
        for copy in deep
        if copy.begin == cols.ROW and copy.leaf in following
    ]


class _Values(NamedTuple):
    obs: Any
    action: Any
    ret: float
    done: bool
    steps: int


class NStepExperience(_Values):
    """An n-step experience: a tuple (obs, action, ret, done, steps), with the additional attribute `next_obs`.

    Attributes
    ----------
    obs, action
        Observation and action of the first step, as they were given.
    ret : float
        The discounted sum of the rewards of `steps` steps.
    done : bool
        Whether the last step ended its episode.
    steps : int
        Number of steps: n_step, or fewer at the end of an episode.
    next_obs
        The observation after the last step; None if it is not known.
    """

    next_obs: Any


class _Step(NamedTuple):
    obs: Any
    action: Any
    reward: float
    done: bool
    next_obs: Any


def nstep_experiences(episode_or_iterable: Any, n_step: int, gamma: float) -> Iterator[NStepExperience]:
    """Return an iterator over the n-step experiences of a stream of steps, in order, one for each step.

    ``ret = r_t + gamma r_{t+1} + ... + gamma^(k-1) r_{t+k-1}``, where k is n_step, or less if the episode ends first
    (Sutton & Barto, Reinforcement Learning, 2nd ed., 7.1). The last steps of an episode give shorter and shorter
    windows. If the stream stops without `done`, or the episode is open, steps with an incomplete window are left out.
    Sums are in float64; `Transitions` rounds the same sums to float32.

    Parameters
    ----------
    episode_or_iterable : Episode or iterable
        An episode of a store, or steps (obs, action, reward, done) or (obs, action, reward, done, next_obs) of any
        number of episodes. An iterable is consumed step by step. If the steps have no `next_obs`, an experience waits
        for the step after its window, and takes the obs of that step as its `next_obs`.
    n_step : int
        Number of steps in the return.
    gamma : float
        Discount per step, 0 to 1.

    Returns
    -------
    iterator of NStepExperience

    Raises
    ------
    ValueError
        `n_step` or `gamma` is out of range, a step does not have four or five values, or `done` is not a truth value.

    Examples
    --------
    >>> steps = [("s0", 0, 1.0, False), ("s1", 1, 1.0, False), ("s2", 0, 1.0, True)]
    >>> [(each.obs, each.ret, each.steps, each.done) for each in dr.nstep_experiences(steps, n_step=2, gamma=0.5)]
    [('s0', 1.5, 2, False), ('s1', 1.5, 2, True), ('s2', 1.0, 1, True)]
    """
    n_step, gamma = int_argument("n_step", n_step), fraction("gamma", gamma)
    steps = _of_episode(episode_or_iterable) if isinstance(episode_or_iterable, Episode) else episode_or_iterable
    return _windows(_checked(steps), n_step, gamma)


def _windows(steps: Iterator[_Step], n: int, gamma: float) -> Iterator[NStepExperience]:
    window: deque[_Step] = deque()
    for step in steps:
        if len(window) == n:  # a full window waited for this step's obs
            yield _experience(window, gamma, step.obs)
            window.popleft()
        window.append(step)
        if step.done:
            while window:
                yield _experience(window, gamma, step.next_obs)
                window.popleft()
        elif len(window) == n and step.next_obs is not None:
            yield _experience(window, gamma, step.next_obs)
            window.popleft()
    if len(window) == n:
        yield _experience(window, gamma, None)


def _experience(window: deque[_Step], gamma: float, next_obs: Any) -> NStepExperience:
    total, scale = 0.0, 1.0
    for step in window:
        total += scale * step.reward
        scale *= gamma
    first, last = window[0], window[-1]
    made = NStepExperience(first.obs, first.action, total, last.done, len(window))
    made.next_obs = next_obs
    return made


def _checked(steps: Iterable[Any]) -> Iterator[_Step]:
    for step in steps:
        values = tuple(step)
        if len(values) not in (4, 5):
            raise ValueError(
                f"a step is (obs, action, reward, done) or has next_obs, too; this one has {len(values)} values"
            )
        obs, action, reward, done = values[:4]
        ends = as_flag(done, "done", reward, floats=True)
        yield _Step(obs, action, float(reward), ends, values[4] if len(values) == 5 else None)


def _of_episode(episode: Episode) -> Iterator[tuple[Any, ...]]:
    """Yield the steps of an episode; of an open episode, only the steps with a next observation."""
    obs, action, reward = episode.obs, episode.action, episode.reward
    steps, is_open = len(episode), episode.ended == "open"
    frames = _rows(obs)
    for t in range(steps):
        following = _at(obs, t + 1) if t + 1 < frames else None
        if is_open and following is None:
            return
        yield _at(obs, t), _at(action, t), reward[t], t == steps - 1 and not is_open, following


def _rows(tree: Any) -> int:
    while isinstance(tree, (dict, TupleRecord)):
        tree = next(iter(tree.values()))
    return len(tree)


def _at(tree: Any, t: int) -> Any:
    if isinstance(tree, dict):
        return {name: _at(below, t) for name, below in tree.items()}
    if isinstance(tree, TupleRecord):
        return TupleRecord(_at(below, t) for below in tree)
    return tree[t]
