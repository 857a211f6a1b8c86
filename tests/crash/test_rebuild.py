"""A repair that is killed while it exchanges two of a segment leaves one or the other, or the next one ends it."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.testing import check_account
from tests.crash.injection import die_at, points_of
from tests.testing.commands import Refused, repair
from tests.testing.support import append_numbered, serial_schema
from tests.tiers import SHARES, each_share, whole_or_part

pytestmark = pytest.mark.usefixtures("no_patience")

# How many points lie between two that are tried. 1 tries all of them.
STRIDE = int(os.environ.get("DISKREPLAY_CRASH_STRIDE", 0))
DAMAGED = "segments/00000001/reward/c.0.1"


@pytest.fixture
def damaged(tmp_store: Path) -> Path:
    """A store of three segments; a byte of the second one's rewards is another."""
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64, segment_steps=40) as store, store.writer() as writer:
        for first in range(0, 90, 5):
            append_numbered(writer, range(first, first + 5))
    file = tmp_store / DAMAGED
    data = bytearray(file.read_bytes())
    data[0] ^= 0xFF
    file.write_bytes(data)
    return tmp_store


def shown(path: Path) -> dict[tuple, tuple]:
    with dr.open(path) as store:
        return {
            tuple(episode.ids.tolist()): (episode["serial"].tobytes(), episode.reward.tobytes(), episode.obs.tobytes())
            for episode in store.episodes
        }


def work(path: Path) -> Any:
    return lambda tell: repair(path)


def check_killed(path: Path, before: dict, after: dict) -> bool:
    """Check what a repair that was killed left, and what the next users of the store make of it."""
    partly = {ids: episode for ids, episode in before.items() if ids[0] >> 35 != 1}
    assert shown(path) in (before, after, partly)
    with dr.open(path) as store:
        check_account(store)
    with dr.open(path, "a"):
        pass
    now = shown(path)
    assert now in (before, after)
    repair(path)
    assert shown(path) == after
    with dr.open(path) as store:
        check_account(store)
    assert repair(path).actions == []
    assert sorted(os.listdir(path / "counters")) == ["c.0", "lock", "quarantine", "zarr.json"]
    aside = {name for name in os.listdir(path / "counters/quarantine/segments") if not name.startswith(".")}
    (entry,) = [name for name in aside if not name.endswith(".record.json")]
    assert entry.split(".")[0] == "00000001"  # a record alone, of a process that died before the move, takes its name
    assert aside <= {entry, f"{entry}.record.json", "00000001.record.json"}
    assert np.fromfile(path / "counters/c.0", "<i8")[7] >= 1
    return now == after


def check_points(damaged: Path, tmp_path: Path, points: Any) -> set[bool]:
    before = shown(damaged)
    shutil.copytree(damaged, tmp_path / "done")
    assert repair(tmp_path / "done").steps_lost == 10
    after = shown(tmp_path / "done")
    assert len(before) - len(after) == 2
    found = set()
    for point in points:
        shutil.copytree(damaged, tmp_path / "killed")
        die_at(work(tmp_path / "killed"), point)
        found.add(check_killed(tmp_path / "killed", before, after))
        shutil.rmtree(tmp_path / "killed")
    return found


@pytest.mark.slow(turns=2)
@pytest.mark.timeout(3600)
@each_share
def test_a_repair_that_is_killed_anywhere_leaves_a_segment(damaged: Path, tmp_path: Path, share: int) -> None:
    shutil.copytree(damaged, tmp_path / "counted")
    names = [point.name for point in points_of(lambda: repair(tmp_path / "counted"))]
    first = names.index("rename")
    assert names.count("rename") == 3
    every = len(names)
    around = range(first - 1, every, whole_or_part(1, 3))
    points = sorted({*range(0, every, STRIDE or whole_or_part(7, 31)), *around})
    assert check_points(damaged, tmp_path, [0, *points[share::SHARES], every]) == {False, True}


@pytest.mark.slow(turns=2)
@pytest.mark.timeout(3600)
@each_share
def test_a_process_that_is_killed_while_it_rebuilds_a_copy_costs_no_more_than_the_damage(
    damaged: Path, tmp_path: Path, share: int
) -> None:
    copy, done, killed = (tmp_path / name for name in ("copy", "done", "killed"))
    shutil.copytree(damaged, copy, copy_function=shutil.copyfile)
    before = shown(copy)
    shutil.copytree(copy, done)
    names = [point.name for point in points_of(lambda: repair(done))]
    assert shown(done) == before
    assert len(shown(damaged)) - len(before) == 2
    first = names.index("rename")
    assert names.count("rename") >= 3  # as in repair: built, set aside, put in place
    points = [*range(0, first - 1, whole_or_part(1, 9)), *range(first - 1, len(names), whole_or_part(1, 3))]
    assert len(points) > 20
    died = 0
    for point in points[share::SHARES]:
        shutil.copytree(copy, killed)
        died += die_at(work(killed), point).died
        assert check_killed(killed, before, before)
        shutil.rmtree(killed)
    assert died


def check_restoring(path: Path, rebuilt: dict, whole: dict) -> bool:
    """Check what `--restore` that was killed left, and what the next users make of it; return whether it was done."""
    without_it = {ids: episode for ids, episode in whole.items() if ids[0] >> 35 != 1}
    assert shown(path) in (rebuilt, whole, without_it)
    with dr.open(path) as store:
        check_account(store)
    twin = path.with_name("twin")
    shutil.copytree(path, twin)
    if is_over := not any("rebuilt-" in name or "replaced-" in name for name in os.listdir(path / "counters")):
        assert shown(path) != without_it
    for killed, is_finished in ((path, True), (twin, is_over)):
        if killed == path:
            dr.open(killed, "a").close()
            assert shown(killed) in (rebuilt, whole)
        is_done = shown(killed) == whole
        with pytest.raises(Refused, match="has more steps") if is_finished and is_done else nullcontext():
            assert [action.what for action in repair(killed, restore=1).actions] == ["restored"]
        assert shown(killed) == whole
        dr.open(killed, "a").close()
        with dr.open(killed) as store:
            check_account(store)
            (entry,) = store.quarantine
        assert (entry.segment, entry.steps, entry.rebuilt) == (1, 0, True)
        assert repair(killed).actions == []
        assert sorted(os.listdir(killed / "counters")) == ["c.0", "lock", "quarantine", "zarr.json"]
    shutil.rmtree(twin)
    return is_done


@pytest.mark.slow(turns=2)
@pytest.mark.timeout(3600)
@each_share
def test_an_original_that_is_brought_back_by_a_process_that_is_killed_is_lost_nowhere(
    damaged: Path, tmp_path: Path, share: int
) -> None:
    repair(damaged)
    rebuilt = shown(damaged)
    file = damaged / "counters/quarantine" / DAMAGED
    data = bytearray(file.read_bytes())
    data[0] ^= 0xFF
    file.chmod(0o644)
    file.write_bytes(data)
    counted, killed = tmp_path / "counted", tmp_path / "killed"
    shutil.copytree(damaged, counted)
    names = [point.name for point in points_of(lambda: repair(counted, restore=1))]
    whole = shown(counted)
    assert len(whole) - len(rebuilt) == 2
    first = names.index("rename")
    assert names.count("rename") == 3  # out of quarantine, the rebuilt one into it, the original into its place
    points = [*range(0, first, whole_or_part(7, 31)), *range(first, len(names), whole_or_part(1, 3)), len(names)]
    found = set()
    for point in [points[0], *points[share::SHARES], points[-1]]:
        shutil.copytree(damaged, killed)
        die_at(lambda tell: repair(killed, restore=1), point)
        found.add(check_restoring(killed, rebuilt, whole))
        shutil.rmtree(killed)
    assert found == {False, True}
