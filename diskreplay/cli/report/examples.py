"""Chooses the example episodes of a report, and makes their parts of the page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from diskreplay.cli import text
from diskreplay.cli.look.chart import Chart, Series
from diskreplay.cli.look.plot import elements
from diskreplay.cli.look.show import cell, episode_leaves, row_count, short
from diskreplay.cli.report.sample import Episodes, began_at
from diskreplay.errors import SegmentGone
from diskreplay.pictures import as_images, gif, is_image, png, smaller, spread, strip
from diskreplay.reading.episodes import Episode
from diskreplay.schema.schema import Field, Schema

# An animation has at most this number of frames, this number of frames a second, and at most this number of pixels on
# each side.
FRAMES, FPS, WIDEST = 24, 6.0, 128
STRIP = 8  # the maximum number of frames in a strip
IMAGES, CHARTS, COLUMNS = 2, 8, 12  # at most this many fields are shown as images, charts, columns
STEPS_DRAWN, STEPS_LISTED = 500, 10
ROW_BYTES = 1 << 22  # a field with more bytes per row is not read


class Example(NamedTuple):
    """An example episode: its index in `Store.episodes`, its total reward, and why it was chosen ("best, newest")."""

    at: int
    total_reward: float
    why: str


@dataclass(frozen=True)
class Frames:
    """Images of a field in an episode. The field has ``rows`` rows.

    ``moving`` is a GIF with ``count`` of the rows. ``strip`` is a PNG with the rows whose numbers are in ``steps``.
    """

    field: str
    rows: int
    count: int
    steps: list[int]
    moving: bytes
    strip: bytes


@dataclass(frozen=True)
class StepsTable:
    """A table of some rows of an episode.

    The episode has ``total`` rows. A header that begins with > is for a column of numbers.
    """

    headers: list[str]
    cells: list[list[str]]
    total: int
    fields_left_out: int


@dataclass(frozen=True)
class EpisodeParts:
    facts: dict[str, str]
    frames: list[Frames]
    charts: list[Chart]
    steps: StepsTable


def choose_examples(episodes: Episodes, most: int) -> list[Example]:
    """Return at most ``most`` episodes: the best, worst, median and newest, then others, evenly spaced by rank."""
    finite = np.flatnonzero(np.isfinite(episodes.total_reward) & (episodes.ended != "open"))
    ranked = finite[np.argsort(episodes.total_reward[finite], kind="stable")]
    named, between = {}, {}
    if len(ranked):
        last = len(ranked) - 1
        named = {"best": ranked[last], "worst": ranked[0], "median": ranked[last // 2]}
        shares = np.linspace(0, 1, most + 2)[1:-1].tolist()
        between = {f"above {share:.0%} of the episodes": ranked[round(share * last)] for share in shares}
    if len(episodes):
        named["newest"] = len(episodes) - 1
    reasons: dict[int, list[str]] = {}
    for name, place in named.items():
        if place in reasons or len(reasons) < most:
            reasons.setdefault(int(place), []).append(name)
    for name, place in between.items():
        if place not in reasons and len(reasons) < most:
            reasons[int(place)] = [name]
    return [
        Example(int(episodes.at[place]), float(episodes.total_reward[place]), ", ".join(names))
        for place, names in reasons.items()
    ]


def read_parts(store: dr.Store, example: Example) -> EpisodeParts | None:
    episode, schema = store.episodes[example.at], store.schema
    try:
        values = {short(path): value for path, value in [*episode_leaves(episode, schema).items()][:COLUMNS]}
        facts = {
            "id": str(episode.ids[0]),
            "segment": str(episode.segment),
            "lane": str(episode.lane),
            "length": text.count(len(episode)),
            **({"hidden_steps": text.count(hidden)} if (hidden := episode.hidden_steps) else {}),
            "total_reward": text.NOTHING if np.isnan(example.total_reward) else text.number(example.total_reward),
            "ended": episode.ended,
            "began": text.moment(began_at(store, example.at)),
            **{name: text.NOTHING if value is None else cell(value) for name, value in values.items()},
        }
        return EpisodeParts(facts, [*frames(episode, schema)], [*charts(episode, schema)], steps_table(episode, schema))
    except SegmentGone:
        return None


def _readable(schema: Schema) -> dict[str, Field]:
    return {path: leaf for path, leaf in schema.step_leaves.items() if leaf.row_bytes <= ROW_BYTES}


def frames(episode: Episode, schema: Schema) -> Iterator[Frames]:
    paths = [path for path, leaf in _readable(schema).items() if is_image(leaf)]
    for path in paths[:IMAGES]:
        rows = row_count(episode, path)
        places = spread(rows, FRAMES)
        images = smaller(as_images(np.concatenate([episode.rows(path, at, at + 1) for at in places])), WIDEST)
        some = spread(len(images), STRIP)
        steps = [places[at] for at in some]
        yield Frames(short(path), rows, len(places), steps, gif(images, FPS), png(strip(images[some])))


def charts(episode: Episode, schema: Schema) -> Iterator[Chart]:
    leaves = {path: leaf for path, leaf in _readable(schema).items() if not is_image(leaf)}
    ordered = sorted(leaves, key=lambda path: (path != "reward", path.split("/")[0] != "action"))
    for path in ordered[:CHARTS]:
        rows = row_count(episode, path)
        values = episode.rows(path, 0, min(rows, STEPS_DRAWN))
        title, columns = elements(short(path), values)
        if not any(np.isfinite(column).any() for column in columns.values()):
            continue
        label = "step" if rows <= STEPS_DRAWN else f"step, the first {STEPS_DRAWN} of {text.count(rows)}"
        x = np.arange(len(values))
        # draw stairs, because a value holds until the next step
        if values.dtype.kind in "biu" and not path.startswith("obs"):
            x = np.repeat(np.arange(len(values) + 1), 2)[1:-1]
            columns = {name: column.repeat(2) for name, column in columns.items()}
        series = [Series(name, x, column) for name, column in columns.items()]
        yield Chart(title, label, title, series, bars=False, lines=True)


def steps_table(episode: Episode, schema: Schema) -> StepsTable:
    paths, length = [*_readable(schema)], len(episode)
    numbers = [*range(length)[:STEPS_LISTED], *range(max(STEPS_LISTED, length - STEPS_LISTED), length)]
    rows = {str(number): number for number in numbers} | ({"final": length} if episode.has_final_obs else {})

    def shown(path: str, at: int) -> str:
        return cell(episode.rows(path, at, at + 1)[0]) if at < row_count(episode, path) else ""

    cells = [[name, *(shown(path, at) for path in paths[:COLUMNS])] for name, at in rows.items()]
    headers = [">step", *(f">{short(path)}" for path in paths[:COLUMNS])]
    return StepsTable(headers, cells, length + episode.has_final_obs, len(paths[COLUMNS:]))
