"""Copies files and folders for a backup, and counts bytes and problems."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from diskreplay.errors import FormatError
from diskreplay.folders import is_folder, shown
from diskreplay.integrity.verify.files import Problem
from diskreplay.segments.documents import layout
from diskreplay.segments.files.copies import FileCopier, Unreadable
from diskreplay.segments.files.locks import make_lock

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Backup:
    """The result of `Store.backup`.

    Attributes
    ----------
    path : Path
        The folder of the new store.
    segments : int
        The number of segments of the new store.
    steps : int
        The number of visible steps of the backup.
    steps_hidden, steps_evicted, steps_discarded, steps_lost, steps_in_quarantine : int
        The numbers of inserted steps that are not visible, by class, as in `Store.info`.
    steps_inserted : int
        The number of steps that were ever inserted: the sum of the counts above. All counts of steps are 0 if the
        backup is too damaged to be read.
    bytes : int
        The disk usage of the new store in bytes, including files that it shares with the original.
    bytes_shared : int
        The number of bytes that the backup shares with the original: files that were cloned or linked.
    bytes_copied : int
        The number of bytes that this call wrote. Files of an earlier, interrupted call count neither as shared nor as
        copied.
    problems : list of Problem
        Damage of the original. Damaged files were copied as they are; unreadable files were left out.
    """

    path: Path
    segments: int
    steps: int
    steps_hidden: int
    steps_evicted: int
    steps_discarded: int
    steps_lost: int
    steps_in_quarantine: int
    steps_inserted: int
    bytes: int
    bytes_shared: int
    bytes_copied: int
    problems: list[Problem] = field(default_factory=list)


class Account:
    """Counts the bytes that a backup has finished, and collects problems of the original store.

    Not thread-safe. ``total`` is the disk usage of the store, in bytes, when the backup began. ``progress`` is called
    with the number of finished bytes and with ``total``. A file that is copied twice counts twice, but the reported
    number is at most ``total``.

    Attributes
    ----------
    kept : int
        The disk usage, in bytes, of files that an earlier call had copied.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress
        self.kept = 0
        self._problems: dict[str, list[Problem]] = {}

    def advance(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        self.advance(self._total)

    def begin(self, where: str) -> None:
        """Forget the problems of a segment's folder, or of everything outside the segments if ``where`` is empty."""
        self._problems.pop(where, None)

    def note(self, where: str, kind: str, name: str, detail: object) -> None:
        """Add a problem of the file ``name`` in the folder ``where``, or of the folder itself if ``name`` is empty."""
        path = os.path.join(where, name) if name else where
        self._problems.setdefault(where, []).append(Problem(kind, path, shown(str(detail))))

    @property
    def problems(self) -> list[Problem]:
        found = [problem for some in self._problems.values() for problem in some]
        return sorted(found, key=lambda problem: (problem.where, problem.kind))


class SegmentVanished(Exception):
    """A segment was evicted, moved to quarantine or replaced while it was copied."""


def make_folder(target: Path, like: Path) -> None:
    if not is_folder(target):
        with suppress(FileNotFoundError):
            os.unlink(target)
        target.mkdir()
        os.chmod(target, stat.S_IMODE(os.stat(like).st_mode) | stat.S_IRWXU)


def make_free_lock(target: Path, like: Path) -> None:
    """Make a lock file that no process holds, with the permissions of ``like``."""
    make_lock(target)
    with suppress(OSError):
        os.chmod(target, stat.S_IMODE(os.stat(like, follow_symlinks=False).st_mode))


def files_below(
    folder: Path, is_left_out: Callable[[Path], bool] = lambda path: False
) -> Iterator[tuple[Path, list[str]]]:
    """Yield ``folder`` and every folder below it, parents first, each with the names of its files and links.

    Yields nothing if ``folder`` is missing.
    """
    for path, folders, names in os.walk(folder):
        links = {name for name in folders if os.path.islink(f"{path}/{name}")}
        folders[:] = [name for name in folders if name not in links and not is_left_out(Path(path, name))]
        yield Path(path), [*names, *links]


def remove_others(target: Path, known: set[str], is_left_out: Callable[[Path], bool] = lambda path: False) -> None:
    """Remove the files below ``target`` whose relative paths are not in ``known``, and folders without a known file."""
    above = {parent for path in known for parent in Path(path).parents}
    for folder, names in list(files_below(target, is_left_out)):
        inside = folder.relative_to(target)
        if inside in above:
            for name in names:
                if str(inside / name) not in known:
                    os.unlink(folder / name)
        elif folder != target:
            shutil.rmtree(folder, ignore_errors=True)  # the folder may have been removed with its parent


def copy_as_it_is(source: Path, target: Path, where: str, copier: FileCopier, account: Account) -> None:
    """Copy a segment without checking its contents; raises SegmentVanished if the segment is gone."""
    if is_folder(target):
        shutil.rmtree(target)
    for folder, names in files_below(source):
        inside = target / folder.relative_to(source)
        make_folder(inside, folder)
        for name in names:
            path = os.path.normpath(f"{folder.relative_to(source)}/{name}")
            if path == f"{layout.COMMITTED}/{layout.LOCK}":
                make_free_lock(inside / name, folder / name)
            else:
                copy_noted(folder / name, inside / name, where, path, copier, account)
    if not is_folder(source):
        raise SegmentVanished(where)


def copy_noted(
    source: Path, target: Path, where: str, name: str, copier: FileCopier, account: Account, *, may_clone: bool = False
) -> None:
    with suppress(FileNotFoundError), noted(where, name, account):
        nbytes = os.lstat(source).st_blocks * 512
        copier.copy(str(source), str(target), may_clone=may_clone)
        account.advance(nbytes)


class noted:
    """Context manager that suppresses an error while the original is read, and notes the error in the `Account`."""

    def __init__(self, where: str, name: str, account: Account) -> None:
        self._where, self._name, self._account = where, name, account

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, FormatError):
            self._account.note(self._where, "type", self._name, "is not a regular file; left out")
        elif isinstance(error, Unreadable):
            self._account.note(self._where, "unreadable", self._name, f"{error.strerror}; left out")
        else:
            return False
        return True
