"""The compilation of kernels, and instructions that Python does not have, such as reads at raw addresses.

Only the public interface of numba is used. The package `kernels` is plain Python and does not import numba, since that
import takes a third of a second. `cache` imports a copy of the package with another name, and numba compiles this copy.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import interpreted

IS_COMPILED = not __name__.startswith("diskreplay.")
"""Whether this module belongs to the copy of the package that numba compiles, see `cache.import_kernels`."""

STREAM_BLOCK = 64  # a cache line, in bytes

# numba and llvmlite do not export these types. A `Builder` writes LLVM code, and a `Value` of an `LLVMType` is a value
# in this code. An `Instruction` is a function that becomes LLVM code in the kernels that call it.
Builder = Any
Value = Any
LLVMType = Any
Instruction = Any

carray: Callable[..., NDArray[Any]] = interpreted.carray
if IS_COMPILED:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic, register_jitable

    carray = numba.carray  # type: ignore[attr-defined]
    _BYTE, _INT32, _INT, _FLOAT, _DOUBLE = *map(ir.IntType, (8, 32, 64)), ir.FloatType(), ir.DoubleType()
    _POINTER, _NO, _YES = _BYTE.as_pointer(), ir.IntType(1)(0), ir.IntType(1)(1)

    # Arrays that a kernel only reads have read-only types, because these types also accept writable arrays.
    _TYPES: dict[str, Any] = {
        "int": types.int64,
        "float": types.float64,
        "none": types.void,
        "ints": types.Array(types.int64, 1, "C", readonly=True),
        "ints2": types.Array(types.int64, 2, "C", readonly=True),
        "strided_ints2": types.Array(types.int64, 2, "A", readonly=True),
        "ints32": types.Array(types.int32, 1, "C", readonly=True),
        "floats": types.Array(types.float64, 1, "C", readonly=True),
        "floats2": types.Array(types.float64, 2, "C", readonly=True),
        "bytes2": types.Array(types.uint8, 2, "C", readonly=True),
        "out_ints": types.Array(types.int64, 1, "C"),
        "out_ints2": types.Array(types.int64, 2, "C"),
        "out_bytes": types.Array(types.uint8, 1, "C"),
        "out_floats": types.Array(types.float64, 1, "C"),
        "out_floats2": types.Array(types.float64, 2, "C"),
        "out_floats32": types.Array(types.float32, 1, "C"),
    }
# The numba types of each kernel, and whether the kernel is shared, see `kernel`.
_SIGNATURES: dict[Callable[..., Any], tuple[Any, bool]] = {}
_ERRORS = "numpy"  # with this model, divisions raise no errors, so that loops with divisions can become vector code


def kernel(result: str, *arguments: str, shared: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function a kernel; `result` and `arguments` are names of types in `_TYPES`.

    Kernels may call each other. A `shared` kernel is compiled once for all of its callers; use this for a kernel that
    both Python and other kernels call. Any other kernel is compiled again as a part of each caller. Kernels must not
    raise errors, and must not divide by zero.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not IS_COMPILED:
            return interpreted.interpreted(function, result, arguments)
        _SIGNATURES[function] = _TYPES[result](*(_TYPES[a] for a in arguments)), shared
        return register_jitable(error_model=_ERRORS)(function)

    return decorate


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let numba compile a function as a part of each kernel that calls the function."""
    return register_jitable(function) if IS_COMPILED else function


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let numba always inline a function; use this decorator for functions that only one kernel calls."""
    return register_jitable(forceinline=True)(function) if IS_COMPILED else function


def shared_in(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    found = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [each for each in found if inspect.isfunction(each) and _SIGNATURES.get(each, (None, False))[1]]


def compiled(function: Callable[..., Any], kept: bool) -> Callable[..., Any]:
    # numba's own threads hang or die in a forked child, so they are not used. nogil is set, because callers use
    # threads.
    decorate: Callable[..., Any] = numba.njit
    return decorate([_SIGNATURES[function][0]], nogil=True, error_model=_ERRORS, cache=kept)(function)


def _instruction(plain: Callable[..., Any], result: str, *kinds: str) -> Callable[[Callable[..., Value]], Instruction]:
    """Return a decorator: it turns a function that writes LLVM code with a builder into an instruction of kernels.

    `result` and `kinds` name the numba types of the instruction's value and arguments. An instruction without a value
    returns 0. `plain` is the same instruction in plain Python.
    """

    def decorate(build: Callable[..., Value]) -> Instruction:
        if not IS_COMPILED:
            return plain
        signature = getattr(types, result)(*(getattr(types, kind) for kind in kinds))

        def generate(context: Any, builder: Builder, signature: Any, args: Sequence[Value]) -> Value:
            found = build(builder, *args)
            return _INT(0) if found is None else found

        def call(typing_context: Any, *arguments: Any) -> Any:
            return signature, generate

        names = ["typing_context", *(f"argument{i}" for i in range(len(kinds)))]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # numba counts the parameters
        return intrinsic(call)

    return decorate


def _loading(kind: type[np.generic], llvm_type: Callable[[], LLVMType]) -> Instruction:
    def load(builder: Builder, address: Value) -> Value:
        return builder.load(builder.inttoptr(address, llvm_type().as_pointer()))

    return _instruction(interpreted.loading(kind), kind.__name__, "int64")(load)


def _storing(kind: type[np.generic], llvm_type: Callable[[], LLVMType]) -> Instruction:
    def store(builder: Builder, address: Value, value: Value) -> None:
        builder.store(value, builder.inttoptr(address, llvm_type().as_pointer()))

    return _instruction(interpreted.storing(kind), "int64", "int64", kind.__name__)(store)


def _reading_as(kind: type[np.generic], llvm_type: Callable[[], LLVMType], given: type[np.generic]) -> Instruction:
    plain = interpreted.reading_as(kind, given)
    return _instruction(plain, kind.__name__, given.__name__)(lambda builder, x: builder.bitcast(x, llvm_type()))


load_int: Callable[[int], int] = _loading(np.int64, lambda: _INT)
load_float32: Callable[[int], float] = _loading(np.float32, lambda: _FLOAT)
load_float64: Callable[[int], float] = _loading(np.float64, lambda: _DOUBLE)
store_byte = _storing(np.uint8, lambda: _BYTE)
store_float32 = _storing(np.float32, lambda: _FLOAT)
bits_of: Callable[[float], int] = _reading_as(np.int64, lambda: _INT, np.float64)
number_of: Callable[[int], float] = _reading_as(np.float64, lambda: _DOUBLE, np.int64)


@_instruction(interpreted.load_byte, "int64", "int64")
def load_byte(builder: Builder, address: Value) -> Value:
    return builder.zext(builder.load(builder.inttoptr(address, _POINTER)), _INT)


@_instruction(int, "voidptr", "int64")
def pointer(builder: Builder, address: Value) -> Value:
    """Return an address as the pointer that numba's `carray` expects."""
    return builder.inttoptr(address, _POINTER)


@inner
def ints_at(address: int, count: int) -> NDArray[np.int64]:
    return carray(pointer(address), (count,), np.int64)


@inner
def ints2_at(address: int, lines: int, columns: int) -> NDArray[np.int64]:
    return carray(pointer(address), (lines, columns), np.int64)


@inner
def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
    return carray(pointer(address), (count,), np.uint8)


@_instruction(interpreted.loading(np.int64), "int64", "int64")
def load_shared(builder: Builder, address: Value) -> Value:
    """Return the int64 at an address to which other processes may write; no later read is moved before this one."""
    return builder.load_atomic(builder.inttoptr(address, _INT.as_pointer()), "acquire", 8)


@_instruction(interpreted.do_nothing, "int64", "int64")
def touch(builder: Builder, address: Value) -> None:
    """Load the cache line of a mapped address by reading one byte; unlike a prefetch, the read is never dropped."""
    builder.load_atomic(builder.inttoptr(address, _POINTER), "monotonic", 1)


@_instruction(interpreted.copy_bytes, "int64", "int64", "int64", "int64")
def copy_bytes(builder: Builder, target: Value, source: Value, count: Value) -> None:
    """Copy `count` bytes from one address to another; the ranges must not overlap."""
    function = builder.module.declare_intrinsic("llvm.memcpy", [_POINTER, _POINTER, _INT])
    builder.call(function, [*(builder.inttoptr(a, _POINTER) for a in (target, source)), count, _NO])


@_instruction(interpreted.lowest_bit, "int64", "int64")
def lowest_bit(builder: Builder, x: Value) -> Value:
    """Return the position of the lowest set bit; `x` must not be 0."""
    return builder.cttz(x, _YES)


@_instruction(interpreted.either, "int64", "boolean", "int64", "int64")
def either(builder: Builder, condition: Value, one: Value, other: Value) -> Value:
    """Return `one` if a condition is true, else `other`, without a jump.

    Use `either` for conditions on random data in a loop. For many processors, LLVM turns an ordinary choice into a
    jump, unless it knows that the condition cannot be predicted.
    """
    selected = builder.select(condition, one, other)
    selected.set_metadata("unpredictable", builder.module.add_metadata([]))
    return selected


@_instruction(interpreted.zero_bytes, "int64", "int64", "int64")
def zero_bytes(builder: Builder, target: Value, count: Value) -> None:
    function = builder.module.declare_intrinsic("llvm.memset", [_POINTER, _INT])
    builder.call(function, [builder.inttoptr(target, _POINTER), _BYTE(0), count, _NO])


@_instruction(interpreted.do_nothing, "int64", "int64")
def prefetch(builder: Builder, address: Value) -> None:
    """Start to load the cache line of an address, which may be unmapped."""
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT32, _INT32, _INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_POINTER], kind)
    for_reading, keep_in_all_caches, data = _INT32(0), _INT32(3), _INT32(1)
    builder.call(function, [builder.inttoptr(address, _POINTER), for_reading, keep_in_all_caches, data])


@_instruction(interpreted.madvise, "int64", "int64", "int64", "int64")
def madvise(builder: Builder, address: Value, count: Value, advice: Value) -> Value:
    function = builder.module.globals.get("madvise") or ir.Function(
        builder.module, ir.FunctionType(_INT32, [_INT, _INT, _INT32]), "madvise"
    )
    return builder.sext(builder.call(function, [address, count, builder.trunc(advice, _INT32)]), _INT)


@_instruction(partial(interpreted.copy_bytes, count=STREAM_BLOCK), "int64", "int64", "int64")
def stream_block(builder: Builder, target: Value, source: Value) -> None:
    """Copy `STREAM_BLOCK` bytes with writes that bypass the caches; the address `target` must be a multiple of 32."""
    pointer, offsets = ir.VectorType(_INT, 4).as_pointer(), [_INT(at) for at in range(0, STREAM_BLOCK, 32)]
    to, origin = ([builder.inttoptr(builder.add(a, at), pointer) for at in offsets] for a in (target, source))
    loaded = [builder.load(place, align=1) for place in origin]
    for value, place in zip(loaded, to, strict=True):
        kept_out = builder.module.add_metadata([_INT32(1)])
        builder.store(value, place, align=32).set_metadata("nontemporal", kept_out)


@_instruction(interpreted.do_nothing, "int64")
def fence(builder: Builder) -> None:
    """Make all writes of `stream_block` visible to other threads before any later write."""
    builder.fence("seq_cst")
