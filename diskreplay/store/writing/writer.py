"""Writers: what a collector calls. They check and cast everything before the first byte is written."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from numpy.typing import NDArray

from diskreplay.errors import SchemaError, StorageFull, StoreLocked, WriterClosed
from diskreplay.folders import shown_paths
from diskreplay.format.schema import Schema
from diskreplay.store.forks import told_of_forks
from diskreplay.store.limiter import AttachedLimiter
from diskreplay.store.writing.append_cursor import EpisodeItems
from diskreplay.store.writing.casting import as_flag, leaf_caster, part_caster
from diskreplay.store.writing.dropped import seal_when_dropped
from diskreplay.store.writing.episode_writer import EpisodeWriter
from diskreplay.store.writing.marker import Durability, Marker
from diskreplay.store.writing.turns import Guard, Turn, in_turn, is_inside, take_within, takes_turns, wait_for
from diskreplay.store.writing.whole_episodes import append_block

# In a forked child, the writers of its parent refuse every call.
_alive = told_of_forks(lambda writer: writer.refuse_calls())


class _BaseWriter:
    """What both writers share: casting by the schema, syncing, closing.

    Whoever takes the turn may use the recorder: see `turns`. ``_turn`` is another one, that is never free, of a writer
    that is closed, is being closed, or has to refuse calls for another reason: `_refusal` says which. So the way of an
    append pays for one check only.
    """

    def __init__(
        self,
        schema: Schema,
        recorder: EpisodeWriter,
        durability: Durability,
        on_close: Callable[[Any], None],
        limiter: AttachedLimiter | None = None,
        marker: Marker | None = None,
    ) -> None:
        self._schema, self._recorder, self._limiter = schema, recorder, limiter
        self._flushes_episodes, self._on_close = durability == "episode", on_close
        self._pid, self._closed = os.getpid(), False
        self._turns, self._guard = Turn(), Guard(weakref.WeakMethod(self._give_up_after))
        self._turn = self._turns
        self._closing, self._closer = threading.Lock(), 0
        self.closes_later = False  # when the call ends in the middle of which `close` was called
        self._prepare_casters()
        if marker is not None:  # first: where the system has no thread left, there is no writer
            recorder.rolling.begin_marking(marker, durability, weakref.WeakMethod(self.refuse_calls))
        self._dropped = seal_when_dropped(self, recorder, self._turns)
        _alive.add(self)

    def _prepare_casters(self) -> None:
        schema = self._schema
        self._obs_items, self._action_items, self._extra_items = (
            part_caster(schema, part) for part in ("obs", "action", "extra")
        )
        self._reward_item, self._has_extra = leaf_caster(schema.reward, "reward"), bool(schema.extra)
        # One array and one action, as most schemas have it: without the lists in between.
        self._lone = "obs" in schema.leaves and "action" in schema.leaves
        if self._lone:
            self._obs_item, self._action_item = (leaf_caster(schema.leaves[x], x) for x in ("obs", "action"))

    def refuse_calls(self) -> None:
        """Have every later call refused."""
        taken = Turn()
        del taken.free
        self._turn = taken

    def _refusal(self) -> Exception:
        """Return what to raise where the turn cannot be taken."""
        if os.getpid() != self._pid:
            return WriterClosed(
                "this writer belongs to the parent of this forked process; open the store here for another"
            )
        if self._dropped.alive and (error := self._background_failure()) is not None:
            return error
        if self._turn is self._turns and self._dropped.alive:
            return StoreLocked(
                "another thread is in the middle of a call of this writer; one thread at a time may use it: ask the "
                "store for a writer for each, store.writer()"
            )
        return WriterClosed("this writer is closed; ask the store for a new one: store.writer()")

    def _background_failure(self) -> Exception | None:
        """Return what went wrong in the background, if anything did: once where there was no room, else for good."""
        rolling = self._recorder.rolling
        if rolling.failure is None or not take_within(self._turns, 0.0):
            return None
        error, rolling.failure = rolling.failure, None
        if isinstance(error, StorageFull):
            self._turn = self._turns
            self._turns.free = True
        else:
            self._give_up(seal=False)
            self._on_close(self)
        return error

    def _leave(self, turn: Turn) -> None:
        """Put the turn back after a call during which others came to be refused."""
        if not self._closed:
            turn.free = True
        if self.closes_later:
            self.closes_later = False
            if self._closed:
                self._on_close(self)
            else:
                self._close_now()

    def _check_not_closing(self) -> None:
        if self._turn is not self._turns or not self._dropped.alive:
            raise self._refusal()

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
            self._flush()

    def _recording(self, inserts: bool = True) -> AbstractContextManager[None]:
        """Wait for the limiter; close the writer where a step may have been interrupted before our notes of it."""
        return self._guard if self._limiter is None or not inserts else self._limited(self._limiter)

    @contextmanager
    def _limited(self, limiter: AttachedLimiter) -> Iterator[None]:
        with limiter.inserting(self._check_not_closing), self._guard:
            yield

    def _give_up_after(self, error: BaseException) -> None:
        """Close where an error that a call met may have come in the middle of writing; raise what explains it."""
        if not isinstance(error, (StorageFull, StoreLocked)):  # refused as a whole, before anything was written
            self._give_up()
            self._recorder.explain(error)

    def _give_up(self, *, seal: bool = True) -> None:
        self.refuse_calls()
        self._closed = True
        self._dropped.detach()
        self._recorder.abandon(seal=seal)

    @shown_paths()
    @in_turn
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
            self._recorder.flush()
        except StorageFull:
            raise
        except OSError as error:
            self._give_up(seal=False)  # after a failed sync, a later one that succeeds proves nothing
            self._on_close(self)
            self._recorder.explain(error)
            raise

    @shown_paths()
    def close(self) -> None:
        """Cut what is open, seal, and wait until that is done. Closing twice is fine.

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
            return  # the parent's segment stays the parent's; or it is closed
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
                    wait_for(self._turns)
                if self._dropped.detach() is None:
                    return  # another thread has closed it, or the call in progress gave up
                self._closed = True
                self._finish()
            finally:
                self._closer = 0

    def _finish(self) -> None:
        try:
            failure = self._recorder.rolling.failure
            if failure is not None and not isinstance(failure, StorageFull):
                self._recorder.abandon(seal=False)
                raise failure
            self._recorder.close()
        except OSError as error:
            self._recorder.explain(error)
            raise
        finally:
            self._on_close(self)

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


class Writer(_BaseWriter):
    """Appends the steps of one environment. Made by `Store.writer`.

    Concurrency: one thread at a time, in the process that made it. A call during another thread's raises StoreLocked,
    but for `close`, which waits for that one's end; a forked child gets WriterClosed. Any number of writers, in any
    processes, write to one store at once without waiting for each other.

    One that is collected without `close`, or that is open when the interpreter ends, is sealed with what it has then,
    with a ResourceWarning.
    """

    def __init__(self, schema: Schema, recorder: EpisodeWriter, *args: Any) -> None:
        super().__init__(schema, recorder, *args)
        self._lane = recorder.lanes[0]

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
        StorageFull, RateLimited
            There is no room, or the limiter's timeout passed; nothing was written.
        StoreLocked
            Another process holds the store lock, or another thread is in a call of this writer; nothing was written.
        WriterClosed
            The writer is closed.
        StoreNotFound
            The store was deleted or replaced since it was opened; the writer closes.
        """
        turn = self._turn
        try:  # as `in_turn`, without the time that a call takes
            del turn.free
        except AttributeError:
            raise self._refusal() from None
        try:
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
            finals = self._cast_episode(episode) if episode else None
            if self._limiter is not None:
                with self._recording():
                    self._recorder.append(items, following, terminated, truncated, finals)
            else:
                try:  # as `_recording`, without the time that a context manager takes
                    lane = self._lane
                    cursor = lane.cursor
                    if ended or not lane.open or cursor is None or not cursor.append(items, following):
                        self._recorder.append(items, following, terminated, truncated, finals)
                except BaseException as error:
                    self._give_up_after(error)
                    raise
            if ended and self._flushes_episodes:
                self._flush()
        finally:
            if self._turn is turn:
                turn.free = True
            else:
                self._leave(turn)

    @in_turn
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
        append_block(self, self._recorder.lanes[0], obs, action, reward, terminated, truncated, episode, extra)
        self._after_step(True)

    @in_turn
    def end_episode(self, final_obs: Any = None, episode: dict[str, Any] | None = None) -> None:
        """Cut the open episode: recorded as truncated, with ``final_obs`` as its last observation where given.

        Nothing happens where no episode is open. Raises as `append`.
        """
        final = None if final_obs is None else self._obs_items(final_obs)
        values = self._cast_episode(episode)
        with self._recording(inserts=False):
            self._recorder.take_time()
            self._recorder.end(self._recorder.lanes[0], final, values)
        self._after_step(True)


takes_turns(Writer.append)
