"""Example episodes of a report: which ones, and what is shown of each."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from diskreplay.cli import text
from diskreplay.cli.chart import Chart, Series
from diskreplay.cli.episode_leaves import cell, episode_leaves, row_count, short
from diskreplay.cli.plot import MOST_SERIES
from diskreplay.cli.report.page import known, wide
from diskreplay.cli.report.sample import Episodes, began_at
from diskreplay.cli.report.svg import figure
from diskreplay.errors import SegmentGone
from diskreplay.format.schema import Field, Schema
from diskreplay.markup import NOTHING, Html, element, image, joined, table, text as escaped
from diskreplay.pictures import as_images, gif, is_image, png, smaller, strip
from diskreplay.store.reading.episodes import Episode

FRAMES, FPS, WIDEST = 24, 6.0, 128  # of an animation, a second, and pixels of a frame
STRIP = 8  # frames side by side
IMAGES, CHARTS, COLUMNS = 2, 8, 12  # fields of each kind that are shown
STEPS_DRAWN, STEPS_LISTED = 500, 10
ROW_BYTES = 1 << 22  # most of a row that is read


class Example(NamedTuple):
    """An episode by its place in `Store.episodes`, its total reward, and why it is an example: "best, newest"."""

    at: int
    total_reward: float
    why: str


def choose_examples(episodes: Episodes, most: int) -> list[Example]:
    """Return the best, worst, median and newest episodes, and then others at equal distances of their ranks."""
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


def example_section(store: dr.Store, example: Example) -> Html:
    """Return what is shown of an episode; a line where its segment has left meanwhile."""
    try:
        return _section(store, example)
    except SegmentGone:
        return element("section", element("p", escaped(f"Episode {example.at} was evicted while this was written.")))


def _section(store: dr.Store, example: Example) -> Html:
    episode, at = store.episodes[example.at], example.at
    said = {
        "id": str(episode.ids[0]),
        "segment": str(episode.segment),
        "lane": str(episode.lane),
        "length": text.count(len(episode)),
        **({"hidden_steps": text.count(hidden)} if (hidden := episode.hidden_steps) else {}),
        "total_reward": text.NOTHING if np.isnan(example.total_reward) else text.number(example.total_reward),
        "ended": episode.ended,
        "began": text.moment(began_at(store, at)),
    }
    for path, value in [*episode_leaves(episode, store.schema).items()][:COLUMNS]:
        said[short(path)] = text.NOTHING if value is None else cell(value)
    return element(
        "section",
        element("h3", escaped(f"{example.why[:1].upper()}{example.why[1:]}: episode {at}")),
        known(said),
        *_pictures(episode, store.schema),
        element("div", *(figure(chart) for chart in charts(episode, store.schema)), class_="figures"),
        element("details", element("summary", escaped("Steps")), wide(steps_table(episode, store.schema))),
        class_="episode",
    )


def _readable(schema: Schema) -> dict[str, Field]:
    return {path: leaf for path, leaf in schema.step_leaves.items() if leaf.row_bytes <= ROW_BYTES}


def _pictures(episode: Episode, schema: Schema) -> Iterator[Html]:
    """Yield an animation and a strip of each field that has images."""
    paths = [path for path, leaf in _readable(schema).items() if is_image(leaf)]
    for path in paths[:IMAGES]:
        rows = row_count(episode, path)
        places = np.unique(np.linspace(0, rows - 1, min(FRAMES, rows)).round().astype(int))
        frames = np.concatenate([episode.rows(path, place, place + 1) for place in places.tolist()])
        images = smaller(as_images(frames), WIDEST)
        some = np.unique(np.linspace(0, len(images) - 1, min(STRIP, len(images))).round().astype(int))
        name, steps = text.clean(short(path)), ", ".join(map(str, places[some].tolist()))
        moving = image(gif(images, FPS), "gif", f"{name}, {len(images)} frames", class_="moving")
        still = image(
            png(strip(images[some])),
            "png",
            f"{name} at steps {steps}",
            class_="strip",
            style=f"max-width:{8 * len(some)}rem",
        )
        moved = f"all {rows} frames" if len(images) == rows else f"{len(images)} of {text.count(rows)} frames"
        said = f"{name}: {moved}, and those of steps {steps}"
        yield element("figure", moving, still, element("figcaption", escaped(said)), class_="frames")


def charts(episode: Episode, schema: Schema) -> Iterator[Chart]:
    """Yield a chart of each small field over the first steps."""
    leaves = {path: leaf for path, leaf in _readable(schema).items() if not is_image(leaf)}
    ordered = sorted(leaves, key=lambda path: (path != "reward", path.split("/")[0] != "action"))
    for path in ordered[:CHARTS]:
        rows = row_count(episode, path)
        values = episode.rows(path, 0, min(rows, STEPS_DRAWN))
        columns = values.reshape(len(values), -1)
        shown = columns[:, :MOST_SERIES].astype(np.float64)
        if not np.isfinite(shown).any():
            continue
        names = [""] if columns.shape[1] == 1 else [f"[{i}]" for i in range(shown.shape[1])]
        title = text.clean(short(path))
        if columns.shape[1] > MOST_SERIES:
            title += f", {MOST_SERIES} of {columns.shape[1]} elements"
        label = "step" if rows <= STEPS_DRAWN else f"step, the first {STEPS_DRAWN} of {text.count(rows)}"
        x = np.arange(len(shown))
        if values.dtype.kind in "biu" and not path.startswith("obs"):  # what is chosen holds until the next step
            x, shown = np.repeat(np.arange(len(shown) + 1), 2)[1:-1], shown.repeat(2, 0)
        series = [Series(name, x, shown[:, i]) for i, name in enumerate(names)]
        yield Chart(title, label, title, series, bars=False, lines=True)


def steps_table(episode: Episode, schema: Schema) -> Html:
    """Return the table of the first steps and the last ones, with the final observation."""
    paths = [*_readable(schema)]
    numbers = [
        *range(len(episode))[:STEPS_LISTED],
        *range(max(STEPS_LISTED, len(episode) - STEPS_LISTED), len(episode)),
    ]
    shown = paths[:COLUMNS]
    rows = [[escaped(t), *_cells(episode, shown, t)] for t in numbers]
    if episode.has_final_obs:
        rows.append([escaped("final"), *_cells(episode, shown, len(episode))])
    headers = [">step", *(f">{short(path)}" for path in shown)]
    parts = [table(headers, rows, len(episode) + len(rows) - len(numbers))]
    if len(paths) > len(shown):
        parts.append(element("p", escaped(f"{len(paths) - len(shown)} more fields are not shown.")))
    return joined(parts)


def _cells(episode: Episode, paths: Sequence[str], step: int) -> Iterator[Html]:
    for path in paths:
        there = step < row_count(episode, path)
        yield escaped(cell(episode.rows(path, step, step + 1)[0])) if there else NOTHING
