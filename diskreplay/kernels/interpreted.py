"""Kernels as plain Python, for `NUMBA_DISABLE_JIT=1`: slow, and a debugger can step through them.

Here are the instructions on raw addresses that `jit` otherwise has LLVM make, and the arithmetic of numba: int64 and
float64, which wrap and divide by zero without a warning.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CASTS: dict[str, Callable[[Any], Any]] = {"int": np.int64, "float": np.float64}
_RESULTS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float}


def interpreted(function: Callable[..., Any], result: str, kinds: Sequence[str]) -> Callable[..., Any]:
    """Return a kernel that Python runs; `result` and `kinds` are the types of `jit.kernel`."""
    casts, returned = [_CASTS.get(kind, _as_it_is) for kind in kinds], _RESULTS.get(result, _as_it_is)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return returned(function(*(cast(given) for cast, given in zip(casts, arguments, strict=True))))

    return call


def _as_it_is(value: Any) -> Any:
    return value


def loading(kind: type[np.generic]) -> Callable[[int], Any]:
    """Return an instruction that reads the number at an address."""
    read: Callable[[int], Any] = np.ctypeslib.as_ctypes_type(kind.__name__).from_address
    return lambda address: kind(read(int(address)).value)


def load_byte(address: int) -> np.int64:
    """Return the byte at an address."""
    return np.int64(ctypes.c_uint8.from_address(int(address)).value)


def storing(kind: type[np.generic]) -> Callable[[int, Any], None]:
    """Return an instruction that writes a number to an address."""
    place: Callable[[int], Any] = np.ctypeslib.as_ctypes_type(kind.__name__).from_address

    def store(address: int, value: Any) -> None:
        place(int(address)).value = kind(value).item()

    return store


def reading_as(kind: type[np.generic], given: type[np.generic]) -> Callable[[Any], Any]:
    """Return an instruction that takes the bits of a number for another one."""
    return lambda x: np.array([x]).astype(given).view(kind)[0]


# A store without numba asks for the same ones again and again. An array says nothing of who owns its memory by now.
@functools.lru_cache(maxsize=256)
def carray(address: int, shape: tuple[int, ...], kind: type[np.generic]) -> NDArray[Any]:
    """Return an array of the memory at an address, which it borrows: numba's function of this name."""
    nbytes = math.prod(map(int, shape)) * np.dtype(kind).itemsize
    return np.ndarray(shape, kind, memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"))


def copy_bytes(target: int, source: int, count: int) -> None:
    """Copy `count` bytes from one address to another."""
    ctypes.memmove(int(target), int(source), int(count))


def zero_bytes(target: int, count: int) -> None:
    """Set `count` bytes from an address on to zero."""
    ctypes.memset(int(target), 0, int(count))


def lowest_bit(x: int) -> int:
    """Count the zeros below the lowest bit that is set; one must be."""
    return (int(x) & -int(x)).bit_length() - 1


def either(condition: bool, one: int, other: int) -> int:
    """Return one number where a condition is true, another one where it is not."""
    return one if condition else other


def madvise(address: int, count: int, advice: int) -> int:
    """Call the C library's madvise; 0 is success."""
    call = ctypes.CDLL(None).madvise
    call.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    status: int = call(int(address), int(count), int(advice))
    return status


def do_nothing(*_: int) -> None:
    """Leave out an instruction that has no effect on results in the interpreter."""
