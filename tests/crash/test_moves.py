"""A store that is copied or moved by common tools, or left by a reboot, while it is written and after its writers died.

At most what was appended since the last mark is not shown (of copies also what was appended since copying began),
nothing torn is, and nothing is deleted.
"""

import itertools
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crash import moving, workloads
from tests.crash.moving import Collector, Spans, busy, check_moved, count_steps, durable_steps, quiet
from tests.crash.power import another_boot
from tests.testing.coded import Span
from tests.testing.filesystems import Disk, mounted

ROUNDS = int(os.environ.get("DISKREPLAY_MOVE_ROUNDS", 1))  # of each test
MOST_COPIES = int(os.environ.get("DISKREPLAY_MOVE_COPIES", 5))  # ways to copy that are tried in a round, of all
INTERVAL_S = 0.1
DEFAULT_INTERVAL_S = 5.0  # of a writer
# So long a busy machine may keep a mark waiting, beyond the interval: what was durable is known without it.
SLACK_S = 20.0

MEGABYTES = {"ext4": 128, "xfs": 320, "btrfs": 256}
ENDS = ("stay", "reboot", "mv", "mv live", "tar back", "rsync again", "volume")


class Round:
    """Four collectors that write to one store, which is copied while they live, and moved when they were killed."""

    def __init__(self, disk: Disk, elsewhere: Path, seed: Any, durability: float) -> None:
        self.rng = random.Random(seed)
        self.path, self._folders, self._durability = disk.path / "home/store", (disk.path, elsewhere), durability
        self.killed = 0.0
        self.done: Counter[str] = Counter()
        self.lags: list[float] = []
        self.gaps = 0
        if not self.path.parent.exists():
            moving.run(*(["btrfs", "subvolume", "create"] if disk.kind == "btrfs" else ["mkdir"]), self.path.parent)
        segment_steps, chunk_bytes = self.rng.choice([50, 150, 600]), self.rng.choice([2048, 8192])
        workloads.create(self.path, capacity=None, segment_steps=segment_steps, chunk_bytes=chunk_bytes).close()
        self._collectors = [Collector(self.path, number, durability, seed) for number in range(1, 5)]
        self._lanes = {(c.number, lane): c.times[lane] for c in self._collectors for lane in range(len(c.times))}

    def wait_for(self, steps: int) -> None:
        """Wait until each lane has so many steps more, and any that are durable."""
        least = {key: np.count_nonzero(times) + steps for key, times in self._lanes.items()}
        until = time.monotonic() + 600
        while any(np.count_nonzero(times) < least[key] for key, times in self._lanes.items()) or (
            self._lanes.keys() - durable_steps(self.path).keys()
        ):
            for collector in self._collectors:
                collector.check_alive()
            assert time.monotonic() < until, "the collectors stand still"
            time.sleep(0.01)

    def target(self, way: str) -> Path:
        """Return a path for a copy, on the same file system or, if that is possible, on another one."""
        folder = self._folders[0] if way == "snapshot" else self.rng.choice(self._folders)
        return folder / f"{way} {self.rng.random()}".replace(" ", "-")

    def kill(self, *, may_have_failed: bool = False) -> None:
        """Kill all collectors with one blow each."""
        for collector in self._collectors:
            collector.kill()
        errors = "\n".join(collector.wait() for collector in self._collectors)
        assert may_have_failed or not errors.strip(), errors
        self.killed = time.monotonic()

    def check_intervals(self) -> None:
        """Check that marks were made about as often as was asked for."""
        for times in moving.mark_times(self.path).values():
            assert len(times) < 3 or np.median(np.diff(sorted(times))) < self._durability * 2 + 1

    @property
    def appended(self) -> Spans:
        """All that was appended so far."""
        return {key: [Span(0, count)] for key, times in self._lanes.items() if (count := np.count_nonzero(times))}

    def check(self, way: str, path: Path, needed: Spans, began: float, *, is_still: bool) -> None:
        """Check what a way has made of the store, and remove it.

        It shows the steps that are needed, and none that is much older than the interval is missing. Of a store to
        which nobody wrote any more (``is_still``), all that had been appended is kept.
        """
        try:
            found = check_moved(path, needed, is_still=is_still)
            self.lags.append(max(0.0, began - min(self._first_missing(key, found.shown) for key in self._lanes)))
            assert self.lags[-1] < self._durability + SLACK_S, f"steps that are {self.lags[-1]} s old are not shown"
            if is_still:
                kept = count_steps(found.shown) + found.unproven + found.quarantined
                assert kept >= count_steps(self.appended), f"of {self.appended} only {kept} are kept: {found}"
                self.gaps += found.gaps
        except BaseException as error:
            raise AssertionError(f"{way} to {path}; {dict(needed)} was durable: {error!r}") from error
        self.done[way] += 1
        shutil.rmtree(path)

    def _first_missing(self, key: tuple[int, int], shown: Spans) -> float:
        """Return when the first step was appended that is not shown."""
        missing = self._lanes[key] > 0
        for first, stop in shown.get(key, []):
            missing[first:stop] = False
        return float(self._lanes[key][missing].min(initial=np.inf))


def play(disk: Disk, elsewhere: Path, seed: Any, end: str, durability: float, most: int) -> Round:
    """Play one round: copies of the store while it is written, then copies of what SIGKILL left, then its end.

    At most so many ways to copy are tried. The ends: it stays where it is; another boot; it is moved to another file
    system, before or after the collectors were killed; it is replaced by an archive that was made while it was written,
    or the volume by such a copy; a copy that was made then is brought up to date; the disk loses its power, and is
    attached again in the same boot.
    """
    ways: dict[str, Callable[..., Path]] = dict(moving.COPIES)
    if disk.kind == "btrfs":
        ways["snapshot"] = moving.snapshot
    played = Round(disk, elsewhere, seed, durability)
    order, archive, early = played.rng.sample(sorted(ways), len(ways))[:most], elsewhere / "archive.tar", Path()
    volume = Path()
    copies: list[tuple[Any, ...]] = []
    try:
        played.wait_for(played.rng.randint(20, 100))
        for way in order:
            began, needed = time.monotonic(), durable_steps(played.path)
            copies.append((f"{way}, live", ways[way](played.path, played.target(way), busy), needed, began))
        began, needed = time.monotonic(), durable_steps(played.path)
        if end == "tar back":
            moving.pack(played.path, archive, busy)
        elif end == "mv live":
            played.path = moving.mv(played.path, elsewhere / "moved", busy)
        elif end == "rsync again":
            early = moving.rsync(played.path, played.target(end), busy)
        elif end == "volume":
            volume = moving.copy_volume(disk)
        if end != "mv live":
            played.wait_for(played.rng.randint(0, 30))
        if end == "rsync again" and played.rng.random() < 0.5:
            moving.rsync(played.path, early, busy)
    finally:
        played.kill(may_have_failed=end == "mv live")
    played.check_intervals()
    for copy in copies:
        played.check(*copy, is_still=False)
    if end in ("mv live", "tar back", "volume", "power"):
        if end in ("mv live", "tar back"):  # mv leaves what was made while it deleted
            shutil.rmtree(disk.path / "home/store", ignore_errors=True)
        if end == "tar back":  # inodes of the deleted store are used again
            moving.unpack(archive, played.path)
            archive.unlink()
        if end == "volume":  # in the place of the other one: even inodes are the same
            disk.unmount()
            os.replace(volume, str(disk.image))
            disk.mount()
            for copied in set(disk.path.iterdir()) - {disk.path / "home"}:
                shutil.rmtree(copied)
        if end == "power":  # of the disk alone: it is the same boot
            needed, began = durable_steps(played.path, synced=True), played.killed
            disk.lose_power()
            disk.unmount()
            disk.mount()
        played.check(end, played.path, needed, began, is_still=False)
        return played
    if end == "rsync again":
        # It leaves out files that changed within the second in which it had copied them.
        moving.rsync(played.path, early, quiet)
        played.check(end, early, needed, began, is_still=False)
    needed = durable_steps(played.path)
    for way in order:
        copy = ways[way](played.path, played.target(way), quiet)
        played.check(way, copy, needed, played.killed, is_still=True)
    if end == "mv":
        played.path = moving.mv(played.path, elsewhere / "moved", quiet)
    is_trusted = end in ("stay", "rsync again")
    with another_boot() if end == "reboot" else nullcontext():
        needed = played.appended if is_trusted else needed
        played.check("stay" if is_trusted else end, played.path, needed, played.killed, is_still=True)
    return played


ROUNDS_OF = [
    *itertools.product(MEGABYTES, [*ENDS, "power"], [INTERVAL_S], [MOST_COPIES]),
    *itertools.product(["ext4"], ["reboot", "mv", "power"], [INTERVAL_S], [0]),
    *itertools.product(["ext4"], ["reboot", "mv live"], [DEFAULT_INTERVAL_S], [2]),
]


@pytest.mark.slow
@pytest.mark.timeout(300 + 120 * ROUNDS)
@pytest.mark.parametrize(("kind", "end", "durability", "most"), ROUNDS_OF)
def test_copies_moves_and_reboots_lose_the_last_interval_at_most(
    tmp_path: Path, kind: str, end: str, durability: float, most: int
) -> None:
    with mounted(kind, MEGABYTES[kind], folder=tmp_path) as disk:
        for number in range(ROUNDS):
            play(disk, tmp_path, f"{kind} {end} {number}", end, durability, most)
