from diskreplay import markup
from tests.testing.pages import Page

HOSTILE = "<script>alert(1)</script>&amp;\"'\x1b[2J\u202e\ud800"


def test_text_and_attributes_are_escaped() -> None:
    page = Page(markup.element("p", markup.text(HOSTILE), title=HOSTILE))
    ((tag, attributes),) = page.elements
    shown = "<script>alert(1)</script>&amp;\"'\\x1b[2J\\u202e\\ud800"
    assert (tag, attributes) == ("p", {"title": shown})
    assert page.words == [shown]


def test_a_table_has_numbers_to_the_right_and_says_what_it_leaves_out() -> None:
    html = markup.table(["name", ">count"], [[markup.text("a"), markup.text(1)]], total=1003)
    page = Page(html)
    assert page.words == ["1,002 more are not shown", "name", "count", "a", "1"]
    assert [cell["style"] for cell in page.all("td")] == ["text-align:left", "text-align:right"]
    assert "caption" not in markup.table(["name"], [[markup.text("a")]], total=1)


def test_facts_have_a_line_each() -> None:
    page = Page(markup.facts({"<b>": markup.text("&"), "steps": markup.text(3)}))
    assert page.words == ["<b>", "&", "steps", "3"]
    assert len(page.all("tr")) == 2


def test_an_image_lies_in_the_page() -> None:
    page = Page(markup.image(b"\x89PNG", 'a "frame"'))
    assert page.all("img") == [{"src": "data:image/png;base64,iVBORw==", "alt": 'a "frame"'}]
