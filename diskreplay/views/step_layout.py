"""What a batch of windows of steps consists of: leaves that are gathered, and fields that are views of them.

The observations of a window lie in one leaf, (stack - 1 + length + 1, *shape) an item: frames before the window for
its first stacks, the frame of each step, and the one behind the last step. `obs` and `next_obs` are views of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diskreplay.format.schema import Schema
from diskreplay.kernels import gathering as rows
from diskreplay.views.arguments import frame_stack_depths
from diskreplay.views.base import Leaf, Path, select, step_parts
from diskreplay.views.windows import TIME, TIME_SOURCE, Copy

BOOL = np.dtype("bool")
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
    """A leaf: its name, a value's dtype and shape, and whether it has one for each step."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    each_step: bool
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
        parts = step_parts(schema)
        _check_start_only(start_only, parts)
        depths = frame_stack_depths(frame_stack, parts["obs"])
        self._sources: dict[int, str] = {}  # by the leaves that are copied from them
        self._kinds: list[_Kind] = []
        every = [Leaf(path, BOOL) for path in _paths(parts)]
        wanted = {leaf.path for leaf in select(every, fields, on_request=[TIME])}

        def add(kind: _Kind, source: str | None = None) -> int:
            if source is not None:
                self._sources[len(self._kinds)] = source
            self._kinds.append(kind)
            return len(self._kinds) - 1

        shown = {}
        for path, source in parts["obs"].items():
            following = ("next_obs", *path[1:])
            if {path, following} & wanted:
                field, stack = schema.leaves[source], depths.get(path, 1)
                number = add(_Kind(path, field.dtype, tuple(field.shape), True, stack), source)
                shown[path] = _Shown(path, number, stack)
                shown[following] = _Shown(following, number, stack, 1)
        for name, below in parts.items():
            for path, source in below.items() if name != "obs" else ():
                if path in wanted:
                    field = schema.leaves[source]
                    kind = _Kind(path, field.dtype, tuple(field.shape), name not in start_only)
                    shown[path] = _Shown(path, add(kind, source))
        for name in FLAGS:
            if (name,) in wanted:
                shown[name,] = _Shown((name,), add(_Kind((name,), BOOL, (), True)))
        if TIME.path in wanted:
            kind = _Kind(TIME.path, TIME.dtype, (), True)
            shown[TIME.path] = _Shown(TIME.path, add(kind, TIME_SOURCE))
        for name, dtype in (("index", "int64"), ("weight", "float32")):
            shown[name,] = _Shown((name,), add(_Kind((name,), np.dtype(dtype), (), False)))
        self._shown = [shown[path] for path in (*_paths(parts), TIME.path) if path in wanted]
        self.place = {kind.path: number for number, kind in enumerate(self._kinds)}
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
        for target, source in self._sources.items():
            kind = self._kinds[target]
            if kind.stack:
                stop, offset, count = rows.FRAMES_STOP, 1 - kind.stack, length + kind.stack
            else:
                stop, offset, count = rows.AFTER, 0, length if kind.each_step else 1
            found.append(Copy(source, rows.ROW, stop, offset, count, target))
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
    return Leaf(kind.path, kind.dtype, (length + kind.stack, *kind.shape) if kind.each_step else kind.shape)


def _show(tensor: Any, shown: _Shown) -> Any:
    if shown.stack == 0:
        return tensor
    length = tensor.shape[1] - shown.stack
    frames = tensor[:, shown.offset : shown.offset + length + shown.stack - 1]
    if shown.stack == 1:
        return frames
    return frames.unfold(1, shown.stack, 1).movedim(-1, 2)


def _paths(parts: Mapping[str, Mapping[Path, str]]) -> list[Path]:
    """Return all fields of a batch in their order."""
    following = [("next_obs", *path[1:]) for path in parts["obs"]]
    own = [(name,) for name in (*FLAGS, "index", "weight")]
    extra = [path for name in parts if name not in ("obs", "action", "reward") for path in parts[name]]
    return [*parts["obs"], *following, *parts["action"], *parts["reward"], *own, *extra]


def _check_start_only(names: Sequence[str], parts: Mapping[str, Any]) -> None:
    extra = [name for name in parts if name not in ("obs", "action", "reward")]
    for name in names:
        if name not in extra:
            known = f"are {', '.join(extra)}" if extra else "are none"
            raise ValueError(f"start_only names {name!r}, which is no extra field; those of this store {known}")
