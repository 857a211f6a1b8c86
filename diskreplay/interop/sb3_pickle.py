"""Pickled replay buffers of Stable-Baselines3: the files of ``save_replay_buffer``.

A pickle can run code when Python loads it. An import reads only arrays, numbers and spaces, and raises FormatError for
a file that has other objects.

The features are ``observations`` or ``observations/KEY``, ``actions`` and ``rewards``. An import follows these rules:

- The steps of each environment are in the order of time, the oldest first.
- Episodes are in the order of their first steps. Episodes that begin in the same row are in the order of environments.
- With ``optimize_memory_usage``, the buffer overwrote the observation after the last step of an episode. So only the
  episodes with the newest steps have a final observation. In a full buffer, the newest observation has replaced the
  oldest one, so the oldest step is left out.
- The infos of a ``HerReplayBuffer`` are left out.

An export of an imported store restores the class, the number of environments and the settings of the buffer. A
``HerReplayBuffer`` needs observations with goals. Rewards and actions of float64 become float32. An episode that was
cut becomes truncated. But if the last episode of an environment was cut, it stays cut, except in a
``HerReplayBuffer``. In an episode without a final observation, the last observation is repeated.
"""

import pickle
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, FormatError, MissingExtra, Schema, SchemaError, Store, StoreNotFound
from diskreplay.interop.exchange.choosing import Options, check_option
from diskreplay.interop.exchange.episode_data import ACTION, OBS, REWARD, EpisodeData, Json, Lacking, is_obs
from diskreplay.interop.exchange.exporting import ChosenEpisode, Exported, ExportOptions, Format, Plan, export_from
from diskreplay.interop.exchange.field_trees import space_of
from diskreplay.interop.exchange.importing import Given, Imported, Source, import_into
from diskreplay.interop.exchange.inert_pickle import Record, array, arrays, load
from diskreplay.interop.exchange.lanes import LaneFiller, Piece, breaks, pieces, ring_order, rows_at, with_final
from diskreplay.interop.step_values import as_flags

__all__ = ["export_dataset", "import_dataset"]

NAME = "sb3_pickle"
_HER, _STRATEGY = "HerReplayBuffer", "goal_selection_strategy"
_BUFFERS = {
    name: f"stable_baselines3.{module}.{name}"
    for module, names in {
        "common.buffers": ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer"),
        "her.her_replay_buffer": (_HER,),
    }.items()
    for name in names
}
_OURS = {f"diskreplay.interop.sb3.Disk{name}" for name in ("ReplayBuffer", "DictReplayBuffer", "HerReplayBuffer")}
_SPACES = {
    f"{library}.spaces.{module}.{name}"
    for library in ("gymnasium", "gym")
    for module, name in {
        "box": "Box",
        "discrete": "Discrete",
        "multi_discrete": "MultiDiscrete",
        "multi_binary": "MultiBinary",
        "dict": "Dict",
    }.items()
}
_CLASSES = {
    *_BUFFERS.values(),
    *_OURS,
    *_SPACES,
    "stable_baselines3.her.goal_selection_strategy.GoalSelectionStrategy",
    "torch.device",
    # Classes of paths, for buffers of diskreplay, and of random number generators, for spaces:
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),
    *("numpy.random._pickle.__generator_ctor", "numpy.random._pickle.__bit_generator_ctor"),
    *("numpy.random._pcg64.PCG64", "numpy.random._mt19937.MT19937"),
    *("numpy.random._pickle.__randomstate_ctor", "gym.utils.seeding.RandomNumberGenerator"),
    *("numpy.random.bit_generator.SeedSequence", "numpy.random.bit_generator.__pyx_unpickle_SeedSequence"),
}
# The settings of a buffer of Stable-Baselines3. An import records them, and an export writes them back.
_SETTINGS = ("handle_timeout_termination", "n_steps", "gamma", "n_sampled_goal")
_FLOAT32_HOLDS = ("float16", "float32", "int8", "int16", "uint8", "uint16")

Rows = Mapping[str, NDArray[Any]]  # {path of a leaf: its values in all steps}


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    **options: Unpack[Options],
) -> Imported:
    """Import a pickled replay buffer of Stable-Baselines3 into a new store, or resume an interrupted import.

    The steps of each environment are divided into episodes. An episode ends after a step that is done. An episode also
    ends if the next observation of a step is not the observation of the next step. An episode that a time limit ended
    is truncated if the buffer handled timeouts, otherwise terminated. In a full buffer, the first episode of an
    environment may lack its first steps. The last episode of each environment is cut if it has not ended.

    Parameters
    ----------
    source : path
        The file to import.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this file.
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        The file does not exist.
    FormatError
        The file is damaged, has no replay buffer, or would run code.
    SchemaError
        A store cannot hold the space of the observations or of the actions.
    StoreExists
        ``path`` exists, and is not an import of this data set.
    MissingExtra
        gymnasium is not installed.
    """
    return import_into(path, source, _Buffer, options)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    n_envs: int | None = None,
    buffer_class: str | None = None,
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a file that ``load_replay_buffer`` of Stable-Baselines3 loads.

    The buffer is full: its size is the number of steps in these episodes. The oldest step is first. The buffer is made
    in memory, and then written.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : path
        The path of the new file. Nothing may exist at this path.
    n_envs : int, optional
        The number of environments of the buffer. Each episode is added to the environment with the fewest steps, and
        all environments must end with the same number of steps. None: as in the buffer that the store was imported
        from, otherwise 1.
    buffer_class : str, optional
        "ReplayBuffer", "NStepReplayBuffer", "DictReplayBuffer" or "HerReplayBuffer". None: the class of the buffer that
        the store was imported from. If the store was not imported from a buffer, None means "DictReplayBuffer" for
        observations in a dict, and "ReplayBuffer" for other observations.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    SchemaError
        Stable-Baselines3 has no buffer for these steps, or the environments would have different numbers of steps.
    StoreExists
        A file or folder exists at ``path``.
    MissingExtra
        Stable-Baselines3 is not installed.
    """
    if n_envs is not None and n_envs < 1:
        raise SchemaError(f"n_envs must be at least 1, not {n_envs}")
    check_option("buffer_class", buffer_class, (*_BUFFERS, None))

    def make_format(schema: Schema, episodes: Sequence[ChosenEpisode], noted: Mapping[str, Json]) -> Format:
        not_held = _not_held(schema)
        maker = _maker(schema, episodes, noted, n_envs, buffer_class)
        _empty(maker, schema, maker.lanes)  # this raises an error if Stable-Baselines3 has no buffer for these steps
        return Format(not_held, partial(_write, maker))

    return export_from(store_or_path, path, make_format, options)


# --- reading ---------------------------------------------------------------------------------------------------------


class _Buffer(Source):
    """A pickled buffer: its steps by environment, oldest first.

    ``metadata`` has the name of the buffer's class, and arguments of this class.
    """

    format = NAME
    schema: Schema

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        record = _record(self.place)
        self._attributes = record.attributes
        try:
            kept = array(self._get("actions"), "actions").dtype
            self.schema = _schema(self._get("observation_space"), self._get("action_space"), kept)
            ended = self._read_steps()
        except (ValueError, TypeError, KeyError, IndexError) as error:
            if isinstance(error, SchemaError):
                raise
            raise FormatError(f"{self.place} is damaged: {error}") from None
        self._pieces = pieces(ended)
        self.episodes, self.steps = len(self._pieces), sum(map(len, self._pieces))
        obs = {path: f"observations{path.removeprefix(OBS)}" for path in self.schema.leaves if is_obs(path)}
        self.leaves, self.names = self.schema.leaves, {**obs, ACTION: "actions", REWARD: "rewards"}
        settings: dict[str, Json] = {"class": record.class_name.rpartition(".")[2], "n_envs": ended.shape[1]}
        for name in _SETTINGS:
            if isinstance(value := self._attributes.get(name), (bool, int, float)):
                settings[name] = value
        if isinstance(strategy := self._attributes.get(_STRATEGY), Record) and strategy.args:
            settings[_STRATEGY] = int(strategy.args[0])
        self.metadata = settings

    def _get(self, name: str) -> Any:
        if name not in self._attributes:
            raise FormatError(f"it has no {name}")
        return self._attributes[name]

    def _read_steps(self) -> NDArray[np.bool_]:
        """Return a mask of the steps that end an episode, ``(T, n_envs)``."""
        dones = as_flags(array(self._get("dones"), "dones"), "dones", FormatError)
        timeouts = np.zeros_like(dones)  # old versions of Stable-Baselines3 have no timeouts
        if "timeouts" in self._attributes:
            timeouts = as_flags(array(self._attributes["timeouts"], "timeouts"), "timeouts", FormatError)
        rows, shares_obs = len(dones), bool(self._attributes.get("optimize_memory_usage"))
        pos, is_full = int(self._get("pos")), bool(self._get("full"))
        if not 0 <= pos < rows or dones.ndim != 2 or timeouts.shape != dones.shape:
            raise FormatError(f"pos is {pos} and dones have the shape {dones.shape}")
        self._obs = self._leaves("observations", OBS, dones.shape)
        self._next_obs = None if shares_obs else self._leaves("next_observations", OBS, dones.shape)
        self._steps = self._leaves("actions", ACTION, dones.shape) | {REWARD: array(self._get("rewards"), "rewards")}
        for name, leaf in self._steps.items():
            if leaf.shape[:2] != dones.shape:
                raise FormatError(f"the {name} has the shape {leaf.shape} and dones have {dones.shape}")
        order = ring_order(rows, pos, is_full)
        if shares_obs and is_full:
            order = order[1:]  # the observation after the newest step replaced the oldest observation
        self._order, self._newest = order, len(order) - 1
        newest_last = rows_at(order)
        self._terminated, self._truncated = (dones & ~timeouts)[newest_last], timeouts[newest_last]
        ended: NDArray[np.bool_] = self._terminated | self._truncated
        if self._next_obs is not None:
            broken = breaks(list(self._obs.values()), list(self._next_obs.values()), order) & ~ended
            self.cut, ended = int(np.count_nonzero(broken)), ended | broken
        return ended

    def _leaves(self, name: str, part: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        value = self._get(name)
        if not isinstance(value, Mapping):
            found = {part: array(value, name)}
        else:
            found = {f"{part}/{key}": leaf for key, leaf in arrays(value, name).items()}
        fields = {path: field for path, field in self.schema.leaves.items() if path.split("/")[0] == part}
        if found.keys() != fields.keys():
            raise FormatError(f"{name} are {', '.join(found)}, and the space has {', '.join(fields)}")
        return {path: leaf.reshape(*shape, *fields[path].shape) for path, leaf in found.items()}

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        return (self._episode(piece, wanted) for piece in self._pieces[first:])

    def _episode(self, piece: Piece, wanted: Collection[str]) -> EpisodeData:
        rows, lane, last = rows_at(self._order[piece.start : piece.stop]), piece.lane, piece.stop - 1
        newest = self._order[last : piece.stop]
        obs = {path: leaf[rows, lane] for path, leaf in self._obs.items() if path in wanted}
        if self._next_obs is not None:
            final = {path: self._next_obs[path][newest, lane] for path in obs}
            obs = {path: with_final(leaf, final[path], f"{self.place}: next {path}") for path, leaf in obs.items()}
        elif last == self._newest:
            after = (newest + 1) % len(self._steps[REWARD])
            obs = {path: np.concatenate([leaf, self._obs[path][after, lane]]) for path, leaf in obs.items()}
        steps = {path: leaf[rows, lane] for path, leaf in self._steps.items() if path in wanted}
        return EpisodeData(obs | steps, bool(self._terminated[last, lane]), bool(self._truncated[last, lane]))


def _record(file: Path) -> Record:
    try:
        record = load(file, _CLASSES)
    except OSError as error:
        raise StoreNotFound(f"{file} cannot be read: {error.strerror}") from None
    if isinstance(record, Record) and record.class_name in _OURS:
        raise FormatError(f"{file} has no steps: it names a store of this package with the steps; use that store")
    if not isinstance(record, Record) or record.class_name not in _BUFFERS.values():
        raise FormatError(f"{file} is not a pickled replay buffer of Stable-Baselines3")
    return record


def _schema(observation_space: Any, action_space: Any, kept: np.dtype[Any]) -> Schema:
    # Since 2.1, Stable-Baselines3 keeps float64 actions as float32.
    spaces = _space(observation_space), _space(action_space)
    dtypes = {} if kept == np.float64 else {"float64": "float32"}
    action = Schema.from_spaces(*spaces, dtype_map=dtypes).action
    return Schema(Schema.from_spaces(*spaces).obs, action)


def _space(record: Any) -> Any:
    with MissingExtra.raised_for("spaces of Stable-Baselines3", "gym"):
        from gymnasium import spaces

    if not isinstance(record, Record) or record.class_name not in _SPACES:
        raise FormatError("the buffer has a space that is not a space of gymnasium")
    values = record.attributes
    kind = record.class_name.rpartition(".")[2]
    if kind == "Dict":
        return spaces.Dict(OrderedDict((key, _space(inner)) for key, inner in values["spaces"].items()))
    if kind == "Box":
        low, high = array(values["low"], "low"), array(values["high"], "high")
        return spaces.Box(low, high, dtype=low.dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(values["n"]), start=int(values.get("start", 0)))
    if kind == "MultiDiscrete":
        nvec = array(values["nvec"], "nvec")
        start = array(values["start"], "start") if "start" in values else None
        return spaces.MultiDiscrete(nvec, dtype=nvec.dtype.type, start=start)
    n = values["n"]
    return spaces.MultiBinary(n if isinstance(n, int) else [int(size) for size in n])


# --- writing ---------------------------------------------------------------------------------------------------------


def _not_held(schema: Schema) -> dict[str, str]:
    if any(path.count("/") > 1 for path in schema.step_leaves if is_obs(path)) or isinstance(schema.obs, tuple):
        raise SchemaError("Stable-Baselines3 has no buffer for tuples and nested dicts of observations")
    if not isinstance(schema.action, Field):
        raise SchemaError("Stable-Baselines3 has no buffer for actions that are dicts or tuples")
    no_place = "a replay buffer has no place for it"
    lost = {path: no_place for path in schema.leaves if path.startswith(("extra/", "episode/"))}
    if schema.reward.dtype.name not in _FLOAT32_HOLDS:
        lost[REWARD] = f"rewards are float32 in a replay buffer, and {schema.reward.dtype} in the store"
    if schema.action.dtype == np.float64:
        lost[ACTION] = "actions are float32 in a replay buffer, and float64 in the store"
    return lost | {
        Lacking.PRIORITY: no_place,
        Lacking.ENDS: "cut episodes become truncated, and an episode with both flags is terminated",
        Lacking.NO_FINAL_OBS: "the last observation is repeated if there is no final observation",
        Lacking.NOTES: no_place,
        Lacking.SCHEMA: "only spaces are kept",
        Lacking.METADATA: no_place,
    }


def _write(maker: "_Maker", plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    buffer, lanes = _empty(maker, plan.schema, plan.steps), LaneFiller(maker.lanes)
    for episode in episodes:
        _add(buffer, episode, lanes.place(len(episode)))
    with open(plan.path, "wb") as file:
        pickle.dump(buffer, file, pickle.HIGHEST_PROTOCOL)


def _add(buffer: Any, episode: EpisodeData, piece: Piece) -> None:
    at = slice(piece.start, piece.stop), piece.lane
    for path, leaf in episode.steps.items():
        if is_obs(path):
            key = path.partition("/")[2]
            before, after = buffer.observations, buffer.next_observations
            before, after = (before[key], after[key]) if key else (before, after)
            before[at] = leaf[: len(piece)].reshape(before[at].shape)
            after[at] = leaf[1:].reshape(after[at].shape)
    buffer.actions[at] = episode.steps[ACTION].reshape(buffer.actions[at].shape)
    buffer.rewards[at] = episode.steps[REWARD]
    # If a lane's last episode was cut, its last step is not done, as in a buffer that was saved during an episode. In a
    # `HerReplayBuffer`, each last step is done, because only whole episodes are sampled.
    is_hindsight = type(buffer).__name__ == _HER
    is_done = not episode.cut or piece.stop < len(buffer.rewards) or is_hindsight
    buffer.dones[piece.stop - 1, piece.lane] = is_done
    buffer.timeouts[piece.stop - 1, piece.lane] = is_done and not episode.terminated
    if is_hindsight:
        buffer.ep_start[at], buffer.ep_length[at] = piece.start, len(piece)


class _Maker(NamedTuple):
    name: str
    arguments: Mapping[str, Any]
    lanes: int


def _maker(
    schema: Schema,
    episodes: Sequence[ChosenEpisode],
    noted: Mapping[str, Json],
    n_envs: int | None,
    buffer_class: str | None,
) -> _Maker:
    settings: Mapping[str, Json] = noted["metadata"] if noted.get("format") == NAME else {}
    lanes = n_envs or int(settings.get("n_envs", 1))
    filler = LaneFiller(lanes)
    for episode in episodes:
        filler.place(len(episode))
    if len(set(filler.lengths)) > 1:
        if n_envs is not None:
            raise SchemaError(
                f"{n_envs} environments would have {min(filler.lengths)} to {max(filler.lengths)} steps, and a buffer "
                "has the same number of steps for each; give n_envs=1"
            )
        lanes = 1  # after episodes were added or left out, an equal division is not possible
    default = "DictReplayBuffer" if isinstance(schema.obs, Mapping) else "ReplayBuffer"
    name = buffer_class or str(settings.get("class", default))
    if name.startswith(("Dict", "Her")) is not isinstance(schema.obs, Mapping):
        raise SchemaError(f"a {name} cannot hold these observations; use a {default}")
    wanted = {_HER: ("n_sampled_goal", _STRATEGY), "NStepReplayBuffer": ("n_steps", "gamma")}.get(name, ())
    known = {key: settings[key] for key in ("handle_timeout_termination", *wanted) if key in settings}
    return _Maker(name, known, lanes)


def _empty(maker: _Maker, schema: Schema, steps: int) -> Any:
    """Return a new buffer for ``steps`` steps, marked as full although the steps are not written yet."""
    with MissingExtra.raised_for("a replay buffer of Stable-Baselines3", "sb3"):
        from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
        from stable_baselines3.her import GoalSelectionStrategy, HerReplayBuffer

    classes = (ReplayBuffer, DictReplayBuffer, NStepReplayBuffer, HerReplayBuffer)
    made: Any = next(each for each in classes if each.__name__ == maker.name)
    arguments = dict(maker.arguments)
    if made is HerReplayBuffer:
        arguments |= {"env": None, _STRATEGY: GoalSelectionStrategy(arguments.get(_STRATEGY, 0))}
    spaces = space_of(schema.obs), space_of(schema.action)
    try:
        buffer = made(steps, *spaces, device="cpu", n_envs=maker.lanes, **arguments)
    except (AssertionError, NotImplementedError) as error:
        raise SchemaError(f"Stable-Baselines3 has no {maker.name} for such steps: {error}") from None
    buffer.pos, buffer.full = 0, True
    return buffer
