"""Functions that make HTML, and escape all text.

The contents of elements and tables have the type `Html`, so a type checker refuses text that was not escaped.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import NewType

Html = NewType("Html", str)
"""Text that is already HTML."""

NOTHING = Html("")


def clean(text: object) -> str:
    """Return a text with unprintable characters escaped, since these may be commands for a terminal."""
    said = str(text)
    if said.isprintable():
        return said
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in said)


def text(value: object) -> Html:
    return Html(escape(clean(value)))


def element(tag: str, /, *content: Html, **attributes: object) -> Html:
    said = "".join(f' {key}="{text(value)}"' for key, value in attributes.items())
    return Html(f"<{tag}{said}>{''.join(content)}</{tag}>")


def table(headers: Sequence[str], rows: Sequence[Sequence[Html]], total: int = 0) -> Html:
    """Return a table of rows of cells. A header that begins with ">" marks a column of numbers, aligned to the right.

    If ``total`` is more than the number of ``rows``, the caption says how many rows are not shown.
    """
    names = [header.removeprefix(">") for header in headers]
    sides = [
        {"style": "text-align:right" if header != name else "text-align:left"}
        for header, name in zip(headers, names, strict=True)
    ]
    head = element(
        "tr", *(element("th", text(name), scope="col", **side) for name, side in zip(names, sides, strict=True))
    )
    body = (
        element("tr", *(element("td", cell, **side) for cell, side in zip(row, sides, strict=True))) for row in rows
    )
    parts = [element("thead", head), element("tbody", *body)]
    if total > len(rows):
        parts.insert(
            0, element("caption", text(f"{total - len(rows):,} more are not shown"), style="caption-side:bottom")
        )
    return element("table", *parts)


def facts(values: Mapping[str, Html]) -> Html:
    rows = (
        element("tr", element("th", text(name), scope="row"), element("td", value)) for name, value in values.items()
    )
    return element("table", element("tbody", *rows))


def image(png: bytes, alt: str) -> Html:
    return Html(f'<img src="data:image/png;base64,{b64encode(png).decode()}" alt="{text(alt)}">')
