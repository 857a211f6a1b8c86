"""Reports as a browser shows them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.report.conftest import write_images, write_vectors
from tests.testing.browser import Browser, chromium, find_chromium

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]

# What is wider than the window, but for what scrolls by itself.
WIDER = """
[...document.querySelectorAll("body *")].filter(element => !element.closest(".wide") &&
  element.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5).map(element => element.outerHTML)
"""
DECODED = "Promise.all([...document.images].map(image => image.decode().then(() => image.naturalWidth)))"
FRAMES = "document.querySelectorAll('img.moving, img.strip').length"
CONTRAST = """
(() => { const light = colour => colour.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0);
  return light(getComputedStyle(document.body).color) - light(getComputedStyle(document.body).backgroundColor); })()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    assert CHROMIUM is not None
    with chromium(CHROMIUM) as browser:
        yield browser


@pytest.mark.parametrize(("write", "pictures"), [(write_images, 8), (write_vectors, 0)])
def test_a_report_is_shown_whole_in_every_window(
    run: Callable, browser: Browser, tmp_store: Path, tmp_path: Path, write: Callable, pictures: int
) -> None:
    write(tmp_store)
    out = tmp_path / "report.html"
    assert run("report", tmp_store, "--out", out).code == 0
    for width, dark in ((1280, False), (1280, True), (400, False), (320, True)):
        browser.open(out, width, dark=dark)
        browser.value("document.querySelectorAll('details').forEach(each => each.open = true)")
        widths = browser.value(DECODED)
        assert browser.value(FRAMES) == pictures
        assert all(found > 0 for found in widths)
        assert browser.value("document.documentElement.scrollWidth") == width
        assert browser.value(WIDER) == []
        assert (browser.value(CONTRAST) > 0) is dark
        assert browser.value("document.querySelectorAll('img.chart').length") > 10
    assert browser.problems == []


def test_what_a_page_complains_about_is_noticed(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<div style='width:2000px'>x</div><img src='missing.png'><script>nothing.here</script>")
    browser.open(page, 400)
    assert browser.value(WIDER) != []
    assert any("ERR_FILE_NOT_FOUND" in problem for problem in browser.problems)
    assert any("nothing is not defined" in problem for problem in browser.problems)
    browser.problems.clear()
