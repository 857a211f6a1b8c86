"""How a backup copies files, and its account of them: folders like those of the store, files one by one, free locks."""

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
    """What `Store.backup` made.

    Attributes
    ----------
    path : Path
        The folder of the new store.
    segments : int
        How many segments it has.
    steps : int
        The visible steps in them.
    steps_hidden, steps_evicted, steps_discarded, steps_lost, steps_in_quarantine : int
        The steps that were inserted and are not visible, each in one class, as `Store.info` counts them.
    steps_inserted : int
        The steps that were ever inserted: the sum of the others. All are 0 if no reader can open the backup.
    bytes : int
        What its files take on disk, shared ones included.
    bytes_shared : int
        Those of them that are the original's, too: in files that were cloned or linked.
    bytes_copied : int
        Those of them that were written. What an earlier, interrupted call had left is in neither of the two.
    problems : list of Problem
        What is damaged in the original, and so in the backup: it was copied as it is.
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
    """Counts the bytes that are done, and collects problems. Not thread-safe.

    ``progress`` is called with the bytes that are done, and all that were there when the backup began; what is copied
    for a second time does not count.

    Attributes
    ----------
    kept : int
        Bytes on disk of the files that were in the copy already.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress
        self.kept = 0
        self._problems: dict[str, list[Problem]] = {}

    def advance(self, nbytes: int) -> None:
        """Count bytes on disk."""
        self._done = min(self._done + nbytes, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        """Count everything as done."""
        self.advance(self._total)

    def begin(self, where: str) -> None:
        """Forget the problems of a part of the store, which is copied from now on."""
        self._problems.pop(where, None)

    def note(self, where: str, kind: str, name: str, detail: object) -> None:
        """Note what is wrong in a part of the store: with the file that has this path in it, or with the part."""
        path = os.path.join(where, name) if name else where
        self._problems.setdefault(where, []).append(Problem(kind, path, shown(str(detail))))

    @property
    def problems(self) -> list[Problem]:
        """All problems, by path."""
        found = [problem for some in self._problems.values() for problem in some]
        return sorted(found, key=lambda problem: (problem.where, problem.kind))


class SegmentVanished(Exception):
    """A segment was evicted, set aside or replaced while it was copied."""


def make_folder(target: Path, like: Path) -> None:
    """Make a folder with the permissions of another, where there is none; what else is in its place is removed."""
    if not is_folder(target):
        with suppress(FileNotFoundError):
            os.unlink(target)
        target.mkdir()
        os.chmod(target, stat.S_IMODE(os.stat(like).st_mode) | stat.S_IRWXU)


def make_free_lock(target: Path, like: Path) -> None:
    """Make a lock that nobody holds, with the permissions of another."""
    make_lock(target)
    with suppress(OSError):
        os.chmod(target, stat.S_IMODE(os.stat(like, follow_symlinks=False).st_mode))


def files_below(
    folder: Path, is_left_out: Callable[[Path], bool] = lambda path: False
) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder below one, and itself, the upper ones first, with the names of what is no folder in it.

    Links to folders are among these names. Nothing where the folder is missing.
    """
    for path, folders, names in os.walk(folder):
        links = {name for name in folders if os.path.islink(f"{path}/{name}")}
        folders[:] = [name for name in folders if name not in links and not is_left_out(Path(path, name))]
        yield Path(path), [*names, *links]


def remove_others(target: Path, known: set[str], is_left_out: Callable[[Path], bool] = lambda path: False) -> None:
    """Remove what is below a folder and not known, by paths relative to it; empty folders are removed, too."""
    above = {parent for path in known for parent in Path(path).parents}
    for folder, names in list(files_below(target, is_left_out)):
        inside = folder.relative_to(target)
        if inside in above:
            for name in names:
                if str(inside / name) not in known:
                    os.unlink(folder / name)
        elif folder != target:
            shutil.rmtree(folder, ignore_errors=True)  # which may be gone with the one above


def copy_as_it_is(source: Path, target: Path, where: str, copier: FileCopier, account: Account) -> None:
    """Copy a segment file by file, without a look at what is in them.

    Raises SegmentVanished where it is gone, otherwise the system's OSError of the target.
    """
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
    """Copy a file, and note what keeps it from being copied; one that is gone is left out."""
    with suppress(FileNotFoundError), noted(where, name, account):
        nbytes = os.lstat(source).st_blocks * 512
        copier.copy(str(source), str(target), may_clone=may_clone)
        account.advance(nbytes)


class noted:
    """In a block that copies a file: note in the account what is wrong with the original, and go on."""

    def __init__(self, where: str, name: str, account: Account) -> None:
        self._where, self._name, self._account = where, name, account

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Note an error of the original."""
        if isinstance(error, FormatError):
            self._account.note(self._where, "type", self._name, "is no regular file; left out")
        elif isinstance(error, Unreadable):
            self._account.note(self._where, "unreadable", self._name, f"{error.strerror}; left out")
        else:
            return False
        return True
