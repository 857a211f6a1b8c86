"""Which kind of file system a store is on, and the warning where that promises less."""

import os
import warnings

import pytest

import diskreplay as dr
from diskreplay.format import file_systems
from diskreplay.format.file_systems import file_system_type, has_stable_inodes, is_shared
from tests.testing.filesystems import KINDS, mounted
from tests.testing.support import run_python, serial_schema

MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:40 / /home rw,relatime shared:7 - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/me/local\040disk rw - xfs /dev/vdb rw
32 27 0:42 / /data rw,relatime - fuse.sshfs me@there: rw
33 27 0:43 / /data rw,relatime shared:9 master:2 - btrfs /dev/vdc rw,subvol=/
34 27 0:44 / /cluster rw - fuse.glusterfs a:/b rw
35 27 0:45 / /win rw - fuseblk /dev/vdd rw
broken
36 27 0:46 /
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/homes/store", "ext4"),
        ("/home", "nfs4"),
        ("/home/me/store", "nfs4"),
        ("/home/me/local disk/store", "xfs"),
        ("/data/store", "btrfs"),  # what is mounted last hides what was
        ("/cluster/store", "fuse.glusterfs"),
    ],
)
def test_the_longest_mount_point_above_a_path_tells_its_file_system(path, kind):
    assert file_system_type(path, MOUNTS) == kind


def test_without_a_list_of_mounts_nothing_is_known():
    assert file_system_type("/home", "") == ""
    assert is_shared("")


def test_what_several_machines_may_have_mounted_is_shared():
    for kind in ("nfs", "nfs4", "cifs", "9p", "lustre", "fuse.sshfs", "fuse", "fuseblk", "virtiofs"):
        assert is_shared(kind)
    for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs"):
        assert not is_shared(kind)
    assert has_stable_inodes("nfs4")
    assert not has_stable_inodes("fuse.sshfs")


@pytest.mark.parametrize("kind", KINDS)
def test_the_type_of_a_mounted_file_system_is_found(tmp_path, kind):
    with mounted(kind, 8, folder=tmp_path) as disk:
        (disk.path / "inside").mkdir()
        assert file_system_type(disk.path / "inside") == kind


@pytest.fixture
def on_sshfs(tmp_path, monkeypatch):
    """The text of a machine where the folder of the test is a network file system."""
    folder = os.path.realpath(tmp_path)
    text = f"27 1 254:0 / / rw - ext4 /dev/vda rw\n32 27 0:42 / {folder} rw - fuse.sshfs me@there: rw\n"
    monkeypatch.setattr(file_systems, "_mounted", lambda: text)
    monkeypatch.setattr(file_systems, "_warned", set())


def test_opening_on_a_network_file_system_warns_once_a_store(tmp_path, on_sshfs):
    for name in ("one", "two"):
        path = tmp_path / name
        words = f"{path} is on fuse.sshfs. There, locks and mapped memory need not be seen by other machines"
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
from diskreplay.format import file_systems
file_systems._mounted = lambda: "1 0 0:1 / / rw - nfs4 server:/ rw"
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
from diskreplay.format import durable
from tests.testing.support import append_numbered
durable._first_line = lambda paths: "0123456789abcdef" * 2
writer = dr.open(sys.argv[1], "a").writer()
append_numbered(writer, range(3))
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(AssertionError, match="exit code -9"):
        run_python(code, tmp_store)
    with monkeypatch.context() as patch:
        patch.setattr(file_systems, "_mounted", lambda: "1 0 0:1 / / rw - nfs4 server:/ rw")
        patch.setattr(file_systems, "_warned", set())
        with pytest.warns(RuntimeWarning, match="nfs4"), dr.open(tmp_store, "a") as store:
            assert [segment["state"] for segment in store.info()["segments"]] == ["foreign"]
    with dr.open(tmp_store, "a") as store:
        store.close()
    with dr.open(tmp_store) as store:
        assert [segment["state"] for segment in store.info()["segments"]] == ["sealed"]
        assert len(store) == 3
