"""A record of what a program does to files: every change of contents, lengths and names, and every sync."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash.injection import Point, intercepted

SECTOR = 512
LENGTH = -1

Key = tuple[int, int]
"""An inode and the number of one of its units; `LENGTH` for how long it is."""


class Put(NamedTuple):
    """A unit, or the length of a file, is another now."""

    key: Key
    value: Any


class Names(NamedTuple):
    """Names in folders are others now, all of them together: (folder, name, what it names or None)."""

    changes: tuple[tuple[int, str, int | None], ...]


class Sync(NamedTuple):
    """A file's contents or a folder's names are durable; None: everything."""

    inode: int | None


class Mark(NamedTuple):
    """Something was noted."""

    note: Any


Event = Put | Names | Sync | Mark


@dataclass
class _File:
    fd: int
    data: bytes = b""


class Recording:
    """What happens below a folder between ``__enter__`` and ``__exit__``; what is there before is durable.

    Concurrency: one recording at a time in a process. All threads are recorded; their file operations take turns.

    Parameters
    ----------
    folder : path
        Everything below it is recorded. Links, and names that come from outside, are not known to it.
    unit : int
        Bytes that a disk writes as a whole.
    """

    def __init__(self, folder: Path | str, unit: int = SECTOR) -> None:
        self.folder, self.unit = os.path.realpath(folder), unit
        self.events: list[Event] = []
        self._files: dict[int, _File] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._pinned: list[int] = []
        self._stack, self._lock = ExitStack(), threading.RLock()

    def __enter__(self) -> Recording:
        """Begin."""
        self.top = os.stat(self.folder).st_ino
        for path, _, files in os.walk(self.folder):
            self._see_folder(path)
            for name in files:
                self._see(path, name)
            if path != self.folder:
                self._name(os.stat(os.path.dirname(path)).st_ino, os.path.basename(path), os.stat(path).st_ino)
        self._capture()
        self.events.append(Sync(None))
        self._stack.enter_context(intercepted(self._before, self._after))
        return self

    def __exit__(self, *_: object) -> None:
        """End: nothing more is recorded."""
        self._stack.close()
        self._capture()
        for fd in [*self._pinned, *(file.fd for file in self._files.values())]:
            os.close(fd)

    def mark(self, note: Any) -> None:
        """Note something at this point of the record."""
        with self._lock:
            self._capture()
            self.events.append(Mark(note))

    @property
    def folders(self) -> frozenset[int]:
        """The inodes of all folders that there were."""
        return frozenset(self._names)

    @property
    def marks(self) -> list[Any]:
        """All notes."""
        return [event.note for event in self.events if isinstance(event, Mark)]

    def _before(self, _: Point) -> None:
        with self._lock:
            self._capture()

    def _after(self, point: Point, result: Any) -> None:
        with self._lock:
            self._take_down(point)

    def _take_down(self, point: Point) -> None:
        name, folder = point.name, point.kwargs.get("dir_fd")
        if name in ("fsync", "fdatasync"):
            inode = os.fstat(int(point.args[0])).st_ino
            if inode in self._names or inode in self._files:
                self.events.append(Sync(inode))
        elif name == "syncfs":
            self.events.append(Sync(None))
        elif name in ("rename", "replace"):
            self._moved(*(os.path.abspath(path) for path in point.args[:2]))
        elif name in ("open", "mkdir", "unlink", "remove", "rmdir") and not isinstance(point.args[0], int):
            path = os.fspath(point.args[0])
            inside = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else "."
            above = os.path.abspath(os.path.join(inside, os.path.dirname(path)))
            if name in ("open", "mkdir"):
                self._see(above, os.path.basename(path), is_folder=name == "mkdir")
            else:
                self._gone(above, os.path.basename(path))

    # --- names -------------------------------------------------------------------------------------------------------

    def _name(self, folder: int, name: str, inode: int | None) -> None:
        self._rename([(folder, name, inode)])

    def _rename(self, changes: list[tuple[int, str, int | None]]) -> None:
        known = tuple(change for change in changes if change[0] in self._names)
        for folder, name, inode in known:
            if inode is None:
                self._names[folder].pop(name, None)
            else:
                self._names[folder][name] = inode
        if known:
            self.events.append(Names(known))

    def _see_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._pinned.append(fd)  # a number that is in use is not given to another folder
        self._names[os.fstat(fd).st_ino] = {}

    def _see(self, above: str, name: str, *, is_folder: bool = False) -> None:
        """Take in a name that may be new."""
        folder = os.stat(above).st_ino
        if folder not in self._names or name in self._names[folder]:
            return
        path = os.path.join(above, name)
        inode = os.stat(path).st_ino
        if is_folder:
            self._see_folder(path)
        else:
            self._files[inode] = _File(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
        self._name(folder, name, inode)

    def _gone(self, above: str, name: str) -> None:
        folder = os.stat(above).st_ino
        inode = self._names.get(folder, {}).get(name)
        if inode is not None:
            self._name(folder, name, None)

    def _moved(self, source: str, target: str) -> None:
        source_folder, target_folder = (os.stat(os.path.dirname(path)).st_ino for path in (source, target))
        inode = self._names.get(source_folder, {}).get(os.path.basename(source))
        if inode is not None:
            gone = (source_folder, os.path.basename(source), None)
            self._rename([gone, (target_folder, os.path.basename(target), inode)])

    # --- contents ----------------------------------------------------------------------------------------------------

    def _capture(self) -> None:
        """Take down what changed in any file since the last time, through mappings too."""
        for inode, file in self._files.items():
            data = os.pread(file.fd, os.fstat(file.fd).st_size, 0)
            if data == file.data:
                continue
            before, file.data = file.data, data
            if len(data) != len(before):
                self.events.append(Put((inode, LENGTH), len(data)))
                before = before[: len(data)].ljust(len(data), b"\0")
            for start in range(0, len(data), self.unit):
                new = data[start : start + self.unit]
                if new != before[start : start + self.unit]:
                    self.events.append(Put((inode, start // self.unit), new))
