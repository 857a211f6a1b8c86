"""Which file system a path is on, and whether blocks that were reserved there are there to be written."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

# The numbers of linux/magic.h and of those that are not part of the kernel.
_NAMES = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0xF2F52010: "f2fs",
    0x3434: "nilfs2",
    0x794C7630: "overlay",
    0x65735546: "fuse",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
}
# They write a reserved block in its place. All others may need another one for each write: to copy on write, after a
# snapshot, to compress, or because it is another machine's or another file system's business.
_WRITE_IN_PLACE = {"ext4", "xfs", "tmpfs", "ramfs"}


def file_system_type(path: os.PathLike[str] | str) -> str:
    """Return the name of the file system that holds a path, such as "ext4" (ext2 and ext3 too) or "0x1badface".

    Raises
    ------
    OSError
        The system's, such as FileNotFoundError.
    """
    buffer = (ctypes.c_long * 32)()  # struct statfs begins with the type
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(path))
    number = buffer[0] & 0xFFFFFFFF
    return _NAMES.get(number, hex(number))


def keeps_reservations(path: os.PathLike[str] | str) -> bool:
    """Whether a block that was reserved in a file can be stored to however full the disk has become.

    Where not, files are written by position, so that a full disk is an error and not the signal SIGBUS.
    """
    return file_system_type(path) in _WRITE_IN_PLACE
