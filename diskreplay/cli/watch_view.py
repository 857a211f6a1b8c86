"""What `diskreplay watch` shows of one look at a store: tables for a terminal, and a line elsewhere."""

import time
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diskreplay.cli import console, text
from diskreplay.store.activity.activity import Disk, Look, RetentionActivity
from diskreplay.store.activity.samplers import LimiterCounts, SavedSampler
from diskreplay.store.activity.writers import WriterActivity

# Lines beside the rows of tables: the summary, and titles and headers with the lines between them.
_LINES_BESIDE = 20
_LEAST_ROWS = 3


def view(look: Look, height: int | None = None) -> Group:
    """Build all that a look told, in no more rows a table than a terminal of this height has room for."""
    rows = None if height is None else max(_LEAST_ROWS, height - _LINES_BESIDE)
    parts: list[RenderableType] = [Text(text.clean(look.path), style="bold", overflow="fold"), summary(look)]
    parts += [Text(text.clean(problem), style="red") for problem in look.problems[:rows]]
    if look.writers:
        parts += [Text(), *_limited(writers_table(look.writers[:rows]), len(look.writers), rows)]
    if look.limiters:
        parts += [Text(), *_limited(limiters_table(look.limiters[:rows]), len(look.limiters), rows)]
    if look.samplers:
        parts += [Text(), *_limited(samplers_table(look.samplers[:rows]), len(look.samplers), rows)]
    return Group(*parts)


def _limited(table: Table, total: int, rows: int | None) -> Iterator[RenderableType]:
    yield table
    if rows is not None and total > rows:
        yield Text(f"{text.count(total - rows)} more")


def summary(look: Look) -> Table:
    """Build the two columns at the top."""
    lines = [
        ("at", text.moment(look.time)),
        (
            "steps",
            f"{text.count(look.steps)}, {text.count(look.inserted)} inserted, {text.rate(look.steps_per_second)}",
        ),
        ("episodes", episodes_line(look)),
        ("on disk", disk_line(look.disk)),
        ("retention", retention_line(look.retention)),
    ]
    if look.steps_in_quarantine:
        lines.append(("quarantine", f"{text.plural(look.steps_in_quarantine, 'step')}, in no other count"))
    table = Table.grid(padding=(0, 2))
    for name, value in lines:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def episodes_line(look: Look) -> str:
    """Give how many episodes ended, how fast, and the mean return of the newest."""
    line = f"{text.count(look.episodes)} ended, {text.count(look.episodes_open)} open"
    line += f", {text.rate(look.episodes_per_second)}"
    if look.newest_episodes:
        line += f"; mean return of the newest {look.newest_episodes}: {text.number(look.mean_return)}"
    return line


def disk_line(disk: Disk) -> str:
    """Give the bytes of the store and of its disk, and when that is full."""
    line = f"{text.size(disk.bytes)}, {text.size(disk.free)} free"
    if disk.bytes_per_hour is not None and abs(disk.bytes_per_hour) >= 1:
        line += f", {'+' if disk.bytes_per_hour > 0 else ''}{text.size(round(disk.bytes_per_hour))} an hour"
    return line if disk.full_in_s is None else f"{line}; the disk is full in {text.duration(disk.full_in_s)}"


def retention_line(retention: RetentionActivity) -> str:
    """Give what the store keeps, and what leaves it."""
    limits = []
    if retention.capacity is not None:
        limits.append(f"{text.count(retention.capacity)} steps")
    if retention.capacity_bytes is not None:
        limits.append(text.size(retention.capacity_bytes))
    if retention.max_age_s is not None:
        limits.append(text.duration(retention.max_age_s))
    line = f"keeps {', '.join(limits) or 'everything'}"
    if retention.share is not None:
        line += f": {100 * retention.share:.0f}% used"
        if retention.share < 1 and retention.reached_in_s is not None:
            line += f", all in {text.duration(retention.reached_in_s)}"
    if retention.gone_per_second:
        line += f"; {text.rate(retention.gone_per_second)} leave, the oldest first"
    if retention.oldest_age_s is not None:
        line += f"; the oldest step is {text.duration(retention.oldest_age_s)} old"
    return line


def writers_table(writers: Sequence[WriterActivity]) -> Table:
    """Build the table of writers."""
    headers = (">writer", "state", ">segment", ">lanes", ">steps/s", ">steps", ">appended", ">durable")
    rows = [
        (
            str(one.writer),
            one.state,
            ", ".join(map(str, one.segments)) or text.NOTHING,
            text.count(one.lanes),
            text.rate(one.steps_per_second).removesuffix("/s"),
            text.count(one.steps),
            _ago(one.seconds_since_append),
            _behind(one.durable_behind_s),
        )
        for one in writers
    ]
    return console.table("writers", headers, rows)


def _ago(seconds: float | None) -> str:
    return text.NOTHING if seconds is None else f"{text.duration(seconds)} ago"


def _behind(seconds: float | None) -> str:
    if seconds is None:
        return text.NOTHING
    return f"all but {text.duration(seconds)}" if seconds else "all"


def limiters_table(limiters: Sequence[LimiterCounts]) -> Table:
    """Build the table of rate limiters."""
    headers = ("limiter", ">drawn", ">drawn/s", ">per insert", ">draws left", ">inserts left", "held")
    rows = [
        (
            text.clean(one.name),
            text.count(one.drawn),
            text.rate(one.drawn_per_second).removesuffix("/s"),
            text.number(None if one.samples_per_insert is None else round(one.samples_per_insert, 3)),
            text.count(one.samples_until_held),
            text.count(one.inserts_until_held),
            one.held or text.NOTHING,
        )
        for one in limiters
    ]
    return console.table("rate limiters", headers, rows)


def samplers_table(samplers: Sequence[SavedSampler]) -> Table:
    """Build the table of what samplers have saved."""
    headers = ("sampler", ">saved", ">batches", ">batches/s", ">steps", "draws")
    rows = [
        (
            text.clean(one.name),
            _ago(one.seconds_since_save),
            text.count(one.batches),
            text.rate(one.batches_per_second).removesuffix("/s"),
            text.count(one.steps),
            text.clean(f"{one.view or text.NOTHING} by {one.distribution or text.NOTHING}"),
        )
        for one in samplers
    ]
    return console.table("saved samplers", headers, rows)


def log_line(look: Look) -> str:
    """Give a look in one line, for a log."""
    writing = sum(one.state == "writing" for one in look.writers)
    parts = [
        time.strftime("%H:%M:%S", time.localtime(look.time)),
        f"steps {text.count(look.steps)}",
        text.rate(look.steps_per_second),
        f"writing {writing}",
        f"episodes {text.count(look.episodes)}",
        f"return {text.number(look.mean_return)}",
        f"on disk {text.size(look.disk.bytes)}",
        f"free {text.size(look.disk.free)}",
    ]
    if look.retention.gone_per_second:
        parts.append(f"leaving {text.rate(look.retention.gone_per_second)}")
    parts += [f"held {one.held} ({text.clean(one.name)})" for one in look.limiters if one.held]
    if look.problems:
        parts.append(f"problems {len(look.problems)}")
    return "  ".join(parts)
