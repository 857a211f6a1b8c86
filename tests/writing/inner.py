"""The long way of writers, and where the tests of their short ways step in."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import diskreplay as dr
from diskreplay.ids import Ints
from diskreplay.kernels.copying import FIELD
from diskreplay.kernels.table import get_kernel
from diskreplay.segments import sealing
from diskreplay.segments.documents.layout import CLOSE_LANES as CLOSE_LANES
from diskreplay.store import store
from diskreplay.writing import append_cursor, episode_writer, vector_writer
from diskreplay.writing.append_cursor import Lane
from diskreplay.writing.episode_writer import EpisodeWriter
from diskreplay.writing.vector_writer import VectorSteps, as_item
from tests.testing.inner import APPEND_ROW as APPEND_ROW, Point

WRITE_STEP: Point = (VectorSteps, "_write")
MAKE_ROOM: Point = (EpisodeWriter, "make_room")
IF_MADE: Point = (vector_writer, "if_made")
COMPILE_ALL: Point = (store, "compile_all")


def write_lanes() -> Any:
    """Return the compiled code that writes a step of many lanes."""
    return get_kernel("write_lanes")


def has_gap(lanes: Ints, rows: Ints, picked: Ints, record: Ints, fields: int) -> bool:
    """Return whether a chunk between two chunks that a call of `write_lanes` writes to has no address."""
    return not record[FIELD * fields :].all()


class CallClock:
    """A clock that stands still during each call of a writer: the n-th calls of all writers are at one time."""

    def __init__(self, patch: Any) -> None:
        self._now = 5
        patch.setattr(append_cursor, "clock_gettime_ns", lambda clock: self._now)
        patch.setattr(episode_writer, "clock_ns", lambda: self._now)
        patch.setattr(sealing, "clock_ns", lambda: self._now)

    def of(self, writer: Any) -> Any:
        """Return the writer, with this clock."""
        return _Timed(writer, count(1), self.set)

    def set(self, call: int) -> None:
        self._now = call << 20


class _Timed:
    def __init__(self, writer: Any, calls: Iterator[int], begin: Callable[[int], None]) -> None:
        self._writer, self._calls, self._begin = writer, calls, begin

    def __getattr__(self, name: str) -> Any:
        self._begin(next(self._calls))
        return getattr(self._writer, name)


class BlocksOfOne(EpisodeWriter):
    """Makes room for every step of a lone lane, and writes it as a block of one."""

    def append(self, obs, rest, next_obs, terminated, truncated, episode):
        self.read_clock()
        rows = 2 if terminated or truncated or next_obs is not None else 1
        self.make_room(self.lanes[0], obs, rows, values=bool(episode))
        self._append_block_of_one(self.lanes[0], obs, rest, next_obs, terminated, truncated, episode)


class LaneByLane(VectorSteps):
    """Makes room for every lane of a step by itself, and writes a block of one in each."""

    def __init__(self, episode_writer):
        super().__init__(episode_writer)
        episode_writer.lanes[:] = [Lane(i) for i in range(len(episode_writer.lanes))]

    def append(self, step):
        episode_writer = self._episode_writer
        episode_writer.read_clock()
        self._make_room(step)
        now = episode_writer.now
        for i in self._lanes_that_need_more(step).tolist():
            episode_writer.now = now + i
            ends, cuts = bool(step.ends[i]), bool(step.cuts[i])
            next_obs = None if step.next_obs is None else self._items(step.next_obs, i)
            episode = step.episode if step.episode and (ends or cuts) else {}
            values = {leaf: as_item(leaf, value[i]) for leaf, value in episode.items()}
            items, observed = self._items(step.values, i), episode_writer.obs_count
            episode_writer._append_block_of_one(
                episode_writer.lanes[i], items[:observed], items[observed:], next_obs, ends, cuts, values
            )
        episode_writer.now = now + len(self._every)

    def _items(self, values, lane):
        return [as_item(leaf, value[lane]) for leaf, value in zip(self._episode_writer.columns, values, strict=False)]

    def _needs_only_writing(self, newest, step):
        return False

    def _lanes_that_need_more(self, step):
        return self._every if step.lanes is None else step.lanes


def long_way(writer):
    """Make a fresh writer do without its short ways."""
    writer._episode_writer.__class__ = BlocksOfOne
    if isinstance(writer, dr.VectorWriter):
        writer._steps = LaneByLane(writer._episode_writer)
    return writer
