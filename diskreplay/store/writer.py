"""Writers: what a collector calls. They check and cast everything before the first byte is written."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import SchemaError, StorageFull, WriterClosed
from diskreplay.folders import shown_paths
from diskreplay.format.schema import Schema
from diskreplay.store.casting import leaf_caster, part_caster
from diskreplay.store.limiter import AttachedLimiter
from diskreplay.store.marker import DEFAULT_DURABILITY_S, Durability, Marker, check_durability
from diskreplay.store.recorder import EpisodeItems, Items, Recorder


class _Process:
    """The number of this process: asking the system at every append takes longer than all the rest of the check."""

    def __init__(self) -> None:
        self.look()

    def look(self) -> None:
        self.pid = os.getpid()


_process = _Process()
os.register_at_fork(after_in_child=_process.look)


def as_flag(value: Any, name: str) -> bool:
    """Return a bool from a truth value: a bool or a number of any library, alone or in an array of one."""
    if type(value) is bool:
        return value
    if type(value) is np.bool_:
        return bool(value)
    array = _plain(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise SchemaError(f"{name} is one truth value a step, not {value!r:.80}")
    return bool(array.item())


class _BaseWriter:
    """What both writers share: casting by the schema, syncing, closing."""

    def __init__(
        self,
        schema: Schema,
        recorder: Recorder,
        durability: Durability,
        on_close: Callable[[Any], None],
        limiter: AttachedLimiter | None = None,
        marker: Marker | None = None,
    ) -> None:
        self._schema, self._recorder, self._limiter = schema, recorder, limiter
        self._flushes_episodes = check_durability(durability) == "episode"
        self._on_close, self._marker = on_close, marker
        self._pid = _process.pid
        self._closed = False
        self._prepare_casters()
        if marker is not None and durability != "none":
            every_s = DEFAULT_DURABILITY_S if self._flushes_episodes else float(durability)
            marker.add(recorder.rolling, every_s)

    def _prepare_casters(self) -> None:
        schema = self._schema
        self._obs_items, self._action_items, self._extra_items = (
            part_caster(schema, part) for part in ("obs", "action", "extra")
        )
        self._reward_item = leaf_caster(schema.reward, "reward")
        self._has_extra = bool(schema.extra)
        # One array and one action, as most schemas have it: without the lists in between.
        self._lone = "obs" in schema.leaves and "action" in schema.leaves
        if self._lone:
            self._obs_item, self._action_item = (leaf_caster(schema.leaves[x], x) for x in ("obs", "action"))

    def _check_usable(self) -> None:
        if self._closed:
            raise WriterClosed("this writer is closed; ask the store for a new one: store.writer()")
        if _process.pid != self._pid:
            raise WriterClosed(
                "this writer belongs to the parent of this forked process; open the store here for another"
            )
        if self._recorder.rolling.failure is not None:
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what went wrong in the background: once where there was no room, else for good."""
        rolling = self._recorder.rolling
        error, rolling.failure = rolling.failure, None
        if error is None:
            return
        if not isinstance(error, StorageFull):
            self._closed = True
            # Not sealed here: after a failed sync, a later one that succeeds proves nothing.
            self._end(seal=False)
        raise error

    def _end(self, *, seal: bool) -> None:
        """Leave every segment as it is."""
        if self._marker is not None:
            self._marker.remove(self._recorder.rolling)
        self._recorder.abandon(seal=seal)
        self._on_close(self)

    def _cast(self, part: str, value: Any, leading: tuple[int, ...] = ()) -> list[NDArray[Any]]:
        leaves = self._schema.leaves
        return [leaves[path].cast(raw, path, leading) for path, raw in self._schema.flatten(part, value)]

    def _cast_episode(self, episode: dict[str, Any] | None) -> EpisodeItems | None:
        if not episode:
            return None
        leaves = self._schema.leaves
        flat = self._schema.flatten("episode", episode)
        return {path: leaf_caster(leaves[path], path)(raw) for path, raw in flat}

    def _after_step(self, ended: bool) -> None:
        if ended and self._flushes_episodes:
            self.flush()

    @contextmanager
    def _recording(self, inserts: bool = True) -> Iterator[None]:
        """Wait for the limiter; close the writer where a step may have been interrupted before our notes of it."""
        with nullcontext() if self._limiter is None or not inserts else self._limiter.inserting():
            yield from self._guarded()

    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except StorageFull:
            raise  # refused as a whole, before anything was written
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        self._closed = True
        if self._marker is not None:
            self._marker.remove(self._recorder.rolling)
        self._recorder.abandon()
        self._recorder.explain(error)

    @shown_paths()
    def flush(self) -> None:
        """Wait until every published step is durable.

        Raises
        ------
        WriterClosed
            The writer is closed.
        StorageFull
            There is no room to seal a segment that the writer has left. Everything is there; flush again later.
        StoreNotFound
            The store was deleted or replaced since it was opened; the writer closes.
        OSError
            The disk refused. What it holds is unknown from then on, so the writer closes.
        """
        self._check_usable()
        try:
            self._recorder.flush()
        except StorageFull:
            raise
        except OSError as error:
            self._closed = True
            # Not sealed here: after a failed sync, a later one that succeeds proves nothing.
            self._end(seal=False)
            self._recorder.explain(error)
            raise

    @shown_paths()
    def close(self) -> None:
        """Cut what is open, seal, and wait until that is done. Closing twice is fine.

        Raises
        ------
        StorageFull
            There is no room to seal. Everything is there; the next process that opens the store seals it.
        OSError
            The disk refused, here or in the background. What it holds is unknown.
        """
        if self._closed:
            return
        if _process.pid != self._pid:
            return  # the parent's segment stays the parent's
        self._closed = True
        if self._marker is not None:
            self._marker.remove(self._recorder.rolling)
        failure = self._recorder.rolling.failure
        if failure is not None and not isinstance(failure, StorageFull):
            self._end(seal=False)
            raise failure
        try:
            self._recorder.close()
        except OSError as error:
            self._recorder.explain(error)
            raise
        finally:
            self._on_close(self)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, as its segments are locked by this process; send the store "
            "to the other one and ask it there for a writer: store.writer()"
        )

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the writer."""
        self.close()


class Writer(_BaseWriter):
    """Appends the steps of one environment. Made by `Store.writer`.

    Concurrency: one thread at a time, in the process that made it; a forked child gets WriterClosed. Any number of
    writers, in any processes, write to one store at once without waiting for each other.
    """

    def append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any = False,
        next_obs: Any = None,
        episode: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        """Append one step; it is visible to every process when the call returns.

        Parameters
        ----------
        obs, action, reward
            Of this step, as the schema says.
        terminated, truncated : bool
            How the step ended the episode, if it did.
        next_obs : optional
            The observation the step led to, the final one where it ended the episode. With it the step can be sampled
            at once. The next ``obs`` must be the same bytes; where it is not, the episode is cut there, with a warning.
        episode : dict, optional
            Values of the whole episode, with the step that ends it.
        **extra
            The schema's further fields of a step, all of them.

        Raises
        ------
        SchemaError
            A value does not fit the schema; nothing was written.
        StorageFull
            There is no room; nothing was written.
        RateLimited
            The limiter's timeout passed; nothing was written.
        WriterClosed
            The writer is closed.
        StoreNotFound
            The store was deleted or replaced since it was opened; the writer closes.
        """
        self._check_usable()
        if terminated is not False:
            terminated = as_flag(terminated, "terminated")
        if truncated is not False:
            truncated = as_flag(truncated, "truncated")
        if self._lone:
            items = [self._obs_item(obs), self._action_item(action), self._reward_item(reward)]
        else:
            items = [*self._obs_items(obs), *self._action_items(action), self._reward_item(reward)]
        if extra or self._has_extra:
            items += self._extra_items(extra)
        if next_obs is None:
            following = None
        else:
            following = [self._obs_item(next_obs)] if self._lone else self._obs_items(next_obs)
        ended = terminated or truncated
        if episode and not ended:
            raise SchemaError(f"episode values {sorted(episode)} go with the step that ends the episode")
        finals = self._cast_episode(episode)
        if self._limiter is not None:
            with self._recording():
                self._record(items, following, terminated, truncated, finals)
        else:
            try:  # as `_recording`, without the microsecond that a context manager takes
                if ended or not self._recorder.go_on(items, following):
                    self._record(items, following, terminated, truncated, finals)
            except StorageFull:
                raise  # refused as a whole, before anything was written
            except BaseException as error:
                self._give_up(error)
                raise
        if ended and self._flushes_episodes:
            self.flush()

    def _record(
        self,
        items: Items,
        following: list[bytes] | None,
        terminated: bool,
        truncated: bool,
        finals: EpisodeItems | None,
    ) -> None:
        recorder = self._recorder
        lane = recorder.lanes[0]
        recorder.prepare(lane, items, terminated or truncated or following is not None)
        recorder.commit(lane, items, following, terminated, truncated, finals)

    def append_episode(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        *,
        terminated: Any,
        truncated: Any = False,
        episode: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        """Append an episode of T steps in one piece; readers see all of it or nothing.

        ``obs`` has T + 1 rows with the final observation, or T without; all else has T. An episode that is neither
        terminated nor truncated is recorded as cut. One that `append` left open is cut first. Raises as `append`.
        """
        self._check_usable()
        append_block(self, self._recorder.lanes[0], obs, action, reward, terminated, truncated, episode, extra)
        self._after_step(True)

    def end_episode(self, final_obs: Any = None, episode: dict[str, Any] | None = None) -> None:
        """Cut the open episode: recorded as truncated, with ``final_obs`` as its last observation where given.

        Nothing happens where no episode is open. Raises as `append`.
        """
        self._check_usable()
        final = None if final_obs is None else self._obs_items(final_obs)
        values = self._cast_episode(episode)
        with self._recording(inserts=False):
            end_lane(self._recorder, self._recorder.lanes[0], final, values)
        self._after_step(True)


def end_lane(recorder: Recorder, lane: Any, final: Items | None, episode: EpisodeItems | None) -> None:
    """Cut a lane's open episode; the observation that is already visible wins over a different ``final``."""
    if lane.open and final is not None and not recorder.continues_pending(lane, final):
        recorder.warn_discontinuity()
    elif lane.continues and (episode or (final is not None and lane.resumes_at is None)):
        warnings.warn(
            f"the episode of lane {lane.number} had been cut already, as the lane did not append while others filled "
            "segments; the end_episode() that came now is too late to store its final observation or episode values",
            stacklevel=3,
        )
    recorder.cut(lane, final, episode)


def append_block(
    writer: _BaseWriter,
    lane: Any,
    obs: Any,
    action: Any,
    reward: Any,
    terminated: Any,
    truncated: Any,
    episode: dict[str, Any] | None,
    extra: dict[str, Any],
) -> None:
    """Check, cast and record a whole episode in a lane; shared by both writers' ``append_episode``."""
    terminated, truncated = as_flag(terminated, "terminated"), as_flag(truncated, "truncated")
    steps = _length(reward, "reward")
    if steps < 1:
        raise SchemaError("an episode has at least one step; this one has none")
    first_leaf = writer._schema.flatten("obs", obs)[0]
    obs_rows = _length(first_leaf[1], first_leaf[0])
    if obs_rows not in (steps, steps + 1):
        raise SchemaError(
            f"obs has {obs_rows} rows for {steps} rewards; give {steps + 1}, the final one included, or {steps}"
        )
    observations = writer._cast("obs", obs, (obs_rows,))
    rest = writer._cast("action", action, (steps,))
    rest.append(writer._schema.reward.cast(reward, "reward", (steps,)))
    rest += writer._cast("extra", extra, (steps,))
    final = [value[-1].tobytes() for value in observations] if obs_rows > steps else None
    values = [value[:steps] for value in observations] + rest
    finals = writer._cast_episode(episode)
    with writer._recording():
        writer._recorder.block(lane, values, final, terminated, truncated, finals)


def _length(value: Any, name: str) -> int:
    try:
        return len(value)
    except TypeError:
        raise SchemaError(f"{name} of a whole episode has a row for each step, not {type(value).__name__}") from None


def _plain(value: Any) -> NDArray[Any]:
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def as_flags(value: Any, name: str, count: int) -> NDArray[np.bool_]:
    """Return one bool a lane, ``(count,)``, perhaps the very array; tensors on any device are fine."""
    if type(value) is np.ndarray and value.dtype == np.bool_ and value.shape == (count,):
        return value
    flags = _plain(value)
    if flags.shape != (count,) or flags.dtype.kind not in "biuf":
        raise SchemaError(f"{name} needs shape ({count},), one truth value a lane; got {flags.dtype} {flags.shape}")
    return flags.astype(np.bool_)
