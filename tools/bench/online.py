"""Append a step and draw a batch, like an agent that learns while it collects; and draw from a growing store."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench import ram_peers
from tools.bench.data import GAMMA, N_STEP, SCHEMA, single_steps
from tools.bench.harness import (
    OURS,
    Contestant,
    Report,
    Seconds,
    Table,
    Target,
    draw,
    faster,
    in_turn,
    number,
    ratio_table,
    timed,
    timing_table,
)


class Size(NamedTuple):
    """The capacity of a full store; steps of all before the first round; steps of a round; sizes of growing stores.

    A full store begins a segment for each quarter of its capacity, and evicts one; it does so equally often in a round.
    """

    capacity: int
    steps: int
    grown: int
    batches: int
    most_lanes: int = 4096
    batch_size: int = 256


FULL, TINY = Size(100_000, 25_000, 20_000, 100), Size(200, 5, 300, 3, 64, 16)

OURS_FULL = f"{OURS}, full store"
TORCHRL = "TorchRL, memory-mapped"
FIELDS = ("obs", "action", "reward", "next_obs", "discount")
ALPHA, BETA = 0.6, 0.4

# Faster than each peer: ours without a capacity, and a full store; uniform, and with priorities.
WANTED = {
    (OURS, False): {ram_peers.CPPRB: 1.5, ram_peers.SB3: 2.2, ram_peers.TIANSHOU: 2.2, TORCHRL: 10.0},
    (OURS, True): {ram_peers.CPPRB: 4.5, ram_peers.TIANSHOU: 2.2},
    (OURS_FULL, False): {ram_peers.CPPRB: 1.4},
    (OURS_FULL, True): {ram_peers.CPPRB: 4.0},
}


class Growth(NamedTuple):
    """A growing store: lanes of each writer, writers, whether it is prioritized, and the target ratio."""

    lanes: int
    writers: int
    prioritized: bool
    wanted: float

    def __str__(self) -> str:
        lanes, writers = (
            f"{n:,} {what}{'s' * (n > 1)}" for n, what in ((self.lanes, "lane"), (self.writers, "writer"))
        )
        return f"{lanes}, {writers}{', priorities' * self.prioritized}"


GROWING = [
    Growth(1, 1, False, 1.5),
    Growth(1, 4, False, 1.5),
    Growth(1, 16, False, 2.0),
    Growth(64, 1, False, 1.5),
    Growth(512, 1, False, 2.0),
    Growth(4096, 1, False, 2.5),
    Growth(1024, 1, True, 2.5),
]


def _ours(store: dr.Store, stack: ExitStack, prioritized: bool, size: Size) -> tuple[Callable[..., Any], Any]:
    """Return a function that appends a step, and one that draws a batch and updates its priorities, if any."""
    writer = stack.enter_context(store.writer())
    view = dr.Transitions(n_step=N_STEP if prioritized else 1, gamma=GAMMA)
    distribution = dr.Prioritized(ALPHA, BETA) if prioritized else dr.Uniform()
    sampler = stack.enter_context(dr.Sampler(store, view, distribution, batch_size=size.batch_size, seed=0))
    td_error = np.random.default_rng(0).random(size.batch_size)

    def step() -> None:
        batch = draw(sampler.sample, FIELDS)
        if prioritized:
            sampler.update_priorities(batch.index, td_error)

    return writer.append, step


def _torchrl(folder: Path, size: Size) -> tuple[Callable[..., Any], Callable[[], Any]]:
    from tools.bench import torchrl_peer

    buffer = torchrl_peer.buffer("TorchRL ReplayBuffer", folder / "torchrl", 1_000_000, size.batch_size)

    def add(obs: Any, action: int, reward: float, terminated: bool, truncated: bool, next_obs: Any) -> None:
        buffer.add(torchrl_peer.transition(obs, action, reward, terminated, next_obs))

    return add, partial(draw, buffer.sample, ("obs", "action", "reward", "next_obs", "done"))


def _contestants(
    folder: Path, stack: ExitStack, prioritized: bool, size: Size, peers: bool
) -> Iterator[tuple[str, Callable[..., Any], Callable[[], Any]]]:
    for name, capacity in ((OURS, None), (OURS_FULL, size.capacity)):
        store = stack.enter_context(dr.create(folder / f"{name} {prioritized}", SCHEMA, capacity=capacity))
        yield name, *_ours(store, stack, prioritized, size)
    if peers:
        for name in ram_peers.INSTALLED:
            made = ram_peers.online(name, SCHEMA, size.batch_size, N_STEP if prioritized else 1, GAMMA, ALPHA, BETA)
            if made is not None:
                yield name, *made
        if not prioritized:
            yield TORCHRL, *_torchrl(folder, size)


def _loop(add: Callable[..., Any], step: Callable[[], Any], steps: Iterator[Any], count: int) -> Seconds:
    """Append a step and draw a batch in each call; return the seconds of both together."""

    def both(*values: Any) -> None:
        add(*values)
        step()

    return timed(both, (next(steps) for _ in range(count)))


def _loops(prioritized: bool, size: Size, rounds: int, folder: Path, peers: bool) -> tuple[list[Table], list[Target]]:
    contestants = []
    with ExitStack() as stack:
        for name, add, step in _contestants(folder, stack, prioritized, size, peers):
            steps = chain.from_iterable(single_steps(10_000, 10, 500, seed) for seed in range(1 << 20))
            for _ in range(size.capacity):
                add(*next(steps))
            contestants.append(Contestant(name, partial(_loop, add, step, steps, size.steps)))
        seconds = in_turn(contestants, rounds)
    what = f"append, sample and update, {N_STEP}-step priorities" if prioritized else "append and sample, uniform"
    tables = [timing_table(seconds, what)]
    others = [name for name in seconds if name not in (OURS, OURS_FULL)]
    if others:
        tables.append(ratio_table(seconds, [(ours, peer) for ours in (OURS, OURS_FULL) for peer in others]))
    targets = [
        target
        for (ours, of), wanted in WANTED.items()
        if of == prioritized
        for target in faster(seconds, wanted, f"{what}{', full store' * (ours == OURS_FULL)}: ", ours)
    ]
    return tables, targets


class _Growing:
    """A store with writers that all append a step before each batch."""

    def __init__(self, growth: Growth, size: Size, folder: Path, stack: ExitStack) -> None:
        self.growth, self._batches, lanes = growth, size.batches, growth.lanes
        store = stack.enter_context(dr.create(folder / f"{growth}", SCHEMA))
        self._writers = [stack.enter_context(store.writer(lanes)) for _ in range(growth.writers)]
        self._rng = np.random.default_rng(0)
        zeros = np.zeros(lanes)
        self._step = np.zeros((lanes, 4), np.float32), np.zeros(lanes, np.int64), zeros
        self._never = np.zeros(lanes, np.bool_)
        for _ in range(max(50, size.grown // (lanes * growth.writers))):
            self._append()
        distribution = dr.Prioritized(ALPHA, BETA) if growth.prioritized else dr.Uniform()
        arguments = {"batch_size": size.batch_size, "seed": 0}
        self._sample = stack.enter_context(dr.Sampler(store, dr.Transitions(), distribution, **arguments)).sample
        self.growing: list[float] = []
        self.at_rest: list[float] = []

    def _append(self) -> None:
        for writer in self._writers:
            ended = self._rng.random(self.growth.lanes) < 1 / 255
            writer.append(*self._step, ended, self._never, self._step[0])

    def round(self, counts: bool) -> None:
        """Draw batches of the growing stores, twice of each: before the first one, caches are full of other stores."""
        for batch in range(self._batches + 1):
            self._append()
            started = perf_counter_ns()
            draw(self._sample, FIELDS)
            between = perf_counter_ns()
            draw(self._sample, FIELDS)
            if counts and batch > 0:
                self.growing.append((between - started) / 1e3)
                self.at_rest.append((perf_counter_ns() - between) / 1e3)


def _grow(size: Size, rounds: int, folder: Path) -> tuple[Table, list[Target]]:
    rows, targets = [], []
    with ExitStack() as stack:
        stores = [_Growing(growth, size, folder, stack) for growth in GROWING if growth.lanes <= size.most_lanes]
        for number_ in range(-1, rounds):
            for store in stores:
                store.round(number_ >= 0)
    for store in stores:
        growing, at_rest = np.median(store.growing), np.median(store.at_rest)
        high = np.percentile(store.growing, 99)
        what = str(store.growth)
        cells = [growing, high, at_rest, growing / at_rest, high / growing]
        rows.append([what, *map(number, cells), str(len(store.growing))])
        targets.append(Target(f"{what}: beside a batch at rest", growing / at_rest, store.growth.wanted, "times"))
        targets.append(Target(f"{what}: 99th percentile beside the median", high / growing, 3.0, "times"))
    header = [
        "one batch",
        "growing, median µs",
        "p99 µs",
        "at rest, median µs",
        "growing / at rest",
        "p99 / median",
        "n",
    ]
    return Table(header, rows), targets


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Collect and learn in one loop; then let writers of many lanes append before each batch."""
    tables: list[Table] = []
    targets: list[Target] = []
    for prioritized in (False, True):
        more, met = _loops(prioritized, size, rounds, folder, peers)
        tables, targets = tables + more, targets + met
    grown, met = _grow(size, rounds, folder)
    return Report(
        "A store that grows",
        [*tables, grown],
        [*targets, *met],
        [
            f"Steps of CartPole's shape in episodes of 10 to 500; batches of {size.batch_size}. Each contestant holds "
            f"{size.capacity:,} steps before the first round, and gets {size.steps:,} more in each: one is appended, "
            "one batch is drawn, and its priorities are set where there are some. A full store has a capacity of "
            f"{size.capacity:,}, so that a step leaves for each that comes; in each round it begins a segment, seals "
            "one and deletes one.",
            f"With priorities ours makes {N_STEP}-step returns as it draws, cpprb has made them before it stores them, "
            "Tianshou makes none in this row.",
            "Below, all writers append one step in each lane before each batch, in the sampler's process; only the "
            "batch is timed, and then another one of the same store. An episode ends after 255 steps on average. "
            "Stores take turns; the first batch of a turn, which finds the caches full of other stores, is not "
            "counted.",
            ram_peers.MISSING_ARE_LEFT_OUT,
        ],
    )
