"""Small file systems of a test's own: loop-mounted ones and tmpfs; where they cannot be made, the test is skipped."""

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

KINDS = ("ext4", "xfs", "btrfs", "tmpfs")

# What mkfs asks for at least, in MiB.
_LEAST = {"ext4": 2, "xfs": 300, "btrfs": 110, "tmpfs": 1}
# EXT4_IOC_SHUTDOWN, which is XFS_IOC_GOINGDOWN, and to leave out what its log has not on disk.
_SHUTDOWN, _WITHOUT_LOG = 0x8004587D, 2
_QUIET = {"ext4": ["-q", "-m", "0"], "xfs": ["-q"], "btrfs": ["-q"]}


class Disk:
    """A file system that is mounted at ``path``; all but a tmpfs keep what they hold in the file ``image``."""

    def __init__(self, kind: str, path: Path, image: Path | None, options: str) -> None:
        self.kind, self.path, self.image, self._options = kind, path, image, options

    def mount(self, options: str | None = None) -> None:
        """Mount it, as it was asked for or with other options; skips the test where this is not permitted."""
        options = self._options if options is None else options
        every = ["loop", *filter(None, [options])] if self.image else [options]
        _run_or_skip("mount", "-t", self.kind, "-o", ",".join(every), str(self.image or "tmpfs"), str(self.path))

    def unmount(self) -> None:
        """Unmount it; what a tmpfs holds is gone then."""
        subprocess.run(["umount", str(self.path)], check=True, capture_output=True)

    def lose_power(self) -> None:
        """Cut an ext4 or xfs off from its image as it is: nothing that is in memory alone gets there any more.

        After it the file system has to be unmounted, which no process may keep from happening, and mounted again.
        """
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
        except OSError as error:
            pytest.skip(f"{self.kind} cannot be cut off from its image here: {error}")
        finally:
            os.close(fd)

    def fill(self, *, but: int = 0, name: str = "ballast") -> Path:
        """Fill it with a file of bytes that cannot be compressed, but for so many bytes; return the file.

        On xfs even the name of the file may find no room; then it is not there.
        """
        ballast, size = self.path / name, 1 << 20
        with suppress(OSError), open(ballast, "ab", buffering=0) as file:
            while size >= 4096:
                with suppress(OSError):
                    while file.write(os.urandom(size)):
                        os.fsync(file.fileno())
                size //= 4
            if but:
                file.truncate(max(0, file.tell() - but))
                os.fsync(file.fileno())
        return ballast

    def free(self, *files: Path) -> None:
        """Delete files and wait until their room is free: xfs and btrfs do that in the background."""
        files = tuple(file for file in files if file.exists())
        taken = sum(file.stat().st_blocks * 512 for file in files)
        for file in files:
            file.unlink()
        until, before = time.monotonic() + 30, os.statvfs(self.path)
        while os.statvfs(self.path).f_bavail * before.f_frsize < taken // 2 and time.monotonic() < until:
            subprocess.run(["sync", "-f", str(self.path)], check=True)


@contextmanager
def mounted(kind: str, megabytes: int, options: str = "", *, folder: Path | None = None) -> Iterator[Disk]:
    """Give a new, empty file system of about so many MiB, and unmount and remove it at the end.

    Parameters
    ----------
    kind : str
        One of `KINDS`. xfs and btrfs are larger than asked for where mkfs wants more.
    options : str
        Of mount, such as "compress=zstd,noatime".
    folder : path, optional
        Where to put its image and its mount point, in a folder of their own.
    """
    top = Path(tempfile.mkdtemp(prefix="diskreplay-disk-", dir=folder))
    try:
        path, image = top / "mounted", None
        path.mkdir()
        megabytes = max(megabytes, _LEAST[kind])
        if kind == "tmpfs":
            options = ",".join(filter(None, [f"size={megabytes}m", options]))
        else:
            image = top / "image"
            image.touch()
            os.truncate(image, megabytes << 20)
            _run_or_skip(f"mkfs.{kind}", *_QUIET[kind], str(image))
        disk = Disk(kind, path, image, options)
        disk.mount()
        try:
            yield disk
        finally:
            if os.path.ismount(path):
                try:
                    disk.unmount()
                except subprocess.CalledProcessError:
                    # A test that failed may keep something open: the rest goes with it.
                    subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _run_or_skip(*command: str) -> None:
    # Tools of administrators are not on everybody's path.
    tool = shutil.which(command[0], path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([tool, *command[1:]], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} is not possible here: {done.stderr.strip() or done.returncode}")


@contextmanager
def network_disk() -> Iterator[None]:
    """Have stores that are opened during the block lie on a network disk: a free lock says nothing of its owner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diskreplay.segments.documents.root.file_system_type", lambda path: "nfs4")
        yield
