"""The inner names that crash tests patch or trace; no other module of these tests knows them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from diskreplay.folders import shown as shown
from diskreplay.segments import segment_column, segment_writer
from diskreplay.segments.files import commit, durable, machine, mapping
from diskreplay.writing import append_cursor, rotation

STORING = {
    *("set", "restore_complements", "publish", "append", "write", "write_row", "write_block", "write_lanes", "flush"),
}
"""The functions whose lines may store to mapped memory."""

STORING_FILES = {module.__file__ for module in (commit, segment_column, segment_writer, append_cursor)}

LIBRARIES: list[tuple[Any, str]] = [(durable, "_libc"), (mapping, "_libc")]
"""Who calls the C library, and by which name."""

PWRITES: list[tuple[Any, str]] = [(durable, "_pwrite_held")]
"""Who writes by position other than by `os.pwrite`."""


@contextmanager
def another_boot(name: str = "another boot") -> Iterator[None]:
    """Let this process believe that the machine booted: what was written before counts as far as it was synced."""
    first_line = machine._first_line

    def line(paths: Iterable[str]) -> str:
        paths = list(paths)
        return name if any("boot_id" in path for path in paths) else first_line(paths)

    with mock.patch.object(machine, "_first_line", line):
        machine.boot_id.cache_clear()
        try:
            yield
        finally:
            machine.boot_id.cache_clear()


@contextmanager
def early_preallocation() -> Iterator[None]:
    """Have each writer make its next segment in the background, though segments fill in no time."""
    with mock.patch.object(rotation, "LEAST_QUARTER_S", 0.0):
        yield


@contextmanager
def kept_by_position() -> Iterator[None]:
    """Have every file system taken for one that does not keep what was reserved."""
    lost = {"keeps_reservations": lambda path: False}
    with mock.patch.multiple(commit, **lost), mock.patch.multiple(segment_writer, **lost):
        yield
