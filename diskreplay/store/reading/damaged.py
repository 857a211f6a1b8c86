"""Segments that cannot be read or that lie in quarantine: what a process is warned of, once."""

from diskreplay.errors import DamagedSegmentWarning, FormatError, SegmentGone, warn_caller
from diskreplay.folders import shown
from diskreplay.format.metadata import UnknownFeature
from diskreplay.format.quarantine import QUARANTINE, has_quarantine, read_quarantine
from diskreplay.format.root import Root
from diskreplay.store.retention.policy import disk_usage

# What reading a segment raises if it is damaged, or gone.
DAMAGE = (FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError)

# Store and number of the segments that this process was warned of; -1 for the quarantine.
_warned: set[tuple[str, int]] = set()


class DamagedSegments:
    """The segments of one store that a reader leaves out. Not thread-safe.

    ``details`` says what is wrong with each, by number.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self.details: dict[int, str] = {}

    def note(self, number: int, error: Exception) -> bool:
        """Note that a segment cannot be read, and warn of it; False: it was evicted or set aside.

        Raises FormatError where a later release wrote it: that is no damage.
        """
        if isinstance(error, UnknownFeature):
            raise error
        path = self._root.segment_path(number)
        if not path.exists() and not path.is_symlink():
            return False
        detail = str(error)
        if isinstance(error, (OSError, SegmentGone)):
            detail = f"{getattr(error, 'filename', None) or path} is missing"
        self.details[number] = detail = shown(detail)
        warn_of_damage(self._root, number, detail)
        return True


def warn_of_quarantine(root: Root) -> None:
    """Warn that what is in quarantine takes space beside ``capacity_bytes``, once a process."""
    key = (str(root.path), -1)
    if root.capacity_bytes is None or key in _warned or not has_quarantine(root.folder):
        return
    nbytes = disk_usage(root.folder / QUARANTINE)[0]
    if any(entry.segment is not None for entry in read_quarantine(root.folder)):
        _warned.add(key)
        warn_caller(
            f"{nbytes} bytes in {root.path / QUARANTINE} do not count in the capacity_bytes of {root.capacity_bytes}: "
            "diskreplay repair --restore or --drop decides about them",
            DamagedSegmentWarning,
        )


def warn_of_damage(root: Root, number: int, detail: str) -> None:
    """Warn of a segment that cannot be read, once a process."""
    key = (str(root.path), number)
    if key in _warned:
        return
    _warned.add(key)
    warn_caller(
        f"segment {number} of {root.path} is damaged, and its steps are left out: {detail}. "
        "Run diskreplay repair on the store",
        DamagedSegmentWarning,
    )
