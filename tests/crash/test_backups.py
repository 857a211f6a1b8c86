"""A backup that is killed or loses its power leaves nothing at its path, or all; that of a busy store is a prefix."""

import itertools
import mmap
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.crash.injection import die_at, points_of
from tests.crash.power import Recording, another_boot, states
from tests.crash.workloads import CAPACITY, Single, Vector, create
from tests.testing.coded import check_coded_store
from tests.testing.support import digest, scratch, wait_until
from tests.tiers import whole_or_part

# How many points, or states, are tried. 0: all of them.
MOST = int(os.environ.get("DISKREPLAY_CRASH_BACKUPS", whole_or_part(200, 8)))


def some(count: int) -> range:
    return range(0, count, max(1, count // MOST if MOST else 1))


def ignore(told: object) -> None:
    """What the workload tells is of no interest here."""


def back_up(path: Path, to: Path, *, link: bool) -> list[Any]:
    """Back up a store; return the problems that were found."""
    with dr.open(path) as store:
        return list(store.backup(to, link=link).problems)


@contextmanager
def being_written(path: Path) -> Iterator[dict]:
    """Have a store with two sealed segments, and one that a writer has open; gives what it shows."""
    with create(path, capacity=None) as store:
        one = Single(store, 1, ignore)
        for t in range(18):
            one.step("terminated" if t % 5 == 4 else "", value=t % 5 == 4)
        store.write_note("source", "here")
        store.refresh()
        yield check_coded_store(store)
        one.close()


def check(path: Path, shown: dict) -> None:
    with dr.open(path) as backup:
        assert check_coded_store(backup) == shown
        assert backup.verify(deep=True) == []
        assert backup.read_note("source") == "here"


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("link", [True, False])
def test_a_backup_that_is_killed_at_any_point_is_resumed(tmp_store: Path, tmp_path: Path, link: bool) -> None:
    to = tmp_path / "backups" / "b"
    with being_written(tmp_store) as shown:

        def work(tell: object) -> None:
            back_up(tmp_store, to, link=link)

        count = len(points_of(lambda: work(None)))
        for point in some(count):
            shutil.rmtree(to.parent)
            assert die_at(work, point).died
            if to.exists():
                check(to, shown)
            elif point % 2:  # and once more
                die_at(work, count // 3)
            if not to.exists():
                back_up(tmp_store, to, link=link)
            check(to, shown)
            assert os.listdir(to.parent) == ["b"]


@pytest.mark.slow
def test_a_backup_that_appears_is_on_the_disk(tmp_store: Path) -> None:
    with scratch() as folder:
        top = Path(folder)
        create(top / "store", capacity=None).close()
        with dr.open(top / "store", "a") as store:
            one = Single(store, 1, ignore)
            for t in range(9):
                one.step("terminated" if t % 5 == 4 else "")
            one.close()
        whole = digest(top / "store")
        with Recording(top) as recording:
            back_up(top / "store", top / "b", link=False)
        found = list(states(recording, seed=0, subsets=20, singles=False))
        appeared = 0
        for state in [found[i] for i in some(len(found))] + found[-3:]:
            with TemporaryDirectory(dir=top) as other:
                state.write(other)
                with another_boot():
                    if (Path(other) / "b").exists():
                        appeared += 1
                    else:
                        back_up(Path(other) / "store", Path(other) / "b", link=False)
                assert digest(Path(other) / "b") == whole, state.why
        assert appeared


class Busy:
    """A process that appends at full speed to a store with a small capacity; ``count`` steps of each lane so far."""

    def __init__(self, path: Path, number: int) -> None:
        self.kind = Vector if number % 2 else Single
        self.counts = np.frombuffer(mmap.mmap(-1, 8 * self.kind.lanes), np.int64)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._append(path, number, parent)
            finally:
                os._exit(1)

    def _append(self, path: Path, number: int, parent: int) -> None:
        with dr.open(path, "a") as store:
            writer = self.kind(store, number, self._note, durability=0.01)
            for t in itertools.count():
                if os.getppid() != parent:
                    return
                if isinstance(writer, Vector):
                    writer.step([t % 5], skip=[t % 7])
                else:
                    writer.step("terminated" if t % 6 == 5 else "", known=t % 4 > 0)

    def _note(self, told: dict) -> None:
        self.counts[:] = told["counts"]

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("capacity", [CAPACITY, 400])
def test_a_backup_of_a_busy_store_is_a_prefix_of_each_lane(tmp_store: Path, tmp_path: Path, capacity: int) -> None:
    create(tmp_store, capacity=capacity, segment_steps=capacity // 3).close()
    writers = [Busy(tmp_store, number) for number in (2, 3)]
    try:
        wait_until(lambda: all(writer.counts.all() for writer in writers))
        for turn in range(whole_or_part(40, 2)):
            to = tmp_path / "b"
            before = [writer.counts.copy() for writer in writers]
            assert back_up(tmp_store, to, link=turn % 2 == 0) == []
            after = [writer.counts + 1 for writer in writers]
            with another_boot(), dr.open(to) as backup:
                spans = check_coded_store(backup)
                assert len(backup) <= capacity
                for (number, lane), span in spans.items():
                    at = number - 2
                    assert before[at][lane] <= span.stop <= after[at][lane], (number, lane, span)
                assert backup.verify(deep=True) == []
            with another_boot(), dr.open(to, "a") as backup:
                more = Single(backup, 4, ignore)
                more.step()
                more.close()
                backup.refresh()
                assert (4, 0) in check_coded_store(backup)
                assert backup.verify(deep=True) == []
            shutil.rmtree(to)
    finally:
        for writer in writers:
            writer.end()
    with dr.open(tmp_store, "a") as store:
        pass
    with dr.open(tmp_store) as store:
        assert store.verify(deep=True) == []
