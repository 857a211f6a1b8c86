"""Which volume a file is on, told apart from copies of that volume: snapshots, and images that are attached anew."""

import os
from functools import lru_cache
from typing import NamedTuple


class Volume(NamedTuple):
    """What tells a mounted volume from others in one boot.

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
    return Volume(device, os.statvfs(path).f_fsid, _disk(device))


@lru_cache(maxsize=64)
def _disk(device: int) -> int:
    # A partition has no number of its own; its disk does, one folder above.
    for where in ("", "/.."):
        try:
            with open(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}{where}/diskseq") as file:
                return int(file.read())
        except (OSError, ValueError):
            continue
    return 0
