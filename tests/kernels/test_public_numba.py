"""Kernels use of numba and llvmlite what these promise to keep, and no other name."""

import ast
from pathlib import Path

import pytest

import diskreplay
from diskreplay.kernels import table

PACKAGE = Path(diskreplay.__file__).parent
IMPORTS = {"numba", "numba.types", "numba.extending.intrinsic", "numba.extending.register_jitable", "llvmlite.ir"}
ATTRIBUTES = {"njit", "carray", "types", "__version__"}  # of numba
# `forceinline` is an option of numba's own overloads, but the docstring of `jit` does not name it.
OPTIONS = {"nogil", "error_model", "cache", "forceinline"}
# Of dispatchers. The documentation does not name `get_overload`, so the package does without it if it is gone.
OF_DISPATCHERS = {"signatures", "get_overload"}
PRIVATE = {"overloads", "compile", "enable_caching", "disable_compile", "stats", "targetctx", "typingctx", "config"}


def names_in(source: str) -> dict[str, set[str]]:
    """Return what a source imports of both libraries, the attributes and options of numba, and all attributes."""
    found: dict[str, set[str]] = {"imports": set(), "attributes": set(), "options": set(), "all": set()}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found["imports"] |= {each.name for each in names if each.name.split(".")[0] in ("numba", "llvmlite")}
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in ("numba", "llvmlite"):
                found["imports"] |= {f"{module}.{each.name}" for each in names}
            case ast.Attribute(value=ast.Name(id="numba"), attr=name):
                found["attributes"].add(name)
            case ast.Attribute(attr=name):
                found["all"].add(name)
            case ast.Call(func=ast.Name(id="decorate" | "register_jitable"), keywords=keywords):
                found["options"] |= {str(each.arg) for each in keywords}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_public_names_of_numba_are_used(path: Path) -> None:
    found = names_in(path.read_text())
    assert found["imports"] <= IMPORTS
    assert found["attributes"] <= ATTRIBUTES
    if found["imports"] or path.parent.name == "kernels":
        assert found["options"] <= OPTIONS
        assert found["all"] & PRIVATE == set()


@pytest.mark.parametrize(
    ("source", "kind", "name"),
    [
        ("from numba.core import cgutils", "imports", "numba.core.cgutils"),
        ("import llvmlite.binding", "imports", "llvmlite.binding"),
        ("import numba\nnumba.config.DISABLE_JIT = 1", "attributes", "config"),
        ("decorate([], _nrt=False)", "options", "_nrt"),
        ("kernel.overloads", "all", "overloads"),
    ],
)
def test_a_private_name_is_seen(source: str, kind: str, name: str) -> None:
    allowed = {"imports": IMPORTS, "attributes": ATTRIBUTES, "options": OPTIONS, "all": set[str]()}[kind]
    assert names_in(source)[kind] - allowed == {name}


def test_a_kernel_has_a_dispatcher_with_one_signature_and_takes_no_other_types() -> None:
    kernel = table.get_kernel("nstep")
    assert len(kernel.signatures) == 1
    with pytest.raises(TypeError, match="No matching definition"):
        kernel([1.0], [1], 1.0, [0.0])
    assert len(kernel.signatures) == 1
