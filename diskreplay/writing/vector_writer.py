"""The writer for a vector of environments, with a lane for each environment: one call appends a step to all lanes.

A few array operations write a step to all lanes. Only lanes with a special need, such as a new segment, are treated one
by one.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.device_tensors import fetched
from diskreplay.errors import SchemaError
from diskreplay.ids import EPISODE_VALUES, POSITION_BITS, Ints
from diskreplay.kernels.table import if_made
from diskreplay.schema.schema import Schema
from diskreplay.segments.documents import layout
from diskreplay.segments.segment_column import is_bytes
from diskreplay.segments.segment_writer import SegmentWriter
from diskreplay.writing.append_cursor import Lane, final_flags, step_flags
from diskreplay.writing.casting import as_flags, as_priorities
from diskreplay.writing.episode_writer import EpisodeWriter, same_rows
from diskreplay.writing.lifetime import one_call_at_a_time
from diskreplay.writing.writer import BaseWriter

Array = NDArray[Any]
Bools = NDArray[np.bool_]

# Two values that are no number of a segment. In `LaneArrays.home`, _NOWHERE stands for a lane without a segment. _NONE
# is never in `LaneArrays.home`.
_NOWHERE = -1
_NONE = -2

# The kernel that writes a step of many lanes. The kernel is compiled only if this process also samples: a process that
# only writes should not wait for the compiler.
STEP_KERNEL = "write_lanes"


class Step(NamedTuple):
    """One step of each lane in ``lanes``, or of every lane (None). The arrays have a row for each lane of the vector.

    Rows of lanes that are not in ``lanes`` are ignored. ``chosen`` is True for the lanes in ``lanes``. ``ends`` is True
    for the lanes whose episodes are terminated. ``cuts`` is True for the lanes whose episodes are truncated. ``ended``
    is ``ends | cuts``. ``some_end`` is ``ended.any()``. ``episode`` has the values of episode fields for the ended
    episodes.
    """

    lanes: Ints | None
    chosen: Bools
    values: list[Array]
    next_obs: list[Array] | None
    ends: Bools
    cuts: Bools
    episode: dict[str, Array] | None
    ended: Bools
    some_end: bool


class LaneArrays:
    """The attributes of `Lane` for all lanes of a `VectorWriter`, as arrays with one value per lane."""

    def __init__(self, count: int) -> None:
        self.open = np.zeros(count, np.bool_)
        self.continues = np.zeros(count, np.bool_)
        self.home = np.full(count, _NOWHERE, np.int64)  # the number of a lane's segment
        self.known = np.zeros(count, np.bool_)  # whether the observation of a lane's next row is already written
        # If True, all elements of `open` and `known` are True, and all elements of `continues` are False. If False,
        # these arrays have to be read.
        self.steady = False
        self._next_obs: list[Array] = []
        self._words: list[Array] = []  # views of `_next_obs` as integers: see `_word_of`

    def next_obs_of(self, lane: int) -> list[bytes]:
        return [kept[lane].tobytes() for kept in self._next_obs]

    def keep_next_obs(self, lanes: Ints | None, next_obs: list[Array]) -> None:
        """Copy the next observations of some lanes (None: all), because the caller may reuse its arrays."""
        if not self._next_obs:
            self._next_obs = [np.zeros_like(value, order="C") for value in next_obs]
            self._words = [np.frombuffer(value, _word_of(value)) for value in self._next_obs]
        for kept, value in zip(self._next_obs, next_obs, strict=True):
            if lanes is None:
                kept[...] = value
            else:
                kept[lanes] = value[lanes]

    def discontinuous(self, values: list[Array]) -> Bools | None:
        """Return a mask of the lanes whose values differ from the observation already written to their next row.

        Returns None if no observation differs.
        """
        found = None
        if not self.steady and not np.count_nonzero(self.known):
            return None
        for words, kept, value in zip(self._words, self._next_obs, values, strict=False):
            differ = words != np.frombuffer(value, words.dtype)
            if np.count_nonzero(differ):
                found = np.zeros(len(self.open), np.bool_) if found is None else found
                lanes = np.flatnonzero(differ.reshape(len(found), -1).any(axis=1) & self.known)
                found[lanes] |= ~same_rows(kept[lanes], value[lanes])
        return found if found is not None and np.count_nonzero(found) else None


def _word_of(values: Array) -> np.dtype[Any]:
    """Return the widest unsigned integer dtype that divides a row of ``values`` into a whole number of integers.

    Rows are compared as integers of this dtype, because a float NaN differs from itself.
    """
    nbytes = values.nbytes // len(values)
    return np.dtype(f"u{next(size for size in (8, 4, 2, 1) if nbytes % size == 0)}")


class _ArrayLane(Lane):
    """A lane whose attributes are stored in the `LaneArrays` of all lanes of its writer."""

    __slots__ = ("_arrays", "_segment")

    def __init__(self, number: int, arrays: LaneArrays) -> None:
        self._arrays = arrays
        super().__init__(number)

    @property
    def open(self) -> bool:
        return bool(self._arrays.open[self.number])

    @open.setter
    def open(self, value: bool) -> None:
        self._arrays.open[self.number], self._arrays.steady = value, False

    @property
    def continues(self) -> bool:
        return bool(self._arrays.continues[self.number])

    @continues.setter
    def continues(self, value: bool) -> None:
        self._arrays.continues[self.number], self._arrays.steady = value, False

    @property
    def segment(self) -> SegmentWriter | None:
        return self._segment

    @segment.setter
    def segment(self, value: SegmentWriter | None) -> None:
        self._segment = value
        self._arrays.home[self.number] = _NOWHERE if value is None else value.number

    @property
    def pending(self) -> list[bytes] | None:
        if not self._arrays.known[self.number]:
            return None
        return self._arrays.next_obs_of(self.number)

    @pending.setter
    def pending(self, value: list[bytes] | None) -> None:
        # This setter only accepts None: `LaneArrays.keep_next_obs` sets the observations of many lanes at once.
        assert value is None
        self._arrays.known[self.number] = self._arrays.steady = False


class VectorSteps:
    """Writes the steps of a vector of environments with an `EpisodeWriter`.

    The constructor replaces the lanes of the `EpisodeWriter` by objects of `_ArrayLane`.

    Concurrency: as for `EpisodeWriter`.
    """

    def __init__(self, writer: EpisodeWriter) -> None:
        self._episode_writer = writer
        count = len(writer.lanes)
        self._every: Ints = np.arange(count)
        self._state = LaneArrays(count)
        self._no_flags = np.zeros(count, np.uint8)
        self._times: Ints = np.zeros(count, np.int64)
        # With one segment per episode, each lane is the only lane of its own segment.
        self._segment_per_episode = writer.rotation.segment_per_episode
        self._only: Ints = np.zeros(1, np.int64)
        writer.lanes[:] = [_ArrayLane(i, self._state) for i in range(count)]

    def append(self, step: Step) -> None:
        """Write and publish a step. Raises StorageFull if the disk has no room; no lane's step was written."""
        writer = self._episode_writer
        writer.read_clock()
        self._make_room(step)
        # The rows of successive lanes are 1 ns apart. `evict` and `resize` hide the steps before a given time, so steps
        # of the same time could only be hidden together.
        np.add(self._every, writer.now, out=self._times)
        writer.now += len(self._every)
        segments, flags = writer.rotation.open, self._flags(step)
        if len(segments) == 1:
            segment, here = segments[0], self._places(step.lanes)
            segment.publish(here, *self._write(segment, step.lanes, step, flags), late=False)
        else:
            home = self._state.home
            homes = [(x, here) for x in segments if len(here := np.flatnonzero(step.chosen & (home == x.number)))]
            # Rows are written to all segments before any row is published: if the disk is full, the step of no lane is
            # published.
            rows = [self._write(segment, here, step, flags) for segment, here in homes]
            for i, (segment, here) in enumerate(homes):
                segment.publish(self._places(here), *rows[i], late=i > 0)
        self._update_lanes(step)

    def last_ids(self) -> Ints:
        segments = self._episode_writer.rotation.open
        if len(segments) == 1 and not self._segment_per_episode:
            return self._last_ids_in(segments[0], None)
        found = np.full(len(self._every), -1)
        for segment in segments:
            here = np.flatnonzero(self._state.home == segment.number)
            found[here] = self._last_ids_in(segment, here)
        return found

    def _last_ids_in(self, segment: SegmentWriter, lanes: Ints | None) -> Ints:
        at = self._places(lanes)
        ids, count = segment.rows_of(at), len(segment.info.lanes)  # at first, `ids` has each lane's number of rows
        nowhere = None
        if not self._state.steady:
            is_open = self._state.open if lanes is None else self._state.open[lanes]
            ids -= ~is_open & (ids == 1 + (segment.final_rows if at is None else segment.final_rows[at]))
            nowhere = ids < 1
        ids *= count
        ids += self._every if at is None else at
        ids += (segment.number << POSITION_BITS) - count
        if nowhere is not None:
            ids[nowhere] = -1
        return ids

    def _places(self, lanes: Ints | None) -> Ints | None:
        return self._only if self._segment_per_episode else lanes

    # --- making room -------------------------------------------------------------------------------------------------

    def _make_room(self, step: Step) -> None:
        """Reserve the rows for a step, and move lanes to another segment if needed.

        Lanes that need more than rows, such as another segment or a cut, are treated one by one. A segment that is
        opened for one lane may also be the next segment of other lanes.
        """
        writer = self._episode_writer
        if not self._segment_per_episode:
            writer.rotation.preallocate()
            self._reserve_ahead()
            newest = writer.rotation.newest
            if newest is not None and self._needs_only_writing(newest, step):
                if not newest.has_room():
                    writer.reserve_next(newest, step.chosen, 2)
                return
            self._reserve_next(step)
        changes = -1
        while changes != writer.rotation.changes:
            changes = writer.rotation.changes
            for i in self._in_turn(step):
                ended = bool(step.ended[i])
                rows = 1 + (step.next_obs is not None or ended)
                values = ended and bool(step.episode)
                obs = [value[i].tobytes() for value in step.values[: writer.obs_count]]
                writer.make_room(writer.lanes[i], obs, rows, values=values)

    def _reserve_ahead(self) -> None:
        rotation = self._episode_writer.rotation
        segments = rotation.open
        for segment in segments:
            if segment.wants_reserving:
                lanes = self._every if len(segments) == 1 else np.flatnonzero(self._state.home == segment.number)
                rotation.preallocator.reserve_ahead(segment, lanes)

    def _reserve_next(self, step: Step) -> None:
        state, rotation = self._state, self._episode_writer.rotation
        chosen = step.chosen & state.open
        count = 2 if step.next_obs is not None else 1 + step.ended
        for segment in rotation.open:
            if not rotation.has_to_end(segment):
                self._episode_writer.reserve_next(segment, chosen & (state.home == segment.number), count)

    def _in_turn(self, step: Step) -> Iterator[int]:
        """Yield the lanes for which room has to be made, in ascending order.

        The caller makes room for each yielded lane before it asks for the next lane. Making room for a lane may change
        the needs of other lanes. For example, the newest segment may have to end when the last lane leaves an older
        segment.
        """
        rotation, last = self._episode_writer.rotation, -1
        changes = -1
        while changes != rotation.changes:
            changes = rotation.changes
            lanes = self._lanes_that_need_more(step)
            for i in lanes[lanes > last].tolist():
                yield i
                last = i
                if changes != rotation.changes:
                    break

    def _needs_only_writing(self, newest: SegmentWriter, step: Step) -> bool:
        """Return whether the step can be written to the newest segment as soon as rows are reserved there.

        The result may be False although the step can be written.
        """
        state, rotation = self._state, self._episode_writer.rotation
        if len(rotation.by_number) > 1 or rotation.has_to_end(newest):
            return False
        if step.some_end and step.episode and np.count_nonzero(step.ended & newest.lacks_values() & step.chosen):
            return False
        if (
            not state.steady
            and np.count_nonzero(state.open) < len(state.open)
            and (not rotation.has_room_for_episode() or np.count_nonzero(state.continues))
        ):
            return False
        discontinuous = state.discontinuous(step.values)
        return discontinuous is None or (step.lanes is not None and not np.count_nonzero(discontinuous[step.lanes]))

    def _lanes_that_need_more(self, step: Step) -> Ints:
        if self._segment_per_episode:
            return self._every if step.lanes is None else step.lanes
        state, rotation = self._state, self._episode_writer.rotation
        newest = rotation.newest
        open_to_episodes = newest.number if newest is not None and rotation.has_room_for_episode() else _NONE
        found = ~state.open & ((state.home != open_to_episodes) | state.continues)
        discontinuous = state.discontinuous(step.values)
        if discontinuous is not None:
            found |= state.open & discontinuous
        rows = 2 if step.next_obs is not None else 1 + step.ended
        for segment in rotation.by_number.values():
            lacks = segment.lacks_room(rows)
            if rotation.has_to_end(segment):
                lacks |= state.open
            if step.some_end and step.episode:
                lacks |= step.ended & segment.lacks_values()
            found |= lacks & (state.home == segment.number)
        return np.flatnonzero(found & step.chosen)

    # --- writing -----------------------------------------------------------------------------------------------------

    def _write(
        self, segment: SegmentWriter, lanes: Ints | None, step: Step, flags: NDArray[np.uint8]
    ) -> tuple[Ints, int, bool | NDArray[np.bool_], Ints | None]:
        """Write a step to reserved rows of some lanes of one segment (None: all lanes), without publishing the step.

        ``flags`` has the flags of every lane's row; see `_flags`. Returns the arguments of `SegmentWriter.publish` that
        follow ``lanes``.
        """
        writer = self._episode_writer
        at = self._places(lanes)
        rows = segment.rows_of(at)
        ended = step.ended if lanes is None else step.ended[lanes]
        some_end, valued = step.some_end and bool(np.count_nonzero(ended)), None
        if some_end:
            ends = np.flatnonzero(ended)
            last, last_at = (ends if chosen is None else chosen[ends] for chosen in (lanes, at))
            if step.episode:
                valued = last_at
                segment.write_values(valued, {leaf: value[last] for leaf, value in step.episode.items()})
        write = partial(segment.write, picked=lanes, kernel=if_made(STEP_KERNEL))
        values = self._observations(segment, lanes, rows, step)
        values |= zip(writer.rest, step.values[writer.obs_count :], strict=True)
        values[layout.DONE], values[layout.TIME] = flags, self._times
        if step.next_obs is None:
            if valued is not None:
                flags[last] |= EPISODE_VALUES
            write(at, rows, values)
            rows += 1
            return rows, len(rows), False, valued
        write(at, rows, values)
        rows += 1
        write(at, rows, dict(zip(writer.columns, step.next_obs, strict=False)))
        if not some_end:
            return rows, len(rows), True, None
        flags_behind = final_flags(True, True, valued is not None)
        writer.write_final(segment, last_at, rows[ends], flags_behind, {layout.TIME: self._times[last]})
        rows += ended
        return rows, len(rows) + len(ends), ~ended, valued

    def _flags(self, step: Step) -> NDArray[np.uint8]:
        """Return the flags of every lane's row; they are arbitrary for a lane that is not in ``step.lanes``."""
        state = self._state
        if not step.some_end and (state.steady or np.count_nonzero(state.open) == len(state.open)):
            return self._no_flags
        parts = ~state.open, state.continues, step.ends, step.cuts
        return step_flags(*(part.view(np.uint8) for part in parts))

    def _observations(self, segment: SegmentWriter, lanes: Ints | None, rows: Ints, step: Step) -> dict[str, Array]:
        """Return the observations to write to all of these rows. If only some rows have none yet, write those here."""
        if self._state.steady:
            return {}
        known = self._state.known if lanes is None else self._state.known[lanes]
        count = np.count_nonzero(known)
        if count == len(known):
            return {}
        writer = self._episode_writer
        fields = dict(zip(writer.columns, step.values[: writer.obs_count], strict=False))
        if not count:
            return fields
        fresh = np.flatnonzero(~known)
        at = fresh if lanes is None else lanes[fresh]
        segment.write(self._places(at), rows[fresh], fields, picked=at, kernel=if_made(STEP_KERNEL))
        return {}

    def _update_lanes(self, step: Step) -> None:
        state = self._state
        if step.next_obs is not None:
            state.keep_next_obs(step.lanes, step.next_obs)
            if state.steady and not step.some_end:
                return  # `open`, `continues` and `known` are unchanged
        chosen: Any = slice(None) if step.lanes is None else step.lanes
        going_on = ~step.ended[chosen]
        state.open[chosen] = going_on
        state.continues[chosen] = False
        state.known[chosen] = going_on if step.next_obs is not None else False
        state.steady = step.lanes is None and step.next_obs is not None and not step.some_end


def as_item(leaf: str, value: Any) -> Any:
    return value.tobytes() if is_bytes(leaf, value.shape) else value


class VectorWriter(BaseWriter):
    """Appends the steps of ``num_envs`` environments, one lane each. Made by ``Store.writer(num_envs=N)``.

    Concurrency: as for `Writer`.

    Examples
    --------
    >>> schema = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"))
    >>> with dr.create("vector.replay", schema) as store, store.writer(num_envs=8) as writer:
    ...     obs, no = np.zeros((8, 4)), np.zeros(8, bool)
    ...     writer.append(obs, action=np.zeros(8, int), reward=np.ones(8), terminated=no, truncated=no, next_obs=obs)
    ...     store.refresh()
    8
    """

    def __init__(self, schema: Schema, episode_writer: EpisodeWriter, *args: Any) -> None:
        super().__init__(schema, episode_writer, *args)
        self._steps = VectorSteps(episode_writer)

    @property
    def num_envs(self) -> int:
        """The number of lanes."""
        return len(self._episode_writer.lanes)

    @property
    def last_ids(self) -> NDArray[np.int64]:
        """The id of each lane's newest step, ``(num_envs,)``; -1 for a lane without a step in its present segment."""
        return self._steps.last_ids()

    @one_call_at_a_time
    def append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any = None,
        next_obs: Any = None,
        mask: Any = None,
        episode: dict[str, Any] | None = None,
        priority: Any = None,
        **extra: Any,
    ) -> None:
        """Append one step of every lane; all arrays have a leading axis of ``num_envs``.

        Tensors on a CUDA device are copied to pinned memory after the operations of the current stream. The call waits
        once for all copies, because it checks the values before it writes them. After the call, the caller may change
        the tensors.

        Parameters
        ----------
        obs, action, reward, next_obs, **extra
            As in `Writer.append`. ``next_obs`` has the true next observations. For a lane whose episode ends,
            ``next_obs`` has the final observation, not the first observation after the reset.
        terminated, truncated : (num_envs,) bool
            Whether the step ended each lane's episode, and how. 0 and 1 are accepted, other numbers are refused.
        mask : (num_envs,) bool, optional
            Lanes with False are skipped; their values in the arrays are ignored.
        episode : dict, optional
            The values of episode fields, ``(num_envs, ...)``: used for the lanes whose episodes end with this step.
        priority : (num_envs,) float, optional
            As in `Writer.append`. NaN means that the step of this lane has no priority.

        Raises
        ------
        SchemaError
            A value does not fit the schema; nothing was written.
        StorageFull
            The disk is full; no lane's step was written.
        StoreLocked
            Another process has held the store lock for a minute, or another thread is inside a call of this writer; no
            lane's step was written.
        WriterClosed
            The writer is closed.
        """
        count = self.num_envs
        obs, action, reward, terminated, truncated, next_obs, mask, episode, priority, extra = fetched(
            obs, action, reward, terminated, truncated, next_obs, mask, episode, priority, extra
        )
        chosen = np.ones(count, np.bool_) if mask is None else as_flags(mask, "mask", count)
        lanes = None if mask is None else np.flatnonzero(chosen)
        ends = as_flags(terminated, "terminated", count, lanes, reward)
        if truncated is None:
            cuts = np.zeros(count, np.bool_)
        else:
            cuts = as_flags(truncated, "truncated", count, lanes, reward)
        values = self._cast("obs", obs, (count,), lanes) + self._cast_rest(action, reward, extra, (count,), lanes)
        next_values = None if next_obs is None else self._cast("obs", next_obs, (count,), lanes)
        finals = self._cast_episodes(episode)
        if lanes is not None and len(lanes) == 0:
            return
        if priority is not None or self._gives_priorities:
            which = slice(None) if lanes is None else lanes
            values.append(self._with_priorities(as_priorities(priority, count, which)))
        ended = ends | cuts
        some_end = bool(np.count_nonzero(ended))  # also True if only skipped lanes have ended
        with self._recording():
            self._steps.append(Step(lanes, chosen, values, next_values, ends, cuts, finals, ended, some_end))
        if some_end and self._flushes_episodes:
            self._after_episode()

    def _cast_episodes(self, episode: dict[str, Any] | None) -> dict[str, NDArray[Any]] | None:
        return self._schema.cast("episode", episode, (self.num_envs,)) if episode else None

    @one_call_at_a_time
    def append_episode(
        self,
        lane: int,
        obs: Any,
        action: Any,
        reward: Any,
        *,
        terminated: Any,
        truncated: Any = False,
        episode: dict[str, Any] | None = None,
        priority: Any = None,
        **extra: Any,
    ) -> None:
        """Append an episode to one lane at once; see `Writer.append_episode`."""
        if not isinstance(lane, (int, np.integer)) or isinstance(lane, bool) or not 0 <= lane < self.num_envs:
            raise SchemaError(f"lane must be from 0 to {self.num_envs - 1}, not {lane!r}")
        target = self._episode_writer.lanes[int(lane)]
        given = {"terminated": terminated, "truncated": truncated, "episode": episode, "priority": priority}
        self._append_episode(target, obs, action, reward, **given, **extra)

    @one_call_at_a_time
    def end_episode(self, final_obs: Any = None, mask: Any = None, episode: dict[str, Any] | None = None) -> None:
        """Cut the open episodes of all lanes, or of lanes where ``mask`` is True; see `Writer.end_episode`."""
        count = self.num_envs
        chosen = np.ones(count, np.bool_) if mask is None else as_flags(mask, "mask", count)
        final = None if final_obs is None else self._cast("obs", final_obs, (count,), np.flatnonzero(chosen))
        values = self._cast_episodes(episode)

        def end(lane: Lane) -> None:
            i = lane.number
            self._episode_writer.end(
                lane,
                None if final is None else [value[i].tobytes() for value in final],
                None if values is None else {leaf: as_item(leaf, value[i]) for leaf, value in values.items()},
            )

        self._end_episodes(np.flatnonzero(chosen).tolist(), end)

    @one_call_at_a_time
    def discard_episode(self, mask: Any = None) -> None:
        """Discard the open episodes of all lanes, or of lanes where ``mask`` is True; see `Writer.discard_episode`."""
        chosen = np.ones(self.num_envs, np.bool_) if mask is None else as_flags(mask, "mask", self.num_envs)
        self._end_episodes(np.flatnonzero(chosen).tolist(), self._episode_writer.discard)
