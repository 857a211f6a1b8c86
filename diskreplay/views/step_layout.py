"""What a batch of windows of steps consists of: leaves that are gathered, and fields that are views of them.

The observations of a window lie in one leaf, (stack - 1 + length + 1, *shape) an item: frames before the window for
its first stacks, the frame of each step, and the one behind the last step. `obs` and `next_obs` are views of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from diskreplay.format.schema import Schema
from diskreplay.kernels import gathering as rows
from diskreplay.views.base import BOOL, FLOAT32, INT64, Leaf, Path, select
from diskreplay.views.windows import TIME, TIME_SOURCE, Copy, StepField, step_fields

FLAGS = ("terminated", "truncated", "is_first", "mask", "loss_mask")

# Layouts that are kept: batches of whole episodes have as many lengths as episodes have.
KEPT_LAYOUTS = 64


class _Shown(NamedTuple):
    """A field of a batch: a leaf as it is (`stack` 0), or the steps of an observation leaf from `offset` on."""

    path: Path
    leaf: int
    stack: int = 0
    offset: int = 0


class _Kind(NamedTuple):
    """A leaf: a value of it, what it is copied from, whether it has one for each step, and the depth of its stacks.

    `source` is None where nothing is copied, `stack` 0 where it is no observation.
    """

    value: Leaf
    source: str | None = None
    each_step: bool = True
    stack: int = 0


class StepLayout:
    """The leaves and fields of batches of windows of one schema and choice of fields. Not thread-safe: it caches.

    `fields` is what a batch holds; `frame_stack` and `start_only` are those of `Sequences`. Raises ValueError where one
    of them names something that the schema has not.
    """

    def __init__(
        self,
        schema: Schema,
        fields: Sequence[str] | None,
        frame_stack: int | Mapping[str, int] = 1,
        start_only: Sequence[str] = (),
    ) -> None:
        steps = step_fields(schema, frame_stack)
        _check_start_only(start_only, steps)
        every = [Leaf(path, BOOL) for path in _paths(steps)]
        wanted = {leaf.path for leaf in select(every, fields, on_request=[TIME])}
        self._kinds: list[_Kind] = []
        shown: dict[Path, _Shown] = {}

        def add(kind: _Kind) -> None:
            shown[kind.value.path] = _Shown(kind.value.path, len(self._kinds), kind.stack)
            self._kinds.append(kind)

        for field in steps["obs"]:
            following = ("next_obs", *field.path[1:])
            if {field.path, following} & wanted:
                add(_Kind(field._replace(stack=1).leaf, field.source, stack=field.stack))
                shown[following] = shown[field.path]._replace(path=following, offset=1)
        for name in steps:
            for field in steps[name] if name != "obs" else ():
                if field.path in wanted:
                    add(_Kind(field.leaf, field.source, name not in start_only))
        for name in FLAGS:
            if (name,) in wanted:
                add(_Kind(Leaf((name,), BOOL)))
        if TIME.path in wanted:
            add(_Kind(TIME, TIME_SOURCE))
        for name, dtype in (("index", INT64), ("weight", FLOAT32)):
            add(_Kind(Leaf((name,), dtype), each_step=False))
        self._shown = [shown[path] for path in (*_paths(steps), TIME.path) if path in wanted]
        self.place = {kind.value.path: number for number, kind in enumerate(self._kinds)}
        self.stack = max((kind.stack for kind in self._kinds), default=1) or 1
        self._layouts: dict[int, tuple[Leaf, ...]] = {}

    @property
    def paths(self) -> list[Path]:
        """The fields of a batch, in order."""
        return [shown.path for shown in self._shown]

    def leaves(self, length: int) -> tuple[Leaf, ...]:
        """Return what is gathered for windows of this length; the same object each time, so that memory is reused."""
        if length not in self._layouts:
            if len(self._layouts) == KEPT_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[length] = tuple(_leaf(kind, length) for kind in self._kinds)
        return self._layouts[length]

    def copies(self, length: int) -> list[Copy]:
        """Return what is copied of windows of this length."""
        found = []
        for target, kind in enumerate(self._kinds):
            if kind.source is None:
                continue
            if kind.stack:
                stop, offset, count = rows.FRAMES_STOP, 1 - kind.stack, length + kind.stack
            else:
                stop, offset, count = rows.AFTER, 0, length if kind.each_step else 1
            found.append(Copy(kind.source, rows.ROW, stop, offset, count, target))
        return found

    def length(self, leaves: Sequence[Leaf]) -> int:
        """Return the length that leaves were made for; 0 where none of them has a value for each step."""
        for kind, leaf in zip(self._kinds, leaves, strict=True):
            if kind.each_step:
                return leaf.shape[0] - kind.stack
        return 0

    def present(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the fields of a batch, in the order of `paths`, as views of the leaves' tensors (size, *shape)."""
        return [_show(tensors[shown.leaf], shown) for shown in self._shown]


def _leaf(kind: _Kind, length: int) -> Leaf:
    value = kind.value
    return replace(value, shape=(length + kind.stack, *value.shape)) if kind.each_step else value


def _show(tensor: Any, shown: _Shown) -> Any:
    if shown.stack == 0:
        return tensor
    length = tensor.shape[1] - shown.stack
    frames = tensor[:, shown.offset : shown.offset + length + shown.stack - 1]
    if shown.stack == 1:
        return frames
    return frames.unfold(1, shown.stack, 1).movedim(-1, 2)


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
