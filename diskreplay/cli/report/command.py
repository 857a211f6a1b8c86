"""`diskreplay report`: one page of HTML about a store."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.du import fields_table as usage_table, summary as usage_line, usage_of
from diskreplay.cli.inspect import ROWS_SHOWN, quarantine_table, segments_table, summary, writers_table
from diskreplay.cli.report.charts import charts_of
from diskreplay.cli.report.examples import choose_examples, example_section
from diskreplay.cli.report.page import note, page, section, shares, wide
from diskreplay.cli.report.sample import Episodes, Steps, read_episodes, sample_steps
from diskreplay.cli.report.statistics import FIELDS, fields_table
from diskreplay.cli.report.svg import figure
from diskreplay.cli.where import Where, compile_where
from diskreplay.markup import Html, element, facts, joined, text as escaped

MOST_EXAMPLES = 20


def report(
    path: console.StorePath,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to save the page.")] = Path("report.html"),
    where: Where = None,
    examples: Annotated[
        int,
        typer.Option("--episodes", min=0, max=MOST_EXAMPLES, help="How many episodes are shown as examples."),
    ] = 4,
) -> None:
    """Write a page about a store: what it holds, statistics and plots, and example episodes with their frames.

    One HTML file that loads nothing and opens in any browser. Of a large store a sample of episodes and steps is read,
    always the same one, and the page says so. Examples are the best, the worst, the median and the newest episode, and
    then others between. With --where statistics, plots and examples are of the episodes that meet it. Frames need
    pillow: pip install "diskreplay[plot]".
    """
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"--out {out}: there is no folder {out.parent}")
    with dr.open(path) as store:
        condition = None if where is None else compile_where(where, store.schema)
        info = store.info(total_reward=False)
        with console.bar("Measuring segments", in_bytes=True) as progress:
            usage = usage_of(store, info, progress)
        with console.bar("Reading episodes") as progress:
            episodes = read_episodes(store, condition, progress)
        steps = sample_steps(store, None if where is None else episodes)
        chosen = choose_examples(episodes, examples)
        html = page(
            f"Report of {Path(info['path']).name}",
            _head(info, where, episodes, steps),
            *_damage(info),
            _overview(info, store.uuid, usage),
            _plots(store, info, where, steps, episodes),
            section("Fields", _field_notes(store), wide(fields_table(store, steps, episodes))),
            *([section("Example episodes", *(example_section(store, each) for each in chosen))] if chosen else []),
            _disk(usage),
            _writers(info),
        )
    out.write_text(html, encoding="utf-8")
    console.emit(f"saved {text.clean(out)}, {text.size(len(html.encode()))}")


def _head(info: Mapping[str, Any], where: str | None, episodes: Episodes, steps: Steps) -> Html:
    now = text.moment(datetime.now(UTC).timestamp())
    return element(
        "header",
        element("h1", escaped(Path(info["path"]).name)),
        note(f"Made by diskreplay {dr.__version__} at {now}."),
        *map(note, sample_notes(where, episodes, steps)),
    )


def sample_notes(where: str | None, episodes: Episodes, steps: Steps) -> Iterator[str]:
    """Yield sentences that say of which episodes and steps the page is, where these are not all."""
    if where is not None:
        among = f"of {text.count(episodes.total)}"
        if episodes.asked < episodes.total:
            among = f"among {text.count(episodes.asked)} {among} that were asked"
        yield (
            f"Statistics, plots and examples are of the episodes with {where}: "
            f"{text.plural(episodes.matching, 'episode')} {among}."
        )
    read = []
    if len(episodes) < episodes.matching:
        read.append(f"{text.count(len(episodes))} of {text.plural(episodes.matching, 'episode')}")
    if len(steps.ids) < steps.total:
        read.append(f"{text.count(len(steps.ids))} of {text.plural(steps.total, 'step')}")
    if read:
        yield f"A random sample was read, the same each time: {' and '.join(read)}."
    if unread := int(np.count_nonzero(np.isnan(episodes.total_reward))):
        yield f"{text.plural(unread, 'episode')} without a total_reward: too long to be read, or with rewards of NaN."


def _damage(info: Mapping[str, Any]) -> Iterator[Html]:
    """Yield what is wrong, where something is."""
    said = {name: value for name, value in summary(info) if name in ("damage", "quarantine")}
    if info["steps_lost"]:
        said["lost"] = f"{text.plural(info['steps_lost'], 'step')} to damage"
    if not said:
        return
    parts = [facts({name: escaped(value) for name, value in said.items()}, class_="facts")]
    if entries := info["quarantine"]["entries"]:
        parts.append(wide(quarantine_table(entries, ROWS_SHOWN).html()))
    yield section("Damage", element("div", *parts, class_="warn"))


def _overview(info: Mapping[str, Any], uuid: str, usage: Mapping[str, Any]) -> Html:
    known = {"path": text.clean(info["path"]), "uuid": uuid, **dict(summary(info))}
    known = {name: value for name, value in known.items() if name not in ("damage", "quarantine")}
    return section("Store", facts({name: escaped(value) for name, value in known.items()}, class_="facts"))


def _plots(store: dr.Store, info: Mapping[str, Any], where: str | None, steps: Steps, episodes: Episodes) -> Html:
    charts = [figure(chart) for chart in charts_of(store, info, steps, episodes)]
    ended = ended_counts(info, where, episodes)
    endings = element("figure", element("figcaption", escaped("how episodes end")), shares(ended))
    return section(
        "Plots", element("div", *charts, endings, class_="figures") if any(ended.values()) else note("No episodes.")
    )


def ended_counts(info: Mapping[str, Any], where: str | None, episodes: Episodes) -> dict[str, int]:
    """Return how many episodes ended in each way: of all, or of those that were read and meet the condition."""
    kinds = ("terminated", "truncated", "cut", "open")
    if where is None:
        return {kind: int(info["episodes"][kind]) for kind in kinds}
    return {kind: int(np.count_nonzero(episodes.ended == kind)) for kind in kinds}


def _field_notes(store: dr.Store) -> Html:
    said = [note("Of all elements of a field; final observations are not counted.")]
    if len(store.schema.leaves) > FIELDS:
        said.append(note(f"The first {FIELDS} of {text.count(len(store.schema.leaves))} fields."))
    return joined(said)


def _disk(usage: Mapping[str, Any]) -> Html:
    return section("Disk use", note(usage_line(usage)), wide(usage_table(usage, FIELDS).html()))


def _writers(info: Mapping[str, Any]) -> Html:
    tables: Sequence[tuple[str, console.TextTable]] = [
        ("Writers", writers_table(info["writers"], ROWS_SHOWN)),
        ("Segments", segments_table(info["segments"], ROWS_SHOWN)),
    ]
    parts = [element("div", element("h3", escaped(name)), wide(shown.html())) for name, shown in tables]
    return section("Writers and segments", element("div", *parts, class_="beside"))
