"""The page of a report: Jinja2 fills in `page.html`, which escapes every value and loads nothing."""

from base64 import b64encode
from collections.abc import Callable

from diskreplay.cli import text
from diskreplay.cli.chart import EXTRA, Chart, picture, sparkline
from diskreplay.errors import MissingExtra

INCHES = (5.0, 2.7)  # of a chart, whose text is 10 points high


def page_renderer() -> Callable[..., str]:
    """Return the function that fills in the page, with its values by keyword."""
    with MissingExtra.raised_for("a report", EXTRA):
        from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        finalize=_printable,
        loader=PackageLoader("diskreplay.cli.report", ""),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {"text": text, "sparkline": sparkline}
    environment.filters |= {"base64": _base64, "svg": _svg}
    return environment.get_template("page.html").render


def _printable(value: object) -> object:
    """Return HTML unchanged, and any other value as printable text, which Jinja2 escapes."""
    return value if hasattr(value, "__html__") else text.clean(value)


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


def _svg(chart: Chart) -> bytes:
    return picture(chart, "svg", INCHES, on_page=True)
