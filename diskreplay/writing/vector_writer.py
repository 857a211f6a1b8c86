"""The writer of a vector of environments: a lane each, one call a step."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.device_tensors import fetched
from diskreplay.errors import SchemaError
from diskreplay.schema.schema import Schema
from diskreplay.writing.base_writer import BaseWriter
from diskreplay.writing.call_lock import one_call_at_a_time
from diskreplay.writing.casting import as_flags, as_priorities
from diskreplay.writing.episode_writer import EpisodeWriter
from diskreplay.writing.vector_steps import Step, VectorSteps, as_item


class VectorWriter(BaseWriter):
    """Appends the steps of ``num_envs`` environments, each in a lane of its own. Made by ``Store.writer(num_envs=N)``.

    Concurrency: as `Writer`.
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
        """The id of each lane's newest step, ``(num_envs,)``; -1 where it has none since it moved to a new segment."""
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

        Tensors of a CUDA device are copied to pinned memory behind the operations of the current stream, and the call
        waits once. It cannot return earlier, since it checks their values before it writes, and the step can be sampled
        when it returns. The caller may then change the tensors.

        Parameters
        ----------
        obs, action, reward, next_obs, **extra
            As in `Writer.append`. ``next_obs`` holds the true next observations: an ended lane's is its final one.
        terminated, truncated : (num_envs,) bool
            How the step ended each lane's episode, if it did; 0 and 1 will do, other numbers are refused.
        mask : (num_envs,) bool, optional
            Lanes where it is False are passed over; what the arrays hold for them does not matter.
        episode : dict, optional
            Values of whole episodes, ``(num_envs, ...)``; stored for the lanes that end with this step.
        priority : (num_envs,) float, optional
            As in `Writer.append`; NaN for lanes whose step has none.

        Raises
        ------
        SchemaError
            A value does not fit the schema; nothing was written.
        StorageFull
            There is no room; no lane's step was written.
        StoreLocked
            Another process has held the store lock for a minute, or another thread is in the middle of a call of this
            writer; no lane's step was written.
        WriterClosed
            The writer is closed.
        """
        count = self.num_envs
        obs, action, reward, terminated, truncated, next_obs, mask, episode, priority, extra = fetched(
            obs, action, reward, terminated, truncated, next_obs, mask, episode, priority, extra
        )
        lanes = None if mask is None else np.flatnonzero(as_flags(mask, "mask", count))
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
            chosen = slice(None) if lanes is None else lanes
            values.append(self._with_priorities(as_priorities(priority, count, chosen, may_lack=True)))
        ended = ends | cuts
        some_end = bool(np.count_nonzero(ended))  # in lanes that are passed over, too
        with self._recording():
            self._steps.append(Step(lanes, values, next_values, ends, cuts, finals, ended, some_end))
        if self._flushes_episodes and some_end:
            self._flush()

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
        """Append an episode to one lane in one piece; see `Writer.append_episode`."""
        if not isinstance(lane, (int, np.integer)) or isinstance(lane, bool) or not 0 <= lane < self.num_envs:
            raise SchemaError(f"lane {lane!r} is not one of 0 to {self.num_envs - 1}")
        target = self._episode_writer.lanes[int(lane)]
        self._append_episode(target, obs, action, reward, terminated, truncated, episode, priority, extra)

    @one_call_at_a_time
    def end_episode(self, final_obs: Any = None, mask: Any = None, episode: dict[str, Any] | None = None) -> None:
        """Cut the open episodes of all lanes, or of those where ``mask`` is True; see `Writer.end_episode`."""
        count = self.num_envs
        chosen = np.ones(count, np.bool_) if mask is None else as_flags(mask, "mask", count)
        final = None if final_obs is None else self._cast("obs", final_obs, (count,), np.flatnonzero(chosen))
        values = self._cast_episodes(episode)
        with self._recording(inserts=False):
            self._episode_writer.read_clock()
            for i in np.flatnonzero(chosen).tolist():
                self._episode_writer.end(
                    self._episode_writer.lanes[i],
                    None if final is None else [value[i].tobytes() for value in final],
                    None if values is None else {leaf: as_item(leaf, value[i]) for leaf, value in values.items()},
                )
        self._after_episode()

    @one_call_at_a_time
    def discard_episode(self, mask: Any = None) -> None:
        """Discard the open episodes of all lanes, or of those where ``mask`` is True; see `Writer.discard_episode`."""
        chosen = slice(None) if mask is None else np.flatnonzero(as_flags(mask, "mask", self.num_envs))
        with self._recording(inserts=False):
            self._episode_writer.read_clock()
            for i in np.arange(self.num_envs)[chosen].tolist():
                self._episode_writer.discard(self._episode_writer.lanes[i])
        self._after_episode()
