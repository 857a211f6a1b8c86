"""The files of a store as docs/format.md describes them: tests read, damage and lock them without the package."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

POSITION_BITS = 35  # of an id, below the number of its segment
OBSERVATION_ONLY, END_MARKER = 8, 32  # flags of rows that are no steps
EPISODE_VALUES = 64  # and of those with values of their episode
LANE_COUNTERS = ("committed", "observed", "durable")
WORDS = (
    *("next_segment", "first_live", "horizon", "evicted", "evictions", "frontier", "reserved", "changes", "boot"),
    *("sealed", "unused", *(f"unused_{number}" for number in range(11, 16))),
)


def segment_of(path: Path, number: int = 0) -> Path:
    """Return the folder of a segment."""
    return Path(path) / f"segments/{number:08d}"


def attributes_of(folder: Path) -> dict[str, Any]:
    """Return the attributes in the document of a store, a segment or an array."""
    return dict(json.loads((folder / "zarr.json").read_bytes())["attributes"])


def write_document(path: Path, document: Any) -> None:
    """Write a document; where it had a checksum of itself, the new one fits."""
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if isinstance(attributes, dict) and "diskreplay_crc32c" in attributes:
        attributes["diskreplay_crc32c"] = "0" * 8
        data = json.dumps(document, separators=(",", ":")).encode()
        attributes["diskreplay_crc32c"] = f"{google_crc32c.value(data):08x}"
    path.write_bytes(json.dumps(document, separators=(",", ":")).encode())


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the attributes of a document and give it a checksum that fits: what somebody hostile would do."""
    document = json.loads(path.read_bytes())
    change(document["attributes"])
    write_document(path, document)


def words(path: Path) -> dict[str, int]:
    """Return the words of the counters of a store."""
    return dict(zip(WORDS, np.fromfile(path / "counters/c.0", "<i8").tolist(), strict=False))


def set_words(path: Path, **values: int) -> None:
    """Set words of the counters of a store, and their complements, in place: others have the file mapped."""
    data = np.fromfile(path / "counters/c.0", "<i8")
    for name, value in values.items():
        data[WORDS.index(name)], data[16 + WORDS.index(name)] = value, ~value
    replace_bytes(path / "counters/c.0", 0, data.tobytes())


def replace_bytes(file: Path, at: int, data: bytes) -> None:
    """Replace bytes of a file in place, which may have no write permission."""
    mode = file.stat().st_mode
    file.chmod(mode | 0o200)
    with open(file, "r+b") as opened:
        opened.seek(at)
        opened.write(data)
    file.chmod(mode)


def flip(file: Path, at: int = 0, mask: int = 0xFF) -> None:
    """Change bits of a byte of a file, in place; at -1 is the last one."""
    data = file.read_bytes()
    at %= len(data)
    replace_bytes(file, at, bytes([data[at] ^ mask]))


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Try to hold the lock of a file during the block; it is made where it is missing. Tells whether it was free."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        yield False
        return
    try:
        yield True
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Tell whether somebody holds the lock of a file."""
    with locked(path) as is_free:
        return not is_free


class Mark(NamedTuple):
    """A mark of a segment: the rows of each lane, the checksum of priorities, and when it was made."""

    rows: list[int]
    priority: int
    time: float


def marks_of(folder: Path, lanes: int) -> list[Mark]:
    """Return the marks of a segment, up to the first one that does not fit its own checksum."""
    path = folder / "durable/marks"
    data, kind = path.read_bytes() if path.exists() else b"", mark_dtype(lanes)
    found, own = list[Mark](), 0
    for at in range(0, len(data) - kind.itemsize + 1, kind.itemsize):
        (mark,) = np.frombuffer(data[at : at + kind.itemsize], kind)
        own = google_crc32c.extend(own, data[at : at + kind.itemsize - 4])
        if (mark["size"], mark["own"]) != (kind.itemsize, own):
            break
        found.append(Mark(mark["rows"].tolist(), int(mark["priority"]), float(mark["time"])))
    return found


def mark_dtype(lanes: int) -> np.dtype[np.void]:
    """Return the layout of a mark."""
    first = [("size", "<u4"), ("crc32c", "<u4"), ("time", "<f8"), ("rows", "<i8", (lanes,))]
    return np.dtype([*first, ("priority", "<u4"), ("own", "<u4")])


def disk_bytes(path: Path) -> int:
    """Return how many bytes the files below a folder take on disk."""
    found = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):  # deleted meanwhile
                found += os.lstat(f"{folder}/{name}").st_blocks * 512
    return found
