"""The schema of a store: trees of fields, their flat leaves, and their JSON form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay import markup
from diskreplay.errors import FormatError, SchemaError
from diskreplay.schema.spaces import (
    DTYPE_NAMES,
    Field,
    TupleRecord,
    dtype_map_argument,
    tree_from_example,
    tree_from_space,
)

__all__ = ["Field", "Schema", "TupleRecord"]

Tree = Any  # Field | dict[str, Tree] | tuple[Tree, ...]
_Plan = Any  # a leaf's path, or a dict of key -> _Plan

MAX_DEPTH = 16
MAX_LEAVES = 10_000
MAX_KEY_BYTES = 200
LEAVES_SHOWN = 50  # the maximum number of rows of the table that a notebook shows

# These names are already arguments of append, attributes of an episode or fields of a batch. "self" is the first
# argument of append.
_TAKEN = frozenset(
    [
        *("obs", "action", "reward", "terminated", "truncated", "next_obs", "mask", "episode", "priority"),
        *("done", "time", "lane"),
        *("final_obs", "index", "weight", "discount", "n_steps", "is_first", "loss_mask", "advantage", "ret", "self"),
    ]
)
_TAKEN_BY_EPISODES = frozenset(["obs", "action", "reward", "terminated", "truncated", "done", "time", "priority"])


@dataclass(frozen=True, init=False)
class Schema:
    """The fields of each step and each episode of a store.

    Immutable; may be shared between threads.

    Parameters
    ----------
    obs, action : Field, or dict or tuple of these, nested
        One step's observation and action.
    reward : Field
        The field of the reward, a numeric scalar. None: float32.
    extra : dict, optional
        Fields of further values of each step, by name, such as ``log_prob``.
    episode : dict, optional
        Fields of values that each episode has once, by name, such as ``seed``.

    Attributes
    ----------
    leaves : dict of str to Field
        Every leaf by its path: ``"obs"`` or ``"obs/image"``, ``"action"``, ``"reward"``, ``"extra/log_prob"``,
        ``"episode/seed"``, in this order. A tuple's items have the keys ``"0"``, ``"1"``, ...
    step_leaves : dict of str to Field
        ``leaves`` without the leaves of ``episode``.

    Raises
    ------
    SchemaError
        If a key or name cannot be stored, or is already taken.

    Examples
    --------
    >>> schema = dr.Schema(
    ...     obs={"image": dr.Field((64, 64, 3), "uint8"), "state": dr.Field((7,), "float32")},
    ...     action=dr.Field((6,), "float32"),
    ...     extra={"log_prob": dr.Field((), "float32")},
    ...     episode={"seed": dr.Field((), "int64")},
    ... )
    >>> sorted(schema.leaves)
    ['action', 'episode/seed', 'extra/log_prob', 'obs/image', 'obs/state', 'reward']
    """

    obs: Tree
    action: Tree
    reward: Field
    extra: dict[str, Tree]
    episode: dict[str, Tree]
    leaves: dict[str, Field] = field(repr=False, compare=False)
    step_leaves: dict[str, Field] = field(repr=False, compare=False)
    _plans: dict[str, _Plan] = field(repr=False, compare=False)

    def __init__(
        self,
        obs: Tree,
        action: Tree,
        reward: Field | None = None,
        extra: Mapping[str, Tree] | None = None,
        episode: Mapping[str, Tree] | None = None,
    ) -> None:
        reward = Field((), "float32") if reward is None else reward
        if not isinstance(reward, Field) or reward.shape or reward.dtype.kind == "b":
            raise SchemaError(f"reward: needs a numeric Field of shape (), not {reward!r:.80}")
        names = _checked_names(extra, "extra", _TAKEN), _checked_names(episode, "episode", _TAKEN_BY_EPISODES)
        if both := sorted(set(names[0]) & set(names[1])):
            raise SchemaError(f"{both[0]!r} is a name of both extra and episode; use two names")
        leaves: dict[str, Field] = {}
        plans: dict[str, _Plan] = {}
        trees = {"obs": obs, "action": action, "reward": reward, "extra": names[0], "episode": names[1]}
        for part, tree in trees.items():
            tree, plans[part] = ({}, {}) if part in ("extra", "episode") and not tree else _walk(tree, part, leaves)
            object.__setattr__(self, part, tree)
        object.__setattr__(self, "leaves", leaves)
        steps = {path: leaf for path, leaf in leaves.items() if not path.startswith("episode/")}
        object.__setattr__(self, "step_leaves", steps)
        object.__setattr__(self, "_plans", plans)

    @classmethod
    def from_example(
        cls,
        obs: Any,
        action: Any,
        extra: Mapping[str, Any] | None = None,
        episode: Mapping[str, Any] | None = None,
    ) -> "Schema":
        """Describe steps whose values have the shapes and dtypes of one example.

        Parameters
        ----------
        obs, action
            One step's values: arrays, tensors or numbers, or dicts and tuples of these, nested. Arrays, tensors and
            numpy's scalars keep their dtype. Python's numbers, and lists of them, become float32, int64 or bool.
        extra, episode : dict, optional
            Example values of a step, and of an episode, by name.

        Raises
        ------
        SchemaError
            If a value cannot be stored; the message names it.
        """
        named = [tree_from_example(values or {}, part) for part, values in (("extra", extra), ("episode", episode))]
        return cls(tree_from_example(obs, "obs"), tree_from_example(action, "action"), None, *named)

    @classmethod
    def from_spaces(
        cls,
        observation_space: Any,
        action_space: Any,
        extra: Mapping[str, Tree] | None = None,
        episode: Mapping[str, Tree] | None = None,
        dtype_map: Mapping[str, str] | None = None,
    ) -> "Schema":
        """Describe the steps of an environment with these gymnasium spaces; for ``dtype_map`` see `from_env`.

        Raises
        ------
        SchemaError
            If a space, or a space inside it, cannot be stored, or ``dtype_map`` is invalid; the message says which.
        """
        dtypes = dtype_map_argument(dtype_map)
        obs = tree_from_space(observation_space, "obs", dtypes)
        return cls(obs, tree_from_space(action_space, "action", dtypes), extra=extra, episode=episode)

    @classmethod
    def from_env(
        cls,
        env: Any,
        extra: Mapping[str, Tree] | None = None,
        episode: Mapping[str, Tree] | None = None,
        dtype_map: Mapping[str, str] | None = None,
    ) -> "Schema":
        """Describe the steps of a gymnasium environment, or of one environment in a vector environment.

        Parameters
        ----------
        env
            The environment whose spaces define the stored fields.
        extra, episode : dict, optional
            See `Schema`.
        dtype_map : dict, optional
            Maps dtypes of the environment to stored dtypes. With ``{"float64": "float32"}``, the observations and
            actions of an environment that computes in float64 are stored and sampled as float32, which networks take.
            Writers and `RecordEpisodes` cast the values.

        Raises
        ------
        SchemaError
            If a space, or a space inside it, cannot be stored, or ``dtype_map`` is invalid; the message says which.
            ``dtype_map`` must map dtypes to dtypes, and must not map floats to integers.
        """
        prefix = "single_" if hasattr(env, "single_observation_space") else ""
        try:
            spaces = getattr(env, f"{prefix}observation_space"), getattr(env, f"{prefix}action_space")
        except AttributeError as error:
            raise SchemaError(
                f"{type(env).__name__} is not an environment: {error}; `Schema.from_example` takes one step's values "
                "instead"
            ) from None
        return cls.from_spaces(*spaces, extra=extra, episode=episode, dtype_map=dtype_map)

    def cast(self, part: str, value: Any, leading: tuple[int, ...] = ()) -> dict[str, NDArray[Any]]:
        """Return the leaves of a value by path, each cast to its field: arrays of shape ``(*leading, *shape)``.

        Parameters
        ----------
        part, value
            See `flatten`.
        leading : tuple of int
            Axes before each field's shape, such as the number of environments.

        Raises
        ------
        SchemaError
            If a key or a value does not fit the schema; the message names it.
        """
        leaves, plan = self.leaves, self._plans[part]
        if type(plan) is str:  # usually, the part is a single field
            return {plan: leaves[plan].cast(value, plan, leading)}
        return {path: leaves[path].cast(raw, path, leading) for path, raw in self.flatten(part, value)}

    def flatten(self, part: str, value: Any) -> list[tuple[str, Any]]:
        """Return (path, value) of each leaf of a nested value; values are not cast.

        Parameters
        ----------
        part : str
            ``"obs"``, ``"action"``, ``"extra"`` or ``"episode"``.
        value
            Nested like the schema. In place of a tuple, a list or a dict with the keys ``"0"``, ``"1"``, ... is
            accepted. For the part ``"episode"``, names may be missing.

        Raises
        ------
        SchemaError
            If a key is missing or unknown; the message names it.
        """
        plan = self._plans[part]
        if type(plan) is str:
            return [(plan, value)]
        if not plan and not value:
            return []
        flat: list[tuple[str, Any]] = []
        if part == "episode" and isinstance(value, Mapping) and value.keys() < plan.keys():
            plan = {name: inner for name, inner in plan.items() if name in value}
        _flatten(plan, value, part, flat)
        return flat

    def unflatten(self, part: str, values: Mapping[str, Any]) -> Any:
        """Return the nested value that has these leaves; the inverse of `flatten`. Absent leaves are left out.

        A tuple with all its items becomes a `TupleRecord`. A tuple that lacks items becomes a dict of the items that
        are present.

        Raises
        ------
        KeyError
            If the part is a single field and its value is absent.
        """
        plan = self._plans[part]
        return values[plan] if type(plan) is str else with_tuples(getattr(self, part), _unflatten(plan, values))

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain JSON values."""
        parts: dict[str, Any] = {part: _node(getattr(self, part)) for part in ("obs", "action", "reward")}
        for part in ("extra", "episode"):
            parts[part] = {name: _node(tree) for name, tree in getattr(self, part).items()}
        return parts

    def _repr_html_(self) -> str:
        rows = [
            [*map(markup.text, (path, leaf.shape, leaf.dtype, f"{leaf.row_bytes:,}"))]
            for path, leaf in [*self.leaves.items()][:LEAVES_SHOWN]
        ]
        headers = ["field", "shape", "dtype", ">bytes a step"]
        title = markup.element("strong", markup.text("Schema"))
        return markup.element("div", title, markup.table(headers, rows, len(self.leaves)))

    @classmethod
    def from_json(cls, data: Any) -> "Schema":
        """Return the schema that ``to_json`` converted to ``data``.

        Raises
        ------
        FormatError
            If the data is invalid in any way.
        """
        parts = ("obs", "action", "reward", "extra", "episode")
        if not isinstance(data, dict) or not data.keys() >= {*parts}:
            raise FormatError(f"schema: needs an object with the keys {', '.join(parts)}")
        for part in ("extra", "episode"):
            if not isinstance(data[part], dict):
                raise FormatError(f"schema: {part} is not an object")
        trees = [_tree(data[part], part, 0) for part in parts[:3]]
        named = [{name: _tree(node, part, 1) for name, node in data[part].items()} for part in parts[3:]]
        try:
            return cls(*trees, *named)
        except SchemaError as error:
            raise FormatError(f"schema: {error}") from None


def _checked_names(named: Any, part: str, taken: frozenset[str]) -> dict[str, Tree]:
    if named is None:
        return {}
    if not isinstance(named, Mapping):
        raise SchemaError(f"{part}: needs a dict of fields by name, not {type(named).__name__}")
    for name in named:
        if name in taken or (part == "extra" and isinstance(name, str) and name.startswith("next_")):
            raise SchemaError(f"{part}: the name {name!r} is taken; choose another")
    return dict(named)


def _check_key(key: Any, path: str) -> None:
    if not isinstance(key, str):
        raise SchemaError(f"{path}: keys must be strings, not {key!r:.80}")
    # zarr reads a backslash as a slash, and reserves names that start with two underscores.
    bad = key in ("", ".", "..", "zarr.json") or key.startswith("__") or not {"/", "\\", "\0"}.isdisjoint(key)
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        size = MAX_KEY_BYTES + 1
    if bad or size > MAX_KEY_BYTES:
        raise SchemaError(f"{path}: {key[:80]!r} cannot be a key: zarr cannot store an array of this name; rename it")


def _walk(tree: Any, path: str, leaves: dict[str, Field], depth: int = 0) -> tuple[Tree, _Plan]:
    """Return a copy of a tree of fields, and a tree of the fields' paths. Add the fields to ``leaves``."""
    if isinstance(tree, Field):
        if len(leaves) >= MAX_LEAVES:
            raise SchemaError(f"a schema has at most {MAX_LEAVES} fields, and this one has more")
        leaves[path] = tree
        return tree, path
    if not isinstance(tree, (Mapping, tuple)):
        raise SchemaError(f"{path}: needs a Field, or a dict or tuple of these, not {type(tree).__name__}")
    if not tree:
        raise SchemaError(f"{path}: an empty {type(tree).__name__} holds no field")
    if depth >= MAX_DEPTH:
        raise SchemaError(f"{path[:80]}: fields are nested at most {MAX_DEPTH} deep")
    items = tree if isinstance(tree, Mapping) else {str(i): inner for i, inner in enumerate(tree)}
    done = {}
    for key, inner in items.items():
        _check_key(key, path)
        done[key] = _walk(inner, f"{path}/{key}", leaves, depth + 1)
    copies = {key: copy for key, (copy, _) in done.items()}
    plan = {key: inner_plan for key, (_, inner_plan) in done.items()}
    return (copies if isinstance(tree, Mapping) else tuple(copies.values())), plan


def _flatten(plan: dict[str, _Plan], value: Any, path: str, flat: list[tuple[str, Any]]) -> None:
    if isinstance(value, (tuple, list)):
        value = {str(i): inner for i, inner in enumerate(value)}
    elif not isinstance(value, Mapping):
        raise SchemaError(f"{path}: got {type(value).__name__}, needs the keys {_listed(plan)}")
    if value.keys() != plan.keys():
        unknown = [key for key in value if key not in plan]
        missing = [key for key in plan if key not in value]
        problem = f"unknown key {unknown[0]!r}" if unknown else f"{missing[0]!r} is missing"
        known = f"known are {_listed(plan)}" if plan else f"the schema has none: name it in Schema({path}={{...}})"
        raise SchemaError(f"{path}: {problem}; {known}")
    for key, inner in plan.items():
        if type(inner) is str:
            flat.append((inner, value[key]))
        else:
            _flatten(inner, value[key], f"{path}/{key}", flat)


def _listed(plan: dict[str, _Plan]) -> str:
    return ", ".join(repr(key) for key in plan) or "none"


def _unflatten(plan: dict[str, _Plan], values: Mapping[str, Any]) -> dict[str, Any]:
    nested = {}
    for key, inner in plan.items():
        if type(inner) is not str:
            if below := _unflatten(inner, values):
                nested[key] = below
        elif inner in values:
            nested[key] = values[inner]
    return nested


def with_tuples(tree: Tree, values: Any) -> Any:
    """Return ``values`` with `TupleRecord`s for the tuples of ``tree``. A tuple that lacks items stays a dict."""
    if not isinstance(tree, (dict, tuple)) or not isinstance(values, dict):
        return values
    below = tree if isinstance(tree, dict) else {str(i): inner for i, inner in enumerate(tree)}
    shaped = {key: with_tuples(below.get(key), inner) for key, inner in values.items()}
    if isinstance(tree, dict) or shaped.keys() != below.keys():
        return shaped
    return TupleRecord(shaped[key] for key in below)


def _node(tree: Tree) -> dict[str, Any]:
    if isinstance(tree, dict):
        return {"dict": {key: _node(inner) for key, inner in tree.items()}}
    if isinstance(tree, tuple):
        return {"tuple": [_node(inner) for inner in tree]}
    node = {"shape": list(tree.shape), "dtype": tree.dtype.name}
    return node if tree.space is None else {**node, "space": tree.space}


def _tree(node: Any, path: str, depth: int) -> Tree:
    if not isinstance(node, dict) or depth > MAX_DEPTH:
        raise FormatError(f"schema: {path[:80]} is not an object, or is nested more than {MAX_DEPTH} deep")
    if "dict" in node and isinstance(node["dict"], dict):
        return {key: _tree(inner, f"{path}/{key}", depth + 1) for key, inner in node["dict"].items()}
    if "tuple" in node and isinstance(node["tuple"], list):
        return tuple(_tree(inner, f"{path}/{i}", depth + 1) for i, inner in enumerate(node["tuple"]))
    shape, dtype = node.get("shape"), node.get("dtype")
    if not isinstance(shape, list) or not isinstance(dtype, str) or dtype not in DTYPE_NAMES:
        raise FormatError(f"schema: {path[:80]} is not a field: shape {shape!r:.80}, dtype {dtype!r:.80}")
    try:
        return Field(tuple(shape), np.dtype(dtype), node.get("space"))
    except SchemaError as error:
        raise FormatError(f"schema: {path[:80]}: {error}") from None
