"""The class `EpisodeData`: an ended episode on its way between a store and a data set."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from diskreplay import Episode, Field, Schema, Writer

Json = Any  # None, bool, int, float, str, or lists and dicts of these
Arrays = Mapping[str, NDArray[Any]]

OBS, ACTION, REWARD, EXTRA, FIELDS = "obs", "action", "reward", "extra", "episode"
PRIORITY = "priority"
HIDDEN = "hidden"  # the first steps of an episode, hidden from samplers by a limit on capacity or age


class Lacking:
    """Names of data that some formats cannot hold, next to paths of leaves and `HIDDEN`.

    - ``final_obs``: the observation after the last step.
    - ``no_final_obs``: an episode without a final observation. If a format cannot hold an episode without a final
      observation, the export repeats the observation of the last step.
    - ``ends``: an episode that is both terminated and truncated, or neither of the two.
    - ``cut``: an episode that is neither terminated nor truncated.
    - ``notes``: data of an episode that no array holds. ``schema``: details of the schema, such as bounds of spaces.
      ``metadata``: the import's note about the whole data set.
    - ``priority``: initial priorities.
    """

    FINAL_OBS, NO_FINAL_OBS = "final_obs", "no_final_obs"
    ENDS, CUT, NOTES, SCHEMA, METADATA = "ends", "cut", "notes", "schema", "metadata"
    PRIORITY = PRIORITY


@dataclass(frozen=True)
class EpisodeData:
    """One ended episode of T steps.

    Attributes
    ----------
    steps : dict of str to array
        The array of each leaf, by its path in `Schema.step_leaves`. Observations are ``(T + 1, ...)`` if the episode
        has a final observation, otherwise ``(T, ...)``. The arrays of other leaves are ``(T, ...)``.
    terminated, truncated : bool
        Whether the environment terminated or truncated the episode. Both flags are false if the episode was cut.
    fields : dict of str to array
        The episode fields that have a value, by path, such as ``"episode/seed"``.
    priority : array, optional
        Initial priorities, ``(T,)``, with NaN for a step without a priority. None: no step has an initial priority.
    notes : optional
        Data that no array holds, as JSON: texts, and values that only some steps have.
    hidden_steps : int
        How many steps at the beginning of the episode are hidden from samplers, by a limit on capacity or age.
    """

    steps: Arrays
    terminated: bool
    truncated: bool
    fields: Mapping[str, Any] = field(default_factory=dict)
    priority: NDArray[Any] | None = None
    notes: Json = None
    hidden_steps: int = 0

    def __len__(self) -> int:
        return min(map(len, self.steps.values()))  # observations may have one row more

    @property
    def cut(self) -> bool:
        return not (self.terminated or self.truncated)

    @property
    def has_final_obs(self) -> bool:
        return any(len(rows) > len(self) for _, rows in self._obs())

    @classmethod
    def of(cls, episode: Episode, schema: Schema, notes: Json = None, wanted: Container[str] | None = None) -> Self:
        """Read an ended episode of a store.

        Only the leaves at the paths in ``wanted`` are read; None means all leaves.
        """
        fields = [path for path in schema.leaves if is_part(path, FIELDS) and (wanted is None or path in wanted)]
        names = dict.fromkeys(path.split("/")[1] for path in fields)
        given = {name: value for name in names if (value := episode[name]) is not None}
        priority = episode[PRIORITY]
        return cls(
            {path: episode.rows(path) for path in schema.step_leaves if wanted is None or path in wanted},
            episode.terminated,
            episode.truncated and not episode.cut,
            {path: value for path, value in schema.flatten(FIELDS, given) if path in fields},
            None if np.isnan(priority).all() else priority,
            notes,
            episode.hidden_steps,
        )

    @property
    def hidden(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = np.arange(len(self)) < self.hidden_steps
        return found

    def with_hidden(self, path: str) -> Self:
        return replace(self, steps={**self.steps, path: self.hidden})

    def with_final_obs(self) -> Self:
        if self.has_final_obs:
            return self
        return self._with_obs({path: np.concatenate([rows, rows[-1:]]) for path, rows in self._obs()})

    def without_final_obs(self) -> Self:
        return self._with_obs({path: rows[: len(self)] for path, rows in self._obs()})

    def _obs(self) -> Iterator[tuple[str, NDArray[Any]]]:
        return ((path, rows) for path, rows in self.steps.items() if is_obs(path))

    def _with_obs(self, obs: Arrays) -> Self:
        return replace(self, steps={**self.steps, **obs})

    def tree(self, schema: Schema, part: str) -> Any:
        return nested(schema, part, self.steps)

    def append_to(self, writer: Writer, schema: Schema) -> None:
        extra, fields = self.tree(schema, EXTRA), nested(schema, FIELDS, self.fields)
        steps = {part: self.tree(schema, part) for part in (OBS, ACTION, REWARD)}
        ends = {"terminated": self.terminated, "truncated": self.truncated}
        writer.append_episode(**steps, **ends, episode=fields, priority=self.priority, **extra)


def with_hidden(schema: Schema, path: str) -> Schema:
    extra = {**schema.extra, path.removeprefix(f"{EXTRA}/"): Field((), "bool")}
    return Schema(schema.obs, schema.action, schema.reward, extra, schema.episode)


def is_part(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}/")


def is_obs(path: str) -> bool:
    return is_part(path, OBS)


def nested(schema: Schema, part: str, values: Mapping[str, Any]) -> Any:
    """Return the values of ``part``, such as "obs", nested as in the schema; the keys of ``values`` are paths.

    The result is ``{}`` if the part is "extra" or "episode" and ``values`` has no value of the part.
    """
    if part in (EXTRA, FIELDS) and not any(is_part(path, part) for path in values):
        return {}
    return schema.unflatten(part, values)
