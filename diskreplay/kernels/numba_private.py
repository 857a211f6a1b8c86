"""What kernels use of numba beyond what numba promises to keep; no other module names any of it.

Each release of numba may change these: `pyproject.toml` allows those that were tried, and
`tests/kernels/test_numba_private.py` says of each name here whether it is still what it was. What is public
(`njit`, `types`, `extending.intrinsic`, and llvmlite's builder) is used where it is needed.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils, config, typed_passes, typeinfer, untyped_passes
from numba.core.caching import Cache as Cache, CompileResultCacheImpl, _CacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.np.arrayobj import populate_array

CacheLocator = _CacheLocator

_PASSES = (
    untyped_passes.TranslateByteCode,
    untyped_passes.FixupArgs,
    untyped_passes.IRProcessing,
    untyped_passes.ReconstructSSA,
    typed_passes.NopythonTypeInference,
    typed_passes.PreLowerStripPhis,
    typed_passes.IRLegalization,
    typed_passes.AnnotateTypes,
    typed_passes.NativeLowering,
    typed_passes.NoPythonBackend,
)

# What numba and llvmlite have no types for: a type of numba's, one of a call, a compiled function and the object that
# holds it, a target of compiling, a builder of LLVM's code, and a value in it.
NumbaType: TypeAlias = Any
Signature: TypeAlias = Any
Dispatcher: TypeAlias = Any
Context: TypeAlias = Any
Builder: TypeAlias = Any
Value: TypeAlias = Any


def kernel_options(*, inner: bool, inlined: bool) -> dict[str, Any]:
    """Return the options of `numba.njit` for kernels, beside the public ones."""
    # No kernel makes an array or keeps one (one that does is not compiled): counting references would cost a tenth of
    # the time of a small batch, and as much of compiling. Each wrapper takes its time to compile: nobody calls kernels
    # from C, nor inner ones from Python.
    return {
        "_nrt": False,
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": inner,
        "forceinline": inlined,
        "pipeline_class": _KernelCompiler,
    }


class _NoEngine:
    """In place of what runs machine code, which is told where the globals of a function are."""

    def set_env(self, env_name: str, env: object) -> None:
        """Do nothing."""


class _KnownCalls:
    """Tells numba the types of calls, as its own typing context does, but searches once for those of the same kind.

    numba tries at each `+` whether it is one of arrays, and the like, which takes a tenth of the time of compiling.

    It hands on to that context and is none itself: what numba makes for one, it would make for another again.
    """

    _signatures: ClassVar[dict[tuple[NumbaType, tuple[NumbaType, ...]], Signature]] = {}

    def __init__(self, context: Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(
        self, function: NumbaType, args: tuple[NumbaType, ...], kws: dict[str, NumbaType]
    ) -> Signature:
        """Return the types of a call."""
        if kws or not isinstance(function, types.Function):
            return self._context.resolve_function_type(function, args, kws)
        key = function, args
        if key not in self._signatures:
            self._signatures[key] = self._context.resolve_function_type(function, args, kws)
        return self._signatures[key]


class _KernelCompiler(CompilerBase):
    """The passes that a kernel needs.

    numba's others look at every function for what none of ours has (closures, arithmetic on whole arrays, `with`,
    `raise`, branches on a missing argument), which takes a tenth of the time of compiling.
    """

    def define_pipelines(self) -> list[PassManager]:
        """Compile the inner kernels that this one calls, and return the one list of passes."""
        state = self.state
        _compile_called(state.func_id.func)
        state.typingctx = _KnownCalls(state.typingctx)
        if state.flags.no_cpython_wrapper:
            state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        manager = PassManager("kernel")
        for one in _PASSES:
            manager.add_pass(one, one.__name__)
        manager.finalize()
        return [manager]


def _compile_called(function: Callable[..., Any]) -> None:
    """Compile the inner kernels that a function calls, if that has not been done."""
    names = inspect.getclosurevars(function)
    for called in (*names.globals.values(), *names.nonlocals.values()):
        if getattr(called, "is_inner", False) and not called.signatures:
            compile_one(called, called.kernel_signature, None)


class _PartLibrary(JITCodeLibrary):
    """The code of an inner kernel: it is optimized, and becomes machine code, as part of its callers, and not before.

    That saves a seventh of the time of compiling.
    """

    codegen = _NoEngine()

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: numba's for a function that is not in the library."""
        return 0


def is_disabled() -> bool:
    """Tell whether `NUMBA_DISABLE_JIT`, or the program, asks for functions that are not compiled."""
    return bool(config.DISABLE_JIT)  # type: ignore[attr-defined]


@contextmanager
def jit_enabled() -> Iterator[None]:
    """Have `numba.njit` return a dispatcher, though DISABLE_JIT was set after the first kernels were compiled."""
    disabled = config.DISABLE_JIT  # type: ignore[attr-defined]
    config.DISABLE_JIT = 0  # type: ignore[attr-defined]
    try:
        yield
    finally:
        config.DISABLE_JIT = disabled  # type: ignore[attr-defined]


def forbid_compiling(dispatcher: Dispatcher) -> None:
    """Have a call with other types than those that were compiled raise, and not compile."""
    dispatcher._can_compile = False


def compile_one(dispatcher: Dispatcher, signature: NumbaType, cache: Cache | None) -> None:
    """Compile a function for one signature, or load it from a cache, and no other ever."""
    if cache is not None:
        dispatcher._cache = cache
    try:
        dispatcher._can_compile = True
        with typeinfer.register_dispatcher(dispatcher):
            dispatcher.compile(signature)
    finally:
        forbid_compiling(dispatcher)


def entry_point(dispatcher: Dispatcher) -> Callable[..., Any]:
    """Return the only compiled version of a function, to be called from Python: no type of an argument is looked at."""
    (compiled,) = dispatcher.overloads.values()
    found: Callable[..., Any] = compiled.entry_point
    return found


def chosen_folder() -> str:
    """Return what `NUMBA_CACHE_DIR` says, or an empty string."""
    return str(config.CACHE_DIR)  # type: ignore[attr-defined]  # set from the environment, by name


def located_by(locator: type[CacheLocator]) -> type[CompileResultCacheImpl]:
    """Return the kind of a cache's content that is kept where a locator says."""
    return type("LocatedResult", (CompileResultCacheImpl,), {"_locator_classes": [locator]})


class CompiledFunction:
    """A compiled function under a name by which LLVM's code can call it where it is."""

    def __init__(self, dispatcher: Dispatcher, symbol: str) -> None:
        (compiled,) = dispatcher.overloads.values()
        self.result, self.kinds = compiled.signature.return_type, compiled.signature.args
        self._symbol = symbol
        address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        llvmlite.binding.add_symbol(symbol, address)

    def call(self, context: Context, builder: Builder, args: Sequence[Value]) -> Value:
        """Write a call, after which an exception that was raised there goes on here."""
        convention = context.call_conv
        kind = convention.get_function_type(self.result, self.kinds)
        function = cgutils.get_or_insert_function(builder.module, kind, self._symbol)
        status, found = convention.call_function(builder, function, self.result, self.kinds, args)
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return found


def array_at(context: Context, builder: Builder, kind: NumbaType, address: Value, shape: Sequence[Value]) -> Value:
    """Write an array of a contiguous type over the memory at an address, which it borrows."""
    item = context.get_data_type(kind.dtype)
    width = ir.Constant(ir.IntType(64), context.get_abi_sizeof(item))
    array, data = context.make_array(kind)(context, builder), builder.inttoptr(address, item.as_pointer())
    strides = [*(builder.mul(count, width) for count in shape[1:]), width]
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=width, meminfo=None)
    return array._getvalue()


def no_value(context: Context) -> Value:
    """Return what a function without a result returns."""
    return context.get_dummy_value()


def copy_memory(builder: Builder, target: Value, source: Value, count: Value) -> None:
    """Write a copy of bytes between ranges that do not overlap."""
    cgutils.raw_memcpy(builder, target, source, count, 1)


def zero_memory(builder: Builder, target: Value, count: Value) -> None:
    """Write zeros to bytes."""
    cgutils.memset(builder, target, count, 0)


def c_function(builder: Builder, kind: ir.FunctionType, name: str) -> Value:
    """Return a function of the C library, to be called."""
    return cgutils.get_or_insert_function(builder.module, kind, name)
