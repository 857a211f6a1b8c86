"""`diskreplay episodes`: a table of a store's episodes, filtered and sorted."""

import csv as csv_files
import io
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from json import dumps
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.episode_leaves import cell, short
from diskreplay.cli.where import Where, compile_where, matching

TABLE_LIMIT = 50
TRIES = 20  # of a store from which episodes leave at once
COLUMNS = ("index", "id", "segment", "lane", "start", "length", "return", "terminated", "truncated", "cut", "open")

Columns = Mapping[str, NDArray[Any]]


class Ended(StrEnum):
    """How an episode ended."""

    terminated = "terminated"
    truncated = "truncated"
    cut = "cut"
    open = "open"


class SortBy(StrEnum):
    """What episodes can be sorted by, beside their fields."""

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
    sort: Annotated[
        str, typer.Option(metavar="NAME", help="Sort by age (oldest first), segment, lane, length, return or a field.")
    ] = SortBy.age,
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
    where: Where = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values, with a line of names.")] = False,
) -> None:
    """List the episodes of a store, oldest first.

    The return is the undiscounted sum of rewards; that of an open episode is its return so far. The index is the place
    in store.episodes, the id that of the first step. Episode fields follow, where the schema has any; an episode that
    was given none sorts last. Nothing is written, and a store that is being written can be listed.
    """
    bounds = Filter(min_length, max_length, min_return, max_return, tuple(ended or ()))
    if problem := bounds.contradiction():
        raise typer.BadParameter(problem)
    if json and csv:
        raise typer.BadParameter("--json and --csv exclude each other")
    with dr.open(path, mode="r") as store, console.bar("Reading rewards", in_bytes=True) as progress:
        condition = None if where is None else compile_where(where, store.schema)
        columns = read_columns(store, progress)
        key = sort_key(columns, sort)
        found = choose(columns, bounds, key, descending)
        if condition is not None:
            place = dict(zip(store.snapshot.episodes.first.tolist(), range(store.num_episodes), strict=True))
            chosen = (store.episodes[place[first]] for first in columns["id"][found].tolist())
            found = found[np.array(matching(chosen, condition), np.bool_)]
    if limit is None:
        limit = 0 if json or csv else TABLE_LIMIT
    shown = found[:limit] if limit else found
    if json:
        console.emit(text.to_json(records(columns, shown)))
    elif csv:
        console.emit(comma_separated(columns, shown))
    else:
        console.emit(f"{table(columns, shown)}\n\n{footer(columns, found, shown)}")


def with_index(columns: Columns) -> Columns:
    """Add each episode's place in `store.episodes`."""
    return {"index": np.arange(len(columns["length"])), **columns}


def read_columns(store: dr.Store, progress: console.Report) -> Columns:
    """Return the table of the episodes, with their fields; of a newer snapshot where some have left meanwhile."""
    for _ in range(TRIES):
        with suppress(dr.SegmentGone):
            return with_fields(store, with_index(store.episode_table(progress=progress)))
        store.refresh()
    return with_fields(store, with_index(store.episode_table(progress=progress)))


def with_fields(store: dr.Store, columns: Columns) -> Columns:
    """Add the episode fields, a masked array for each leaf, by its path."""
    found = {}
    for path in store.schema.leaves.keys() - store.schema.step_leaves.keys():
        values, given = store.snapshot.episode_values(path, columns["id"])
        found[path] = np.ma.masked_array(
            values, np.broadcast_to(~given.reshape(-1, *[1] * (values.ndim - 1)), values.shape)
        )
    return {**columns, **{path: found[path] for path in store.schema.leaves if path in found}}


def fields_of(columns: Columns) -> list[str]:
    """Return the paths of the episode fields among columns."""
    return [name for name in columns if name.startswith("episode/")]


def sort_key(columns: Columns, name: str) -> str:
    """Return the column that a name means: one of `SortBy`, or an episode field; BadParameter where there is none."""
    if name in list(SortBy):
        return name
    path = name if name.startswith("episode/") else f"episode/{name}"
    numbers = [field for field in fields_of(columns) if columns[field].ndim == 1]
    if path not in numbers:
        raise typer.BadParameter(f"--sort: {name!r} is not one of {', '.join([*SortBy, *map(short, numbers)])}")
    return path


def ended_as(columns: Columns, kind: Ended) -> NDArray[np.bool_]:
    """Tell for every episode whether it ended like this; one that we cut is cut, not truncated."""
    if kind is Ended.truncated:
        return columns["truncated"] & ~columns["cut"]
    return columns[kind.value].astype(np.bool_)


def choose(columns: Columns, where: Filter, sort: str, descending: bool) -> NDArray[np.intp]:
    """Give the positions of the episodes that pass, in order; equal ones by age, those without a number last."""
    found = np.flatnonzero(where.mask(columns))
    if descending:
        found = found[::-1]
    if sort == SortBy.age:
        return found
    keys = columns[sort][found]
    missing = np.ma.getmaskarray(keys) | np.isnan(np.ma.getdata(keys))
    rank = np.unique(np.ma.getdata(keys), return_inverse=True)[1]  # numbers of any dtype, in order
    return found[np.lexsort((-rank if descending else rank, missing))]


def records(columns: Columns, shown: NDArray[np.intp]) -> list[dict[str, Any]]:
    """Give the chosen episodes as one dict each."""
    picked = {name: columns[name][shown].tolist() for name in COLUMNS}
    for path in fields_of(columns):
        rows = columns[path][shown]
        picked[path] = [None if np.ma.is_masked(row) else np.ma.getdata(row).tolist() for row in rows]
    return [dict(zip(picked, values, strict=True)) for values in zip(*picked.values(), strict=True)]


def table(columns: Columns, shown: NDArray[np.intp]) -> str:
    """Lay the chosen episodes out as a table."""
    headers, fields = ("index", "id", "segment", "lane", "length", "return", "ended"), fields_of(columns)
    rows = [
        (
            *(str(row[name]) for name in headers[:4]),
            text.count(row["length"]),
            text.number(row["return"]),
            ending(row),
            *(text.NOTHING if np.ma.is_masked(columns[path][at]) else cell(columns[path][at]) for path in fields),
        )
        for at, row in zip(shown.tolist(), records(columns, shown), strict=True)
    ]
    return console.columns((*headers, *(text.clean(short(path)) for path in fields)), rows, left=("ended",))


def comma_separated(columns: Columns, shown: NDArray[np.intp]) -> str:
    """Give the chosen episodes as CSV; a field of several numbers is a list as in JSON, a missing one is empty."""
    lines, names = io.StringIO(), (*COLUMNS, *fields_of(columns))
    writer = csv_files.DictWriter(lines, names, lineterminator="\n")
    writer.writerow({name: text.csv_cell(name) for name in names})
    for row in records(columns, shown):
        writer.writerow({name: dumps(text.plain(v)) if isinstance(v, list) else v for name, v in row.items()})
    return lines.getvalue().rstrip("\n")


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
