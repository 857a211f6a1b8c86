"""Copies of files: shared where they may be, else with their holes, permissions and times."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from diskreplay.errors import FormatError
from diskreplay.segments.files import copies
from diskreplay.segments.files.copies import FileCopier, Unreadable


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"data")
    path.chmod(0o444)
    os.utime(path, ns=(1, 123_456_789))
    return path


def test_holes_stay_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with open(source, "wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 20)
        file.write(b"data")
    FileCopier(share=False).copy(str(source), str(target))
    assert target.stat().st_size == 1 << 30
    assert target.stat().st_blocks * 512 < 1 << 21
    with open(target, "rb") as file:
        file.seek((1 << 20) - 1)
        assert file.read(6) == b"\0data\0"


def test_a_copy_has_the_permissions_and_the_time_of_change(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"what was there")
    target.chmod(0o400)
    FileCopier(share=False).copy(str(source), str(target), may_clone=True, may_link=True)
    assert target.read_bytes() == b"data"
    assert (target.stat().st_mode & 0o777, target.stat().st_mtime_ns) == (0o444, 123_456_789)
    assert target.stat().st_ino != source.stat().st_ino


def test_only_what_may_not_be_written_is_linked(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", refusing(errno.EOPNOTSUPP, []))
    copier, target = FileCopier(share=True), tmp_path / "target"
    copier.copy(str(source), str(target), may_clone=True, may_link=True)
    assert target.stat().st_ino == source.stat().st_ino
    assert copier.shared == source.stat().st_blocks * 512 > 0
    copier.copy(str(source), str(target))
    assert target.stat().st_ino != source.stat().st_ino
    source.chmod(0o644)
    copier.copy(str(source), str(target), may_link=True)
    assert target.stat().st_ino != source.stat().st_ino
    assert copier.shared == source.stat().st_blocks * 512


def test_a_clone_is_a_file_of_its_own(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(copy: int, request: int, fd: int) -> int:
        assert request == 0x40049409
        return os.pwrite(copy, os.pread(fd, 100, 0), 0)

    monkeypatch.setattr(fcntl, "ioctl", clone)
    copier, target = FileCopier(share=True), tmp_path / "target"
    copier.copy(str(source), str(target), may_clone=True, may_link=True)
    assert target.read_bytes() == b"data"
    assert (target.stat().st_mode & 0o777, target.stat().st_mtime_ns) == (0o444, 123_456_789)
    assert target.stat().st_ino != source.stat().st_ino
    assert copier.shared == source.stat().st_blocks * 512
    plain = FileCopier(share=True)
    plain.copy(str(source), str(target))
    assert plain.shared == 0


def refusing(code: int, calls: list) -> object:
    def refuse(*args: object, **_: object) -> None:
        calls.append(args)
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize(("code", "attempts"), [(errno.EOPNOTSUPP, 1), (errno.EXDEV, 1), (errno.EINVAL, 2)])
def test_what_a_file_system_cannot_do_is_not_tried_for_each_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, attempts: int
) -> None:
    clones: list = []
    links: list = []
    monkeypatch.setattr(fcntl, "ioctl", refusing(code, clones))
    monkeypatch.setattr(os, "link", refusing(code, links))
    copier = FileCopier(share=True)
    for name in "ab":
        copier.copy(str(source), str(tmp_path / name), may_clone=True, may_link=True)
        assert (tmp_path / name).read_bytes() == b"data"
    assert (len(clones), len(links), copier.shared) == (attempts, attempts, 0)


def test_no_space_is_raised_and_no_reason_to_copy(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "ioctl", refusing(errno.ENOSPC, []))
    with pytest.raises(OSError, match="No space"):
        FileCopier(share=True).copy(str(source), str(tmp_path / "target"), may_clone=True)


def test_what_cannot_be_read_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies.os, "pread", refusing(errno.EIO, []))
    with pytest.raises(Unreadable, match="Input/output error"):
        FileCopier(share=False).copy(str(source), str(tmp_path / "target"))
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_what_cannot_be_opened_is_unreadable(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(copies, "opened", refusing(code, []))
    with pytest.raises(Unreadable):
        FileCopier(share=False).copy(str(source), str(tmp_path / "target"))


def test_links_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(FormatError, match="is a symbolic link"):
        FileCopier(share=True).copy(str(tmp_path / "link"), str(tmp_path / "target"), may_link=True)
    assert not (tmp_path / "target").exists()
