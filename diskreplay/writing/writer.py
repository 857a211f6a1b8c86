"""The writer of one environment. It checks and casts everything before the first byte is written."""

from typing import Any

from diskreplay.errors import SchemaError
from diskreplay.schema.schema import Schema
from diskreplay.writing.base_writer import BaseWriter
from diskreplay.writing.call_lock import note_exclusive, one_call_at_a_time
from diskreplay.writing.casting import PartCaster, as_flag, as_priority, leaf_caster
from diskreplay.writing.episode_writer import EpisodeWriter


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
        self._append_episode(self._lane, obs, action, reward, terminated, truncated, episode, priority, extra)

    @one_call_at_a_time
    def end_episode(self, final_obs: Any = None, episode: dict[str, Any] | None = None) -> None:
        """Cut the open episode: recorded as truncated, with ``final_obs`` as its last observation where given.

        Nothing happens where no episode is open. Raises as `append`.
        """
        final = None if final_obs is None else self._obs.items(final_obs)
        values = self._cast_episode(episode)
        with self._recording(inserts=False):
            self._episode_writer.read_clock()
            self._episode_writer.end(self._lane, final, values)
        self._after_episode()

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
        with self._recording(inserts=False):
            self._episode_writer.read_clock()
            self._episode_writer.discard(self._lane)
        self._after_episode()


note_exclusive(Writer.append)
