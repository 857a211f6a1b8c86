"""Counts code: lines by part, modules, circles of imports, and the largest classes and functions."""

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.imports import MODULES, PACKAGE, Import, circles, imports_in, modules, named_module

ROOT = PACKAGE.parent
LARGEST = 5

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Size:
    """A class or function with a number: its lines of code, or its complexity."""

    size: int
    name: str


@dataclass
class Part:
    """Modules and lines of code of a folder of the package, and lines of its tests.

    `inner_tests` counts lines of test modules that import private modules.
    """

    modules: int = 0
    code: int = 0
    tests: int = 0
    inner_tests: int = 0


@dataclass
class Report:
    """The counts. `parts` are the folders of the package and the tests; modules outside folders are in "."."""

    parts: dict[str, Part] = field(default_factory=dict)
    circles: list[list[str]] = field(default_factory=list)
    classes: list[Size] = field(default_factory=list)
    functions: list[Size] = field(default_factory=list)
    complexities: list[Size] = field(default_factory=list)

    def total(self, without: tuple[str, ...] = ()) -> Part:
        """Return the sum of the parts without some."""
        sums = Counter[str]()
        for name, part in self.parts.items():
            if name not in without:
                sums.update(asdict(part))
        return Part(**sums)


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines of code: no blank lines, comments or strings that are statements."""
    lines = enumerate(map(str.strip, source.split("\n")), start=1)
    found, statements = {number for number, line in lines if line and not line.startswith("#")}, set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                statements.update(_lines_of(node))
            # Lines of a string may be blank, or begin like a comment.
            case ast.Constant(value=str() | bytes()) | ast.JoinedStr():
                found.update(_lines_of(node))
    return found - statements


def _lines_of(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def definitions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield every class and function of a module, the inner ones too, with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, Definition):
            name = f"{within}.{node.name}".removeprefix(".")
            yield name, node
        yield from definitions(node, name)


def complexity(function: Definition) -> int:
    """Return the cyclomatic complexity of a function without its inner ones, as radon counts it.

    One more than the branches: of statements, conditional expressions, comprehensions, and operators "and" and "or".
    """
    return 1 + sum(map(_branches, function.body))


def _branches(node: ast.AST) -> int:
    count = 0
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return 0
        case ast.Try():
            count = len(node.handlers) + bool(node.orelse)
        case ast.BoolOp():
            count = len(node.values) - 1
        case ast.If() | ast.IfExp() | ast.Assert():
            count = 1
        case ast.Match():
            others = [case for case in node.cases if isinstance(case.pattern, ast.MatchAs) and not case.pattern.pattern]
            count = len(node.cases) - bool(others)
        case ast.For() | ast.AsyncFor() | ast.While():
            count = 1 + bool(node.orelse)
        case ast.comprehension():
            count = 1 + len(node.ifs)
    return count + sum(map(_branches, ast.iter_child_nodes(node)))


def public_modules() -> set[str]:
    """Return the public modules, below diskreplay: modules on pages of `docs/api`, errors, and the test kit."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    adapters = re.findall(r"(?m)^::: diskreplay\.(interop\.\w+)", pages)
    return {"", "errors", *adapters, *(name for name in MODULES if name.split(".")[0] == "testing")}


def imports_inner(tree: ast.Module, public: set[str]) -> bool:
    """Return whether a module imports a private module of the package."""
    return not {named_module(item) for item in imports_in(tree)} <= {None, *public}


def measure(package: Path = PACKAGE, tests: Path = ROOT / "tests") -> Report:
    """Count a package and its tests."""
    report, public = Report(), public_modules()
    classes, functions, complexities = list[Size](), list[Size](), list[Size]()
    imports = dict[str, list[Import]]()
    for module, path in modules(package).items():
        part, tree, lines = _part(report, path, package), *_parsed(path)
        imports[module] = imports_in(tree, module.partition(".")[0])
        part.modules += 1
        part.code += len(lines)
        for name, node in definitions(tree):
            of = f"{path.relative_to(package)}:{name}"
            size = Size(len(lines.intersection(_lines_of(node))), of)
            if isinstance(node, ast.ClassDef):
                classes.append(size)
            else:
                functions.append(size)
                complexities.append(Size(complexity(node), of))
    for path in sorted(tests.rglob("*.py")):
        part, tree, lines = _part(report, path, tests), *_parsed(path)
        part.tests += len(lines)
        part.inner_tests += len(lines) if imports_inner(tree, public) else 0
    report.circles = circles(imports)
    every = classes, functions, complexities
    report.classes, report.functions, report.complexities = (sorted(some, reverse=True)[:LARGEST] for some in every)
    return report


def _parsed(path: Path) -> tuple[ast.Module, set[int]]:
    source = path.read_text()
    tree = ast.parse(source)
    return tree, code_lines(source, tree)


def _part(report: Report, path: Path, top: Path) -> Part:
    folder = path.relative_to(top).parts[0]
    return report.parts.setdefault("." if folder.endswith(".py") else folder, Part())


def table(report: Report) -> str:
    """Return the report as a table of text."""
    lines = [f"{'part':<28}{'modules':>9}{'code':>9}{'tests':>9}{'of inner':>9}"]
    rows = dict(sorted(report.parts.items()))
    rows |= {"all": report.total(), "without interop and cli": report.total(("interop", "cli"))}
    lines += [
        f"{name:<28}{part.modules:>9,}{part.code:>9,}{part.tests:>9,}{part.inner_tests:>9,}"
        for name, part in rows.items()
    ]
    lines.append(f"{'circles of imports':<28}{len(report.circles):>9}")
    lines += [f"  {', '.join(circle)}" for circle in report.circles]
    for title, sizes in (
        ("largest classes, lines", report.classes),
        ("largest functions, lines", report.functions),
        ("largest complexities", report.complexities),
    ):
        lines += [f"{title if size is sizes[0] else '':<28}{size.size:>9}  {size.name}" for size in sizes]
    return "\n".join(lines)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="tools/lines", description=__doc__)
    parser.add_argument("--json", action="store_true", help="as JSON")
    report = measure()
    if parser.parse_args().json:
        print(json.dumps(asdict(report) | {"total": asdict(report.total())}, indent=2))
    else:
        print(table(report))


if __name__ == "__main__":
    main()
