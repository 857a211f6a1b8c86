"""How n-step transitions are gathered: find the windows, copy the leaves, sum the rewards."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from diskreplay.format.schema import Schema
from diskreplay.kernels import gathering as rows
from diskreplay.store.reading.snapshot import Snapshot
from diskreplay.views.arguments import frame_stack_depths, reward_leaves
from diskreplay.views.base import Block, Ints, Leaf, Path, Reader, select, step_parts
from diskreplay.views.gather_plan import GatherPlan
from diskreplay.views.page_ranges import NO_PAGES, Pages, wide_pages
from diskreplay.views.windows import TIME, TIME_SOURCE, Bounds, Copy, Windows, refuse_evicted, to_seconds, windows_of

if TYPE_CHECKING:
    from diskreplay.views.transitions import Transitions

FLOAT32, INT64, BOOL = np.dtype("float32"), np.dtype("int64"), np.dtype("bool")
SCALARS = {"reward": FLOAT32, "discount": FLOAT32, "terminated": BOOL, "truncated": BOOL}


class TransitionsReader(Reader):
    """Gathers `Transitions`. Not thread-safe: it owns scratch memory.

    `weights` are the fields that are summed: path, dtype and weight of each.
    """

    def __init__(self, view: "Transitions", schema: Schema, fields: Sequence[str] | None) -> None:
        self._view = view
        self.weights = reward_leaves(schema, view.reward)
        sources, leaves = _plan(view, schema)
        self.leaves: Sequence[Leaf] = tuple(select(leaves, fields, on_request=[TIME]))
        self.paths = [leaf.path for leaf in self.leaves]
        place = {path: i for i, path in enumerate(self.paths)}
        self.copies = [copy._replace(target=place[path]) for path, copy in sources.items() if path in place]
        self._time = place.get(TIME.path, -1)
        self._computed = {path[0]: i for path, i in place.items()}
        self._summands = self.weights if place.keys() & {(name,) for name in SCALARS} else []
        self.plan()

    def plan(self, more: Sequence[Copy] = ()) -> None:
        """Plan what `fill` copies, and more than that into arrays of a block behind those of `leaves`."""
        view, copies = self._view, [*self.copies, *more]
        stack = max((1 - copy.offset for copy in copies), default=1)
        self._bounds = Bounds(-1 if view.n_step is None else view.n_step, stack, bool(view.next_fields))
        self._plan = GatherPlan(copies, view, self._bounds, self._summands, view.gamma, self._computed)

    @property
    def windows(self) -> Windows:
        """The windows of the last batch."""
        return self._plan.windows

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        """Gather the transitions of these ids into the block."""
        self._plan.gather(snapshot, ids, block, self.helper)
        if self._time >= 0:
            to_seconds(snapshot, ids, block.arrays[self._time])

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return where the wide rows of these ids lie; what is not mapped yet is mapped. Any thread may ask."""
        windows = Windows(len(ids))
        if windows.find(snapshot, ids, *self._bounds) >= 0:
            return NO_PAGES  # `fill` says what is wrong
        return wide_pages(snapshot, windows, self.copies)

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        """Raise InvalidIndex, naming the id and the reason, where an id is not sampleable."""
        windows_of(snapshot, ids, self._bounds, self._view)
        refuse_evicted(snapshot, ids)


def _plan(view: "Transitions", schema: Schema) -> tuple[dict[Path, Copy], list[Leaf]]:
    """Return what is copied for each leaf, and all leaves of a batch in order."""
    parts = step_parts(schema)
    unknown = [name for name in view.next_fields if name not in parts]
    if unknown:
        known = ", ".join(name for name in parts if name != "obs")
        raise ValueError(f"next_fields names {unknown[0]!r}; the step fields of this store are {known}")
    stacks = frame_stack_depths(view.frame_stack, parts["obs"])
    copies = {TIME.path: Copy(TIME_SOURCE, rows.ROW, rows.AFTER, 0, 1, -1)}
    leaves: list[Leaf] = []

    def add(name: str, following: bool) -> None:
        stop_behind = rows.OBS_STOP if name == "obs" else rows.STEP_STOP
        for path, source in parts[name].items():
            stack = stacks.get(path, 1)
            field = schema.leaves[source]
            shape = (stack, *field.shape) if stack > 1 else field.shape
            target = (f"next_{path[0]}", *path[1:]) if following else path
            begin, stop = (rows.AFTER, stop_behind) if following else (rows.ROW, rows.AFTER)
            copies[target] = Copy(source, begin, stop, 1 - stack, stack, -1)
            leaves.append(Leaf(target, field.dtype, tuple(shape)))

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
