"""The class `Lane`, and the class `AppendCursor`, which looks up a lane's arrays once for many appended steps."""

from collections.abc import Mapping, Sequence
from time import clock_gettime_ns
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import (
    CUT,
    END_MARKER,
    EPISODE_VALUES,
    FIRST,
    OBSERVATION_ONLY,
    POSITION_BITS,
    TERMINATED,
    TRUNCATED,
)
from diskreplay.segments.documents import layout
from diskreplay.segments.files.machine import CLOCK
from diskreplay.segments.segment_writer import SegmentWriter

# Values of a step, one per leaf of the schema: the observation, or all other values. Arrays and all leaves of the
# observation are bytes. All other scalars are numbers.
Items = list[Any]
# The values of the schema's episode fields for one episode, by the path of the leaf.
EpisodeItems = Mapping[str, Any]

# 0 or 1 for one step, or an array of 0 and 1 for many steps.
Truth = TypeVar("Truth", int, NDArray[Any])


def step_flags(first: Truth, continues: Truth, terminated: Truth, truncated: Truth) -> Truth:
    flags: Truth = first * FIRST | (first & continues) * CUT | terminated * TERMINATED | truncated * TRUNCATED
    return flags


def final_flags(ended: bool, has_observation: bool, has_values: bool) -> int:
    """Return the flags of the row after an episode's last step; ``ended`` is False if diskreplay cuts the episode."""
    flags = (OBSERVATION_ONLY if has_observation else END_MARKER) | (0 if ended else TRUNCATED | CUT)
    return flags | (EPISODE_VALUES if has_values else 0)


class Lane:
    """The stream of one environment: the segment of its next step, and the state of its open episode."""

    __slots__ = ("at", "continues", "cursor", "number", "open", "pending", "resumes_at", "segment")

    def __init__(self, number: int) -> None:
        self.number = number
        self.segment: SegmentWriter | None = None
        self.at = 0  # the lane's index in the segment
        self.cursor: AppendCursor | None = None
        self.open = False
        self.continues = False  # whether the next episode continues the last episode, which was cut for its length
        # If `continues` is True, an episode that begins with this observation continues the last episode. None: the
        # episode may begin with any observation.
        self.resumes_at: list[bytes] | None = None
        # The observation that is already written to the next row; None if there is none.
        self.pending: list[bytes] | None = None

    @property
    def home(self) -> SegmentWriter:
        assert self.segment is not None
        return self.segment

    @property
    def last_id(self) -> int:
        """The id of the lane's newest step; -1 if the lane has no step in its present segment."""
        segment = self.segment
        if segment is None:
            return -1
        row = segment.rows[self.at] - 1
        if not self.open and row == segment.final_rows[self.at]:
            row -= 1
        lanes = len(segment.info.lanes)
        return -1 if row < 0 else segment.number << POSITION_BITS | row * lanes + self.at

    def flags(
        self, next_obs: Items | None, terminated: bool, truncated: bool, episode: EpisodeItems | None
    ) -> tuple[int, int]:
        """Return the flags of the lane's next step, and the flags of the row after it (0 if it ends no episode)."""
        flags = step_flags(not self.open, self.continues, terminated, truncated)
        if next_obs is not None and (terminated or truncated):
            return flags, final_flags(True, True, bool(episode))
        return flags | (EPISODE_VALUES if episode else 0), 0


class AppendCursor:
    """Writes steps to reserved rows of a segment with one lane, up to the end of the first chunk that becomes full.

    `append` writes the same bytes as `SegmentWriter.write` and `SegmentWriter.publish`, but takes less time. ``obs``
    and ``rest`` are the leaves of the observation, and all other leaves of a step. The cursor writes only to rows below
    ``limit``, and begins episodes only at rows below ``begin_limit``.

    Concurrency: as for `EpisodeWriter`.
    """

    __slots__ = (
        "_begin_limit",
        "_committed",
        "_done",
        "_lane",
        "_obs",
        "_observed",
        "_rest",
        "_segment",
        "_start",
        "_stop",
        "_time",
        "_zeros",
    )

    def __init__(
        self,
        lane: Lane,
        segment: SegmentWriter,
        obs: Sequence[str],
        rest: Sequence[str],
        limit: int,
        begin_limit: int,
    ) -> None:
        self._lane, self._segment = lane, segment
        row = self._start = segment.rows[0]
        parts = {leaf: column.target(0, row) for leaf, column in segment.columns.items()}
        self._stop = min(limit, segment.reserved[0], row + min(count for _, count in parts.values()))
        self._begin_limit = begin_limit
        # The index and the target of each value. To call `enumerate` for each step would take longer.
        self._obs = list(enumerate(parts[leaf][0] for leaf in obs))
        self._rest = list(enumerate(_numbers(parts[leaf][0]) for leaf in rest))
        self._zeros = [segment.columns[leaf].zero for leaf in rest]
        self._done, self._time = (_numbers(parts[leaf][0]) for leaf in (layout.DONE, layout.TIME))
        self._committed, self._observed = segment.committed.data, segment.observed.data

    def append(
        self,
        obs: Items,
        rest: Items,
        next_obs: Items | None,
        terminated: bool,
        truncated: bool,
        episode: EpisodeItems | None,
        now: int = 0,
    ) -> bool:
        """Write and publish a step and return True, or change nothing and return False.

        The method returns False in these cases:

        - the step needs a row after the last row that the cursor can write;
        - the observation of the step differs from the observation that is already written to the step's row;
        - the step begins an episode at row ``begin_limit`` or later, or an episode that continues a cut episode;
        - the segment has no reserved room for ``episode``.

        ``next_obs`` is written to the row after the step. If the step is terminated or truncated, this row ends the
        episode. ``episode`` has the values of episode fields if the episode ends with the step. ``now`` is the time of
        the rows in nanoseconds; if it is 0, the method reads the clock.

        Raises StorageFull if the disk is full: some file systems do not keep reserved blocks. The call may be repeated.
        """
        lane, segment = self._lane, self._segment
        row, flags, final = segment.rows[0], 0, 0
        stop = row + 1 if next_obs is None else row + 2
        if stop > self._stop:
            return False
        if terminated or truncated or not lane.open:
            flags, final = lane.flags(next_obs, terminated, truncated, episode)
            if self._must_refuse(flags, row, episode):
                return False
        at = row - self._start
        if lane.pending is None:
            for i, target in self._obs:
                target[at] = obs[i]
        elif lane.pending != obs:
            return False
        for i, target in self._rest:
            target[at] = rest[i]
        self._done[at] = flags
        self._time[at] = now = now or clock_gettime_ns(CLOCK)  # the same as `clock_ns()`, without a function call
        added = 1
        if next_obs is not None:
            for i, target in self._obs:
                target[at + 1] = next_obs[i]
        if final:
            # Fields without a value in this row are set to 0, because an interrupted append may have left bytes there.
            for i, target in self._rest:
                target[at + 1] = self._zeros[i]
            self._done[at + 1], self._time[at + 1] = final, now
            segment.final_rows[0] = row + 1
            added, next_obs = 2, None
        if episode:
            segment.write_values(0, episode)
        # These lines do the same as `SegmentWriter.publish`, without a function call. The assignments that can fail on
        # a full disk come first.
        self._committed[0] = segment.rows[0] = row + added
        segment.total_rows += added
        if next_obs is not None:
            self._observed[0] = stop
        lane.pending = next_obs
        if flags:
            if episode:
                segment.note_values(0)
            lane.open, lane.continues, lane.resumes_at = not flags & (TERMINATED | TRUNCATED), False, None
        return True

    def _must_refuse(self, flags: int, row: int, episode: EpisodeItems | None) -> bool:
        """Return whether `append` must return False for a step that begins or ends an episode."""
        if flags & FIRST and (flags & CUT or row >= self._begin_limit):
            return True
        return bool(episode) and bool(self._segment.lacks_values()[0])


def _numbers(target: Any) -> Any:
    """Return a memoryview of an array of numbers: assigning a Python number to an element takes half the time."""
    # A memoryview has no elements of bytes, and in Python 3.11 none of float16.
    return target.data if isinstance(target, np.ndarray) and target.dtype.char not in "Ve" else target
