"""A copy that lacks files, whose opener is killed at any operation: what is proven counts, and all of it is kept."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from tests.crash.injection import die_at, points_of
from tests.testing.commands import repair
from tests.testing.support import append_numbered, serial_schema
from tests.tiers import SHARES, each_share, whole_or_part

SEGMENT = Path("segments/00000000")
STRIDE = int(os.environ.get("DISKREPLAY_CRASH_STRIDE", 0))


@pytest.fixture
def lacking(tmp_store: Path) -> Path:
    """A copy of 30 steps that were marked, ten at a time, without the second of the files of rewards."""
    copy = tmp_store.with_name("copy")
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64) as store, store.writer(durability="none") as writer:
        for first in range(0, 30, 10):
            append_numbered(writer, range(first, first + 10))
            writer.flush()
        shutil.copytree(tmp_store, copy)
    (copy / SEGMENT / "reward/c.0.1").unlink()
    return copy


def shown(path: Path) -> list[int]:
    with dr.open(path) as store:
        return [int(serial) for episode in store.episodes for serial in episode["serial"]]


def open_to_write(path: Path) -> Any:
    return lambda tell: dr.open(path, "a").close()


def check(path: Path, copied: dict[Path, bytes]) -> None:
    dr.open(path, "a").close()
    assert shown(path) == list(range(10))
    with dr.open(path) as store:
        (entry,) = store.quarantine
    assert (entry.segment, entry.steps) == (0, 20)
    assert {file: (path / entry.where / file).read_bytes() for file in copied} == copied
    assert repair(path).actions == []
    assert sorted(os.listdir(path / "counters")) == ["c.0", "lock", "quarantine", "zarr.json"]


@pytest.mark.slow
@each_share
def test_a_copy_that_lacks_a_file_loses_nothing_to_an_opener_that_is_killed(
    lacking: Path, tmp_path: Path, share: int
) -> None:
    before = shown(lacking)
    copied = {file.relative_to(lacking / SEGMENT): file.read_bytes() for file in (lacking / SEGMENT).rglob("c.*")}
    assert before == list(range(10))
    shutil.copytree(lacking, tmp_path / "done")
    points = points_of(lambda: open_to_write(tmp_path / "done")(None))
    check(tmp_path / "done", copied)
    assert len(points) > 20
    for point in range(0, len(points), STRIDE or whole_or_part(1, 2))[share::SHARES]:
        shutil.copytree(lacking, tmp_path / "killed")
        assert die_at(open_to_write(tmp_path / "killed"), point).died
        assert shown(tmp_path / "killed") == before
        check(tmp_path / "killed", copied)
        shutil.rmtree(tmp_path / "killed")
