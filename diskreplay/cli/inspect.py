"""`diskreplay inspect`: what a store holds, from its `info()`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.repair import aside

# Rows of a table before the rest is summed up; --all shows every one.
ROWS_SHOWN = 10
# What a reader wants to see first: who is writing now, then what needs repair.
SEGMENT_STATES = ("damaged", "writing", "unknown", "dead", "foreign", "sealed")
WRITER_STATES = ("alive", "unknown", "dead", "closed")


def inspect(
    path: console.StorePath,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of tables.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="List every segment and every writer.")] = False,
) -> None:
    """Tell what a store holds.

    Its schema, steps, episodes and how they ended, statistics of returns and lengths, its segments, its writers alive
    and dead, and the bytes it takes on disk. Nothing is written, and a store that is being written can be inspected.
    Exit code 1 if a segment is damaged, or steps are in quarantine or not shown as no mark proves them.
    """
    with dr.open(path, mode="r") as store, console.bar("Reading rewards", in_bytes=True) as progress:
        info, has_aside = store.info(progress=progress), bool(aside(store.quarantine))
    if json:
        console.emit(text.to_json(info))
    else:
        console.show(report(info, all_rows=all_rows))
    if info["steps_unproven"] or has_aside or has_damage(info):
        raise typer.Exit(console.PROBLEMS)


def report(info: Mapping[str, Any], *, all_rows: bool = False) -> Group:
    """Build the whole report of `Store.info()` as something rich can print."""
    limit = None if all_rows else ROWS_SHOWN
    parts: list[RenderableType] = [Text(text.clean(info["path"]), style="bold", overflow="fold"), summary_table(info)]
    parts.append(schema_table(info["schema"]))
    if info["returns"] or info["lengths"]:
        parts.append(statistics_table(info))
    if info["segments"]:
        parts += [segments_table(info["segments"], limit), writers_table(info["writers"], limit)]
    if info["quarantine"]["entries"]:
        parts.append(quarantine_table(info["quarantine"]["entries"], limit))
    return Group(*(line for part in parts for line in (part, Text())))


def summary_table(info: Mapping[str, Any]) -> Table:
    """Build the two columns at the top: what is counted and how much of it there is."""
    table = Table.grid(padding=(0, 2))
    for name, value in summary(info):
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def summary(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Give name and value of each line at the top of the report."""
    episodes = info["episodes"]
    yield "format", f"version {info['format_version']}, created {text.moment(info['created'])}"
    yield "steps", steps_line(info)
    ended = ", ".join(f"{text.count(episodes[kind])} {kind}" for kind in ("terminated", "truncated", "cut", "open"))
    yield "episodes", f"{text.count(episodes['total'])} ({ended})"
    yield "segments", tally(info["segments"], SEGMENT_STATES)
    yield "writers", tally(info["writers"], WRITER_STATES)
    yield (
        "on disk",
        f"{text.size(info['bytes_on_disk'])}"
        f" ({text.size(info['bytes_apparent'])} apparent, {text.size(info['holes'])} of it holes)",
    )
    if info["quarantine"]["entries"]:
        yield "quarantine", quarantine_line(info["quarantine"], info["capacity_bytes"])
    if has_damage(info) or info["steps_unproven"]:
        path = text.clean(info["path"])
        helps = f"`diskreplay verify {path}` says what is wrong, `diskreplay repair {path} --dry-run` what can be done"
        yield "damage", f"{helps}; --salvage takes unproven steps" if info["steps_unproven"] else helps
    if limits := ", ".join(limits_of(info)):
        yield "limits", limits


def has_damage(info: Mapping[str, Any]) -> bool:
    """Tell whether a segment cannot be read."""
    return any(row["state"] == "damaged" for row in info["segments"])


def quarantine_line(quarantine: Mapping[str, Any], capacity_bytes: int | None) -> str:
    """Give what was set aside, which is in no other count."""
    line = (
        f"{text.count(quarantine['steps'])} steps in {text.plural(quarantine['segments'], 'segment')},"
        f" {text.size(quarantine['bytes'])}"
    )
    return line if capacity_bytes is None else f"{line}, which the limit of bytes does not count"


def limits_of(info: Mapping[str, Any]) -> Iterator[str]:
    """Give what a store is limited by beside a number of steps."""
    if info["capacity_bytes"] is not None:
        yield f"{text.size(info['capacity_bytes'])} of segments"
    if info["max_age_s"] is not None:
        yield f"{text.number(info['max_age_s'])} s since a segment was sealed"


def steps_line(info: Mapping[str, Any]) -> str:
    """Give the steps of a store beside its capacity and what left it."""
    line = text.count(info["steps"])
    if info["capacity"] is not None:
        line += f" of a capacity of {text.count(info['capacity'])} ({text.share(info['steps'], info['capacity'])})"
    elif info["capacity_bytes"] is None and info["max_age_s"] is None:
        line += ", no capacity set"
    for key, what in (
        ("steps_evicted", "evicted"),
        ("steps_lost", "lost to damage"),
        ("steps_unproven", "unproven and not shown"),
    ):
        if info[key]:
            line += f", {text.count(info[key])} {what}"
    return line


def tally(rows: Sequence[Mapping[str, Any]], states: Sequence[str]) -> str:
    """Count the rows of each state: 12 (2 writing, 10 sealed)."""
    counts = [(sum(row["state"] == state for row in rows), state) for state in states]
    named = ", ".join(f"{text.count(amount)} {state}" for amount, state in counts if amount)
    return f"{text.count(len(rows))} ({named})" if named else text.count(len(rows))


def schema_table(schema: Mapping[str, Any]) -> Table:
    """Build the table of a schema's fields."""
    rows = []
    for name, node in leaves(schema):
        shape = "x".join(str(length) for length in node["shape"]) or "scalar"
        rows.append((text.clean(name), shape, text.clean(node["dtype"]), text.space(node.get("space"))))
    return console.table("schema", ("field", "shape", "dtype", "space"), rows)


def leaves(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Walk the fields of a schema's JSON form in its order, each with its path."""
    for part in ("obs", "action", "reward"):
        yield from _leaves_of(part, schema[part])
    for part in ("extra", "episode"):
        for name, node in (schema.get(part) or {}).items():
            yield from _leaves_of(f"{part}/{name}", node)


def _leaves_of(path: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if "dict" in node:
        children = node["dict"].items()
    elif "tuple" in node:
        children = ((str(index), child) for index, child in enumerate(node["tuple"]))
    else:
        yield path, node
        return
    for key, child in children:
        yield from _leaves_of(f"{path}/{key}", child)


def statistics_table(info: Mapping[str, Any]) -> Table:
    """Build the table of the returns and lengths of ended episodes."""
    headers = ("", ">count", ">mean", ">std", ">min", ">median", ">max")
    rows = []
    for name, values in (("return", info["returns"]), ("length", info["lengths"])):
        if values:
            numbers = (text.number(values[header.lstrip(">")]) for header in headers[2:])
            rows.append((name, text.count(values["count"]), *numbers))
    return console.table("ended episodes", headers, rows)


def segments_table(segments: Sequence[Mapping[str, Any]], limit: int | None) -> console.TextTable:
    """Build the table of segments, those being written first, then the newest."""
    counted = {"lanes": "lanes", "rows": "rows", "steps": "steps"}
    if any(row["merged"] for row in segments):
        counted["merged"] = "merged"
    if any(row["steps_unproven"] for row in segments):
        counted["steps_unproven"] = "unproven"
    newest = sorted(segments, key=lambda row: (_rank(row, SEGMENT_STATES), -row["number"]))
    rows = []
    for row in newest[:limit]:
        writer = text.NOTHING if row["writer"] is None else str(row["writer"])
        counts = (text.count(row[key]) for key in counted)
        rows.append((str(row["number"]), writer, *counts, row["state"], text.size(row["bytes"])))
    headers = (">number", ">writer", *(f">{header}" for header in counted.values()), "state", ">bytes")
    return console.table("segments", headers, rows, len(newest))


def quarantine_table(entries: Sequence[Mapping[str, Any]], limit: int | None) -> console.TextTable:
    """Build the table of what was set aside, the latest first."""
    newest = sorted(entries, key=lambda row: -row["since"])
    rows = []
    for row in newest[:limit]:
        name = text.clean(row["path"]) if row["segment"] is None else str(row["segment"])
        reason, since = text.clean(row["reason"]), text.moment(row["since"])
        rows.append((name, text.count(row["steps"]), reason, since, text.size(row["bytes"])))
    return console.table("quarantine", (">segment", ">steps", "reason", "since", ">bytes"), rows, len(newest))


def writers_table(writers: Sequence[Mapping[str, Any]], limit: int | None) -> console.TextTable:
    """Build the table of writers, those alive first, then the newest."""
    newest = sorted(writers, key=lambda row: (_rank(row, WRITER_STATES), -row["writer"]))
    rows = []
    for row in newest[:limit]:
        counts = (text.count(row[key]) for key in ("segments", "lanes", "steps"))
        rows.append((str(row["writer"]), row["state"], *counts))
    return console.table("writers", (">writer", "state", ">segments", ">lanes", ">steps"), rows, len(newest))


def _rank(row: Mapping[str, Any], states: Sequence[str]) -> int:
    return states.index(row["state"]) if row["state"] in states else len(states)
