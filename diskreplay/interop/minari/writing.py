"""Write episodes to a data set of Minari, in groups."""

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from diskreplay import MissingExtra, Schema
from diskreplay.interop.exchange.episode_data import ACTION, OBS, EpisodeData, Json
from diskreplay.interop.exchange.exporting import Plan
from diskreplay.interop.exchange.field_trees import space_of
from diskreplay.interop.exchange.threads import write_behind
from diskreplay.interop.minari.arrow_files import METADATA, Raw, write_file
from diskreplay.interop.minari.episodes import SEED, Layout
from diskreplay.interop.minari.values import AnySpace, flat, without_texts

with MissingExtra.raised_for("a data set of Minari", "minari"):
    import minari
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage
    from minari.serialization import deserialize_space

__all__ = ["DATA_SET_ID", "NAME", "DataFormat", "write"]

NAME = "minari"
DataFormat = Literal["hdf5", "arrow", "parquet"]

DATA_SET_ID = re.compile(r"[-\w][-\w/]*-v\d+")  # a name in Minari's folder; any other text is a path
_COMPUTED = {
    *("total_episodes", "total_steps", "dataset_size", "data_format", "jpeg_encoding"),
    *("observation_space", "action_space", "dataset_id", "minari_version"),
}
_SETS = "author", "author_email"
# A group of episodes is written when it has `_WAITING_BYTES` bytes or `_WAITING_EPISODES` episodes.
_WAITING_BYTES, _WAITING_EPISODES = 16 << 20, 512


def write(data_format: DataFormat, name: str | None, plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    plan.path.mkdir()
    data_set = _DataSet(plan, data_format, name)
    write_behind(episodes, data_set.write, _WAITING_BYTES, _WAITING_EPISODES)
    data_set.finish()


class _DataSet:
    def __init__(self, plan: Plan, data_format: DataFormat, name: str | None) -> None:
        self._plan, self._name, self._data_format = plan, name, data_format
        self._in_arrow = data_format != "hdf5"
        self._noted: dict[str, Json] = dict(plan.metadata)
        is_own = self._noted.get("format") == NAME
        self._metadata: dict[str, Json] = self._noted.get("metadata", {}) if is_own else {}
        observation_space, action_space = self._spaces()
        self._layout = Layout.of(plan.schema, without_texts(observation_space, "obs")[1])
        self._folder = plan.path / "data"
        self._storage = MinariStorage.new(
            self._folder, observation_space, action_space, data_format=data_format, jpeg_encoding=False
        )

    def _spaces(self) -> tuple[AnySpace, AnySpace]:
        """Return the spaces of the imported data set if these fit the schema, otherwise spaces made from the schema."""
        schema = self._plan.schema
        noted = [self._metadata.get(f"{part}_space") for part in ("observation", "action")]
        if all(isinstance(text, str) for text in noted):
            observation_space, action_space = map(deserialize_space, noted)
            plain = Schema.from_spaces(without_texts(observation_space, "obs")[0], action_space)
            if self._columns(plain) == self._columns(schema):
                return observation_space, action_space
        return space_of(schema.obs), space_of(schema.action)

    def _columns(self, schema: Schema) -> dict[str, Any]:
        """Return the shapes of observations and actions by path; for Arrow and Parquet, also return the dtypes."""
        leaves = {path: leaf for path, leaf in schema.leaves.items() if path.split("/")[0] in (OBS, ACTION)}
        return {path: (leaf.shape, leaf.dtype if self._in_arrow else None) for path, leaf in leaves.items()}

    def write(self, first: int, some: list[EpisodeData]) -> None:
        episodes = [self._layout.raw(episode, in_arrow=self._in_arrow) for episode in some]
        beyond = [episode.pop(METADATA) for episode in episodes]
        if self._in_arrow:
            for number, (episode, values) in enumerate(zip(episodes, beyond, strict=True), first):
                self._write_arrow(number, episode, values)
        else:
            self._storage.update_episodes([EpisodeBuffer(**episode) for episode in episodes])
            for number, values in enumerate(beyond, first):
                if values:
                    self._storage.update_episode_metadata([flat(values)], [number])

    def _write_arrow(self, number: int, episode: Raw, beyond: dict[str, Any]) -> None:
        storage, folder = self._storage, self._folder / str(number)
        write_file(folder, self._data_format, storage.observation_space, storage.action_space, episode)
        known = {name: episode[name] for name in (SEED, "options") if episode[name] is not None}
        metadata = {"id": number, "total_steps": len(episode["rewards"]), **known, **beyond}
        (folder / "metadata.json").write_text(json.dumps(metadata, default=np.ndarray.tolist))

    def finish(self) -> None:
        kept = {key: value for key, value in self._metadata.items() if key not in _COMPUTED}
        kept |= {key: set(kept[key]) for key in _SETS if key in kept}
        if self._noted and not self._metadata:
            kept["diskreplay"] = self._noted
        kept |= {"dataset_id": self._name_of(), "minari_version": minari.__version__}
        kept |= {"total_episodes": self._plan.episodes, "total_steps": self._plan.steps}
        kept["dataset_size"] = self._storage.get_size()
        self._storage.update_metadata(kept)

    def _name_of(self) -> str:
        if self._name is not None:
            return self._name
        known, folder = self._metadata.get("dataset_id"), self._plan.path.name
        if DATA_SET_ID.fullmatch(folder):
            return folder
        return known if isinstance(known, str) else re.sub(r"[^-\w]", "-", folder) + "-v0"
