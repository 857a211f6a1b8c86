"""What the processes of a soak do, and how much the long-lived ones hold."""

import ctypes
import json
import mmap
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

import diskreplay as dr
from diskreplay.integrity.repair.repair import repair
from diskreplay.integrity.verify.verify import verify
from tests.testing.coded import check_coded_batch, coded_obs, coded_step, make_codes, split_codes

T = TypeVar("T")
Mode = Literal["r", "a"]

LANES = 3
MOST_WRITERS = 1 << 16
# A vector's call appends a step of each lane, and an episode in one piece has at most so many.
LONGEST_BLOCK = 40
PR_SET_PDEATHSIG = 1


class Board:
    """How many steps of each lane each writer has appended: memory that all processes share, and that outlives them.

    Attributes
    ----------
    counts : ndarray of int64, shape (MOST_WRITERS, LANES)
        Steps by number and lane; what else a process counts is in its first lane.
    evictable : ndarray of int64, shape (1,)
        The segment in front of which nobody looks any more for the end of what a writer wrote.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, (MOST_WRITERS * LANES + 1) * 8)
        words = np.frombuffer(self._memory, np.int64)
        self.counts, self.evictable = words[:-1].reshape(MOST_WRITERS, LANES), words[-1:]


class Place:
    """Where the store is: it is moved while it is used, and who opens it next has to find it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._note = folder, folder / "where"

    @property
    def path(self) -> Path:
        """Its path at this moment."""
        return Path(self._note.read_text())

    def put(self, path: Path) -> None:
        """Note where it is from now on."""
        beside = self._note.with_suffix(".new")
        beside.write_text(str(path))
        beside.replace(self._note)

    def use(self, call: Callable[[Path], T]) -> T:
        """Call something with its path, again where it was moved in between, or its lock was kept from everybody."""
        while True:
            path = self.path
            try:
                return call(path)
            except dr.StoreLocked:
                continue  # who holds it was stopped
            except dr.StoreNotFound:
                if self.path == path:
                    raise

    def open(self, mode: Mode) -> dr.Store:
        """Open it."""
        return self.use(lambda path: dr.open(path, mode))


def wait_until(holds: Callable[[], Any], patience_s: float) -> bool:
    """Wait until something holds that another process decides, or for so long; return whether it does."""
    until = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)  # nothing tells: a process may be stopped or killed anywhere
    return True


def write(place: Place, number: int, seed: int, board: Board, stop: Callable[[], bool]) -> None:
    """Append until told to stop: steps of one environment or of several, with and without their next observations."""
    rng = random.Random(seed)
    with place.open("a") as store:
        _write(store, number, board.counts[number], rng, stop)


def _write(store: dr.Store, number: int, counts: Any, rng: random.Random, stop: Callable[[], bool]) -> None:
    lanes = LANES if number % 2 else None
    append = _append_one if lanes is None else _append_some
    with store.writer(num_envs=lanes, durability=rng.choice(["none", "episode", 0.2, 5.0])) as writer:
        while not stop():
            for _ in range(rng.randrange(1, 60)):
                with suppress(dr.StoreLocked):  # refused as a whole
                    append(writer, number, counts, rng)
            time.sleep(rng.random() * 0.01)  # as an environment that takes its time, so that others run on two cores


def outlive(place: Place, number: int, seed: int, board: Board, stop: Callable[[], bool]) -> None:
    """Append to a store that is about to be deleted and replaced; nothing may reach the store that took its place."""
    rng = random.Random(seed)
    with suppress(dr.StoreNotFound), dr.open(place.folder / f"decoy-{number}", "a") as store:
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=8, seed=seed, refresh=False)
        refused = evicted = 0
        for call in (
            lambda: _write(store, number, board.counts[number], rng, stop),
            lambda: sampler.save("soak-0"),
            lambda: store.evict(lambda _: True),
        ):
            try:
                evicted = call() or 0
            except dr.StoreNotFound:
                refused += 1
        if refused < 2 or evicted:
            raise AssertionError(f"of a store that was deleted {evicted} steps were evicted, {refused} calls refused")


def evict(place: Place, number: int, seed: int, board: Board, stop: Callable[[], bool]) -> None:
    """Evict some older episodes by hand, again and again; which these are is noted before each is."""
    rng, log = random.Random(seed), os.open(place.folder / f"evicted-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def is_chosen(episode: Any) -> bool:
        if episode.segment >= board.evictable[0] or rng.random() > 0.02:
            return False
        writer, lane, first = map(int, split_codes(episode.action[0, 0]))
        os.write(log, np.array([writer, lane, first, first + len(episode)], np.int64).tobytes())
        return True

    with place.open("a") as store:
        while not stop():
            with suppress(dr.StoreLocked):
                store.evict(is_chosen)
                board.counts[number, 0] += 1
            store.refresh()
            time.sleep(rng.random() * 4)  # so that most of what is evicted leaves by the capacity


def come_and_go(place: Place, number: int, seed: int, board: Board, stop: Callable[[], bool]) -> None:
    """Open the store for reading and for writing, again and again: the latter seals what dead writers left."""
    rng = random.Random(seed)
    while not stop():
        with place.open(rng.choice(["r", "a"])) as store:
            store.info()
            store.refresh()
        board.counts[number, 0] += 1
        time.sleep(rng.random())  # so that those who use the store are not only waiting for its lock


def compact(place: Place, number: int, seed: int, board: Board, stop: Callable[[], bool]) -> None:
    """Merge what is sealed, again and again; how many segments that were is counted."""
    rng = random.Random(seed)
    while not stop():
        with place.open("a") as store, suppress(dr.StoreLocked):
            board.counts[number, 0] += store.compact()["segments"]
        time.sleep(rng.random())  # so that there is something to merge


def inspect(place: Place, number: int, seed: int, board: Board, stop: Callable[[], bool]) -> None:
    """Verify and repair the store, again and again: there is nothing to be found, and nothing to be set aside."""
    rng = random.Random(seed)
    while not stop():
        if found := place.use(lambda path: verify(path, deep=rng.random() < 0.2)):
            raise AssertionError(f"verify found {found}")
        done = place.use(repair)
        actions = [action for action in done.actions if action.what not in ("sealed", "removed")]
        if actions or done.left or done.quarantine:
            raise AssertionError(f"repair found {done}")
        board.counts[number, 0] += 1
        time.sleep(rng.random())  # verify reads everything: without a pause, nothing else would run


def _append_one(writer: Any, number: int, counts: Any, rng: random.Random) -> None:
    count, kind = int(counts[0]), rng.random()
    if kind < 0.01:
        steps = rng.randrange(1, LONGEST_BLOCK)
        codes = make_codes(number, 0, count + np.arange(steps + 1))
        block = {**coded_step(codes[:-1], block=True), "obs": coded_obs(codes)}
        writer.append_episode(**block, terminated=True, episode={"last": count + steps - 1})
        counts[0] = count + steps
        return
    ends = kind > 0.97
    writer.append(
        **coded_step(make_codes(number, 0, count)),
        terminated=ends and kind > 0.98,
        truncated=ends,
        next_obs=coded_obs(make_codes(number, 0, count + 1)) if kind < 0.9 or ends else None,
        episode={"last": count} if ends else None,
    )
    counts[0] = count + 1
    if kind < 0.02:
        writer.end_episode(coded_obs(make_codes(number, 0, count + 1)))


def _append_some(writer: Any, number: int, counts: Any, rng: random.Random) -> None:
    lanes = np.arange(LANES)
    codes = make_codes(number, lanes, counts)
    draws = np.array([rng.random() for _ in lanes])
    mask = draws < 0.95
    writer.append(
        **coded_step(codes),
        terminated=draws < 0.02,
        truncated=(draws > 0.02) & (draws < 0.03),
        next_obs=coded_obs(codes + 1) if draws[0] < 0.9 else None,
        mask=mask,
        episode={"last": counts.copy()},
    )
    counts += mask


def sample(place: Place, number: int, seed: int, board: Board, stop: Callable[[], bool]) -> None:
    """Draw batches and check every value of them until told to stop; every other sampler has priorities and saves."""
    saves = number % 2 == 1
    distribution = dr.Prioritized() if saves else dr.Uniform()
    with place.open("a" if saves else "r") as store:
        sampler = dr.Sampler(store, dr.Transitions(n_step=3, gamma=1.0), distribution, batch_size=64, seed=seed)
        batches = 0
        while not stop():
            try:
                batch = sampler.sample()
            except dr.NotEnoughData:
                time.sleep(0.01)
                continue
            arrays = batch.numpy()
            check_coded_batch(arrays)
            batches += 1
            board.counts[number, 0] = batches
            if saves:
                sampler.update_priorities(arrays["index"], arrays["reward"])
                if batches % 100 == 0:
                    with suppress(dr.StoreLocked):
                        sampler.save(f"soak-{number % 8}")
            time.sleep(0.002)
        sampler.close()


class Child:
    """A forked process that does one of these."""

    def __init__(self, job: Any, place: Place, number: int, seed: int, board: Board, *, spared: bool = False) -> None:
        self.job, self.number, self.spared = job, number, spared
        self.since = 0  # the number of the first segment that it may have made
        self.sleeps_until = 0.0
        self.log = place.folder / f"{job.__name__}-{number}.log"
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._run(place, seed, board)
                code = 0
            except BaseException:
                self.log.write_text(traceback.format_exc())
            finally:
                os._exit(code)

    def _run(self, place: Place, seed: int, board: Board) -> None:
        told: list[int] = []
        # Nobody would end it if the process that started it died; it may even stand still.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        watch = Watch(self.log.with_suffix(".samples")) if self.spared else None

        def stop() -> bool:
            if watch is not None:
                watch.look()
            return bool(told)

        self.job(place, self.number, seed, board, stop)

    def end(self, how: signal.Signals) -> str:
        """Signal it and wait; return what it said if it failed."""
        os.kill(self.pid, how)
        return self.outcome(os.waitpid(self.pid, 0)[1])

    def ended(self, patience_s: float = 60.0) -> str:
        """Wait until it ends by itself; return what it said if it failed or did not."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if wait_until(lambda: os.waitid(os.P_PID, self.pid, how), patience_s):
            return self.outcome(os.waitpid(self.pid, 0)[1])
        return f"{self.job.__name__} {self.number} has not ended{self.end(signal.SIGKILL)}"

    def outcome(self, status: int) -> str:
        """Return what a process said that failed by itself."""
        code = os.waitstatus_to_exitcode(status)
        if code in (0, -signal.SIGKILL):
            return ""
        said = self.log.read_text() if self.log.exists() else ""
        return f"{self.job.__name__} {self.number} ended with {code}: {said}"

    def failed(self) -> str:
        """Return what it said if it has ended though nobody told it to."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return "" if pid == 0 else self.outcome(status) or f"{self.job.__name__} {self.number} ended by itself"


class Watch:
    """Notes once a second how much a process holds: kilobytes of its own, descriptors, mappings."""

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0.0

    def look(self) -> None:
        """Note it, if a second has passed."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 1.0
        with open("/proc/self/status") as status:
            own = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
        with open("/proc/self/maps") as maps:
            mappings = sum(1 for _ in maps)
        with open(self._path, "a") as file:
            file.write(json.dumps([own, len(os.listdir("/proc/self/fd")), mappings]) + "\n")


LIMITS = [("own memory, KiB", 1.1, 8192), ("descriptors", 1.0, 12), ("mappings", 1.25, 200)]
"""What a long-lived process holds in the last quarter of its time: at most so many times as much as in the second, and
so much more. Mappings go up and down with the segments that are there."""


def growth(folder: Path) -> tuple[list[list[str]], list[str]]:
    """Compare what the long-lived processes held early and late; return rows of a table, and what is wrong."""
    rows, wrong = [], []
    for file in sorted(folder.glob("*.samples")):
        held = np.array([json.loads(line) for line in file.read_text().splitlines()])
        quarter = len(held) // 4
        if quarter < 10:
            continue
        early, late = np.median(held[quarter : 2 * quarter], 0), np.median(held[-quarter:], 0)
        for (what, times, more), one, other in zip(LIMITS, early, late, strict=True):
            rows.append([file.stem, what, f"{one:,.0f}", f"{other:,.0f}"])
            if other > times * one + more:
                wrong.append(f"{file.stem}: {what} grew from {one:,.0f} to {other:,.0f}")
    return rows, wrong
