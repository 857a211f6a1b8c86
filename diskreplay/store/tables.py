"""All steps and episodes of a snapshot in memory: as arrays, a data frame or a data set."""

from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import MissingExtra
from diskreplay.ids import TERMINATED, TRUNCATED
from diskreplay.reading.episodes import Episode, EpisodeList
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Field, Schema
from diskreplay.store.info import sum_rewards

if TYPE_CHECKING:
    import pandas
    import xarray

Column = NDArray[Any]

# A vector of at most this many elements has a column for each element. A larger field is one column of arrays.
WIDEST = 64

HIDDEN = "hidden"
"""The name of the bool column that says whether the capacity or the age limit hides a step."""


def to_numpy(snapshot: Snapshot) -> dict[str, Any]:
    schema, (properties, leaves) = snapshot.schema, step_columns(snapshot)
    nested = {part: schema.unflatten(part, leaves) for part in ("obs", "action", "reward")}
    extra = _free_names("extra", schema.unflatten("extra", leaves), {*properties, "episodes"}) if schema.extra else {}
    known, values = episode_columns(snapshot)
    final = schema.unflatten("obs", {path: column for path, column in values.items() if path in leaves})
    taken = {*known, "final_obs"}
    fields = _free_names("episode", schema.unflatten("episode", values), taken) if schema.episode else {}
    return {**nested, **extra, **properties, "episodes": {**known, "final_obs": final, **fields}}


def _free_names(part: str, fields: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    """Return ``fields``. If a name is in ``taken``, it is replaced by the field's path, such as "extra/id"."""
    return {f"{part}/{name}" if name in taken else name: column for name, column in fields.items()}


def to_pandas(snapshot: Snapshot) -> "pandas.DataFrame":
    with MissingExtra.raised_for("a data frame", "pandas"):
        import pandas

    properties, leaves = step_columns(snapshot)
    index = pandas.MultiIndex.from_arrays(
        [properties.pop(name) for name in ("episode", "step")], names=["episode", "step"]
    )
    columns = dict(properties)
    for path, column in leaves.items():
        columns |= _scalars(column_name(path, {*properties, *index.names}), column)
    return pandas.DataFrame(columns, index=index)


def to_xarray(snapshot: Snapshot) -> "xarray.Dataset":
    with MissingExtra.raised_for("a data set", "xarray"):
        import xarray

    properties, leaves = step_columns(snapshot)
    known, values = episode_columns(snapshot)
    taken = {*properties, "episode_of_step", "step_of_episode", *(f"episode_{name}" for name in known)}
    variables = {column_name(path, taken): _variable("step", path, column) for path, column in leaves.items()}
    flags = ("terminated", "truncated", hidden_column(snapshot.schema))
    variables |= {name: _variable("step", name, properties.pop(name)) for name in flags}
    variables |= {f"episode_{name}": _variable("episode", name, column) for name, column in known.items()}
    for path, column in values.items():
        name = f"final_{column_name(path)}" if path in leaves else f"episode_{column_name(path)}"
        if name in variables:  # a property of episodes has this name already
            name = path.replace("/", ".")
        variables[name] = _variable("episode", path, np.ma.getdata(column))
        variables[f"has_{name}"] = _variable("episode", name, ~_missing(column))
    times = (properties.pop("time") * 1e9).astype("datetime64[ns]")
    renamed = {"episode": "episode_of_step", "step": "step_of_episode", "id": "id"}
    coordinates = {name: ("step", properties[old]) for old, name in renamed.items()}
    return xarray.Dataset(variables, {**coordinates, "time": ("step", times)})


def step_columns(snapshot: Snapshot) -> tuple[dict[str, Column], dict[str, Column]]:
    """Return two dicts: {name: property of all steps, (steps,)}, and {path: field of all steps, (steps, *shape)}.

    Steps are in the order of their episodes, oldest episode first.
    """
    episodes = snapshot.episodes
    count, last = int(episodes.steps.sum()), np.cumsum(episodes.steps) - 1
    episode = np.repeat(np.arange(len(episodes)), episodes.steps)
    step = np.arange(count) - (last - episodes.steps + 1)[episode]
    ends = np.zeros((2, count), np.bool_)
    ends[:, last] = (episodes.end & TERMINATED) != 0, (episodes.end & TRUNCATED) != 0
    properties = {
        "episode": episode,
        "step": step,
        "id": episodes.first[episode] + step * episodes.stride[episode],
        "time": joined((count,), np.dtype(np.float64), (each.times for each in EpisodeList(snapshot))),
        "terminated": ends[0],
        "truncated": ends[1],
        hidden_column(snapshot.schema): step < snapshot.hidden_steps(episodes)[episode],
    }
    leaves = snapshot.schema.step_leaves.items()
    return properties, {path: joined((count, *leaf.shape), leaf.dtype, _rows(snapshot, path)) for path, leaf in leaves}


def hidden_column(schema: Schema) -> str:
    return f"is_{HIDDEN}" if HIDDEN in schema.extra else HIDDEN


def _rows(snapshot: Snapshot, path: str) -> Iterator[Column]:
    episodes = snapshot.episodes
    for first, steps in zip(episodes.first.tolist(), episodes.steps.tolist(), strict=True):
        yield snapshot.rows(path, first, steps)


def joined(shape: tuple[int, ...], dtype: np.dtype[Any], parts: Iterable[Column]) -> Column:
    out, at = np.empty(shape, dtype), 0
    for part in parts:
        out[at : at + len(part)] = part
        at += len(part)
    return out


def episode_columns(snapshot: Snapshot) -> tuple[dict[str, Column], dict[str, Column]]:
    """Return two dicts: {name: property of all episodes, (episodes,)}, and {path: values, (episodes, *shape)}.

    The values are the leaves of final observations, and the episode fields. These values are masked arrays: a value
    that an episode lacks is masked.
    """
    episodes, every = snapshot.episodes, list(EpisodeList(snapshot))
    properties = {
        "id": episodes.first,
        "length": episodes.steps,
        "hidden_steps": snapshot.hidden_steps(episodes),
        "total_reward": sum_rewards(snapshot)[0],
        "ended": np.array([each.ended for each in every], "<U10"),
    }
    values: dict[str, Column] = {}
    for path, leaf in snapshot.schema.leaves.items():
        part, *keys = path.split("/")
        if part == "obs":
            values[path] = _masked(every, leaf, partial(_final_obs, keys=keys))
        elif part == "episode":
            values[path] = _masked(every, leaf, partial(_value, keys=keys))
    return properties, values


def _masked(episodes: list[Episode], leaf: Field, read: Callable[[Episode], Any]) -> Column:
    out: Column = np.ma.masked_array(np.zeros((len(episodes), *leaf.shape), leaf.dtype), mask=True)
    for at, episode in enumerate(episodes):
        if (value := read(episode)) is not None:
            out[at] = value
    return out


def _final_obs(episode: Episode, keys: list[str]) -> Any:
    rows = _below(episode.obs, keys)
    return rows[len(episode)] if len(rows) > len(episode) else None


def _value(episode: Episode, keys: list[str]) -> Any:
    return _below(episode[keys[0]], keys[1:])


def _below(tree: Any, keys: list[str]) -> Any:
    for key in keys if tree is not None else ():
        tree = tree[key]
    return tree


def _missing(column: Column) -> NDArray[np.bool_]:
    return np.asarray(np.ma.getmaskarray(column).any(axis=tuple(range(1, column.ndim))))


def column_name(path: str, taken: Container[str] = ()) -> str:
    """Return a leaf's name in tables: its path with dots, such as "obs.image".

    The prefix "extra" or "episode" is left out, unless the name without it is in ``taken``.
    """
    name = path.removeprefix("extra/").removeprefix("episode/").replace("/", ".")
    return path.replace("/", ".") if name in taken else name


def _variable(dimension: str, path: str, column: Column) -> tuple[list[str], Column]:
    # Dimensions have the same names as in the arrays on disk.
    return [dimension, *(f"{path.replace('/', '_')}_{i}" for i in range(column.ndim - 1))], column


def _scalars(name: str, column: Column) -> dict[str, Any]:
    if column.ndim == 1:
        return {name: column}
    if column.ndim == 2 and column.shape[1] <= WIDEST:
        return {f"{name}[{i}]": column[:, i] for i in range(column.shape[1])}
    return {name: list(column)}
