"""The saved states of samplers, and the notes of a store.

A state is a tree of numbers, texts and arrays; a note is a JSON value. A state is saved in a folder that never changes,
`samplers/<name>/<number>/`. The file `samplers/<name>/zarr.json` names the current number: a new state replaces the old
state when this file is replaced.
"""

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError, StoreNotFound
from diskreplay.folders import is_folder
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import discarded_path
from diskreplay.segments.documents.limiters import is_name, named_folders
from diskreplay.segments.documents.metadata import (
    MAX_BYTES,
    Document,
    dump,
    parse_document,
    read_document,
    read_object,
    read_verified,
    seal_document,
    shaped,
)
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.durable import (
    storage_errors,
    sync_file,
    sync_folder,
    sync_tree,
    write_atomic,
    write_file,
)
from diskreplay.segments.files.locks import Lock, held_lock, try_lock
from diskreplay.segments.files.mapping import data_ranges, opened, read_part

_T = TypeVar("_T")
Tree = Any  # None, bool, int, float, str, an array, a list of trees or a dict of trees

ARRAY, CRC = "@array", "crc32c"
"""The keys of the dict that replaces an array in the tree: {"@array": its name, "crc32c": its zarr.json's checksum}."""

_DTYPES = {"bool": "|b1", "int64": "<i8", "float32": "<f4", "float64": "<f8"}
_CRC_BYTES = 4
_MOST_AXES, _MOST_BYTES = 32, 1 << 62  # NumPy's limits for an array
_DIGITS = 18
_LONGEST = 100  # the maximum length of an array's name, without the suffix that makes it unique

DRAFT = "state-"
"""The prefix of draft folders of states in the counters' folder; the process that writes a state locks its draft."""
_STATE, _GROUP = "state", "group"

# Keys that a state cannot have, because they have another meaning in its zarr.json.
_RESERVED = {ARRAY, "diskreplay_crc32c"}


_Arrays = dict[str, tuple[bytes, NDArray[Any]]]  # by name: the zarr.json of an array, and its data


def write_state(root: Root, name: str, tree: Tree) -> None:
    """Save a state under a name; concurrent readers, and readers after a crash, get the old or the new state.

    The state is durable when this returns. Raises ValueError if the name is invalid or a value of the tree cannot be
    saved. Raises StorageFull if the disk has no room; the old state is untouched. Raises StoreNotFound if the store was
    deleted or replaced since it was opened.
    """
    _check_name(name)
    arrays: _Arrays = {}
    with root.still_there():
        _write(root, name, _without_arrays(tree, (), root.array_document(), arrays), arrays)


def _check_name(name: object) -> None:
    if not is_name(name):
        raise ValueError(
            f"a name is 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit, and not "
            f"{layout.METADATA}; this one is {name!r}"
        )


def _write(root: Root, name: str, plain: Tree, arrays: _Arrays) -> None:
    target = root.folder / layout.SAMPLERS / name
    building = root.counters_folder / f"{DRAFT}{name}-{os.getpid()}-{time.monotonic_ns()}"
    lock: Lock | None = None
    try:
        with storage_errors(target):
            with held_lock(root.lock_path):  # under this lock, other processes remove drafts that are not locked
                building.mkdir()
                lock = try_lock(building / layout.LOCK)
            _write_group(root, building / _STATE, plain, arrays)
            sync_tree(building / _STATE)
            with held_lock(root.lock_path):
                _place(root, building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if lock is not None:
            lock.release()


def delete_state(root: Root, name: str) -> None:
    """Durably delete the state that was saved under a name, for all readers at once.

    Raises StoreNotFound if nothing is saved, or the store was deleted or replaced since it was opened.
    """
    with root.still_there():
        _check_saved(root, name)
        # The state is moved to this path before it is deleted. If this process dies before the deletion, the next
        # process that opens the store deletes the state.
        gone = discarded_path(f"{root.counters_folder}/{DRAFT}{name}")
        folder = root.folder / layout.SAMPLERS / name
        with held_lock(root.lock_path):
            _check_saved(root, name)
            with storage_errors(folder):
                os.rename(folder, gone)
            sync_folder(folder.parent)
        shutil.rmtree(gone, ignore_errors=True)


def _check_saved(root: Root, name: str) -> None:
    if not is_name(name) or not is_folder(root.folder / layout.SAMPLERS / name):
        known = ", ".join(state_names(root)) or "none"
        raise StoreNotFound(f"{root.path} has no sampler state named {name!r}; it has {known}")


def _place(root: Root, building: Path, target: Path) -> None:
    """Make the state in ``building`` current, and move older states into ``building``.

    The caller holds the store lock.
    """
    if target.is_symlink():
        raise FormatError(f"{target} is a symbolic link; a store has none, restore the folder itself")
    old = _numbers(target)
    number = 1 + max(old, default=0)
    pointer = building / layout.METADATA
    write_file(str(pointer), seal_document(_group(root), {"current": number}))
    sync_file(pointer)
    if not target.exists():
        group = building / _GROUP
        group.mkdir()
        os.rename(building / _STATE, group / str(number))
        os.rename(pointer, group / layout.METADATA)
        sync_folder(group)
        os.rename(group, target)
        sync_folder(target.parent)
        return
    os.rename(building / _STATE, target / str(number))
    sync_folder(target)
    os.replace(pointer, target / layout.METADATA)
    sync_folder(target)
    for other in old:
        os.rename(target / str(other), building / str(other))  # this rename hides the state from all readers


def take_stale(root: Root) -> list[str]:
    """Move the outdated states of dead processes to the folder of the counters; return the new paths.

    The caller holds the store lock, and deletes the moved states after releasing the lock.
    """
    taken: list[str] = []
    for name in state_names(root):
        folder = root.folder / layout.SAMPLERS / name
        try:
            current = _current(folder)
            for number in _numbers(folder):
                if number != current:
                    gone = discarded_path(f"{root.counters_folder}/{DRAFT}{name}-{number}")
                    os.rename(folder / str(number), gone)  # this rename hides the state from all readers
                    taken.append(gone)
        except (OSError, FormatError):
            continue  # the current state is unknown: `read_state` will raise the error
    return taken


def _group(root: Root) -> Document:
    return read_object(root.folder / layout.SAMPLERS / layout.METADATA)


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if len(name) <= _DIGITS and re.fullmatch("[1-9][0-9]*", name)]
    except FileNotFoundError:
        return []


def _without_arrays(tree: Tree, path: tuple[str, ...], template: Document, arrays: _Arrays) -> Tree:
    """Return a tree with references in place of arrays, and add the arrays to ``arrays`` by name.

    ``path`` has the keys above this tree in the state, for names and messages. ``template`` is the zarr metadata from
    which the metadata of each array is made.
    """
    where = "/".join(path) or "the top"
    if isinstance(tree, np.ndarray):
        if tree.dtype.name not in _DTYPES:
            raise ValueError(f"an array of {tree.dtype} at {where} cannot be saved")
        name = _array_name(path, arrays)
        document = dump(_array_document(template, tree))
        arrays[name] = document, tree
        return {ARRAY: name, CRC: crc32c(document)}
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree) or not _RESERVED.isdisjoint(tree):
            raise ValueError(f"keys at {where} must be str and not one of {sorted(_RESERVED)}, not {list(tree)}")
        return {key: _without_arrays(below, (*path, key), template, arrays) for key, below in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_arrays(below, (*path, str(i)), template, arrays) for i, below in enumerate(tree)]
    if isinstance(tree, float) and not math.isfinite(tree):
        raise ValueError(f"{tree} at {where} cannot be saved: JSON has only finite numbers")
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise ValueError(f"{type(tree).__name__} at {where} cannot be saved: only numbers, texts and arrays can")


def _array_name(path: tuple[str, ...], arrays: _Arrays) -> str:
    name = re.sub("[^a-z0-9_.]+", "_", ".".join(path).lower()).strip("._")[:_LONGEST] or "state"
    if name in arrays or name == layout.METADATA:
        name += f"_{len(arrays)}"
    while name in arrays:
        name += "_"
    return name


def _write_group(root: Root, folder: Path, plain: Tree, arrays: _Arrays) -> None:
    folder.mkdir()
    for name, (document, array) in arrays.items():
        (folder / name).mkdir()
        write_file(str(folder / name / layout.METADATA), document)
        if array.size:
            data = array.astype(_DTYPES[array.dtype.name], copy=False).tobytes()
            crc = crc32c(data).to_bytes(_CRC_BYTES, "little")
            with open(folder / name / _chunk_name(array.shape), "wb") as file:  # `file.write` writes all, or raises
                file.write(data)
                file.write(crc)
    write_file(str(folder / layout.METADATA), seal_document(_group(root), {"store": root.uuid, "state": plain}))


def _array_document(template: Document, array: NDArray[Any]) -> Document:
    kind = {"b": False, "i": 0, "f": 0.0}[array.dtype.kind]
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    own = {"data_type": array.dtype.name, "fill_value": kind, "codecs": codecs}
    unnamed = {key: value for key, value in template.items() if key != "dimension_names"}
    return shaped(unnamed, list(array.shape), [max(length, 1) for length in array.shape]) | own


def _chunk_name(shape: Sequence[int]) -> str:
    return ".".join(["c", *("0" for _ in shape)])


# --- reading -------------------------------------------------------------------------------------------------------


def state_names(root: Root) -> list[str]:
    return named_folders(root.folder / layout.SAMPLERS)


class Saved(NamedTuple):
    """The time when a state was saved, in seconds since 1970, and its tree, with {"@array": ...} in place of arrays."""

    time: float
    plain: Tree


def read_plain(root: Root, name: str) -> Saved:
    return _read(root, name, lambda tree, folder: Saved((folder / layout.METADATA).stat().st_mtime, tree))


def read_state(root: Root, name: str) -> Tree:
    """Return the state that was last saved under a name.

    Raises StoreNotFound if no state has this name, FormatError if the state is damaged.
    """
    return _read(root, name, _with_arrays)


def _read(root: Root, name: str, complete: Callable[[Tree, Path], _T]) -> _T:
    _check_saved(root, name)
    folder = root.folder / layout.SAMPLERS / name
    while True:
        try:
            number = _current(folder)
        except FormatError:
            _check_saved(root, name)  # the state may have been deleted meanwhile
            raise
        try:
            attributes = read_verified(folder / str(number) / layout.METADATA)
            if (store := attributes.get("store")) != root.uuid:
                raise FormatError(
                    f"{folder} is a state of another store ({store!r:.80}) and not of this one ({root.uuid}); delete it"
                )
            return complete(attributes.get("state"), folder / str(number))
        except FileNotFoundError as error:
            # The state was replaced while it was read, or is damaged.
            if os.path.lexists(folder) and _current(folder) == number:
                raise FormatError(f"{error.filename} is missing; delete {folder} and save again") from None
        except RecursionError:
            raise FormatError(f"{folder} is nested too deeply; delete it and save again") from None


def _current(folder: Path) -> int:
    try:
        number = read_verified(folder / layout.METADATA).get("current")
    except FileNotFoundError:
        number = None
    if type(number) is not int or not 0 < number < 10**_DIGITS:
        raise FormatError(f"{folder} does not name its current state; delete the folder and save again")
    return number


def _with_arrays(tree: Tree, folder: Path) -> Tree:
    if isinstance(tree, dict):
        if ARRAY in tree:
            return _read_array(folder, tree[ARRAY], tree.get(CRC))
        return {key: _with_arrays(below, folder) for key, below in tree.items()}
    if isinstance(tree, list):
        return [_with_arrays(below, folder) for below in tree]
    return tree


def _read_array(folder: Path, name: object, crc: object) -> NDArray[Any]:
    if not isinstance(name, str) or not re.fullmatch("[a-z0-9_][a-z0-9_.]{0,199}", name):
        raise FormatError(
            f"{folder} names an array {str(name)[:80]!r}, an invalid name; delete the folder above it and save again"
        )
    path = folder / name / layout.METADATA
    text = read_document(path)
    if crc32c(text) != crc:
        raise FormatError(f"{path} does not fit its checksum; delete {folder.parent} and save again")
    document = parse_document(text, path)
    shape = document.get("shape")
    dtype = _DTYPES.get(str(document.get("data_type")), "")
    item_bytes = np.dtype(dtype).itemsize if dtype else 0
    if not item_bytes or not _is_shape(shape, item_bytes):
        raise FormatError(f"{path} is not an array of a sampler's state; delete {folder.parent} and save again")
    if 0 in shape:
        return np.zeros(shape, dtype)
    expected = math.prod(shape) * item_bytes
    chunk = str(path.with_name(_chunk_name(shape)))
    with opened(chunk, expected + _CRC_BYTES) as fd:
        try:
            data = np.zeros(expected + _CRC_BYTES, np.uint8)
        except MemoryError:
            raise FormatError(
                f"{path.parent} is an array of {expected} bytes, more than fits into memory; delete {folder.parent} "
                "and save again"
            ) from None
        for start, stop in data_ranges(fd, 0, len(data)):  # holes are not read, so they take no memory
            read_part(fd, start, data[start:stop])
    if crc32c(data[:expected].data) != int.from_bytes(data[expected:].tobytes(), "little"):
        raise FormatError(f"{path.parent} does not fit its checksum; delete {folder.parent} and save again")
    return data[:expected].view(dtype).reshape(shape)


def _is_shape(shape: object, item_bytes: int) -> TypeGuard[list[int]]:
    """Return whether NumPy can make an array of this shape.

    NumPy limits the number of bytes of an array. For this limit, an axis of length 0 counts as length 1.
    """
    return (
        isinstance(shape, list)
        and len(shape) <= _MOST_AXES
        and all(type(n) is int and 0 <= n <= _MOST_BYTES for n in shape)
        and item_bytes * math.prod(max(n, 1) for n in shape) <= _MOST_BYTES
    )


# --- notes ------------------------------------------------------------------------------------------------------------


_NOTE = "note"


def write_note(root: Root, name: str, value: Any) -> None:
    """Save a JSON value under a name; concurrent readers, and readers after a crash, get the old or the new value.

    The note is durable when this returns. Raises ValueError if the name is invalid or the value is not JSON. Raises
    StorageFull if the disk has no room; the old note is untouched. Raises StoreNotFound if the store was deleted or
    replaced since it was opened.
    """
    _check_name(name)
    try:
        data = seal_document({}, {_NOTE: value})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the note {name!r} is not JSON: {error}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"the note {name!r} takes {len(data)} bytes, and a note has at most {MAX_BYTES}; use several")
    with root.still_there():
        folder = root.folder / layout.NOTES
        with storage_errors(folder):
            if not folder.exists():
                folder.mkdir(exist_ok=True)
                sync_folder(folder.parent)
        write_atomic(folder / _file(name), data, synced=True)
        sync_folder(folder)


def read_note(root: Root, name: str) -> Any:
    """Return the value of the note that was last saved under a name; None if there is no such note.

    Raises FormatError if the note is damaged.
    """
    if not is_name(name):
        return None
    path = root.folder / layout.NOTES / _file(name)
    try:
        return read_verified(path).get(_NOTE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FormatError as error:
        raise FormatError(f"{error}, or set it aside with `diskreplay repair`") from None


def note_names(root: Root) -> list[str]:
    try:
        files = os.listdir(root.folder / layout.NOTES)
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = [file.removesuffix(layout.NOTE_SUFFIX) for file in files if file.endswith(layout.NOTE_SUFFIX)]
    return sorted(filter(is_name, names))


def _file(name: str) -> str:
    return name + layout.NOTE_SUFFIX
