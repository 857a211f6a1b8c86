"""Control groups, which limit what a process takes for a bench: of memory, or from a disk."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def memory_limit(nbytes: int) -> AbstractContextManager[Path | None]:
    """Yield a group that a process can join to have so much memory, its page cache included; or None."""
    return _limited("memory", {"memory.limit_in_bytes": f"{nbytes}"}, {"memory.max": f"{nbytes}"})


def read_limit(folder: Path, nbytes: int, reads: int) -> AbstractContextManager[Path | None]:
    """Yield a group that a process can join to read so much a second of a folder's disk, so many times; or None."""
    disk = _disk(folder)
    old = {
        "blkio.throttle.read_bps_device": f"{disk} {nbytes}",
        "blkio.throttle.read_iops_device": f"{disk} {reads}",
    }
    return _limited("blkio", old, {"io.max": f"{disk} rbps={nbytes} riops={reads}"})


def join(group: str) -> None:
    """Have a group limit this process, if one is named."""
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))


def bytes_read() -> int:
    """Return how many bytes this process has had read from disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


@contextmanager
def _limited(controller: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Path | None]:
    """Yield a new group, with these files of version 1, where that has the controller, or of 2; None: not allowed."""
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
        with suppress(OSError):  # who was interrupted leaves a process in it, and is told of the interrupt
            group.rmdir()


def _wrote(group: Path, files: Mapping[str, str]) -> bool:
    try:
        for name, value in files.items():
            (group / name).write_text(value)
    except OSError:  # there is no such file, or no such disk
        return False
    return True


def _disk(folder: Path) -> str:
    """Return the number of the disk that a folder is on, perhaps in a part of it."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    place = Path("/sys/dev/block", number).resolve()
    return (place.parent / "dev").read_text().strip() if (place / "partition").exists() else number
