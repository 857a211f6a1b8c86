"""The values of an episode by the paths of its leaves, as `inspect` lists them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import typer

from diskreplay.cli import text
from diskreplay.reading.episodes import Episode, EpisodeList
from diskreplay.schema.schema import Schema

EXTRA, EPISODE = "extra", "episode"


def chosen_leaves(schema: Schema, names: Sequence[str] | None) -> list[str]:
    """Return the paths of the step leaves that are named, or of all: "obs" names those below it, too.

    Raises BadParameter where a name is that of no field.
    """
    chosen: dict[str, None] = {}
    for name in names or ():
        roots = (name, f"{EXTRA}/{name}")
        found = [
            path for path in schema.step_leaves if any(path == root or path.startswith(f"{root}/") for root in roots)
        ]
        if not found:
            known = ", ".join(schema.step_leaves)
            raise typer.BadParameter(f"no field {name!r} in this store; it has {known}")
        chosen |= dict.fromkeys(found)
    return list(chosen) or list(schema.step_leaves)


def episode_leaves(episode: Episode, schema: Schema) -> dict[str, Any]:
    """Return the values of its episode fields by path; None where none were given."""
    given = {name: value for name in schema.episode if (value := episode[name]) is not None}
    found = dict(schema.flatten(EPISODE, given))
    return {path: found.get(path) for path in schema.leaves if path.startswith(f"{EPISODE}/")}


def row_count(episode: Episode, path: str) -> int:
    """Return how many rows of a leaf of the steps an episode has: of observations also the final one."""
    return len(episode) + (episode.has_final_obs and path.split("/")[0] == "obs")


def short(path: str) -> str:
    """Return a path as it is said where no other is meant: "log_prob", not "extra/log_prob"."""
    return path.removeprefix(f"{EXTRA}/").removeprefix(f"{EPISODE}/")


def find_episode(episodes: EpisodeList, number: int, *, is_id: bool) -> int:
    """Return the index of an episode by its index, from the end where it is negative, or by the id of any step of it.

    Raises BadParameter where there is none.
    """
    if is_id:
        found = [at for at, episode in enumerate(episodes) if number in episode.ids]
        if not found:
            raise typer.BadParameter(f"no episode has a step of the id {number}; `diskreplay episodes` lists first ids")
        return found[0]
    if not -len(episodes) <= number < len(episodes):
        raise typer.BadParameter(f"no episode {number}: the store has {text.plural(len(episodes), 'episode')}")
    return number % len(episodes)


def cell(value: Any) -> str:
    """Give a value of a step in one cell of a table: a number, a short vector, or what an array is like."""
    value = np.asarray(value)
    if not value.ndim:
        return text.number(value.item()) if value.dtype.kind == "f" else str(value.item())
    if value.size <= 8 and value.ndim == 1:
        return f"[{' '.join(map(cell, value))}]"
    return f"{'x'.join(map(str, value.shape))}, {cell(value.min())} to {cell(value.max())}"
