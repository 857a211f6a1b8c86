"""`diskreplay show`: prints one episode step by step. Other commands use functions of this module to format values."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.reading.episodes import Episode, EpisodeList
from diskreplay.schema.schema import Schema

STEPS_SHOWN = 50

EpisodeNumber = Annotated[
    int,
    typer.Argument(metavar="EPISODE", help="The index of the episode, as `episodes` prints it; -1 is the last one."),
]
IsId = Annotated[bool, typer.Option("--id", help="EPISODE is the id of any step of the episode, and not its index.")]
Fields = Annotated[
    list[str] | None,
    typer.Option("--field", metavar="FIELD", help="Only this field, or the fields nested in it; may be repeated."),
]
Steps = Annotated[
    str | None,
    typer.Option("--steps", metavar="A:B", help="Only steps A to B - 1, like a slice in Python; one number: one step."),
]


def show(
    path: console.StorePath,
    episode: EpisodeNumber,
    steps: Steps = None,
    field: Fields = None,
    is_id: IsId = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of a table.")] = False,
) -> None:
    """Show an episode step by step.

    Each step is a line with its number, its id and its fields. If there is a final observation, it is the last line.
    For arrays of more than eight elements, the table has the shape, the smallest and the largest value. With --json,
    every element is printed and, without --steps, every step. Nothing is written.
    """
    part = None if steps is None else as_slice(steps)
    with dr.open(path) as store:
        index = find_episode(store.episodes, episode, is_id=is_id)
        paths, found = chosen_leaves(store.schema, field), store.episodes[index]
        if part is None:
            part = slice(None) if json else slice(STEPS_SHOWN)
        record = describe(found, index, store.schema, paths, part)
        total = store.num_episodes
    console.tell(record, [] if json else lines(record, total, paths), json=json)


def as_slice(steps: str) -> slice:
    try:
        first, colon, stop = steps.partition(":")
        bounds = [int(bound) if bound.strip() else None for bound in (first, stop)]
        if colon:
            return slice(*bounds)
        number = int(first)
        return slice(number, number + 1 or None)
    except ValueError:
        raise typer.BadParameter(f"--steps must be A:B or one number, such as 0:10 or -1, not {steps!r}") from None


def describe(episode: Episode, index: int, schema: Schema, paths: Sequence[str], part: slice) -> dict[str, Any]:
    """Return a dict with an episode's properties, its episode fields, and its steps in the slice ``part``.

    "final_obs" is the final observation, or None. It is None also if the slice lacks the episode's last step.
    """
    length = len(episode)
    numbers = range(length)[part]
    first = numbers.start
    # The final observation is the row after the last step.
    stop = None if numbers and numbers.stop == length else max(first, numbers.stop)
    rows = {path: episode.rows(path, first, stop) for path in paths}
    ids, times = episode.ids, episode.times
    final = {path: array[-1] for path, array in rows.items() if len(array) > len(numbers)}
    return {
        "index": index,
        "id": int(ids[0]),
        "segment": episode.segment,
        "lane": episode.lane,
        "length": length,
        "hidden_steps": episode.hidden_steps,
        "total_reward": episode.total_reward,
        "ended": episode.ended,
        **{name: getattr(episode, name) for name in ("terminated", "truncated", "cut")},
        **episode_leaves(episode, schema),
        "steps": [
            {"step": t, "id": ids[t], "time": times[t], **{path: array[t - first] for path, array in rows.items()}}
            for t in numbers
        ],
        "final_obs": final or None,
    }


def lines(record: Mapping[str, Any], total: int, paths: Sequence[str]) -> list[str]:
    steps, final = record["steps"], record["final_obs"]
    length = text.plural(record["length"], "step")
    if record["hidden_steps"]:
        length += f" ({text.count(record['hidden_steps'])} hidden)"
    first = (
        f"episode {record['index']} of {text.count(total)}: id {record['id']}, segment {record['segment']}, lane "
        f"{record['lane']}, {length}, total_reward {text.number(record['total_reward'])}, {record['ended']}"
    )
    values = [
        f"{text.clean(path)} {text.NOTHING if value is None else cell(value)}"
        for path, value in record.items()
        if path.startswith("episode/")
    ]
    if steps:
        values.append(f"from {text.moment(float(steps[0]['time']))}")
    headers = [">step", ">id", *(f">{text.clean(short(path))}" for path in paths)]
    rows = [[str(step["step"]), str(step["id"]), *(cell(step[path]) for path in paths)] for step in steps]
    if final is not None:
        rows.append(["final", "", *(cell(final[path]) if path in final else "" for path in paths)])
    shown = [first, *([", ".join(values)] if values else []), "", console.columns(headers, rows)]
    if len(steps) < record["length"]:
        shown += ["", f"{text.plural(len(steps), 'step')} of {text.count(record['length'])} shown (--steps : for all)"]
    return shown


EXTRA, EPISODE = "extra", "episode"


def chosen_leaves(schema: Schema, names: Sequence[str] | None) -> list[str]:
    """Return the paths of the fields of steps with these names; None: all. The name "obs" also selects "obs/image"."""
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
    given = {name: value for name in schema.episode if (value := episode[name]) is not None}
    found = dict(schema.flatten(EPISODE, given))
    return {path: found.get(path) for path in schema.leaves if path.startswith(f"{EPISODE}/")}


def row_count(episode: Episode, path: str) -> int:
    """Return the number of rows of a field in an episode. Only observations have a row after the last step."""
    return len(episode) + (episode.has_final_obs and path.split("/")[0] == "obs")


def short(path: str) -> str:
    return path.removeprefix(f"{EXTRA}/").removeprefix(f"{EPISODE}/")


def find_episode(episodes: EpisodeList, number: int, *, is_id: bool) -> int:
    """Return an episode's index, from 0; raises BadParameter if there is no such episode.

    ``number`` is the index of the episode, and may be negative. If ``is_id`` is true, it is the id of a step.
    """
    if is_id:
        found = [at for at, episode in enumerate(episodes) if number in episode.ids]
        if not found:
            raise typer.BadParameter(f"no episode has a step of id {number}; `diskreplay episodes` lists ids")
        return found[0]
    if not -len(episodes) <= number < len(episodes):
        raise typer.BadParameter(f"no episode {number}: the store has {text.plural(len(episodes), 'episode')}")
    return number % len(episodes)


def cell(value: Any) -> str:
    value = np.asarray(value)
    if not value.ndim:
        return text.number(value.item()) if value.dtype.kind == "f" else str(value.item())
    if value.size <= 8 and value.ndim == 1:
        return f"[{' '.join(map(cell, value))}]"
    return f"{'x'.join(map(str, value.shape))}, {cell(value.min())} to {cell(value.max())}"
