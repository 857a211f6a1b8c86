"""Values that the Gymnasium wrappers record, and functions for flags and for nested values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from diskreplay import ReplayError, SchemaError, Store

Source = tuple[Any, np.ndarray]  # a vector environment's info, and the lanes to read in this info


class StepValues:
    """The values that a Gymnasium wrapper records: extra fields of steps, episode fields, and values from info.

    Concurrency: one thread may use the object at a time, as for the environment itself.

    Attributes
    ----------
    running : (lanes,) bool
        True for a lane whose episode began by a reset and has not ended. A single environment is one lane.

    Parameters
    ----------
    info_fields : iterable of str
        The names of fields to copy from info: extra fields at every step, and episode fields at the step that ends an
        episode.
    leading : tuple of int
        ``(num_envs,)`` for a vector environment, otherwise empty.
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
        lanes = leading[0] if leading else 1
        self.running = np.zeros(lanes, bool)
        self._episodes: list[dict[str, np.ndarray]] = [{} for _ in range(lanes)]  # each lane's episode fields by path

    def set(self, fields: Mapping[str, Any]) -> None:
        for name in fields:
            if name not in self._settable:
                reason = "copied from info" if name in self._extra_infos else "no extra field of the store's schema"
                raise SchemaError(f"set_extra: {name!r} is {reason}; known are {', '.join(self._settable) or 'none'}")
        self._given.update(fields)

    def take(self) -> dict[str, Any]:
        """Return the extra fields that were set, and forget them."""
        if len(self._given) < len(self._settable):
            missing = next(name for name in self._settable if name not in self._given)
            raise SchemaError(
                f"step: the extra field {missing!r} is missing; call set_extra({missing}=...) before step()"
            )
        given, self._given = self._given, {}
        return given

    def clear(self) -> None:
        self._given = {}

    def set_episode(self, fields: Mapping[str, Any]) -> None:
        """Keep episode fields for each lane's running episode; a lane without one keeps them for its next episode."""
        known = [name for name in self._schema.episode if name not in self._episode_infos]
        for name in fields:
            if name not in known:
                reason = "copied from info" if name in self._episode_infos else "no episode field of the store's schema"
                raise SchemaError(f"set_episode: {name!r} is {reason}; known are {', '.join(known) or 'none'}")
        leaves = self._schema.cast("episode", dict(fields), self._leading)
        for lane, values in enumerate(self._episodes):
            values.update({path: (leaf[lane] if self._leading else leaf).copy() for path, leaf in leaves.items()})

    def reset_values(
        self, seed: int | Sequence[int | None] | None, options: Mapping[str, Any] | None, lanes: np.ndarray
    ) -> list[dict[str, np.ndarray]]:
        """Return the episode fields "seed" and "options" from the arguments of `reset`: for each lane, a dict by path.

        With an integer seed, lane i of a vector has the seed ``seed + i``, as in Gymnasium. A seed of None and empty
        options are left out. An argument is also left out if the schema has no episode field of its name. Lanes that
        have False in ``lanes`` get an empty dict.
        """
        count = len(self._episodes)
        seeds: list[Any] = [seed] * count
        if isinstance(seed, int | np.integer):
            seeds = [int(seed) + lane for lane in range(count)]
        elif self._leading and isinstance(seed, Sequence | np.ndarray):
            seeds = list(seed)
        given: list[dict[str, Any]] = [{} for _ in range(count)]
        arguments: dict[str, list[Any]] = {"seed": seeds, "options": [options or None] * count}
        for name, values in arguments.items():
            if name in self._schema.episode and name not in self._episode_infos:
                # The environments raise an error for a wrong number of seeds, so `zip` does not have to.
                for lane, value, is_reset in zip(given, values, lanes, strict=False):
                    if is_reset and value is not None:
                        lane[name] = value
        cast = self._schema.cast
        try:
            return [
                {path: leaf.copy() for path, leaf in cast("episode", lane).items()} if lane else {} for lane in given
            ]
        except SchemaError as error:
            raise SchemaError(
                f"reset: {error}; the schema's episode fields seed and options record these arguments of reset: pass "
                "values that fit, or give the fields other names"
            ) from None

    def begin(self, given: list[dict[str, np.ndarray]], lanes: np.ndarray) -> None:
        """Begin an episode in each lane of the mask ``lanes``, with the episode fields ``given`` from `reset_values`.

        Call `forget` for these lanes first.
        """
        for lane in np.flatnonzero(lanes).tolist():
            self._episodes[lane].update(given[lane])
        self.running |= lanes

    def of_episodes(self, lanes: np.ndarray) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """Return the episode fields of these lanes, as pairs ``(mask of lanes, values)``.

        The lanes of one mask have the same fields. Values are nested like the schema. For a vector environment, axis 0
        of a value is the lanes.
        """
        groups: dict[tuple[str, ...], np.ndarray] = {}
        for lane in np.flatnonzero(lanes).tolist():
            groups.setdefault(tuple(sorted(self._episodes[lane])), np.zeros_like(lanes))[lane] = True
        found = []
        for paths, some in groups.items():
            leaves = {}
            for path in paths:
                rows = [self._episodes[lane][path] for lane in np.flatnonzero(some)]
                leaves[path] = np.zeros((*self._leading, *rows[0].shape), rows[0].dtype)
                leaves[path][some if self._leading else ...] = rows if self._leading else rows[0]
            found.append((some, self._schema.unflatten("episode", leaves) if paths else {}))
        return found

    def forget(self, lanes: np.ndarray) -> None:
        for lane in np.flatnonzero(lanes).tolist():
            self._episodes[lane] = {}
        self.running &= ~lanes

    def own(self, part: str, value: Any) -> dict[str, np.ndarray]:
        """Return a copy of an observation or action, as arrays by the paths of the schema's leaves."""
        return {path: leaf.copy() for path, leaf in self._schema.cast(part, value, self._leading).items()}

    def nest(self, part: str, values: Mapping[str, np.ndarray]) -> Any:
        return self._schema.unflatten(part, values)

    def from_info(self, info: Mapping[str, Any], ended: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the extra fields and the episode fields in info; the episode fields are None if no episode ended."""
        schema = self._schema
        extra = {name: _value(schema.extra[name], info, name, name) for name in self._extra_infos}
        if not ended:
            return extra, None
        return extra, {name: _value(schema.episode[name], info, name, name) for name in self._episode_infos}

    def from_infos(self, steps: list[Source], ends: list[Source]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the extra fields of stepped lanes, and the episode fields of ended lanes.

        The episode fields are None if no lane ended. Each field has a row for every lane of the environment. The row of
        a lane that is not read is zeros.
        """
        steps, ends = [[source for source in sources if source[1].size] for sources in (steps, ends)]
        extra = {name: self._lanes(self._schema.extra[name], name, name, steps) for name in self._extra_infos}
        if not ends:
            return extra, None
        return extra, {name: self._lanes(self._schema.episode[name], name, name, ends) for name in self._episode_infos}

    def with_final(
        self, obs: Mapping[str, np.ndarray], info: Mapping[str, Any], ended: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return a copy of ``obs`` with the final observations of ended lanes, which ``info`` has in SAME_STEP mode.

        Also return a mask of the lanes whose final observation has the same bytes as the first observation of the next
        episode.
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
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def as_flags(value: Any, name: str, refused: type[ReplayError] = SchemaError) -> np.ndarray:
    """Convert flags to bools; raise ``refused`` for values other than bools, 0 and 1."""
    flags = as_numpy(value)
    if flags.dtype.kind != "b":
        if flags.dtype.kind not in "iuf":
            raise refused(f"{name} is one truth value a step, a bool or 0 or 1, not {flags.dtype}")
        if (wrong := flags[(flags != 0) & (flags != 1)]).size:
            raise refused(f"{name} is one truth value a step, a bool or 0 or 1, not {wrong[0]}")
    return flags.astype(bool, copy=False)


def _value(tree: Any, info: Any, key: str, path: str) -> Any:
    if not isinstance(info, Mapping) or key not in info:
        raise SchemaError(f"{path}: the step's info has no value of this name")
    if isinstance(tree, dict):
        return {inner: _value(tree[inner], info[key], inner, f"{path}/{inner}") for inner in tree}
    return info[key]


def _mask(info: Mapping[str, Any], key: str, num_envs: int) -> np.ndarray:
    """Return a mask of the lanes with a value of ``key`` in info. Without a mask in info, all lanes have a value."""
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
    # Gymnasium puts values that are neither Python numbers nor arrays, such as numpy's bools, into arrays of objects.
    return np.stack([np.asarray(item) for item in column]) if column.dtype == object else column


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: map_leaves(function, below) for name, below in tree.items()}
    if isinstance(tree, tuple):
        return type(tree)(map_leaves(function, below) for below in tree)
    return function(tree)


def row_of(tree: Any, i: int) -> Any:
    return map_leaves(itemgetter(i), tree)


def leaves_of(tree: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found
