"""Warnings of segments that cannot be read, or that lie in quarantine: once a process."""

from diskreplay.errors import DamagedSegmentWarning, FormatError, warn_caller
from diskreplay.retention.policy import disk_usage
from diskreplay.segments.damage.quarantine import QUARANTINE, read_quarantine
from diskreplay.segments.documents.root import Root

# What reading a segment raises if it is damaged, or gone.
DAMAGE = (FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError)

# Store and number of the segments that this process was warned of; -1 for the quarantine.
_warned: set[tuple[str, int]] = set()


def warn_of_quarantine(root: Root) -> None:
    """Warn that what is in quarantine takes space beside ``capacity_bytes``, once a process."""
    key = (str(root.path), -1)
    limit = root.limits.capacity_bytes
    if limit is None or key in _warned:
        return
    if any(entry.segment is not None for entry in read_quarantine(root.folder)):
        _warned.add(key)
        nbytes = disk_usage(root.folder / QUARANTINE)[0]
        warn_caller(
            f"{nbytes} bytes in {root.path / QUARANTINE} do not count in the capacity_bytes of {limit}: "
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
