import os
from pathlib import Path

import pytest

from diskreplay.closing import Kept, check_open, closes
from diskreplay.errors import Closed


class Part:
    def __init__(self, log: list[str], name: str, folder: Path | None = None, fails: bool = False) -> None:
        self.log, self.name, self.folder, self.fails = log, name, folder, fails

    def close(self) -> None:
        assert self.folder is None or not self.folder.exists()
        self.log.append(self.name)
        if self.fails:
            if self.folder is not None:
                self.folder.mkdir()  # as a writer that seals may
            raise OSError(self.name)


class Owner:
    pass


def test_all_is_closed_once_the_last_one_first() -> None:
    log: list[str] = []
    owner, kept = Owner(), Kept()
    close = closes(owner, kept)
    kept += [Part(log, "store"), Part(log, "writer")]
    check_open(owner, close)
    close()
    close()
    assert (log, kept) == (["writer", "store"], [])
    with pytest.raises(Closed, match="^this Owner is closed; make another$"):
        check_open(owner, close)


def test_what_is_garbage_closes_all() -> None:
    log: list[str] = []
    owner = Owner()
    closes(owner, [Part(log, "store")])
    del owner
    assert log == ["store"]


def test_one_that_fails_leaves_the_others_closed_and_is_raised() -> None:
    log: list[str] = []
    owner = Owner()
    close = closes(owner, [Part(log, "store", fails=True), Part(log, "sampler"), Part(log, "writer", fails=True)])
    with pytest.raises(OSError, match="writer"):
        close()
    assert log == ["writer", "sampler", "store"]


def test_a_temporary_folder_is_removed_before_and_behind_whatever_fails(tmp_path: Path) -> None:
    log: list[str] = []
    owner, folder = Owner(), tmp_path / "folder"
    folder.mkdir()
    closes(owner, [Part(log, "store", folder), Part(log, "writer", folder)], str(folder))()
    assert (log, folder.exists()) == (["writer", "store"], False)
    folder.mkdir()
    closes(owner, [Part(log, "other", folder, fails=True)], str(folder))()
    assert not folder.exists()


def test_a_forked_child_closes_nothing_of_its_parents(tmp_path: Path) -> None:
    log: list[str] = []
    owner = Owner()
    close = closes(owner, [Part(log, "store")], str(tmp_path))
    if not (child := os.fork()):
        close()
        os._exit(len(log))
    assert os.waitpid(child, 0)[1] == 0
    assert tmp_path.exists()
    close()
    assert log == ["store"]
