"""Draw from a store that evicts while four processes write to it, compared with a store that keeps everything."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import SCHEMA, append_whole, episodes, single_steps
from tools.bench.harness import Contestant, Report, Seconds, Target, in_turn, ratio_table, ratios, timed, timing_table


class Size(NamedTuple):
    """The capacity of the store, batches in each turn of a round, and steps/s of a writer."""

    capacity: int
    batches: int
    turns: int
    steps_per_second: int
    batch_size: int = 256
    shortest: int = 10
    longest: int = 500


FULL, TINY = Size(1_000_000, 500, 20, 5_000), Size(4_000, 10, 2, 2_000, 16, 3, 20)

WRITERS = 4
N_STEP = 5
KINDS = {"evicting": True, "keeping everything": False}
EVICTING, KEEPING = KINDS
LEAST = 0.9
_AT_ONCE_S = 0.005
_IDLE, _STOP = -1, -2


def _write(paths: list[str], number: int, size: Size, turn: Any, ready: Any) -> None:
    """Append steps at a steady rate, one by one, to the store whose turn it is."""
    parent = multiprocessing.parent_process()
    with ExitStack() as stack:
        stores = [stack.enter_context(dr.open(path, "a")) for path in paths]
        writers = [stack.enter_context(store.writer()) for store in stores]
        steps = list(single_steps(20_000, size.shortest, size.longest, seed=number))
        at = [0] * len(writers)
        ready.release()
        due, due_since = 0.0, time.monotonic()
        while (now := turn.value) != _STOP and parent is not None and parent.is_alive():
            time.sleep(_AT_ONCE_S)
            elapsed, due_since = time.monotonic() - due_since, time.monotonic()
            if now == _IDLE:
                continue
            due += min(elapsed, 0.1) * size.steps_per_second
            while due >= 1:
                *values, next_obs = steps[at[now] % len(steps)]
                writers[now].append(*values, next_obs=next_obs)
                at[now], due = at[now] + 1, due - 1


@contextmanager
def _writing(paths: list[str], size: Size) -> Iterator[Any]:
    """Yield a shared number, which selects the store that all writers write to."""
    context = multiprocessing.get_context("spawn")
    turn, ready = context.Value("i", _IDLE, lock=False), context.Semaphore(0)
    children = [context.Process(target=_write, args=(paths, i, size, turn, ready)) for i in range(WRITERS)]
    for child in children:
        child.start()
    try:
        for _ in children:
            ready.acquire()
        yield turn
    finally:
        turn.value = _STOP
        for child in children:
            child.join()


def _round(store: Any, sampler: Any, turn: Any, place: int, batches: int, busy: list[float]) -> Seconds:
    """Draw batches while the writers append to this sampler's store; add the processor time in seconds to `busy`."""
    turn.value = place
    try:
        while not store.refresh():
            time.sleep(_AT_ONCE_S)
        started = time.thread_time()
        taken = timed(sampler.sample, [()] * batches)
        busy.append(time.thread_time() - started)
        return taken
    finally:
        turn.value = _IDLE


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw from both stores in turn, each under the same writers."""
    paths = [str(folder / name) for name in KINDS]
    for path, evicts in zip(paths, KINDS.values(), strict=True):
        with dr.create(path, SCHEMA, capacity=size.capacity if evicts else None) as store, store.writer() as writer:
            for episode in episodes(size.capacity + size.capacity // 4, size.shortest, size.longest):
                append_whole(writer, episode)
    with ExitStack() as stack:
        stores = [stack.enter_context(dr.open(path)) for path in paths]
        samplers = [
            stack.enter_context(dr.Sampler(store, dr.Transitions(n_step=N_STEP), batch_size=size.batch_size, seed=0))
            for store in stores
        ]
        with _writing(paths, size) as turn:
            before = [store.info()["steps_evicted"] + len(store) for store in stores]
            busy: dict[str, list[float]] = {name: [] for name in KINDS}
            contestants = [
                Contestant(name, partial(_round, store, sampler, turn, place, size.batches, busy[name]))
                for place, (name, store, sampler) in enumerate(zip(KINDS, stores, samplers, strict=True))
            ]
            # Other load of the machine changes from second to second: turns are short, and a round has many.
            turns = in_turn(contestants, rounds * size.turns)
            by_processor = np.array([np.array(busy[name][1:]).reshape(-1, rounds).sum(axis=0) for name in KINDS])
            seconds = {name: [np.concatenate(taken[i::rounds]) for i in range(rounds)] for name, taken in turns.items()}
        for store in stores:
            store.refresh()
        evicted = stores[0].info()["steps_evicted"]
        written = [store.info()["steps_evicted"] + len(store) - had for store, had in zip(stores, before, strict=True)]
        assert len(stores[0]) == size.capacity
    speed = float(np.median(ratios(seconds, EVICTING, KEEPING)))
    own_speed = float(np.median(by_processor[1] / by_processor[0]))
    return Report(
        f"Uniform batches of {N_STEP}-step transitions while {WRITERS} processes write and the store evicts",
        [timing_table(seconds, f"one batch of {size.batch_size}"), ratio_table(seconds, [(EVICTING, KEEPING)])],
        [
            Target("speed beside a store that keeps everything", speed, LEAST, "times", at_least=True),
            Target("the same by the processor's time", own_speed, LEAST, "times", at_least=True),
        ],
        [
            f"A capacity of {size.capacity:,} steps of CartPole's shape in episodes of {size.shortest} to "
            f"{size.longest}; a round has {size.turns} turns of {size.batches:,} batches each.",
            f"Each of the {WRITERS} writers, processes of their own, appends {size.steps_per_second:,} steps a second "
            f"one by one, as far as the machine lets it: {written[0]:,} in all to the store that evicts, and "
            f"{written[1]:,} to the other.",
            f"Each call looks for new steps first, so nearly every batch is drawn from another snapshot. {evicted:,} "
            "steps had left the disk in the end.",
            "Writers and sampler share the machine's cores: times are not those of a sampler alone. The processor's "
            "time is that of the sampler's thread, and leaves out what others do meanwhile.",
        ],
    )
