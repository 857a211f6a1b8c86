"""Which of the names that numba does not promise is no longer what it was: one test each."""

import ast
import inspect
import mmap
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import types
from numba.core.caching import Cache
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.typing.context import BaseContext

import diskreplay
from diskreplay.kernels import jit, numba_private

PACKAGE = Path(diskreplay.__file__).parent

# name -> the parameters that we give it; None: it is no function
NAMES: dict[str, tuple[str, ...] | None] = {
    "llvmlite.binding:add_symbol": ("name", "address"),
    "numba.core.caching:Cache": ("py_func",),
    "numba.core.caching:Cache.cache_path": None,
    "numba.core.caching:Cache.flush": ("self",),
    "numba.core.caching:Cache.load_overload": ("self", "sig", "target_context"),
    "numba.core.caching:Cache.save_overload": ("self", "sig", "data"),
    "numba.core.caching:Cache._impl_class": None,
    "numba.core.caching:CompileResultCacheImpl": ("py_func",),
    "numba.core.caching:CompileResultCacheImpl._locator_classes": None,
    "numba.core.caching:_CacheLocator": (),
    "numba.core.caching:_CacheLocator.from_function": ("py_func", "py_file"),
    "numba.core.caching:_CacheLocator.get_cache_path": ("self",),
    "numba.core.caching:_CacheLocator.get_disambiguator": ("self",),
    "numba.core.caching:_CacheLocator.get_source_stamp": ("self",),
    "numba.core.cgutils:get_or_insert_function": ("module", "fnty", "name"),
    "numba.core.cgutils:if_unlikely": ("builder", "pred"),
    "numba.core.cgutils:memset": ("builder", "ptr", "size", "value"),
    "numba.core.cgutils:raw_memcpy": ("builder", "dst", "src", "count", "itemsize"),
    "numba.core.codegen:JITCPUCodegen.set_env": ("self", "env_name", "env"),
    "numba.core.codegen:JITCodeLibrary": ("codegen", "name"),
    "numba.core.codegen:JITCodeLibrary._finalize_final_module": ("self",),
    "numba.core.codegen:JITCodeLibrary._optimize_final_module": ("self",),
    "numba.core.codegen:JITCodeLibrary._optimize_functions": ("self", "ll_module"),
    "numba.core.codegen:JITCodeLibrary.codegen": None,
    "numba.core.codegen:JITCodeLibrary.get_pointer_to_function": ("self", "name"),
    "numba.core.compiler:CompilerBase": (),
    "numba.core.compiler:CompilerBase.define_pipelines": ("self",),
    "numba.core.compiler_machinery:PassManager": ("pipeline_name",),
    "numba.core.compiler_machinery:PassManager.add_pass": ("self", "pss", "description"),
    "numba.core.compiler_machinery:PassManager.finalize": ("self",),
    "numba.core.config:CACHE_DIR": None,
    "numba.core.config:DISABLE_JIT": None,
    "numba.core.typed_passes:AnnotateTypes": (),
    "numba.core.typed_passes:IRLegalization": (),
    "numba.core.typed_passes:NativeLowering": (),
    "numba.core.typed_passes:NoPythonBackend": (),
    "numba.core.typed_passes:NopythonTypeInference": (),
    "numba.core.typed_passes:PreLowerStripPhis": (),
    "numba.core.typeinfer:register_dispatcher": ("disp",),
    "numba.core.untyped_passes:FixupArgs": (),
    "numba.core.untyped_passes:IRProcessing": (),
    "numba.core.untyped_passes:ReconstructSSA": (),
    "numba.core.untyped_passes:TranslateByteCode": (),
    "numba.np.arrayobj:populate_array": ("array", "data", "shape", "strides", "itemsize", "meminfo"),
}
IMPORTED = ("core.caching.", "core.codegen.", "core.compiler.", "core.compiler_machinery.", "np.arrayobj.")
CONTEXT = {
    "call_conv.call_function": ("builder", "callee", "resty", "argtys"),
    "call_conv.get_function_type": ("restype", "argtypes"),
    "call_conv.return_status_propagate": ("builder", "status"),
    "get_abi_sizeof": ("ty",),
    "get_data_type": ("ty",),
    "get_dummy_value": (),
    "make_array": ("typ",),
}


def look_up(root: Any, path: str) -> Any:
    for name in path.split("."):
        if not hasattr(root, name):
            pytest.fail(f"numba {numba.__version__} has no {name} in {root!r}, which kernels.numba_private uses")
        root = getattr(root, name)
    return root


def check(found: Any, parameters: tuple[str, ...] | None) -> None:
    if parameters is not None:
        names = [name for name in inspect.signature(found).parameters if name not in ("args", "kwargs")]
        assert tuple(names[: len(parameters)]) == parameters, f"numba {numba.__version__}: {found!r}"


@pytest.mark.parametrize("name", NAMES)
def test_numba_has_the_private_name(name: str) -> None:
    module, _, path = name.partition(":")
    check(look_up(import_module(module), path), NAMES[name])


@pytest.mark.parametrize("name", CONTEXT)
def test_what_compiles_for_this_processor_has_the_method(name: str) -> None:
    check(look_up(cpu_target.target_context, name), CONTEXT[name])


@pytest.mark.parametrize(("name", "value"), numba_private.kernel_options(inner=True, inlined=True).items())
def test_numba_knows_the_private_option(name: str, value: bool) -> None:
    made = numba.njit("int64(int64)", **{name: value})(lambda x: x + 1)
    assert len(made.overloads) == 1


def doubled(x: int) -> int:
    return 2 * x


def compiled(kernel: Any) -> Any:
    """Compile a kernel of this module, past the cache: that knows nothing of changes here."""
    numba_private.compile_one(kernel, kernel.kernel_signature, None)
    return kernel


def test_a_function_is_compiled_for_one_signature_and_for_no_other() -> None:
    made = numba.njit(doubled)
    assert isinstance(made, CPUDispatcher)
    for name in ("_can_compile", "_cache", "compile", "overloads"):
        look_up(made, name)
    numba_private.forbid_compiling(made)
    with pytest.raises(TypeError, match="No matching definition"):
        made(2)
    numba_private.compile_one(made, types.int64(types.int64), None)
    assert made(2) == 4
    with pytest.raises(TypeError, match="No matching definition"):
        made("2")
    assert len(made.signatures) == 1


def test_a_cache_is_asked_for_a_signature_before_it_is_compiled_and_given_it_afterwards() -> None:
    class Noted(Cache):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def load_overload(self, sig: Any, target_context: Any) -> None:
            self.calls.append("load")

        def save_overload(self, sig: Any, data: Any) -> None:
            self.calls.append(f"save {data.signature}")

    noted = Noted()
    numba_private.compile_one(numba.njit(doubled), types.int64(types.int64), noted)
    assert noted.calls == ["load", "save (int64,) -> int64"]


@pytest.mark.parametrize(
    "name",
    [
        "signature.return_type",
        "signature.args",
        "library.get_pointer_to_function",
        "fndesc.llvm_func_name",
        "entry_point",
    ],
)
def test_a_compiled_function_says(name: str) -> None:
    made = numba.njit(doubled)
    numba_private.compile_one(made, types.int64(types.int64), None)
    look_up(*made.overloads.values(), name)
    function = numba_private.CompiledFunction(made, "diskreplay_test_doubled")
    assert (function.result, function.kinds) == (types.int64, (types.int64,))


def test_a_kernel_is_compiled_where_others_were_before_compiling_was_switched_off(monkeypatch) -> None:
    monkeypatch.setattr(numba_private.config, "DISABLE_JIT", 1)

    @jit.kernel("int", "int", "int")
    def plus(a, b):
        return jit.lowest_bit(a) + b

    assert compiled(plus)(8, 4) == 7
    assert numba_private.config.DISABLE_JIT == 1


def test_a_compiled_function_is_called_from_python_without_a_look_at_types() -> None:
    @jit.kernel("int", "ints", "out_ints", "int")
    def put_total(numbers, out, divisor):
        out[0] = numbers.sum() // divisor
        return len(numbers)

    call = numba_private.entry_point(compiled(put_total))
    numbers, out = np.arange(10, 16), np.zeros(1, np.int64)
    assert call(numbers, out, 5) == 6
    assert out.tolist() == [15]
    with pytest.raises(ZeroDivisionError):
        call(numbers, out, 0)
    with pytest.raises(TypeError, match="No matching definition"):
        put_total(numbers.astype(np.float64), out, 5)
    call(numbers.astype(np.float64), out, 5)  # misread, and not refused


def test_a_compiled_function_is_called_where_it_is_and_its_exception_goes_on_in_the_caller() -> None:
    @jit.kernel("int", "int", "int")
    def quotient(a, b):
        return a // b

    called = jit.apart(compiled(quotient))

    @jit.kernel("int", "int", "int")
    def plus_one(a, b):
        return called(a, b) + 1

    assert compiled(plus_one)(7, 2) == 4
    with pytest.raises(ZeroDivisionError):
        plus_one(7, 0)


def test_an_inner_kernel_becomes_part_of_its_callers_and_its_exception_goes_on_there() -> None:
    @jit.kernel("int", "int", "int", inner=True)
    def quotient(a, b):
        return a // b

    @jit.kernel("int", "int", "int", inner=True)
    def larger_quotient(a, b):
        return max(quotient(a, b), quotient(b, a))

    @jit.kernel("int", "int", "int")
    def plus_one(a, b):
        return larger_quotient(a, b) + 1

    with pytest.raises(ValueError, match="larger_quotient is an inner kernel"):
        jit.apart(larger_quotient)
    assert compiled(plus_one)(7, 2) == compiled(plus_one)(2, 7) == 4
    with pytest.raises(ZeroDivisionError):
        plus_one(0, 7)
    (part,) = quotient.overloads.values()
    assert isinstance(part.library, numba_private.JITCodeLibrary)
    for name in ("_codegen._data_layout", "_finalized"):
        look_up(part.library, name)
    assert part.library.get_pointer_to_function(part.fndesc.llvm_func_name) == 0
    (whole,) = plus_one.overloads.values()
    assert whole.library.get_pointer_to_function(whole.fndesc.llvm_func_name) != 0


def test_types_of_calls_are_searched_for_once_and_of_other_functions_each_time(monkeypatch) -> None:
    found: list[Any] = []
    search = BaseContext.resolve_function_type

    def counted(self: Any, func: Any, args: Any, kws: Any) -> Any:
        found.append((func, args))
        return search(self, func, args, kws)

    @jit.kernel("float", "int", "float")
    def one(a, b):
        return a * b + b

    @jit.kernel("float", "int", "float")
    def other(a, b):
        return (a + 1) * b + b

    monkeypatch.setattr(BaseContext, "resolve_function_type", counted)
    monkeypatch.setattr(numba_private._KnownCalls, "_signatures", {})
    assert compiled(one)(2, 0.25) == 0.75
    assert len(found) == 2
    assert compiled(other)(2, 0.25) == 1.0
    assert len(found) == len(set(found)) == 3
    for _ in range(2):
        assert numba.njit("float64(int64, float64)")(lambda a, b: a * b)(2, 0.25) == 0.5
    of_users = found[3:]
    assert of_users[: len(of_users) // 2] == of_users[len(of_users) // 2 :] != []


def test_memory_is_an_array_and_is_copied_and_set_to_zero() -> None:
    @jit.kernel("int", "int", "int")
    def total(target, source):
        jit.copy_bytes(target, source, 48)
        jit.zero_bytes(target, 8)
        table = jit.ints2_at(target, 2, 3)
        table[1, 2] += 1
        return table.sum()

    source, target = np.arange(10, 16), np.zeros(6, np.int64)
    assert compiled(total)(target.ctypes.data, source.ctypes.data) == sum(range(11, 16)) + 1
    assert target.tolist() == [0, 11, 12, 13, 14, 16]


def test_a_function_of_the_c_library_is_called() -> None:
    @jit.kernel("int", "int", "int")
    def advise(address, advice):
        return jit.madvise(address, 0, advice)

    assert compiled(advise)(mmap.PAGESIZE, 0) == 0
    assert advise(mmap.PAGESIZE + 1, 0) == -1


def used(source: str) -> set[str]:
    """Return the modules that are imported, and the attributes and names in the text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module, *(f"{module}.{alias.name}" for alias in names)}
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                found.add(name)
    return found


def test_every_private_name_is_tested() -> None:
    text = Path(numba_private.__file__).read_text()
    for module in ("cgutils", "config", "typed_passes", "typeinfer", "untyped_passes"):
        named = set(re.findall(rf"\b{module}\.(\w+)", text))
        assert named == {name.partition(":")[2] for name in NAMES if name.partition(":")[0].endswith(f".{module}")}
    taken = {name for name in used(text) if name.startswith(tuple(f"numba.{module}" for module in IMPORTED))}
    assert taken <= {name.replace(":", ".") for name in NAMES}
    assert set(re.findall(r"\b(?:context|convention)\.(\w+)", text)) == {*".".join(CONTEXT).split(".")}


@pytest.mark.slow
def test_no_other_module_names_what_numba_does_not_promise() -> None:
    options = numba_private.kernel_options(inner=True, inlined=True)
    attributes = {"_can_compile", "_cache", "_getvalue", "fndesc", "call_conv", "overloads", *options}
    for path in sorted(PACKAGE.rglob("*.py")):
        names = used(path.read_text())
        modules = {name for name in names if name.startswith(("numba.core", "numba.np", "llvmlite.binding"))}
        if path.name == "numba_private.py":
            assert {name.partition(":")[0] for name in NAMES} <= modules
            assert attributes <= names
        else:
            assert modules | attributes & names == set(), path
