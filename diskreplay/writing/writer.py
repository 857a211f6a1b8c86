"""The class `Writer` for one environment, and `BaseWriter`, the common part of `Writer` and `VectorWriter`.

All values are checked and cast before the first byte is written.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from diskreplay.device_tensors import fetched
from diskreplay.errors import SchemaError, StorageFull, StoreLocked, WriterClosed
from diskreplay.folders import shown_paths
from diskreplay.schema.schema import Schema
from diskreplay.workers import fork_listeners
from diskreplay.writing.append_cursor import EpisodeItems, Lane
from diskreplay.writing.casting import Check, LeafCaster, as_flag, as_priorities, as_priority, length, part_caster
from diskreplay.writing.episode_writer import EpisodeWriter
from diskreplay.writing.lifetime import (
    CallLock,
    OnError,
    is_inside,
    note_exclusive,
    one_call_at_a_time,
    seal_when_dropped,
    wait_for_calls,
)
from diskreplay.writing.limiter import AttachedLimiter
from diskreplay.writing.marker import Durability, Marker

# The priority of one step, or an array of priorities.
Priorities = TypeVar("Priorities", float, NDArray[Any])

# In a forked child, the writers of the parent refuse every call.
_alive = fork_listeners(lambda writer: writer.refuse_calls())


class BaseWriter:
    """The common part of `Writer` and `VectorWriter`: casts values by the schema, syncs and closes.

    A call acquires ``_lock``: see `diskreplay.writing.lifetime`. To refuse calls, for example after `close`, the writer
    replaces ``_lock`` by a lock that is never free. A call that cannot acquire ``_lock`` raises the error that
    `_refusal` returns.
    """

    def __init__(
        self,
        schema: Schema,
        episode_writer: EpisodeWriter,
        durability: Durability,
        store: object,
        limiter: AttachedLimiter | None,
        marker: Marker,
        checks: Mapping[str, Check],
    ) -> None:
        self._schema, self._episode_writer, self._limiter = schema, episode_writer, limiter
        self._checks = checks
        self._flushes_episodes = durability == "episode"
        self._owes_mark = False  # whether a call could not mark the episode that it ended: see `_after_episode`
        self._store = store  # the store stays alive while this writer exists
        self._pid, self._closed = os.getpid(), False
        self._gives_priorities = False
        self._own_lock, self._on_error = CallLock(), OnError(weakref.WeakMethod(self._abandon_after))
        self._lock = self._own_lock
        self._closing, self._closer = threading.Lock(), 0
        self.closes_later = False  # a signal handler called `close`: the present call has to close the writer
        # Marking begins first: if the system allows no more threads, an error is raised before a finalizer exists.
        episode_writer.rotation.begin_marking(marker, durability, weakref.WeakMethod(self.refuse_calls))
        self._dropped = seal_when_dropped(self, episode_writer, self._own_lock)
        _alive.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"{type(self).__name__}({state}, num_envs={len(self._episode_writer.lanes)})"

    def refuse_calls(self) -> None:
        """Make every later call raise an error."""
        held = CallLock()
        del held.free
        self._lock = held

    def _refusal(self) -> Exception:
        if os.getpid() != self._pid:
            return WriterClosed(
                "this writer belongs to the parent of this forked process; open the store here, and make a new writer"
            )
        if self._dropped.alive and (error := self._background_failure()) is not None:
            return error
        if self._lock is self._own_lock and self._dropped.alive:
            return StoreLocked(
                "another thread is in the middle of a call of this writer; one thread at a time may use it: make a "
                "writer for each thread, store.writer()"
            )
        return WriterClosed("this writer is closed; make a new one: store.writer()")

    def _background_failure(self) -> Exception | None:
        """Return the error of a background thread, if there is one and no call is in progress.

        Unless the error is StorageFull, close the writer.
        """
        rotation = self._episode_writer.rotation
        if rotation.failure is None or not self._own_lock.acquire():
            return None
        with rotation.failing:
            error = rotation.failure
            if isinstance(error, StorageFull):
                self._own_lock.release()
                rotation.failure, self._lock = None, self._own_lock
                return error
        self._abandon(seal=False)
        self._episode_writer.wait_for_sealing()
        return error

    def _release(self, lock: CallLock) -> None:
        if self._closed:
            lock.taken = True  # for good: `close` may be waiting for this lock in another thread
        else:
            lock.free = True
        if self.closes_later:
            self.closes_later = False
            if self._closed:
                self._episode_writer.drain()
            else:
                self._close_now()

    def _check_waiting(self) -> None:
        """Raise an error if the present call, which waits for its limiter, has to end."""
        if self._lock is self._own_lock and self._dropped.alive:
            return
        failure = self._episode_writer.rotation.failure
        is_closing = self._closer or self.closes_later or not self._dropped.alive or os.getpid() != self._pid
        if is_closing or failure is None:
            raise self._refusal()
        if not isinstance(failure, StorageFull):  # the next call raises StorageFull
            raise failure

    def _cast(
        self, part: str, value: Any, leading: tuple[int, ...] = (), rows: NDArray[np.int64] | None = None
    ) -> list[NDArray[Any]]:
        """Cast the values of ``part`` ("obs", "action", ...) for several steps to one array per leaf.

        Each array has the shape ``(*leading, *leaf.shape)``. The store's ``validate`` checks the steps with the indices
        ``rows`` (None: all steps).
        """
        leaves = self._schema.cast(part, value, leading)
        if self._checks:
            for path in self._checks.keys() & leaves.keys():
                self._checks[path](leaves[path] if rows is None else leaves[path][rows])
        return list(leaves.values())

    def _cast_rest(
        self,
        action: Any,
        reward: Any,
        extra: dict[str, Any],
        leading: tuple[int, ...],
        rows: NDArray[np.int64] | None = None,
    ) -> list[NDArray[Any]]:
        """Cast the actions, rewards and extra fields of several steps to one array per leaf, in the schema's order.

        For ``leading`` and ``rows`` see `_cast`.
        """
        values = self._cast("action", action, leading, rows) + self._cast("reward", reward, leading, rows)
        if extra or self._schema.extra:
            values += self._cast("extra", extra, leading, rows)
        return values

    def _with_priorities(self, cast: Priorities) -> Priorities:
        if not self._gives_priorities:
            with self._on_error:
                self._episode_writer.begin_priorities()
            self._gives_priorities = True
        return cast

    def _cast_episode(self, episode: dict[str, Any] | None, ends: bool = True) -> EpisodeItems | None:
        if not episode:
            return None
        if not ends:
            raise SchemaError(f"give the episode values {sorted(episode)} with the step that ends the episode")
        leaves = self._schema.leaves
        flat = self._schema.flatten("episode", episode)
        return {path: LeafCaster(leaves[path], path).item(raw) for path, raw in flat}

    def _append_episode(
        self,
        lane: Lane,
        obs: Any,
        action: Any,
        reward: Any,
        /,
        *,
        terminated: Any,
        truncated: Any = False,
        episode: dict[str, Any] | None = None,
        priority: Any = None,
        **extra: Any,
    ) -> None:
        obs, action, reward, terminated, truncated, episode, priority, extra = fetched(
            obs, action, reward, terminated, truncated, episode, priority, extra
        )
        terminated = as_flag(terminated, "terminated", reward)
        truncated = as_flag(truncated, "truncated", reward)
        steps = length(reward, "reward")
        if steps < 1:
            raise SchemaError("an episode needs at least one step; this one has none")
        path, leaf = self._schema.flatten("obs", obs)[0]
        obs_rows = length(leaf, path)
        if obs_rows not in (steps, steps + 1):
            raise SchemaError(
                f"obs has {obs_rows} rows for {steps} rewards; give {steps + 1}, the final one included, or {steps}"
            )
        observations = self._cast("obs", obs, (obs_rows,))
        rest = self._cast_rest(action, reward, extra, (steps,))
        final = [value[-1].tobytes() for value in observations] if obs_rows > steps else None
        values = [value[:steps] for value in observations] + rest
        finals = self._cast_episode(episode)
        if priority is not None or self._gives_priorities:
            values.append(self._with_priorities(as_priorities(priority, steps)))
        with self._recording():
            self._episode_writer.append_block(lane, values, final, terminated, truncated, finals)
        self._after_episode()

    def _after_episode(self) -> None:
        """Make the episodes that the present call ended durable, if the writer does so for each episode.

        If the disk has no room for a mark, or the store is locked, the next call tries again, and raises the error
        before it writes anything. The present call does not raise it: its steps are published, and the caller would
        append them again.
        """
        if self._flushes_episodes:
            self._owes_mark = True
            with suppress(StorageFull, StoreLocked):
                self._flush()

    def _end_episodes(self, lanes: Iterable[int], end: Callable[[Lane], None]) -> None:
        with self._recording(inserts=False):
            self._episode_writer.read_clock()
            for number in lanes:
                end(self._episode_writer.lanes[number])
        self._after_episode()

    def _recording(self, inserts: bool = True) -> AbstractContextManager[None]:
        """Return a context manager for writing: it waits for the limiter, and calls `_abandon_after` after an error.

        ``inserts`` is False if no step is appended: there is no wait for the limiter. Raises StorageFull or StoreLocked
        if the mark of an earlier call still fails.
        """
        if self._owes_mark:
            self._flush()
        return self._on_error if self._limiter is None or not inserts else self._limited(self._limiter)

    @contextmanager
    def _limited(self, limiter: AttachedLimiter) -> Iterator[None]:
        with limiter.inserting(self._check_waiting), self._on_error:
            yield

    def _abandon_after(self, error: BaseException) -> None:
        """Close the writer if ``error`` may have left a step half written.

        Raises StoreNotFound if the store is gone.
        """
        if not isinstance(error, (StorageFull, StoreLocked)):  # both errors are raised before anything was written
            self._abandon()
            self._episode_writer.explain(error)

    def _abandon(self, *, seal: bool = True) -> None:
        self.refuse_calls()
        self._closed = True
        self._episode_writer.rotation.abandon(seal=seal)
        self._dropped.detach()  # last, so that `close` still works after an interrupt of this method

    @shown_paths
    @one_call_at_a_time
    def flush(self) -> None:
        """Wait until every published step is durable.

        Raises
        ------
        WriterClosed
            The writer is closed.
        StorageFull
            The disk has no room for marks or seals. All steps are intact; flush again later.
        StoreNotFound
            The store was deleted or replaced since it was opened; the writer closes.
        StoreLocked
            Another thread is inside a call of this writer.
        OSError
            The disk refused a sync. It is unknown which steps are durable, so the writer closes.
        """
        self._flush()

    def _flush(self) -> None:
        try:
            self._episode_writer.flush()
        except StorageFull:
            raise
        except OSError as error:
            self._episode_writer.rotation.fail(error)
            self._abandon(seal=False)  # after a failed sync, a later successful sync proves nothing
            self._episode_writer.wait_for_sealing()
            self._episode_writer.explain(error)
            raise
        self._owes_mark = False

    @shown_paths
    def close(self) -> None:
        """Cut open episodes, seal the writer's segments, and wait until they are sealed. Closing twice is allowed.

        If `close` is interrupted, call `close` again, or `Store.close`, to complete it. Any thread may close the
        writer. `close` waits for a call in progress in another thread; later calls raise WriterClosed. If a signal
        handler closes the writer during a call in the same thread, the writer closes at the end of that call.

        Raises
        ------
        StorageFull
            The disk has no room to seal. All steps are intact. The next process that opens the store with mode "a"
            seals the segments.
        OSError
            The disk refused a sync, here or in the background. It is unknown which steps are durable.
        """
        if os.getpid() != self._pid or not self._dropped.alive:
            return  # the segments belong to the parent, or the writer is completely closed
        self.refuse_calls()
        if self._closer == threading.get_ident():
            return  # a signal handler calls `close` during a call of `close` in the same thread
        if is_inside(self):
            self.closes_later = True
        else:
            self._close_now()

    def _close_now(self) -> None:
        with self._closing:
            self._closer = threading.get_ident()
            try:
                if not self._closed:
                    wait_for_calls(self._own_lock)
                if not self._dropped.alive:
                    return  # another thread, or the call that was in progress, has closed the writer
                self._closed = True
                try:
                    self._finish()
                except Exception:
                    self._dropped.detach()
                    raise
                self._dropped.detach()  # last, so that `close` can be repeated after an interrupt
            finally:
                self._closer = 0

    def _finish(self) -> None:
        try:
            self._episode_writer.close()
        except Exception as error:
            if isinstance(error, StorageFull):
                self._episode_writer.drain()  # another error of sealing is worse
            else:
                self._episode_writer.wait_for_sealing()
            if isinstance(error, OSError):
                self._episode_writer.explain(error)
            raise
        self._episode_writer.drain()

    def report_cuts_to(self, listener: Callable[[int], None]) -> None:
        """Register a method to call, with a lane's number, when an observation does not continue the lane's episode.

        The episode is cut before this observation. The method is called before the step is written, and no warning is
        issued. The writer keeps only a weak reference to the method.
        """
        self._episode_writer.report_cuts_to(weakref.WeakMethod(listener))

    def leave_at_exit(self) -> None:
        """Do not seal this writer's segments when the interpreter ends: the owner of the writer closes the writer."""
        self._dropped.atexit = False

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, as its segments are locked by this process; send the store "
            "to the other process and make a writer there: store.writer()"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writer(BaseWriter):
    """Appends the steps of one environment. Made by `Store.writer`.

    Concurrency: one thread at a time, in the process that made the writer. A call during another thread's call raises
    StoreLocked. Only `close` waits for the other call to end. A forked child gets WriterClosed. Any number of writers,
    in any processes, can write to one store at the same time without waiting for each other.

    If a writer is not closed, its segments are sealed when the writer is garbage collected or the interpreter ends. A
    ResourceWarning is issued.

    Examples
    --------
    >>> schema = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"))
    >>> with dr.create("written.replay", schema) as store, store.writer() as writer:
    ...     writer.append(np.zeros(4), action=0, reward=1.0, terminated=False)
    ...     writer.append(np.ones(4), action=1, reward=1.0, terminated=True, next_obs=np.ones(4))
    ...     store.refresh()
    ...     store.episodes[0].obs.shape
    2
    (3, 4)
    """

    def __init__(self, schema: Schema, episode_writer: EpisodeWriter, *args: Any) -> None:
        super().__init__(schema, episode_writer, *args)
        self._lane = episode_writer.lanes[0]
        self._obs, self._action, self._reward, self._extra = (
            part_caster(schema, part, self._checks) for part in ("obs", "action", "reward", "extra")
        )
        self._has_extra = bool(schema.extra)

    @property
    def last_id(self) -> int:
        """The id of the newest step, as in `index` of batches; -1 before the first step, and after `close`."""
        return self._lane.last_id

    def append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any = False,
        next_obs: Any = None,
        episode: dict[str, Any] | None = None,
        priority: Any = None,
        **extra: Any,
    ) -> None:
        """Append one step; it is visible to every process when the call returns.

        Parameters
        ----------
        obs, action, reward
            The values of this step, as the schema describes them.
        terminated, truncated : bool
            Whether the step ended the episode, and how. 0 and 1 are accepted, other numbers are refused.
        next_obs : optional
            The observation after the step; the final observation if the step ended the episode. With ``next_obs``, the
            step can be sampled at once. If the next ``obs`` has other values, the episode is cut, and a warning is
            issued.
        episode : dict, optional
            The values of the episode fields; give them with the step that ends the episode.
        priority : float, optional
            The initial priority of the step in `Prioritized`: the TD error by the collector's own network, of either
            sign (Horgan et al. 2018, section 3). With None, the step begins with the largest priority given so far.
        **extra
            The values of the schema's extra fields.

        Raises
        ------
        SchemaError
            A value does not fit the schema; nothing was written.
        StorageFull, RateLimited
            The disk is full, or the limiter's timeout passed; nothing was written.
        StoreLocked
            Another process holds the store lock, or another thread is inside a call of this writer; nothing was
            written.
        WriterClosed
            The writer is closed.
        StoreNotFound
            The store was deleted or replaced since it was opened; the writer closes.
        """
        lock = self._lock
        try:  # does the same as `one_call_at_a_time`, without a function call
            del lock.free
        except AttributeError:
            raise self._refusal() from None
        try:
            if terminated is not False:
                terminated = as_flag(terminated, "terminated", reward)
            if truncated is not False:
                truncated = as_flag(truncated, "truncated", reward)
            obs = self._obs.items(obs)
            rest = self._action.items(action) + self._reward.items(reward)
            if extra or self._has_extra:
                rest += self._extra.items(extra)
            if next_obs is not None:
                next_obs = self._obs.items(next_obs)
            finals = self._cast_episode(episode, terminated or truncated) if episode else None
            if priority is not None or self._gives_priorities:
                rest.append(self._with_priorities(as_priority(priority)))
            if self._limiter is not None:
                with self._recording():
                    self._episode_writer.append(obs, rest, next_obs, terminated, truncated, finals)
            else:
                # Does the same as `_recording`, without a call after the step is published: an interrupt in such a call
                # would leave the writer open.
                if self._owes_mark:
                    self._flush()
                try:
                    # The cursor of the lane writes most steps. `EpisodeWriter.append` makes room for the others.
                    cursor = self._lane.cursor
                    if cursor is None or not cursor.append(obs, rest, next_obs, terminated, truncated, finals):
                        self._episode_writer.append(obs, rest, next_obs, terminated, truncated, finals)
                except BaseException as error:
                    self._abandon_after(error)
                    raise
            if (terminated or truncated) and self._flushes_episodes:
                self._after_episode()
        finally:
            if self._lock is lock:
                lock.free = True
            else:
                self._release(lock)

    @one_call_at_a_time
    def append_episode(
        self,
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
        """Append an episode of T steps at once; readers see all of it or nothing.

        ``obs`` has T + 1 rows if the last row is the final observation, else T rows. All other arguments with a value
        per step have T rows; ``priority`` is NaN for steps without a priority. An episode that is neither terminated
        nor truncated is recorded as cut. An episode that `append` left open is cut first. Raises the errors of
        `append`.
        """
        given = {"terminated": terminated, "truncated": truncated, "episode": episode, "priority": priority}
        self._append_episode(self._lane, obs, action, reward, **given, **extra)

    @one_call_at_a_time
    def end_episode(self, final_obs: Any = None, episode: dict[str, Any] | None = None) -> None:
        """Cut the open episode, and record it as truncated.

        ``final_obs``, if given, is the final observation of the episode. Nothing happens if no episode is open. Raises
        the errors of `append`.
        """
        final = None if final_obs is None else self._obs.items(final_obs)
        values = self._cast_episode(episode)
        self._end_episodes([0], lambda lane: self._episode_writer.end(lane, final, values))

    @one_call_at_a_time
    def discard_episode(self) -> None:
        """Discard the steps of the open episode, for example after a simulator crashed.

        Readers leave these steps out after their next refresh. If the episode was cut for its length, readers also
        leave out its earlier parts. The next append begins a new episode.

        The steps stay on disk until their segments are deleted, and count towards the store's capacity until then.
        ``Store.info`` counts them as discarded, and a rate limiter counts them as inserted. `Sampler.update_priorities`
        skips these steps. Batches that were already drawn ahead may still contain these steps.

        Nothing happens if no episode is open. Raises the errors of `append`.
        """
        self._end_episodes([0], self._episode_writer.discard)


note_exclusive(Writer.append)
