"""`diskreplay inspect`: shows the contents of a store, from its `info()`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.repair import aside

# The maximum number of rows of a table without --all.
ROWS_SHOWN = 10
# The states of segments in the order of the table: damaged segments first, then segments that may still be written.
SEGMENT_STATES = ("damaged", "writing", "unknown", "dead", "foreign", "sealed")
WRITER_STATES = ("alive", "unknown", "dead", "closed")

Row = Mapping[str, Any]


def inspect(
    path: console.StorePath,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of tables.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="List every segment and every writer.")] = False,
) -> None:
    """Show the contents of a store.

    Prints the schema, steps, episodes and how they ended, statistics of length and total_reward, segments, living and
    dead writers, and bytes on disk. Lengths and rewards include hidden steps. Nothing is written, and other processes
    may write to the store meanwhile. Exit code 1 if a segment is damaged, or if steps are unproven or in quarantine.
    """
    with dr.open(path, mode="r") as store, console.bar("Reading rewards", in_bytes=True) as progress:
        info, has_aside = store.info(progress=progress), bool(aside(store.quarantine))
    problems = info["steps_unproven"] or has_aside or has_damage(info)
    console.tell(info, [] if json else report(info, all_rows=all_rows), json=json, problems=problems)


def report(info: Mapping[str, Any], *, all_rows: bool = False) -> Group:
    limit = None if all_rows else ROWS_SHOWN
    parts: list[RenderableType] = [
        Text(text.clean(info["path"]), style="bold", overflow="fold"),
        console.facts(summary(info)),
    ]
    parts.append(schema_table(info["schema"]))
    if info["length"]:
        parts.append(statistics_table(info))
    if info["segments"]:
        parts += [segments_table(info["segments"], limit), writers_table(info["writers"], limit)]
    if info["quarantine"]["entries"]:
        parts.append(quarantine_table(info["quarantine"]["entries"], limit))
    return Group(*(line for part in parts for line in (part, Text())))


def summary(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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
        helps = f"`diskreplay verify {path}` lists the problems, `diskreplay repair {path} --dry-run` the repairs"
        yield "damage", f"{helps}; --salvage adds unproven steps" if info["steps_unproven"] else helps
    if limits := ", ".join(limits_of(info)):
        yield "limits", limits


def has_damage(info: Mapping[str, Any]) -> bool:
    return any(row["state"] == "damaged" for row in info["segments"])


def quarantine_line(quarantine: Mapping[str, Any], capacity_bytes: int | None) -> str:
    line = (
        f"{text.count(quarantine['steps'])} steps in {text.plural(quarantine['segments'], 'segment')},"
        f" {text.size(quarantine['bytes'])}"
    )
    return line if capacity_bytes is None else f"{line}, which the limit of bytes does not count"


def limits_of(info: Mapping[str, Any]) -> Iterator[str]:
    if info["capacity_bytes"] is not None:
        yield f"{text.size(info['capacity_bytes'])} of segments"
    if info["max_age_s"] is not None:
        yield f"{text.number(info['max_age_s'])} s since a segment was sealed"


def steps_line(info: Mapping[str, Any]) -> str:
    line = text.count(info["steps"])
    if info["capacity"] is not None:
        line += f" of a capacity of {text.count(info['capacity'])} ({text.share(info['steps'], info['capacity'])})"
    elif info["capacity_bytes"] is None and info["max_age_s"] is None:
        line += ", no capacity set"
    line += "".join(f", {part}" for part in text.step_classes(info))
    if info["steps_inserted"] != info["steps"]:
        line += f", {text.count(info['steps_inserted'])} inserted"
    if info["steps_unproven"]:
        line += f", {text.count(info['steps_unproven'])} unproven and not shown"
    return line


def tally(rows: Sequence[Mapping[str, Any]], states: Sequence[str]) -> str:
    """Return the number of ``rows`` and the number in each state, such as "12 (2 writing, 10 sealed)"."""
    counts = [(sum(row["state"] == state for row in rows), state) for state in states]
    named = ", ".join(f"{text.count(amount)} {state}" for amount, state in counts if amount)
    return f"{text.count(len(rows))} ({named})" if named else text.count(len(rows))


def schema_table(schema: Mapping[str, Any]) -> console.TextTable:
    columns: Mapping[str, Callable[[tuple[str, dr.Field]], str]] = {
        "field": lambda leaf: text.clean(leaf[0]),
        "shape": lambda leaf: "x".join(map(str, leaf[1].shape)) or "scalar",
        "dtype": lambda leaf: leaf[1].dtype.name,
        "space": lambda leaf: text.space(leaf[1].space),
    }
    return console.TextTable("schema", columns, [*dr.Schema.from_json(schema).leaves.items()])


def statistics_table(info: Mapping[str, Any]) -> console.TextTable:
    rows = [{"": name, **info[name]} for name in ("length", "total_reward") if info[name]]
    numbers = {f">{key}": _formatted(text.number, key) for key in ("mean", "std", "min", "median", "max")}
    columns = {"": _formatted(str, ""), ">count": _formatted(text.count, "count"), **numbers}
    return console.TextTable("ended episodes", columns, rows)


def segments_table(segments: Sequence[Row], limit: int | None) -> console.TextTable:
    """Build the table of segments in the order of `SEGMENT_STATES`. In each state, the newest segment is first."""
    counted = {"lanes": "lanes", "rows": "rows", "steps": "steps"}
    optional = {f"steps_{name}": name for name in ("hidden", "evicted", "discarded", "lost")}
    optional |= {"merged": "merged", "steps_unproven": "unproven"}
    counted |= {key: header for key, header in optional.items() if any(row[key] for row in segments)}
    columns = {
        ">number": _formatted(str, "number"),
        ">writer": lambda row: text.NOTHING if row["writer"] is None else str(row["writer"]),
        **{f">{header}": _formatted(text.count, key) for key, header in counted.items()},
        "state": _formatted(str, "state"),
        ">bytes": _formatted(text.size, "bytes"),
    }
    newest = sorted(segments, key=lambda row: (_rank(row, SEGMENT_STATES), -row["number"]))
    return console.TextTable("segments", columns, newest, limit)


def quarantine_table(entries: Sequence[Row], limit: int | None) -> console.TextTable:
    columns = {
        ">segment": lambda row: text.clean(row["path"] if row["segment"] is None else row["segment"]),
        ">steps": _formatted(text.count, "steps"),
        "reason": _formatted(text.clean, "reason"),
        "since": _formatted(text.moment, "since"),
        ">bytes": _formatted(text.size, "bytes"),
    }
    return console.TextTable("quarantine", columns, sorted(entries, key=lambda row: -row["since"]), limit)


def writers_table(writers: Sequence[Row], limit: int | None) -> console.TextTable:
    counts = {f">{key}": _formatted(text.count, key) for key in ("segments", "lanes", "steps")}
    columns = {">writer": _formatted(str, "writer"), "state": _formatted(str, "state"), **counts}
    newest = sorted(writers, key=lambda row: (_rank(row, WRITER_STATES), -row["writer"]))
    return console.TextTable("writers", columns, newest, limit)


def _formatted(say: Callable[[Any], str], key: str) -> Callable[[Row], str]:
    return lambda row: say(row[key])


def _rank(row: Mapping[str, Any], states: Sequence[str]) -> int:
    return states.index(row["state"]) if row["state"] in states else len(states)
