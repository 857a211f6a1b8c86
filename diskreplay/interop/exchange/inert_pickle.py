"""Read pickles without running code: numbers, texts, containers, arrays, and records of known classes."""

import mmap
import os
import pickle
import pickletools
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError

_KINDS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_MOST_DEEP = 64  # the largest depth of nested tuples; hashing deeper tuples would overflow the stack
_MOST_ARGUMENTS = 64
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
# Opcodes for a bytes object, such as an array's data. `_Opcodes` skips the data of objects of `_LARGE` bytes or more.
_ARRAYS, _LARGE = (pickle.BINBYTES8, pickle.BYTEARRAY8, pickle.BINBYTES), 4096
_OF_NUMPY = ("numpy._core", "numpy.core")  # numpy.core is the name in NumPy 1


class Record:
    """An object in a pickle. The object's own class is not imported.

    Attributes
    ----------
    args : tuple
        The arguments that the pickle passes to the class.
    state : object
        The pickled state of the object, usually a dict of its attributes.
    """

    class_name: ClassVar[str] = ""
    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: object

    def __new__(cls, *args: object) -> "Record":
        if len(args) > _MOST_ARGUMENTS:  # a small file could copy a long tuple many times
            raise pickle.UnpicklingError(f"it calls {cls.class_name} with {len(args)} arguments")
        record = object.__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: object) -> None:
        self.state = state

    @property
    def attributes(self) -> dict[str, Any]:
        return self.state if isinstance(self.state, dict) else {}


class PickledArray:
    """An array in a pickle; ``values`` is None unless the array's dtype is bool, int or float."""

    __slots__ = ("values",)

    def __init__(self, *_: object) -> None:
        self.values: NDArray[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, data = state
        self.fill(data, dtype, shape, "F" if is_fortran else "C")

    def fill(self, data: Any, dtype: "_Dtype", shape: tuple[int, ...], order: Any) -> None:
        if dtype.known is not None:
            self.values = np.frombuffer(data, dtype.known).reshape(shape, order=order)


class _Dtype:
    """A dtype in a pickle, read without NumPy: NumPy would trust the layout that the pickle claims."""

    __slots__ = ("known",)

    def __init__(self, name: str, *_: object) -> None:
        self.known = np.dtype(name) if name in _KINDS else None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if self.known is not None and state[1] in ("<", ">"):
            self.known = self.known.newbyteorder(state[1])


def _from_buffer(data: Any, dtype: _Dtype, shape: tuple[int, ...], order: str, axes: Any = None) -> PickledArray:
    array = PickledArray()
    array.fill(data, dtype, shape, "C" if order == "K" else order)
    if axes is not None and array.values is not None:
        array.values = array.values.transpose(axes)
    return array


def _scalar(dtype: _Dtype, data: Any = b"") -> Any:
    return None if dtype.known is None else np.frombuffer(data, dtype.known)[0].item()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, classes: Collection[str], nbytes: int) -> None:
        super().__init__(file)
        self._classes, self._left = classes, 2 * nbytes
        # Each pickle gets its own copies of classes and functions, since a pickle may change their attributes.
        self._known: dict[str, Any] = {
            "numpy.dtype": _subclass(_Dtype),
            "numpy.ndarray": _subclass(Record),
            "collections.OrderedDict": _Function(self._dict),
            "_codecs.encode": _Function(self._latin1),
        }
        for package in _OF_NUMPY:
            self._known[f"{package}.multiarray._reconstruct"] = _subclass(PickledArray)
            self._known[f"{package}.multiarray.scalar"] = _Function(_scalar)
            self._known[f"{package}.numeric._frombuffer"] = _Function(_from_buffer)

    def find_class(self, module: str, name: str) -> Any:
        dotted = f"{module}.{name}"
        if dotted not in self._known:
            if dotted not in self._classes:
                raise pickle.UnpicklingError(f"it asks for {dotted!r:.120}, which is not loaded: it could run code")
            self._known[dotted] = type("Record", (Record,), {"__slots__": (), "class_name": dotted})
        return self._known[dotted]

    def _latin1(self, text: str, _: str = "") -> bytes:
        self._copy(len(text))
        return text.encode("latin1")  # protocol 2 of pickle writes bytes as a text and a call of `_codecs.encode`

    def _dict(self, items: Any = ()) -> dict[Any, Any]:
        self._copy(len(items))
        return dict(items)

    def _copy(self, items: int) -> None:
        """Count copied values, and refuse a file that copies more than two values for each of its bytes.

        Without this limit, a small file could make the loader copy one long list many times.
        """
        self._left -= items
        if self._left < 0:
            raise pickle.UnpicklingError("it copies the same values many times")


class _Function:
    """A function that a pickle may call. The pickle cannot set attributes of the function."""

    __slots__ = ("_function",)

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _subclass(base: type) -> type:
    return type(base.__name__, (base,), {"__slots__": ()})


def load(path: Path, classes: Collection[str]) -> Any:
    """Return the object in a pickle file; no code of the file runs.

    Values of built-in types, such as numbers and dicts, are returned as they are. Arrays become `PickledArray`, and
    objects of the classes in ``classes`` become `Record`. ``classes`` has the dotted names of the classes and functions
    that the file may use to make objects. FormatError is raised if the file uses another class or function.
    """
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # Python warns of texts with invalid escapes
            _check(mapped)
            return _Unpickler(file, classes, len(mapped)).load()
    except pickle.UnpicklingError as error:
        raise FormatError(f"{path} is refused: {error}") from None
    except OSError:
        raise
    except MemoryError:
        raise FormatError(f"{path} is damaged: it claims more than the memory holds") from None
    except Exception as error:  # damaged bytes can cause any error while objects are made and filled
        raise FormatError(f"{path} is damaged, or not a pickle: {type(error).__name__}: {error}") from None


def _check(mapped: mmap.mmap) -> None:
    """Check, before a pickle is loaded, that none of its opcodes claims more bytes or values than the file has.

    Python's loader would allocate as much memory as an opcode claims. This also holds for the memo, the pickle's list
    of values: an opcode claims the index at which it puts a value. The check also limits the depth of nested tuples,
    since Python hashes nested tuples without a depth limit.
    """
    stack: list[int | None] = []  # the nesting depth of each value; None for a mark, which begins a group of values
    memo: dict[int, int] = {}
    opcodes = pickletools.genops(_Opcodes(mapped))  # type: ignore[arg-type]  # it has `read` and `readline`
    for count, (opcode, argument, _) in enumerate(opcodes):
        name, left = opcode.name, len(mapped) - mapped.tell()
        number = argument if isinstance(argument, int) else 0
        if name in _PUTS:
            if number > count:
                raise pickle.UnpicklingError(f"it has {count} values and puts one at the place {number} of its memo")
            memo[number] = _top(stack)
        elif name == "MEMOIZE":
            memo[len(memo)] = _top(stack)
        elif name in _GETS:
            stack.append(memo.get(number, 0))
        elif name == "FRAME":
            if number > left:
                raise pickle.UnpicklingError(f"it claims {number} bytes, and {left} are left")
        elif name == "MARK":
            stack.append(None)
        else:
            depth = max(_taken(stack, opcode), default=0) + (name in _TUPLES)
            if depth > _MOST_DEEP:
                raise pickle.UnpicklingError(f"its tuples are nested deeper than {_MOST_DEEP}")
            stack += [depth] * len(opcode.stack_after)


class _Opcodes:
    """A stream of a pickle's opcodes that skips the bytes of arrays instead of copying them."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped, self._opcode = mapped, b""
        self.readline, self.tell = mapped.readline, mapped.tell

    def read(self, nbytes: int) -> "bytes | _SkippedBytes":
        if nbytes < _LARGE or self._opcode not in _ARRAYS:
            found = self._mapped.read(nbytes)
            self._opcode = found if nbytes == 1 else self._opcode
            return found
        nbytes = min(nbytes, len(self._mapped) - self._mapped.tell())
        self._mapped.seek(nbytes, os.SEEK_CUR)
        return _SkippedBytes(nbytes)


class _SkippedBytes:
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes

    def __iter__(self) -> Iterator[int]:
        return iter(())  # the skipped bytes are not read


def _top(stack: list[int | None]) -> int:
    return (stack[-1] if stack else 0) or 0


def _taken(stack: list[int | None], opcode: pickletools.OpcodeInfo) -> list[int]:
    """Pop from ``stack`` the values that an opcode consumes, and return their nesting depths."""
    found: list[int] = []
    names = [each.name for each in opcode.stack_before]
    if "mark" in names:
        while stack and (depth := stack.pop()) is not None:
            found.append(depth)
        names = names[: names.index("mark")]
    for _ in names:
        found.append((stack.pop() if stack else 0) or 0)
    return found


def array(value: Any, name: str) -> NDArray[Any]:
    """Return a `PickledArray` as a NumPy array in native byte order; raise FormatError for any other value."""
    if not isinstance(value, PickledArray) or value.values is None:
        raise FormatError(f"{name} is not an array of numbers")
    return value.values.astype(value.values.dtype.newbyteorder("="), copy=False)


def arrays(value: Any, name: str) -> dict[str, NDArray[Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise FormatError(f"{name} is not a dict of arrays")
    return {key: array(item, f"{name}[{key!r}]") for key, item in value.items()}
