"""The class `Lane`, and the class `AppendCursor`, which looks up a lane's arrays once for many appended steps."""

from collections.abc import Mapping, Sequence
from time import clock_gettime_ns
from typing import Any

import numpy as np

from diskreplay.ids import CUT, FIRST, POSITION_BITS, TERMINATED, TRUNCATED
from diskreplay.segments.documents import layout
from diskreplay.segments.files.machine import CLOCK
from diskreplay.segments.segment_writer import SegmentWriter

# The values of a step, one per leaf of the schema. Arrays and all leaves of the observation are bytes. All other
# scalars are numbers.
Items = list[Any]
# The values of the schema's episode fields for one episode, by the path of the leaf.
EpisodeItems = Mapping[str, Any]


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


class AppendCursor:
    """Writes steps to reserved rows of a segment with one lane, up to the end of the first chunk that becomes full.

    `append` writes the same bytes as `SegmentWriter.write` and `SegmentWriter.publish`, but takes less time. The values
    of a step are `Items` in the order of ``leaves``. The cursor writes only to rows below ``limit``, and begins
    episodes only at rows below ``begin_limit``.

    Concurrency: as for `EpisodeWriter`.
    """

    __slots__ = (
        "_begin_limit",
        "_committed",
        "_count",
        "_done",
        "_lane",
        "_last",
        "_obs",
        "_observed",
        "_rest",
        "_segment",
        "_start",
        "_targets",
        "_time",
    )

    def __init__(self, lane: Lane, segment: SegmentWriter, leaves: Sequence[str], limit: int, begin_limit: int) -> None:
        self._lane, self._segment = lane, segment
        row = self._start = segment.rows[0]
        parts = {leaf: column.target(0, row) for leaf, column in segment.columns.items()}
        # The last row for a step with `next_obs`: the row after it must also be reserved.
        self._last = min(limit, segment.reserved[0], row + min(count for _, count in parts.values())) - 2
        self._begin_limit = begin_limit
        self._done, time = parts[layout.DONE][0], parts[layout.TIME][0]
        # It is twice as fast to assign a Python number to an element of a memoryview as to an element of an array.
        self._time = time.data if isinstance(time, np.ndarray) else time
        self._targets = [parts[leaf][0] for leaf in leaves]
        self._count = len(self._targets)
        observed = sum(leaf == "obs" or leaf.startswith("obs/") for leaf in leaves)
        self._obs = self._targets[:observed]
        self._rest = [(parts[leaf][0], segment.columns[leaf].zero) for leaf in leaves[observed:]]
        self._committed, self._observed = segment.committed.data, segment.observed.data

    def append(
        self,
        items: Items,
        next_obs: Items | None,
        flags: int = 0,
        final_flags: int = 0,
        episode: EpisodeItems | None = None,
        now: int = 0,
    ) -> bool:
        """Write and publish a step and return True, or change nothing and return False.

        The method returns False in these cases:

        - the step needs a row after the last row that the cursor can write;
        - the observation of the step differs from the observation that is already written to the step's row;
        - the step begins an episode at row ``begin_limit`` or later, or an episode that continues a cut episode;
        - the segment has no reserved room for ``episode``.

        ``flags`` has the flags of the step. ``next_obs`` is written to the row after the step. If ``final_flags`` is
        not 0, the row after the step ends the episode, and gets these flags. ``episode`` has the values of episode
        fields if the episode ends with the step. ``now`` is the time of the rows in nanoseconds; if it is 0, the method
        reads the clock.

        Raises StorageFull if the disk is full: some file systems do not keep reserved blocks. The call may be repeated.
        """
        lane, segment = self._lane, self._segment
        row, known, pending = segment.rows[0], 0, lane.pending
        if row > self._last and (next_obs is not None or row > self._last + 1):
            return False
        if flags and self._must_refuse(flags, row, episode):
            return False
        if pending is not None:
            known = len(pending)
            if items[:known] != pending:
                return False
        at, targets = row - self._start, self._targets
        for i in range(known, self._count):
            targets[i][at] = items[i]
        self._done[at] = flags
        self._time[at] = now = now or clock_gettime_ns(CLOCK)  # the same as `clock_ns()`, without a function call
        rows = row + 1
        if next_obs is not None:
            for i, target in enumerate(self._obs):
                target[at + 1] = next_obs[i]
        if flags:
            if final_flags:
                # Fields without a value in this row are set to 0, because an interrupted append may have left bytes
                # there.
                for target, zero in self._rest:
                    target[at + 1] = zero
                self._done[at + 1], self._time[at + 1] = final_flags, now
                segment.final_rows[0] = rows
                rows, next_obs = rows + 1, None
            if episode:
                segment.write_values(0, episode)
        # These lines do the same as `SegmentWriter.publish`, without a function call. The assignments that can fail on
        # a full disk come first.
        self._committed[0] = segment.rows[0] = rows
        segment.total_rows += rows - row
        if next_obs is not None:
            self._observed[0] = rows + 1
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
        return bool(episode) and self._segment.lacks_values(0)
