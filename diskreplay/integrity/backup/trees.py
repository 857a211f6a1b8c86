"""Trees of files: folders made after those of the store, files one by one, and locks that are free."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from diskreplay.errors import FormatError
from diskreplay.folders import is_folder
from diskreplay.integrity.backup.account import Account
from diskreplay.segments.documents import layout
from diskreplay.segments.files.copies import FileCopier, Unreadable
from diskreplay.segments.files.locks import make_lock


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
