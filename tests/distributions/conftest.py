"""Stores whose lanes tests grow, and samplers that tell the chances of their ids."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

SCHEMA = dr.Schema(obs=dr.Field((), "int64"), action=dr.Field((), "int64"), episode={"task": dr.Field((), "int64")})
TOLD = ("index", "probability", "priority_sum", "weight")


class Grown:
    """A store of one vector writer. The action of a step is its number, in the order in which steps were appended."""

    def __init__(self, path: Path, lanes: int, stack: ExitStack, limits: Any) -> None:
        self.lanes, self.stack, self.number = lanes, stack, count()
        self.store = stack.enter_context(dr.create(path, SCHEMA, **limits))
        self.writer = stack.enter_context(self.store.writer(lanes))

    def add(self, lane: int, steps: int, ends: bool = True, task: int | None = None) -> None:
        """Append steps to a lane, and end its episode with a final observation, or leave it open."""
        mask, zeros = np.arange(self.lanes) == lane, np.zeros(self.lanes, np.int64)
        for step in range(1, steps + 1):
            last = mask & (ends and step == steps)
            values = {"episode": {"task": zeros + task}} if task is not None and last.any() else {}
            self.writer.append(zeros, zeros + next(self.number), zeros, last, last & False, zeros, mask, **values)

    def hide(self, steps: int) -> None:
        """Hide the oldest steps by a capacity."""
        self.store.refresh()
        self.store.resize(capacity=len(self.store) - steps)
        self.store.refresh()
        self.store.resize(capacity=None)  # hidden steps stay hidden

    def sampler(self, distribution: Any = None, view: Any = None, **kwargs: Any) -> dr.Sampler:
        """Make a sampler whose batches tell the chances of their ids."""
        kwargs = {"batch_size": 16, "seed": 0, "fields": TOLD, **kwargs}
        return self.stack.enter_context(dr.Sampler(self.store, view or dr.Transitions(), distribution, **kwargs))


@pytest.fixture
def grown(tmp_path: Path) -> Iterator[Callable[..., Grown]]:
    """Make stores of lanes: the lengths of each lane's ended episodes, and of its open one."""
    with ExitStack() as stack:
        numbers = count()

        def make(lanes: list[list[int]], still_open: list[int] | None = None, **limits: Any) -> Grown:
            made = Grown(tmp_path / str(next(numbers)), len(lanes), stack, limits)
            for lane, lengths in enumerate(lanes):
                for steps in lengths:
                    made.add(lane, steps)
                made.add(lane, still_open[lane] if still_open else 0, ends=False)
            return made

        yield make


def ids_of(sampler: dr.Sampler) -> np.ndarray:
    """All ids that can be drawn, in their order."""
    return np.sort(sampler.ids())


def chances(sampler: dr.Sampler) -> np.ndarray:
    """The probability of each of these ids, as the next draw has it."""
    return sampler.gather(ids_of(sampler)).probability.numpy()


def lose_batch(sampler: dr.Sampler, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Have the segments of the next batch be gone when it is gathered, and something happen before."""
    reader: Any = sampler._makers.gatherer.reader
    fill = reader.fill

    def gone_at_first(*args: Any) -> None:
        reader.fill = fill
        meanwhile()
        raise dr.SegmentGone("gone")

    reader.fill = gone_at_first


def priorities(sampler: dr.Sampler) -> np.ndarray:
    """The priority of each of these ids, of a sampler whose alpha is 1."""
    batch = sampler.gather(ids_of(sampler))
    return batch.probability.numpy() * batch.priority_sum.numpy()
