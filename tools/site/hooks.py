"""What mkdocs does not do by itself: pages of files outside docs/, and the reference of the command line.

The README is the home page. Whatever a page links to that lies in the repository and outside docs/ becomes a page
below repository/, so that no link leads out of the site.
"""

import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
HOME = "README.md"
COMMANDS = "commands.md"
LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", "": "bash", ".toml": "toml", ".txt": "text"}

_sources: dict[str, str] = {}
"""Page -> the file of the repository that it shows."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page, the commands, and a page for each file that another page links to."""
    _sources.clear()
    waiting = [HOME, *(f"docs/{file.src_uri}" for file in files if file.is_documentation_page())]
    while waiting:
        source = waiting.pop()
        page = page_of(source)
        if page in _sources:
            continue
        _sources[page] = source
        text = text_of(source)
        if not source.startswith("docs/"):
            inclusion = InclusionLevel.INCLUDED if source == HOME else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, page, content=text, inclusion=inclusion))
        waiting += [target for target in linked(source, text) if page_of(target).endswith(".md")]
    files.append(File.generated(config, COMMANDS, content=commands()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    source = _sources.get(page.file.src_uri)
    if source is None:
        return markdown
    if page.file.src_uri.startswith("repository/"):
        page.meta["search"] = {"exclude": True}  # results and sources are found by the pages that link to them

    def replace(link: re.Match[str]) -> str:
        target = target_of(source, link["path"])
        if target is None:
            return link[0]
        return os.path.relpath(page_of(target), PurePosixPath(page.file.src_uri).parent) + (link["anchor"] or "")

    return LINK.sub(replace, markdown)


def page_of(source: str) -> str:
    """Name the page, or the asset, that shows a file of the repository."""
    if source == HOME:
        return "index.md"
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if (ROOT / source).is_dir():
        return f"repository/{source}/index.md"
    return f"repository/{source}" if source.endswith(".md") else f"repository/{source}.md"


def text_of(source: str) -> str:
    """Give the markdown of the page that shows a file, or a folder's list of pages."""
    path = ROOT / source
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.suffix in (".md", ".py"))
        return "\n".join([f"# {path.name}", "", *(f"- [{name}]({name})" for name in names)])
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"# {source}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def linked(source: str, text: str) -> list[str]:
    """List the files of the repository that a page links to."""
    return [target for link in LINK.finditer(text) if (target := target_of(source, link["path"])) is not None]


def target_of(source: str, path: str) -> str | None:
    """Find the file of the repository that a relative link leads to, if it is one."""
    folder = ROOT / source
    found = Path(os.path.normpath((folder if folder.is_dir() else folder.parent) / path))
    return found.relative_to(ROOT).as_posix() if found.is_relative_to(ROOT) and found.exists() else None


def commands() -> str:
    """Make the page of all commands from their --help."""
    call = [sys.executable, "-m", "typer", "diskreplay.cli.main", "utils", "docs", "--name", "diskreplay"]
    done = subprocess.run([*call, "--title", "All commands"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout
