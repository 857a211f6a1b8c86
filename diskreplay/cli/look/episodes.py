"""`diskreplay episodes`: a table of a store's episodes, filtered and sorted."""

import csv as csv_files
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from json import dumps
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.look.show import cell, short
from diskreplay.cli.where import RIGHT_NAMES, Where, compile_where, matching

TABLE_LIMIT = 50
TRIES = 20  # the maximum number of attempts to read a store while its segments are evicted
COLUMNS = (
    *("index", "id", "segment", "lane", "start", "length", "hidden_steps", "total_reward"),
    *("terminated", "truncated", "cut", "open"),
)

Columns = Mapping[str, NDArray[Any]]
Bounds = Mapping[str, tuple[float | None, float | None]]


Ended = StrEnum("Ended", ["terminated", "truncated", "cut", "open"])

SortBy = StrEnum("SortBy", ["age", "segment", "lane", "length", "hidden_steps", "total_reward"])
"""The names that --sort accepts in addition to episode fields."""


def episodes(
    path: console.StorePath,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array of episodes instead of a table.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help=f"Episodes to show; 0: all. Default: {TABLE_LIMIT}; with --json or --csv, all."),
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="NAME", help=f"Sort by {', '.join(SortBy)} or a field; age sorts oldest first.")
    ] = SortBy.age,
    descending: Annotated[
        bool, typer.Option("--desc", "--reverse", help="Largest first; for age, newest first.")
    ] = False,
    min_length: Annotated[int | None, typer.Option(help="Only episodes of at least this many steps.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Only episodes of at most this many steps.")] = None,
    min_total_reward: Annotated[
        float | None, typer.Option(help="Only episodes with at least this total_reward.")
    ] = None,
    max_total_reward: Annotated[
        float | None, typer.Option(help="Only episodes with at most this total_reward.")
    ] = None,
    ended: Annotated[
        list[Ended] | None,
        typer.Option(
            help="Only episodes that ended like this; may be repeated. "
            "truncated: by the environment; cut: by diskreplay; open: not yet."
        ),
    ] = None,
    where: Where = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values, with a header line.")] = False,
) -> None:
    """List the episodes of a store, oldest first.

    total_reward is the undiscounted sum of rewards. For an open episode, it is the sum so far. Episodes include hidden
    steps. hidden_steps is the number of steps that the capacity or the age limit hides from samplers. index is the
    position in store.episodes, and id is the id of the first step. The last columns are the episode fields. If the
    table is sorted by a field, episodes without a value are last. Nothing is written, and other processes may write to
    the store meanwhile.
    """
    bounds = {"length": (min_length, max_length), "total_reward": (min_total_reward, max_total_reward)}
    for name, (low, high) in bounds.items():
        if low is not None and high is not None and low > high:
            option = name.replace("_", "-")
            raise typer.BadParameter(f"--min-{option} {low} is more than --max-{option} {high}")
    if json and csv:
        raise typer.BadParameter("--json and --csv exclude each other")
    with dr.open(path, mode="r") as store, console.bar("Reading rewards", in_bytes=True) as progress:
        condition = None if where is None else compile_where(where, store.schema)
        columns = read_columns(store, progress)
        key = sort_key(columns, sort)
        found = in_order(columns, passing(columns, bounds, ended or ()), key, descending)
        if condition is not None:
            chosen = (store.episodes[at] for at in columns["index"][found].tolist())
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
    return {"index": np.arange(len(columns["length"])), **columns}


def read_columns(store: dr.Store, progress: console.Report) -> Columns:
    """Return columns with properties and fields of all episodes. If a segment is evicted meanwhile, read again."""
    for _ in range(TRIES):
        with suppress(dr.SegmentGone):
            return with_fields(store, with_index(store.episode_table(progress=progress)))
        store.refresh()
    return with_fields(store, with_index(store.episode_table(progress=progress)))


def with_fields(store: dr.Store, columns: Columns) -> Columns:
    """Return the columns, and a masked array for each episode field, by path. Missing values are masked."""
    found = {**columns}
    for path in store.schema.leaves:
        if path in store.schema.step_leaves:
            continue
        values, given = store.snapshot.episode_values(path, columns["id"])
        found[path] = np.ma.masked_array(
            values, np.broadcast_to(~given.reshape(-1, *[1] * (values.ndim - 1)), values.shape)
        )
    return found


def fields_of(columns: Columns) -> list[str]:
    return [name for name in columns if name.startswith("episode/")]


def sort_key(columns: Columns, name: str) -> str:
    if name in list(SortBy):
        return name
    path = name if name.startswith("episode/") else f"episode/{name}"
    numbers = [field for field in fields_of(columns) if columns[field].ndim == 1]
    if path not in numbers:
        known = RIGHT_NAMES.get(name) or f"not one of {', '.join([*SortBy, *map(short, numbers)])}"
        raise typer.BadParameter(f"--sort: {name!r} is {known}")
    return path


def ended_as(columns: Columns, kind: Ended) -> NDArray[np.bool_]:
    """Return whether each episode ended as ``kind``. A cut episode is not truncated."""
    if kind is Ended.truncated:
        return columns["truncated"] & ~columns["cut"]
    return columns[kind.value].astype(np.bool_)


def passing(columns: Columns, bounds: Bounds, ended: Sequence[Ended]) -> NDArray[np.intp]:
    keep = np.ones(len(columns["length"]), np.bool_)
    for name, (low, high) in bounds.items():
        if low is not None:
            keep &= columns[name] >= low
        if high is not None:
            keep &= columns[name] <= high
    if ended:
        keep &= np.logical_or.reduce([ended_as(columns, kind) for kind in ended])
    return np.flatnonzero(keep)


def in_order(columns: Columns, found: NDArray[np.intp], sort: str, descending: bool) -> NDArray[np.intp]:
    """Return the indices ``found`` sorted by a column, then by age; missing values and NaN come last."""
    if descending:
        found = found[::-1]
    if sort == SortBy.age:
        return found
    keys = columns[sort][found]
    missing = np.ma.getmaskarray(keys) | np.isnan(np.ma.getdata(keys))
    # values of some dtypes cannot be negated, but ranks can
    rank = np.unique(np.ma.getdata(keys), return_inverse=True)[1]
    return found[np.lexsort((-rank if descending else rank, missing))]


def records(columns: Columns, shown: NDArray[np.intp]) -> list[dict[str, Any]]:
    picked = {name: columns[name][shown].tolist() for name in COLUMNS}
    for path in fields_of(columns):
        rows = columns[path][shown]
        picked[path] = [None if np.ma.is_masked(row) else np.ma.getdata(row).tolist() for row in rows]
    return [dict(zip(picked, values, strict=True)) for values in zip(*picked.values(), strict=True)]


def table(columns: Columns, shown: NDArray[np.intp]) -> str:
    names, fields = ("index", "id", "segment", "lane", "length", "hidden_steps", "total_reward"), fields_of(columns)
    rows = [
        (
            *(str(row[name]) for name in names[:4]),
            text.count(row["length"]),
            text.count(row["hidden_steps"]),
            text.number(row["total_reward"]),
            ending(row),
            *(text.NOTHING if np.ma.is_masked(columns[path][at]) else cell(columns[path][at]) for path in fields),
        )
        for at, row in zip(shown.tolist(), records(columns, shown), strict=True)
    ]
    headers = *(f">{name}" for name in names), "ended", *(f">{text.clean(short(path))}" for path in fields)
    return console.columns(headers, rows)


def comma_separated(columns: Columns, shown: NDArray[np.intp]) -> str:
    """Return the episodes at the indices ``shown`` as CSV. A vector is a list as in JSON, and a missing value is empty.

    No spreadsheet evaluates a cell as a formula, because values are numbers, and field names begin with ``episode/``.
    """
    lines, names = io.StringIO(), (*COLUMNS, *fields_of(columns))
    writer = csv_files.DictWriter(lines, names, lineterminator="\n")
    writer.writerow({name: text.clean(name) for name in names})
    for row in records(columns, shown):
        writer.writerow({name: dumps(text.plain(v)) if isinstance(v, list) else v for name, v in row.items()})
    return lines.getvalue().rstrip("\n")


def ending(row: Mapping[str, Any]) -> str:
    if row["cut"]:
        return "terminated, cut" if row["terminated"] else "cut"
    names = [name for name in ("terminated", "truncated", "open") if row[name]]
    return ", ".join(names) or text.NOTHING


def footer(columns: Columns, found: NDArray[np.intp], shown: NDArray[np.intp]) -> str:
    total = len(columns["length"])
    line = text.plural(len(found), "episode")
    if len(found) < total:
        line += f" of {text.count(total)}"
    if len(shown) < len(found):
        line += f", {text.count(len(shown))} shown (--limit 0 for all)"
    if len(found):
        # The mean of inf and -inf is NaN. This needs no warning.
        with np.errstate(invalid="ignore"):
            length, reward = columns["length"][found].mean(), columns["total_reward"][found].mean()
        line += f"; mean length {text.number(length)}, mean total_reward {text.number(reward)}"
    return line
