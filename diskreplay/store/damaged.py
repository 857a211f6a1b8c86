"""Segments that cannot be read: a store is used without them, and a warning names each once."""

import warnings

from diskreplay.errors import DamagedSegmentWarning, FormatError, SegmentGone
from diskreplay.format.root import Root

# What reading a segment raises if it is damaged, or gone.
DAMAGE = (FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError)

# Store and number of those that this process was warned of.
_warned: set[tuple[str, int]] = set()


class DamagedSegments:
    """The segments of one store that a reader leaves out. Not thread-safe.

    Attributes
    ----------
    details : dict of int to str
        What is wrong with each, by number.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self.details: dict[int, str] = {}

    def note(self, number: int, error: Exception) -> bool:
        """Note that a segment cannot be read, and warn of it; False: it was evicted or set aside."""
        path = self._root.segment_path(number)
        if not path.exists() and not path.is_symlink():
            return False
        detail = str(error)
        if isinstance(error, (OSError, SegmentGone)):
            detail = f"{getattr(error, 'filename', None) or path} is missing"
        self.details[number] = detail
        warn_of_damage(self._root, number, detail)
        return True


def warn_of_damage(root: Root, number: int, detail: str) -> None:
    """Warn of a segment that cannot be read, once a process."""
    key = (str(root.path), number)
    if key in _warned:
        return
    _warned.add(key)
    warnings.warn(
        f"segment {number} of {root.path} is damaged, and its steps are left out: {detail}. "
        "Run diskreplay repair on the store",
        DamagedSegmentWarning,
        stacklevel=3,
    )
