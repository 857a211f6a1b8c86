"""The leaves that windows of steps are gathered into, and the fields of a batch that are views of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from diskreplay.schema.schema import Schema
from diskreplay.views.base import BOOL, FLOAT32, INT64, Leaf, Path, select
from diskreplay.views.requested import each_item, each_step
from diskreplay.views.windows import TIME, TIME_SOURCE, StepField, step_fields

FLAGS = ("terminated", "truncated", "is_first", "mask", "loss_mask")


class ShownField(NamedTuple):
    """A field of a batch: a leaf as it is (`stack` 0), or the steps of an observation leaf from `offset` on."""

    path: Path
    leaf: int
    stack: int = 0
    offset: int = 0

    def of(self, tensor: Any) -> Any:
        """Return the field as a view of the leaf's tensor."""
        if self.stack == 0:
            return tensor
        length = tensor.shape[1] - self.stack
        frames = tensor[:, self.offset : self.offset + length + self.stack - 1]
        if self.stack == 1:
            return frames
        return frames.unfold(1, self.stack, 1).movedim(-1, 2)


class WindowLeaf(NamedTuple):
    """A leaf: a value of it, what it is copied from, whether it has one for each step, and the depth of its stacks.

    `source` is None where nothing is copied, `stack` 0 where stacks do not share frames. A value is made of `frames`.
    """

    value: Leaf
    source: str | None = None
    each_step: bool = True
    stack: int = 0
    frames: int = 1

    def leaf(self, length: int) -> Leaf:
        """Return the leaf of windows of this length."""
        value = self.value
        return replace(value, shape=(length + self.stack, *value.shape)) if self.each_step else value


def window_layout(
    schema: Schema,
    fields: Sequence[str] | None,
    frame_stack: int | Mapping[str, int],
    start_only: Sequence[str],
    shares_frames: bool = True,
) -> tuple[list[WindowLeaf], list[ShownField]]:
    """Return the leaves of a batch of windows, and its fields in order.

    With `shares_frames` all observations of a window are one leaf. Without, each step has its own, and `next_obs` is
    there on request. Raises ValueError where an argument names something that the schema has not.
    """
    steps = step_fields(schema, frame_stack)
    _check_start_only(start_only, steps)
    every = [Leaf(path, BOOL) for path in _paths(steps)]
    of_steps, of_items = each_step(schema), each_item(schema)
    asked = [] if shares_frames else [leaf for leaf in every if leaf.path[0] == "next_obs"]
    given = [leaf for leaf in every if leaf not in asked]
    wanted = {leaf.path for leaf in select(given, fields, on_request=[*asked, *of_steps, *of_items])}
    kinds: list[WindowLeaf] = []
    shown: dict[Path, ShownField] = {}

    def add(kind: WindowLeaf) -> None:
        shown[kind.value.path] = ShownField(kind.value.path, len(kinds), kind.stack)
        kinds.append(kind)

    for field in steps["obs"]:
        following = ("next_obs", *field.path[1:])
        if not shares_frames:
            for path in (field.path, following):
                if path in wanted:
                    add(WindowLeaf(replace(field.leaf, path=path), field.source, frames=field.stack))
        elif {field.path, following} & wanted:
            add(WindowLeaf(field._replace(stack=1).leaf, field.source, stack=field.stack))
            shown[following] = shown[field.path]._replace(path=following, offset=1)
    for name in steps:
        for field in steps[name] if name != "obs" else ():
            if field.path in wanted:
                add(WindowLeaf(field.leaf, field.source, name not in start_only))
    for name in FLAGS:
        if (name,) in wanted:
            add(WindowLeaf(Leaf((name,), BOOL)))
    for leaf in of_steps:
        if leaf.path in wanted:
            add(WindowLeaf(leaf, TIME_SOURCE if leaf is TIME else None))
    for leaf in of_items:
        if leaf.path in wanted:
            add(WindowLeaf(leaf, each_step=False))
    for name, dtype in (("index", INT64), ("weight", FLOAT32)):
        add(WindowLeaf(Leaf((name,), dtype), each_step=False))
    order = [*_paths(steps), *(leaf.path for leaf in (*of_steps, *of_items))]
    return kinds, [shown[path] for path in order if path in wanted]


def _paths(steps: Mapping[str, Sequence[StepField]]) -> list[Path]:
    """Return all fields of a batch in their order."""
    paths = {name: [field.path for field in below] for name, below in steps.items()}
    obs, action, reward = (paths.pop(name) for name in ("obs", "action", "reward"))
    following = [("next_obs", *path[1:]) for path in obs]
    own = [(name,) for name in (*FLAGS, "index", "weight")]
    return [*obs, *following, *action, *reward, *own, *(path for below in paths.values() for path in below)]


def _check_start_only(names: Sequence[str], steps: Mapping[str, Any]) -> None:
    extra = [name for name in steps if name not in ("obs", "action", "reward")]
    for name in names:
        if name not in extra:
            known = f"are {', '.join(extra)}" if extra else "are none"
            raise ValueError(f"start_only names {name!r}, which is no extra field; those of this store {known}")
