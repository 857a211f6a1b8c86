"""Reading HTML: which elements there are, and what they say. Elements that are not closed in order are an error."""

from html.parser import HTMLParser

VOID = {"img", "meta", "path", "use"}


class Page(HTMLParser):
    """A page that was read: ``elements`` are tags with their attributes, ``words`` the text, ``urls`` what it loads."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["style"], ["script"]) and data.strip():
            self.words.append(data.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of each element of this kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def urls(self) -> list[str]:
        """What the page loads or links to."""
        names = ("src", "href", "xlink:href", "srcset", "data", "action")
        return [str(attributes[name]) for _, attributes in self.elements for name in names if name in attributes]
