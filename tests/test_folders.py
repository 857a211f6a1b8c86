"""Folders held by a descriptor: whether they are still there, and the paths that messages show."""

import errno
import os

import pytest

from diskreplay.folders import (
    BY_PATH,
    LookupBelow,
    OpenFolder,
    hidden_sibling,
    is_deleted,
    show_paths,
    shown,
    shown_paths,
)
from tests.testing.filesystems import KINDS, mounted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["store", "store (deleted)"])
def test_a_deleted_folder_is_told_from_one_that_was_renamed(tmp_path, kind, name):
    with mounted(kind, 8, folder=tmp_path) as disk:
        path, other = disk.path / name, disk.path / "other (deleted)"
        (path / "inside").mkdir(parents=True)
        folder = OpenFolder(path)
        assert (folder.is_at(path), folder.is_deleted(), is_deleted(folder.fd)) == (True, False, False)
        path.rename(other)
        assert (folder.is_at(path), folder.is_deleted()) == (None, False)
        path.mkdir()
        assert (folder.is_at(path), folder.is_deleted()) == (False, False)
        assert os.listdir(folder.path) == ["inside"]
        other.rename(path / name)
        assert not folder.is_deleted()
        (path / name / "inside").rmdir()
        (path / name).rmdir()
        assert (folder.is_at(path), folder.is_deleted(), is_deleted(folder.fd)) == (False, True, True)
        del folder


def test_a_descriptor_that_somebody_else_closed_is_no_longer_the_folders(tmp_path):
    folder = OpenFolder(tmp_path)
    other = os.open("/dev/null", os.O_RDONLY)
    kept = os.dup(folder.fd)
    os.dup2(other, folder.fd)
    assert folder.is_deleted()
    os.dup2(kept, folder.fd)
    assert not folder.is_deleted()
    os.close(kept)
    os.close(other)


def test_the_descriptor_is_closed_with_the_last_reference(tmp_path):
    folder = OpenFolder(tmp_path)
    path = folder.path
    assert path.is_dir()
    closed = folder.closed()
    assert (closed.name, closed.is_deleted(), closed.path.exists()) == (tmp_path, True, False)
    del folder
    assert not path.exists()


def test_paths_are_shown_as_they_were_given(tmp_path):
    folder = OpenFolder(tmp_path)
    assert shown(folder.path / "a") == f"{tmp_path}/a"
    assert shown(f"no {folder.path} and {folder.path}/b") == f"no {tmp_path} and {tmp_path}/b"
    assert shown("/proc/self/fd/987654/a") == "/proc/self/fd/987654/a"

    @shown_paths
    def fail():
        try:
            os.rename(folder.path / "a", folder.path / "b")
        except OSError as error:
            raise OSError(errno.EIO, "told", str(folder.path / "c")) from error

    with pytest.raises(OSError, match="told") as caught:
        fail()
    for error in (caught.value, caught.value.__cause__):
        assert str(folder.path) not in str(error)
        assert str(tmp_path) in str(error)
    assert show_paths(caught.value) is caught.value


def test_files_are_found_below_a_folder_as_by_their_paths(tmp_path):
    folder, beside = tmp_path / "folder", tmp_path / "folder beside"
    for each in (folder, beside):
        (each / "inside").mkdir(parents=True)
        (each / "inside" / "file").write_bytes(b"bytes of " + each.name.encode())
        (each / "link").symlink_to("inside")
    with LookupBelow(str(folder)) as below:
        for path in (f"{each}/{name}" for each in (folder, beside) for name in ("inside", "inside/file", "link")):
            assert below.status(path) == BY_PATH.status(path)
            found = path if path.endswith("link") else None
            assert below.first_link([path]) == BY_PATH.first_link([path]) == found
            fds = [lookup.open(path, os.O_RDONLY) for lookup in (below, BY_PATH)]
            assert os.path.sameopenfile(*fds)
            for fd in fds:
                os.close(fd)
        for call in (below.status, lambda path: below.open(path, os.O_RDONLY)):
            with pytest.raises(FileNotFoundError) as caught:
                call(f"{folder}/inside/missing")
            assert caught.value.filename == f"{folder}/inside/missing"
        names = [f"{folder}/inside/missing", f"{beside}/inside", f"{beside}/link", f"{folder}/link"]
        assert below.first_link(names) == BY_PATH.first_link(names) == f"{beside}/link"


def test_files_are_found_below_a_folder_that_another_one_has_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"old")
    with LookupBelow(str(tmp_path / "folder")) as below:
        (tmp_path / "folder").rename(tmp_path / "elsewhere")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").write_bytes(b"newer")
        assert below.status(f"{tmp_path}/folder/file").st_size == 3


@pytest.mark.parametrize("kind", ["link", "file", "missing"])
def test_files_are_not_looked_up_below_what_is_no_folder(tmp_path, kind):
    path = tmp_path / "folder"
    if kind == "link":
        path.symlink_to(tmp_path)
    elif kind == "file":
        path.touch()
    error = FileNotFoundError if kind == "missing" else NotADirectoryError
    with pytest.raises(error), LookupBelow(str(path)):
        pass


def test_a_draft_has_a_name_of_its_own_also_next_to_one_of_255_bytes(tmp_path):
    assert hidden_sibling(tmp_path / "a", ".new") == tmp_path / ".a.new"
    long = [tmp_path / (letters * 255)[:255] for letters in ("a", "ab")] + [
        tmp_path / f"{'ä' * 127}{end}" for end in "xy"
    ]
    drafts = [hidden_sibling(path, f".new-{1 << 22}") for path in long]
    assert len(set(drafts)) == 4
    for path, draft in zip(long, drafts, strict=True):
        draft.touch()
        draft.rename(path)
        path.unlink()
