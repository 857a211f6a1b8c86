"""Detects segments that were never synced before a loss of power: their files are empty, or missing."""

import os

from diskreplay.errors import FormatError
from diskreplay.format import layout
from diskreplay.format.mapping import read_regular

# What a disk writes as a whole, and the most that is read of a file.
_SECTOR, _MOST_BYTES = 512, 64 << 20


class NeverWritten(FileNotFoundError):
    """A segment's own document was not durable when the power went, and so none of its rows is."""


def is_never_written(segment: str) -> bool:
    """Whether a segment's document, which cannot be read, was lost to the power before any of its rows was durable.

    A document without a checksum that fits may also be damaged. But rows are marked only after their segment's document
    is durable; and a document has no zeros.
    """
    blank = _is_blank(f"{segment}/{layout.METADATA}") and has_no_mark(segment)
    return blank and os.path.isdir(segment)  # checked last: retention may take it out meanwhile


def has_no_mark(segment: str) -> bool:
    """Whether no row of a segment is known to be durable: no mark, and no durable row."""
    if os.path.islink(f"{segment}/{layout.DURABLE}"):
        return False
    found = [_read(f"{segment}/{name}") for name in (layout.MARKS, f"{layout.DURABLE}/c.0")]
    return all(data is not None and not data.strip(b"\0") for data in found)


def _is_blank(path: str) -> bool:
    data = _read(path)
    if not data:
        return data is not None
    return any(not data[at : at + _SECTOR].strip(b"\0") for at in range(0, len(data), _SECTOR))


def _read(path: str) -> bytes | None:
    """Return the bytes of a file, none where it is missing, None where something else is in its place."""
    try:
        data = read_regular(path, None, _MOST_BYTES + 1)
    except FileNotFoundError:
        return b""
    except (OSError, FormatError):
        return None
    return data if len(data) <= _MOST_BYTES else None
