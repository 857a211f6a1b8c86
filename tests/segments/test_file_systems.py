"""Which file system a store is on, what is promised there, and the warning where that is less."""

import os
import warnings
from pathlib import Path

import pytest

import diskreplay as dr
from diskreplay.segments.files import durable
from diskreplay.segments.files.durable import file_system_type, has_stable_inodes, is_shared, keeps_reservations
from diskreplay.segments.files.machine import volume_of
from tests.testing.filesystems import KINDS, mounted
from tests.testing.support import run_python, serial_schema

FUSE, NFS, UNKNOWN = 0x65735546, 0x6969, 0x1BADFACE


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_system_is_called_by_its_name_and_only_copying_ones_do_not_keep_reservations(
    tmp_path: Path, kind: str
) -> None:
    with mounted(kind, 8, folder=tmp_path) as disk:
        (disk.path / "folder").mkdir()
        assert file_system_type(disk.path / "folder") == kind
        assert keeps_reservations(disk.path) is (kind != "btrfs")
        assert not is_shared(kind)
        fd = os.open(disk.path, os.O_RDONLY)
        try:
            assert file_system_type(f"/proc/self/fd/{fd}") == kind
        finally:
            os.close(fd)


def test_an_unknown_file_system_is_a_number_of_which_nothing_is_promised(tmp_path, monkeypatch) -> None:
    assert file_system_type("/proc").startswith("0x")
    assert not keeps_reservations("/proc")
    assert is_shared(file_system_type("/proc"))
    monkeypatch.setattr(durable, "_type_number", lambda path: UNKNOWN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is known that would be worth a warning
        dr.create(tmp_path / "store", serial_schema()).close()


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        file_system_type(tmp_path / "nowhere")


def test_what_several_machines_may_have_mounted_is_shared(monkeypatch) -> None:
    for number, kind in (
        (NFS, "nfs"),
        (FUSE, "fuse"),
        (0xFF534D42, "cifs"),
        (0x01021997, "9p"),
        (0x0BD00BD0, "lustre"),
    ):
        monkeypatch.setattr(durable, "_type_number", lambda path, number=number: number)
        assert file_system_type("/data") == kind
        assert is_shared(kind)
        assert not keeps_reservations("/data")
    for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs"):
        assert not is_shared(kind)
    assert has_stable_inodes("nfs")
    assert not has_stable_inodes("fuse")


@pytest.fixture
def on_fuse(monkeypatch):
    """A machine where every file is on FUSE."""
    monkeypatch.setattr(durable, "_type_number", lambda path: FUSE)
    monkeypatch.setattr(durable, "_warned", set())


def test_opening_on_a_network_file_system_warns_once_a_store(tmp_path, on_fuse):
    for name in ("one", "two"):
        path = tmp_path / name
        words = f"{path} is on fuse. There, locks and writes to mapped memory may be invisible to other machines"
        with pytest.warns(RuntimeWarning, match=words) as caught:
            dr.create(path, serial_schema()).close()
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for mode in ("r", "a"):
                dr.open(path, mode).close()


def test_a_local_file_system_is_no_reason_to_warn(tmp_store):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dr.create(tmp_store, serial_schema()).close()


def test_the_warning_is_told_once_a_process(tmp_path):
    code = """
import sys, warnings
from diskreplay.segments.files import durable
durable._type_number = lambda path: 0x6969
import diskreplay as dr
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for mode in "rarara":
        dr.open(sys.argv[1], mode).close()
print([str(warning.category.__name__) for warning in caught])
"""
    dr.create(tmp_path / "store", serial_schema()).close()
    assert run_python(code, tmp_path / "store") == "['RuntimeWarning']\n"


def test_on_a_network_file_system_a_dead_writer_of_another_machine_is_left_alone(tmp_store, monkeypatch):
    """Its lock need not be seen from here: it may live."""
    dr.create(tmp_store, serial_schema()).close()
    code = """
import os, signal, sys
import diskreplay as dr
from diskreplay.segments.files import durable, machine
from tests.testing.support import append_numbered
machine._first_line = lambda paths: "0123456789abcdef" * 2
writer = dr.open(sys.argv[1], "a").writer()
append_numbered(writer, range(3))
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(AssertionError, match="exit code -9"):
        run_python(code, tmp_store)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_type_number", lambda path: NFS)
        patch.setattr(durable, "_warned", set())
        with pytest.warns(RuntimeWarning, match="is on nfs"), dr.open(tmp_store, "a") as store:
            assert [segment["state"] for segment in store.info()["segments"]] == ["foreign"]
    with dr.open(tmp_store, "a") as store:
        store.close()
    with dr.open(tmp_store) as store:
        assert [segment["state"] for segment in store.info()["segments"]] == ["sealed"]
        assert len(store) == 3


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_a_disk_that_was_attached_again_is_another_one_also_to_who_had_seen_it(tmp_path, kind):
    with mounted(kind, 8, folder=tmp_path) as disk:
        before = volume_of(str(disk.path))
        assert before.may_be(volume_of(str(disk.path)))
        disk.unmount()
        disk.mount()
        assert not before.may_be(volume_of(str(disk.path)))
