"""Gymnasium wrappers that append every step of an environment, or of a vector of environments, to a store."""

import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from diskreplay import MissingExtra, WriterClosed
from diskreplay.device_tensors import fetched
from diskreplay.interop.step_values import StepValues, as_numpy

with MissingExtra.raised_for("recording an environment", "gym"):
    import gymnasium as gym
    from gymnasium.error import ResetNeeded
    from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

if TYPE_CHECKING:
    from diskreplay import Store, VectorWriter, Writer

    AnyVectorWrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:
    AnyVectorWrapper = VectorWrapper  # before gymnasium 1.4, `VectorWrapper[...]` raises an error

__all__ = ["RecordEpisodes", "RecordVectorEpisodes"]

_ONE_LANE = np.ones(1, bool)
_NOT_RESET = "call reset() before step(): no episode is running, or an error left it in an unknown state"


class RecordEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Append every step of an environment to a store.

    Each step is appended with its next observation, so the step can be sampled immediately. ``close``, and ``reset`` in
    the middle of an episode, cut the episode at its last observation. After an error of the environment,
    ``discard_episode`` drops the episode, and ``reset`` keeps the episode's steps. Observations are copied: an
    environment may reuse its arrays. With ``gymnasium.wrappers.Autoreset`` inside or around this wrapper, a step that
    only resets the environment is not recorded.

    Concurrency: one thread at a time, as for the environment. A copy by pickle or ``copy.deepcopy`` has its own writer.

    Parameters
    ----------
    env : gymnasium.Env
        The environment.
    store : Store
        The store; opened with mode "a". The store stays open when the environment is closed.
    info_fields : iterable of str
        Names of fields whose values are copied from info. Extra fields are copied at each step, and episode fields at
        the last step of an episode.
    durability : str or float
        As in ``Store.writer``.

    Raises
    ------
    SchemaError
        If an info field is in neither ``extra`` nor ``episode`` of the schema.
    ValueError
        If ``store`` is not a Store, for example a path, or ``env`` is already recorded into ``store``.

    Examples
    --------
    >>> import gymnasium
    >>> env = gymnasium.make("CartPole-v1")
    >>> store = dr.create("recorded.replay", dr.Schema.from_env(env))
    >>> with dr.RecordEpisodes(env, store) as env:
    ...     _ = env.reset(seed=0)
    ...     for _ in range(10):
    ...         _ = env.step(0)
    ...         if _[2]:
    ...             break
    >>> store.refresh() > 0
    True
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        store: "Store",
        *,
        info_fields: Iterable[str] = (),
        durability: str | float = 5.0,
    ) -> None:
        super().__init__(env)
        self._values = StepValues(store, info_fields)
        _check_recorded_once(env, store)
        self._store, self._durability = store, durability
        self._resets_itself = _has_autoreset(env)
        self._obs: dict[str, np.ndarray] | None = None  # The last observation. If None, `step` raises.
        self._idle = False  # True if the next step only resets the environment.
        self._writer: Writer | None = None
        self._open_writer()

    def set_extra(self, **fields: Any) -> None:
        """Set extra fields, by name, of the next step only.

        Raises
        ------
        SchemaError
            If the schema has no such extra field, or the field is copied from info.
        """
        self._values.set(fields)

    def set_episode(self, **values: Any) -> None:
        """Set episode fields, by name, of the running episode, or of the next episode if none is running.

        An episode runs from the reset to the last step. The values are stored with the last step, or when the episode
        is cut. If the process is killed during the episode, the values are lost. Values of an episode without steps are
        dropped. A later value of the same field replaces the earlier value, also if ``reset`` sets it.

        Raises
        ------
        SchemaError
            If the schema has no such episode field, the field is copied from info, or a value does not fit. Nothing is
            set.
        """
        self._values.set_episode(values)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; an open episode is cut at its last observation.

        If the schema has an episode field ``seed`` or ``options``, the argument of the same name is stored in this
        field for the next episode. None and an empty dict are not stored.

        Raises
        ------
        SchemaError
            If the argument does not fit the episode field; the environment is not reset.
        """
        given = self._values.reset_values(seed, options, _ONE_LANE)
        writer = self._open_writer()
        try:
            obs, info = self.env.reset(seed=seed, options=options)
            self._cut(writer)
            self._values.begin(given, _ONE_LANE)
            self._obs, self._idle = self._values.own("obs", obs), False
        except BaseException:
            self._obs = None  # the state of the environment is unknown
            raise
        self._values.clear()
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment and append the step.

        Raises
        ------
        SchemaError
            If a value does not fit the schema, or an extra field is missing. If an action does not fit, or a field is
            missing, the environment is not stepped. After any other error, the next call must be ``reset``.
        gymnasium.error.ResetNeeded
            Before the first reset, and after the end of an episode or an error.
        """
        if self._obs is None:
            raise ResetNeeded(_NOT_RESET)
        writer = self._open_writer()
        own_action = self._values.own("action", action)
        extra = self._values.take()
        try:
            result = self.env.step(action)
            self._record(writer, own_action, result, extra)
        except BaseException:
            self._obs = None  # the state of the environment is unknown
            raise
        return result

    def discard_episode(self) -> None:
        """Discard the open episode, for example after a crash of the simulator; see `Writer.discard_episode`."""
        self._open_writer().discard_episode()
        self._values.forget(self._values.running.copy())

    def close(self) -> None:
        """Cut an open episode, close the writer, and close the environment."""
        try:
            if self._writer is not None:
                with self._writer, suppress(WriterClosed):  # the writer raises this if the store is closed
                    self._cut(self._writer)
        finally:
            super().close()

    def _cut(self, writer: "Writer") -> None:
        """End the open episode and store its episode fields. Fields that were set for the next episode stay set."""
        running = self._values.running.copy()
        for _, episode in self._values.of_episodes(running):
            writer.end_episode(episode=episode or None)
        writer.end_episode()  # after an error, an episode may be open although `running` is false
        self._values.forget(running)

    def _record(
        self, writer: "Writer", action: dict[str, np.ndarray], result: tuple[Any, ...], extra: dict[str, Any]
    ) -> None:
        obs, reward, terminated, truncated, info = result
        ended = bool(terminated or truncated)
        values, next_obs = self._values, self._values.own("obs", obs)
        # After an autoreset or `discard_episode`, no episode is running, and this step begins one.
        values.running[:] = True
        if not self._idle:
            assert self._obs is not None
            infos, episode = values.from_info(info, ended)
            if ended:
                ((_, given),) = values.of_episodes(_ONE_LANE)
                episode = {**given, **(episode or {})}
            writer.append(
                values.nest("obs", self._obs),
                values.nest("action", action),
                reward,
                terminated,
                truncated,
                next_obs=values.nest("obs", next_obs),
                episode=episode or None,
                **extra,
                **infos,
            )
            if ended:
                values.forget(_ONE_LANE)
        self._idle = ended and self._resets_itself
        self._obs = next_obs if self._idle or not ended else None

    def _open_writer(self) -> "Writer":
        if self._writer is None:
            self._writer = self._store.writer(durability=self._durability)
        return self._writer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}


class RecordVectorEpisodes(AnyVectorWrapper):
    """Append every step of a vector of environments to a store.

    In every autoreset mode, each environment is recorded as if it were recorded alone:

    - NEXT_STEP, or no mode in the metadata: the ``step`` after the end of a lane's episode only resets the lane. It
      records no step of the lane.
    - SAME_STEP: when the episode of a lane ends, the final observation and the info fields are taken from info.
    - DISABLED: after the end of a lane's episode, no step of the lane is recorded until the lane is reset.
      ``reset(options={"reset_mask": mask})`` resets only the lanes of the mask.

    A SAME_STEP environment that returns the same arrays at every step overwrites the final observation in info with the
    next episode's first observation. An episode whose final observation was overwritten is recorded without this
    observation, and a warning is issued once.

    ``close``, and ``reset`` in the middle of an episode, cut open episodes at their last observations. After an error
    of the environments, ``discard_episode`` drops open episodes, and ``reset`` keeps the steps of these episodes.
    Observations are copied: the environments may reuse their arrays.

    Concurrency: one thread at a time, as for the environments. A copy by pickle or ``copy.deepcopy`` has its own
    writer.

    Parameters
    ----------
    env : gymnasium.vector.VectorEnv
        The environments.
    store : Store
        The store; opened with mode "a". The store stays open when the environments are closed.
    info_fields : iterable of str
        Names of fields whose values are copied from info. Extra fields are copied at each step, and episode fields at
        the last step of an episode.
    durability : str or float
        As in ``Store.writer``.

    Raises
    ------
    SchemaError
        If an info field is in neither ``extra`` nor ``episode`` of the schema.
    ValueError
        If ``store`` is not a Store, ``env`` is not a vector environment, ``env`` is already recorded into ``store``, or
        the metadata of ``env`` name an autoreset mode that gymnasium does not have.

    Examples
    --------
    >>> import gymnasium
    >>> envs = gymnasium.make_vec("CartPole-v1", num_envs=4)
    >>> store = dr.create("vectors.replay", dr.Schema.from_env(envs))
    >>> envs = dr.RecordVectorEpisodes(envs, store)
    >>> _ = envs.reset(seed=0)
    >>> for _ in range(5):
    ...     _ = envs.step(envs.action_space.sample())
    >>> envs.close()
    >>> store.refresh()
    20
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        store: "Store",
        *,
        info_fields: Iterable[str] = (),
        durability: str | float = 5.0,
    ) -> None:
        if not isinstance(env, VectorEnv):
            raise ValueError(f"env must be a gymnasium.vector.VectorEnv, not {type(env).__name__}: use RecordEpisodes")
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._values = StepValues(store, info_fields, (env.num_envs,))
        _check_recorded_once(env, store)
        self._store, self._durability = store, durability
        self._obs: dict[str, np.ndarray] | None = None  # The last observation of each lane. If None, `step` raises.
        self._idle = np.zeros(env.num_envs, bool)  # True for lanes whose next step is not recorded.
        self._warned = False
        self._writer: VectorWriter | None = store.writer(env.num_envs, durability=durability)
        # Call this last: if a line above raises, gymnasium before 1.3 closes the environments of an initialised
        # wrapper.
        super().__init__(env)

    def set_extra(self, **fields: Any) -> None:
        """Set extra fields, by name, of the next step only; each value has a leading axis of num_envs.

        Raises
        ------
        SchemaError
            If the schema has no such extra field, or the field is copied from info.
        """
        self._values.set(fields)

    def set_episode(self, **values: Any) -> None:
        """Set episode fields, by name, of each lane's running episode.

        If no episode runs in a lane, the values belong to the lane's next episode. Each value has a leading axis of
        num_envs. See `RecordEpisodes.set_episode`.

        Raises
        ------
        SchemaError
            If the schema has no such episode field, the field is copied from info, or a value does not fit. Nothing is
            set.
        """
        self._values.set_episode(values)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments, or only those where ``options["reset_mask"]`` is True; cut their open episodes.

        If the schema has an episode field ``seed`` or ``options``, the argument of the same name is stored in this
        field for the next episodes. A list has a seed for each environment. An integer gives environment i the seed
        ``seed + i``, as in Gymnasium. None and an empty dict are not stored. An episode that begins by autoreset has no
        value in these fields.

        Raises
        ------
        SchemaError
            If the argument does not fit the episode field; the environments are not reset.
        """
        writer = self._open_writer()
        mask = None
        if options is not None:
            # The environments remove the mask from the dict, so give them a copy.
            options = dict(options)
            mask = None if options.get("reset_mask") is None else np.array(options["reset_mask"], bool)
        own_options = {name: value for name, value in (options or {}).items() if name != "reset_mask"}
        lanes = np.ones(self.num_envs, bool) if mask is None else mask
        given = self._values.reset_values(seed, own_options, lanes)
        try:
            obs, info = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
            self._cut(writer, lanes)
            self._values.begin(given, lanes)
            self._begin(self._values.own("obs", obs), mask)
        except BaseException:
            self._obs = None  # the states of the environments are unknown
            raise
        self._values.clear()
        return obs, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments and append the step of every lane that is in an episode.

        Raises
        ------
        SchemaError
            If a value does not fit the schema, or an extra field is missing. If an action does not fit, or a field is
            missing, the environments are not stepped. After any other error, the next call must be ``reset``.
        gymnasium.error.ResetNeeded
            Before the first reset, and after an error.
        """
        if self._obs is None:
            raise ResetNeeded(_NOT_RESET)
        writer = self._open_writer()
        own_actions = self._values.own("action", actions)
        extra = self._values.take()
        try:
            result = self.env.step(actions)
            self._record(writer, own_actions, result, extra)
        except BaseException:
            self._obs = None  # the states of the environments are unknown
            raise
        return result

    def discard_episode(self, mask: Any = None) -> None:
        """Discard the open episodes of all lanes, or of the lanes in ``mask``; see `VectorWriter.discard_episode`."""
        self._open_writer().discard_episode(mask)
        running = self._values.running
        self._values.forget(running if mask is None else running & as_numpy(mask).astype(bool))

    def close(self, **kwargs: Any) -> None:
        """Cut the open episodes, close the writer, and close the environments."""
        try:
            if self._writer is not None:
                with self._writer, suppress(WriterClosed):  # the writer raises this if the store is closed
                    self._cut(self._writer, np.ones(self.num_envs, bool))
        finally:
            super().close(**kwargs)

    def _cut(self, writer: "VectorWriter", lanes: np.ndarray) -> None:
        """End the open episodes of lanes, and store their episode fields.

        Fields that were set for the next episodes stay set.
        """
        running = self._values.running & lanes
        for some, episode in self._values.of_episodes(running):
            writer.end_episode(mask=some, episode=episode or None)
        writer.end_episode(mask=lanes)  # after an error, an episode may be open although `running` is false
        self._values.forget(running)

    def _begin(self, obs: dict[str, np.ndarray], mask: np.ndarray | None) -> None:
        if mask is None:
            self._obs, self._idle = obs, np.zeros_like(self._idle)
        elif self._obs is None:
            self._obs, self._idle = obs, ~mask
        else:
            self._idle &= ~mask
            for path, rows in self._obs.items():
                rows[mask] = obs[path][mask]

    def _record(
        self, writer: "VectorWriter", actions: dict[str, np.ndarray], result: tuple[Any, ...], extra: dict[str, Any]
    ) -> None:
        assert self._obs is not None
        obs, reward, terminated, truncated = fetched(*result[:4])
        info = result[4]
        terminated, truncated = as_numpy(terminated), as_numpy(truncated)
        ended = terminated.astype(bool) | truncated.astype(bool)  # `append` checks that each value is 0 or 1
        values, after = self._values, self._values.own("obs", obs)
        live = ~self._idle
        # An episode runs in every lane that is not idle, even if the previous episode was discarded. With NEXT_STEP,
        # the environments have just reset the idle lanes, so an episode runs in these, too.
        values.running |= live | (self._mode is AutoresetMode.NEXT_STEP)
        if live.any():
            next_obs, unknown, infos, episode = self._ends(after, info, live, ended & live)
            step = {
                "obs": values.nest("obs", self._obs),
                "action": values.nest("action", actions),
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                **extra,
                **infos,
            }
            if unknown.any():
                self._warn_of_unknown(int(np.flatnonzero(unknown)[0]))
            rest = live & ~ended
            # Several calls of `append` are needed only if the ending episodes have different episode fields, or if a
            # final observation is unknown.
            for lanes, given in values.of_episodes(live & ended) or [(np.zeros_like(live), {})]:
                own = {**given, **(episode or {})} or None
                for some, following in ((~unknown, {"next_obs": values.nest("obs", next_obs)}), (unknown, {})):
                    chosen = (lanes | rest) & some
                    if chosen.any():
                        mask = None if chosen.all() else chosen
                        writer.append(**step, **following, episode=own, mask=mask)
                rest = np.zeros_like(rest)
            values.forget(live & ended)
        if self._mode is AutoresetMode.SAME_STEP:
            values.running |= ended
        self._obs = after
        if self._mode is AutoresetMode.DISABLED:
            self._idle = self._idle | ended
        else:
            self._idle = ended if self._mode is AutoresetMode.NEXT_STEP else np.zeros_like(ended)

    def _ends(
        self, after: dict[str, np.ndarray], info: dict[str, Any], live: np.ndarray, ended: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any], dict[str, Any] | None]:
        """Return the next observations, a mask of the lanes where this observation is unknown, and fields from info.

        The fields from info are two dicts: the extra fields of the step, and the episode fields of the ending episodes.
        The second dict is None if no episode ends.
        """
        lanes, ends = np.flatnonzero(live), np.flatnonzero(ended)
        if self._mode is not AutoresetMode.SAME_STEP or not ends.size:
            return after, np.zeros_like(live), *self._values.from_infos([(info, lanes)], [(info, ends)])
        last = (info.get("final_info"), ends)
        infos = self._values.from_infos([(info, np.flatnonzero(live & ~ended)), last], [last])
        return *self._values.with_final(after, info, ended), *infos

    def _warn_of_unknown(self, lane: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"lane {lane} ended, and its final observation in info is the first one of its next episode: the "
                "environment seems to return one array again and again. Such episodes are recorded without a final "
                "observation; have the environment return copies",
                stacklevel=4,
            )

    def _open_writer(self) -> "VectorWriter":
        if self._writer is None:
            self._writer = self._store.writer(self.num_envs, durability=self._durability)
        return self._writer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}


def _has_autoreset(env: gym.Env[Any, Any]) -> bool:
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.Autoreset):
            return True
        env = env.env
    return False


def _check_recorded_once(env: object, store: "Store") -> None:
    """Raise ValueError if an inner wrapper already records into the store: each step would be stored twice."""
    while isinstance(env, gym.Wrapper | VectorWrapper):
        if isinstance(env, RecordEpisodes | RecordVectorEpisodes) and env._store.path == store.path:
            raise ValueError(f"this environment is recorded into {store.path} already: wrap env.env, or another one")
        env = env.env
