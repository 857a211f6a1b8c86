"""Which file system a store is on, and what is not promised on some."""

import ctypes
import os

from diskreplay.errors import warn_caller
from diskreplay.folders import shown

_libc = ctypes.CDLL(None, use_errno=True)

# The numbers of linux/magic.h and of those that are not part of the kernel. Every FUSE is one type, virtiofs too.
_LOCAL = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0xF2F52010: "f2fs",
    0x3434: "nilfs2",
    0x3153464A: "jfs",
    0x52654973: "reiserfs",
    0x4D44: "vfat",
    0x2011BAB0: "exfat",
    0x7366746E: "ntfs3",
    0x482B: "hfsplus",
    0xF15F: "ecryptfs",
    0x958458F6: "hugetlbfs",
    0x794C7630: "overlay",
}
# Several machines may have these mounted; what one does to a lock or to mapped memory, another need not see.
_NETWORK = {
    0x65735546: "fuse",
    0x6969: "nfs",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
    0x5346414F: "afs",
    0x6B414653: "afs",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0xAAD7AAEA: "panfs",
    0x01161970: "gfs2",
    0x7461636F: "ocfs2",
    0x20030528: "orangefs",
    0x73757245: "coda",
    0x564C: "ncpfs",
    0x786F4256: "vboxsf",
    0xBACBACBC: "vmhgfs",
}
# They write a reserved block in its place. All others may need another one for each write: to copy on write, after a
# snapshot, to compress, or because it is another machine's or another file system's business.
_WRITE_IN_PLACE = {"ext4", "xfs", "tmpfs", "ramfs"}
# Their files may have another inode at each call.
_UNSTABLE_INODES = {"fuse", "9p", "smb", "cifs", "smb2", "vboxsf", "vmhgfs", "overlay"}
_warned: set[str] = set()


def file_system_type(path: os.PathLike[str] | str) -> str:
    """Return the name of the file system that holds a path, such as "ext4" (ext2 and ext3 too) or "0x1badface".

    Raises the system's OSError, such as FileNotFoundError.
    """
    number = _type_number(path)
    return _LOCAL.get(number) or _NETWORK.get(number) or hex(number)


def _type_number(path: os.PathLike[str] | str) -> int:
    buffer = (ctypes.c_long * 32)()  # struct statfs begins with the type
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(path))
    return buffer[0] & 0xFFFFFFFF


def keeps_reservations(path: os.PathLike[str] | str) -> bool:
    """Whether a block that was reserved in a file can be stored to however full the disk has become.

    Where not, files are written by position, so that a full disk is an error and not the signal SIGBUS.
    """
    return file_system_type(path) in _WRITE_IN_PLACE


def is_shared(file_system: str) -> bool:
    """Whether several machines may have such a file system mounted; one that is not known counts as such."""
    return file_system not in _LOCAL.values()


def has_stable_inodes(file_system: str) -> bool:
    """Whether a file keeps its number for as long as it is there."""
    return file_system not in _UNSTABLE_INODES


def network_warning(file_system: str, path: os.PathLike[str] | str) -> str | None:
    """Return the warning of a network file system; None for local and unknown ones."""
    if file_system not in _NETWORK.values():
        return None
    return (
        f"{shown(path)} is on {file_system}. There, locks and mapped memory need not be seen by other machines, or at "
        "all: write and read this store on one machine at a time, and keep backups, or put it on a local disk"
    )


def warn_of(file_system: str, path: os.PathLike[str] | str, uuid: str) -> None:
    """Warn of a network file system, once a process and store."""
    message = network_warning(file_system, path)
    if message is not None and uuid not in _warned:
        _warned.add(uuid)
        warn_caller(message, RuntimeWarning)
