"""Lanes of steps into segments: what flags a row gets, when an episode is cut.

Both writers are a thin skin over this. Values that arrive here are cast and checked; from `prepare` on only the disk
can say no, and from `publish` on nothing can. A step's values are items: a row's bytes for observations and arrays, a
number for other scalars.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import StorageFull
from diskreplay.format import layout
from diskreplay.format.machine import clock_ns
from diskreplay.format.root import Root
from diskreplay.format.segment_writer import SegmentWriter
from diskreplay.ids import CUT, END_MARKER, EPISODE_VALUES, FIRST, OBSERVATION_ONLY, TERMINATED, TRUNCATED
from diskreplay.store.retention.retention import Retention
from diskreplay.store.writing.append_cursor import AppendCursor
from diskreplay.store.writing.rotation import Lane, OpenSegments
from diskreplay.store.writing.sealer import Sealer

Items = list[Any]
EpisodeItems = Mapping[str, Any]


class Written(NamedTuple):
    """A step that is written and not published yet: what its lane will show, and how it goes on."""

    lane: Any
    rows: int
    observed: int
    pending: list[bytes] | None
    ended: bool


class EpisodeWriter:
    """The open segments of one writer and the lanes that write to them.

    Concurrency: one thread at a time, in the process that made it. Takes the store lock to open a segment, none to
    append.
    """

    def __init__(self, root: Root, lanes: int, retention: Retention, sealer: Sealer) -> None:
        self.path = root.path
        self.columns = list(root.schema.step_leaves)
        self._obs_columns = [leaf for leaf in self.columns if leaf == "obs" or leaf.startswith("obs/")]
        self.obs_count = len(self._obs_columns)
        self._sealer = sealer
        self.explain = root.explain
        self._warned = False
        self.now = 0
        self.lanes: list[Any] = [Lane(i) for i in range(lanes)]
        self.rolling = OpenSegments(root, self.lanes, retention, sealer, lambda lane: self.cut(lane, None, None))

    def take_time(self) -> None:
        """Read the clock for all rows that the call in progress publishes; those of `go_on` read their own."""
        self.now = clock_ns()

    # --- one step ----------------------------------------------------------------------------------------------------

    def go_on(self, items: Items, following: list[bytes] | None) -> bool:
        """Append to the middle of a lone lane's episode, if that needs nothing but writing; else change nothing.

        What it leaves out, `prepare` and `commit` do: first and last steps, chunks and segments that end, episodes
        that do not go on.
        """
        lane = self.lanes[0]
        if not lane.open:
            return False
        cursor, row, known = lane.cursor, lane.segment.rows[0], 0
        if cursor is None or row > cursor.last:
            return False
        pending = lane.pending
        if pending is not None:
            known = len(pending)
            if items[:known] != pending:
                return False
        cursor.append(row, items, known, following)
        lane.pending = following
        return True

    def prepare(self, lane: Any, items: Items, two_rows: bool) -> None:
        """Find room for a step whose first items are the observation.

        Raises StorageFull where there is no room; nothing was written but, where the episode had to end here, its end.
        """
        try:
            self._prepare(lane, items, two_rows)
        except StorageFull:
            if not self.rolling.give_way():
                raise
            self._prepare(lane, items, two_rows)

    def _prepare(self, lane: Any, items: Items, two_rows: bool) -> None:
        if lane.open:
            self._cut_if_needed(lane, items)
        if not lane.open:
            lane.continues = lane.continues and _continues(items, lane.resumes_at)
            self._settle(lane, 1)
        self.rolling.look_ahead()
        segment = lane.segment
        row = segment.rows[lane.at]
        segment.reserve(lane.at, row)
        if two_rows:
            segment.reserve(lane.at, row + 1)

    def _settle(self, lane: Any, rows: int) -> None:
        opened = self.rolling.opened
        self.rolling.settle(lane, rows)
        if self.rolling.opened != opened:
            self.take_time()  # a segment was made meanwhile, perhaps the first of a boot: no row is older than that

    def write(
        self,
        lane: Any,
        items: Items,
        following: list[bytes] | None,
        terminated: bool,
        truncated: bool,
        episode: EpisodeItems | None,
    ) -> Written:
        """Write a prepared step; nobody sees it yet.

        Raises StorageFull where reserved blocks are not kept and there is no room; the call may be repeated.
        """
        segment, at = lane.segment, lane.at
        row = segment.rows[at]
        flags = 0 if lane.open else FIRST | (CUT if lane.continues else 0)
        flags |= (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
        columns = segment.columns
        columns[layout.TIME].put(at, row, self.now)
        for i in range(0 if lane.pending is None else self.obs_count, len(items)):
            columns[self.columns[i]].put(at, row, items[i])
        if following is None:
            columns[layout.DONE].put(at, row, flags | self._put_episode(segment, at, row, episode))
        else:
            columns[layout.DONE].put(at, row, flags)
            if terminated or truncated:
                self._put_final(segment, at, row + 1, following, OBSERVATION_ONLY, episode)
                return Written(lane, row + 2, 0, None, True)
            for leaf, item in zip(self._obs_columns, following, strict=True):
                columns[leaf].put(at, row + 1, item)
            return Written(lane, row + 1, row + 2, following, False)
        return Written(lane, row + 1, 0, None, terminated or truncated)

    def publish(self, step: Written, *, late: bool = False) -> None:
        """Publish a step that was written; ``late`` where others of the same call are published already."""
        lane = step.lane
        lane.segment.publish(lane.at, step.rows, step.observed, late=late)
        lane.pending = step.pending
        lane.open, lane.continues, lane.resumes_at = not step.ended, False, None
        if len(self.lanes) == 1:
            self._set_cursor(lane)

    def _set_cursor(self, lane: Any) -> None:
        """See how far a lone lane can go on without a look at anything."""
        segment, limit = lane.segment, self.rolling.next_look()
        row = segment.rows[0]
        if lane.cursor is None or row > lane.cursor.last:
            found = AppendCursor(segment, row, limit) if row + 1 < min(limit, segment.reserved[0]) else None
            lane.cursor = found if found is not None and row <= found.last else None

    def _put_final(
        self,
        segment: SegmentWriter,
        at: int,
        row: int,
        obs: Items | None,
        flags: int,
        episode: EpisodeItems | None,
    ) -> None:
        """Write an observation-only row, or with no ``obs`` one whose observation is there or that has none."""
        for leaf in self.columns[self.obs_count :]:
            # An append that was interrupted may have left bytes here.
            segment.columns[leaf].put(at, row, segment.columns[leaf].zero)
        if obs is not None:
            for leaf, item in zip(self._obs_columns, obs, strict=True):
                segment.columns[leaf].put(at, row, item)
        segment.columns[layout.TIME].put(at, row, self.now)
        segment.columns[layout.DONE].put(at, row, flags | self._put_episode(segment, at, row, episode))

    def _put_episode(self, segment: SegmentWriter, at: int, row: int, episode: EpisodeItems | None) -> int:
        if not episode:
            return 0
        for leaf, item in episode.items():
            segment.columns[leaf].put(at, row, item)
        return EPISODE_VALUES

    # --- whole episodes ----------------------------------------------------------------------------------------------

    def block(
        self,
        lane: Any,
        values: Sequence[NDArray[Any]],
        final_obs: Items | None,
        terminated: bool,
        truncated: bool,
        episode: EpisodeItems | None,
    ) -> None:
        """Write and publish a whole episode at once; ``values`` have a leading axis of its steps."""
        steps = len(values[0])
        self.take_time()
        self.cut(lane, None, None, marked=True)
        ended = terminated or truncated
        marker = final_obs is None and not ended
        rows = steps + (final_obs is not None or marker)
        self._find_room(lane, rows)
        segment, at = lane.segment, lane.at
        row = segment.rows[at]
        flags = np.zeros(steps, np.uint8)
        flags[0] = FIRST
        flags[-1] |= (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
        if rows == steps:
            flags[-1] |= self._put_episode(segment, at, row + steps - 1, episode)
        for leaf, value in zip(self.columns, values, strict=True):
            segment.columns[leaf].put_block(at, row, value)
        segment.columns[layout.DONE].put_block(at, row, flags)
        # Each row has a time of its own, so that they can leave one by one; to write one takes longer than that.
        segment.columns[layout.TIME].put_block(at, row, np.arange(self.now, self.now + steps))
        self.now += steps
        if rows > steps:
            end = (END_MARKER if marker else OBSERVATION_ONLY) | (0 if ended else TRUNCATED | CUT)
            self._put_final(segment, at, row + steps, final_obs, end, episode)
        segment.publish(at, row + rows)
        if self.rolling.one_an_episode:
            # Nothing comes after it; lanes that wait for their next episode should not hold descriptors.
            segment.close()

    def _find_room(self, lane: Any, rows: int) -> None:
        for last in (False, True):
            try:
                self._settle(lane, rows)
                self.rolling.look_ahead()
                row = lane.segment.rows[lane.at]
                lane.segment.reserve_rows(lane.at, row, row + rows)
                return
            except StorageFull:
                if last or not self.rolling.give_way():
                    raise

    # --- cuts --------------------------------------------------------------------------------------------------------

    def cut(self, lane: Any, final_obs: Items | None, episode: EpisodeItems | None, *, marked: bool = False) -> None:
        """End the open episode of a lane, if there is one, without the environment.

        The observation after its last step is kept where it is known: the one already visible, else ``final_obs``.
        ``marked``: readers see at once that it ended, and not by what follows.
        """
        lane.continues, lane.resumes_at = False, None
        if not lane.open:
            return
        segment, at = lane.segment, lane.at
        row = segment.rows[at]
        if lane.pending is not None or final_obs is not None:
            segment.reserve(at, row)
            final = final_obs if lane.pending is None else None
            self._put_final(segment, at, row, final, OBSERVATION_ONLY | TRUNCATED | CUT, episode)
            segment.publish(at, row + 1)
        elif episode or marked:
            segment.reserve(at, row)
            self._put_final(segment, at, row, None, END_MARKER | TRUNCATED | CUT, episode)
            segment.publish(at, row + 1)
        # Else the cut is read off what follows: a first step, or the end of the sealed segment.
        lane.open, lane.pending = False, None

    def end(self, lane: Any, final: Items | None, episode: EpisodeItems | None) -> None:
        """Cut a lane's open episode; the observation that is already visible wins over a different ``final``."""
        if lane.open and final is not None and not self.continues_pending(lane, final):
            self.warn_discontinuity()
        elif lane.continues and (episode or (final is not None and lane.resumes_at is None)):
            warnings.warn(
                f"the episode of lane {lane.number} had been cut already, as the lane did not append while others "
                "filled segments; the end_episode() that came now is too late to store its final observation or "
                "episode values",
                stacklevel=4,
            )
        self.cut(lane, final, episode, marked=True)

    def continues_pending(self, lane: Any, obs: Items) -> bool:
        """Whether ``obs`` is the observation that the lane's last step led to, as far as that is known."""
        return _continues(obs, lane.pending)

    def warn_discontinuity(self) -> None:
        """Say once that an observation did not continue its episode."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                "an appended obs differs from the next_obs of the step before; the episode was cut there. Reset "
                "observations need end_episode() or a done step before them, and normalised or stacked ones must be "
                "the same bytes in both places",
                stacklevel=7,
            )

    def _cut_if_needed(self, lane: Any, items: Items) -> None:
        obs = items[: self.obs_count]
        if not self.continues_pending(lane, obs):
            self.cut(lane, None, None)
            self.warn_discontinuity()
        elif self.rolling.overstays(lane.segment):
            self.cut(lane, obs, None)
            lane.continues, lane.resumes_at = True, list(obs)

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def segments(self) -> list[SegmentWriter]:
        """The segments this writer has open: at most two, or one a lane in the layout of one group an episode."""
        return self.rolling.open

    def close(self) -> None:
        """Cut what is open and hand every segment over to be sealed."""
        self.take_time()
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
        """Make every published step durable, those in segments that were left included."""
        for segment in self.segments:
            segment.settle()
            segment.mark()
        if self.rolling.left:
            self._sealer.drain()
            self.rolling.left = False

    def drain(self) -> None:
        """Wait until every segment that was handed over is sealed."""
        self._sealer.drain()

    def abandon(self, *, seal: bool = True) -> None:
        """Let go of every segment as it is; each is sealed up to what was committed, now or by the next process."""
        self.rolling.abandon(seal=seal)


def _continues(items: list[Any], known: list[bytes] | None) -> bool:
    """Whether the first items have these bytes; nothing known contradicts nothing."""
    return known is None or items[: len(known)] == known
