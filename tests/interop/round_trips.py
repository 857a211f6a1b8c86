"""A round trip of stores of many schemas through a format: what every adapter of data sets is tested with.

`CASES` names stores that `make_store` writes; `check_round_trip` exports one, imports it, and compares every value that
the export does not name as one that the format cannot hold.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

Renamed = Callable[[str], str]

BOX = {"type": "Box", "low": "-Infinity", "high": "Infinity"}
SCHEMAS = {
    "vectors": dr.Schema(
        dr.Field((3,), "float32", BOX), dr.Field((), "int64", {"type": "Discrete", "n": 4, "start": 0})
    ),
    "doubles": dr.Schema(
        dr.Field((17,), "float64", BOX),
        dr.Field((6,), "float32", {"type": "Box", "low": -1.0, "high": 1.0}),
        dr.Field((), "float64"),
    ),
    "nested": dr.Schema(
        obs={"image": dr.Field((4, 4, 3), "uint8"), "state": (dr.Field((2,), "float32"), dr.Field((), "bool"))},
        action={"move": dr.Field((2,), "float32"), "grip": dr.Field((), "bool")},
        extra={"log_prob": dr.Field((), "float64"), "hidden": {"h": dr.Field((2, 3), "float16")}},
        episode={
            "seed": dr.Field((), "int64"),
            "goal": dr.Field((2,), "float32"),
            "task": {"level": dr.Field((), "u1")},
        },
    ),
    "images": dr.Schema(
        dr.Field((16, 16, 3), "uint8", {"type": "Box", "low": 0, "high": 255}),
        dr.Field((2,), "float32", {"type": "Box", "low": -1.0, "high": 1.0}),
    ),
}
"""Box vectors, Dict and Tuple observations with extra and episode fields, images."""

# How the episodes end: steps, how, whether there is a final observation.
EPISODES = [
    (3, "terminated", True),
    (1, "terminated", True),
    (12, "truncated", True),
    (5, "terminated", False),
    (4, "truncated", False),
    (6, "cut", True),
    (2, "cut", False),
    (7, "both", True),
]
PLAIN = [(steps, how, True) for steps, how, has_final in EPISODES if how in ("terminated", "truncated")]
"""Episodes that every format can hold: with a final observation, terminated or truncated."""

SCHEMES = (
    *("minari", "npz", "parquet", "zarr_episodes", "sb3_pickle", "torchrl_memmap", "rlds", "dreamer", "lerobot"),
    *("d4rl", "robomimic"),
)
"""All formats, in the order of the command's help."""

NEEDS = {
    **{"d4rl": "h5py", "lerobot": "av", "minari": "minari", "parquet": "pyarrow"},
    **{"rlds": "google.protobuf", "robomimic": "h5py", "sb3_pickle": "stable_baselines3"},
}
"""The library without which a scheme cannot be tested."""

CASES = list(SCHEMAS)


def adapter(scheme: str) -> Any:
    """Return the module of a format; the test is skipped without its library."""
    if scheme in NEEDS:
        pytest.importorskip(NEEDS[scheme], reason=f"needs {NEEDS[scheme]}")
    return import_module(f"diskreplay.interop.{scheme}")


@dataclass(frozen=True)
class Values:
    """An episode of T steps as arrays: ``steps`` and ``fields`` by the paths of leaves, and initial priorities."""

    steps: dict[str, np.ndarray]
    terminated: bool
    truncated: bool
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    priority: np.ndarray | None = None

    @classmethod
    def of(cls, episode: dr.Episode, schema: dr.Schema) -> "Values":
        """Read an ended episode."""
        given = {name: value for name in schema.episode if (value := episode[name]) is not None}
        fields = {path: np.asarray(value) for path, value in schema.flatten("episode", given)}
        priority = None if np.isnan(episode["priority"]).all() else episode["priority"]
        steps = {path: episode.rows(path) for path in schema.step_leaves}
        return cls(steps, episode.terminated, episode.truncated and not episode.cut, fields, priority)

    def __len__(self) -> int:
        return len(self.steps["reward"])

    @property
    def has_final_obs(self) -> bool:
        """Whether there is an observation after the last step."""
        return any(len(rows) > len(self) for rows in self.steps.values())

    def append_to(self, writer: dr.Writer, schema: dr.Schema) -> None:
        """Append the episode: step by step, since only some steps may have a priority."""
        fields = nested(schema, "episode", self.fields)
        for t in range(len(self)):
            now, ends = {path: rows[t] for path, rows in self.steps.items()}, t == len(self) - 1
            following = {path: rows[t + 1] for path, rows in self.steps.items() if is_obs(path) and t + 1 < len(rows)}
            writer.append(
                nested(schema, "obs", now),
                nested(schema, "action", now),
                now["reward"],
                ends and self.terminated,
                ends and self.truncated,
                next_obs=nested(schema, "obs", following) if following else None,
                episode=fields if ends and (self.terminated or self.truncated) else None,
                priority=None if self.priority is None or np.isnan(self.priority[t]) else self.priority[t],
                **nested(schema, "extra", now),
            )
        if not (self.terminated or self.truncated):
            writer.end_episode(episode=fields)


def is_obs(path: str) -> bool:
    """Tell whether a path is that of a leaf of observations."""
    return path.split("/")[0] == "obs"


def nested(schema: dr.Schema, part: str, values: dict[str, np.ndarray]) -> Any:
    """Return a part of flat values as its schema nests it; extra and episode fields may be missing."""
    if part in ("extra", "episode") and not any(path.startswith(f"{part}/") for path in values):
        return {}
    return schema.unflatten(part, values)


def random_episode(schema: dr.Schema, rng: np.random.Generator, steps: int, how: str, has_final: bool) -> Values:
    """An episode with random values in every leaf; every third has no episode fields, as an episode may."""
    rows = {}
    for path, leaf in schema.step_leaves.items():
        count = steps + (has_final and is_obs(path))
        rows[path] = random_values(rng, leaf, (count, *leaf.shape))
    fields = {path: random_values(rng, leaf, leaf.shape) for path, leaf in schema.leaves.items() if path not in rows}
    ends = {"terminated": how in ("terminated", "both"), "truncated": how in ("truncated", "both")}
    return Values(rows, **ends, fields={} if steps % 3 == 0 else fields)


def random_values(rng: np.random.Generator, leaf: dr.Field, shape: tuple[int, ...]) -> np.ndarray:
    """Values over the whole range of integers, normal ones of floats."""
    if leaf.space is not None and leaf.space["type"] == "Discrete":
        return rng.integers(leaf.space["n"], size=shape).astype(leaf.dtype)
    if leaf.dtype.kind == "f":
        return np.clip(rng.normal(size=shape), -1, 1).astype(leaf.dtype)
    if leaf.dtype.kind == "b":
        return rng.random(shape) < 0.5
    bounds = np.iinfo(leaf.dtype)
    return rng.integers(bounds.min, bounds.max, size=shape, dtype=leaf.dtype, endpoint=True)


def make_store(
    path: Path,
    case: str,
    episodes: list[tuple[int, str, bool]] = EPISODES,
    *,
    schema: dr.Schema | None = None,
    priorities: bool = False,
) -> Path:
    """Write a store of one of the cases, or of another schema; with initial priorities of all or some steps."""
    rng = np.random.default_rng(0)
    schema = SCHEMAS[case] if schema is None else schema
    with dr.create(path, schema) as store, store.writer() as writer:
        for steps, how, has_final in episodes:
            episode = random_episode(schema, rng, steps, how, has_final)
            if priorities:
                given = rng.choice([0.5, 2.0, np.nan], steps) if steps % 2 else rng.random(steps)
                episode = replace(episode, priority=given)
            episode.append_to(writer, schema)
    return path


def content(path: Path, not_held: Collection[str] = (), renamed: Renamed = str) -> list[Any]:
    """Every value of every episode of a store, byte for byte, in the order of episodes.

    With ``not_held``, what a format that cannot hold these names makes of them; with ``renamed``, its leaves' paths.
    """
    found = []
    with dr.open(path) as store:
        for episode in store.episodes:
            data = as_held(Values.of(episode, store.schema), not_held)
            arrays = {**data.steps, **data.fields}
            values = {
                renamed(path): (array.dtype.str, array.shape, array.tobytes()) for path, array in sorted(arrays.items())
            }
            priority = None if data.priority is None else data.priority.tobytes()
            found.append((episode.ended if not not_held else "", data.terminated, data.truncated, values, priority))
    return found


def as_held(data: Values, not_held: Collection[str]) -> Values:
    """An episode as a format keeps it that cannot hold some of it, by the names that an export has for that."""
    steps = {path: rows for path, rows in data.steps.items() if path not in not_held}
    for path in filter(is_obs, steps):
        rows = steps[path]
        if "final_obs" in not_held:
            steps[path] = rows[: len(data)]
        if "no_final_obs" in not_held and not data.has_final_obs:
            steps[path] = np.concatenate([rows, rows[-1:]])
    truncated = data.truncated or (not data.terminated and "cut" in not_held)
    if "ends" in not_held:
        truncated = not data.terminated
    return replace(
        data,
        steps=steps,
        truncated=truncated,
        fields={path: value for path, value in data.fields.items() if path not in not_held},
        priority=None if "priority" in not_held else data.priority,
    )


def notes_of_episodes(store: dr.Store) -> dict[int, Any]:
    """What an import noted of episodes, by the id of their first step."""
    notes = (store.read_note(name) for name in store.note_names() if name.startswith("import-"))
    return {int(first): note for each in notes for first, note in each.items()}


def write_side_folder(side: Path, schema: dr.Schema, **document: Any) -> None:
    """What an export of release 0.9 has left."""
    side.mkdir()
    every = {"version": 1, "format": "npz", "store": "0", "episodes": 5, "complete": True, "metadata": {}}
    said = {**every, "schema": schema.to_json(), "not_held": ["final_obs", "obs", "priority", "\x1b[2J"], **document}
    (side / "export.json").write_text(json.dumps(said))


def check_round_trip(
    store: Path,
    target: Path,
    export_dataset: Callable[..., Any],
    import_dataset: Callable[..., Any],
    renamed: Renamed = str,
    **options: Any,
) -> Any:
    """Export a store, import what that made, and compare what the export does not name; its result is returned.

    ``renamed`` returns the path at which an import finds a leaf again, where the format has no place for its name; an
    empty text: nowhere.
    """
    back = target.with_name(f"{target.name}-back")
    seen: list[tuple[int, int]] = []
    exported = export_dataset(store, target, progress=lambda *at: seen.append(at), **options)
    with dr.open(store) as opened:
        steps, episodes, schema = len(opened), opened.num_episodes, opened.schema
    assert (exported.episodes, exported.steps, exported.open_episodes) == (episodes, steps, 0)
    assert seen[-1] == (steps, steps)
    imported = import_dataset(target, back, progress=lambda *at: seen.append(at))
    assert seen[-1] == (steps, steps)
    assert (imported.episodes, imported.steps, imported.resumed) == (episodes, steps, 0)
    names = {name for name, _ in exported.not_held}
    with dr.open(back) as opened:
        assert "schema" in names or opened.schema == schema
        assert opened.verify(deep=True) == []
    if names:
        check_held(store, back, names, renamed)
    else:
        assert content(back) == content(store)
    again = import_dataset(target, back)
    assert (again.episodes, again.steps, again.resumed) == (0, 0, episodes)
    return exported


def check_held(store: Path, back: Path, not_held: Collection[str], renamed: Renamed = str) -> None:
    """Compare all but the names that are not held; the other store may have more leaves, and vectors for scalars."""
    for one, other in zip(content(store, not_held, renamed), content(back, {"schema"}), strict=True):
        assert one[1:3] == other[1:3]
        assert one[4] == other[4]
        for path, (dtype, shape, values) in one[3].items():
            if path:
                assert (other[3][path][0], other[3][path][2]) == (dtype, values), path
                assert np.prod(other[3][path][1]) == np.prod(shape)


class StopAt:
    """Progress that fails once, when so many steps are done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, done: int, total: int) -> None:
        if done >= self.step:
            self.step = total + 1
            raise KeyboardInterrupt
