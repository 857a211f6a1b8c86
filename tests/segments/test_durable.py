"""Writes that are whole or an error."""

import os
import resource

import numpy as np
import pytest

from diskreplay.errors import StorageFull
from diskreplay.segments.files import durable
from diskreplay.segments.files.durable import storage_errors, write_at, write_atomic, write_file, write_row


def test_a_file_that_is_written_in_part_is_no_space(tmp_path, monkeypatch):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:2]))
    with pytest.raises(OSError, match="No space"):
        write_file(str(tmp_path / "other"), b"data")
    with pytest.raises(StorageFull):
        write_atomic(target, b"new one")

    assert target.read_bytes() == b"old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "other"]


@pytest.mark.parametrize("nbytes", [0, 1, 28224, durable._MOST_HELD, durable._MOST_HELD + 1])
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_rows_are_written_as_other_bytes_are(tmp_path, nbytes, kind):
    data = kind(np.random.default_rng(0).bytes(nbytes))
    found = []
    for write in (write_at, write_row):
        with open(tmp_path / write.__name__, "w+b") as file:
            for offset in (5, (1 << 31) - 1, 1 << 31, 1 << 33, 3):
                write(file.fileno(), data, offset)
            size = os.fstat(file.fileno()).st_size
            found.append(
                [size, *(os.pread(file.fileno(), nbytes + 9, offset) for offset in (0, (1 << 31) - 2, (1 << 33) - 1))]
            )
    assert found[0] == found[1]


def test_rows_that_are_written_in_part_are_written_on_and_an_error_is_the_systems(tmp_path, monkeypatch):
    real = durable._pwrite_held

    with open(tmp_path / "file", "w+b") as file, monkeypatch.context() as patch:
        patch.setattr(durable, "_pwrite_held", lambda fd, data, nbytes, offset: real(fd, data, nbytes // 2, offset))
        write_row(file.fileno(), b"0123456789", 3)
        assert os.pread(file.fileno(), 99, 0) == b"\0\0\x000123456789"
    with open(tmp_path / "file", "rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        write_row(file.fileno(), b"0", 0)


def test_a_limit_of_the_size_of_files_is_no_full_disk(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, hard))  # Python ignores the signal that comes, too
    try:
        with (
            pytest.raises(StorageFull) as told,
            storage_errors(tmp_path / "file"),
            open(tmp_path / "file", "wb") as file,
        ):
            file.truncate((64 << 20) + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(told.value).startswith(f"[Errno 27] {tmp_path}/file is larger than ")
    assert "`ulimit -f`" in str(told.value)
    assert "space" not in str(told.value)
