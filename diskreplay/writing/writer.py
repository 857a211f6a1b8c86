"""The writer of one environment, and what it shares with that of a vector.

Everything is checked and cast before the first byte is written.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from diskreplay.device_tensors import fetched
from diskreplay.errors import SchemaError, StorageFull, StoreLocked, WriterClosed
from diskreplay.folders import shown_paths
from diskreplay.schema.schema import Schema
from diskreplay.workers import told_of_forks
from diskreplay.writing.append_cursor import EpisodeItems, Lane
from diskreplay.writing.casting import Check, PartCaster, as_flag, as_priorities, as_priority, leaf_caster, length
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

# That of one step, or those of many.
Priorities = TypeVar("Priorities", float, NDArray[Any])

# In a forked child, the writers of its parent refuse every call.
_alive = told_of_forks(lambda writer: writer.refuse_calls())


class BaseWriter:
    """What both writers share: casting by the schema, syncing, closing.

    A call acquires ``_lock``: see `diskreplay.writing.lifetime`. It is the writer's own one, or another that is
    never free: of a writer that is closed, is being closed, or has to refuse calls for another reason, as `_refusal`
    says. So an append pays for one check only.
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
        self._store = store  # it lives as long as its writers
        self._pid, self._closed = os.getpid(), False
        self._gives_priorities = False
        self._own_lock, self._on_error = CallLock(), OnError(weakref.WeakMethod(self._abandon_after))
        self._lock = self._own_lock
        self._closing, self._closer = threading.Lock(), 0
        self.closes_later = False  # when the call ends in the middle of which `close` was called
        # First: where the system has no thread left, there is no writer.
        episode_writer.rotation.begin_marking(marker, durability, weakref.WeakMethod(self.refuse_calls))
        self._dropped = seal_when_dropped(self, episode_writer, self._own_lock)
        _alive.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"{type(self).__name__}({state}, num_envs={len(self._episode_writer.lanes)})"

    def refuse_calls(self) -> None:
        """Have every later call refused."""
        held = CallLock()
        del held.free
        self._lock = held

    def _refusal(self) -> Exception:
        """Return what to raise where the lock cannot be acquired."""
        if os.getpid() != self._pid:
            return WriterClosed(
                "this writer belongs to the parent of this forked process; open the store here for another"
            )
        if self._dropped.alive and (error := self._background_failure()) is not None:
            return error
        if self._lock is self._own_lock and self._dropped.alive:
            return StoreLocked(
                "another thread is in the middle of a call of this writer; one thread at a time may use it: ask the "
                "store for a writer for each, store.writer()"
            )
        return WriterClosed("this writer is closed; ask the store for a new one: store.writer()")

    def _background_failure(self) -> Exception | None:
        """Return what went wrong in the background, if anything did: once where there was no room, else for good."""
        rotation = self._episode_writer.rotation
        if rotation.failure is None or not self._own_lock.acquire():
            return None
        error, rotation.failure = rotation.failure, None
        if isinstance(error, StorageFull):
            self._lock = self._own_lock
            self._own_lock.release()
        else:
            self._abandon(seal=False)
            self._episode_writer.drain()
        return error

    def _release(self, lock: CallLock) -> None:
        """Release the lock after a call during which others came to be refused."""
        if not self._closed:
            lock.free = True
        if self.closes_later:
            self.closes_later = False
            if self._closed:
                self._episode_writer.drain()
            else:
                self._close_now()

    def _check_not_closing(self) -> None:
        if self._lock is not self._own_lock or not self._dropped.alive:
            raise self._refusal()

    def _cast(
        self, part: str, value: Any, leading: tuple[int, ...] = (), rows: NDArray[np.int64] | None = None
    ) -> list[NDArray[Any]]:
        """Cast, and check what the store checks, of these rows alone where they are given."""
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
        """Cast what steps have beside their observations, in the order of the schema's leaves."""
        values = self._cast("action", action, leading, rows) + self._cast("reward", reward, leading, rows)
        if extra or self._schema.extra:
            values += self._cast("extra", extra, leading, rows)
        return values

    def _with_priorities(self, cast: Priorities) -> Priorities:
        """Return what is stored of the priorities of steps; from now on all steps have that."""
        if not self._gives_priorities:
            with self._on_error:
                self._episode_writer.begin_priorities()
            self._gives_priorities = True
        return cast

    def _cast_episode(self, episode: dict[str, Any] | None) -> EpisodeItems | None:
        if not episode:
            return None
        leaves = self._schema.leaves
        flat = self._schema.flatten("episode", episode)
        return {path: leaf_caster(leaves[path], path).item(raw) for path, raw in flat}

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
        """Check, cast and append a whole episode to a lane; see `Writer.append_episode`."""
        obs, action, reward, terminated, truncated, episode, priority, extra = fetched(
            obs, action, reward, terminated, truncated, episode, priority, extra
        )
        terminated = as_flag(terminated, "terminated", reward)
        truncated = as_flag(truncated, "truncated", reward)
        steps = length(reward, "reward")
        if steps < 1:
            raise SchemaError("an episode has at least one step; this one has none")
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
        if self._flushes_episodes:
            self._flush()

    def _end_episodes(self, lanes: Iterable[int], end: Callable[[Lane], None]) -> None:
        """End the open episodes of some lanes without a step."""
        with self._recording(inserts=False):
            self._episode_writer.read_clock()
            for number in lanes:
                end(self._episode_writer.lanes[number])
        self._after_episode()

    def _recording(self, inserts: bool = True) -> AbstractContextManager[None]:
        """Wait for the limiter; close the writer where a step may have been interrupted before our notes of it."""
        return self._on_error if self._limiter is None or not inserts else self._limited(self._limiter)

    @contextmanager
    def _limited(self, limiter: AttachedLimiter) -> Iterator[None]:
        with limiter.inserting(self._check_not_closing), self._on_error:
            yield

    def _abandon_after(self, error: BaseException) -> None:
        """Close where an error that a call met may have come in the middle of writing; raise what explains it."""
        if not isinstance(error, (StorageFull, StoreLocked)):  # refused as a whole, before anything was written
            self._abandon()
            self._episode_writer.explain(error)

    def _abandon(self, *, seal: bool = True) -> None:
        self.refuse_calls()
        self._closed = True
        self._episode_writer.rotation.abandon(seal=seal)
        self._dropped.detach()  # last: an interrupt before leaves the rest to `close`

    @shown_paths()
    @one_call_at_a_time
    def flush(self) -> None:
        """Wait until every published step is durable.

        Raises
        ------
        WriterClosed
            The writer is closed.
        StorageFull
            There is no room to mark what is durable, or to seal. Everything is there; flush again later.
        StoreNotFound
            The store was deleted or replaced since it was opened; the writer closes.
        StoreLocked
            Another thread is in the middle of a call of this writer.
        OSError
            The disk refused. What it holds is unknown from then on, so the writer closes.
        """
        self._flush()

    def _flush(self) -> None:
        try:
            self._episode_writer.flush()
        except StorageFull:
            raise
        except OSError as error:
            self._abandon(seal=False)  # after a failed sync, a later one that succeeds proves nothing
            self._episode_writer.drain()
            self._episode_writer.explain(error)
            raise

    @shown_paths()
    def close(self) -> None:
        """Cut what is open, seal, and wait until that is done. Closing twice is fine.

        One that is interrupted is completed by the next call, of the writer or of the store.
        Any thread may call it. It waits for the call in progress in another one, and those that begin later raise
        WriterClosed. Called by a signal's handler in the middle of a call of this thread, the writer closes at the end
        of that.

        Raises
        ------
        StorageFull
            There is no room to seal. Everything is there; the next process that opens the store seals it.
        OSError
            The disk refused, here or in the background. What it holds is unknown.
        """
        if os.getpid() != self._pid or not self._dropped.alive:
            return  # the parent's segment stays the parent's; or it is closed, and no interrupt kept it from that
        self.refuse_calls()
        if self._closer == threading.get_ident():
            return  # a handler again, in the middle of this
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
                    return  # another thread has closed it, or the call in progress gave up
                self._closed = True
                try:
                    self._finish()
                except Exception:
                    self._dropped.detach()
                    raise
                self._dropped.detach()  # last: an interrupt before leaves the rest to the next call
            finally:
                self._closer = 0

    def _finish(self) -> None:
        try:
            failure = self._episode_writer.rotation.failure
            if failure is not None and not isinstance(failure, StorageFull):
                self._episode_writer.rotation.abandon(seal=False)
                raise failure
            self._episode_writer.close()
        except OSError as error:
            self._episode_writer.explain(error)
            raise
        finally:
            self._episode_writer.drain()

    def tell_of_cuts(self, tell: Callable[[int], None]) -> None:
        """Call a method with the number of each lane whose episode is cut where an observation does not continue it.

        It is called before the step is written, and in place of the warning. Its object is referred to weakly.
        """
        self._episode_writer.tell_of_cuts(weakref.WeakMethod(tell))

    def leave_at_exit(self) -> None:
        """Leave it to whoever owns this writer to close it when the interpreter ends."""
        self._dropped.atexit = False

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


class Writer(BaseWriter):
    """Appends the steps of one environment. Made by `Store.writer`.

    Concurrency: one thread at a time, in the process that made it. A call during another thread's raises StoreLocked,
    but for `close`, which waits for that one's end; a forked child gets WriterClosed. Any number of writers, in any
    processes, write to one store at once without waiting for each other.

    One that is collected without `close`, or that is open when the interpreter ends, is sealed with what it has then,
    with a ResourceWarning.
    """

    def __init__(self, schema: Schema, episode_writer: EpisodeWriter, *args: Any) -> None:
        super().__init__(schema, episode_writer, *args)
        self._lane = episode_writer.lanes[0]
        self._obs, self._action, self._extra = (
            PartCaster(schema, part, self._checks) for part in ("obs", "action", "extra")
        )
        self._has_extra = bool(schema.extra)
        self._reward = leaf_caster(schema.reward, "reward", self._checks.get("reward"))
        self._obs_leaf, self._action_leaf = self._obs.lone, self._action.lone

    @property
    def last_id(self) -> int:
        """The id of the newest step, which batches have in `index`; -1 before the first, and once it is closed."""
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
            Of this step, as the schema says.
        terminated, truncated : bool
            How the step ended the episode, if it did; 0 and 1 will do, other numbers are refused.
        next_obs : optional
            The observation the step led to, the final one where it ended the episode. With it the step can be sampled
            at once. The next ``obs`` must have the same values; where it has not, the episode is cut, with a warning.
        episode : dict, optional
            Values of the whole episode, with the step that ends it.
        priority : float, optional
            The TD error of this step by the collector's own network, of either sign: `Prioritized` begins with it
            (Horgan et al. 2018, section 3). None: it begins with the largest priority given.
        **extra
            The schema's further fields of a step, all of them.

        Raises
        ------
        SchemaError
            A value does not fit the schema; nothing was written.
        StorageFull, RateLimited
            There is no room, or the limiter's timeout passed; nothing was written.
        StoreLocked
            Another process holds the store lock, or another thread is in a call of this writer; nothing was written.
        WriterClosed
            The writer is closed.
        StoreNotFound
            The store was deleted or replaced since it was opened; the writer closes.
        """
        lock = self._lock
        try:  # as `one_call_at_a_time`, without the time that a call takes
            del lock.free
        except AttributeError:
            raise self._refusal() from None
        try:
            if terminated is not False:
                terminated = as_flag(terminated, "terminated", reward)
            if truncated is not False:
                truncated = as_flag(truncated, "truncated", reward)
            obs_leaf, action_leaf = self._obs_leaf, self._action_leaf
            # One array and one action, as most schemas have it: without the lists in between.
            if obs_leaf is not None and action_leaf is not None:
                items = [obs_leaf.item(obs), action_leaf.item(action), self._reward.item(reward)]
            else:
                items = [*self._obs.items(obs), *self._action.items(action), self._reward.item(reward)]
            if extra or self._has_extra:
                items += self._extra.items(extra)
            if next_obs is None:
                next_items = None
            else:
                next_items = self._obs.items(next_obs) if obs_leaf is None else [obs_leaf.item(next_obs)]
            ended = terminated or truncated
            if episode and not ended:
                raise SchemaError(f"episode values {sorted(episode)} go with the step that ends the episode")
            finals = self._cast_episode(episode) if episode else None
            if priority is not None or self._gives_priorities:
                items.append(self._with_priorities(as_priority(priority)))
            if self._limiter is not None:
                with self._recording():
                    self._episode_writer.append(items, next_items, terminated, truncated, finals)
            else:
                try:  # as `_recording`, without the time that a context manager takes
                    lane = self._lane
                    cursor = lane.cursor
                    if ended or not lane.open or cursor is None or not cursor.append(items, next_items):
                        self._episode_writer.append(items, next_items, terminated, truncated, finals)
                except BaseException as error:
                    self._abandon_after(error)
                    raise
            if ended and self._flushes_episodes:
                self._flush()
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
        """Append an episode of T steps in one piece; readers see all of it or nothing.

        ``obs`` has T + 1 rows with the final observation, or T without; all else has T, also ``priority``. An episode
        that is neither terminated nor truncated is recorded as cut. One that `append` left open is cut first. Raises as
        `append`.
        """
        given = {"terminated": terminated, "truncated": truncated, "episode": episode, "priority": priority}
        self._append_episode(self._lane, obs, action, reward, **given, **extra)

    @one_call_at_a_time
    def end_episode(self, final_obs: Any = None, episode: dict[str, Any] | None = None) -> None:
        """Cut the open episode: recorded as truncated, with ``final_obs`` as its last observation where given.

        Nothing happens where no episode is open. Raises as `append`.
        """
        final = None if final_obs is None else self._obs.items(final_obs)
        values = self._cast_episode(episode)
        self._end_episodes([0], lambda lane: self._episode_writer.end(lane, final, values))

    @one_call_at_a_time
    def discard_episode(self) -> None:
        """Discard the steps of the open episode, such as one of a simulator that crashed.

        Readers leave them out after their next refresh. So they do with the parts of the episode that ended before
        because a segment was full. The next append begins a new episode.

        The steps stay on the disk until their segments are deleted, and count towards the store's capacity until then.
        ``Store.info`` counts them as discarded, a limiter as inserted. Samplers skip priorities for them; a batch that
        was made ahead may still have them.

        Nothing happens if no episode is open. Raises as `append`.
        """
        self._end_episodes([0], self._episode_writer.discard)


note_exclusive(Writer.append)
