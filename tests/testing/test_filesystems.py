"""The small file systems that other tests use are what they say, can be filled, and are gone afterwards."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.testing.filesystems import KINDS, mounted


def write_synced(path: Path, nbytes: int) -> None:
    with open(path, "wb") as file:
        file.write(bytes(nbytes))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("kind", KINDS)
def test_a_mounted_file_system_is_of_its_kind_can_be_filled_and_is_gone_afterwards(kind: str) -> None:
    with mounted(kind, 8) as disk:
        found = subprocess.run(["stat", "-f", "-c", "%T", disk.path], capture_output=True, text=True, check=True)
        assert found.stdout.strip() in (kind, "ext2/ext3")
        ballast = disk.fill()
        with pytest.raises(OSError, match="No space left"):
            write_synced(disk.path / "more", 1 << 20)
        ballast.unlink()
        (disk.path / "more").write_bytes(bytes(1 << 16))
        if disk.image:
            disk.unmount()
            disk.mount()
            assert (disk.path / "more").stat().st_size == 1 << 16
    assert not disk.path.parent.exists()
