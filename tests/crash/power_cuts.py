"""Real power cuts of small file systems, while four writers append, segments are merged and a backup is made.

    python -m tests.crash.power_cuts --rounds 30 [--kind ext4] [--seconds 6]

prints for each round how many steps were lost, and how much older than the interval of `durability` the oldest was.
"""

import argparse
import faulthandler
import mmap
import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from diskreplay.testing import check_account
from tests.crash.power import another_boot
from tests.testing.filesystems import Disk, mounted

KINDS = ("ext4", "xfs", "btrfs")
SEGMENT_STEPS = (60, 150, None)
INTERVAL_S = 0.5
WRITERS = 4
_MOST_STEPS = 1_000_000
_PAUSE_S = 0.001


class Cut(NamedTuple):
    """What a power cut took: of how many steps, how many, and by how many seconds the oldest exceeds the interval."""

    appended: int
    lost: int
    excess_s: float


def cut_power(kind: str, segment_steps: int | None, seconds: float) -> Cut:
    """Write for some seconds, cut the power, and count what the store shows after it."""
    with mounted(kind, 512, folder=Path("/dev/shm")) as disk:
        path = disk.path / "store"
        schema = dr.Schema(obs=dr.Field((2,), "int64"), action=dr.Field((), "int64"), reward=dr.Field((), "float32"))
        dr.create(path, schema, segment_steps=segment_steps, compaction="manual").close()
        subprocess.run(["sync", "-f", str(disk.path)], check=True)
        times = np.frombuffer(mmap.mmap(-1, 8 * WRITERS * _MOST_STEPS), "f8").reshape(WRITERS, _MOST_STEPS)
        jobs = [_begin(lambda number=number: _append(path, number, times[number])) for number in range(WRITERS)]
        jobs += [_begin(lambda: _merge(path)), _begin(lambda: _back_up(path, disk.path / "backup"))]
        time.sleep(seconds)
        at = time.monotonic()
        if kind != "btrfs":
            disk.lose_power()
        for job in jobs:
            os.kill(job, signal.SIGKILL)
        for job in jobs:
            os.waitpid(job, 0)
        if kind == "btrfs":
            _lose_memory(disk)
        else:
            disk.unmount()
        disk.mount()
        return _count(path, times, at)


def _begin(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # memory that is mapped from the disk may end it, which is no news
        with suppress(BaseException), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
        os._exit(1)
    return pid


def _append(path: Path, number: int, times: np.ndarray) -> None:
    rng, base = random.Random(number), number * _MOST_STEPS
    with dr.open(path, "a") as store, store.writer(durability=INTERVAL_S) as writer:
        for i in range(_MOST_STEPS):
            at = time.monotonic()
            done = rng.random() < 0.05
            writer.append(obs=np.full(2, i), action=base + i, reward=0.0, terminated=done, next_obs=np.full(2, i + 1))
            times[i] = at
            time.sleep(_PAUSE_S)


def _merge(path: Path) -> None:
    with dr.open(path, "a") as store:
        while True:
            with suppress(dr.ReplayError, OSError):
                store.compact()
            time.sleep(0.2)


def _back_up(path: Path, to: Path) -> None:
    with dr.open(path) as store:
        while True:
            with suppress(dr.ReplayError, OSError):
                store.backup(to)
            shutil.rmtree(to, ignore_errors=True)
            time.sleep(0.2)


def _lose_memory(disk: Disk) -> None:
    """Go on with the image as the file system has written it by now, and nothing that it has in memory."""
    assert disk.image is not None
    copy = disk.image.with_name("copy")
    while True:
        before = disk.image.stat().st_mtime_ns
        subprocess.run(["cp", "--sparse=always", str(disk.image), str(copy)], check=True)
        if disk.image.stat().st_mtime_ns == before:  # else it was written meanwhile: that is no one moment
            break
    disk.unmount()
    os.replace(copy, disk.image)


def _count(path: Path, times: np.ndarray, at: float) -> Cut:
    with another_boot():
        with dr.open(path, "a"):
            pass
        with dr.open(path) as store:
            shown = np.sort(store.to_numpy()["action"])
            assert (np.diff(shown) > 0).all(), "a step is there twice"
            check_account(store)
            kinds = {problem.kind for problem in store.verify(deep=True)}
            assert kinds <= {"unproven", "quarantine"}, kinds
    writer, step = np.nonzero((times > 0) & (times < at))
    is_lost = ~np.isin(writer * _MOST_STEPS + step, shown)
    oldest = times[writer[is_lost], step[is_lost]].min(initial=at)
    return Cut(len(step), int(is_lost.sum()), at - oldest - INTERVAL_S)


def main() -> None:
    """Cut the power again and again."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seconds", type=float, default=6.0)
    given = parser.parse_args()
    for kind in given.kind or KINDS:
        for segment_steps in SEGMENT_STEPS:
            cuts = []
            for number in range(given.rounds):
                cuts.append(cut_power(kind, segment_steps, given.seconds * random.uniform(0.5, 1.5)))
                print(kind, segment_steps, number, cuts[-1], flush=True)
            worst, late = max(cut.excess_s for cut in cuts), sum(cut.excess_s > 1 for cut in cuts)
            lost, appended = sum(cut.lost for cut in cuts), sum(cut.appended for cut in cuts)
            print(
                f"{kind} {segment_steps}: {len(cuts)} rounds, {lost} of {appended} steps lost; the oldest {worst:.2f} s"
                f" older than the interval; {late} rounds above 1 s",
                flush=True,
            )


if __name__ == "__main__":
    main()
