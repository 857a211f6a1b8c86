"""What `diskreplay watch` shows of one look at a store: tables for a terminal, and a line elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
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
    parts: list[RenderableType] = [
        Text(text.clean(look.path), style="bold", overflow="fold"),
        console.facts(summary(look)),
    ]
    parts += [Text(text.clean(problem), style="red") for problem in look.problems[:rows]]
    tables: list[tuple[str, Mapping[str, Callable[[Any], str]], Sequence[Any]]] = [
        ("writers", WRITERS, look.writers),
        ("rate limiters", LIMITERS, look.limiters),
        ("saved samplers", SAMPLERS, look.samplers),
    ]
    for title, columns, shown in tables:
        if shown:
            parts += [Text(), console.TextTable(title, columns, shown, rows, hint="")]
    return Group(*parts)


def summary(look: Look) -> Iterator[tuple[str, str]]:
    """Give name and value of each line at the top."""
    yield "at", text.moment(look.time)
    yield "steps", steps_line(look)
    yield "episodes", episodes_line(look)
    yield "on disk", disk_line(look.disk)
    yield "retention", retention_line(look.retention)
    if look.steps_in_quarantine:
        yield "quarantine", f"{text.plural(look.steps_in_quarantine, 'step')}, in no other class"


def steps_line(look: Look) -> str:
    """Give the visible steps, the inserted ones by their classes, and how fast they come."""
    counts = [text.count(look.steps), f"{text.count(look.inserted)} inserted", *text.step_classes(vars(look))]
    return ", ".join([*counts, text.rate(look.steps_per_second)])


def episodes_line(look: Look) -> str:
    """Give how many episodes ended, how fast, and the mean total_reward of the newest."""
    line = f"{text.count(look.episodes)} ended, {text.count(look.episodes_open)} open"
    line += f", {text.rate(look.episodes_per_second)}"
    if look.newest_episodes:
        line += f"; mean total_reward of the newest {look.newest_episodes}: {text.number(look.mean_total_reward)}"
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


def _ago(seconds: float | None) -> str:
    return text.NOTHING if seconds is None else f"{text.duration(seconds)} ago"


def _behind(seconds: float | None) -> str:
    if seconds is None:
        return text.NOTHING
    return f"all but {text.duration(seconds)}" if seconds else "all"


def _a_second(rate: float | None) -> str:
    return text.rate(rate).removesuffix("/s")


def _ratio(samples_per_insert: float | None) -> str:
    return text.number(None if samples_per_insert is None else round(samples_per_insert, 3))


WRITERS: Mapping[str, Callable[[WriterActivity], str]] = {
    ">writer": lambda one: str(one.writer),
    "state": lambda one: one.state,
    ">segment": lambda one: ", ".join(map(str, one.segments)) or text.NOTHING,
    ">lanes": lambda one: text.count(one.lanes),
    ">steps/s": lambda one: _a_second(one.steps_per_second),
    ">steps": lambda one: text.count(one.steps),
    ">appended": lambda one: _ago(one.seconds_since_append),
    ">durable": lambda one: _behind(one.durable_behind_s),
}
LIMITERS: Mapping[str, Callable[[LimiterCounts], str]] = {
    "limiter": lambda one: text.clean(one.name),
    ">drawn": lambda one: text.count(one.drawn),
    ">drawn/s": lambda one: _a_second(one.drawn_per_second),
    ">per insert": lambda one: _ratio(one.samples_per_insert),
    ">draws left": lambda one: text.count(one.samples_until_held),
    ">inserts left": lambda one: text.count(one.inserts_until_held),
    "held": lambda one: one.held or text.NOTHING,
}
SAMPLERS: Mapping[str, Callable[[SavedSampler], str]] = {
    "sampler": lambda one: text.clean(one.name),
    ">saved": lambda one: _ago(one.seconds_since_save),
    ">batches": lambda one: text.count(one.batches),
    ">batches/s": lambda one: _a_second(one.batches_per_second),
    ">steps": lambda one: text.count(one.steps),
    "draws": lambda one: text.clean(f"{one.view or text.NOTHING} by {one.distribution or text.NOTHING}"),
}


def log_line(look: Look) -> str:
    """Give a look in one line, for a log."""
    writing = sum(one.state == "writing" for one in look.writers)
    parts = [
        time.strftime("%H:%M:%S", time.localtime(look.time)),
        f"steps {text.count(look.steps)}",
        text.rate(look.steps_per_second),
        f"writing {writing}",
        f"episodes {text.count(look.episodes)}",
        f"total_reward {text.number(look.mean_total_reward)}",
        f"on disk {text.size(look.disk.bytes)}",
        f"free {text.size(look.disk.free)}",
    ]
    if look.retention.gone_per_second:
        parts.append(f"leaving {text.rate(look.retention.gone_per_second)}")
    parts += [f"held {one.held} ({text.clean(one.name)})" for one in look.limiters if one.held]
    if look.problems:
        parts.append(f"problems {len(look.problems)}")
    return "  ".join(parts)
