"""What the gymnasium wrappers append beside the environment's own values, and copies that no environment can change."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from diskreplay import ReplayError, SchemaError, Store

Source = tuple[Any, np.ndarray]  # a vector environment's info, and the lanes to read in it


class StepValues:
    """The extra and info fields of the next step, and copies of observations and actions.

    Concurrency: one thread at a time, as the environment itself.

    Parameters
    ----------
    store : Store
        Where they go.
    info_fields : iterable of str
        Names to copy from info: of extra fields at every step, of episode fields at the step that ends an episode.
    leading : tuple of int
        ``(num_envs,)`` for a vector, else empty.

    Raises
    ------
    SchemaError
        If the schema has no extra or episode field of such a name.
    ValueError
        If ``store`` is none, such as a path.
    """

    def __init__(self, store: Store, info_fields: Iterable[str], leading: tuple[int, ...] = ()) -> None:
        if not isinstance(store, Store):
            raise ValueError(f"store must be a Store, from diskreplay.open or diskreplay.create, not {store!r:.80}")
        schema = store.schema
        names = (info_fields,) if isinstance(info_fields, str) else tuple(info_fields)
        for name in names:
            if name not in schema.extra and name not in schema.episode:
                raise SchemaError(f"info_fields: the store's schema has no extra or episode field {name!r}")
        self._schema, self._leading = schema, leading
        self._extra_infos = [name for name in names if name in schema.extra]
        self._episode_infos = [name for name in names if name in schema.episode]
        self._settable = [name for name in schema.extra if name not in self._extra_infos]
        self._given: dict[str, Any] = {}

    def set(self, fields: Mapping[str, Any]) -> None:
        """Keep extra fields for the next step.

        Raises
        ------
        SchemaError
            If a name is unknown, or copied from info; none of the fields is kept.
        """
        for name in fields:
            if name not in self._settable:
                reason = "copied from info" if name in self._extra_infos else "no extra field of the store's schema"
                raise SchemaError(f"set_extra: {name!r} is {reason}; known are {', '.join(self._settable) or 'none'}")
        self._given.update(fields)

    def take(self) -> dict[str, Any]:
        """Hand over the fields that were set, once.

        Raises
        ------
        SchemaError
            If one is missing; those that were set are kept.
        """
        if len(self._given) < len(self._settable):
            missing = next(name for name in self._settable if name not in self._given)
            raise SchemaError(
                f"step: the extra field {missing!r} is missing; call set_extra({missing}=...) before step()"
            )
        given, self._given = self._given, {}
        return given

    def clear(self) -> None:
        """Forget what was set."""
        self._given = {}

    def own(self, part: str, value: Any) -> dict[str, np.ndarray]:
        """Copy an observation or action, as the schema's leaves by path."""
        return {path: leaf.copy() for path, leaf in self._schema.cast(part, value, self._leading).items()}

    def nest(self, part: str, values: Mapping[str, np.ndarray]) -> Any:
        """Undo the flattening of `own`."""
        return self._schema.unflatten(part, values)

    def from_info(self, info: Mapping[str, Any], ended: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Read the extra fields of a step, and the episode fields if it ended one."""
        schema = self._schema
        extra = {name: _value(schema.extra[name], info, name, name) for name in self._extra_infos}
        if not ended:
            return extra, None
        return extra, {name: _value(schema.episode[name], info, name, name) for name in self._episode_infos}

    def from_infos(self, steps: list[Source], ends: list[Source]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Read the extra fields of the lanes that stepped, and the episode fields of those that ended.

        Both are batched over all lanes, with zeros for lanes that were not asked for.
        """
        steps, ends = [[source for source in sources if source[1].size] for sources in (steps, ends)]
        extra = {name: self._lanes(self._schema.extra[name], name, name, steps) for name in self._extra_infos}
        if not ends:
            return extra, None
        return extra, {name: self._lanes(self._schema.episode[name], name, name, ends) for name in self._episode_infos}

    def with_final(
        self, obs: Mapping[str, np.ndarray], info: Mapping[str, Any], ended: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Put the final observations, which same-step autoreset gives in info, in place of the first ones.

        The second value marks the lanes whose final and first observations have equal bytes.
        """
        same = np.zeros(len(ended), bool)
        rows = {path: leaf.copy() for path, leaf in obs.items()}
        final = info.get("final_obs")
        present = _mask(info, "final_obs", len(ended))
        for lane in np.flatnonzero(ended).tolist():
            value = None if final is None or not present[lane] else _lane(final, lane)
            if value is None:
                raise SchemaError(f"lane {lane} ended, but info has no final_obs for it, as SAME_STEP autoreset needs")
            leaves = self._schema.cast("obs", value)
            same[lane] = all(leaf.tobytes() == obs[path][lane].tobytes() for path, leaf in leaves.items())
            for path, leaf in leaves.items():
                rows[path][lane] = leaf
        return rows, same

    def _lanes(self, tree: Any, key: str, path: str, sources: list[Source]) -> Any:
        (num_envs,) = self._leading
        found = []
        for source, lanes in sources:
            value = source.get(key) if isinstance(source, Mapping) else None
            missing = lanes if value is None else lanes[~_mask(source, key, num_envs)[lanes]]
            if missing.size:
                raise SchemaError(f"{path}: info has no value for lane {missing[0]}, whose step is recorded")
            found.append((value, lanes))
        if isinstance(tree, dict):
            return {inner: self._lanes(tree[inner], inner, f"{path}/{inner}", found) for inner in tree}
        columns = [(_column(value, lanes, path), lanes) for value, lanes in found]
        dtype = np.result_type(*(column.dtype for column, _ in columns))
        rows = np.zeros((num_envs, *columns[0][0].shape[1:]), dtype)
        for column, lanes in columns:
            rows[lanes] = column
        return rows


def as_numpy(value: Any) -> np.ndarray:
    """Turn an array or tensor of a vector environment into numpy's."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def as_flags(value: Any, name: str, refused: type[ReplayError] = SchemaError) -> np.ndarray:
    """Return truth values as bools: numbers, of files and of other libraries' buffers, are 0 or 1, floats, too.

    Raises ``refused`` for other values.
    """
    flags = as_numpy(value)
    if flags.dtype.kind != "b":
        if flags.dtype.kind not in "iuf":
            raise refused(f"{name} is one truth value a step, a bool or 0 or 1, not {flags.dtype}")
        if (wrong := flags[(flags != 0) & (flags != 1)]).size:
            raise refused(f"{name} is one truth value a step, a bool or 0 or 1, not {wrong[0]}")
    return flags.astype(bool, copy=False)


def _value(tree: Any, info: Any, key: str, path: str) -> Any:
    if not isinstance(info, Mapping) or key not in info:
        raise SchemaError(f"{path}: the step's info has no such value")
    if isinstance(tree, dict):
        return {inner: _value(tree[inner], info[key], inner, f"{path}/{inner}") for inner in tree}
    return info[key]


def _mask(info: Mapping[str, Any], key: str, num_envs: int) -> np.ndarray:
    """Tell which lanes have the value; environments that batch themselves often give no mask, for all have it."""
    mask = info.get(f"_{key}")
    return np.ones(num_envs, bool) if mask is None else as_numpy(mask).astype(bool)


def _lane(batch: Any, lane: int) -> Any:
    if isinstance(batch, Mapping):
        return {key: _lane(inner, lane) for key, inner in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_lane(inner, lane) for inner in batch)
    return batch[lane]


def _column(value: Any, lanes: np.ndarray, path: str) -> np.ndarray:
    if isinstance(value, Mapping):
        raise SchemaError(f"{path}: info has a dict where the schema has a field")
    column = as_numpy(value)[lanes]
    # Values that are neither Python numbers nor arrays, such as numpy's bools, are batched as objects.
    return np.stack([np.asarray(item) for item in column]) if column.dtype == object else column
