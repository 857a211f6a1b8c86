"""Lanes of steps into segments: which segment a lane writes to, what flags a row gets, when an episode is cut.

Both writers are a thin skin over this. Values that arrive here are cast and checked; from `prepare` on only the disk
can say no, and from `commit` on nothing can.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import StorageFull
from diskreplay.format import layout
from diskreplay.format.commit import StoreCounters
from diskreplay.format.layout import CUT, END_MARKER, EPISODE_VALUES, FIRST, OBSERVATION_ONLY, TERMINATED, TRUNCATED
from diskreplay.format.root import Root
from diskreplay.format.segment import Size
from diskreplay.format.segment_writer import SegmentWriter
from diskreplay.store.retention import Retention
from diskreplay.store.sealer import Sealer

Values = Sequence[NDArray[Any]]
EpisodeValues = dict[str, NDArray[Any]]


# A lane that does not append keeps its segment, and with it the writer's next one, open for so many targets of rows.
_LATEST = 16


# An episode that comes step by step, in a segment of its own.
_UNKNOWN = Size(256)


class Lane:
    """One environment's stream: where it writes next, and what its open episode waits for."""

    __slots__ = ("at", "continues", "number", "open", "pending", "resumes_at", "segment")

    def __init__(self, number: int) -> None:
        self.number = number
        self.segment: SegmentWriter | None = None
        self.at = 0  # the lane's index inside the segment
        self.open = False
        self.continues = False  # the next episode continues one that was cut for its length
        self.resumes_at: list[bytes] | None = None  # where known, the observation that it must begin with
        self.pending: list[bytes] | None = None  # the observation already written for the next row


class Recorder:
    """The open segments of one writer and the lanes that write to them.

    Concurrency: one thread at a time, in the process that made it. Takes the store lock to open a segment, none to
    append.
    """

    def __init__(self, root: Root, counters: StoreCounters, lanes: int, retention: Retention, sealer: Sealer) -> None:
        self._root, self._counters, self._retention, self._sealer = root, counters, retention, sealer
        self._columns = list(root.schema.step_leaves)
        self._obs_columns = [leaf for leaf in self._columns if leaf == "obs" or leaf.startswith("obs/")]
        self._obs_count = len(self._obs_columns)
        self._per_episode = root.segment_steps == "episode"
        self._target = layout.target_rows(
            1 if self._per_episode else lanes, root.step_bytes, root.capacity, root.segment_steps
        )
        self._first_number: int | None = None
        self._newest: SegmentWriter | None = None
        self._members: dict[int, set[Lane]] = {}  # lanes that write to a segment, by its number
        self._opened = 0
        self._left = False  # whether segments were handed over to be sealed since the last flush
        self._warned = False
        self.lanes = [Lane(i) for i in range(lanes)]

    # --- one step ----------------------------------------------------------------------------------------------------

    def prepare(self, lane: Lane, values: Values, two_rows: bool) -> int:
        """Find room for a step whose first values are the observation; return how many segments were opened so far.

        Raises
        ------
        StorageFull
            There is no room. Nothing was written but, where the episode had to end here, its end.
        """
        if lane.open:
            self._cut_if_needed(lane, values)
        if not lane.open:
            lane.continues &= _same_bytes(values, lane.resumes_at)
            self._settle(lane, 1)
        segment = lane.segment
        assert segment is not None
        row = segment.rows[lane.at]
        segment.reserve(lane.at, row)
        if two_rows:
            segment.reserve(lane.at, row + 1)
        return self._opened

    def commit(
        self,
        lane: Lane,
        values: Values,
        next_obs: Values | None,
        terminated: bool,
        truncated: bool,
        episode: EpisodeValues | None,
    ) -> None:
        """Write a prepared step and publish it."""
        segment, at = lane.segment, lane.at
        assert segment is not None
        row = segment.rows[at]
        flags = 0 if lane.open else FIRST | (CUT if lane.continues else 0)
        flags |= (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
        columns = segment.columns
        for i in range(0 if lane.pending is None else self._obs_count, len(values)):
            columns[self._columns[i]].put(at, row, values[i])
        ended = terminated or truncated
        lane.pending = None
        if next_obs is None:
            columns[layout.DONE].put(at, row, flags | self._put_episode(segment, at, row, episode))
            segment.publish(at, row + 1)
        elif ended:
            columns[layout.DONE].put(at, row, flags)
            self._put_final(segment, at, row + 1, next_obs, OBSERVATION_ONLY, episode)
            segment.publish(at, row + 2)
        else:
            for leaf, value in zip(self._obs_columns, next_obs, strict=True):
                columns[leaf].put(at, row + 1, value)
            columns[layout.DONE].put(at, row, flags)
            segment.publish(at, row + 1, row + 2)
            lane.pending = [value.tobytes() for value in next_obs]
        lane.open, lane.continues, lane.resumes_at = not ended, False, None

    def _put_final(
        self,
        segment: SegmentWriter,
        at: int,
        row: int,
        obs: Values | None,
        flags: int,
        episode: EpisodeValues | None,
    ) -> None:
        """Write an observation-only row, or with no ``obs`` one whose observation is there or that has none."""
        for leaf in self._columns[self._obs_count :]:
            # An append that was interrupted may have left bytes here.
            segment.columns[leaf].put(at, row, segment.columns[leaf].zero)
        if obs is not None:
            for leaf, value in zip(self._obs_columns, obs, strict=True):
                segment.columns[leaf].put(at, row, value)
        segment.columns[layout.DONE].put(at, row, flags | self._put_episode(segment, at, row, episode))

    def _put_episode(self, segment: SegmentWriter, at: int, row: int, episode: EpisodeValues | None) -> int:
        if not episode:
            return 0
        for leaf, value in episode.items():
            segment.columns[leaf].put(at, row, value)
        return EPISODE_VALUES

    # --- whole episodes ----------------------------------------------------------------------------------------------

    def block(
        self,
        lane: Lane,
        values: Values,
        final_obs: Values | None,
        terminated: bool,
        truncated: bool,
        episode: EpisodeValues | None,
    ) -> None:
        """Write and publish a whole episode at once; ``values`` have a leading axis of its steps."""
        steps = len(values[0])
        self.cut(lane, None, None)
        ended = terminated or truncated
        marker = final_obs is None and bool(episode) and not ended
        rows = steps + (final_obs is not None or marker)
        self._settle(lane, rows)
        segment, at = lane.segment, lane.at
        assert segment is not None
        row = segment.rows[at]
        segment.reserve_rows(at, row, row + rows)
        flags = np.zeros(steps, np.uint8)
        flags[0] = FIRST
        flags[-1] |= (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
        if rows == steps:
            flags[-1] |= self._put_episode(segment, at, row + steps - 1, episode)
        for leaf, value in zip(self._columns, values, strict=True):
            segment.columns[leaf].put_block(at, row, value)
        segment.columns[layout.DONE].put_block(at, row, flags)
        if rows > steps:
            end = (END_MARKER if marker else OBSERVATION_ONLY) | (0 if ended else TRUNCATED | CUT)
            self._put_final(segment, at, row + steps, final_obs, end, episode)
        segment.publish(at, row + rows)
        if self._per_episode:
            # Nothing comes after it; lanes that wait for their next episode should not hold descriptors.
            segment.close()

    # --- cuts --------------------------------------------------------------------------------------------------------

    def cut(self, lane: Lane, final_obs: Values | None, episode: EpisodeValues | None) -> None:
        """End the open episode of a lane, if there is one, without the environment.

        The observation after its last step is kept where it is known: the one already visible, else ``final_obs``.
        """
        lane.continues, lane.resumes_at = False, None
        if not lane.open:
            return
        segment, at = lane.segment, lane.at
        assert segment is not None
        row = segment.rows[at]
        if lane.pending is not None or final_obs is not None:
            segment.reserve(at, row)
            final = final_obs if lane.pending is None else None
            self._put_final(segment, at, row, final, OBSERVATION_ONLY | TRUNCATED | CUT, episode)
            segment.publish(at, row + 1)
        elif episode:
            segment.reserve(at, row)
            self._put_final(segment, at, row, None, END_MARKER | TRUNCATED | CUT, episode)
            segment.publish(at, row + 1)
        # With neither, the cut is read off what follows: a first step, or the end of the sealed segment.
        lane.open, lane.pending = False, None

    def continues_pending(self, lane: Lane, obs: Values) -> bool:
        """Whether ``obs`` is the observation that the lane's last step led to, as far as that is known."""
        return _same_bytes(obs, lane.pending)

    def warn_discontinuity(self) -> None:
        """Say once that an observation did not continue its episode."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                "an appended obs differs from the next_obs of the step before; the episode was cut there. Reset "
                "observations need end_episode() or a done step before them, and normalised or stacked ones must be "
                "the same bytes in both places",
                stacklevel=5,
            )

    def _cut_if_needed(self, lane: Lane, values: Values) -> None:
        obs = values[: self._obs_count]
        if not self.continues_pending(lane, obs):
            self.cut(lane, None, None)
            self.warn_discontinuity()
        elif self._overstays(lane):
            self.cut(lane, obs, None)
            lane.continues, lane.resumes_at = True, [value.tobytes() for value in obs]

    def _overstays(self, lane: Lane) -> bool:
        """Whether an open episode must be cut because its segment has to end."""
        segment, newest = lane.segment, self._newest
        assert segment is not None
        if self._is_below_horizon(segment):
            return True
        if newest is not None and segment is not newest:
            return newest.total_rows >= self._target
        total = segment.total_rows
        return total >= 2 * self._target and (total >= _LATEST * self._target or not self._older())

    def _is_below_horizon(self, segment: SegmentWriter) -> bool:
        return self._root.capacity is not None and segment.number < self._counters.peek(layout.HORIZON)

    # --- segments ----------------------------------------------------------------------------------------------------

    def _settle(self, lane: Lane, rows: int) -> None:
        """Give a lane between two episodes a segment with room for ``rows`` rows."""
        segment = lane.segment
        if self._per_episode:
            if segment is None or segment.rows[0]:
                size = Size(layout.ceil_power_of_two(rows), rows) if rows > 1 else _UNKNOWN
                self._move(lane, self._open([lane.number], size))
            return
        newest = self._newest
        if segment is not None and segment is newest and not self._is_full(segment, rows):
            return
        if newest is None or self._is_full(newest, rows):
            older = self._older()
            if newest is not None and older and self._may_wait(newest):
                self._move(lane, newest)
                return
            for straggler in [other for other in older if other.open]:
                resumes_at = straggler.pending
                self.cut(straggler, None, None)
                straggler.continues, straggler.resumes_at = True, resumes_at
            newest = self._newest = self._open([other.number for other in self.lanes], Size(self._most_chunk_rows()))
            for other in self.lanes:
                if not other.open:
                    self._move(other, newest)
        self._move(lane, newest)

    def _older(self) -> list[Lane]:
        """Return the lanes still in the segment before the newest; none in the layout of one group an episode."""
        newest = self._newest
        return [] if newest is None else [lane for n, m in self._members.items() if n != newest.number for lane in m]

    def _may_wait(self, newest: SegmentWriter) -> bool:
        """Whether a full newest segment may go on until the lanes in the one before are cut at their next append."""
        return newest.total_rows < _LATEST * self._target and not self._is_below_horizon(newest)

    def _is_full(self, segment: SegmentWriter, rows: int) -> bool:
        total = segment.total_rows
        return (
            total >= self._target or (total > 0 and total + rows > 2 * self._target) or self._is_below_horizon(segment)
        )

    def _most_chunk_rows(self) -> int:
        # A quarter: a chunk that is begun has its blocks, and what lies unused in it should be small beside the rest.
        return layout.floor_power_of_two(self._target // len(self.lanes) // 4)

    def _open(self, lanes: list[int], size: Size) -> SegmentWriter:
        info, lock = self._retention.new_segment(self._first_number, lanes, size)
        if self._first_number is None:
            self._first_number = info.number
        segment = SegmentWriter(self._root, info, lock, in_blocks=size.rows is not None)
        self._members[info.number] = set()
        self._opened += 1
        return segment

    def _move(self, lane: Lane, segment: SegmentWriter) -> None:
        if lane.segment is segment:
            return
        left, lane.segment = lane.segment, segment
        lane.at = segment.info.lanes.index(lane.number) if self._per_episode else lane.number
        self._members[segment.number].add(lane)
        if left is not None:
            self._leave(lane, left)

    def _leave(self, lane: Lane, segment: SegmentWriter, *, seal: bool = True) -> None:
        self._members[segment.number].discard(lane)
        if not self._members[segment.number]:
            del self._members[segment.number]
            segment.close()
            if not seal:
                segment.lock.release()
                return
            self._left = True
            self._sealer.submit(segment.info, segment.lock)

    @property
    def segments(self) -> list[SegmentWriter]:
        """The segments this writer has open: at most two, or one a lane in the layout of one group an episode."""
        return list({lane.segment.number: lane.segment for lane in self.lanes if lane.segment is not None}.values())

    def close(self) -> None:
        """Cut what is open and hand every segment over to be sealed."""
        full: StorageFull | None = None
        try:
            for lane in self.lanes:
                try:
                    self.cut(lane, None, None)
                except StorageFull as error:  # the sealer ends the episode when there is room
                    full = error
        finally:
            self.abandon()
        if full is not None:
            raise full

    def flush(self) -> None:
        """Put every published step on the platter, those in segments that were left included."""
        for segment in self.segments:
            segment.flush()
        if self._left:
            self._left = False
            self._sealer.drain()

    def abandon(self, *, seal: bool = True) -> None:
        """Let go of every segment as it is; each is sealed up to what was committed, now or by the next process."""
        for lane in self.lanes:
            segment, lane.segment = lane.segment, None
            if segment is not None:
                self._leave(lane, segment, seal=seal)


def _same_bytes(values: Values, known: list[bytes] | None) -> bool:
    """Whether the first values have these bytes; nothing known contradicts nothing."""
    return known is None or all(value.tobytes() == data for value, data in zip(values, known, strict=False))
