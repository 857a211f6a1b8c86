"""The page of a report: its style sheet, and the pieces that sections are made of."""

from collections.abc import Iterable, Mapping

from diskreplay.markup import NOTHING, Html, element, text

# Colours of series that readers with any colour vision tell apart (Okabe and Ito 2008), darker on white.
_LIGHT = ("#0067a8", "#c05a00", "#00795a", "#a3468a", "#7a6400", "#555e66")
_DARK = ("#5bb4f0", "#f0a35e", "#45c9a4", "#e191cb", "#e0cf5a", "#b3bcc4")
SERIES = len(_LIGHT)


def _colours(colours: Iterable[str]) -> str:
    return "".join(f"--series-{at}:{colour};" for at, colour in enumerate(colours))


_STYLE = f"""
:root {{ color-scheme:light dark; --ink:#1c2126; --faint:#5c6670; --line:#dde2e7; --paper:#fff; --card:#f6f8fa;
  --warn:#fff3d6; --warn-line:#e0b040; {_colours(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink:#e4e8ec; --faint:#9aa5b0; --line:#343b42; --paper:#15191d; --card:#1d2227;
    --warn:#3a2f12; --warn-line:#8a6a1c; {_colours(_DARK)} }}
}}
{"".join(f".series-{at} {{ --series:var(--series-{at}) }} " for at in range(SERIES))}
* {{ box-sizing:border-box }}
body {{ margin:0 auto; padding:1.5rem clamp(.75rem, 3vw, 2rem) 3rem; max-width:76rem; background:var(--paper);
  color:var(--ink); font:15px/1.5 system-ui, sans-serif; overflow-wrap:anywhere }}
h1 {{ font-size:1.6rem; line-height:1.2; margin:0 }}
h2 {{ font-size:1.2rem; margin:2.2rem 0 .6rem }}
h3 {{ font-size:1rem; margin:0 0 .6rem }}
p {{ margin:.4rem 0 }}
.faint, figcaption, caption, summary {{ color:var(--faint) }}
.faint, figcaption, caption {{ font-size:.85rem }}
.warn {{ background:var(--warn); border:1px solid var(--warn-line); border-radius:6px; padding:.3rem .9rem }}
table {{ border-collapse:collapse; font-size:.87rem; font-variant-numeric:tabular-nums }}
th, td {{ padding:.22rem .7rem .22rem 0; vertical-align:top; border-bottom:1px solid var(--line) }}
th {{ font-weight:600; text-align:left; color:var(--faint) }}
thead th, .wide td {{ white-space:nowrap }}
.facts th {{ white-space:nowrap; width:1% }}
.wide {{ overflow-x:auto; margin:.4rem 0 }}
.figures {{ display:grid; grid-template-columns:repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap:.8rem }}
figure {{ margin:0; min-width:0 }}
.figures figure, .episode {{ background:var(--card); border:1px solid var(--line); border-radius:6px; padding:.7rem }}
.episode {{ margin:.8rem 0; padding:1rem }}
.episode .figures {{ gap:.4rem 1rem; margin-top:.6rem;
  grid-template-columns:repeat(auto-fill, minmax(min(100%, 17rem), 1fr)) }}
.episode .figures figure {{ border:0; padding:0 }}
.beside {{ display:flex; flex-wrap:wrap; gap:.8rem 2rem; align-items:flex-start }}
.beside > * {{ min-width:0; max-width:100% }}
.known {{ list-style:none; margin:0; padding:0; display:flex; flex-wrap:wrap; gap:.1rem 1.4rem; font-size:.87rem }}
.known span {{ color:var(--faint) }}
.frames {{ margin-top:.8rem; display:flex; flex-wrap:wrap; gap:.6rem; align-items:flex-start }}
.frames figcaption {{ flex-basis:100% }}
img {{ image-rendering:pixelated; max-width:100%; border-radius:3px }}
.moving {{ width:8rem; flex:none }}
.strip {{ flex:1 1 16rem; min-width:0; width:16rem }}
@media (max-width: 40rem) {{ .strip {{ image-rendering:auto }} }}
svg.chart {{ display:block; width:100%; height:auto; overflow:visible }}
svg.spark {{ display:block; width:5rem; height:1.1rem }}
svg text {{ font-size:10px; fill:var(--faint) }}
.across {{ text-anchor:middle }}
.up {{ text-anchor:end }}
.axis, .grid {{ stroke:var(--line); fill:none }}
.axis {{ stroke:var(--faint) }}
.line {{ fill:none; stroke:var(--series); stroke-width:1.5; stroke-linejoin:round; stroke-linecap:round }}
.points {{ fill:none; stroke:var(--series); stroke-width:3.2; stroke-linecap:round; opacity:.55 }}
.bars {{ fill:var(--series) }}
.bars.several {{ opacity:.55 }}
.legend {{ list-style:none; display:flex; flex-wrap:wrap; gap:.1rem .9rem; margin:.1rem 0 0; padding:0;
  font-size:.8rem }}
.legend li::before {{ content:""; display:inline-block; width:.8em; height:.8em; margin-right:.35em; border-radius:2px;
  background:var(--series); vertical-align:-.05em }}
.shares {{ width:100% }}
.shares td, .shares th {{ white-space:nowrap; width:1% }}
.shares td:last-child {{ width:auto; padding-right:0 }}
.share {{ display:inline-block; height:.7em; min-width:1px; background:var(--series-0); border-radius:2px }}
details > summary {{ cursor:pointer; font-size:.87rem }}
"""


def page(title: str, *sections: Html) -> Html:
    """Return a page that loads nothing: neither scripts, nor fonts, nor pictures."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", text(title)),
        element("style", Html(_STYLE)),
    )
    return Html("<!DOCTYPE html>\n" + element("html", head, element("body", *sections), lang="en") + "\n")


def section(title: str, *content: Html) -> Html:
    """Return a part of the page with a title."""
    return element("section", element("h2", text(title)), *content)


def wide(content: Html) -> Html:
    """Return what scrolls by itself where the window is narrower."""
    return element("div", content, class_="wide", tabindex=0)


def note(words: str) -> Html:
    """Return a line of small text."""
    return element("p", text(words), class_="faint")


def known(values: Mapping[str, str]) -> Html:
    """Return names and values in a line, or as many lines as they need."""
    items = (element("li", element("span", text(name)), Html(" "), text(value)) for name, value in values.items())
    return element("ul", *items, class_="known")


def shares(counts: Mapping[str, int]) -> Html:
    """Return a table of counts with a bar for the share of each."""
    total = sum(counts.values()) or 1
    rows = []
    for name, count in counts.items():
        bar = element("span", class_="share", style=f"width:{100 * count / total:.1f}%") if count else NOTHING
        cells = [element("td", text(said), style="text-align:right") for said in (f"{count:,}", f"{count / total:.1%}")]
        rows.append(element("tr", element("th", text(name), scope="row"), *cells, element("td", bar)))
    return element("table", element("tbody", *rows), class_="shares")
