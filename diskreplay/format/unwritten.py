"""What a loss of power leaves of a segment that was made shortly before it and never synced: empty files, or none."""

import os
import stat

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.format.commit import map_lane_counter

# What a disk writes as a whole, and the most that is looked at of a file.
_SECTOR, _MOST_BYTES = 512, 64 << 20


class NeverWritten(FileNotFoundError):
    """A segment's own document was not on the platter when the power went, and so none of its rows is durable."""


def is_never_written(segment: str) -> bool:
    """Whether a segment's document, which cannot be read, was lost to the power and no row of it is durable.

    A document without a checksum that fits may also be damaged. But rows are durable only after their segment's
    document is; and a document has no zeros.
    """
    return _is_blank(f"{segment}/{layout.METADATA}") and has_no_durable_row(segment)


def has_no_durable_row(segment: str) -> bool:
    """Whether ``durable`` says of no lane that a row is on the platter, or never got there itself."""
    if os.path.islink(f"{segment}/{layout.DURABLE}"):
        return False
    data = _read(f"{segment}/{layout.DURABLE}/c.0")
    return data is not None and not data.strip(b"\0")


def map_durable(segment: str, lanes: int) -> NDArray[np.int64]:
    """Map the rows of each lane that are on the platter, ``(lanes,)``: none where that counter never got there itself.

    Raises
    ------
    FileNotFoundError
        The segment was evicted.
    FormatError
        The counter is damaged.
    """
    try:
        if os.stat(f"{segment}/{layout.DURABLE}/c.0").st_size:
            return map_lane_counter(f"{segment}/{layout.DURABLE}", lanes)
    except FileNotFoundError:
        os.stat(segment)
    return np.zeros(lanes, np.int64)


def _is_blank(path: str) -> bool:
    data = _read(path)
    if not data:
        return data is not None
    return any(not data[at : at + _SECTOR].strip(b"\0") for at in range(0, len(data), _SECTOR))


def _read(path: str) -> bytes | None:
    """Return the bytes of a file, none where it is missing, None where something else is in its place."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return b""
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            return None
        return os.read(fd, status.st_size)
    finally:
        os.close(fd)
