"""Functions that check the values given to buffers, and rename the fields of batches."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.errors import SchemaError
from diskreplay.sampling.batch import Batch, map_tree
from diskreplay.schema.schema import Schema
from diskreplay.schema.spaces import Field
from diskreplay.writing.casting import as_flag, as_flags

Tree = Any  # values in dicts and tuples, nested like a schema's fields


def plain(value: Any) -> NDArray[Any]:
    """Return a number, array or tensor as an array. A tensor is detached and copied to the CPU."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        # numpy has no bfloat16; float32 has all values of bfloat16.
        array: NDArray[Any] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        return array
    try:
        return np.asarray(value)
    except ValueError as error:
        raise SchemaError(f"{value!r:.80} is not an array ({error}); pass nested values as dicts and tuples") from None


def items_of(value: Any) -> Mapping[str, Any] | None:
    """Return a dict as it is, and a tuple as a dict with the keys "0", "1", ...; return None for other values.

    A list counts as an array.
    """
    if isinstance(value, Mapping):
        return value
    return {str(i): item for i, item in enumerate(value)} if isinstance(value, tuple) else None


def fitted(tree: Tree, value: Any, leading: tuple[int, ...] = ()) -> Any:
    """Return `value` with each array reshaped to the shape of its field, if the shapes differ only in axes of length 1.

    Other arrays are returned unchanged. `tree` is a field, or a dict or tuple of trees, and `value` is nested like the
    tree. The axes in `leading` precede the shape of each field.
    """
    if not isinstance(tree, Field):
        below, values = items_of(tree), items_of(tuple(value) if isinstance(value, list) else value)
        if below is None or values is None:
            return value
        return {key: fitted(below[key], item, leading) if key in below else item for key, item in values.items()}
    array, shape = plain(value), leading + tree.shape
    return array.reshape(shape) if differ_by_ones(array.shape, shape) else array


def differ_by_ones(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two shapes are different, and differ only in axes of length 1."""
    return shape != other and [n for n in shape if n != 1] == [n for n in other if n != 1]


def shapes_of(value: Any) -> list[tuple[int, ...]]:
    items = items_of(value)
    if items is not None:
        return [shape for item in items.values() for shape in shapes_of(item)]
    return [tuple(value.shape) if isinstance(value, torch.Tensor) else plain(value).shape]


def renamed(batch: Batch, names: Mapping[str, str], hidden: Collection[str]) -> dict[str, Any]:
    """Return the fields of a batch, renamed by `names` (old name to new name), without the fields in `hidden`.

    Scalars get a trailing axis of length 1, for broadcasting with each other and with the results of a network.
    `terminated` becomes float32.
    """
    axes = batch["index"].ndim

    def column(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(-1) if tensor.ndim == axes else tensor

    shown = {}
    for name in batch:
        if name not in hidden:
            field = batch[name].float() if name == "terminated" else batch[name]
            shown[names.get(name, name)] = field if name == "index" else map_tree(column, field)
    return shown


def flags_of(
    value: Any, name: str, num_envs: int, chosen: NDArray[np.int64] | None = None, reward: Any = None
) -> NDArray[np.bool_]:
    """Return the flags of all environments, (num_envs,) bool.

    0.0 and 1.0 are accepted, because other libraries store flags as floats. Only the values of the environments in
    ``chosen`` are checked; None: all values are checked.
    """
    if type(value) is bool and num_envs == 1:
        return np.array([value])
    array = plain(value)
    if num_envs == 1:
        if array.size > 1:
            raise SchemaError(
                f"{name} has {array.size} values, and this buffer is for one environment: for a vector, make it with "
                f"num_envs={array.size}"
            )
        return np.array([as_flag(value, name, reward, floats=True)])
    return as_flags(array.reshape(-1), name, num_envs, chosen, reward, floats=True)


def rows_of(schema: Schema, obs: NDArray[np.object_], lanes: NDArray[np.bool_]) -> Any:
    """Return observations as arrays, (num_envs, ...), with zeros for environments that have False in `lanes`.

    `obs`, (num_envs,), has an observation or None for each environment, like gymnasium's `info["final_obs"]`.
    """
    if obs.shape != lanes.shape:
        raise SchemaError(f"final_observations: got {len(obs)} observations, needs one for each of {len(lanes)} lanes")
    rows: dict[str, NDArray[Any]] = {}
    for lane in np.flatnonzero(lanes):
        for leaf, row in schema.cast("obs", fitted(schema.obs, obs[lane])).items():
            rows.setdefault(leaf, np.zeros((len(lanes), *row.shape), row.dtype))[lane] = row
    return schema.unflatten("obs", rows)


def checked(schema: Schema, part: str, value: Any, leading: tuple[int, ...] = ()) -> Any:
    """Return the values of a part of a step, such as "obs", with the shapes and dtypes of the schema.

    The arrays in `value` may have additional axes of length 1, or lack axes of length 1.
    """
    value = fitted(getattr(schema, part), value, leading)
    return schema.unflatten(part, schema.cast(part, value, leading))


@dataclass(frozen=True)
class Given:
    """The shapes and dtypes that a user gave for observations and actions; None: as in the first step."""

    obs_shape: Any = None
    action_shape: Any = None
    obs_dtype: Any = None
    action_dtype: Any = None

    def __post_init__(self) -> None:
        for part in ("obs", "action"):
            shape, dtype = self.of(part)
            field = Field(() if shape is None else shape, "float32" if dtype is None else dtype)
            if shape is not None:
                object.__setattr__(self, f"{part}_shape", field.shape)
            if dtype is not None:
                object.__setattr__(self, f"{part}_dtype", field.dtype)

    def of(self, part: str) -> tuple[Any, Any]:
        return getattr(self, f"{part}_shape"), getattr(self, f"{part}_dtype")

    def field(self, part: str, value: Any, lanes: int | None) -> Tree:
        """Return the `Field` of a first value. `part` is "obs" or "action".

        If `value` is a dict or tuple, the result is a tree of fields. `lanes` is the length of the value's leading axis
        of environments; None: the value has no axis of environments.
        """
        shape, dtype = self.of(part)
        if isinstance(value, Mapping):
            if shape is not None:
                raise SchemaError(f"{part}_shape is {shape}, and {part} is a dict of {', '.join(map(str, value))}")
            return {key: self.field(part, below, lanes) for key, below in value.items()}
        if isinstance(value, tuple) and shape is None:
            return tuple(self.field(part, below, lanes) for below in value)
        array = plain(value)
        if shape is None:
            shape = array.shape
            if lanes is not None:
                if shape[:1] != (lanes,):
                    raise SchemaError(f"{part}: got {array.dtype} of shape {shape}, needs a leading axis of {lanes}")
                shape = shape[1:]
        return Field(shape, dtype if dtype is not None else stored_dtype(value, array))

    def check(self, schema: Schema) -> None:
        for part in ("obs", "action"):
            shape, dtype = self.of(part)
            tree = getattr(schema, part)
            if shape is None and dtype is None:
                continue
            if not isinstance(tree, Field) or shape not in (None, tree.shape) or dtype not in (None, tree.dtype):
                raise SchemaError(f"the existing store has {part} {tree}, not {shape or ''} {dtype or ''}".rstrip())


def stored_dtype(value: Any, array: NDArray[Any]) -> np.dtype[Any]:
    """Return the stored dtype of a first value: float32 for float64, int64 for Python's bool, else the value's dtype.

    float64 is seldom chosen on purpose: it is the default of Python and numpy. Networks compute in float32.
    """
    if type(value) is bool:
        return np.dtype("int64")
    return np.dtype("float32") if array.dtype.kind == "f" and array.dtype.itemsize > 4 else array.dtype


def has_one_environments_axis(obs: Any, shape: tuple[int, ...] | None, batched: bool = False) -> bool:
    """Return whether a first observation has a leading axis of one environment.

    `shape` is the shape of an observation without this axis; None: unknown. With a known shape, the observation must be
    (1, *shape). With an unknown shape, the first axis of every leaf must have length 1. In addition, at least one leaf
    must have a second axis, or `batched` must be True. `batched` says that other values of the step have the axis.
    """
    if shape is not None and not isinstance(obs, Mapping):
        return plain(obs).shape == (1, *shape)
    shapes = shapes_of(obs)
    ones = all(each[:1] == (1,) for each in shapes)
    return ones and (batched or any(len(each) >= 2 for each in shapes))
