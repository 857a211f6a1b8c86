"""The imports of the package's modules, read from their source, and circles of them."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeGuard

import diskreplay

PACKAGE = Path(diskreplay.__file__).parent


class Import(NamedTuple):
    """An imported module, and the name imported from it, if any."""

    module: str
    name: str | None
    line: int
    typing_only: bool


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return every module of the package by its dotted name below diskreplay; `__init__` has its package's name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def _is_typing_block(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_in(tree: ast.Module, part: str = "") -> list[Import]:
    """Return every import of a module, nested ones included, and calls of import_module with a literal."""
    nodes, found = list(ast.walk(tree)), []
    for_types = {
        id(below) for node in nodes if _is_typing_block(node) for inner in node.body for below in ast.walk(inner)
    }
    for node in nodes:
        typing_only = id(node) in for_types
        match node:
            case ast.Import(names=names):
                found += [Import(alias.name, None, node.lineno, typing_only) for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                # Kernels are also imported from a copy with another name.
                is_copied = part == "kernels" and level == 1
                assert level == 0 or is_copied, f"line {node.lineno}: relative imports hide the layers that they cross"
                if level:
                    module = ".".join(["diskreplay", part, *([module] if module else [])])
                found += [Import(str(module), alias.name, node.lineno, typing_only) for alias in names]
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                found.append(Import(module, None, node.lineno, typing_only))
    return found


@cache
def imports_of(module: str) -> list[Import]:
    """Return the imports of a module of the package."""
    return imports_in(ast.parse(MODULES[module].read_text()), module.partition(".")[0])


def named_module(item: Import) -> str | None:
    """Return the module named by an import, below diskreplay; "" for the package, None for other libraries."""
    if item.module.split(".")[0] != "diskreplay":
        return None
    below = item.module.removeprefix("diskreplay").removeprefix(".")
    inner = f"{below}.{item.name}".removeprefix(".")
    return inner if inner in MODULES else below


def imported_module(item: Import) -> str | None:
    """Return the module that an import loads: as `named_module`, but a public name counts for its own module."""
    named = named_module(item)
    if named == "" and item.name is not None:
        return diskreplay._MODULES.get(item.name, "").removeprefix("diskreplay.")
    return named


def circles(imports: Mapping[str, list[Import]]) -> list[list[str]]:
    """Return the groups of modules that import each other, each in order; imports for types alone count.

    The package itself, which only imports public names, is left out.
    """
    targets = {
        module: {imported_module(item) for item in items} - {module} for module, items in imports.items() if module
    }
    reached = {module: _reached(module, targets) for module in targets}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in targets}
    return sorted(sorted(group) for group in groups if group)


def _reached(start: str, targets: Mapping[str, set[str | None]]) -> set[str]:
    found, left = set[str](), [start]
    while left:
        new = {module for module in targets[left.pop()] if module is not None and module in targets} - found
        found |= new
        left += new
    return found
