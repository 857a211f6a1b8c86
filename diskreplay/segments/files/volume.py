"""Identifies the volume of a file, as opposed to copies of it: snapshots, and images that were attached again."""

import fcntl
import os
from contextlib import suppress
from typing import NamedTuple
from uuid import UUID

# BTRFS_IOC_FS_INFO: what it fills has the UUID of the file system in bytes 16 to 31.
_BTRFS_FS_INFO = 0x8400941F


class Volume(NamedTuple):
    """The identity of a mounted volume within one boot.

    ``device`` and ``fsid`` are the system's numbers of the file system; of btrfs, those of the subvolume, which a
    snapshot does not share. ``disk`` counts the disks that were attached since the boot (0: unknown): another image
    that is attached under the same device number has another one.
    """

    device: int
    fsid: int
    disk: int

    def may_be(self, other: "Volume") -> bool:
        """Whether both can be the same volume in one boot."""
        same_disk = self.disk == other.disk or not (self.disk and other.disk)
        return self.device == other.device and self.fsid == other.fsid and same_disk


def volume_of(path: str) -> Volume:
    """Return the volume that holds a file or folder."""
    device = os.stat(path).st_dev
    return Volume(device, os.statvfs(path).f_fsid, _disk(path, device))


def _disk(path: str, device: int) -> int:
    # Read each time: the disk of a device number may have been detached since, and another disk attached.
    try:
        if os.major(device):
            return _sequence_number(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        return _disks_of_btrfs(path)
    except (OSError, ValueError):
        return 0


def _sequence_number(folder: str) -> int:
    # A partition has no number of its own; its disk does, one folder above.
    for where in ("", "/.."):
        with suppress(FileNotFoundError), open(f"{folder}{where}/diskseq") as file:
            return int(file.read())
    return 0


def _disks_of_btrfs(path: str) -> int:
    """Return the sum over the disks of a btrfs, whose device number is not that of a disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = fcntl.ioctl(fd, _BTRFS_FS_INFO, bytes(1024))
    finally:
        os.close(fd)
    folder = f"/sys/fs/btrfs/{UUID(bytes=info[16:32])}/devices"
    return sum(_sequence_number(f"{folder}/{name}") for name in os.listdir(folder))
