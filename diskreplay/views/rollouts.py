"""Rollouts: the view, its reader, and advantages of columns of steps.

A batch is a grid of ids, (num_steps, columns), flattened row by row. The reader copies the leaves, and finds each step
whose successor is not the next step of its column. The reader bootstraps at these steps, and sums rewards backwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.number_arguments import fraction, int_argument
from diskreplay.distributions.snapshot import EpisodeFilter
from diskreplay.errors import InvalidIndex, ReplayError
from diskreplay.ids import FIRST, NO_STEP, TERMINATED, TRUNCATED, Floats, Ints
from diskreplay.kernels.copying import COUNT, ITEM, LANE, NEWEST_ROWS, ROW, RUN_COLUMNS, SLOT
from diskreplay.kernels.gathering import kind_and_factor
from diskreplay.kernels.returns import ADDRESS, FACTOR, FIELD_COLUMNS, KIND, SCRATCH_ROWS, WIDTH
from diskreplay.kernels.runs import ALL_STEPS, Starts
from diskreplay.kernels.table import get_kernel
from diskreplay.reading import chunk_budget
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema
from diskreplay.views.arguments import (
    check_fields,
    described,
    discount_leaf,
    name_or_none,
    reward_leaves,
    scalar_leaf,
    stack_depths,
    weights_or_none,
)
from diskreplay.views.base import (
    BOOL,
    FLOAT32,
    INT64,
    Block,
    CopyThreads,
    Leaf,
    Pages,
    Reader,
    View,
    copying,
    nested,
    select,
    tuple_fields,
)
from diskreplay.views.gather_plan import GatherPlan, row_plan
from diskreplay.views.requested import Requested, each_item, each_step, write_fields
from diskreplay.views.rollout_cursor import Bootstrap, RolloutCursor
from diskreplay.views.successors import NONE, Bools, Following, Successors, place
from diskreplay.views.windows import (
    ATTEMPTS,
    TIME,
    TIME_SOURCE,
    StepField,
    Windows,
    missing_chunk,
    refuse,
    refuse_evicted,
    step_fields,
    wide_pages,
)

ESTIMATES = ("advantage", "ret")


@dataclass(frozen=True, repr=False)
class Rollouts(View):
    """The oldest unseen `num_steps` steps of every lane, (num_steps, num_envs, ...), with advantages and returns.

    Advantages are generalized advantage estimates (Schulman et al. 2016, equation 16) of the stored values; `ret` is
    advantage + value. Sums are in float64 and rounded once. Columns are in the order of (writer, lane). A lane
    continues across its writer's segments. A batch needs `num_steps` new steps of every lane of an open writer. A lane
    without a step is included as soon as its writer has a step in another lane, unless each episode has its own
    segment. The bootstrap value of a step, V(next), is

    - 0 if the step terminated, even if it was also truncated;
    - else, for the last step of an episode or of a column, `value_fn` of the next observation, if `value_fn` is given;
    - else the step's value of the field that `next_value` names, if any;
    - else the stored value of the lane's next step, in the same episode or in its continuation after a length cut.

    If the last step of a truncated or cut episode has none of these values, ReplayError is raised. `value_fn` needs the
    next observation of a step. If the store lacks this observation, the step's value of the field `next_value` is used,
    if there is such a field. If a lane ends in a cut without a bootstrap value, for example because its writer closed,
    the lane's last step is left out.

    An advantage sums over steps up to the end of the episode, and beyond this end if the episode was cut for its
    length. `truncated` is true at the last step of an episode that was truncated, or was cut and is not continued. It
    is also true at any other step that did not terminate, if the column's next step does not continue the episode.

    The view is immutable: any thread may use it, and several samplers may share it. The position in each lane is part
    of a sampler's state.

    Parameters
    ----------
    num_steps : int
        Number of steps of each lane in a batch.
    gamma, gae_lambda : float
        Discount per step, and lambda of the advantage estimate; both are 0 to 1.
    value : str
        The scalar extra field with the value V of each step's observation, computed by the collector.
    value_fn : callable or None
        A function that returns the values V of n observations, (n,) or (n, 1). Its argument is a tensor (n, ...), or
        tensors nested like the observation space. It is called once per batch, without gradients, and only if a step
        needs it.
    next_value : str or None
        A scalar extra field with V of each step's next observation.
    frame_stack : int or dict
        Number of frames in each observation; see `Transitions`.
    reward : dict or None
        Weights of the fields whose sum is the reward, by name: "reward" and scalar extra fields. None: {"reward": 1.0}.
    discount : str or None
        A scalar extra field with the environment's discount of each step. This discount multiplies `gamma` at each
        step.

    Raises
    ------
    ValueError
        An argument is invalid.

    Examples
    --------
    >>> schema = dr.Schema(dr.Field((3,), "float32"), dr.Field((), "int64"), extra={"value": dr.Field((), "float32")})
    >>> with dr.create("rollouts.replay", schema) as store, store.writer(num_envs=2) as writer:
    ...     obs, no = np.zeros((2, 3)), np.zeros(2, bool)
    ...     for _ in range(5):
    ...         writer.append(obs, np.zeros(2, int), np.ones(2), no, no, next_obs=obs, value=np.zeros(2))
    ...     rollout = dr.Sampler(store, dr.Rollouts(num_steps=4)).sample()
    >>> rollout.advantage.shape, [len(part.ret) for part in rollout.minibatches(4, epochs=1, seed=0)]
    (torch.Size([4, 2]), [4, 4])
    """

    num_steps: int
    gamma: float = 0.99
    gae_lambda: float = 0.95
    value: str = "value"
    value_fn: Callable[[Any], Any] | None = None
    next_value: str | None = None
    frame_stack: int | Mapping[str, int] = 1
    reward: Mapping[str, float] | None = None
    discount: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, num_steps=int_argument, gamma=fraction, gae_lambda=fraction)
        check_fields(self, frame_stack=stack_depths, reward=weights_or_none, next_value=name_or_none)
        check_fields(self, discount=name_or_none)
        if not isinstance(self.value, str):
            raise ValueError(f"value must be the name of an extra field, not {self.value!r}")
        if self.value_fn is not None and not callable(self.value_fn):
            raise ValueError(f"value_fn must be None or a function of observations, not {self.value_fn!r}")

    def __repr__(self) -> str:
        return described(self, ("num_steps",))

    @property
    def kind(self) -> tuple[str]:
        """The kind of the view's ids, which have no priorities."""
        return ("rollouts",)

    @property
    def item_steps(self) -> int:
        """The number of environment steps in an item: 1."""
        return 1

    @property
    def starts(self) -> Starts:
        """The rule that selects every step."""
        return Starts(last=ALL_STEPS, open_rows=1, observed=False)

    @property
    def prefetchable(self) -> bool:
        """False: batches are not made ahead, because bootstrap values must come from the current policy."""
        return False

    def own_distribution(self, episode_filter: EpisodeFilter) -> RolloutCursor:
        """Return a `RolloutCursor`, which draws each lane's steps once, in order."""
        bootstrap = Bootstrap(self.value, self.next_value, self.value_fn is not None)
        return RolloutCursor(self.num_steps, bootstrap, episode_filter)

    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Return a reader for a schema; `fields` names the fields of a batch, None: the default fields."""
        return RolloutsReader(self, schema, fields)


class StepRuns:
    """A grid of ids, (n, columns), divided into runs. A run is successive rows of one lane, for one column.

    `last`, (n, columns) bool, is True for the last step of each run. Raises the error that `refuse` returns for an id
    that is not the id of a visible row.
    """

    def __init__(self, snapshot: Snapshot, grid: Ints, refuse: Callable[[int], InvalidIndex]) -> None:
        self._snapshot, self._columns = snapshot, grid.shape[1]
        runs = np.empty((grid.size, RUN_COLUMNS), np.int64)
        count = get_kernel("find_runs")(grid, snapshot.record, runs, np.empty((NEWEST_ROWS, self._columns), np.int64))
        if count < 0:
            raise refuse(int(grid.flat[-1 - count]))
        self._runs = runs[:count]
        self.last = np.zeros(grid.shape, np.bool_)
        self.last.ravel()[self._runs[:, ITEM] + (self._runs[:, COUNT] - 1) * self._columns] = True

    def copy(self, copies: Sequence[tuple[str, NDArray[Any]]], threads: CopyThreads | None) -> None:
        """Copy the values of leaves for all steps to arrays (n * columns, *shape) of their dtypes.

        `copies` has pairs of a leaf and its array; a leaf may occur several times.

        Raises SegmentGone if a segment was evicted, and FormatError if a chunk is missing.
        """
        snapshot, kernel, size = self._snapshot, get_kernel("copy_runs"), sum(array.nbytes for _, array in copies)
        slot, lane, first, count = (self._runs[:, column] for column in (SLOT, LANE, ROW, COUNT))
        leaves, arrays = [leaf for leaf, _ in copies], [array for _, array in copies]
        addresses = np.array([array.ctypes.data for array in arrays])
        bad = -1
        for _ in range(ATTEMPTS):
            with snapshot.tables.lock:  # other threads cannot unmap chunks to make room while the lock is held
                since = chunk_budget.now()
                for leaf in leaves:
                    snapshot.leaf(leaf).ensure(slot, lane, first, first + count - 1, since)
                guard, tables = snapshot.tables.lines(leaves)
            lines = np.stack([line for line, _ in tables])
            numbers = snapshot.record, lines, addresses, self._runs, self._columns
            work = copying((guard, tables, snapshot, *arrays), kernel, *numbers)
            if threads is None or size < threads.least:
                bad = work(0, len(self._runs))
            else:
                bad = threads.copy(threads.parts(size), len(self._runs), work)
            if bad < 0:
                return
        number, run = divmod(bad, len(self._runs))
        raise missing_chunk(snapshot, leaves[number], slot[run], lane[run], first[run])


class RolloutsReader(Reader):
    """Gathers batches of the view `Rollouts`. Not thread-safe: it keeps a map of the store's lanes.

    `leaves` describe the values of one step. Rollouts have no field `weight`.
    """

    shows_leaves = False

    def __init__(self, view: Rollouts, schema: Schema, fields: Sequence[str] | None) -> None:
        self._view, self._tuples = view, tuple_fields(["obs"], schema)
        self._rewards = reward_leaves(schema, view.reward)
        value = scalar_leaf(schema, "value", view.value)
        self._next_value = None if view.next_value is None else scalar_leaf(schema, "next_value", view.next_value)
        discount = discount_leaf(schema, view.discount)
        # The leaves that the kernel `gae` reads, each with its line in the table `fields` of the kernel.
        weights = [(value, 1.0), (self._next_value, 1.0), (discount and discount[0], 1.0)]
        weights += [(leaf, weight) for leaf, _, weight in self._rewards]
        self._numbers = [(line, leaf) for line, (leaf, _) in enumerate(weights) if leaf is not None]
        self._fields = np.zeros((len(weights), FIELD_COLUMNS), np.int64)
        for line, leaf in self._numbers:
            dtype = schema.leaves[leaf].dtype
            self._fields[line, [KIND, FACTOR]] = kind_and_factor(dtype, weights[line][1])
            self._fields[line, WIDTH] = dtype.itemsize
        self._values = row_plan([value])
        steps = step_fields(schema, view.frame_stack)
        del steps["reward"]  # `fill` computes the reward as a weighted sum
        steps["value"] = [StepField(("value",), value, schema.leaves[value].dtype, (), 1)]
        self._obs = steps["obs"]
        requested = [*each_step(schema), *each_item(schema, drawn=False)]
        self.leaves: Sequence[Leaf] = select(_leaves(steps), fields, always=("index",), on_request=requested)
        self.paths = [leaf.path for leaf in self.leaves]
        self._place = {path: number for number, path in enumerate(self.paths)}
        self._sums = [self._place.get((name,), -1) for name in ("reward", "advantage", "ret")]
        every = [field for below in steps.values() for field in below]
        every.append(StepField(TIME.path, TIME_SOURCE, TIME.dtype, (), 1))
        self._copies = [field.copy(self._place[field.path]) for field in every if field.path in self._place]
        self._requested = Requested(schema, self._place, self._rewards, view.gamma, discount).if_any()
        # `StepRuns` copies leaves with one row for each step. A gather plan copies stacks, because they need earlier
        # rows, and times, because they are converted.
        is_single = [copy.length == 1 and copy.leaf != TIME_SOURCE for copy in self._copies]
        self._rows = [copy for copy, single in zip(self._copies, is_single, strict=True) if single]
        others = [copy for copy, single in zip(self._copies, is_single, strict=True) if not single]
        self._others = GatherPlan(others) if others else None
        self._obs_plan = GatherPlan([field.copy(target) for target, field in enumerate(self._obs)])
        self._successors = Successors(max(field.stack for field in self._obs))
        self.evaluate = view.value_fn

    def present(self, tensors: Sequence[Any]) -> list[Any]:
        steps = self._view.num_steps
        return [tensor.reshape(steps, len(tensor) // steps, *tensor.shape[1:]) for tensor in tensors]

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the steps of a grid of ids, (num_steps * columns,), into the block.

        Raises InvalidIndex if an id is not the id of a step, or the ids do not form a grid. Raises ReplayError if a
        truncated step, or the last step of a column, has no bootstrap value.
        """
        grid = self._grid(ids)
        runs = StepRuns(snapshot, grid, partial(refuse, snapshot, view=self._view))
        arrays = self._copied(snapshot, runs, block)
        flags = arrays["done"]
        no_step = np.flatnonzero(flags & NO_STEP)
        if len(no_step):
            raise refuse(snapshot, int(ids[no_step[0]]), self._view)
        # In a run, the successor of a step is the next step, unless the step ends an episode, or the next step begins
        # an episode.
        by_step, breaks = flags.reshape(grid.shape), runs.last
        breaks[:-1] |= (by_step[:-1] & (TERMINATED | TRUNCATED) | by_step[1:] & FIRST) != 0
        chained, terminated, truncated = ~breaks, flags & TERMINATED != 0, flags & TRUNCATED != 0
        places = np.flatnonzero(breaks.ravel() & ~terminated)  # a terminated step needs no successor
        following = self._successors.follow(snapshot, ids[places], self._find(snapshot, ids[places]))
        inside = places < len(ids) - grid.shape[1]
        chained.ravel()[places[inside]] = following.successor[inside] == ids[places[inside] + grid.shape[1]]
        truncated[places] |= following.truncated
        truncated.reshape(grid.shape)[:-1] |= ~(chained | terminated.reshape(grid.shape))[:-1]
        bootstraps = np.empty(grid.shape)
        if any((name,) in self._place for name in ESTIMATES):
            next_values = arrays[self._next_value][places] if self._next_value is not None else None
            at_end = following, ~chained.ravel()[places], next_values
            bootstraps.ravel()[places] = self._next_values(snapshot, ids[places], *at_end)
        ends = by_step & TERMINATED | ~chained * np.uint8(TRUNCATED)
        fields = self._fields.copy()
        for line, leaf in self._numbers:
            fields[line, ADDRESS] = arrays[leaf].ctypes.data
        scratch, out = np.empty((SCRATCH_ROWS, grid.shape[1])), block.addresses[self._sums]
        get_kernel("gae")(fields, ends, bootstraps, self._view.gamma, self._view.gae_lambda, scratch, out)
        write_fields(block, self._place, {"terminated": terminated, "truncated": truncated, "index": ids})
        if self._others is not None:
            self._others.copy(snapshot, self._find(snapshot, ids), block, self.threads)
        if self._requested is not None:
            self._requested.fill(snapshot, ids, block)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        self._grid(ids)
        return wide_pages(snapshot, self._find(snapshot, ids), self._copies)

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        self._grid(ids)
        self._find(snapshot, ids)
        refuse_evicted(snapshot, ids)

    def _grid(self, ids: Ints) -> Ints:
        steps = self._view.num_steps
        if not len(ids) or len(ids) % steps:
            raise InvalidIndex(
                f"{len(ids)} ids do not form a grid of {steps} steps a column, one row of steps after the other"
            )
        return np.ascontiguousarray(ids.reshape(steps, -1))

    def _find(self, snapshot: Snapshot, ids: Ints) -> Windows:
        return self._successors.find(snapshot, ids, lambda step_id: refuse(snapshot, step_id, self._view))

    def _copied(self, snapshot: Snapshot, runs: StepRuns, block: Block) -> dict[str, NDArray[Any]]:
        """Copy the leaves of `_rows` to the block; return {leaf: values} for them, for `_numbers` and for the flags."""
        copies = [(copy.leaf, block.arrays[copy.target]) for copy in self._rows]
        found = dict(copies)
        for leaf in dict.fromkeys(["done", *(leaf for _, leaf in self._numbers)]):
            if leaf not in found:
                found[leaf] = np.empty(block.size, snapshot.leaf(leaf).dtype)
                copies.append((leaf, found[leaf]))
        runs.copy(copies, self.threads)
        return found

    def _next_values(
        self, snapshot: Snapshot, ids: Ints, following: Following, is_end: Bools, next_values: NDArray[Any] | None
    ) -> Floats:
        """Return V of the next observation of each step in `ids`; the result is arbitrary where `is_end` is False.

        `following` has the successors of the steps. `is_end` is True for a step if its successor is not the next step
        in the column. `next_values` has each step's value of the field `next_value`; None: the view names no such
        field.
        """
        found = np.full(len(ids), np.nan) if next_values is None else next_values.astype(np.float64)
        left = np.flatnonzero(is_end)
        if self.evaluate is not None and len(left):
            seen = left[following.has_obs[left]]
            if len(seen):
                found[seen] = self._evaluated(snapshot, following.observations(snapshot, seen))
            left = left[~following.has_obs[left]]
        if next_values is None and len(left):
            unknown = left[following.successor[left] == NONE]
            if len(unknown):
                raise self._nothing_behind(int(ids[unknown[0]]), bool(following.truncated[unknown[0]]))
            behind = place(snapshot, following.successor[left])
            found[left] = self._values.rows(snapshot, behind)[0][:, 0]
        return found

    def _evaluated(self, snapshot: Snapshot, steps: Windows) -> Floats:
        leaves = [field.leaf for field in self._obs]
        # The memory is new, because the user's function may keep the arrays.
        block = Block(leaves, steps.size)
        self._obs_plan.copy(snapshot, steps, block)
        assert self.evaluate is not None
        observations = nested([leaf.path for leaf in leaves], block.arrays, self._tuples)["obs"]
        return evaluated(self.evaluate, observations, steps.size)

    def _nothing_behind(self, step_id: int, truncated: bool) -> ReplayError:
        what = "was truncated" if truncated else "is the last of its column"
        if self.evaluate is not None:
            return ReplayError(
                f"step {step_id} {what}, and value_fn cannot compute the value of its next observation, which is not "
                "in the store: name a field that holds this value in next_value"
            )
        return ReplayError(
            f"step {step_id} {what}, and the value of its next observation is not known: give Rollouts value_fn, which "
            "computes it, or next_value, the name of a field that holds it"
        )


def _leaves(steps: Mapping[str, Sequence[StepField]]) -> list[Leaf]:
    """Return all leaves of a batch in their order; `steps` has the leaves of each copied field, by name."""
    by_name = {name: [field.leaf for field in below] for name, below in steps.items()}
    made = {"reward": FLOAT32, "terminated": BOOL, "truncated": BOOL, "advantage": FLOAT32, "ret": FLOAT32}
    by_name |= {name: [Leaf((name,), dtype)] for name, dtype in {**made, "index": INT64}.items()}
    order = ["obs", "action", "reward", "terminated", "truncated", "value", "advantage", "ret", "index"]
    order += [name for name in by_name if name not in order]
    return [leaf for name in order for leaf in by_name[name]]


def evaluated(evaluate: Callable[[Any], Any], observations: Any, size: int) -> Floats:
    values = np.asarray(evaluate(observations))
    if values.shape not in ((size,), (size, 1)):
        raise ValueError(
            f"value_fn gave shape {values.shape} for {size} observations; it must be ({size},) or ({size}, 1)"
        )
    return values.reshape(size).astype(np.float64)
