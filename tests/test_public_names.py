"""The public face: what `diskreplay` offers, where it comes from, and what importing it costs."""

import ast
import importlib
import re
from importlib import metadata
from pathlib import Path

import pytest

import diskreplay
from tests.testing.support import run_python
from tests.testing.without import run_without

ERRORS = {
    "BufferFull": BufferError,
    "Closed": ValueError,
    "FormatError": ValueError,
    "InvalidIndex": IndexError,
    "MissingExtra": ImportError,
    "NotEnoughData": BufferError,
    "RateLimited": TimeoutError,
    "ReadOnlyError": PermissionError,
    "ReplayError": Exception,
    "SchemaError": ValueError,
    "SegmentGone": LookupError,
    "StorageFull": OSError,
    "StoreExists": FileExistsError,
    "StoreLocked": RuntimeError,
    "StoreNotFound": FileNotFoundError,
    "WriterClosed": ValueError,
}
NAMES = {
    *ERRORS,
    "Batch",
    "DamagedSegmentWarning",
    "DistillationBuffer",
    "Episode",
    "Episodes",
    "Experience",
    "Field",
    "Hindsight",
    "Linear",
    "MixedSampler",
    "Normalize",
    "RandomShift",
    "ToFloat",
    "Prioritized",
    "Mixture",
    "Recency",
    "RecordEpisodes",
    "Sweep",
    "RecordVectorEpisodes",
    "Problem",
    "RateLimiter",
    "ReplayBuffer",
    "RolloutBuffer",
    "Rollouts",
    "Sampler",
    "Schema",
    "Sequences",
    "Store",
    "Stratified",
    "Transitions",
    "Uniform",
    "VectorWriter",
    "Writer",
    "__version__",
    "create",
    "lambda_returns",
    "nstep_experiences",
    "nstep_targets",
    "open",
    "q_lambda_targets",
    "rescale_value",
    "retrace_targets",
    "unscale_value",
    "vtrace_targets",
    "warmup",
}
HEAVY = ("gymnasium", "llvmlite", "matplotlib", "numba", "torch", "zarr")


def test_the_public_names_are_exactly_these() -> None:
    assert set(diskreplay.__all__) == NAMES
    assert len(diskreplay.__all__) == len(NAMES)
    assert set(dir(diskreplay)) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_a_name_is_the_object_of_the_module_that_the_table_names(name: str) -> None:
    value = getattr(diskreplay, name)
    module = importlib.import_module(diskreplay._MODULES[name])
    assert value is getattr(module, name)
    assert value.__module__ == module.__name__
    assert value.__doc__


def test_type_checkers_see_the_same_table() -> None:
    tree = ast.parse(Path(diskreplay.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == diskreplay._MODULES


@pytest.mark.parametrize(("name", "builtin"), ERRORS.items())
def test_an_error_is_also_the_builtin_a_caller_expects(name: str, builtin: type[Exception]) -> None:
    error = getattr(diskreplay, name)
    assert issubclass(error, diskreplay.ReplayError)
    assert issubclass(error, builtin)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="^module 'diskreplay' has no attribute 'Nonsense'$"):
        diskreplay.Nonsense  # noqa: B018  (the access is what is tested)


def test_the_version_is_that_of_the_installed_package() -> None:
    assert diskreplay.__version__ == metadata.version("diskreplay")


def test_importing_the_package_loads_no_heavy_library() -> None:
    printed = run_python(f"import sys, diskreplay; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert printed == "[]\n"


def test_a_collector_loads_neither_torch_nor_numba(tmp_path: Path) -> None:
    code = f"""
import sys
import diskreplay as dr
schema = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"))
with dr.create({str(tmp_path / "store")!r}, schema) as store, store.writer() as writer:
    for step in range(5):
        writer.append([0, 0, 0, step], 1, 1.0, terminated=step == 4, next_obs=[0, 0, 0, step + 1])
print([m for m in ("torch", "numba", "llvmlite", "matplotlib", "gymnasium") if m in sys.modules])
"""
    assert run_python(code) == "[]\n"


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(diskreplay.__file__).parent / "py.typed").exists()


@pytest.mark.slow(turns=4)
def test_a_star_import_leaves_out_names_whose_libraries_are_missing() -> None:
    code = "from diskreplay import *; print(Store.__name__, 'Sampler' in dir(), 'RecordEpisodes' in dir())"
    assert run_without(("torch",), code) == "Store False True"
    assert run_without((), code) == "Store True True"


def test_each_command_that_installs_an_extra_is_quoted() -> None:
    root = Path(diskreplay.__file__).parents[1]
    files = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("diskreplay/**/*.py")]
    bare = [path.name for path in files if re.search(r"pip install (?!-e )[\w-]+\[", path.read_text())]
    assert bare == []
