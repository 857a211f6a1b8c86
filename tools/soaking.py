"""Many writers and samplers on one store, killed at random, while old steps are evicted; then an exact account.

Every step says who wrote it, in which lane, and as the how-manieth. A writer notes each step in shared memory as soon
as `append` has returned, so it is known what must be there when it is killed.
"""

import argparse
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import diskreplay as dr
from diskreplay.format.layout import NEXT_SEGMENT
from diskreplay.format.root import read_root
from diskreplay.testing.coded import (
    check_coded_batch,
    check_coded_store,
    coded_obs,
    coded_schema,
    coded_step,
    make_codes,
)
from tools.bench.harness import Report, Table

RESULT = Path(__file__).parent / "soak_result.md"
LANES = 3
MOST_WRITERS = 1 << 16
# A vector's call appends a step of each lane, and an episode in one piece has at most so many.
LONGEST_BLOCK = 40
ROWS_A_SEGMENT = 4096
SAMPLES = "samples.json"


@dataclass(frozen=True)
class Plan:
    """What is run: for so many seconds or kills, whichever comes first."""

    seconds: float = 600.0
    kills: int = 1 << 30
    writers: int = 4
    samplers: int = 2
    kill_every: float = 0.3
    capacity: int = 200_000
    check_every: int = 50
    seed: int = 0


@dataclass
class Account:
    """What came out."""

    kills: int = 0
    writer_kills: int = 0
    checks: int = 0
    committed: int = 0
    kept: int = 0
    evicted: int = 0
    batches: int = 0
    seconds: float = 0.0
    slowest_open_s: float = 0.0
    growth: list[list[str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Board:
    """How many steps of each lane each writer has appended: memory that all processes share, and that outlives them."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, MOST_WRITERS * LANES * 8)
        self.counts = np.frombuffer(self._memory, np.int64).reshape(MOST_WRITERS, LANES)


# --- what the processes do -------------------------------------------------------------------------------------------


def write(path: Path, number: int, seed: int, board: Board, stop: Callable[[], bool]) -> None:
    """Append until told to stop: steps of one environment or of several, with and without their next observations."""
    rng = random.Random(seed)
    counts = board.counts[number]
    with dr.open(path, "a") as store:
        lanes = LANES if number % 2 else None
        durability = rng.choice(["none", "none", "none", "episode", 0.2])
        with store.writer(num_envs=lanes, durability=durability) as writer:
            while not stop():
                for _ in range(rng.randrange(1, 60)):
                    (_append_one if lanes is None else _append_some)(writer, number, counts, rng)
                time.sleep(rng.random() * 0.01)


def _append_one(writer: Any, number: int, counts: Any, rng: random.Random) -> None:
    count, kind = int(counts[0]), rng.random()
    if kind < 0.01:
        steps = rng.randrange(1, LONGEST_BLOCK)
        codes = make_codes(number, 0, count + np.arange(steps + 1))
        block = {**coded_step(codes[:-1]), "obs": coded_obs(codes)}
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


def sample(path: Path, number: int, seed: int, board: Board, stop: Callable[[], bool]) -> None:
    """Draw batches and check every value of them until told to stop; every other sampler has priorities and saves."""
    saves = number % 2 == 1
    distribution = dr.Prioritized() if saves else dr.Uniform()
    with dr.open(path, "a" if saves else "r") as store:
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
                    sampler.save(f"soak-{number % 8}")
            time.sleep(0.002)
        sampler.close()


# --- the processes ---------------------------------------------------------------------------------------------------


class Child:
    """A forked process that does one of these."""

    def __init__(self, job: Any, path: Path, number: int, seed: int, board: Board, *, spared: bool = False) -> None:
        self.job, self.number, self.spared = job, number, spared
        self.since = 0  # the number of the first segment that it may have made
        self.log = path.parent / f"{job.__name__}-{number}.log"
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._run(path, seed, board)
                code = 0
            except BaseException:
                self.log.write_text(traceback.format_exc())
            finally:
                os._exit(code)

    def _run(self, path: Path, seed: int, board: Board) -> None:
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        watch = Watch(self.log.with_suffix(".samples")) if self.spared else None

        def stop() -> bool:
            if watch is not None:
                watch.look()
            return bool(told)

        self.job(path, self.number, seed, board, stop)

    def end(self, how: signal.Signals) -> str:
        """Signal it and wait; return what it said if it failed."""
        os.kill(self.pid, how)
        return self.outcome(os.waitpid(self.pid, 0)[1])

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


def growth(path: Path) -> tuple[list[list[str]], list[str]]:
    """Compare what the long-lived processes held early and late; return rows of a table, and what is wrong."""
    rows, wrong = [], []
    for file in sorted(path.parent.glob("*.samples")):
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


# --- the account -----------------------------------------------------------------------------------------------------


class Soak:
    """One run: starts processes, kills them, and counts what is left."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._path = plan, folder / "store"
        self._rng, self._board = random.Random(plan.seed), Board()
        self._children: list[Child] = []
        self._started = 0
        # Steps of each lane of a writer that has died; what a lane has is exact once its writer is dead.
        self._ends: dict[tuple[int, int], int] = {}
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
        try:
            while time.monotonic() - begun < plan.seconds and account.kills < plan.kills and not account.problems:
                time.sleep(min(self._rng.expovariate(1 / plan.kill_every), 10 * plan.kill_every))
                self._kill_one()
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
        self._children.append(Child(job, self._path, number, seed, self._board, spared=spared))
        self._children[-1].since = since

    def _kill_one(self) -> None:
        account = self.account
        account.problems += [text for child in self._children if (text := child.failed())]
        victims = [child for child in self._children if not child.spared]
        if account.problems or not victims:
            return
        writers = [child for child in victims if child.job is write]
        victim = self._rng.choice(writers if writers and self._rng.random() < 0.85 else victims)
        if victim.job is write and self._rng.random() < 0.8:
            # On a busy machine most would be dead before their first step.
            until = time.monotonic() + 10
            while not self._board.counts[victim.number].any() and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(self._rng.random() * 0.05)
        account.problems += filter(None, [victim.end(signal.SIGKILL)])
        account.kills += 1
        self._children.remove(victim)
        # While the others stand still, nothing that is looked at here is evicted.
        for child in self._children:
            os.kill(child.pid, signal.SIGSTOP)
        if victim.job is write:
            account.writer_kills += 1
            self._note_end(victim)
        if account.kills % self._plan.check_every == 0:
            self._check()
        for child in self._children:
            os.kill(child.pid, signal.SIGCONT)
        self._start(victim.job, like=victim.number)
        if account.kills % 100 == 0:
            print(f"{account.kills} killed, {sum(self._ends.values())} steps", file=sys.stderr, flush=True)

    def _end_all(self) -> None:
        for child in self._children:
            self.account.problems += filter(None, [child.end(signal.SIGTERM)])
        for child in self._children:
            if child.job is write:
                self._note_end(child)
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
                code = int(episode.action[-1, 0])
                if code >> 44 == number:
                    lane = (code >> 36) & 255
                    newest.setdefault(lane, (code & ((1 << 36) - 1)) + 1)
                    if len(newest) == (LANES if number % 2 else 1):
                        break
        for lane in range(LANES):
            noted = int(self._board.counts[number, lane])
            found = newest.get(lane, noted if noted == 0 else -1)
            if not noted <= found <= noted + LONGEST_BLOCK:
                self.account.problems.append(f"writer {number}, lane {lane}: noted {noted} steps, found {found}")
            self._ends[number, lane] = found

    def _check(self) -> None:
        """Look at every value of the whole store."""
        self.account.checks += 1
        with self._opened() as store:
            try:
                spans = check_coded_store(store)
            except AssertionError as error:
                self.account.problems.append(str(error))
                return
        for key, span in spans.items():
            if key in self._ends and span.stop != self._ends[key]:
                self.account.problems.append(f"lane {key} ended at {self._ends[key]}, and now at {span.stop}")

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
        held = sum(segment["steps"] for segment in info["segments"])
        account.committed = sum(self._ends.values())
        account.evicted = account.committed - account.kept
        if held + info["steps_evicted"] != account.committed:
            account.problems.append(
                f"{account.committed} steps were committed; {held} are held and {info['steps_evicted']} deleted"
            )
        if account.kept != min(self._plan.capacity, account.committed):
            account.problems.append(f"{account.kept} of {account.committed} steps are visible")
        if any(segment["state"] != "sealed" for segment in info["segments"]):
            account.problems.append("a dead writer's segment is not sealed")
        if left := [name for name in os.listdir(self._path / "counters") if name not in ("c.0", "lock", "zarr.json")]:
            account.problems.append(f"{left} were left behind")
        samplers = [number for number, job in self._kinds.items() if job is sample]
        account.batches = int(self._board.counts[samplers, 0].sum())
        account.growth, wrong = growth(self._path)
        account.problems += wrong


# --- the command -----------------------------------------------------------------------------------------------------


def page(account: Account, command: str, folder: Path) -> str:
    """Return the result as a page."""
    rows = [
        ["seconds", f"{account.seconds:,.0f}"],
        ["processes killed by SIGKILL", f"{account.kills:,}"],
        ["of them writers", f"{account.writer_kills:,}"],
        ["steps committed", f"{account.committed:,}"],
        ["steps evicted by the capacity", f"{account.evicted:,}"],
        ["steps kept, each there once", f"{account.kept:,}"],
        ["checks of every value in the store", f"{account.checks:,}"],
        ["batches drawn, every value checked", f"{account.batches:,}"],
        ["slowest open, s", f"{account.slowest_open_s:.2f}"],
        ["steps lost, torn or doubled, findings of verify --deep, processes that failed", f"{len(account.problems)}"],
    ]
    tables = [Table(["what", "count"], rows)]
    if account.growth:
        tables.append(Table(["long-lived process", "holds", "second quarter", "last quarter"], account.growth))
    return Report("Soak", tables, caveats=account.problems).markdown(command, folder)


def parser() -> argparse.ArgumentParser:
    """Describe the arguments."""
    made = argparse.ArgumentParser(prog="tools/soak", description="Write, sample, kill and evict; then count steps.")
    defaults = Plan()
    made.add_argument("--seconds", type=float, default=defaults.seconds, help="how long, at most")
    made.add_argument("--kills", type=int, default=defaults.kills, help="how many processes are killed, at most")
    made.add_argument("--writers", type=int, default=defaults.writers, help="every other one of several environments")
    made.add_argument("--samplers", type=int, default=defaults.samplers)
    made.add_argument("--kill-every", type=float, default=defaults.kill_every, help="mean of the seconds between kills")
    made.add_argument("--capacity", type=int, default=defaults.capacity, help="steps that the store keeps")
    made.add_argument("--check-every", type=int, default=defaults.check_every, help="kills between two full checks")
    made.add_argument("--seed", type=int, default=defaults.seed)
    made.add_argument("--folder", type=Path, help="where the store goes for the time being; otherwise the system's")
    made.add_argument("--save", action="store_true", help=f"write tools/{RESULT.name}")
    return made


def main() -> None:
    """Run what the command line says; exit code 1 where anything was wrong."""
    given = parser().parse_args()
    plan = Plan(
        seconds=given.seconds,
        kills=given.kills,
        writers=given.writers,
        samplers=given.samplers,
        kill_every=given.kill_every,
        capacity=given.capacity,
        check_every=given.check_every,
        seed=given.seed,
    )
    with tempfile.TemporaryDirectory(prefix="diskreplay-soak-", dir=given.folder) as temporary:
        folder = Path(temporary)
        account = Soak(plan, folder).run()
        arguments = [argument for argument in sys.argv[1:] if argument != "--save"]
        text = page(account, " ".join(["tools/soak", *arguments]), folder)
    print(text, flush=True)
    if given.save:
        RESULT.write_text(text, encoding="utf-8")
    sys.exit(1 if account.problems else 0)


if __name__ == "__main__":
    main()
