"""What writers do while they are killed, run out of room, or lose their power: short runs with everything in them."""

from collections.abc import Callable
from typing import Any

import numpy as np

import diskreplay as dr
from tests.crash.inner import early_preallocation as early_preallocation
from tests.testing.coded import coded_obs, coded_step, make_codes

CAPACITY = 24
LANES = 3
Tell = Callable[[Any], None]


def create(path: Any, **kwargs: Any) -> dr.Store:
    """Make a store in which a dozen steps fill a segment and a few a chunk."""
    from tests.testing.coded import coded_schema

    return dr.create(
        path,
        coded_schema(),
        **{"chunk_bytes": 512, "segment_steps": 8, "capacity": CAPACITY, "compaction": "manual", **kwargs},
    )


class Single:
    """Writes numbered steps of one environment; after each call it tells how many there are, and which are durable."""

    lanes = 1

    def __init__(self, store: dr.Store, number: int, tell: Tell, **kwargs: Any) -> None:
        self.writer = store.writer(**kwargs)
        self._number, self._tell = number, tell
        self._every = kwargs.get("durability") == "episode"
        self.count = self.durable = 0

    def told(self, *, durable: bool = False) -> None:
        if durable:
            self.durable = self.count
        self._tell({"counts": [self.count], "durable": [self.durable]})

    def step(self, end: str = "", *, known: bool = True, value: bool = False) -> None:
        """Append a step: ``end`` is "terminated", "truncated" or nothing, ``known`` gives its next observation."""
        codes = make_codes(self._number, 0, [self.count, self.count + 1])
        self.writer.append(
            **coded_step(codes[0]),
            terminated=end == "terminated",
            truncated=end == "truncated",
            next_obs=coded_obs(codes[1]) if known else None,
            episode={"last": self.count} if value else None,
        )
        self.count += 1
        self.told(durable=self._every and bool(end))

    def block(self, steps: int, *, terminated: bool = True, known: bool = True) -> None:
        """Append an episode in one piece."""
        codes = make_codes(self._number, 0, self.count + np.arange(steps + 1))
        block = coded_step(codes[:-1], block=True)
        block["obs"] = coded_obs(codes if known else codes[:-1])
        self.writer.append_episode(**block, terminated=terminated, episode={"last": self.count + steps - 1})
        self.count += steps
        self.told(durable=self._every)

    def end(self, *, known: bool = True) -> None:
        """Cut the open episode."""
        final = coded_obs(make_codes(self._number, 0, self.count)) if known else None
        self.writer.end_episode(final, {"last": self.count - 1})
        self.told(durable=self._every)

    def flush(self) -> None:
        self.writer.flush()
        self.told(durable=True)

    def close(self) -> None:
        self.writer.close()
        self.told(durable=True)


class Vector:
    """The same for several lanes, which end their episodes at different times and are passed over now and then."""

    lanes = LANES

    def __init__(self, store: dr.Store, number: int, tell: Tell, **kwargs: Any) -> None:
        self.writer = store.writer(num_envs=LANES, **kwargs)
        self._number, self._tell = number, tell
        self._every = kwargs.get("durability") == "episode"
        self.counts = np.zeros(LANES, np.int64)
        self.durable = self.counts.copy()

    def told(self, *, durable: bool = False) -> None:
        if durable:
            self.durable = self.counts.copy()
        self._tell({"counts": self.counts.tolist(), "durable": self.durable.tolist()})

    def step(self, ends: Any = (), *, cuts: Any = (), skip: Any = (), known: bool = True) -> None:
        lanes = np.arange(LANES)
        terminated, truncated, mask = np.isin(lanes, ends), np.isin(lanes, cuts), ~np.isin(lanes, skip)
        codes = make_codes(self._number, lanes, self.counts)
        self.writer.append(
            **coded_step(codes),
            terminated=terminated,
            truncated=truncated,
            next_obs=coded_obs(codes + 1) if known else None,
            mask=mask,
            episode={"last": self.counts},
        )
        self.counts += mask
        self.told(durable=self._every and bool((terminated | truncated).any()))

    def block(self, lane: int, steps: int) -> None:
        codes = make_codes(self._number, lane, self.counts[lane] + np.arange(steps + 1))
        block = {**coded_step(codes[:-1], block=True), "obs": coded_obs(codes)}
        self.writer.append_episode(lane, **block, terminated=True)
        self.counts[lane] += steps
        self.told(durable=self._every)

    def end(self) -> None:
        self.writer.end_episode(coded_obs(make_codes(self._number, np.arange(LANES), self.counts)))
        self.told(durable=self._every)

    def flush(self) -> None:
        self.writer.flush()
        self.told(durable=True)

    def close(self) -> None:
        self.writer.close()
        self.told(durable=True)


def write_single(store: dr.Store, tell: Tell, number: int = 1, **kwargs: Any) -> None:
    """Append, append_episode, end_episode, next observations, rotation, eviction, sealing, flush and close."""
    one = Single(store, number, tell, **kwargs)
    for t in range(4):
        one.step("terminated" if t == 3 else "", value=t == 3)
    one.flush()
    one.block(3)
    for _ in range(2):
        one.step(known=False)
    one.end()
    for _ in range(3):
        one.step()
    one.end(known=False)
    one.block(2, terminated=False, known=False)
    for length in (6, 5, 9):
        for t in range(length):
            one.step("truncated" if t == length - 1 else "", known=t % 3 > 0 or t == length - 1)
    one.flush()
    for _ in range(2):
        one.step()
    one.close()


def write_vector(store: dr.Store, tell: Tell, number: int = 1, **kwargs: Any) -> None:
    """The same for several lanes; no two of them move on to the next segment together."""
    some = Vector(store, number, tell, **kwargs)
    some.step()
    some.step(ends=[0])
    some.flush()
    some.step(skip=[1])
    some.step(cuts=[2], known=False)
    some.block(1, 3)
    for t in range(6):
        some.step(ends=[t % LANES], skip=[(t + 1) % LANES] if t % 2 else [])
    some.flush()
    some.step()
    some.end()
    some.step(known=False)
    some.step()
    some.close()
