"""`diskreplay watch`: shows the activity of a store, live."""

import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count as numbers
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.store.activity import Activity, Disk, Look, RetentionActivity
from diskreplay.store.processes import LimiterCounts, SavedSampler, WriterActivity


def watch(
    path: console.StorePath,
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            min=0.1,
            max=86400,
            callback=console.not_nan,
            metavar="SECONDS",
            help="Seconds between two updates.",
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Measure one interval, print the result, and stop.")] = False,
    count: Annotated[int | None, typer.Option("--count", min=1, metavar="N", help="Stop after N updates.")] = None,
    limiter: Annotated[
        list[str] | None,
        typer.Option(
            "--limiter",
            metavar="NAME=SPI:MIN:BUFFER",
            help="The samples_per_insert, min_size and error_buffer of a rate limiter, to see which side waits; "
            "may be repeated.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print each update as a JSON object on a line.")] = False,
) -> None:
    """Watch a store while other processes write to it.

    Shows steps and steps/s, ended episodes, saved samplers, rate limiters, the space on the disk and when it will
    be full, evicted steps, and problems. For each writer, shows the time since the last append, and how much data is
    not durable yet. On a terminal, updates replace each other until Ctrl-C; elsewhere, each update is a line. Nothing
    is written. Samplers are shown only by their files in the store: saved states, and counts of rate limiters.
    """
    limiters = [read_limiter(given) for given in limiter or ()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dr.DamagedSegmentWarning)  # `Look.problems` reports the damage
        with console.bar("Measuring segments") as progress:
            activity = Activity(path, limiters, progress)
        with activity:
            first = activity.look()  # the next look has the rates since this look
            if not (once or json) and sys.stdout.isatty():
                _draw(first, _look_again(activity, interval, count and count - 1))
                return
            for look in _look_again(activity, interval, 1 if once else count):
                if json:
                    console.emit(text.to_json(asdict(look), indent=None))
                elif once:
                    console.show(view(look))
                else:
                    console.emit(log_line(look))


def read_limiter(given: str) -> dr.RateLimiter:
    name, _, numbers = given.partition("=")
    try:
        samples_per_insert, min_size, error_buffer = numbers.split(":")
        return dr.RateLimiter(float(samples_per_insert), int(min_size), float(error_buffer), name=name, timeout=0.0)
    except ValueError as error:
        raise typer.BadParameter(
            f"--limiter must be NAME=SAMPLES_PER_INSERT:MIN_SIZE:ERROR_BUFFER, such as default=4:1000:2000, not "
            f"{given!r} ({error})"
        ) from None


# A signal that arrives just before a sleep does not interrupt it: Python calls the handler only after the sleep.
_LONGEST_SLEEP_S = 0.5


def _look_again(activity: Activity, interval: float, count: int | None) -> Iterator[Look]:
    next_at = time.monotonic()
    for _ in numbers() if count is None else range(count):
        next_at = max(next_at + interval, time.monotonic())
        while (left := next_at - time.monotonic()) > 0:
            time.sleep(min(left, _LONGEST_SLEEP_S))
        yield activity.look()


def _draw(look: Look, looks: Iterator[Look]) -> None:
    """Draw each `Look` on the whole terminal, over the previous one. At the end, print the newest `Look`."""
    terminal = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    # `Live` also redraws by itself, because the size of the terminal may change.
    live = Live(get_renderable=lambda: view(look, terminal.height), console=terminal, screen=True)
    # A signal must not end the process before `stop` has restored the terminal.
    with console.signals((signal.SIGTERM, signal.SIGHUP), _end):
        try:
            live.start(refresh=True)
            for look in looks:  # noqa: B007 - the view shows it
                live.refresh()
        finally:
            live.stop()
            console.show(view(look))


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


# The number of lines other than rows of tables: the summary, titles, headers and empty lines.
_LINES_BESIDE = 20
_LEAST_ROWS = 3


def view(look: Look, height: int | None = None) -> Group:
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
    yield "at", text.moment(look.time)
    yield "steps", steps_line(look)
    yield "episodes", episodes_line(look)
    yield "on disk", disk_line(look.disk)
    yield "retention", retention_line(look.retention)
    if look.steps_in_quarantine:
        yield "quarantine", f"{text.plural(look.steps_in_quarantine, 'step')}, not included in other counts"


def steps_line(look: Look) -> str:
    counts = [text.count(look.steps), f"{text.count(look.inserted)} inserted", *text.step_classes(vars(look))]
    return ", ".join([*counts, text.rate(look.steps_per_second)])


def episodes_line(look: Look) -> str:
    line = f"{text.count(look.episodes)} ended, {text.count(look.episodes_open)} open"
    line += f", {text.rate(look.episodes_per_second)}"
    if look.newest_episodes:
        line += f"; mean total_reward of the newest {look.newest_episodes}: {text.number(look.mean_total_reward)}"
    return line


def disk_line(disk: Disk) -> str:
    line = f"{text.size(disk.bytes)}, {text.size(disk.free)} free"
    if disk.bytes_per_hour is not None and abs(disk.bytes_per_hour) >= 1:
        line += f", {'+' if disk.bytes_per_hour > 0 else ''}{text.size(round(disk.bytes_per_hour))} an hour"
    return line if disk.full_in_s is None else f"{line}; the disk will be full in {text.duration(disk.full_in_s)}"


def retention_line(retention: RetentionActivity) -> str:
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
