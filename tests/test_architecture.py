"""The walls of the house: who may import whom, and that the tests mirror the packages."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import diskreplay

PACKAGE = Path(diskreplay.__file__).parent
ROOT = PACKAGE.parent

# part -> the parts it may import; a part is a package of diskreplay or a module beside them
LAYERS = {
    "bounded_json": set(),
    "closing": {"errors"},
    "device_tensors": set(),
    "folders": set(),
    "ids": set(),
    "markup": set(),
    "pictures": {"errors", "format.spaces"},
    "errors": {"folders"},
    "kernels": {"errors", "ids"},
    "workers": set(),
    "format": {"bounded_json", "errors", "folders", "ids", "markup", "workers"},
    "verify": {"errors", "folders", "format", "ids"},
    "store": {
        *("device_tensors", "errors", "folders", "format", "ids", "kernels", "markup", "pictures", "verify", "workers"),
    },
    "sampling": {"bounded_json", "errors", "ids", "kernels"},
    "views": {"errors", "format.schema", "ids", "kernels", "sampling", "store", "workers"},
    "loading": {
        *("bounded_json", "device_tensors", "errors", "folders", "format.schema", "ids", "kernels.table"),
        *("markup", "sampling", "store", "views", "workers"),
    },
    "buffers": {
        *("closing", "device_tensors", "errors", "ids", "format", "loading", "sampling", "store", "views", "workers"),
    },
    "testing": {"format.schema", "ids"},
    "interop": {"bounded_json", "closing", "device_tensors", "errors", "workers"},
    "__main__": {"cli"},
    "cli": {
        *(
            "bounded_json",
            "errors",
            "folders",
            "ids",
            "format",
            "interop",
            "kernels.cache",
            "loading",
            "markup",
            "pictures",
            "sampling",
            "store",
            "verify",
            "views",
        ),
    },
}
# what the independent reader shares with the rest: constants, the schema, open folders, and which boot this is
SHARED_WITH_VERIFY = {
    "errors",
    "folders",
    "ids",
    "format",
    "format.layout",
    "format.machine",
    "format.schema",
    "format.volume",
}
# parts whose imports of diskreplay are public names only: adapters must work as a user's own would
PUBLIC_NAMES_ONLY = {"interop"}

# what these share with others all the same: modules that know nothing of a store
KNOWS_NO_STORE = {"bounded_json", "closing", "device_tensors", "workers"}

# library -> the parts and modules that may import it; a library that is not named here is free
LIBRARIES = {
    "zarr": {"format", "interop.zarr_episodes"},
    "filelock": {"kernels.cache"},
    "fcntl": {"format.cloning", "format.locks", "format.volume"},
    "crc32c": {"format", "interop.rlds.records", "verify", "store.repair.repair_documents"},
    "numba": {"kernels"},
    "torch": {
        *("device_tensors", "loading", "buffers", "cli"),
        *("interop.sb3", "interop.torch", "interop.torchrl", "interop.tianshou"),
        *("interop.ray.batch_form", "interop.ray.sharded_sampler"),
    },
    "ray": {
        *("interop.ray", "interop.ray.ray_calls", "interop.ray.shard_actor"),
        *("interop.rllib", "interop.rllib_episodes", "store.ray_dataset"),
    },
    "gymnasium": {"interop", "cli", "format.schema", "format.spaces"},
    "jinja2": {"cli"},
    "matplotlib": {"cli"},
    "plotext": {"cli"},
    "PIL": {"pictures", "interop.minari.arrow_files", "interop.lerobot.images", "interop.rlds.features"},
    "pyarrow": {"interop"},
    "h5py": {"interop"},
    "av": {"interop.lerobot.video", "pictures"},
    "typer": {"cli"},
    "rich": {"cli"},
    "hypothesis": {"testing"},
}
# folders of tests that mirror no package
TEST_KINDS = {"bench", "compat", "crash", "parity", "stateful", "stress"}


class Import(NamedTuple):
    """One imported module, and the name taken from it if there is one."""

    module: str
    name: str | None
    line: int
    typing_only: bool


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below diskreplay; that of a package is the package's own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def part_of(module: str) -> str:
    return module.split(".")[0]


def is_typing_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk(node: ast.AST, typing_only: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Walk all nodes, those inside functions too, telling which stand under `if TYPE_CHECKING`."""
    yield node, typing_only
    if is_typing_block(node):
        for child in node.body:
            yield from walk(child, True)
        for child in node.orelse:
            yield from walk(child, typing_only)
        return
    for child in ast.iter_child_nodes(node):
        yield from walk(child, typing_only)


def imports_in(source: str, part: str = "") -> list[Import]:
    """Every import in the source, wherever it stands; calls of import_module with a literal count too."""
    found = []
    for node, typing_only in walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [Import(alias.name, None, node.lineno, typing_only) for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                # Kernels are also imported from a copy, under another name.
                is_copied = part == "kernels" and level == 1
                assert level == 0 or is_copied, f"line {node.lineno}: relative imports hide which wall they pass"
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
    return imports_in(MODULES[module].read_text(), module.partition(".")[0])


def imported_module(item: Import) -> str | None:
    """Give the module of this package that an import loads, below diskreplay; None for other libraries."""
    if item.module.split(".")[0] != "diskreplay":
        return None
    below = item.module.removeprefix("diskreplay").removeprefix(".")
    if item.name is None:
        return below
    inner = f"{below}.{item.name}".removeprefix(".")
    if inner in MODULES:
        return inner
    return below or diskreplay._MODULES.get(item.name, "").removeprefix("diskreplay.")


def part_breaches(module: str, imports: list[Import]) -> list[str]:
    """List the imports that pass a wall between parts."""
    part = part_of(module)
    allowed = LAYERS[part] | {part}
    breaches = []
    for item in imports:
        target = imported_module(item)
        if target is None or (target == "" and item.name is None) or item.name == "__version__":
            continue
        if part in PUBLIC_NAMES_ONLY and part_of(target) not in {part, *KNOWS_NO_STORE}:
            if item.name not in diskreplay.__all__:
                breaches.append(f"{module}:{item.line} takes {target} {item.name}, which is no public name")
        elif not {target, part_of(target)} & allowed:
            breaches.append(f"{module}:{item.line} imports {target}; {part} may import {sorted(allowed)}")
    return breaches


def library_breaches(module: str, imports: list[Import]) -> list[str]:
    """List the imports of libraries that are another part's business."""
    breaches = []
    for item in imports:
        library = item.module.split(".")[0]
        homes = LIBRARIES.get(library)
        if homes is None or item.typing_only or part_of(module) in homes or module in homes:
            continue
        breaches.append(f"{module}:{item.line} imports {library}, which only {sorted(homes)} may")
    return breaches


def circle_of(imports: dict[str, list[Import]]) -> list[str]:
    """Return modules each of which imports the next, and the last the first, be it only for types; [] if none do."""
    graph = {
        module: {target for item in items if (target := imported_module(item)) and target != module}
        for module, items in imports.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


INNER = sorted(name for name in MODULES if name)


def test_every_module_imports_only_the_parts_below_it() -> None:
    assert {part_of(module) for module in INNER} <= LAYERS.keys(), "a part has no place in LAYERS"
    assert [breach for module in INNER for breach in part_breaches(module, imports_of(module))] == []


def test_a_library_is_imported_only_by_the_part_that_owns_it() -> None:
    assert [breach for module in INNER for breach in library_breaches(module, imports_of(module))] == []


def test_the_package_itself_only_re_exports() -> None:
    at_run_time = [item.module for item in imports_of("") if not item.typing_only]
    assert at_run_time == ["importlib", "typing"]


def test_verify_shares_no_code_with_reader_or_writer() -> None:
    oracle = {module for module in INNER if part_of(module) == "verify"}
    assert len(oracle) > 5
    for module in oracle:
        targets = {target for item in imports_of(module) if (target := imported_module(item))}
        assert targets - oracle - SHARED_WITH_VERIFY == set(), module
        from_machine = {item.name for item in imports_of(module) if item.module == "diskreplay.format.machine"}
        assert from_machine <= {"boot_id"}, module


def test_no_modules_import_each_other() -> None:
    assert circle_of({module: imports_of(module) for module in INNER}) == []


def test_no_module_looks_at_frames_of_other_threads() -> None:
    """CPython 3.11 may end by SIGSEGV: their locals are made while they run."""
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert not [path for path, source in sources.items() if "_current_frames" in source]


def test_every_package_has_its_tests_and_every_folder_of_tests_its_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    with_tests = {path.parent.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/*/**/test_*.py")}
    assert packages - with_tests == set()
    assert with_tests - packages - TEST_KINDS == set()


@pytest.mark.parametrize(
    "source",
    [
        "from diskreplay.views.base import View",
        "def f():\n    import diskreplay.views.base",
        "if TYPE_CHECKING:\n    from diskreplay.views.base import View",
    ],
)
def test_a_circle_is_found(source: str) -> None:
    imports = {"views.base": "from diskreplay.views import windows", "views.windows": source}
    assert len(circle_of({module: imports_in(text) for module, text in imports.items()})) == 3


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernels.gather", "from diskreplay.store.store import Store"),
        ("views.transitions", "def f():\n    from diskreplay.loading import batch"),
        ("verify.verify", "from diskreplay.store.writing.writer import Writer"),
        ("sampling.uniform", "if TYPE_CHECKING:\n    from diskreplay.store.store import Store"),
        ("sampling.uniform", "from diskreplay import Store"),
        ("interop.minari", "from diskreplay.store.store import Store, _private"),
    ],
)
def test_an_import_through_a_wall_is_found(module: str, source: str) -> None:
    assert part_breaches(module, imports_in(source)) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("store.store", "import zarr"),
        ("views.transitions", "def f():\n    import torch.nn as nn"),
        ("sampling.uniform", "from numba import njit"),
        ("store.store", "importlib.import_module('zarr.storage')"),
    ],
)
def test_a_library_in_the_wrong_place_is_found(module: str, source: str) -> None:
    assert library_breaches(module, imports_in(source)) != []
