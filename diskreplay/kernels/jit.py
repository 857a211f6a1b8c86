"""How kernels are compiled, and the few instructions on raw addresses that Python cannot write.

Only this module, `cache` and `numba_private` import numba. Importing it costs a third of a second, so nothing imports
this module before a reader is built.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import MissingExtra

with MissingExtra.raised_for("sampling", "torch"):
    import numba
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    from diskreplay.kernels import interpreted, numba_private
    from diskreplay.kernels.cache import compile_kernel, compiling
    from diskreplay.kernels.numba_private import Builder, Context, NumbaType, Value

STREAM_BLOCK = 128  # bytes: two cache lines
# Read once, for all kernels: compiled ones cannot call interpreted ones.
INTERPRETED = numba_private.is_disabled()

# More that has no type: one of LLVM's types, and a function that kernels call and that becomes LLVM's code.
LLVMType = Any
Instruction = Any

_BYTE, _INT32, _INT, _FLOAT, _DOUBLE = *map(ir.IntType, (8, 32, 64)), ir.FloatType(), ir.DoubleType()


def _typed(
    result: NumbaType, kinds: Sequence[NumbaType], generate: Callable[..., Value], plain: Callable[..., Any]
) -> Instruction:
    """Return an instruction of these types that `generate` makes, or `plain`, if kernels are not compiled."""
    if INTERPRETED:
        return plain

    def call(typing_context: Any, *arguments: Any) -> Any:
        return result(*kinds), generate

    names = ["typing_context", *(f"argument{i}" for i in range(len(kinds)))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # numba counts them
    return intrinsic(call)


def _instruction(
    plain: Callable[..., Any], result: NumbaType, *kinds: NumbaType
) -> Callable[[Callable[..., Value | None]], Instruction]:
    """Make an instruction of these types of a function that writes it with a builder; None is no value.

    `plain` does the same in Python.
    """

    def decorate(build: Callable[..., Value | None]) -> Instruction:
        def generate(context: Context, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
            found = build(builder, *args)
            return numba_private.no_value(context) if found is None else found

        return _typed(result, kinds, generate, plain)

    return decorate


def _numba(kind: type[np.generic]) -> NumbaType:
    """Return numba's type of numbers of one of NumPy's."""
    return getattr(types, kind.__name__)


def _loading(kind: type[np.generic], llvm_type: LLVMType) -> Instruction:
    """Return an instruction that reads the number at an address."""

    def load(builder: Builder, address: Value) -> Value:
        return builder.load(builder.inttoptr(address, llvm_type.as_pointer()))

    return _instruction(interpreted.loading(kind), _numba(kind), types.int64)(load)


def _storing(kind: type[np.generic], llvm_type: LLVMType) -> Instruction:
    """Return an instruction that writes a number to an address."""

    def store(builder: Builder, address: Value, value: Value) -> None:
        builder.store(value, builder.inttoptr(address, llvm_type.as_pointer()))

    return _instruction(interpreted.storing(kind), types.void, types.int64, _numba(kind))(store)


def _reading_as(kind: type[np.generic], llvm_type: LLVMType, given: type[np.generic]) -> Instruction:
    """Return an instruction that takes the bits of a number for another one."""
    plain = interpreted.reading_as(kind, given)
    return _instruction(plain, _numba(kind), _numba(given))(lambda builder, x: builder.bitcast(x, llvm_type))


def _array_at(item: type[np.generic], ndim: int) -> Instruction:
    """Return an instruction that makes an array of the memory at an address, which it borrows."""
    kind = types.Array(_numba(item), ndim, "C")

    def plain(address: int, *shape: int) -> NDArray[Any]:
        return interpreted.array_at(address, item, shape)

    def generate(context: Context, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
        return numba_private.array_at(context, builder, kind, args[0], args[1:])

    return _typed(kind, [types.int64] * (1 + ndim), generate, plain)


ints_at, ints2_at, bytes_at = _array_at(np.int64, 1), _array_at(np.int64, 2), _array_at(np.uint8, 1)
load_byte: Callable[[int], int] = _loading(np.uint8, _BYTE)
load_int: Callable[[int], int] = _loading(np.int64, _INT)
load_float32: Callable[[int], float] = _loading(np.float32, _FLOAT)
load_float64: Callable[[int], float] = _loading(np.float64, _DOUBLE)
store_byte = _storing(np.uint8, _BYTE)
store_float32 = _storing(np.float32, _FLOAT)
bits_of: Callable[[float], int] = _reading_as(np.int64, _INT, np.float64)
number_of: Callable[[int], float] = _reading_as(np.float64, _DOUBLE, np.int64)


@_instruction(interpreted.loading(np.int64), types.int64, types.int64)
def load_shared(builder: Builder, address: Value) -> Value:
    """Read the int64 at an address that another process stores to, before anything that is read after it."""
    return builder.load_atomic(builder.inttoptr(address, _INT.as_pointer()), "acquire", 8)


@_instruction(interpreted.do_nothing, types.void, types.int64)
def touch(builder: Builder, address: Value) -> None:
    """Read the byte at an address, which must be mapped, for its cache line; unlike a prefetch it is never dropped."""
    builder.load_atomic(builder.inttoptr(address, _BYTE.as_pointer()), "monotonic", 1)


@_instruction(interpreted.copy_bytes, types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Builder, target: Value, source: Value, count: Value) -> None:
    """Copy `count` bytes from one address to another; the ranges do not overlap."""
    to, origin = (builder.inttoptr(a, _BYTE.as_pointer()) for a in (target, source))
    numba_private.copy_memory(builder, to, origin, count)


@_instruction(interpreted.lowest_bit, types.int64, types.int64)
def lowest_bit(builder: Builder, x: Value) -> Value:
    """Count the zeros below the lowest bit that is set; one must be."""
    return builder.cttz(x, ir.Constant(ir.IntType(1), 1))


@_instruction(interpreted.zero_bytes, types.void, types.int64, types.int64)
def zero_bytes(builder: Builder, target: Value, count: Value) -> None:
    """Set `count` bytes from an address on to zero."""
    numba_private.zero_memory(builder, builder.inttoptr(target, _BYTE.as_pointer()), count)


@_instruction(interpreted.do_nothing, types.void, types.int64)
def prefetch(builder: Builder, address: Value) -> None:
    """Start to load the cache line of an address; it need not be mapped."""
    pointer = _BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _INT32, _INT32, _INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    for_reading, keep_in_all_caches, data = _INT32(0), _INT32(3), _INT32(1)
    builder.call(function, [builder.inttoptr(address, pointer), for_reading, keep_in_all_caches, data])


@_instruction(interpreted.madvise, types.int64, types.int64, types.int64, types.int64)
def madvise(builder: Builder, address: Value, count: Value, advice: Value) -> Value:
    """Call the C library's madvise; 0 is success."""
    kind = ir.FunctionType(_INT32, [_INT, _INT, _INT32])
    function = numba_private.c_function(builder, kind, "madvise")
    return builder.sext(builder.call(function, [address, count, builder.trunc(advice, _INT32)]), _INT)


@_instruction(partial(interpreted.copy_bytes, count=STREAM_BLOCK), types.void, types.int64, types.int64)
def stream_block(builder: Builder, target: Value, source: Value) -> None:
    """Copy `STREAM_BLOCK` bytes, and leave the target's lines out of the caches; it lies at a multiple of 32."""
    pointer, offsets = ir.VectorType(_INT, 4).as_pointer(), [_INT(at) for at in range(0, STREAM_BLOCK, 32)]
    to, origin = ([builder.inttoptr(builder.add(a, at), pointer) for at in offsets] for a in (target, source))
    loaded = [builder.load(place, align=1) for place in origin]
    for value, place in zip(loaded, to, strict=True):
        kept_out = builder.module.add_metadata([ir.Constant(_INT32, 1)])
        builder.store(value, place, align=32).set_metadata("nontemporal", kept_out)


@_instruction(interpreted.do_nothing, types.void)
def fence(builder: Builder) -> None:
    """Make streamed stores visible to other threads before any later one."""
    builder.fence("seq_cst")


# Inputs are typed read-only, which accepts writable arrays too: one compiled version serves both.
_TYPES: dict[str, Any] = {
    "int": types.int64,
    "uint": types.uint64,
    "float": types.float64,
    "none": types.void,
    "ints": types.Array(types.int64, 1, "C", readonly=True),
    "ints2": types.Array(types.int64, 2, "C", readonly=True),
    "ints32": types.Array(types.int32, 1, "C", readonly=True),
    "bytes": types.Array(types.uint8, 1, "C", readonly=True),
    "floats": types.Array(types.float64, 1, "C", readonly=True),
    "floats2": types.Array(types.float64, 2, "C", readonly=True),
    "bytes2": types.Array(types.uint8, 2, "C", readonly=True),
    "out_ints": types.Array(types.int64, 1, "C"),
    "out_ints32": types.Array(types.int32, 1, "C"),
    "out_ints2": types.Array(types.int64, 2, "C"),
    "out_bytes": types.Array(types.uint8, 1, "C"),
    "out_floats": types.Array(types.float64, 1, "C"),
    "out_floats2": types.Array(types.float64, 2, "C"),
    "out_floats32": types.Array(types.float32, 1, "C"),
    "out_floats32_2": types.Array(types.float32, 2, "C"),
}


def kernel(
    result: str, *arguments: str, checked: bool = True, inner: bool = False, inlined: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a kernel of one signature.

    It is compiled, or loaded, when `ready` or `apart` asks for it: another kernel cannot call it before. One that is
    `inner` is only ever a part of kernels that call it, by its name and not as a module's attribute: it is compiled
    before the first of these that must be, and not kept. One that is `inlined` becomes part of its caller, however long
    it is: a call passes each array as seven numbers.

    A division by zero raises, unless it is not `checked`: then a loop of divisions can become vector code. Nothing else
    may be raised, and an inner kernel cannot print.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if INTERPRETED:
            return function if inner else interpreted.interpreted(function, result, arguments)
        # Serial and nogil: numba's thread pools hang or die in a forked child, and callers bring their own threads.
        options: dict[str, Any] = {"nogil": True, "error_model": "python" if checked else "numpy"}
        options |= numba_private.kernel_options(inner=inner, inlined=inlined)
        with numba_private.jit_enabled():
            made: Any = numba.njit(**options)(function)
        numba_private.forbid_compiling(made)
        made.kernel_signature = _TYPES[result](*(_TYPES[a] for a in arguments))
        made.is_inner = inner
        return made

    return decorate


def ready(kernel: Any) -> Any:
    """Compile a kernel that is not `inner`, or load it, if that has not been done; return it."""
    if INTERPRETED:
        return kernel
    if kernel.is_inner:
        raise ValueError(f"{kernel.__name__} is an inner kernel, which cannot be called by itself")
    with compiling:
        if not kernel.signatures:
            compile_kernel(kernel, kernel.kernel_signature)
    return kernel


def apart(called: Any) -> Any:
    """Return an instruction that calls a compiled kernel where it is.

    A call of the kernel itself copies it into the caller, where it is optimized once more: right for what is small or
    in a loop.
    """
    if INTERPRETED:
        return called
    function = numba_private.CompiledFunction(ready(called), f"diskreplay_{called.__name__}")

    def generate(context: Context, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
        return function.call(context, builder, args)

    return _typed(function.result, function.kinds, generate, called)
