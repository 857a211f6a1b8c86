"""The walls of the house: who may import whom, and that the tests mirror the packages."""

import ast

import pytest

import diskreplay
from tools.imports import MODULES, PACKAGE, Import, circles, imported_module, imports_in, imports_of

ROOT = PACKAGE.parent

# part -> the parts it may import; a part is a package of diskreplay or a module beside them
LAYERS = {
    "arguments": {"segments.documents.layout", "segments.documents.root", "segments.shards"},
    "bounded_json": set(),
    "closing": {"errors"},
    "device_tensors": set(),
    "folders": set(),
    "ids": set(),
    "markup": set(),
    "pictures": {"errors", "schema.spaces"},
    "errors": {"folders"},
    "kernels": {"errors", "ids"},
    "workers": set(),
    "schema": {"bounded_json", "errors", "markup"},
    "segments": {"bounded_json", "errors", "folders", "ids", "schema", "workers"},
    "retention": {"errors", "folders", "ids", "segments"},
    "reading": {
        *("errors", "folders", "ids", "kernels", "markup", "pictures", "retention", "schema", "segments"),
        "workers",
    },
    "writing": {
        *("device_tensors", "errors", "folders", "ids", "kernels", "retention", "schema"),
        *("segments", "workers"),
    },
    "integrity.verify": {"errors", "folders", "ids", "schema", "segments"},
    "integrity": {
        *("errors", "folders", "ids", "integrity.verify", "reading", "retention", "schema", "segments", "writing"),
    },
    "store": {
        *("arguments", "errors", "folders", "ids", "integrity", "integrity.verify", "kernels", "markup"),
        *("reading", "retention", "schema", "segments", "workers", "writing"),
    },
    "distributions": {"bounded_json", "errors", "ids", "kernels"},
    "views": {
        *("arguments", "distributions", "errors", "ids", "kernels", "reading", "schema.schema", "workers", "writing"),
    },
    "sampling": {
        *("arguments", "bounded_json", "device_tensors", "distributions", "errors", "folders", "ids"),
        *("kernels", "markup", "reading", "schema.schema", "store", "views", "workers", "writing"),
    },
    "buffers": {
        *("arguments", "closing", "device_tensors", "distributions", "errors", "ids", "sampling", "schema", "store"),
        *("views", "workers", "writing"),
    },
    "testing": {"ids", "schema.schema"},
    "interop": {"bounded_json", "closing", "device_tensors", "errors", "workers"},
    "__main__": {"cli"},
    "cli": {
        *("arguments", "bounded_json", "distributions", "errors", "folders", "ids", "integrity", "integrity.verify"),
        *("interop", "kernels.cache", "markup", "pictures", "reading", "retention", "sampling", "schema", "segments"),
        *("store", "views"),
    },
}
# what the independent reader shares with the rest: constants, the schema, open folders, which boot and volume this is
SHARED_WITH_VERIFY = {
    "errors",
    "folders",
    "ids",
    "schema.schema",
    "segments.documents.layout",
    "segments.files.machine",
}
# parts whose imports of diskreplay are public names only: adapters must work as a user's own would
PUBLIC_NAMES_ONLY = {"interop"}

# what these share with others all the same: modules that know nothing of a store
KNOWS_NO_STORE = {"bounded_json", "closing", "device_tensors", "workers"}

# library -> the parts and modules that may import it; a library that is not named here is free
LIBRARIES = {
    "zarr": {"segments", "interop.zarr_episodes"},
    "filelock": {"kernels.cache"},
    "fcntl": {"segments.files.copies", "segments.files.locks", "segments.files.machine"},
    "crc32c": {"segments", "interop.rlds.records", "integrity.verify", "integrity.repair.repair_documents"},
    "numba": {"kernels"},
    "torch": {
        *("device_tensors", "sampling", "buffers", "cli"),
        *("interop.sb3", "interop.torch", "interop.torchrl", "interop.tianshou"),
        *("interop.ray.messages", "interop.ray.sharded_sampler"),
    },
    "ray": {
        *("interop.ray", "interop.ray.sharded_store"),
        *("interop.rllib", "interop.rllib_episodes", "store.ray_dataset"),
    },
    "gymnasium": {"interop", "cli", "schema.schema", "schema.spaces"},
    "jax": {"interop.jax"},
    "jinja2": {"cli"},
    "matplotlib": {"cli"},
    "plotext": {"cli"},
    "PIL": {"pictures", "interop.minari.arrow_files", "interop.lerobot.images", "interop.rlds.features"},
    "simplejpeg": {"interop.rlds.features"},
    "pyarrow": {"interop"},
    "h5py": {"interop"},
    "av": {"interop.lerobot.images", "pictures"},
    "typer": {"cli"},
    "rich": {"cli"},
    "hypothesis": {"testing"},
    "wandb": {"interop.monitor"},
}
# what says how rows lie in packs: names in `segments`, and attributes of a segment
OF_PACKS = {
    *("Compressed", "InnerChunks", "PackSize", "PackTables", "Shard", "ShardWriter", "all_packs", "find_pack"),
    *("merged_into", "open_shard", "read_packs", "read_tables"),
    *("compressed", "packed"),
}
# the parts and modules that use these
KNOWS_PACKS = {
    "segments": "they are made, read and checked here",
    "integrity.verify": "it shares nothing with these",
    "integrity.repair": "it writes their files anew",
    "reading.decompression": "it divides the work between threads",
    "writing.merging.compaction": "it decides what is merged and compressed",
}
# folders of tests that mirror no package
TEST_KINDS = {"bench", "compat", "crash", "parity", "stateful", "stress"}


def part_of(module: str) -> str:
    """Return the innermost part that a module is in: that of the checker is within another."""
    first, second = (*module.split("."), "")[:2]
    return inner if (inner := f"{first}.{second}") in LAYERS else first


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
        if homes is None or item.typing_only or any(f"{module}.".startswith(f"{home}.") for home in homes):
            continue
        breaches.append(f"{module}:{item.line} imports {library}, which only {sorted(homes)} may")
    return breaches


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
    oracle = {module for module in INNER if part_of(module) == "integrity.verify"}
    assert len(oracle) > 5
    for module in oracle:
        targets = {target for item in imports_of(module) if (target := imported_module(item))}
        assert targets - oracle - SHARED_WITH_VERIFY == set(), module
        from_machine = {item.name for item in imports_of(module) if item.module == "diskreplay.segments.files.machine"}
        assert from_machine <= {"Volume", "boot_id", "volume_of"}, module


def pack_breaches(module: str, tree: ast.Module) -> list[str]:
    """List where a module looks at how rows lie in packs, in place of asking `segments` where they are."""
    used = [
        (item.line, item.name)
        for item in imports_in(tree, module.partition(".")[0])
        if (imported_module(item) or "").startswith("segments") and item.name in OF_PACKS
    ]
    used += [(n.lineno, n.attr) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in OF_PACKS]
    if any(f"{module}.".startswith(f"{home}.") for home in KNOWS_PACKS):
        return []
    return [f"{module}:{line} uses {name}" for line, name in used]


def test_only_segments_know_how_rows_lie_in_packs() -> None:
    trees = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}
    assert [breach for module, tree in trees.items() for breach in pack_breaches(module, tree)] == []


@pytest.mark.parametrize(
    "source",
    [
        "from diskreplay.segments.packs import read_tables",
        "def f():\n    from diskreplay.segments.shards import Shard",
        "def f(info):\n    return info.packed is None",
    ],
)
def test_a_module_that_looks_into_packs_is_found(source: str) -> None:
    assert pack_breaches("store.info", ast.parse(source)) != []


def test_no_modules_import_each_other() -> None:
    assert circles({module: imports_of(module) for module in MODULES}) == []


def test_values_computed_once_have_no_lock_that_a_forked_child_could_wait_for() -> None:
    """`functools.cached_property` has one on Python 3.11; commands and repairs fork nothing."""
    users = {part_of(name) for name in INNER if any(each.name == "cached_property" for each in imports_of(name))}
    assert users <= {"integrity", "integrity.verify", "cli", "testing"}


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
    imports = {"views.base": "from diskreplay.views import windows", "views.windows": source, "views.requested": source}
    found = circles({module: imports_in(ast.parse(text)) for module, text in imports.items()})
    assert found == [["views.base", "views.windows"]]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernels.gather", "from diskreplay.store.store import Store"),
        ("views.transitions", "def f():\n    from diskreplay.sampling import batch"),
        ("integrity.verify.verify", "from diskreplay.writing.writer import Writer"),
        ("distributions.base", "if TYPE_CHECKING:\n    from diskreplay.store.store import Store"),
        ("distributions.base", "from diskreplay import Store"),
        ("interop.minari", "from diskreplay.store.store import Store, _private"),
    ],
)
def test_an_import_through_a_wall_is_found(module: str, source: str) -> None:
    assert part_breaches(module, imports_in(ast.parse(source))) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("store.store", "import zarr"),
        ("views.transitions", "def f():\n    import torch.nn as nn"),
        ("distributions.base", "from numba import njit"),
        ("store.store", "importlib.import_module('zarr.storage')"),
    ],
)
def test_a_library_in_the_wrong_place_is_found(module: str, source: str) -> None:
    assert library_breaches(module, imports_in(ast.parse(source))) != []
