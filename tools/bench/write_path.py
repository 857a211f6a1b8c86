"""Measure other ways to write: lanes, whole episodes, processes, and rolling from segment to segment."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import FRAME_SCHEMA, SCHEMA, single_steps
from tools.bench.harness import Contestant, Report, Seconds, Table, Target, in_turn, number, ratios, timed


class Size(NamedTuple):
    """The size of each part in a round."""

    lanes: tuple[int, ...]
    lane_rows: int  # at most, of all lanes together; of each lane at most `lane_steps`
    lane_steps: int
    episodes: int
    episode_frames: int
    process_steps: int
    processes: int
    roll_s: float


FULL = Size((8, 64, 512, 4096), 400_000, 400, 20, 500, 50_000, 4, 1.0)
TINY = Size((8, 64), 640, 20, 2, 3, 50, 2, 0.002)

# --- lanes -----------------------------------------------------------------------------------------------------------


def _vector_steps(lanes: int, count: int) -> Iterator[tuple[Any, ...]]:
    """Yield obs, action, reward, terminated, truncated, next_obs; each lane ends every 250th step, at its own time."""
    rng = np.random.default_rng(0)
    action, reward = rng.integers(0, 2, lanes), rng.standard_normal(lanes, np.float32)
    frames = rng.standard_normal((16, lanes, 4), np.float32)
    offset, never = rng.integers(0, 250, lanes), np.zeros(lanes, np.bool_)
    for t in range(count):
        # The next observation of a lane that ended is not its final one, as in vectors.
        yield frames[t % 16], action, reward, (t + offset) % 250 == 249, never, frames[(t + 1) % 16]


def _ours_of_lanes(stack: ExitStack, folder: Path, lanes: int, count: int) -> Contestant:
    store = stack.enter_context(dr.create(folder / f"lanes {lanes}", SCHEMA))
    writer = stack.enter_context(store.writer(num_envs=lanes))
    steps = list(_vector_steps(lanes, count))
    # The next round begins where no episode is open.
    return Contestant(_lanes_name(lanes), lambda: (timed(writer.append, steps), writer.end_episode())[0])


def _peer_of_lanes(folder: Path, lanes: int, count: int, rounds: int) -> Contestant:
    from tools.bench import torchrl_peer

    buffer = torchrl_peer.buffer("TorchRL ReplayBuffer", folder / f"peer {lanes}", lanes * count * (rounds + 1), 256)
    names = ("obs", "action", "reward", "done", "next_obs")
    steps = [(*step[:4], step[5]) for step in _vector_steps(lanes, count)]

    def extend(*values: Any) -> None:
        buffer.extend(torchrl_peer.rows(dict(zip(names, values, strict=True)), 0, lanes))

    return Contestant(_peer_name(lanes), lambda: timed(extend, steps))


def _lanes_name(lanes: int) -> str:
    return f"diskreplay, {lanes} lanes"


def _peer_name(lanes: int) -> str:
    return f"TorchRL ReplayBuffer.extend, {lanes} rows"


def _lanes(size: Size, rounds: int, folder: Path, peers: bool) -> tuple[list[Table], list[Target]]:
    rows, targets = [], []
    for lanes in size.lanes:
        count = min(size.lane_steps, size.lane_rows // lanes)
        with ExitStack() as stack:
            contestants = [_ours_of_lanes(stack, folder, lanes, count)]
            if peers:
                contestants.append(_peer_of_lanes(folder, lanes, count, rounds))
            seconds = in_turn(contestants, rounds)
        for name, taken in seconds.items():
            steps = np.concatenate(taken) * 1e6
            cells = [np.median(steps), np.percentile(steps, 99), steps.mean(), np.median(steps) / lanes]
            faster = ratios(seconds, _lanes_name(lanes), name)
            rows.append([name, *map(number, cells), number(np.median(faster)) if name == _peer_name(lanes) else ""])
        if lanes >= 512:
            each = float(np.median(np.concatenate(seconds[_lanes_name(lanes)]))) * 1e6 / lanes
            targets.append(Target(f"{lanes} lanes, median of a step, for each lane", each, 1, "µs"))
    header = ["one step of all lanes", "median µs", "p99 µs", "mean µs", "median µs a lane", "ours is faster, times"]
    return [Table(header, rows)], targets


# --- whole episodes --------------------------------------------------------------------------------------------------

OURS_WHOLE, PLAIN_FILE = "append_episode, then flush", "the same bytes into one plain file, then fdatasync"


def _whole(size: Size, rounds: int, folder: Path, peers: bool) -> tuple[list[Table], list[Target]]:
    frames = np.random.default_rng(0).integers(0, 256, (size.episode_frames + 1, *FRAME_SCHEMA.obs.shape), np.uint8)
    steps = size.episode_frames
    action, reward = np.zeros(steps, np.int64), np.ones(steps, np.float32)
    parts = [frames, action, reward, np.zeros(steps, np.uint8)]
    plain = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT, 0o666)
    with dr.create(folder / "whole", FRAME_SCHEMA) as store, store.writer() as writer:

        def ours() -> Seconds:
            started = perf_counter()
            for _ in range(size.episodes):
                writer.append_episode(frames, action, reward, terminated=True)
            writer.flush()
            return np.array([perf_counter() - started])

        def file() -> Seconds:
            started = perf_counter()
            for _ in range(size.episodes):
                for part in parts:
                    os.write(plain, part.data)
            os.fdatasync(plain)
            return np.array([perf_counter() - started])

        seconds = in_turn([Contestant(OURS_WHOLE, ours), Contestant(PLAIN_FILE, file)], rounds)
    os.close(plain)
    nbytes = sum(part.nbytes for part in parts) * size.episodes
    rows = [
        [name, number(nbytes / 2**20), number(np.median(taken)), number(nbytes / 2**20 / np.median(taken))]
        for name, taken in seconds.items()
    ]
    share = float(np.median(ratios(seconds, OURS_WHOLE, PLAIN_FILE)))
    header = [f"episodes of {size.episode_frames} frames", "MiB a round", "median s", "MiB/s"]
    return [Table(header, rows)], [Target("whole episodes, share of the plain file's bytes/s", share, 0.7, "", True)]


# --- processes -------------------------------------------------------------------------------------------------------


def _collect(path: str, steps: int, gate: Any, answers: Any) -> None:
    """Append steps; send the seconds that they took."""
    given = list(single_steps(steps, 10, 500))
    with dr.open(path, mode="a") as store, store.writer() as writer:
        writer.append(*given[0][:3], True, False, given[0][5])
        gate.wait()
        started = perf_counter()
        for step in given:
            writer.append(*step)
        answers.put(perf_counter() - started)


def _rate(path: Path, processes: int, steps: int) -> float:
    """Return the total steps/s of several processes."""
    context = multiprocessing.get_context("spawn")
    gate, answers = context.Barrier(processes), context.Queue()
    running = [context.Process(target=_collect, args=(str(path), steps, gate, answers)) for _ in range(processes)]
    for process in running:
        process.start()
    slowest = max(answers.get() for _ in running)
    for process in running:
        process.join()
    return processes * steps / slowest


def _processes(size: Size, rounds: int, folder: Path, peers: bool) -> tuple[list[Table], list[Target]]:
    path = folder / "processes"
    dr.create(path, SCHEMA).close()
    counts = (1, size.processes)
    rates = np.array([[_rate(path, count, size.process_steps) for count in counts] for _ in range(rounds)])
    gain = float(np.median(rates[:, 1] / rates[:, 0]))
    rows = [[str(count), f"{np.median(rates[:, i]):,.0f}"] for i, count in enumerate(counts)]
    target = Target(f"{counts[1]} processes beside one, on {os.cpu_count()} cores", gain, 1.6, "times", at_least=True)
    return [Table(["processes, one step at a time", "steps a second together"], rows)], [target]


# --- rolling ---------------------------------------------------------------------------------------------------------

ROLLING, STAYING = "rolling", "not rolling"


def _pace(folder: Path, wanted_s: float) -> int:
    """Return the number of steps that a writer appends in some seconds."""
    steps = list(single_steps(3000, 10, 500))
    with dr.create(folder / "pace", SCHEMA) as store, store.writer() as writer:
        started = perf_counter()
        timed(writer.append, steps)
        return max(len(steps) // 60, int(wanted_s * len(steps) / (perf_counter() - started)))


def _rolling(size: Size, rounds: int, folder: Path, peers: bool) -> tuple[list[Table], list[Target]]:
    a_second = _pace(folder, size.roll_s)
    steps = list(single_steps(2 * a_second, 10, 500))
    with ExitStack() as stack:
        contestants = []
        for name, segment_steps in ((ROLLING, a_second), (STAYING, None)):
            store = stack.enter_context(dr.create(folder / name, SCHEMA, segment_steps=segment_steps))
            append = stack.enter_context(store.writer()).append
            contestants.append(Contestant(name, lambda append=append: timed(append, steps)))
        seconds = in_turn(contestants, rounds)
    tails = {name: np.array([np.percentile(taken, 99.9) for taken in each]) * 1e6 for name, each in seconds.items()}
    rows = [
        [name, *map(number, (np.median(np.concatenate(seconds[name])) * 1e6, np.median(tail))), _slowest(seconds[name])]
        for name, tail in tails.items()
    ]
    header = [f"a segment of {a_second:,} steps, about {size.roll_s:g} s", "median µs", "p99.9 µs", "slowest ms"]
    ratio = float(np.median(tails[ROLLING] / tails[STAYING]))
    return [Table(header, rows)], [Target("99.9th percentile with rolling beside without", ratio, 1.5, "times")]


def _slowest(rounds: list[Seconds]) -> str:
    return number(np.median([taken.max() for taken in rounds]) * 1e3)


PARTS: tuple[Callable[[Size, int, Path, bool], tuple[list[Table], list[Target]]], ...] = (
    _lanes,
    _whole,
    _processes,
    _rolling,
)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Run all parts, one after the other."""
    tables: list[Table] = []
    targets: list[Target] = []
    for part in PARTS:
        more = part(size, rounds, folder, peers)
        tables += more[0]
        targets += more[1]
    return Report(
        "The write path",
        tables,
        targets,
        [
            "Lanes: CartPole's shape, next_obs given, episodes of 250 steps that end at other times in each lane. The "
            "peer gets one TensorDict of as many rows as there are lanes, made in the call.",
            f"Whole episodes: {size.episodes} of {size.episode_frames} frames (84, 84) uint8 a round, then one sync. "
            "The plain file gets the same bytes, one write for each array, in the same order, and one sync.",
            "Processes: a writer each on one store, all started at the same moment; the slowest counts.",
            "Rolling: two segments a round. The slowest call is the median over the rounds of the slowest in each.",
        ],
    )
