"""`diskreplay du`: the disk usage of fields and segments."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.look.inspect import ROWS_SHOWN
from diskreplay.retention.policy import disk_usage
from diskreplay.segments.damage.quarantine import QUARANTINE
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import read_root

# The arrays of a segment that are not fields of the schema: {name: bytes per row}.
OWN_ARRAYS = {layout.DONE: 1, layout.TIME: 8, layout.PRIORITY: 8}
REST = "documents, counters and checksums"
SEGMENTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    ">number": lambda row: str(row["number"]),
    ">steps": lambda row: text.count(row["steps"]),
    ">bytes": lambda row: text.size(row["bytes"]),
    ">holes": lambda row: text.size(row["holes"]),
}


def du(
    path: console.StorePath,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of tables.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="List every segment.")] = False,
) -> None:
    """Show the disk usage of a store by field and by segment.

    For each field, the table has the bytes of a row by the schema, and the bytes on disk per visible step. The bytes on
    disk include reserved space and evicted steps. Holes are parts of files that take no space on disk. Quarantine and
    saved states of samplers are listed separately. Nothing is written.
    """
    with dr.open(path) as store, console.bar("Measuring segments", in_bytes=True) as progress:
        usage = usage_of(store, store.info(total_reward=False), progress)
    console.tell(usage, [] if json else report(usage, all_rows=all_rows), json=json)


def report(usage: Mapping[str, Any], *, all_rows: bool) -> Group:
    segments = sorted(usage["segments"], key=lambda row: -row["bytes"])
    return Group(
        Text(text.clean(usage["path"]), style="bold", overflow="fold"),
        Text(summary(usage)),
        Text(),
        fields_table(usage),
        Text(),
        console.TextTable("segments, largest first", SEGMENTS, segments, None if all_rows else ROWS_SHOWN),
    )


def summary(usage: Mapping[str, Any]) -> str:
    line = f"{text.size(usage['bytes'])} on disk, {text.size(usage['holes'])} of holes"
    line += f"; {text.count(usage['steps'])} steps" if usage["steps"] else ""
    for name in ("quarantine", "samplers", "other"):
        if usage[name]:
            line += f"; {text.size(usage[name])} {'outside segments' if name == 'other' else f'in {name}'}"
    return line


def fields_table(usage: Mapping[str, Any], limit: int | None = None) -> console.TextTable:
    columns: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
        "field": lambda row: text.clean(row["field"]),
        ">row": lambda row: text.size(row["row_bytes"]),
        ">a step": lambda row: text.size(None if row["bytes_per_step"] is None else round(row["bytes_per_step"])),
        ">bytes": lambda row: text.size(row["bytes"]),
        ">share": lambda row: text.share(row["bytes"], usage["bytes"]),
    }
    return console.TextTable("fields", columns, usage["fields"], limit)


def usage_of(store: dr.Store, info: Mapping[str, Any], progress: console.Report) -> dict[str, Any]:
    root = read_root(store.path)
    fields: Counter[str] = Counter()
    leaves = [*store.schema.leaves, *OWN_ARRAYS, layout.EPISODES]
    segments = []
    done, total = 0, sum(known["bytes"] for known in info["segments"])
    for known in info["segments"]:
        folder = root.segment_path(known["number"])
        on_disk, apparent = disk_usage(folder)
        own = {leaf: disk_usage(folder / leaf)[0] for leaf in leaves}
        fields.update(own)
        fields[REST] += on_disk - sum(own.values())
        segments.append(
            {"number": known["number"], "steps": known["steps"], "bytes": on_disk, "holes": max(0, apparent - on_disk)}
        )
        progress(done := done + known["bytes"], total)
    places = {"quarantine": QUARANTINE, "samplers": layout.SAMPLERS}
    outside = {name: disk_usage(root.folder / place)[0] for name, place in places.items()}
    rows, steps = {path: leaf.row_bytes for path, leaf in store.schema.leaves.items()} | OWN_ARRAYS, info["steps"]
    return {
        "path": info["path"],
        "steps": steps,
        "bytes": info["bytes_on_disk"],
        "apparent": info["bytes_apparent"],
        "holes": info["holes"],
        "fields": [
            {
                "field": name,
                "row_bytes": rows.get(name),
                "bytes": nbytes,
                "bytes_per_step": nbytes / steps if steps else None,
            }
            for name, nbytes in fields.most_common()
            if nbytes or name in store.schema.leaves
        ],
        "segments": segments,
        **outside,
        "other": max(0, info["bytes_on_disk"] - sum(fields.values()) - sum(outside.values())),
    }
