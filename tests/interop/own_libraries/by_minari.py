"""Data sets of Minari, written and read by Minari."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dumps
import minari
import numpy as np
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer

SPACES = {
    "dict": (
        spaces.Dict(
            {
                "position": spaces.Box(-np.inf, np.inf, (2,), np.float32),
                "inner": spaces.Dict({"flags": spaces.MultiBinary(3), "kinds": spaces.MultiDiscrete([2, 3])}),
                "mission": spaces.Text(20),
            }
        ),
        spaces.Discrete(4, start=1),
    ),
    "images": (
        spaces.Box(0, 255, (32, 40, 3), np.uint8),
        spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float32))),
    ),
    "vectors": (spaces.Box(-1, 1, (5,), np.float64), spaces.Box(-2, 2, (2,), np.float32)),
}


def sampled(space: Any, count: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: sampled(inner, count) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(sampled(inner, count) for inner in space.spaces)
    values = [space.sample() for _ in range(count)]
    return values if isinstance(space, spaces.Text) else np.stack(values).astype(space.dtype)


def buffers(kind: str, in_arrow: bool) -> Iterator[EpisodeBuffer]:
    # Minari cannot read an array of one axis from a file of Arrow, but a list.
    own: Any = list if in_arrow else np.asarray
    rng = np.random.default_rng(0)
    for space in SPACES[kind]:
        space.seed(0)
    for number, (steps, how) in enumerate(dumps.EPISODES):
        last = np.arange(steps) == steps - 1
        yield EpisodeBuffer(
            seed=10 + number,
            observations=sampled(SPACES[kind][0], steps + 1),
            actions=sampled(SPACES[kind][1], steps),
            rewards=rng.normal(size=steps),
            terminations=last & (how == "terminated"),
            truncations=last & (how == "truncated"),
            infos={
                "success": own(rng.random(steps + 1) < 0.5),
                "state": {"velocity": rng.normal(size=(steps + 1, 2)).astype("f4"), "count": own(np.arange(steps + 1))},
            },
        )


def write(folder: Path) -> None:
    os.environ["MINARI_DATASETS_PATH"] = str(folder / ".home")
    for kind, (observation_space, action_space) in SPACES.items():
        for data_format in ("hdf5", "arrow", *(["parquet"] if kind == "vectors" else [])):
            name = f"made/{kind}-{data_format}-v0"
            try:
                minari.create_dataset_from_buffers(
                    name,
                    list(buffers(kind, data_format != "hdf5")),
                    observation_space=observation_space,
                    action_space=action_space,
                    data_format=data_format,
                )
            except ValueError:
                if data_format != "parquet":  # which older versions do not have
                    raise
            else:
                (folder / ".home" / name).rename(folder / f"{kind}-{data_format}")


def flat(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, np.ndarray) and tree.dtype == object and isinstance(tree[0], dict):  # of a file of Arrow
        tree = {key: np.stack([row[key] for row in tree]) for key in tree[0]}
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, tuple) else None
    if inner is None:
        yield path, tree
    for key, value in inner or ():
        yield from flat(f"{path}/{key}", value)


def read(folder: Path) -> Iterator[dict[str, Any]]:
    made = minari.MinariDataset(folder / "data")
    for number in range(len(made)):
        episode = made[number]
        (metadata,) = made.storage.get_episode_metadata([number])
        found = dict(flat("obs", episode.observations)) | dict(flat("action", episode.actions))
        found |= {"reward": episode.rewards, "terminated": np.bool_(episode.terminations[-1])}
        found["truncated"] = np.bool_(episode.truncations[-1])
        for name, rows in flat("infos", episode.infos or {}):
            found |= {f"extra/{name}": rows[1:], f"episode/reset_{name}": rows[0]}
        if metadata.get("seed") is not None:
            found["episode/seed"] = metadata["seed"]
        # The store has texts in notes.
        texts = ("U", "S", "O")
        yield {name: value for name, value in found.items() if np.asarray(value).dtype.kind not in texts}


if __name__ == "__main__":
    dumps.main(write, read)
