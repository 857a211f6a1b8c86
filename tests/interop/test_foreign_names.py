"""Adapters use the names that their libraries promise; where one does not, a bound of versions and a test go with it.

The source of the adapters is walked for names that begin with an underscore and that this package does not have. What
a class shares with its bases of a library is only known with the library: it is compared where that is installed.
"""

import ast
import importlib
import inspect
import textwrap
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import diskreplay

PACKAGE = Path(diskreplay.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text()
    for part in ("interop", "testing")
    for path in sorted((PACKAGE / part).rglob("*.py"))
}
# class of an adapter -> the private names that it has of its library, which its module explains
KEPT = {"StoreStorage": {"_bump_mutation_revision", "_empty", "_set_last_cursor"}}
KEPT_IN = {"interop/torchrl.py": KEPT["StoreStorage"]}
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}  # Python documents them
READERS = {"attrgetter", "delattr", "getattr", "hasattr", "methodcaller", "setattr"}

# library -> modules of it with names that its documentation has
MODULES = {
    "gymnasium": {"gymnasium", "gymnasium.error", "gymnasium.vector"},
    "h5py": {"h5py"},
    "jax": {"jax"},
    "minari": {"minari", "minari.data_collector", "minari.dataset.minari_storage", "minari.serialization"},
    "pyarrow": {"pyarrow", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet"},
    "ray": {
        *("ray", "ray.exceptions", "ray.rllib.env.single_agent_episode", "ray.rllib.utils.replay_buffers"),
        "ray.rllib.env.utils.infinite_lookback_buffer",  # DeveloperAPI: for libraries that are built on Ray
    },
    "stable_baselines3": {
        *("stable_baselines3.common.buffers", "stable_baselines3.common.type_aliases"),
        *("stable_baselines3.common.vec_env", "stable_baselines3.her"),
    },
    "tensordict": {"tensordict"},
    "tianshou": {"tianshou.data"},
    "torch": {"torch", "torch.utils.data"},
    "torchrl": {"torchrl.data"},
    "wandb": {"wandb"},
    "zarr": {"zarr", "zarr.abc.store", "zarr.codecs", "zarr.storage"},
}
# adapter -> what must be installed for it
ADAPTERS = {
    "gymnasium": "gymnasium",
    "rllib": "ray.rllib",
    "rllib_episodes": "ray.rllib",
    "sb3": "stable_baselines3",
    "tianshou": "tianshou",
    "torch": "torch",
    "torchrl": "torchrl",
}
SLOW = {"rllib", "rllib_episodes", "tianshou", "torchrl"}  # to load
OURS = "diskreplay"
NOT_OF_A_LIBRARY = {OURS, "abc", "builtins", "collections", "typing"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of_the_package(tree: ast.AST) -> Iterator[str]:
    """Yield what a module defines: functions, classes, slots, and attributes that it sets on `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case (
                ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
                | ast.Name(id=name, ctx=ast.Store())
            ):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                yield from ast.literal_eval(value)


@cache
def own_names() -> frozenset[str]:
    """Return the names that the modules define: for the first test that asks, and not at each collection of tests."""
    return frozenset(name for source in SOURCES.values() for name in names_of_the_package(ast.parse(source)))


def breaches(module: str, source: str) -> list[str]:
    """List the uses of private names of other libraries in a source."""
    tree = ast.parse(source)
    of_others = {*names_of_the_package(tree), *OF_NAMED_TUPLES, *KEPT_IN.get(module, ())}
    of_itself = of_others | own_names()  # a class may have them of a base in another module

    def is_foreign(name: str, of: object = None) -> bool:
        is_self = ast.unparse(of) in ("self", "cls", "super()") if isinstance(of, ast.AST) else False
        return is_private(name) and name not in (of_itself if is_self else of_others)

    found = []
    for node in ast.walk(tree):
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Attribute(value=value, attr=name) if is_foreign(name, value):
                found.append(f"{where} uses {ast.unparse(node)}")
            case ast.Call(func=ast.Name(id="super"), args=[_, *_]):
                found.append(f"{where} skips a base by {ast.unparse(node)}")
            case ast.Call(func=ast.Name(id=reader) | ast.Attribute(attr=reader), args=arguments) if reader in READERS:
                texts = [each.value for each in arguments if isinstance(each, ast.Constant)]
                found += [f"{where} uses {text}" for text in texts if isinstance(text, str) and is_foreign(text)]
            case ast.Import(names=names):
                found += [f"{where} imports {alias.name}" for alias in names if not is_listed(alias.name)]
            case ast.ImportFrom(module=str(above), names=names):
                taken = [alias.name for alias in names]
                if not is_listed(above) or (above.split(".")[0] != OURS and any(map(is_private, taken))):
                    found.append(f"{where} imports {', '.join(taken)} from {above}")
    return found


def is_listed(module: str) -> bool:
    """Tell whether a module has documented names as far as this file knows."""
    library = module.split(".")[0]
    if library == OURS:
        return True
    return module in MODULES[library] if library in MODULES else not any(map(is_private, module.split(".")))


def test_the_source_of_adapters_has_no_private_name_of_a_library() -> None:
    assert [breach for module, source in SOURCES.items() for breach in breaches(module, source)] == []


@pytest.mark.parametrize(
    "source",
    [
        "buffer._insertion_idx = 0",
        "super(ReplayBuffer, self).__init__(1)",
        "from torch.utils import _pytree as pytree",
        "import torch.utils._pytree",
        "from minari.data_collector.episode_buffer import EpisodeBuffer",
        "getattr(storage, '_last_cursor')",
        "operator.attrgetter('_storage')(buffer)",
        "storage._set_last_cursor(3)",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert len(breaches("interop/other.py", source)) == 1


def private_names(kind: type) -> set[str]:
    """Return the private names that the source of a class defines or uses of itself."""
    found = set(vars(kind))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):  # it has none
        return set(filter(is_private, found))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")), attr=name):
                found.add(name)
    return {name for name in found if is_private(name) and not name.startswith("_abc_")}


def is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == OURS


def shared_names(kind: type) -> set[str]:
    """Return the private names that a class of this package has in common with its bases of a library."""
    bases = kind.__mro__
    theirs = [base for base in bases if base.__module__.split(".")[0] not in NOT_OF_A_LIBRARY]
    ours, others = (
        {name for base in part for name in private_names(base)} for part in (filter(is_ours, bases), theirs)
    )
    return ours & others


def adapter(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(ADAPTERS[name])
        return importlib.import_module(f"diskreplay.interop.{name}")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ADAPTERS]
)
def test_a_class_has_no_private_name_of_its_bases(name: str) -> None:
    kinds = [kind for kind in vars(adapter(name)).values() if inspect.isclass(kind) and is_ours(kind)]
    assert kinds
    assert {kind.__name__: shared_names(kind) for kind in kinds} == {
        kind.__name__: KEPT.get(kind.__name__, set()) for kind in kinds
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KEPT["StoreStorage"]))
def test_torchrls_storages_still_have_the_private_names_that_are_used(name: str) -> None:
    adapter("torchrl")
    from torchrl.data import Storage

    assert callable(getattr(Storage, name, None)), (
        f"Storage.{name} is gone in torchrl {metadata.version('torchrl')}: change diskreplay/interop/torchrl.py, or "
        "keep the bound of torchrl in pyproject.toml below this version"
    )


def test_a_library_whose_private_names_are_used_has_an_upper_bound() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for module in KEPT_IN:
        library = Path(module).stem
        (required,) = (each for each in map(Requirement, extras[library]) if each.name == library)
        assert any(each.operator == "<" for each in required.specifier), f"{library} has no upper bound: {required}"
