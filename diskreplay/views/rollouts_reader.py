"""How rollouts are gathered: copy the leaves, follow each column's chain, bootstrap where it stops, sum backwards.

A batch is a grid of ids, (num_steps, columns), one row after the other; all else is derived from the rows they name.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import InvalidIndex, ReplayError
from diskreplay.format.schema import Schema
from diskreplay.ids import TERMINATED, TRUNCATED
from diskreplay.kernels import gathering as rows
from diskreplay.store.reading.snapshot import Snapshot
from diskreplay.views.arguments import frame_stack_depths, reward_leaves
from diskreplay.views.base import Block, Ints, Leaf, Path, Reader, nested, select, step_parts
from diskreplay.views.estimates import estimates
from diskreplay.views.gather_plan import GatherPlan
from diskreplay.views.page_ranges import Pages, wide_pages
from diskreplay.views.successors import NONE, Bools, Following, Successors, place
from diskreplay.views.windows import TIME, TIME_SOURCE, Copy, Windows, refuse, refuse_evicted, to_seconds

if TYPE_CHECKING:
    from diskreplay.views.rollouts import Rollouts

Floats = NDArray[np.float64]

FLOAT32, INT64, BOOL = np.dtype("float32"), np.dtype("int64"), np.dtype("bool")
ESTIMATES = ("advantage", "ret")


class _Source(NamedTuple):
    """A leaf of the store that fills a leaf of the batch, (*shape) a step, or (stack, *shape) where stack > 1."""

    path: Path
    source: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stack: int = 1

    @property
    def leaf(self) -> Leaf:
        """The leaf of the batch."""
        return Leaf(self.path, self.dtype, (self.stack, *self.shape) if self.stack > 1 else self.shape)

    def copy(self, target: int) -> Copy:
        """Return what is copied of windows of one step."""
        return Copy(self.source, rows.ROW, rows.AFTER, 1 - self.stack, self.stack, target)


class RolloutsReader(Reader):
    """Gathers `Rollouts`. Not thread-safe: it keeps what it has learnt of the store's lanes.

    `leaves` are those of one step, without weights.
    """

    shows_leaves = False

    def __init__(self, view: "Rollouts", schema: Schema, fields: Sequence[str] | None) -> None:
        self._view = view
        self._rewards = reward_leaves(schema, view.reward)
        self._value = _scalar_field(schema, "value", view.value)
        self._next_value = None if view.next_value is None else _scalar_field(schema, "next_value", view.next_value)
        sources = _sources(view, schema)
        self._obs = [source for source in sources if source.path[0] == "obs"]
        shown = select(_leaves(sources), fields, always=("index",), on_request=[TIME])
        sources.append(_Source(TIME.path, TIME_SOURCE, TIME.dtype, ()))
        self.paths = [leaf.path for leaf in shown]
        self.leaves: Sequence[Leaf] = tuple(shown)
        self._place = {leaf.path: number for number, leaf in enumerate(self.leaves)}
        self._copies = [source.copy(self._place[source.path]) for source in sources if source.path in self._place]
        self._plan = GatherPlan(self._copies)
        self._obs_plan = GatherPlan([source.copy(target) for target, source in enumerate(self._obs)])
        numbers = [
            *(leaf for leaf, *_ in self._rewards),
            self._value,
            *([self._next_value] if self._next_value else []),
        ]
        self._numbers, self._values = _scalars(numbers), _scalars([self._value])
        self._successors = Successors(max(source.stack for source in sources))
        self.evaluate = view.value_fn

    def present(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the fields of a batch, in the order of `paths`: (num_steps, columns, ...) of (items, ...)."""
        steps = self._view.num_steps
        shown = tensors[: len(self.paths)]
        return [tensor.reshape(steps, len(tensor) // steps, *tensor.shape[1:]) for tensor in shown]

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the steps of a grid of ids, (num_steps * columns,), into the block.

        Raises InvalidIndex where an id is no step's, or they are no grid; ReplayError where a step that was truncated,
        or the last of a column, has nothing to bootstrap from.
        """
        steps = self._find(snapshot, ids)
        following = self._successors.follow(snapshot, ids, steps)
        grid = ids.reshape(self._view.num_steps, -1)
        chained = np.zeros(grid.shape, np.bool_)
        chained[:-1] = following.successor.reshape(grid.shape)[:-1] == grid[1:]
        inside = np.ones(grid.shape, np.bool_)
        inside[-1] = False
        broken = (inside & ~chained).ravel() & ~following.terminated
        made: dict[str, Any] = {
            "terminated": following.terminated,
            "truncated": following.truncated | broken,
            "index": ids,
        }
        numbers = self._numbers.rows(snapshot, steps)
        made["reward"] = rewards = self._weighed(numbers)
        if any((name,) in self._place for name in ESTIMATES):
            ends = np.where(following.terminated, TERMINATED, 0) | np.where(chained.ravel(), 0, TRUNCATED)
            known = [array[:, 0].astype(np.float64) for array in numbers[len(self._rewards) :]]
            values = known[0]
            bootstraps = self._next_values(snapshot, ids, following, chained.ravel(), *known)
            inputs: Any = (array.reshape(grid.shape) for array in (rewards, values, bootstraps, ends.astype(np.uint8)))
            found = estimates(self._view.gamma, self._view.gae_lambda, *inputs)
            made |= dict(zip(ESTIMATES, found, strict=True))
        self._plan.copy(snapshot, steps, block, self.helper)
        if TIME.path in self._place:
            to_seconds(snapshot, ids, block.arrays[self._place[TIME.path]])
        with np.errstate(over="ignore"):
            for name, array in made.items():
                if (name,) in self._place:
                    block.arrays[self._place[name,]][:] = array.ravel()

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return where the wide rows of a grid of ids lie; what is not mapped yet is mapped."""
        return wide_pages(snapshot, self._find(snapshot, ids), self._copies)

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        """Raise InvalidIndex, naming the id and the reason, where an id is no step's, or they are no grid."""
        self._find(snapshot, ids)
        refuse_evicted(snapshot, ids)

    def _find(self, snapshot: Snapshot, ids: Ints) -> Windows:
        steps = self._view.num_steps
        if not len(ids) or len(ids) % steps:
            raise InvalidIndex(
                f"{len(ids)} ids are no grid of {steps} steps a column, one row of steps after the other"
            )
        return self._successors.find(snapshot, ids, lambda step_id: refuse(snapshot, step_id, self._view))

    def _weighed(self, numbers: Sequence[NDArray[Any]]) -> Floats:
        total: Floats = np.zeros(len(numbers[0]))
        for (_, _, weight), array in zip(self._rewards, numbers, strict=False):
            total += array[:, 0].astype(np.float64) * weight
        return total

    def _next_values(
        self,
        snapshot: Snapshot,
        ids: Ints,
        following: Following,
        chained: Bools,
        values: Floats,
        next_values: Floats | None = None,
    ) -> Floats:
        """Return V of what each step led to; anything where it terminated."""
        columns = len(ids) // self._view.num_steps
        found = np.append(values[columns:], np.full(columns, np.nan)) if next_values is None else next_values
        left = np.flatnonzero(~following.terminated & ~chained)
        if self.evaluate is not None and len(left):
            seen = left[following.has_obs[left]]
            if len(seen):
                found[seen] = self._evaluated(snapshot, following.obs.select(seen))
            left = left[~following.has_obs[left]]
        if next_values is None and len(left):
            unknown = left[following.successor[left] == NONE]
            if len(unknown):
                raise self._nothing_behind(int(ids[unknown[0]]), bool(following.truncated[unknown[0]]))
            found[left] = self._values.rows(snapshot, place(snapshot, following.successor[left]))[0][:, 0]
        return found

    def _evaluated(self, snapshot: Snapshot, steps: Windows) -> Floats:
        """Return what `evaluate` says of the observations of these steps."""
        size, found = steps.size, self._obs_plan.rows(snapshot, steps)
        # Copies: a function of the user's may keep them.
        arrays = [
            array.reshape(size, *source.leaf.shape).copy() for source, array in zip(self._obs, found, strict=True)
        ]
        assert self.evaluate is not None
        values = np.asarray(self.evaluate(nested([source.path for source in self._obs], arrays)["obs"]))
        if values.shape not in ((size,), (size, 1)):
            raise ValueError(
                f"value_fn gave shape {values.shape} for {size} observations; it must be ({size},) or ({size}, 1)"
            )
        return values.reshape(size).astype(np.float64)

    def _nothing_behind(self, step_id: int, truncated: bool) -> ReplayError:
        what = "was truncated" if truncated else "is the last of its column"
        if self.evaluate is not None:
            return ReplayError(
                f"step {step_id} {what}, and the observation behind it, which value_fn would be given, is not in the "
                "store: name a field that holds its value in next_value"
            )
        return ReplayError(
            f"step {step_id} {what}, and nothing says the value of what it led to: give Rollouts value_fn, which "
            "computes it from the observation, or next_value, the name of a field that holds it"
        )


def _scalars(leaves: Sequence[str]) -> GatherPlan:
    return GatherPlan([Copy(leaf, rows.ROW, rows.AFTER, 0, 1, target) for target, leaf in enumerate(leaves)])


def _scalar_field(schema: Schema, argument: str, name: str) -> str:
    field = schema.leaves.get(f"extra/{name}")
    if field is None or field.shape != ():
        scalars = [leaf for leaf, f in schema.leaves.items() if leaf.startswith("extra/") and f.shape == ()]
        known = ", ".join(leaf.removeprefix("extra/") for leaf in scalars) or "none"
        what = "is not scalar" if field is not None else "is no extra field"
        raise ValueError(f"{argument} names {name!r}, which {what}; the scalar extra fields of this store are {known}")
    return f"extra/{name}"


def _sources(view: "Rollouts", schema: Schema) -> list[_Source]:
    """Return the leaves that are copied, in the order of the schema; that of the values is named "value"."""
    parts = step_parts(schema) | {"value": {("value",): f"extra/{view.value}"}}
    del parts["reward"]  # which is summed
    depths = frame_stack_depths(view.frame_stack, parts["obs"])
    fields = schema.leaves
    return [
        _Source(path, source, fields[source].dtype, fields[source].shape, depths.get(path, 1))
        for below in parts.values()
        for path, source in below.items()
    ]


def _leaves(sources: Sequence[_Source]) -> list[Leaf]:
    """Return all leaves of a batch in order."""
    by_name: dict[str, list[Leaf]] = {}
    for source in sources:
        by_name.setdefault(source.path[0], []).append(source.leaf)
    made = {"reward": FLOAT32, "terminated": BOOL, "truncated": BOOL, "advantage": FLOAT32, "ret": FLOAT32}
    by_name |= {name: [Leaf((name,), dtype)] for name, dtype in {**made, "index": INT64}.items()}
    order = ["obs", "action", "reward", "terminated", "truncated", "value", "advantage", "ret", "index"]
    order += [name for name in by_name if name not in order]
    return [leaf for name in order for leaf in by_name[name]]
