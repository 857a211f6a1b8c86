"""A compaction that is killed or loses its power anywhere loses and doubles no step, for any reader."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import diskreplay as dr
from diskreplay.testing import check_account
from tests.crash.injection import die_at, points_of
from tests.crash.power import Recording, another_boot, states
from tests.crash.workloads import Single, Vector, create
from tests.inner import step_counter
from tests.testing.coded import check_coded_store
from tests.testing.merged import contents, folders, ignore
from tests.testing.support import scratch
from tests.tiers import SHARES, each_share, whole_or_part

# How many points, or states, are tried. 0: all of them.
MOST = int(os.environ.get("DISKREPLAY_CRASH_COMPACTIONS", whole_or_part(0, 12)))


def some(count: int) -> range:
    return range(0, count, max(1, count // MOST if MOST else 1))


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    """A store of a pack, and of segments that came later, in one of which an episode was evicted by hand."""
    with scratch() as folder:
        path = Path(folder) / "store"
        with create(path, capacity=None, segment_steps=12) as store:
            write(store, 1)
            assert store.compact()["segments"] > 1
            write(store, 3)
            store.refresh()
            assert store.evict(lambda episode: int(episode["last"] or 0) in (4, 11))
        yield path


def write(store: dr.Store, number: int) -> None:
    one, some = Single(store, number, ignore), Vector(store, number + 1, ignore)
    for t in range(15):
        one.step("terminated" if t % 5 == 4 else "", value=t % 5 == 4)
        some.step(ends=[t % 5], skip=[t % 4])
    one.close()
    some.close()


def steps_ever(path: Path) -> int:
    return step_counter(path)()


def compact(path: Path) -> None:
    with dr.open(path, "a") as store:
        store.compact()


def check(path: Path, shown: list[Any], ever: int, follower: dr.Store, still: dr.Store) -> None:
    """Look at what a compaction left as all its users do: readers that were there, new ones, and the next to write."""
    assert contents(still) == shown
    follower.refresh()
    assert contents(follower) == shown
    with dr.open(path) as fresh:
        assert contents(fresh) == shown
        check_account(fresh, ever)
    assert steps_ever(path) == ever
    with dr.open(path, "a") as store:
        assert contents(store) == shown
    # Nothing is left of what was merged, or of what was being made.
    assert sorted(os.listdir(path / "counters")) == ["c.0", "lock", "zarr.json"]
    with dr.open(path) as fresh:
        assert contents(fresh) == shown
        assert sorted(segment["number"] for segment in fresh.info()["segments"]) == folders(path)
        check_account(fresh, ever)
    follower.refresh()
    assert contents(follower) == contents(still) == shown
    assert steps_ever(path) == ever
    check_account(follower, ever)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_share
def test_a_compaction_that_is_killed_at_any_point_loses_and_doubles_nothing(
    source: Path, tmp_path: Path, share: int
) -> None:
    with dr.open(source) as store:
        shown = contents(store)
    ever, whole = steps_ever(source), tmp_path / "whole"
    shutil.copytree(source, whole)
    points = points_of(lambda: compact(whole))
    assert len(points) > 10
    for point in some(len(points))[share::SHARES]:
        path = tmp_path / f"at-{point}"
        shutil.copytree(source, path)
        with dr.open(path) as follower, dr.open(path) as still:
            assert die_at(lambda _, path=path: compact(path), point).died
            try:
                check(path, shown, ever, follower, still)
                compact(path)
                check(path, shown, ever, follower, still)
                assert len(folders(path)) == 1
            except BaseException as error:
                raise AssertionError(f"after the death at {points[point]}, number {point}: {error!r}") from error
        shutil.rmtree(path)


@pytest.mark.slow(turns=2)
@pytest.mark.timeout(3600)
@each_share
def test_a_compaction_that_loses_its_power_at_any_point_loses_and_doubles_nothing(source: Path, share: int) -> None:
    with dr.open(source) as store:
        shown = contents(store)
    ever = steps_ever(source)
    with scratch() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        shutil.copytree(source, run / "store")
        with dr.open(run / "store", "a") as store, Recording(run) as recording:
            store.compact()
        counters = os.stat(run / "store/counters/c.0").st_ino
        found = list(states(recording, 0, 40))
        # Always those where nothing but the counters is lost, if there are any that differ from all others: no other
        # file is changed in place.
        without_counters = [i for i, state in enumerate(found) if f"without unit ({counters}, " in state.why]
        assert len(found) > 10
        for number in sorted({*some(len(found)), *without_counters})[share::SHARES]:
            with TemporaryDirectory(dir=folder) as disk, another_boot():
                found[number].write(disk)
                path = Path(disk) / "store"
                try:
                    with dr.open(path) as follower, dr.open(path) as still:
                        check(path, shown, ever, follower, still)
                        compact(path)
                        check(path, shown, ever, follower, still)
                except BaseException as error:
                    raise AssertionError(f"state {number}, {found[number].why}: {error!r}") from error


@pytest.mark.slow
def test_whoever_writes_on_clears_up_after_a_compaction_that_was_killed(source: Path, tmp_path: Path) -> None:
    """Before a pack leaves for its age: else its segments would count again."""
    path = tmp_path / "store"
    shutil.copytree(source, path)
    with dr.open(path, "a") as store, dr.open(path) as reader:
        spans = check_coded_store(reader)
        copies = tmp_path / "segments"
        shutil.copytree(path / "segments", copies)
        compact(path)
        for number in folders(tmp_path):  # what the process would have deleted
            shutil.copytree(copies / f"{number:08d}", path / f"segments/{number:08d}", dirs_exist_ok=True)
        reader.refresh()
        assert check_coded_store(reader) == spans
        store.resize(capacity=64)
        with store.writer() as writer:
            for _ in range(3):
                one = Single(store, 9, ignore)
                for t in range(40):
                    one.step("terminated" if t % 5 == 4 else "")
                one.close()
            writer.close()
        assert folders(path)[0] > max(folders(tmp_path))
        assert store.info()["steps_evicted"] > 0
        reader.refresh()
        assert len(reader) == 64
    with dr.open(path, "a") as store:
        assert len(store) == 64
