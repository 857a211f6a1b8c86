"""How kernels are compiled, and the few instructions on raw addresses that Python cannot write.

Only this module and `cache` import numba. Importing it costs a third of a second, so nothing imports this module before
a reader is built.
"""

import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

try:
    import llvmlite.binding  # type: ignore[import-untyped]
    import numba
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic
    from numba.np.arrayobj import populate_array
except ImportError as error:
    raise ImportError(
        f"batches are sampled by compiled code, which needs numba: pip install numba ({error})"
    ) from error

from diskreplay.kernels.cache import compile_kernel

STREAM_BLOCK = 128  # bytes: two cache lines

_BYTE_POINTER = ir.IntType(8).as_pointer()


def _load_byte(typing_context: Any, address: Any) -> Any:
    """Read the byte at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _BYTE_POINTER))

    return types.uint8(types.int64), generate


def _copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes from one address to another; the ranges do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, origin = (builder.inttoptr(a, _BYTE_POINTER) for a in args[:2])
        cgutils.raw_memcpy(builder, to, origin, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _load_int(typing_context: Any, address: Any) -> Any:
    """Read the int64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), generate


def _load_shared(typing_context: Any, address: Any) -> Any:
    """Read the int64 at an address that another process stores to, before anything that is read after it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


def _load_float32(typing_context: Any, address: Any) -> Any:
    """Read the float32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()))

    return types.float32(types.int64), generate


def _load_float64(typing_context: Any, address: Any) -> Any:
    """Read the float64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.DoubleType().as_pointer()))

    return types.float64(types.int64), generate


def _storing(kind: Any, llvm_type: Any) -> Any:
    """Return the generator of an instruction that writes a number to an address."""

    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], builder.inttoptr(args[0], llvm_type.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, kind), generate

    return store


def _lowest_bit(typing_context: Any, x: Any) -> Any:
    """Count the zeros below the lowest bit that is set; one must be."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


def _zero_bytes(typing_context: Any, target: Any, count: Any) -> Any:
    """Set `count` bytes from an address on to zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.memset(builder, builder.inttoptr(args[0], _BYTE_POINTER), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _prefetch(typing_context: Any, address: Any) -> Any:
    """Start to load the cache line of an address; it need not be mapped."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE_POINTER], signature)
        for_reading, keep_in_all_caches, data = number(0), number(3), number(1)
        builder.call(prefetch, [builder.inttoptr(args[0], _BYTE_POINTER), for_reading, keep_in_all_caches, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _madvise(typing_context: Any, address: Any, count: Any, advice: Any) -> Any:
    """Call the C library's madvise; 0 is success."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        long, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(number, [long, long, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "madvise")
        return builder.sext(builder.call(function, [*args[:2], builder.trunc(args[2], number)]), long)

    return types.int64(types.int64, types.int64, types.int64), generate


def _stream_block(typing_context: Any, target: Any, source: Any) -> Any:
    """Copy `STREAM_BLOCK` bytes, and leave the target's lines out of the caches; it lies at a multiple of 32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(64), 4)
        offsets = [ir.IntType(64)(at) for at in range(0, STREAM_BLOCK, 32)]
        to, origin = ([builder.inttoptr(builder.add(a, at), vector.as_pointer()) for at in offsets] for a in args)
        loaded = [builder.load(pointer, align=1) for pointer in origin]
        for value, pointer in zip(loaded, to, strict=True):
            kept_out = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
            builder.store(value, pointer, align=32).set_metadata("nontemporal", kept_out)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _fence(typing_context: Any) -> Any:
    """Make streamed stores visible to other threads before any later one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _reading_as(kind: Any, llvm_type: Any, given: Any) -> Any:
    """Return the generator of an instruction that takes the bits of a number for another one."""

    def read_as(typing_context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], llvm_type)

        return kind(given), generate

    return read_as


def _array_at(kind: Any) -> Any:
    """Return the generator of an instruction that makes an array of the memory at an address, which it borrows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = context.get_data_type(kind.dtype)
        width = ir.Constant(ir.IntType(64), context.get_abi_sizeof(item))
        array, data = context.make_array(kind)(context, builder), builder.inttoptr(args[0], item.as_pointer())
        strides = [*(builder.mul(count, width) for count in args[2:]), width]
        populate_array(array, data=data, shape=args[1:], strides=strides, itemsize=width, meminfo=None)
        return array._getvalue()

    def vector_at(typing_context: Any, address: Any, count: Any) -> Any:
        return kind(types.int64, types.int64), generate

    def matrix_at(typing_context: Any, address: Any, rows: Any, columns: Any) -> Any:
        return kind(types.int64, types.int64, types.int64), generate

    return vector_at if kind.ndim == 1 else matrix_at


# Typed by hand: the declared type of an intrinsic is that of its generator, not of the instruction.
ints_at: Any = intrinsic(_array_at(types.Array(types.int64, 1, "C")))
ints2_at: Any = intrinsic(_array_at(types.Array(types.int64, 2, "C")))
bytes_at: Any = intrinsic(_array_at(types.Array(types.uint8, 1, "C")))
load_byte: Any = intrinsic(_load_byte)
load_int: Any = intrinsic(_load_int)
load_shared: Any = intrinsic(_load_shared)
load_float32: Any = intrinsic(_load_float32)
load_float64: Any = intrinsic(_load_float64)
copy_bytes: Any = intrinsic(_copy_bytes)
store_byte: Any = intrinsic(_storing(types.uint8, ir.IntType(8)))
store_float32: Any = intrinsic(_storing(types.float32, ir.FloatType()))
bits_of: Any = intrinsic(_reading_as(types.int64, ir.IntType(64), types.float64))
number_of: Any = intrinsic(_reading_as(types.float64, ir.DoubleType(), types.int64))
lowest_bit: Any = intrinsic(_lowest_bit)
zero_bytes: Any = intrinsic(_zero_bytes)
prefetch: Any = intrinsic(_prefetch)
madvise: Any = intrinsic(_madvise)
stream_block: Any = intrinsic(_stream_block)
fence: Any = intrinsic(_fence)

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
    "out_bytes2": types.Array(types.uint8, 2, "C"),
    "out_floats": types.Array(types.float64, 1, "C"),
    "out_floats2": types.Array(types.float64, 2, "C"),
    "out_floats32": types.Array(types.float32, 1, "C"),
    "out_floats32_2": types.Array(types.float32, 2, "C"),
    "out_bools": types.Array(types.boolean, 1, "C"),
}


_compiling = threading.RLock()
# A process is forked between two kernels: its child would wait for ever for the thread that compiles one.
os.register_at_fork(before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release)


def kernel(
    result: str, *arguments: str, checked: bool = True, inner: bool = False, inlined: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a kernel of one signature.

    It is compiled, or loaded, when `ready` or `apart` asks for it: another kernel cannot call it before. One that is
    `inner` is called by kernels only, and is compiled at once. One that is `inlined` becomes part of its caller,
    however long it is: a call passes each array as seven numbers.

    A division by zero raises, unless it is not `checked`: then a loop of divisions can become vector code.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        # Serial and nogil: numba's thread pools hang or die in a forked child, and callers bring their own threads.
        options: dict[str, Any] = {"nogil": True, "error_model": "python" if checked else "numpy"}
        # No kernel makes an array or keeps one (one that does is not compiled): counting references would cost a tenth
        # of the time of a small batch, and as much of compiling.
        options["_nrt"] = False
        # Each wrapper takes its time to compile: nobody calls kernels from C, nor inner ones from Python.
        options |= {"no_cfunc_wrapper": True, "no_cpython_wrapper": inner, "forceinline": inlined}
        made: Any = numba.njit(**options)(function)
        made._can_compile = False
        made.kernel_signature = _TYPES[result](*(_TYPES[a] for a in arguments))
        return ready(made) if inner else made

    return decorate


def ready(kernel: Any) -> Any:
    """Compile a kernel, or load it, if that has not been done; return it."""
    with _compiling:
        if not kernel.overloads:
            compile_kernel(kernel, kernel.kernel_signature)
    return kernel


def apart(called: Any) -> Any:
    """Return an instruction that calls a compiled kernel where it is.

    A call of the kernel itself copies it into the caller, where it is optimized once more: right for what is small or
    in a loop.
    """
    (compiled,) = ready(called).overloads.values()
    symbol, result, kinds = f"diskreplay_{called.__name__}", compiled.signature.return_type, compiled.signature.args
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    llvmlite.binding.add_symbol(symbol, address)

    def call(typing_context: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            convention = context.call_conv
            kind = convention.get_function_type(result, kinds)
            function = cgutils.get_or_insert_function(builder.module, kind, symbol)
            status, found = convention.call_function(builder, function, result, kinds, args)
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return found

        return result(*kinds), generate

    names = ["typing_context", *inspect.signature(called.py_func).parameters]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # numba counts them
    return intrinsic(call)
