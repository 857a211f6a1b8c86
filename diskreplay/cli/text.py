"""Formats values as text for users, without control characters, and as JSON for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from diskreplay.markup import clean as clean

UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
NOTHING = "-"


def one_line(error: BaseException) -> str:
    return clean(" ".join(str(error).split())) or type(error).__name__


def count(number: int | None) -> str:
    """Return text such as 1,234,567; "-" for None."""
    return NOTHING if number is None else f"{number:,}"


def step_classes(counts: Mapping[str, int]) -> list[str]:
    """Return a text such as "9 hidden" for each count that is not 0. ``counts`` has the keys of `Store.info`."""
    names = {"hidden": "hidden", "evicted": "evicted", "discarded": "discarded", "lost": "lost to damage"}
    return [f"{count(counts[f'steps_{key}'])} {name}" for key, name in names.items() if counts[f"steps_{key}"]]


def size(number: int | None) -> str:
    """Return a number of bytes as text such as 12.3 MB; "-" for None."""
    if number is None:
        return NOTHING
    amount, unit = float(number), 0
    # Take the next unit for 999.95 kB: it would be printed as 1000.0 kB.
    while abs(amount) >= (1000 if unit == 0 else 999.95) and unit < len(UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{number:,} B" if unit == 0 else f"{amount:,.1f} {UNITS[unit]}"


def number(value: float | None) -> str:
    """Return a measured number with about four significant digits: 475, 0.125, -1,234.5, 1.5e-07."""
    if value is None:
        return NOTHING
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    magnitude = abs(value)
    if magnitude >= 1e9 or magnitude < 1e-3:
        return f"{value:.3e}"
    if magnitude >= 100:
        return f"{value:,.1f}"
    return f"{value:.4g}"


def share(part: int, whole: int | None) -> str:
    return f"{100 * part / whole:.0f}%" if whole else NOTHING


def percent(part: float | None) -> str:
    """Return a share from 0 to 1 as a percentage: 12.5%; "< 0.1%" near 0, and "> 99.9%" near 1."""
    if part is None:
        return NOTHING
    if 0 < part < 0.001:
        return "< 0.1%"
    return "> 99.9%" if 0.999 < part < 1 else f"{100 * part:.1f}".removesuffix(".0") + "%"


def duration(seconds: float | None) -> str:
    """Return a duration in the largest unit with a value of at least 2: 0.4 s, 90 s, 12 min, 30 h, 4 days."""
    if seconds is None:
        return NOTHING
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.0f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def rate(per_second: float | None) -> str:
    return NOTHING if per_second is None else f"{number(float(f'{per_second:.4g}'))}/s"


def moment(value: object) -> str:
    """Return a time in UTC as text; ``value`` is seconds since 1970 or an ISO text."""
    try:
        seconds = datetime.fromisoformat(value).timestamp() if isinstance(value, str) else value
        if isinstance(seconds, (int, float)):
            return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        pass  # not a time: the value is shown unchanged
    return NOTHING if value is None else clean(value)


def plural(amount: int, thing: str) -> str:
    return f"{amount:,} {thing}" if amount == 1 else f"{amount:,} {thing}s"


def aligned(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the lines of a table: the headers, and a line for each row.

    Columns whose headers begin with > are aligned to the right. If a line is wider than ``width``, each row becomes a
    line with the column's name before each cell, and there is no line of headers.
    """
    names = [header.removeprefix(">") for header in headers]
    sides = [">" if header != name else "<" for header, name in zip(headers, names, strict=True)]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    form = "  ".join(f"{{:{side}{room}}}" for side, room in zip(sides, widths, strict=True))
    lines = [form.format(*cells).rstrip() for cells in (names, *rows)]
    if width is None or max(map(len, lines)) <= width:
        return lines
    named = (zip(names, row, strict=True) for row in rows)
    return ["  ".join(f"{name} {cell}".strip() for name, cell in cells if cell) for cells in named]


def space(bounds: Mapping[str, Any] | None) -> str:
    if not bounds:
        return NOTHING
    kind = clean(bounds.get("type", "?"))
    if kind == "Box":
        low, high = _bound(bounds.get("low")), _bound(bounds.get("high"))
        return f"Box({low} to {high})"
    if kind == "Discrete":
        start = bounds.get("start", 0)
        return f"Discrete({clean(bounds.get('n'))}" + (f" from {clean(start)})" if start else ")")
    if kind == "MultiDiscrete":
        sizes = clean(bounds.get("nvec"))
        return f"MultiDiscrete({sizes})" if len(sizes) <= 30 else "MultiDiscrete(...)"
    return kind


def _bound(value: object) -> str:
    while isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if isinstance(value, list):
        return "[...]"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}.get(str(value), clean(value))


def plain(value: Any) -> Any:
    """Return a value in a form that JSON can hold: arrays become lists, and NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def to_json(value: Any, indent: int | None = 2) -> str:
    """Return a value as JSON for any parser: ASCII, without NaN, and on one line if ``indent`` is None."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)
