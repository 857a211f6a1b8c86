"""File systems that are full to the last block while writers append: an error, never a signal, and nothing is lost."""

import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.errors import StorageFull
from tests.crash import workloads
from tests.crash.injection import Point, in_child, needs_room
from tests.crash.inner import kept_by_position
from tests.crash.test_room import fill_at
from tests.crash.test_writers import KINDS, STRIDE
from tests.testing.coded import check_coded_store
from tests.testing.commands import verify
from tests.testing.filesystems import Disk, mounted
from tests.tiers import whole_or_part

DISKS = [
    ("ext4", "", False),
    ("xfs", "", False),
    ("tmpfs", "", False),
    ("btrfs", "", False),
    ("btrfs", "", True),
    ("btrfs", "compress=zstd", False),
]
WIDE = 5000
REFUSALS = 40  # that a writer is told before there is room again


def schema() -> dr.Schema:
    """Narrow fields, which are mapped where that is safe, and a wide one."""
    extra = {"serial": dr.Field((), "int64"), "wide": dr.Field((WIDE,), "uint8")}
    return dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"), extra=extra)


def values(serials: Any) -> dict[str, Any]:
    serials = np.asarray(serials)
    noise = (serials[..., None] * 7919 + np.arange(WIDE) * 31 + np.arange(WIDE) ** 2 // 97) % 251
    return {
        "obs": np.repeat(serials[..., None], 4, -1).astype(np.float32),
        "action": serials,
        "reward": serials.astype(np.float32),
        "serial": serials,
        "wide": noise.astype(np.uint8),
    }


class Steps:
    """A writer of one lane, step by step with the next observation; ``count`` steps are acknowledged of each lane."""

    lanes = 1

    def __init__(self, store: dr.Store) -> None:
        self.writer, self.count = store.writer(), 0

    def append(self) -> None:
        now, following = values(self.count), values(self.count + 1)["obs"]
        self.writer.append(**now, terminated=self.count % 40 == 39, next_obs=following)
        self.count += 1


class Episodes(Steps):
    def append(self) -> None:
        self.writer.append_episode(**values(np.arange(self.count, self.count + 5)), terminated=True)
        self.count += 5


class Vector(Steps):
    lanes = 3

    def __init__(self, store: dr.Store) -> None:
        self.writer, self.count = store.writer(num_envs=self.lanes), 0

    def append(self) -> None:
        serials = np.full(self.lanes, self.count)
        ends = serials % 40 == 39 - np.arange(self.lanes)
        self.writer.append(**values(serials), terminated=ends, next_obs=values(serials + 1)["obs"])
        self.count += 1


WRITERS: dict[str, Callable[[dr.Store], Steps]] = {"steps": Steps, "episodes": Episodes, "vector": Vector}


def write_on(disk: Disk, kind: str, snapshot: bool, tell: Any) -> None:
    """Append, fill the disk, append until that was refused often, make room, append and close."""
    warnings.simplefilter("error")
    with dr.open(disk.path / "store", "a") as store:
        writer = WRITERS[kind](store)
        for _ in range(30):
            writer.append()
        if snapshot:
            subprocess.run(
                ["btrfs", "subvolume", "snapshot", disk.path, disk.path / "snapshot"], check=True, capture_output=True
            )
        ballast, refused = disk.fill(), 0
        while refused < REFUSALS:
            try:
                writer.append()
            except StorageFull:
                refused += 1
            if refused == REFUSALS // 2:
                try:
                    writer.writer.flush()
                except StorageFull:
                    pass
                more = disk.fill(name="more")
        full_at = writer.count
        tell({"full": full_at})
        disk.free(ballast, more)
        for _ in range(30):
            writer.append()
        tell({"count": writer.count})
        writer.writer.close()


def check_on(path: Path, lanes: int, count: int) -> None:
    with dr.open(path) as store:
        assert len(store) == lanes * count
        serials: dict[int, list[int]] = {}
        for episode in store.episodes:
            found = episode["serial"]
            serials.setdefault(episode.lane, []).extend(found.tolist())
            assert (np.asarray(episode["wide"]) == values(found)["wide"]).all()
            assert (np.asarray(episode["obs"])[: len(found)] == values(found)["obs"]).all()
        assert {lane: sorted(x) for lane, x in serials.items()} == {lane: list(range(count)) for lane in range(lanes)}
        assert store.verify(deep=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("kind", "options", "snapshot"), DISKS)
def test_a_file_system_that_is_full_refuses_steps_and_loses_none(
    kind: str, options: str, snapshot: bool, writer: str
) -> None:
    if snapshot and shutil.which("btrfs") is None:
        pytest.skip("btrfs is not installed")
    with mounted(kind, 24, options) as disk:
        dr.create(disk.path / "store", schema(), chunk_bytes=1 << 20).close()
        told = in_child(partial(write_on, disk, writer, snapshot)).told
        assert told[1]["count"] > told[0]["full"] >= 30
        check_on(disk.path / "store", 3 if writer == "vector" else 1, told[1]["count"])


def needs_room_by_position(point: Point, below: Path | str = "/") -> bool:
    """Tell whether a full disk that copies on write may refuse a call: any write, too."""
    written = point.name == "pwrite" and os.readlink(f"/proc/self/fd/{point.args[0]}").startswith(str(below))
    return written or needs_room(point, below)


def check_nearly(path: Path, told: list[dict[str, Any]]) -> None:
    """Check a store on a full disk: where lanes are in several segments, the last step of some may be shown later."""
    counts = told[-1]["counts"] if told else [0]
    with dr.open(path) as store:
        spans = check_coded_store(store)
        for lane, count in enumerate(counts):
            stop = spans[1, lane].stop if (1, lane) in spans else 0
            assert count - (len(counts) > 1) <= stop <= count
    assert verify(path) == []


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("segment_steps", [8, "episode"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(3000)
def test_a_disk_that_refuses_any_write_by_position_loses_nothing_and_the_writer_goes_on(
    tmp_path: Path, kind: str, segment_steps: Any
) -> None:
    number, was_full = 3, True
    while was_full:
        path = tmp_path / str(number)
        with kept_by_position():
            workloads.create(path, segment_steps=segment_steps).close()
        try:
            with kept_by_position():
                was_full = fill_at(path, kind, number, needs_room_by_position, check_nearly)
        except BaseException as error:
            raise AssertionError(f"full from call {number} on: {error!r}") from error
        shutil.rmtree(path)
        number += STRIDE or whole_or_part(37, 301)
    assert number > 600
