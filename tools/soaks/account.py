"""One soak: processes that are started and killed, and an exact account of the steps that they left."""

import os
import random
import shutil
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import diskreplay as dr
from diskreplay.segments.documents.layout import NEXT_SEGMENT
from diskreplay.segments.documents.root import read_root
from tests.testing.coded import Span, check_coded_parts, coded_schema, split_codes
from tools.soaks.jobs import (
    LANES,
    LONGEST_BLOCK,
    Board,
    Child,
    Place,
    come_and_go,
    compact,
    evict,
    growth,
    inspect,
    outlive,
    sample,
    wait_until,
    write,
)

ROWS_A_SEGMENT = 4096


@dataclass(frozen=True)
class Plan:
    """What is run: for so many seconds or kills, whichever comes first."""

    seconds: float = 600.0
    kills: int = 1 << 30
    writers: int = 4
    samplers: int = 2
    others: int = 1  # of each: who evicts by hand, opens and closes, verifies and repairs, compacts
    kill_every: float = 0.3
    stop_every: float = 120.0  # a process stands still for longer than any lock is waited for
    stop_s: float = 70.0
    move_every: float = 60.0
    capacity: int = 200_000
    check_every: int = 50
    seed: int = 0


@dataclass
class Account:
    """What came out."""

    kills: int = 0
    writer_kills: int = 0
    stops: int = 0
    moves: int = 0
    checks: int = 0
    committed: int = 0
    kept: int = 0
    evicted: int = 0
    evicted_by_hand: int = 0
    inspections: int = 0
    merged: int = 0
    batches: int = 0
    seconds: float = 0.0
    slowest_open_s: float = 0.0
    growth: list[list[str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Soak:
    """One run: starts processes, kills them, and counts what is left."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._path, self._place = plan, folder / "store", Place(folder)
        self._place.put(self._path)
        self._rng, self._board = random.Random(plan.seed), Board()
        self._children: list[Child] = []
        self._started = 0
        # Steps of each lane of a writer that has died; what a lane has is exact once its writer is dead.
        self._ends: dict[tuple[int, int], int] = {}
        # How many steps more they may be where all of a lane had been evicted when its writer died.
        self._unseen = 0
        self._kinds: dict[int, Any] = {}
        self.account = Account()

    def run(self) -> Account:
        """Run it all."""
        plan, account = self._plan, self.account
        schema = coded_schema()
        dr.create(self._path, schema, capacity=plan.capacity, segment_steps=ROWS_A_SEGMENT, chunk_bytes=1 << 16).close()
        self._root = read_root(self._path)
        if plan.samplers > 1:
            _ = dr.Sampler  # loaded once, and not by each process that is forked
        begun = time.monotonic()
        # To see whether they grow, the first sampler is never killed, nor the first of more than two writers.
        for i in range(plan.writers):
            self._start(write, like=i, spared=i == 0 and plan.writers > 2)
        for i in range(plan.samplers):
            self._start(sample, like=i, spared=i == 0)
        for job in (evict, come_and_go, inspect, compact):
            for i in range(plan.others):
                self._start(job, like=i)
        stop_at, move_at = begun + plan.stop_every, begun + plan.move_every
        try:
            while time.monotonic() - begun < plan.seconds and account.kills < plan.kills and not account.problems:
                time.sleep(min(self._rng.expovariate(1 / plan.kill_every), 10 * plan.kill_every))
                self._kill_one()
                if time.monotonic() > stop_at:
                    self._put_to_sleep()
                    stop_at = time.monotonic() + self._rng.expovariate(1 / plan.stop_every)
                if time.monotonic() > move_at and not account.problems:
                    self._move()
                    move_at = time.monotonic() + plan.move_every
        finally:
            self._end_all()
        account.seconds = time.monotonic() - begun
        self._settle()
        return account

    def _start(self, job: Any, *, like: int = 0, spared: bool = False) -> None:
        """Start a process; what it does depends on whether its number is even, as `like` is."""
        number = self._started + (self._started - like) % 2
        self._started = number + 1
        self._kinds[number] = job
        seed, since = self._rng.randrange(1 << 30), self._root.counters().peek(NEXT_SEGMENT)
        self._children.append(Child(job, self._place, number, seed, self._board, spared=spared))
        self._children[-1].since = since

    def _kill_one(self) -> None:
        account = self.account
        self._bury()
        victims = [child for child in self._children if not child.spared]
        if account.problems or not victims:
            return
        writers = [child for child in victims if child.job is write]
        victim = self._rng.choice(writers if writers and self._rng.random() < 0.85 else victims)
        if victim.job is write and self._rng.random() < 0.8:
            # On a busy machine most would be dead before their first step.
            wait_until(self._board.counts[victim.number].any, 10)
            time.sleep(self._rng.random() * 0.05)
        self._children.remove(victim)
        # While the others stand still, nothing that is looked at here is evicted.
        self._stop_all()
        account.problems += filter(None, [victim.end(signal.SIGKILL)])
        account.kills += 1
        if victim.job is write:
            account.writer_kills += 1
            self._note_end(victim)
        if account.kills % self._plan.check_every == 0:
            self._check()
        self._go_on()
        self._start(victim.job, like=victim.number)
        if account.kills % 100 == 0:
            print(f"{account.kills} killed, {sum(self._ends.values())} steps", file=sys.stderr, flush=True)

    def _bury(self) -> None:
        """Note which processes have ended by themselves, and what they said."""
        told = {child.number: child.failed() for child in self._children}
        self._children = [child for child in self._children if not told[child.number]]
        self.account.problems += filter(None, told.values())

    def _stop_all(self) -> None:
        for child in self._children:
            os.kill(child.pid, signal.SIGSTOP)

    def _go_on(self, *, also_sleepers: bool = False) -> None:
        """Let go on what does not sleep. Before the segments of writers that may be killed, episodes may be evicted."""
        since = [child.since for child in self._children if child.job is write and not child.spared]
        self._board.evictable[0] = min(since, default=0)
        for child in self._children:
            if also_sleepers or child.sleeps_until < time.monotonic():
                os.kill(child.pid, signal.SIGCONT)

    def _put_to_sleep(self) -> None:
        """Stop a process wherever it is, with whatever it holds, for longer than anybody waits for a lock."""
        sleeper = self._rng.choice([child for child in self._children if not child.spared])
        os.kill(sleeper.pid, signal.SIGSTOP)
        sleeper.sleeps_until = time.monotonic() + self._plan.stop_s
        self.account.stops += 1

    def _move(self) -> None:
        """Move the store to where another one is, whose writer lives on; that one is deleted."""
        self._go_on()
        number = self._started
        target = self._place.folder / f"decoy-{number}"
        kwargs = {"segment_steps": ROWS_A_SEGMENT, "chunk_bytes": 1 << 16}
        dr.create(target, coded_schema(), **kwargs).close()
        self._start(outlive, like=number, spared=True)
        orphan = self._children.pop()
        if not wait_until(self._board.counts[number].any, 60):
            self.account.problems.append(f"the writer of {target.name} did nothing for a minute")
        self._stop_all()
        os.kill(orphan.pid, signal.SIGSTOP)
        shutil.rmtree(target)
        os.rename(self._path, target)
        self._path = target
        self._place.put(target)
        os.kill(orphan.pid, signal.SIGCONT)
        self._go_on()
        self.account.problems += filter(None, [orphan.ended()])
        self.account.moves += 1

    def _end_all(self) -> None:
        self._bury()
        self._go_on(also_sleepers=True)
        for child in self._children:
            self.account.problems += filter(None, [child.end(signal.SIGTERM)])
            for lane in range(LANES * (child.job is write)):
                # It stopped between two steps: what it noted is exact.
                self._ends[child.number, lane] = int(self._board.counts[child.number, lane])
        self._children.clear()

    def _opened(self) -> Any:
        begun = time.monotonic()
        store = dr.open(self._path)
        self.account.slowest_open_s = max(self.account.slowest_open_s, time.monotonic() - begun)
        return store

    def _note_end(self, child: Child) -> None:
        """Find out how far a dead writer came: all that it had noted, and perhaps the call that it died in."""
        number = child.number
        with self._opened() as store:
            newest: dict[int, int] = {}
            for episode in reversed(store.episodes):
                if episode.segment < child.since:
                    break
                writer, lane, counter = map(int, split_codes(episode.action[-1, 0]))
                if writer == number:
                    newest.setdefault(lane, counter + 1)
                    if len(newest) == (LANES if number % 2 else 1):
                        break
            is_full = len(store) == self._plan.capacity
        for lane in range(LANES):
            noted = int(self._board.counts[number, lane])
            found = newest.get(lane, noted if noted == 0 else -1)
            if found < 0 and is_full:  # others have filled the capacity in newer segments
                found, self._unseen = noted, self._unseen + LONGEST_BLOCK
            if not noted <= found <= noted + LONGEST_BLOCK:
                self.account.problems.append(f"writer {number}, lane {lane}: noted {noted} steps, found {found}")
            self._ends[number, lane] = found

    def _check(self) -> None:
        """Look at every value of the whole store."""
        self.account.checks += 1
        with self._opened() as store:
            try:
                spans = check_coded_parts(store)
            except AssertionError as error:
                self.account.problems.append(str(error))
                return
        by_hand = self._evicted_by_hand()
        for key, parts in spans.items():
            if self._kinds.get(key[0]) is not write:
                self.account.problems.append(f"lane {key} is of a writer of another store")
            # What a living writer has appended is not known; and the oldest steps may have left.
            end = self._ends.get(key, parts[-1].stop)
            for before, after in zip(parts, [*parts[1:], Span(end, end)], strict=True):
                if left := set(range(before.stop, after.first)) - by_hand[key]:
                    self.account.problems.append(f"lane {key} to {end}: {parts}, without steps {sorted(left)[:9]}")
            if parts[-1].stop > end:
                self.account.problems.append(f"lane {key} ended at {end}, and now at {parts[-1].stop}")

    def _evicted_by_hand(self) -> dict[tuple[int, int], set[int]]:
        """Return the steps of each lane that were chosen to be evicted."""
        found: dict[tuple[int, int], set[int]] = defaultdict(set)
        for file in self._place.folder.glob("evicted-*"):
            for writer, lane, first, stop in np.fromfile(file, np.int64).reshape(-1, 4).tolist():
                found[writer, lane].update(range(first, stop))
        return found

    def _settle(self) -> None:
        """Let the next process with write access seal what died, verify, and count."""
        account = self.account
        with dr.open(self._path, "a"):
            pass
        self._check()
        with self._opened() as store:
            account.problems += [f"verify: {problem}" for problem in store.verify(deep=True)]
            info = store.info()
            account.kept = len(store)
        account.committed = sum(self._ends.values())
        account.evicted = account.committed - account.kept
        account.evicted_by_hand = sum(map(len, self._evicted_by_hand().values()))
        if not 0 <= info["steps_inserted"] - account.committed <= self._unseen:
            account.problems.append(f"{account.committed} steps were committed, and {info['steps_inserted']} inserted")
        most = min(self._plan.capacity, account.committed)
        if not most - account.evicted_by_hand <= account.kept <= most:
            account.problems.append(f"{account.kept} of {account.committed} steps are visible")
        if info["quarantine"]["entries"]:
            account.problems.append(f"in quarantine: {info['quarantine']}")
        if any(segment["state"] != "sealed" for segment in info["segments"]):
            account.problems.append("a dead writer's segment is not sealed")
        if left := [name for name in os.listdir(self._path / "counters") if name not in ("c.0", "lock", "zarr.json")]:
            account.problems.append(f"{left} were left behind")
        account.batches, account.inspections, account.merged = map(self._counted, (sample, inspect, compact))
        account.growth, wrong = growth(self._place.folder)
        account.problems += wrong

    def _counted(self, job: Any) -> int:
        """Return what the processes with a job have counted."""
        numbers = [number for number, kind in self._kinds.items() if kind is job]
        return int(self._board.counts[numbers, 0].sum())
