"""What a file system is called, and which ones keep blocks that were reserved."""

from pathlib import Path

import pytest

from diskreplay.format.filesystem import file_system_type, keeps_reservations
from tests.testing.filesystems import KINDS, mounted


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_system_is_called_by_its_name_and_only_copying_ones_do_not_keep_reservations(kind: str) -> None:
    with mounted(kind, 8) as disk:
        (disk.path / "folder").mkdir()
        assert file_system_type(disk.path / "folder") == kind
        assert keeps_reservations(disk.path) is (kind != "btrfs")


def test_an_unknown_file_system_is_a_number_and_keeps_no_reservations() -> None:
    assert file_system_type("/proc").startswith("0x")
    assert not keeps_reservations("/proc")


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        file_system_type(tmp_path / "nowhere")
