"""Kernels as plain Python, for stores that are read without numba, and for `NUMBA_DISABLE_JIT=1`.

This module has Python functions for the instructions on raw addresses that compiled kernels take from LLVM. As in
numba, overflows of int64 wrap around, and divisions by zero give no warning.
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
    """Return a function as a kernel that Python runs; `result` and `kinds` are the type names given to `jit.kernel`."""
    casts = [(at, _CASTS[kind]) for at, kind in enumerate(kinds) if kind in _CASTS]
    returned = _RESULTS.get(result)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        given = list(arguments)
        with np.errstate(all="ignore"):
            for at, cast in casts:
                given[at] = cast(given[at])
            found = function(*given)
            return found if returned is None else returned(found)

    return call


def loading(kind: type[np.generic]) -> Callable[[int], Any]:
    read: Callable[[int], Any] = np.ctypeslib.as_ctypes_type(kind.__name__).from_address
    return lambda address: kind(read(int(address)).value)


def load_byte(address: int) -> np.int64:
    return np.int64(ctypes.c_uint8.from_address(int(address)).value)


def storing(kind: type[np.generic]) -> Callable[[int, Any], None]:
    place: Callable[[int], Any] = np.ctypeslib.as_ctypes_type(kind.__name__).from_address

    def store(address: int, value: Any) -> None:
        place(int(address)).value = kind(value).item()

    return store


def reading_as(kind: type[np.generic], given: type[np.generic]) -> Callable[[Any], Any]:
    return lambda x: np.array([x]).astype(given).view(kind)[0]


# Arrays are cached, because plain Python code requests the same arrays again and again. A cached array only borrows its
# memory, so the cache keeps no memory alive.
@functools.lru_cache(maxsize=256)
def carray(address: int, shape: tuple[int, ...], kind: type[np.generic]) -> NDArray[Any]:
    """Return an array that borrows the memory at an address, like numba's function of this name."""
    nbytes = math.prod(map(int, shape)) * np.dtype(kind).itemsize
    return np.ndarray(shape, kind, memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"))


def copy_bytes(target: int, source: int, count: int) -> None:
    ctypes.memmove(int(target), int(source), int(count))


def zero_bytes(target: int, count: int) -> None:
    ctypes.memset(int(target), 0, int(count))


def lowest_bit(x: int) -> int:
    return (int(x) & -int(x)).bit_length() - 1


def either(condition: bool, one: int, other: int) -> int:
    return one if condition else other


def madvise(address: int, count: int, advice: int) -> int:
    call = ctypes.CDLL(None).madvise
    call.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    status: int = call(int(address), int(count), int(advice))
    return status


def do_nothing(*_: int) -> None: ...
