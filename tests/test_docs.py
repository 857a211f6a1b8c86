"""What the documents show runs, and what they point to exists."""

import ast
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import diskreplay
from tests import snippets

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
# Those whose snippets a user runs: not CONTRIBUTING.md and CHANGELOG.md.
PAGES = [page for page in DOCUMENTS if snippets.snippets(page) and page.name not in ("CONTRIBUTING.md", "CHANGELOG.md")]
RUN_ELSEWHERE = {"cli.md": "tests/cli/test_docs.py"}
PRELOADED = ["gymnasium", "numba", "torch", "diskreplay.sampling.sampler", "diskreplay.store.store", "tests.snippets"]


@pytest.fixture(scope="module")
def processes():
    """Start processes that have the large libraries already: they are copies of one that has imported them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in RUN_ELSEWHERE], ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_one_after_the_other(tmp_path, processes, page):
    folder = tmp_path / "work"
    folder.mkdir()
    process = processes.Process(target=snippets.run_page, args=(page, folder))
    process.start()
    process.join()
    code, output = process.exitcode, (tmp_path / "output").read_text()
    process.close()
    assert code == 0, output
    missing = set().union(*(snippet.missing() for snippet in snippets.snippets(page)))
    if missing:
        pytest.skip(f"ran all but what needs {', '.join(sorted(missing))}")


def test_the_readme_records_in_ten_lines_and_resumes_and_looks_in_three():
    _, *found = snippets.snippets(REPOSITORY / "README.md")
    lines = [[line for line in each.code.splitlines() if line] for each in found]
    assert list(map(len, lines)) == [10, 3, 3]


@pytest.mark.slow(turns=4)
def test_the_lines_of_the_readme_run_with_every_warning_an_error(tmp_path):
    code = "\n".join(each.code for each in snippets.snippets(REPOSITORY / "README.md") if each.language == "python")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr  # one at exit changes no exit code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_snippet_compiles_and_its_title_says_what_is_done_with_it(page):
    found = snippets.snippets(page)
    for snippet in found:
        assert snippet.title == "" or snippet.is_file or snippet.is_before, f"{page.name}:{snippet.line}"
        if snippet.language == "python":
            compile(snippet.code, f"{page.name}:{snippet.line}", "exec")
    run = " ".join(snippet.code for snippet in found if snippet.language == "bash")
    assert [snippet.title for snippet in found if snippet.is_file and snippet.title not in run] == []


def test_the_pages_that_are_run_elsewhere_are():
    for page, test in RUN_ELSEWHERE.items():
        assert f"docs/{page}" in (REPOSITORY / test).read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document):
    named = re.findall(r"`((?:tests|tools|examples|diskreplay)/[\w/.]+\.\w+)`", document.read_text())
    missing = [name for name in named if not (REPOSITORY / name).exists()]
    assert missing == []


def test_the_page_of_benchmarks_names_each_result_and_tells_of_each_missed_target():
    page = (REPOSITORY / "docs/benchmarks.md").read_text()
    before, _, after = page.partition("## Where it is slower, or missed its target")
    results = {path.name: path.read_text() for path in (REPOSITORY / "tools/bench/results").glob("*.md")}
    assert [name for name in results if f"results/{name})" not in before] == []
    missed = [name for name, text in results.items() if "**no**" in text]
    assert [name for name in missed if f"results/{name})" not in after] == []


def test_each_ratio_of_the_table_of_benchmarks_is_on_a_result_page_with_its_target():
    page = (REPOSITORY / "docs/benchmarks.md").read_text()
    results = [path.read_text() for path in (REPOSITORY / "tools/bench/results").glob("*.md")]
    measured = {
        (row[1].split()[0], row[2].removeprefix("at least ").removeprefix("at most ").split()[0], "**no**" in row[3])
        for text in results
        for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
        if len(row) == 4 and row[2].startswith("at ")
    }
    rows = re.findall(r"(?m)^\|[^|]+\|[^|]+\| ([\d.]+)[^|]*\| at (?:least|most) ([\d.]+)([^|]*)\|", page)
    assert len(rows) > 30
    assert [row for row in rows if (row[0], row[1], "missed" in row[2]) not in measured] == []


def test_each_page_is_in_the_navigation():
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    pages = [page.relative_to(REPOSITORY / "docs").as_posix() for page in (REPOSITORY / "docs").rglob("*.md")]
    assert [page for page in pages if f"- {page}\n" not in navigation] == []


def test_each_public_name_is_on_one_page_of_the_api():
    pages = [page.read_text() for page in (REPOSITORY / "docs/api").glob("*.md")]
    shown = Counter(name for page in pages for name in re.findall(r"(?m)^::: diskreplay\.(\w+)$", page))
    public = Counter(set(diskreplay.__all__) - {"__version__"})
    assert [*(public - shown)] == [], "no page of docs/api has `::: diskreplay.NAME` for these public names"
    assert [*(shown - public)] == [], "docs/api shows these names twice, or they are not public"


def _public_definitions(name: str) -> dict[str, str | None]:
    """Return the docstring of an object of the package, and of all that its body defines publicly, by name."""
    parts = name.split(".")
    if len(parts) == 2:
        parts = [*diskreplay._MODULES[parts[1]].split("."), parts[1]]
    paths = {n: REPOSITORY.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)}
    files = {n: path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for n, path in paths.items()}
    files = {n: file for n, file in files.items() if file.exists()}
    node: ast.AST = ast.parse(files[max(files)].read_text())
    for part in parts[max(files) :]:
        (node,) = (child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part)
    found = {name: ast.get_docstring(node)}
    for child in ast.iter_child_nodes(node) if isinstance(node, ast.ClassDef | ast.Module) else ():
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            key = f"{name}.{child.name}"  # of a property and its setter, or of overloads, one has it
            found[key] = ast.get_docstring(child) or found.get(key)
    return found


def test_all_that_the_api_site_shows_has_a_docstring():
    pages = [page.read_text() for page in (REPOSITORY / "docs/api").glob("*.md")]
    names = [name for page in pages for name in re.findall(r"(?m)^::: (diskreplay\.[\w.]+)$", page)]
    documented = {key: text for name in names for key, text in _public_definitions(name).items()}
    assert len(documented) > 300
    assert [name for name, text in documented.items() if not text] == []


def test_each_format_of_data_sets_is_on_the_page_of_formats():
    top = REPOSITORY / "diskreplay/interop"
    paths = [path for path in top.rglob("*.py") if "\ndef import_dataset(" in path.read_text()]
    names = {(path.parent if path.stem == "__init__" else path.with_suffix("")).relative_to(top) for path in paths}
    page = (REPOSITORY / "docs/api/formats.md").read_text()
    shown = re.findall(r"(?m)^::: diskreplay\.interop\.([\w.]+)$", page)
    shown = [name for name in shown if not name.startswith("exchange.")]  # what all formats share
    assert len(shown) > 5
    modules = Counter(".".join(name.parts) for name in names)
    assert [*(modules - Counter(shown))] == [], "docs/api/formats.md has no `::: diskreplay.interop.NAME` for these"
    assert [*(Counter(shown) - modules)] == [], "docs/api/formats.md shows these twice, or they import no data sets"


def test_each_class_of_an_adapter_is_on_a_page_of_the_api():
    page = "".join((REPOSITORY / "docs/api" / name).read_text() for name in ("libraries.md", "formats.md"))
    named = set(re.findall(r"diskreplay\.interop\.\w+ import (.+)", "\n".join(map(Path.read_text, DOCUMENTS))))
    named = {name.split(" as ")[0].strip() for names in named for name in names.split(",")}
    assert len(named) > 5
    assert {name for name in named if name not in page} == set()


def test_each_kind_of_finding_is_on_the_page_of_repair():
    kinds = set(re.findall(r'``"(\w+)"``', diskreplay.Problem.__doc__ or ""))
    section = (REPOSITORY / "docs/repair.md").read_text().partition("| kind | finding |")[2].partition("\n\n")[0]
    shown = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in section.splitlines()[2:])))
    assert len(shown) > 10
    assert shown == kinds


def test_the_architecture_is_read_in_ten_minutes_and_has_each_folder_of_the_package():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = text.partition("\n## Architecture\n")[2].partition("\n## ")[0]
    assert 0 < len(section.split()) <= 900
    folders = [path.parent.name for path in (REPOSITORY / "diskreplay").glob("*/__init__.py")]
    assert sorted(re.findall(r"(?m)^\| `(\w+)/` \|", section)) == sorted(folders)
