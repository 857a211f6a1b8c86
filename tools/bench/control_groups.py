"""Control groups, which limit the memory or the disk reads of a process of a bench."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def memory_limit(nbytes: int) -> AbstractContextManager[Path | None]:
    """Yield a group with this much memory, page cache included, for a process to join; None if not allowed."""
    return _limited("memory", {"memory.limit_in_bytes": f"{nbytes}"}, {"memory.max": f"{nbytes}"})


def read_limit(folder: Path, nbytes: int, reads: int) -> AbstractContextManager[Path | None]:
    """Yield a group with these bytes and reads a second of a folder's disk, for a process to join; or None."""
    disk = _disk(folder)
    old = {
        "blkio.throttle.read_bps_device": f"{disk} {nbytes}",
        "blkio.throttle.read_iops_device": f"{disk} {reads}",
    }
    return _limited("blkio", old, {"io.max": f"{disk} rbps={nbytes} riops={reads}"})


def join(group: str) -> None:
    """Join a control group, if one is named."""
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))


def bytes_read() -> int:
    """Return the bytes that were read from disks for this process."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


@contextmanager
def _limited(controller: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Path | None]:
    """Yield a new group with these files, of version 1 if it has the controller, else 2; None: not allowed."""
    is_old = (ROOT / controller).is_dir()
    group = (ROOT / controller if is_old else ROOT) / f"diskreplay-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        yield group if _wrote(group, old if is_old else new) else None
    finally:
        with suppress(OSError):  # after an interrupt, a process may still be in it
            group.rmdir()


def _wrote(group: Path, files: Mapping[str, str]) -> bool:
    try:
        for name, value in files.items():
            (group / name).write_text(value)
    except OSError:  # no such file, or no such disk
        return False
    return True


def _disk(folder: Path) -> str:
    """Return the number of the disk that a folder is on, perhaps in a part of it."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    place = Path("/sys/dev/block", number).resolve()
    return (place.parent / "dev").read_text().strip() if (place / "partition").exists() else number
