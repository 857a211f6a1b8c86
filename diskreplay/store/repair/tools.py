"""What the parts of a repair have in common: what was done, locks, and setting aside."""

from functools import cached_property

from diskreplay.errors import FormatError
from diskreplay.folders import OpenFolder
from diskreplay.format import layout
from diskreplay.format.locks import Lock, is_locked, try_lock
from diskreplay.format.quarantine import QUARANTINE, move_aside
from diskreplay.format.root import Root, read_root
from diskreplay.format.segment import SegmentInfo, read_segment
from diskreplay.store.repair.repaired import Action


class RepairTools:
    """The store that is repaired, and the list of what was done. Used by one thread."""

    def __init__(self, home: OpenFolder, dry_run: bool, actions: list[Action]) -> None:
        self._home, self._root, self._dry_run = home, home.path, dry_run
        self.actions = actions

    @cached_property
    def _store(self) -> Root:
        return read_root(self._home.name, self._home)

    def _set_aside(self, where: str, detail: str, steps: int = 0, *, said: int | None = None) -> None:
        """Move something into quarantine, for which so many steps are lost.

        ``said`` are the steps that a segment's own document tells of; None: they are counted.
        """
        now = f"{QUARANTINE}/{where}" if self._dry_run else move_aside(self._root, where, detail, steps=said)
        self.actions.append(Action("quarantined", where, f"{detail}; now {now}", steps))

    def _lock(self, where: str) -> tuple[Lock | None, bool]:
        """Return a segment's lock, and whether it has no living writer. One that is no folder has no lock."""
        committed = self._root / where / layout.COMMITTED
        path = committed / layout.LOCK
        if (self._root / where).is_symlink() or committed.is_symlink() or not committed.is_dir():
            return None, True
        if self._dry_run:
            return None, not is_locked(path)
        try:
            lock = try_lock(path)
        except PermissionError:
            return None, False
        except (FormatError, OSError):  # a link or a folder: no writer can hold it
            return None, True
        return lock, lock is not None

    def _read(self, number: int) -> SegmentInfo | None:
        try:
            return read_segment(self._store, number)
        except (FormatError, OSError):
            return None
