"""A reader of the format in plain loops, from the arrays alone: what another language would do, without the store."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Lane = tuple[int, int, int, dict[str, Any]]
TERMINATED, TRUNCATED, FIRST, OBSERVATION_ONLY, CUT, END_MARKER, EPISODE_VALUES = 1, 2, 4, 8, 16, 32, 64


@dataclass
class Decoded:
    """One episode: its rows, then what its end says."""

    rows: list[int]
    ids: list[int]
    final: int | None = None
    terminated: bool = False
    truncated: bool = False
    cut: bool = False
    ended: bool = False
    values_row: int | None = None  # of the arrays of episode fields
    values: dict[str, np.ndarray] = field(default_factory=dict)


def decode(arrays: dict[str, Any], schema: Any) -> list[Decoded]:
    """Return the episodes of all segments; `arrays` maps paths to whole arrays, groups to attributes."""
    episodes, merged = [], set[int]()
    names = sorted({path.split("/")[1] for path in arrays if path.startswith("segments/")}, key=int)
    for name in reversed(names):  # packs come behind what they have
        below = f"segments/{name}/"
        segment = {path.removeprefix(below): x for path, x in arrays.items() if path.startswith(below)}
        attributes = arrays[f"segments/{name}"]
        members = {int(line[0]) for line in segment.get("members", [])}
        if int(name) in merged or merged & members:
            continue
        merged |= members
        for number, lane, lanes, part in _lanes_of(int(name), segment, attributes):
            for episode in _decode_lane(part, lane, lanes, number):
                _read(part, episode, schema)
                episodes.append(episode)
    return episodes


def _lanes_of(number: int, segment: dict[str, Any], attributes: dict[str, Any]) -> Iterator[Lane]:
    """Yield number, lane, lanes and arrays of each lane of a segment, or of those that are in a pack."""
    rows = {path: x for path, x in segment.items() if isinstance(x, np.ndarray) and x.shape[:1] == (1,)}
    if "packed" in attributes:
        runs = iter(segment["runs"].tolist())
        for member, lanes, *_ in segment["members"].tolist():
            for lane in range(lanes):
                first, count, _, first_value, values = next(runs)
                part = {
                    path: x[0, first_value : first_value + values]
                    if path.startswith("episode/")
                    else x[0, first : first + count]
                    for path, x in rows.items()
                    if x.ndim > 1
                }
                part["lost_values"] = {
                    position - first: count for position, count in _lost_values(attributes) if position >= first
                }
                yield member, lane, lanes, {**part, "sealed": True, "committed": count, "observed": count}
        return
    lanes = len(segment["committed"])
    for lane in range(lanes):
        # The table of episodes follows from the rows.
        arrays = {path: x for path, x in segment.items() if isinstance(x, np.ndarray) and "episodes/" not in path}
        part = {path: x[lane] for path, x in arrays.items()}
        part["lost_values"] = {
            position // lanes: count for position, count in _lost_values(attributes) if position % lanes == lane
        }
        yield number, lane, lanes, {**part, "sealed": attributes["sealed"]}


def _lost_values(attributes: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the first position of each range of lost rows, and how many values of episodes were lost with it."""
    ranges = attributes.get("lost", [])
    return [(position, count) for (position, _), count in zip(ranges, attributes.get("lost_values", []), strict=True)]


def _decode_lane(segment: dict[str, Any], lane: int, lanes: int, number: int) -> list[Decoded]:
    episodes: list[Decoded] = []
    committed, observed = int(segment["committed"]), int(segment["observed"])
    values = 0
    for row in range(committed):
        flags = int(segment["done"][row])
        values += segment["lost_values"].get(row, 0)
        if flags & (OBSERVATION_ONLY | END_MARKER):
            last = episodes[-1]
            last.final = row if flags & OBSERVATION_ONLY else None
        else:
            if flags & FIRST:
                episodes.append(Decoded([], []))
            last = episodes[-1]
            last.rows.append(row)
            last.ids.append(number << 35 | (row * lanes + lane))
        if flags & (TERMINATED | TRUNCATED):
            last.ended = True
            last.terminated |= bool(flags & TERMINATED)
            last.truncated |= bool(flags & TRUNCATED)
            # Beside FIRST it says that the episode goes on from one that was cut for its length.
            last.cut |= bool(flags & CUT and not flags & FIRST)
        if flags & EPISODE_VALUES:
            last.values_row = values
            values += 1
    followed = episodes if segment["sealed"] else episodes[:-1]
    for episode in followed:
        if not episode.ended:
            episode.ended = episode.truncated = episode.cut = True
    if episodes and not episodes[-1].ended and observed > committed:
        episodes[-1].final = committed
    return episodes


def _read(segment: dict[str, Any], episode: Decoded, schema: Any) -> None:
    for leaf in schema.leaves:
        if leaf.startswith("episode/"):
            if episode.values_row is not None:
                episode.values[leaf] = segment[leaf][episode.values_row]
            continue
        rows = list(episode.rows)
        if leaf.split("/")[0] == "obs" and episode.final is not None:
            rows.append(episode.final)
        episode.values[leaf] = segment[leaf][rows]
