"""The writer of a vector of environments: a lane each, one call a step."""

from typing import Any

import numpy as np

from diskreplay.errors import SchemaError
from diskreplay.store.writer import _BaseWriter, append_block, as_flags, end_lane


class VectorWriter(_BaseWriter):
    """Appends the steps of ``num_envs`` environments, each in a lane of its own. Made by ``Store.writer(num_envs=N)``.

    Concurrency: as `Writer`.
    """

    @property
    def num_envs(self) -> int:
        """The number of lanes."""
        return len(self._recorder.lanes)

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
        **extra: Any,
    ) -> None:
        """Append one step of every lane; all arrays have a leading axis of ``num_envs``.

        Parameters
        ----------
        obs, action, reward, next_obs, **extra
            As in `Writer.append`. ``next_obs`` holds the true next observations: an ended lane's is its final one.
        terminated, truncated : (num_envs,) bool
            How the step ended each lane's episode, if it did.
        mask : (num_envs,) bool, optional
            Lanes where it is False are passed over; what the arrays hold for them does not matter.
        episode : dict, optional
            Values of whole episodes, ``(num_envs, ...)``; stored for the lanes that end with this step.

        Raises
        ------
        SchemaError
            A value does not fit the schema; nothing was written.
        StorageFull
            There is no room; no lane's step was written.
        WriterClosed
            The writer is closed.
        """
        self._check_usable()
        count = self.num_envs
        ends = as_flags(terminated, "terminated", count)
        cuts = np.zeros(count, np.bool_) if truncated is None else as_flags(truncated, "truncated", count)
        values = self._cast_step(obs, action, reward, extra, (count,))
        following = None if next_obs is None else self._cast("obs", next_obs, (count,))
        finals = self._cast_episode(episode, (count,))
        lanes = range(count) if mask is None else np.flatnonzero(as_flags(mask, "mask", count)).tolist()
        ended = ends | cuts
        rows = {i: [value[i] for value in values] for i in lanes}
        # Making room for one lane may open a segment that lanes before it move to, so that they need room again.
        with self._recording():
            opened = -1
            while opened != (opened := self._prepare(rows, ended.tolist(), following is not None)):
                pass
            for i in lanes:
                self._recorder.commit(
                    self._recorder.lanes[i],
                    rows[i],
                    None if following is None else [value[i] for value in following],
                    bool(ends[i]),
                    bool(cuts[i]),
                    None if finals is None or not ended[i] else {leaf: value[i] for leaf, value in finals.items()},
                )
        if lanes:
            self._after_step(bool(ended.any()))

    def _prepare(self, rows: dict[int, list[Any]], ended: list[bool], two_rows: bool) -> int:
        recorder, opened = self._recorder, 0
        for i, values in rows.items():
            opened = recorder.prepare(recorder.lanes[i], values, two_rows or ended[i])
        return opened

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
        **extra: Any,
    ) -> None:
        """Append an episode to one lane in one piece; see `Writer.append_episode`."""
        self._check_usable()
        if not isinstance(lane, (int, np.integer)) or isinstance(lane, bool) or not 0 <= lane < self.num_envs:
            raise SchemaError(f"lane {lane!r} is not one of 0 to {self.num_envs - 1}")
        target = self._recorder.lanes[int(lane)]
        append_block(self, target, obs, action, reward, terminated, truncated, episode, extra)
        self._after_step(True)

    def end_episode(self, final_obs: Any = None, mask: Any = None, episode: dict[str, Any] | None = None) -> None:
        """Cut the open episodes of all lanes, or of those where ``mask`` is True; see `Writer.end_episode`."""
        self._check_usable()
        count = self.num_envs
        final = None if final_obs is None else self._cast("obs", final_obs, (count,))
        values = self._cast_episode(episode, (count,))
        chosen = np.ones(count, np.bool_) if mask is None else as_flags(mask, "mask", count)
        with self._recording(inserts=False):
            for i in np.flatnonzero(chosen).tolist():
                end_lane(
                    self._recorder,
                    self._recorder.lanes[i],
                    None if final is None else [value[i] for value in final],
                    None if values is None else {leaf: value[i] for leaf, value in values.items()},
                )
        self._after_step(True)
