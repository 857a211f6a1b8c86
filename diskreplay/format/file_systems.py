"""Which kind of file system a store is on, and what is not promised on some."""

import re
import warnings
from os import PathLike

from diskreplay.folders import shown

# Several machines may have these mounted; what one does to a lock or to mapped memory, another need not see.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "auristorfs", "ceph", "lustre", "gpfs", "beegfs", "panfs"),
    *("glusterfs", "gfs", "gfs2", "ocfs2", "orangefs", "pvfs2", "coda", "wekafs", "virtiofs", "ncpfs", "davfs"),
}
_ESCAPED = re.compile(r"\\([0-7]{3})")
_warned: set[str] = set()


def file_system_type(path: PathLike[str] | str, mountinfo: str | None = None) -> str:
    """Return the type of the file system that holds a path, as mount(8) names it; "" where that is not known.

    Parameters
    ----------
    path : path
        Absolute, and without links.
    mountinfo : str, optional
        What is mounted, in the form of /proc/self/mountinfo; None: that file.
    """
    text, path = _mounted() if mountinfo is None else mountinfo, str(path)
    found, longest = "", -1
    for line in text.splitlines():
        # ID, parent, device, root, mount point, options, some more fields, "-", type, source, options
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if not separator or len(fields) < 5 or not kinds:
            continue
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
        is_above = point == "/" or path == point or path.startswith(f"{point}/")
        # Of several at one point, the last one hides the others.
        if is_above and len(point) >= longest:
            found, longest = kinds[0], len(point)
    return found


def _mounted() -> str:
    try:
        with open("/proc/self/mountinfo", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def is_shared(file_system: str) -> bool:
    """Tell whether several machines may have such a file system mounted; one that is not known counts as such."""
    return not file_system or file_system in _NETWORK or _is_fuse(file_system)


def has_stable_inodes(file_system: str) -> bool:
    """Tell whether a file keeps its number for as long as it is there."""
    return not _is_fuse(file_system) and file_system not in ("9p", "cifs", "smb3", "virtiofs", "overlay")


def _is_fuse(file_system: str) -> bool:
    return file_system.startswith("fuse")


def warn_of(file_system: str, path: PathLike[str] | str, uuid: str, stacklevel: int = 3) -> None:
    """Warn, once a process and store, where it lies on a file system that breaks promises."""
    if not file_system or not is_shared(file_system) or uuid in _warned:
        return
    _warned.add(uuid)
    warnings.warn(
        f"{shown(path)} is on {file_system}. There, locks and mapped memory need not be seen by other machines, or at "
        "all: write and read this store on one machine at a time, and keep backups, or put it on a local disk",
        RuntimeWarning,
        stacklevel=stacklevel,
    )
