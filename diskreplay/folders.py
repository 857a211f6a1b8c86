"""Folders that are held open: files below them are found whatever becomes of the folder's path.

`/proc/self/fd/N` is the folder that descriptor N was opened on, also after it was renamed, and after another one has
taken its place at the old path. What is read and written below it is in that very folder or nowhere. Such paths mean
nothing to people: `shown` and `show_paths` replace them by the path that the folder was opened with.
"""

import os
import re
import shutil
import stat
import weakref
from contextlib import ContextDecorator
from pathlib import Path
from typing import Self, TypeVar

_DESCRIPTORS = "/proc/self/fd/"
_BELOW = re.compile(rf"{_DESCRIPTORS}(\d+)")
_NAME_BYTES = 255
_DELETED = " (deleted)"
_Error = TypeVar("_Error", bound=BaseException)


class OpenFolder:
    """A folder held by a descriptor, which is closed when the last reference to this object is gone.

    Whoever keeps a path below `path` must keep this object: the number of a descriptor that was closed is given to the
    next file that is opened.

    Any thread may use it. A forked child inherits the descriptor, and so a folder of its own.

    Attributes
    ----------
    path : Path
        The folder, by its descriptor: what files below it are opened with.
    name : Path
        The path it was opened with, to be shown.

    Raises
    ------
    OSError
        There is no folder at the path, or it may not be read.
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
        """Return a folder of the same name that is not open: nothing is found below it."""
        return OpenFolder(self.name, closed=True)

    @classmethod
    def of(cls, place: "OpenFolder | os.PathLike[str] | str") -> "OpenFolder":
        """Return a folder that is open as it is; open the one at a path, or one that was closed."""
        if isinstance(place, OpenFolder):
            return place if place.fd >= 0 else cls(place.name)
        return cls(Path(place).absolute())

    def is_at(self, path: os.PathLike[str] | str) -> bool | None:
        """Tell whether a path leads to this folder; None: it leads nowhere."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        return (status.st_dev, status.st_ino) == self.key

    def is_deleted(self) -> bool:
        """Tell whether the folder was deleted; the descriptor is no longer this folder's if somebody else closed it."""
        try:
            status = os.fstat(self.fd)
        except OSError:  # ESTALE: on a server; EBADF: closed
            return True
        return (status.st_dev, status.st_ino) != self.key or is_deleted(self.fd)


class Lookup:
    """Finds files by their whole paths."""

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        return os.open(path, flags)

    def status(self, path: str) -> os.stat_result:
        """Return the status of a file."""
        return os.stat(path)

    def is_link(self, path: str) -> bool:
        """Whether there is a symbolic link at a path."""
        return os.path.islink(path)


BY_PATH = Lookup()


class LookupBelow(Lookup):
    """Finds files below a folder by its descriptor, in a third of the time; others by their paths. For one thread.

    Errors name whole paths: what fails is tried once more by its path.

    Raises
    ------
    OSError
        When it is entered: there is no folder, or a link to one.
    """

    def __init__(self, folder: str) -> None:
        self._folder = f"{folder}/"

    def __enter__(self) -> Self:
        """Open the folder."""
        self._fd = os.open(self._folder[:-1], os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Close it."""
        os.close(self._fd)

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        if path.startswith(self._folder):
            try:
                return os.open(path[len(self._folder) :], flags, dir_fd=self._fd)
            except OSError:  # raised with the whole path below
                pass
        return super().open(path, flags)

    def status(self, path: str) -> os.stat_result:
        """Return the status of a file."""
        if path.startswith(self._folder):
            try:
                return os.stat(path[len(self._folder) :], dir_fd=self._fd)
            except OSError:  # as above
                pass
        return super().status(path)

    def is_link(self, path: str) -> bool:
        """Whether there is a symbolic link at a path."""
        if not path.startswith(self._folder):
            return super().is_link(path)
        try:
            return stat.S_ISLNK(os.stat(path[len(self._folder) :], dir_fd=self._fd, follow_symlinks=False).st_mode)
        except OSError:
            return False


def close_when_collected(owner: object, fd: int) -> None:
    """Close a descriptor when the last reference to its owner is gone; the end of the process does so by itself."""
    weakref.finalize(owner, _close, fd).atexit = False


def _close(fd: int) -> None:
    os.close(fd)  # by name: while a test watches calls of the system, they are replaced by others


_open: weakref.WeakValueDictionary[int, OpenFolder] = weakref.WeakValueDictionary()


def hidden_beside(path: Path, suffix: str) -> Path:
    """Return where a draft of a path is made: ``.NAMEsuffix`` next to it.

    A name that would be too long is shortened, and a hash tells it from others that begin like it.
    """
    name = os.fsencode(path.name)
    if len(name) + len(suffix) + 1 > _NAME_BYTES:
        from hashlib import sha256  # it loads OpenSSL: 3 MB, which a process that only appends does without

        digest = sha256(name).hexdigest()[:16].encode()
        begin = name[: _NAME_BYTES - 18 - len(suffix)].decode(errors="ignore")  # no half of a character
        name = begin.encode() + b"~" + digest
    return path.with_name(f".{os.fsdecode(name)}{suffix}")


def is_folder(path: os.PathLike[str] | str) -> bool:
    """Tell whether a path is that of a folder, and not of a link to one."""
    if _BELOW.fullmatch(os.fspath(path)):
        return os.path.isdir(path)
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def is_deleted(fd: int) -> bool:
    """Tell whether the file or folder that a descriptor is open on was deleted.

    Not every file system counts links to folders; the kernel itself says of a name whether it is gone.
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
    try:  # it may be called so
        there = os.lstat(name)
    except OSError:
        return True
    return (there.st_dev, there.st_ino) != (status.st_dev, status.st_ino)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder; the first error of the system is raised as it is, where `shutil.copytree` hides its number."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(source, onerror=refuse):
        inside = target / os.path.relpath(folder, source)
        inside.mkdir()
        for name in names:
            shutil.copy2(f"{folder}/{name}", inside / name, follow_symlinks=False)


def shown(text: os.PathLike[str] | str) -> str:
    """Return a text, or a path, with the paths of open folders as they were given."""
    text = os.fspath(text)
    return _BELOW.sub(_given, text) if _DESCRIPTORS in text else text


def _given(found: re.Match[str]) -> str:
    folder = _open.get(int(found[1]))
    return found[0] if folder is None else str(folder.name)


def show_paths(error: _Error) -> _Error:
    """Replace the paths in an error of the system, and in those that led to it, by those that people know."""
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


class shown_paths(ContextDecorator):
    """In a block, or a function decorated with it: errors that leave it name paths as they were given."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Replace the paths in the error."""
        if error is not None:
            show_paths(error)
