"""Folders that a descriptor keeps open: the files in such a folder are found even if the folder's path changes.

`/proc/self/fd/N` leads to the folder that descriptor N was opened on, even after that folder was renamed and another
folder has taken its old path. Reads and writes below `/proc/self/fd/N` reach the folder of the descriptor, or fail.
Messages for users must not contain `/proc/self/fd/N`: `shown` and `show_paths` replace this path by the path that the
user gave.
"""

import os
import re
import shutil
import stat
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

_DESCRIPTORS = "/proc/self/fd/"
_BELOW = re.compile(rf"{_DESCRIPTORS}(\d+)")
_NAME_BYTES = 255
_DELETED = " (deleted)"
_Error = TypeVar("_Error", bound=BaseException)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class OpenFolder:
    """A folder that a descriptor keeps open until the last reference to this object is gone.

    Code that keeps a path below `path` must also keep this object. When this object is gone, the system may give the
    descriptor's number to another file. Then `path` leads to that file.

    Thread-safe. The descriptor of a forked child stays open even if the parent's descriptor is closed.

    Attributes
    ----------
    path : Path
        The path ``/proc/self/fd/N`` of the folder, where N is the descriptor. Files are opened by paths below this
        path.
    name : Path
        The path of the folder that the user gave, for messages.

    Raises
    ------
    OSError
        No folder is at the path, or the folder cannot be opened for reading.
    """

    def __init__(self, name: Path, *, closed: bool = False) -> None:
        self.name = name
        self.fd = -1 if closed else os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = Path(f"{_DESCRIPTORS}{self.fd}")
        self.key = -1, -1
        if closed:
            return
        close_when_collected(self, self.fd)
        status = os.fstat(self.fd)
        self.key = status.st_dev, status.st_ino
        _open[self.fd] = self

    def closed(self) -> "OpenFolder":
        """Return an `OpenFolder` with the same `name` and without a descriptor. Nothing is found below its `path`."""
        return OpenFolder(self.name, closed=True)

    @classmethod
    def of(cls, place: "OpenFolder | os.PathLike[str] | str") -> "OpenFolder":
        """Return an `OpenFolder` for a path or an `OpenFolder`.

        An open `OpenFolder` is returned as it is. A closed `OpenFolder` is opened again by its `name`.
        """
        if isinstance(place, OpenFolder):
            return place if place.fd >= 0 else cls(place.name)
        return cls(Path(place).absolute())

    def is_at(self, path: os.PathLike[str] | str) -> bool | None:
        """Return whether a path leads to this folder; None if nothing is at the path."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        return (status.st_dev, status.st_ino) == self.key

    def is_deleted(self) -> bool:
        """Return whether the folder was deleted, or the descriptor no longer belongs to it."""
        try:
            status = os.fstat(self.fd)
        except OSError:  # ESTALE: the folder was deleted on a server; EBADF: the descriptor is closed
            return True
        return (status.st_dev, status.st_ino) != self.key or is_deleted(self.fd)


class Lookup:
    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags)

    def status(self, path: str) -> os.stat_result:
        return os.stat(path)

    def first_link(self, paths: Iterable[str]) -> str | None:
        """Return the first path that is a symbolic link, or None."""
        return next(filter(os.path.islink, paths), None)


BY_PATH = Lookup()


class LookupBelow(Lookup, AbstractContextManager["LookupBelow"]):
    """Finds files below a folder by the folder's descriptor. Not thread-safe.

    This is three times as fast as lookups by full paths. Files outside the folder are found by their full paths. A
    failed lookup is repeated with the full path, so that the error contains the full path.

    Raises
    ------
    OSError
        ``folder`` is not a folder, or is a symbolic link.
    """

    def __init__(self, folder: str) -> None:
        self._folder = f"{folder}/"
        self._fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        os.close(self._fd)

    def open(self, path: str, flags: int) -> int:
        if path.startswith(self._folder):
            try:
                return os.open(path[len(self._folder) :], flags, dir_fd=self._fd)
            except OSError:  # the full path is tried next
                pass
        return super().open(path, flags)

    def status(self, path: str) -> os.stat_result:
        if path.startswith(self._folder):
            try:
                return os.stat(path[len(self._folder) :], dir_fd=self._fd)
            except OSError:  # the full path is tried next
                pass
        return super().status(path)

    def first_link(self, paths: Iterable[str]) -> str | None:
        for path in paths:
            name = path.removeprefix(self._folder)
            try:
                status = os.stat(name, dir_fd=None if name == path else self._fd, follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISLNK(status.st_mode):
                return path
        return None


def close_when_collected(owner: object, fd: int) -> None:
    """Close a descriptor when its owner is garbage collected. At exit, the system closes the descriptor."""
    weakref.finalize(owner, _close, fd).atexit = False


def _close(fd: int) -> None:
    os.close(fd)  # the attribute is read at each call, because tests replace `os.close`


_open: weakref.WeakValueDictionary[int, OpenFolder] = weakref.WeakValueDictionary()


def is_taken(path: Path) -> bool:
    """Return whether anything is at ``path``. An empty folder counts as nothing."""
    return os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))


def hidden_sibling(path: Path, suffix: str) -> Path:
    """Return the path ``.NAMEsuffix`` next to ``path``, where NAME is the last part of ``path``.

    A NAME that is too long is shortened, and ends in a hash of the full NAME. So two long NAMEs with the same beginning
    give different paths.
    """
    name = os.fsencode(path.name)
    if len(name) + len(suffix) + 1 > _NAME_BYTES:
        from hashlib import sha256  # not at the top: this import loads OpenSSL (3 MB)

        digest = sha256(name).hexdigest()[:16].encode()
        # `ignore` drops an incomplete character at the end
        begin = name[: _NAME_BYTES - 18 - len(suffix)].decode(errors="ignore")
        name = begin.encode() + b"~" + digest
    return path.with_name(f".{os.fsdecode(name)}{suffix}")


def is_folder(path: os.PathLike[str] | str) -> bool:
    """Return whether a path is a folder and not a symbolic link. ``/proc/self/fd/N`` is not taken for a link."""
    if _BELOW.fullmatch(os.fspath(path)):
        return os.path.isdir(path)
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def is_deleted(fd: int) -> bool:
    """Return whether the file or folder of an open descriptor was deleted.

    Some file systems keep no link count for folders. But the kernel appends " (deleted)" to the path of a deleted
    folder in /proc.
    """
    try:
        status = os.fstat(fd)
        if status.st_nlink == 0:
            return True
        name = os.readlink(f"{_DESCRIPTORS}{fd}")
    except OSError:
        return True
    if not name.endswith(_DELETED):
        return False
    try:  # an existing folder may have a name that ends in " (deleted)"
        there = os.lstat(name)
    except OSError:
        return True
    return (there.st_dev, there.st_ino) != (status.st_dev, status.st_ino)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder to a new path. Raise the first OSError itself: `shutil.copytree` would hide its errno."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(source, onerror=refuse):
        inside = target / os.path.relpath(folder, source)
        inside.mkdir()
        for name in names:
            shutil.copy2(f"{folder}/{name}", inside / name, follow_symlinks=False)


def shown(text: os.PathLike[str] | str) -> str:
    """Return ``text`` with each ``/proc/self/fd/N`` replaced by the path that the user gave for that folder."""
    text = os.fspath(text)
    return _BELOW.sub(_given, text) if _DESCRIPTORS in text else text


def _given(found: re.Match[str]) -> str:
    folder = _open.get(int(found[1]))
    return found[0] if folder is None else str(folder.name)


def show_paths(error: _Error) -> _Error:
    """Apply `shown` to the file names in an error, and in the errors that caused it. Return the error."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        left += [each.__cause__, each.__context__]
        if isinstance(each, OSError):
            for name in ("filename", "filename2"):
                value = getattr(each, name)
                if isinstance(value, str | os.PathLike):
                    setattr(each, name, shown(value))
    return error


def shown_paths(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function: errors that it raises name paths as the user gave them."""

    @wraps(function)
    def showing(*args: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **named)
        except BaseException as error:
            show_paths(error)
            raise

    return showing
