"""`diskreplay episodes`: a table of a store's episodes, filtered and sorted."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.cli import console, text

TABLE_LIMIT = 50
COLUMNS = ("index", "id", "segment", "lane", "start", "length", "return", "terminated", "truncated", "cut", "open")

Columns = Mapping[str, NDArray[Any]]


class Ended(StrEnum):
    """How an episode ended."""

    terminated = "terminated"
    truncated = "truncated"
    cut = "cut"
    open = "open"


class SortBy(StrEnum):
    """What episodes can be sorted by."""

    age = "age"
    segment = "segment"
    lane = "lane"
    length = "length"
    return_ = "return"


@dataclass(frozen=True)
class Filter:
    """Which episodes to show; None lets all through."""

    min_length: int | None = None
    max_length: int | None = None
    min_return: float | None = None
    max_return: float | None = None
    ended: tuple[Ended, ...] = ()

    def contradiction(self) -> str | None:
        """Say which two bounds leave nothing between them, if any do."""
        for name in ("length", "return"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None and high is not None and low > high:
                return f"--min-{name} {low} is more than --max-{name} {high}"
        return None

    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        """Tell for every episode whether it passes."""
        keep = np.ones(len(columns["length"]), np.bool_)
        bounds = (("length", self.min_length, self.max_length), ("return", self.min_return, self.max_return))
        for name, low, high in bounds:
            if low is not None:
                keep &= columns[name] >= low
            if high is not None:
                keep &= columns[name] <= high
        if self.ended:
            keep &= np.logical_or.reduce([ended_as(columns, kind) for kind in self.ended])
        return keep


def episodes(
    path: console.StorePath,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array of episodes instead of a table.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help=f"Show at most so many, 0 for all; if not given {TABLE_LIMIT}, with --json all."),
    ] = None,
    sort: Annotated[SortBy, typer.Option(help="Sort by this; age: oldest first.")] = SortBy.age,
    descending: Annotated[
        bool, typer.Option("--desc", "--reverse", help="Largest first; with age newest first.")
    ] = False,
    min_length: Annotated[int | None, typer.Option(help="Only episodes of at least so many steps.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Only episodes of at most so many steps.")] = None,
    min_return: Annotated[float | None, typer.Option(help="Only episodes with at least this return.")] = None,
    max_return: Annotated[float | None, typer.Option(help="Only episodes with at most this return.")] = None,
    ended: Annotated[
        list[Ended] | None,
        typer.Option(
            help="Only episodes that ended like this; give it again for more. "
            "truncated: by the environment; cut: by diskreplay; open: not yet."
        ),
    ] = None,
) -> None:
    """List the episodes of a store, oldest first.

    The return is the undiscounted sum of rewards; that of an open episode is its return so far. The index is the place
    in store.episodes, the id that of the first step. Nothing is written, and a store that is being written can be
    listed.
    """
    where = Filter(min_length, max_length, min_return, max_return, tuple(ended or ()))
    if problem := where.contradiction():
        raise typer.BadParameter(problem)
    with dr.open(path, mode="r") as store, console.bar("Reading episodes") as progress:
        columns = with_index(store.episode_table(progress=progress))
    found = choose(columns, where, sort, descending)
    if limit is None:
        limit = 0 if json else TABLE_LIMIT
    shown = found[:limit] if limit else found
    if json:
        console.emit(text.to_json(records(columns, shown)))
    else:
        console.emit(f"{table(columns, shown)}\n\n{footer(columns, found, shown)}")


def with_index(columns: Columns) -> Columns:
    """Add each episode's place in `store.episodes`."""
    return {"index": np.arange(len(columns["length"])), **columns}


def ended_as(columns: Columns, kind: Ended) -> NDArray[np.bool_]:
    """Tell for every episode whether it ended like this; one that we cut is cut, not truncated."""
    if kind is Ended.truncated:
        return columns["truncated"] & ~columns["cut"]
    return columns[kind.value].astype(np.bool_)


def choose(columns: Columns, where: Filter, sort: SortBy, descending: bool) -> NDArray[np.intp]:
    """Give the positions of the episodes that pass, in order; equal ones by age, those without a number last."""
    found = np.flatnonzero(where.mask(columns))
    if descending:
        found = found[::-1]
    if sort is SortBy.age:
        return found
    keys = columns[sort.value][found].astype(np.float64)
    return found[np.argsort(-keys if descending else keys, kind="stable")]


def records(columns: Columns, shown: NDArray[np.intp]) -> list[dict[str, Any]]:
    """Give the chosen episodes as one dict each."""
    picked = {name: columns[name][shown].tolist() for name in COLUMNS}
    return [dict(zip(picked, values, strict=True)) for values in zip(*picked.values(), strict=True)]


def table(columns: Columns, shown: NDArray[np.intp]) -> str:
    """Lay the chosen episodes out as a table."""
    headers = ("index", "id", "segment", "lane", "length", "return", "ended")
    rows = [
        (*(str(row[name]) for name in headers[:4]), text.count(row["length"]), text.number(row["return"]), ending(row))
        for row in records(columns, shown)
    ]
    return text.aligned(headers, rows, left=("ended",))


def ending(row: Mapping[str, Any]) -> str:
    """Name how an episode ended; an environment may say both at once."""
    if row["cut"]:
        return "terminated, cut" if row["terminated"] else "cut"
    names = [name for name in ("terminated", "truncated", "open") if row[name]]
    return ", ".join(names) or text.NOTHING


def footer(columns: Columns, found: NDArray[np.intp], shown: NDArray[np.intp]) -> str:
    """Sum up below the table what it shows and what it leaves out."""
    total = len(columns["length"])
    line = text.plural(len(found), "episode")
    if len(found) < total:
        line += f" of {text.count(total)}"
    if len(shown) < len(found):
        line += f", {text.count(len(shown))} shown (--limit 0 for all)"
    if len(found):
        # Returns may be infinite both ways; their mean is then no number, and no reason for a warning.
        with np.errstate(invalid="ignore"):
            length, reward = columns["length"][found].mean(), columns["return"][found].mean()
        line += f"; mean length {text.number(length)}, mean return {text.number(reward)}"
    return line
