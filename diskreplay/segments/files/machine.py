"""Identifies this machine, its boot and its volumes, reads its clocks, and checks that the platform is supported."""

import ctypes
import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple
from uuid import UUID

from diskreplay.errors import ReplayError

_MACHINE_ID = re.compile("[0-9a-f]{32}")
_libc = ctypes.CDLL(None, use_errno=True)


def _first_line(paths: Iterable[str]) -> str:
    for path in paths:
        try:
            with open(path) as file:
                text = file.readline().strip()
        except OSError:
            continue
        if text:
            return text
    return ""


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return an id that changes when this machine boots; if it cannot be read, an id that no other process has."""
    return _first_line(["/proc/sys/kernel/random/boot_id"]) or _unknown()


@lru_cache(maxsize=1)
def machine_id() -> str:
    """Return an id of this machine that survives a boot; if it cannot be read, an id that no other process has.

    The host name does not identify a machine: containers share a host name, or get a new host name at each start.
    """
    text = _first_line(["/etc/machine-id", "/var/lib/dbus/machine-id"])
    return text if _MACHINE_ID.fullmatch(text) else _unknown()


def _unknown() -> str:
    return f"unknown-{uuid.uuid4()}"


class BootTime(NamedTuple):
    """A moment by the clock that cannot be set: seconds since a boot of a machine, including suspended time."""

    machine: str
    boot: str
    seconds: float


# This clock cannot be set, and counts while the machine is suspended. Only Linux has this clock.
CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock_ns() -> int:
    return time.clock_gettime_ns(CLOCK)


class Clock(NamedTuple):
    """Converts times since a boot to wall time; ``wall`` is the boot's time in nanoseconds since the epoch."""

    boot: str
    wall: int


# The largest valid time, 146 years: a larger time can only be due to damage. The sum of two valid times fits into 64
# bits.
MOST_NS = 1 << 62


def this_clock() -> Clock:
    return Clock(boot_id(), time.time_ns() - clock_ns())


def boot_time() -> BootTime:
    return BootTime(machine_id(), boot_id(), round(time.clock_gettime(CLOCK), 3))


def is_clock_synchronized() -> bool:
    """Return whether a time service keeps the wall clock correct; False after another program has set the clock."""
    # The buffer is the struct timex of x86-64. Its first number is 0, so that the call changes nothing. The number at
    # index 10 is the status.
    timex = (ctypes.c_int * 64)()
    unsynchronized, error = 0x40, 5
    state = _libc.adjtimex(ctypes.byref(timex))
    return state not in (-1, error) and not timex[10] & unsynchronized


def check_platform() -> None:
    """Raise ReplayError unless the platform is Linux on x86-64.

    The commit protocol relies on other cores seeing writes to memory in order, and on Linux's file calls.
    """
    system, machine = os.uname().sysname, os.uname().machine
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        raise ReplayError(f"diskreplay runs on Linux on x86-64 for now; this is {system} on {machine}")


# --- volumes, as opposed to their copies: snapshots, and images that were attached again ------------------------------

# BTRFS_IOC_FS_INFO: its result has the UUID of the file system in bytes 16 to 31.
_BTRFS_FS_INFO = 0x8400941F


class Volume(NamedTuple):
    """The identity of a mounted volume within one boot.

    ``device`` and ``fsid`` are the system's numbers of the file system; on btrfs, a snapshot has other numbers than its
    original. ``disk`` is the sequence number that the disk got when it was attached (0: unknown). Another image that is
    attached under the same device number has a different ``disk``.
    """

    device: int
    fsid: int
    disk: int

    def may_be(self, other: "Volume") -> bool:
        """Return whether ``other``, read in the same boot, can be the same volume as this one."""
        same_disk = self.disk == other.disk or not (self.disk and other.disk)
        return self.device == other.device and self.fsid == other.fsid and same_disk


def volume_of(path: str) -> Volume:
    device = os.stat(path).st_dev
    return Volume(device, os.statvfs(path).f_fsid, _disk(path, device))


def _disk(path: str, device: int) -> int:
    # The disk's sequence number is not cached, because another disk may be attached later under the same device number.
    try:
        if os.major(device):
            return _sequence_number(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        return _disks_of_btrfs(path)
    except (OSError, ValueError):
        return 0


def _sequence_number(folder: str) -> int:
    # A partition has no sequence number: the parent folder has the number of the partition's disk.
    for where in ("", "/.."):
        with suppress(FileNotFoundError), open(f"{folder}{where}/diskseq") as file:
            return int(file.read())
    return 0


def _disks_of_btrfs(path: str) -> int:
    """Return the sum of the sequence numbers of all disks of a btrfs: its device number does not name a disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = fcntl.ioctl(fd, _BTRFS_FS_INFO, bytes(1024))
    finally:
        os.close(fd)
    folder = f"/sys/fs/btrfs/{UUID(bytes=info[16:32])}/devices"
    return sum(_sequence_number(f"{folder}/{name}") for name in os.listdir(folder))
