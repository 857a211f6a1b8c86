"""Writing episodes to segments: the flags of rows, and cuts of episodes.

`Writer` and `VectorWriter` cast and check all values before they call this module. After rows are reserved for a step,
only a failure of the disk can prevent the publication of the step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import StorageFull, warn_caller
from diskreplay.ids import DISCARD, DISCARD_BEFORE, EPISODE_VALUES, Ints
from diskreplay.retention.retention import Retention
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.machine import clock_ns
from diskreplay.segments.segment_writer import SegmentWriter
from diskreplay.writing.append_cursor import AppendCursor, EpisodeItems, Items, Lane, final_flags, step_flags
from diskreplay.writing.rotation import Rotation
from diskreplay.writing.sealer import Sealer

DISCONTINUITY = (
    "an appended obs differs from the next_obs of the step before; the episode was cut there. Steps of several "
    "environments need a lane each, num_envs=; an episode must end, with a done step or end_episode(), before the "
    "observation of a reset; and an observation that is normalised or stacked again has other values: append the same "
    "values as next_obs and as obs"
)

Array = NDArray[Any]

T = TypeVar("T")

# The number of a lane or row, or an array with one number per lane.
Places = TypeVar("Places", int, Ints)


class EpisodeWriter:
    """The open segments of one writer, and the lanes that write to them.

    Concurrency: one thread at a time, in the process that made the writer. Opening a segment takes the store lock;
    appending takes no lock.
    """

    def __init__(self, root: Root, lanes: int, retention: Retention, sealer: Sealer) -> None:
        self.path = root.path
        self.columns = list(root.schema.step_leaves)
        self._obs_columns = [leaf for leaf in self.columns if leaf == "obs" or leaf.startswith("obs/")]
        self._obs_dtypes = [root.schema.leaves[leaf].dtype for leaf in self._obs_columns]
        self.obs_count = len(self._obs_columns)
        self.rest: list[str] = self.columns[self.obs_count :]
        self._sealer = sealer
        self.explain = root.explain
        self._warned = False
        self._cut_listener: Callable[[], Callable[[int], None] | None] = lambda: None
        self.now = 0
        self.lanes: list[Lane] = [Lane(i) for i in range(lanes)]
        self.rotation = Rotation(
            root, self.lanes, retention, sealer, lambda lane: self.cut(lane, None, None, marked=True)
        )

    def read_clock(self) -> None:
        """Advance `now` to the present time, unless `now` is later: the next rows get the time `now`.

        An `AppendCursor` reads the clock itself.
        """
        self.now = max(self.now, clock_ns())

    def begin_priorities(self) -> None:
        """Add the array of priorities to the segments; every later step must have a priority as its last item.

        Raises StorageFull, StoreLocked or StoreNotFound if a segment cannot get the array. After such an error, steps
        are still appended without a priority.
        """
        if not self.rotation.has_priority:
            self.rotation.begin_priorities()
            for columns in self.columns, self.rest:
                columns.append(layout.PRIORITY)
            for lane in self.lanes:
                lane.cursor = None

    # --- steps and episodes -------------------------------------------------------------------------------------------

    def append(
        self,
        obs: Items,
        rest: Items,
        next_obs: Items | None,
        terminated: bool,
        truncated: bool,
        episode: EpisodeItems | None,
    ) -> None:
        """Write and publish a step of a writer with one lane.

        Raises StorageFull if the disk has no room. The step was not written, but an open episode that the step does not
        continue may have been cut.
        """
        lane = self.lanes[0]
        step = obs, rest, next_obs, terminated, truncated, episode
        if lane.cursor is None or not lane.cursor.append(*step):
            lane.cursor = None
            self.read_clock()
            rows = 2 if terminated or truncated or next_obs is not None else 1
            segment = self.make_room(lane, obs, rows, values=bool(episode))
            lane.cursor = AppendCursor(lane, segment, self._obs_columns, self.rest, *self.rotation.row_limits())
            if not lane.cursor.append(*step, self.now):
                self._append_block_of_one(lane, *step)

    def _append_block_of_one(
        self,
        lane: Lane,
        obs: Items,
        rest: Items,
        next_obs: Items | None,
        terminated: bool,
        truncated: bool,
        episode: EpisodeItems | None,
    ) -> None:
        """Write and publish a step that a new `AppendCursor` refused: the step's rows may be in two chunks."""
        values = dict(zip(self.rest, rest, strict=True))
        if lane.pending is None:
            values |= dict(zip(self._obs_columns, obs, strict=True))
        flags, final = lane.flags(next_obs, terminated, truncated, episode)
        values[layout.DONE], values[layout.TIME] = flags, self.now
        self._append_rows(lane, lane.home, 1, values, next_obs, final, episode)
        ended = terminated or truncated
        lane.pending = None if ended else next_obs
        lane.open, lane.continues, lane.resumes_at = not ended, False, None

    def append_block(
        self,
        lane: Lane,
        values: Sequence[Array],
        final_obs: Items | None,
        terminated: bool,
        truncated: bool,
        episode: EpisodeItems | None,
    ) -> None:
        """Write and publish a complete episode at once; the first axis of each array in ``values`` has the steps."""
        steps, ended = len(values[0]), terminated or truncated
        self.read_clock()
        self.cut(lane, None, None, marked=True)
        final = 0 if ended and final_obs is None else final_flags(ended, final_obs is not None, bool(episode))
        segment = self.make_room(lane, [], steps + (final > 0), whole=True, values=bool(episode))
        flags = np.zeros(steps, np.uint8)
        flags[0] = step_flags(True, False, False, False)
        flags[-1] |= step_flags(False, False, terminated, truncated)
        # Successive rows are 1 ns apart, so that the store's limits can hide rows one by one. No time is in the future,
        # because writing a row takes longer than 1 ns.
        times = np.arange(self.now, self.now + steps)
        self.now += steps
        fields = dict(zip(self.columns, values, strict=True))
        fields[layout.DONE], fields[layout.TIME] = flags, times
        if episode and not final:
            flags[-1] |= EPISODE_VALUES
        self._append_rows(lane, segment, steps, fields, final_obs, final, episode)
        if self.rotation.segment_per_episode:
            # The segment is complete: close its files now, and not when the lane's next episode begins.
            segment.close()

    def _append_rows(
        self,
        lane: Lane,
        segment: SegmentWriter,
        steps: int,
        fields: Mapping[str, Any],
        next_obs: Items | None,
        final: int,
        episode: EpisodeItems | None,
    ) -> None:
        """Write and publish successive steps of a lane in reserved rows, and write ``next_obs`` to the row after.

        If ``final`` is not 0, the row after the steps ends the episode, and gets the flags ``final``. ``episode`` has
        the values of episode fields if the episode ends.

        Raises StorageFull if the disk is full: some file systems do not keep reserved blocks. The call may be repeated.
        """
        at, row = lane.at, segment.rows[lane.at]
        stop = row + steps
        obs = {} if next_obs is None else dict(zip(self._obs_columns, next_obs, strict=True))
        segment.write(at, row, fields)
        if episode:
            segment.write_values(at, episode)
        valued = at if episode else None
        if final:
            self.write_final(segment, at, stop, final, obs)
            segment.publish(at, stop + 1, steps + 1, valued=valued)
        else:
            segment.write(at, stop, obs)
            segment.publish(at, stop, steps, next_obs is not None, valued)

    def write_final(
        self,
        segment: SegmentWriter,
        lanes: Places,
        rows: Places,
        flags: int,
        given: Mapping[str, Any],
    ) -> None:
        """Write the row after an episode's last step, with the flags ``flags``, in one or in several lanes.

        ``given`` has final observations that are not written yet, and times that differ from `now`, by the path of the
        leaf.
        """
        # All fields are written, as an interrupted append may have left bytes in these rows.
        columns = segment.columns
        fields: dict[str, Any]
        if isinstance(rows, int):
            fields = {leaf: columns[leaf].zero for leaf in self.rest}
            fields[layout.DONE], fields[layout.TIME] = flags, self.now
        else:
            fields = {leaf: np.zeros(len(rows), columns[leaf].item) for leaf in (*self.rest, layout.DONE, layout.TIME)}
            fields[layout.DONE].fill(flags)
            fields[layout.TIME].fill(self.now)
        fields |= given
        segment.write(lanes, rows, fields)
        segment.final_rows[lanes] = rows

    # --- room --------------------------------------------------------------------------------------------------------

    def make_room(
        self, lane: Lane, obs: Items, rows: int, *, whole: bool = False, values: bool = False
    ) -> SegmentWriter:
        """Reserve disk blocks for the next ``rows`` rows of a lane, and return the segment of these rows.

        ``obs`` is the observation of the next step. The lane's open episode is cut if this observation does not
        continue it, or if the lane's segment has to end. If ``values`` is True, room for the values of an episode is
        reserved, too. ``whole`` is True if the rows are a complete episode: the lane has no open episode.

        Raises StorageFull if the disk has no room; no row was written, except perhaps the row that ends a cut episode.
        """
        return self._with_room(lambda: self._make_room(lane, obs, rows, whole, values))

    def reserve_next(self, segment: SegmentWriter, lanes: NDArray[np.bool_], count: Ints | int) -> None:
        self._with_room(lambda: segment.reserve_next(lanes, count))

    def _with_room(self, reserve: Callable[[], T]) -> T:
        try:
            return reserve()
        except StorageFull:
            if not self.rotation.preallocator.discard():
                raise
            return reserve()

    def _make_room(self, lane: Lane, obs: Items, rows: int, whole: bool, values: bool) -> SegmentWriter:
        if lane.open:
            self._cut_if_needed(lane, obs)
        if not lane.open:
            if lane.continues and not self._continues(obs, lane.resumes_at):
                lane.continues = False
                self._note_discontinuity(lane)
            changes = self.rotation.changes
            self.rotation.assign_segment(lane, rows if whole else 1)
            if self.rotation.changes != changes:
                self.read_clock()  # no row may have a time before its segment was made
        self.rotation.preallocate()
        segment = lane.home
        row = segment.rows[lane.at]
        segment.reserve_rows(lane.at, row, row + rows)
        if values:
            segment.reserve_values(lane.at)
        return segment

    # --- cuts --------------------------------------------------------------------------------------------------------

    def cut(self, lane: Lane, final_obs: Items | None, episode: EpisodeItems | None, *, marked: bool = False) -> None:
        """Cut the open episode of a lane, if there is one.

        If an observation is already visible after the last step, it becomes the final observation. Without such an
        observation, ``final_obs`` becomes the final observation, if it is given. With ``marked``, a row that ends the
        episode is always written, so readers see the end of the episode at once. Without ``marked``, readers may see
        the end of the episode only when the lane's next row is published or the segment is sealed.
        """
        lane.continues, lane.resumes_at = False, None
        if not lane.open:
            return
        has_observation = lane.pending is not None or final_obs is not None
        if has_observation or episode or marked:
            segment, at = lane.home, lane.at
            row = segment.rows[at]
            segment.reserve(at, row)
            if episode:
                segment.reserve_values(at)
                segment.write_values(at, episode)
            unwritten = final_obs if lane.pending is None else None
            obs = {} if unwritten is None else dict(zip(self._obs_columns, unwritten, strict=True))
            self.write_final(segment, at, row, final_flags(False, has_observation, bool(episode)), obs)
            segment.publish(at, row + 1, 1, valued=at if episode else None)
        lane.open, lane.pending = False, None

    def end(self, lane: Lane, final: Items | None, episode: EpisodeItems | None) -> None:
        """Cut a lane's open episode with the final observation ``final``.

        If an observation after the last step is already visible, it stays the final observation, even if ``final``
        differs.
        """
        if lane.open and final is not None and not self._continues(final, lane.pending):
            self._note_discontinuity(lane)
        elif lane.continues and (episode or (final is not None and lane.resumes_at is None)):
            warn_caller(
                f"the episode of lane {lane.number} had been cut already, as this lane appended no steps while other "
                "lanes filled segments; this call of end_episode() is too late to store a final observation or episode "
                "values",
            )
        self.cut(lane, final, episode, marked=True)

    def discard(self, lane: Lane) -> None:
        """Discard a lane's open episode, or the cut episode that the lane's next step may continue.

        Readers leave out the episode and its parts in older segments. Raises StorageFull if the disk has no room; the
        call may be repeated.
        """
        if not lane.open and not lane.continues:
            return
        if lane.open:
            segment, flags = lane.home, DISCARD
            segment.reserve(lane.at, segment.rows[lane.at])
        else:
            lane.resumes_at = None  # there is no observation that `make_room` could compare
            segment, flags = self.make_room(lane, [], 1), DISCARD_BEFORE
        row = segment.rows[lane.at]
        self.write_final(segment, lane.at, row, flags, {})
        segment.publish(lane.at, row + 1, 1)
        lane.open, lane.pending, lane.continues, lane.resumes_at = False, None, False, None

    def report_cuts_to(self, listener: Callable[[], Callable[[int], None] | None]) -> None:
        self._cut_listener = listener

    def _note_discontinuity(self, lane: Lane) -> None:
        if (listener := self._cut_listener()) is not None:
            listener(lane.number)
        elif not self._warned:
            self._warned = True
            warn_caller(DISCONTINUITY)

    def _cut_if_needed(self, lane: Lane, obs: Items) -> None:
        if not self._continues(obs, lane.pending):
            self.cut(lane, None, None)
            self._note_discontinuity(lane)
        elif self.rotation.has_to_end(lane.home):
            self.cut(lane, obs, None)
            lane.continues, lane.resumes_at = True, obs

    def _continues(self, obs: Items, known: list[bytes] | None) -> bool:
        """Return whether ``obs`` equals the observation ``known``; True if ``known`` is None."""
        if known is None or obs == known:
            return True
        rows = zip(self._obs_dtypes, obs, known, strict=True)
        return all(bool(same_rows(*(np.frombuffer(row, dtype)[None] for row in pair))[0]) for dtype, *pair in rows)

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cut open episodes and submit every segment to the `Sealer`; after an interrupt, call this again.

        Raises the error of a mark, if there is one other than StorageFull: then no open segment is sealed.
        """
        try:
            self.rotation.check_failure()
        except BaseException:
            self.rotation.abandon(seal=False)
            raise
        self.read_clock()
        full: StorageFull | None = None
        try:
            for lane in self.lanes:
                if lane.segment is None:
                    continue
                try:
                    self.cut(lane, None, None)
                except StorageFull as error:  # the sealer ends the episode when the disk has room
                    full = error
        finally:
            self.rotation.abandon()
        if full is not None:
            raise full

    def flush(self) -> None:
        """Make every published step durable, also the steps in submitted segments that are not sealed yet."""
        for segment in self.rotation.open:
            segment.publish_delayed()
            segment.mark()
        if self.rotation.waits_for_sealing:
            self.drain()
            self.rotation.waits_for_sealing = False

    def drain(self) -> None:
        """Wait until submitted segments are sealed; raise an error of sealing or of a mark, if there is one.

        A StorageFull of a mark is not raised.
        """
        try:
            self._sealer.drain()
        except StorageFull:
            self.rotation.check_failure()
            raise
        self.rotation.check_failure()

    def wait_for_sealing(self) -> None:
        self._sealer.wait()


def same_rows(rows: Array, others: Array) -> NDArray[np.bool_]:
    """Return, for each i, whether ``rows[i]`` equals ``others[i]``; NaN equals NaN, and 0.0 equals -0.0."""
    same = rows == others
    if rows.dtype.kind == "f":
        same |= (rows != rows) & (others != others)
    found: NDArray[np.bool_] = same.all(axis=tuple(range(1, same.ndim)))
    return found
