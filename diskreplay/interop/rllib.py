"""Replay buffers of RLlib's new API stack whose steps are in a store."""

import os
from abc import ABCMeta
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.closing import Kept, check_open, closes
from diskreplay.interop.step_values import row_of
from diskreplay.interop.trajectory_writers import TrajectoryWriters

with dr.MissingExtra.raised_for("a replay buffer of RLlib", "rllib"):
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer

    from diskreplay.interop.rllib_episodes import StepReader, StoredEpisode

__all__ = ["DiskEpisodeReplayBuffer", "DiskPrioritizedEpisodeReplayBuffer"]

PathLike = str | os.PathLike[str]
Array = NDArray[Any]


class Chunk(NamedTuple):
    """A part of an episode that is appended to the store: T steps and T + 1 observations, nested as in the schema."""

    obs: Any
    action: Any
    rewards: Array
    extra: dict[str, Any]


class NamedInConfigs(ABCMeta):
    """The metaclass of classes that can be the "type" of a ``replay_buffer_config``: RLlib tests ``text in type``."""

    def __contains__(cls, text: object) -> bool:
        return str(text) in cls.__name__


class InStore(EpisodeReplayBuffer, metaclass=NamedInConfigs):  # type: ignore[misc]
    """A base class that keeps a buffer's steps in a store. Put this class before RLlib's class in a list of bases."""

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        path: PathLike | dr.Store,
        durability: float | str = 5.0,
        info_fields: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        if isinstance(info_fields, str):  # a str is a sequence of letters, and each letter would be taken for a name
            raise ValueError(f'info_fields must be a sequence of names, such as ("lives",), not {info_fields!r}')
        super().__init__(capacity, **kwargs)
        self._path = Path(path.path if isinstance(path, dr.Store) else path).absolute()
        self._info_fields = tuple(info_fields)
        self._store: dr.Store | None = None
        self._kept: Kept = []
        self._close = closes(self, self._kept)
        self._writers = TrajectoryWriters(self._kept, durability)
        # {`_key` of an episode: the episode, and the ids of its steps that are in the store}. If `add` raised, the ids
        # stay here until the next call. If this is the same call again, it appends only the other steps.
        self._stored: dict[tuple[int, bool], tuple[Any, list[int]]] = {}
        with suppress(dr.StoreNotFound):
            # `open` raises StoreNotFound if the store does not exist: the first step makes the store
            dr.open(self._path).close()
            self._open(dr.open(self._path, "a"))
            self._restore()

    # --- the store ---------------------------------------------------------------------------------------------------

    def _open(self, store: dr.Store) -> None:
        self._kept.append(store)
        if store.capacity is not None and store.capacity < self.capacity:
            self.close()
            raise dr.StoreExists(
                f"the store at {self._path} keeps {store.capacity} steps, fewer than the buffer's capacity of "
                f'{self.capacity}: use a new path, or call diskreplay.open(path, "a").resize(capacity='
                f"{2 * self.capacity})"
            )
        missing = sorted(set(self._info_fields) - store.schema.extra.keys())
        if missing:
            self.close()
            raise dr.StoreExists(
                f"the store at {self._path} has no fields for the infos {', '.join(missing)}: use a new path"
            )
        self._store, self._reader = store, StepReader(store, self._info_fields, self._kept)

    def _restore(self) -> None:
        assert self._store is not None
        chosen: list[dr.Episode] = []
        steps = 0
        for episode in reversed(self._store.episodes):
            steps += len(episode) - episode.hidden_steps
            if chosen and steps > self.capacity:
                break
            chosen.append(episode)
        chosen.reverse()
        if not chosen:
            return
        ids = [episode.ids for episode in chosen]
        # The last step of an episode cannot be read if the next observation is not in the store.
        there = np.split(np.isin(np.concatenate(ids), self._reader.ids()), np.cumsum([len(each) for each in ids])[:-1])
        super().add(
            [
                StoredEpisode(
                    self._reader,
                    numbers[kept],
                    episode.reward[kept],
                    id_=str(int(numbers[0])),
                    terminated=episode.terminated,
                    truncated=episode.truncated,
                )
                for episode, numbers, kept in zip(chosen, ids, there, strict=True)
                if kept.any()
            ]
        )

    @property
    def store(self) -> dr.Store | None:
        """The store with the steps, or None before the first step. Closing the buffer closes the store."""
        return self._store

    def close(self) -> None:
        """Close the store. Sampled episodes stay valid. Closing twice is fine."""
        self._close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._path)!r}, steps={len(self)}, capacity={self.capacity})"

    # --- adding ------------------------------------------------------------------------------------------------------

    def add(self, episodes: Any, *args: Any, **kwargs: Any) -> None:
        """Add episodes, or chunks of them, as the buffer of RLlib does.

        Raises
        ------
        SchemaError
            A value differs in shape or dtype from earlier episodes, or an object is not a `SingleAgentEpisode`. Nothing
            was added.
        ValueError
            A chunk does not continue its episode; nothing was added.
        StorageFull
            The disk is full; the buffer did not change. You may add the same episodes again.
        """
        check_open(self, self._close)
        # If there is no store yet, leave out episodes without steps: the first step defines the schema of the store.
        given = [] if episodes is None else episodes
        given = given if isinstance(given, list | tuple | set | deque) else [given]
        episodes = [each for each in given if self._store is not None or len(each)]
        self._check(episodes)
        keys = {_key(episode) for episode in episodes}
        self._stored = {key: stored for key, stored in self._stored.items() if key in keys}
        chunks = [self._chunk(episode) for episode in episodes]
        added = [self._append(episode, chunk) for episode, chunk in zip(episodes, chunks, strict=True)]
        super().add(added, *args, **kwargs)
        self._stored.clear()

    def _check(self, episodes: list[Any]) -> None:
        there = {episode.id_: episode for episode in self.episodes}
        last: dict[str, tuple[int, bool]] = {}
        for episode in episodes:
            if not isinstance(episode, SingleAgentEpisode):
                raise dr.SchemaError(f"the buffer takes episodes of single agents, not {type(episode).__name__}")
            name = episode.id_
            if name in there:
                last.setdefault(name, (there[name].t, there[name].is_done))
            if name in last and last[name] != (episode.t_started, False):
                t, done = last[name]
                raise ValueError(
                    f"a chunk of the episode {name} begins at step {episode.t_started}, and the buffer has "
                    f"{'the whole episode' if done else f'the episode up to step {t}'}"
                )
            last[name] = episode.t, episode.is_done

    def _chunk(self, episode: Any) -> Chunk | None:
        count = len(episode)
        if not count:
            return None
        obs, action, rewards = (
            _arrays(each) for each in (episode.get_observations(), episode.get_actions(), episode.get_rewards())
        )
        extra = {name: _arrays(episode.get_extra_model_outputs(name)) for name in episode.extra_model_outputs}
        extra |= {name: _info_field(episode, name) for name in self._info_fields}
        schema = self._opened(obs, action, extra).schema
        named = {name: extra[name] for name in schema.extra if name in extra}

        def cast(part: str, values: Any, rows: int) -> Any:
            return schema.unflatten(part, schema.cast(part, values, (rows,)))

        rewards = schema.reward.cast(rewards, "reward", (count,))
        return Chunk(cast("obs", obs, count + 1), cast("action", action, count), rewards, cast("extra", named, count))

    def _opened(self, obs: Any, action: Any, extra: dict[str, Any]) -> dr.Store:
        if self._store is None:
            step = dr.Schema.from_example(row_of(obs, 0), row_of(action, 0), extra=row_of(extra, 0))
            schema = dr.Schema(step.obs, step.action, dr.Field((), "float64"), extra=step.extra)
            # The store evicts the oldest steps, but the buffer drops the episodes that began first, even episodes with
            # new steps. So the store needs more capacity than the buffer.
            self._open(dr.create(self._path, schema, capacity=2 * self.capacity))
        assert self._store is not None
        return self._store

    def _append(self, episode: Any, chunk: Chunk | None) -> StoredEpisode:
        assert self._store is not None
        _, ids = self._stored.setdefault(_key(episode), (episode, []))
        if chunk is not None and len(ids) < len(chunk.rewards):
            obs, action, rewards, extra = chunk
            writer, last = self._writers.of(self._store, episode.id_), len(rewards) - 1
            self._reader.outdated = True
            for i in range(len(ids), len(rewards)):
                ends = (bool(episode.is_terminated), bool(episode.is_truncated)) if i == last else (False, False)
                now, then = row_of(obs, i), row_of(obs, i + 1)
                writer.append(now, row_of(action, i), rewards[i], *ends, then, **row_of(extra, i))
                ids.append(writer.last_id)
            if episode.is_done:
                self._writers.ended(episode.id_)
        return StoredEpisode(
            self._reader,
            ids,
            () if chunk is None else chunk.rewards,
            id_=episode.id_,
            agent_id=episode.agent_id,
            module_id=episode.module_id,
            observation_space=episode.observation_space,
            action_space=episode.action_space,
            t_started=episode.t_started,
            terminated=episode.is_terminated,
            truncated=episode.is_truncated,
        )

    # --- sampling ----------------------------------------------------------------------------------------------------

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Sample episodes, or a batch, as the buffer of RLlib does.

        Raises
        ------
        NotEnoughData
            The buffer is empty.
        InvalidIndex
            The store has evicted a step that the buffer holds. Give the store a larger capacity.
        """
        check_open(self, self._close)
        if not len(self):
            raise dr.NotEnoughData("the buffer is empty, and a sample needs at least one step: add episodes")
        is_of_rows = not (kwargs.get("sample_episodes") or isinstance(self, PrioritizedEpisodeReplayBuffer))
        longest = kwargs.get("batch_length_T") or self.batch_length_T
        with self._reader.at_most(longest if is_of_rows else None):
            return super().sample(*args, **kwargs)

    # --- saving ------------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Make the steps durable.

        Return RLlib's own state, with the ids of steps in place of the steps, and the uuid of the store.
        """
        check_open(self, self._close)
        self._writers.flush()
        return {**super().get_state(), "store": None if self._store is None else self._store.uuid}

    def set_state(self, state: dict[str, Any]) -> None:
        """Replace the steps of the buffer by the steps of a state.

        Raises
        ------
        ValueError
            The state belongs to a buffer without a store.
        StoreNotFound
            The state is of another store.
        SegmentGone
            The store has evicted some of these steps.
        """
        check_open(self, self._close)
        if "store" not in state:
            raise ValueError(f"the state holds the steps themselves: pass a state from {type(self).__name__}.get_state")
        uuid = None if self._store is None else self._store.uuid
        if state["store"] not in (None, uuid):
            raise dr.StoreNotFound(
                f"the state is of the store {state['store']}, and the store at {self._path} is {uuid}"
            )
        episodes: deque[StoredEpisode] = deque()
        if self._store is not None:
            ids = np.concatenate([np.zeros(0, np.int64), *(each["ids"] for each in state["episodes"])])
            self._reader.outdated = True
            gone = int((~np.isin(ids, self._reader.ids())).sum())
            if gone:
                raise dr.SegmentGone(
                    f"the store at {self._path} has evicted {gone} of the {len(ids)} steps of the state: continue "
                    "without a state, with the newest steps"
                )
            episodes.extend(StoredEpisode(self._reader, **each) for each in state["episodes"])
        self.episodes = episodes  # RLlib's `set_state` makes its own episodes if the buffer has none
        super().set_state(state)
        self._stored.clear()


def _key(episode: Any) -> tuple[int, bool]:
    return id(episode), episode.is_done


def _arrays(values: Any) -> Any:
    """Return the values of steps as arrays with a leading axis of steps, nested like the value of one step."""
    if not isinstance(values, list):
        return values
    if isinstance(values[0], dict):
        return {name: _arrays([value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], tuple):
        return tuple(_arrays(list(part)) for part in zip(*values, strict=True))
    return np.array(values)


def _info_field(episode: Any, name: str) -> Array:
    infos = episode.get_infos()[1:]
    lacking = [i for i, info in enumerate(infos) if name not in info]
    if lacking:
        raise dr.SchemaError(f"the info of step {lacking[0]} of the episode {episode.id_} has no {name!r}")
    return np.stack([np.asarray(info[name]) for info in infos])


class DiskEpisodeReplayBuffer(InStore):
    """An `EpisodeReplayBuffer` of RLlib whose steps are in a store.

    Use this class in DQN, SAC and other algorithms by ``config.training(replay_buffer_config={"type":
    DiskEpisodeReplayBuffer, "path": "run.replay"})``. RLlib's own code draws the samples. With equal seeds, samples and
    trained networks are the same as with RLlib's own buffer, bit for bit. The id and the reward of each step, and
    RLlib's bookkeeping, are in memory: 100 to 160 bytes a step.

    An existing store is continued: the buffer begins with the newest episodes of the store. A step in the store has the
    observation, the action, the reward, and all other outputs of RLlib's module (the policy), by name, such as
    ``action_logp``. If more than 256 episodes are open at the same time, the episode with the oldest last step is cut.

    Concurrency: one thread of one process, as in RLlib. Other processes may read the store.

    Parameters
    ----------
    capacity : int
        The largest number of steps in the buffer. Beyond this number, the oldest episodes leave the buffer. A new store
        has twice this capacity.
    path : path or Store
        The store, or its path. If a Store is given, the buffer opens the store again by its path. If the path does not
        exist, the first step makes the store and defines its schema. If the store exists, the buffer leaves out outputs
        of RLlib's module that the schema lacks.
    durability : float or str
        As for `Store.writer`.
    info_fields : sequence of str
        The keys of infos that are stored with each step. Infos of sampled episodes have only these keys.
    **kwargs
        Other arguments of `EpisodeReplayBuffer`.

    Raises
    ------
    ValueError
        `info_fields` is a single text.
    StoreExists
        The store at the path keeps fewer steps than `capacity`, or lacks one of `info_fields`.
    """


class DiskPrioritizedEpisodeReplayBuffer(InStore, PrioritizedEpisodeReplayBuffer):  # type: ignore[misc]
    """A `PrioritizedEpisodeReplayBuffer` of RLlib whose steps are in a store; see `DiskEpisodeReplayBuffer`.

    Priorities are in memory, and saved with the state of the buffer. A buffer that continues a store begins with equal
    priorities.

    Parameters
    ----------
    alpha : float
        As for `PrioritizedEpisodeReplayBuffer`.
    **kwargs
        Other arguments of `DiskEpisodeReplayBuffer`.
    """
