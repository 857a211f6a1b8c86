"""`diskreplay report`: writes a page of HTML about a store.

Jinja2 fills in `page.html`, and escapes every value. The page loads no other file.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.look.chart import EXTRA, Chart, picture, sparkline
from diskreplay.cli.look.du import fields_table, summary as usage_line, usage_of
from diskreplay.cli.look.inspect import ROWS_SHOWN, quarantine_table, segments_table, summary, writers_table
from diskreplay.cli.report.charts import FIELDS, charts_of, statistics_of_fields
from diskreplay.cli.report.examples import choose_examples, read_parts
from diskreplay.cli.report.sample import Episodes, read_episodes, sample_steps
from diskreplay.cli.where import Where, compile_where
from diskreplay.errors import MissingExtra

MOST_EXAMPLES = 20


def report(
    path: console.StorePath,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")] = Path("report.html"),
    where: Where = None,
    examples: Annotated[
        int,
        typer.Option("--episodes", min=0, max=MOST_EXAMPLES, help="The number of example episodes."),
    ] = 4,
) -> None:
    """Write a page about a store: its contents, statistics and plots, and example episodes with their frames.

    The page is one HTML file that loads no other file and opens in any browser. A large store is sampled: the page says
    so, and has the same episodes and steps each time. Examples are the best, the worst, the median and the newest
    episode, and then others between them. With --where, statistics, plots and examples include only episodes that meet
    the condition. Needs Jinja2, matplotlib and, for frames, pillow: pip install "diskreplay[plot]".
    """
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"--out {out}: there is no folder {out.parent}")
    render = page_renderer()
    with dr.open(path) as store:
        condition = None if where is None else compile_where(where, store.schema)
        info = store.info(total_reward=False)
        with console.bar("Measuring segments", in_bytes=True) as progress:
            usage = usage_of(store, info, progress)
        with console.bar("Reading episodes") as progress:
            episodes = read_episodes(store, condition, progress)
        steps = sample_steps(store, None if where is None else episodes)
        known = {"path": info["path"], "uuid": store.uuid, **dict(summary(info))}
        damage = {name: known.pop(name) for name in ["damage", "quarantine"] if name in known}
        if info["steps_lost"]:
            damage["lost"] = f"{text.plural(info['steps_lost'], 'step')} to damage"
        page = render(
            name=Path(info["path"]).name,
            version=dr.__version__,
            now=text.moment(datetime.now(UTC).timestamp()),
            where=where,
            episodes=episodes,
            steps=steps,
            without_reward=int(np.count_nonzero(np.isnan(episodes.total_reward))),
            damage=damage,
            quarantine=quarantine_table(info["quarantine"]["entries"], ROWS_SHOWN),
            known=known,
            ended=ended_counts(info, where, episodes),
            charts=charts_of(store, info, steps, episodes),
            fields=list(statistics_of_fields(store, steps, episodes)),
            field_count=len(store.schema.leaves),
            examples=[(each, read_parts(store, each)) for each in choose_examples(episodes, examples)],
            usage=fields_table(usage, FIELDS),
            usage_line=usage_line(usage),
            writers=writers_table(info["writers"], ROWS_SHOWN),
            segments=segments_table(info["segments"], ROWS_SHOWN),
        ).encode()
    console.save(out, page)
    console.emit(f"saved {text.clean(out)}, {text.size(len(page))}")


def ended_counts(info: Mapping[str, Any], where: str | None, episodes: Episodes) -> dict[str, int]:
    """Return how many episodes ended in each way. If ``where`` is given, count only the sampled episodes."""
    kinds = ("terminated", "truncated", "cut", "open")
    if where is None:
        return {kind: int(info["episodes"][kind]) for kind in kinds}
    return {kind: int(np.count_nonzero(episodes.ended == kind)) for kind in kinds}


INCHES = (5.0, 2.7)  # the width and height of a chart, in inches


def page_renderer() -> Callable[..., str]:
    with MissingExtra.raised_for("a report", EXTRA):
        from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        finalize=_printable,
        loader=PackageLoader("diskreplay.cli.report", ""),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {"text": text, "sparkline": sparkline}
    environment.filters |= {"base64": _base64, "svg": _svg}
    return environment.get_template("page.html").render


def _printable(value: object) -> object:
    """Return HTML unchanged, and any other value as printable text. Jinja2 escapes this text."""
    return value if hasattr(value, "__html__") else text.clean(value)


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


def _svg(chart: Chart) -> bytes:
    return picture(chart, "svg", INCHES, on_page=True)
