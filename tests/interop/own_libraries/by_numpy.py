"""Folders and files of NumPy, written and read by NumPy: of episodes, of flat steps, and of Dreamer's replays."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import dumps
import numpy as np

PARTS = {"obs": "obs", "actions": "action", "rewards": "reward"}


def write(folder: Path) -> None:
    rng, flat = np.random.default_rng(0), dict[str, list[np.ndarray]]()
    for name in ("episodes", "dreamer"):
        (folder / name).mkdir()
    for number, (length, how) in enumerate(dumps.EPISODES):
        rows = {"obs": rng.normal(size=(length, 4)), "actions": rng.integers(3, size=length)}
        rows |= {"rewards": rng.random(length), "episode_starts": np.arange(length) == 0}
        for name, values in rows.items():
            flat.setdefault(name, []).append(values)
        np.savez(folder / "episodes" / f"{number}.npz", **{name: rows[name] for name in PARTS})
        first, last = np.arange(length + 1) == 0, np.arange(length + 1) == length
        replay = {"image": dumps.smooth(rng, length + 1, 16, 24, 3), "state": rng.normal(size=(length + 1, 3))}
        replay |= {"action": rng.random((length + 1, 2), np.float32) * ~first[:, None]}
        replay |= {"reward": rng.random(length + 1, np.float32) * ~first, "is_first": first, "is_last": last}
        replay |= {"is_terminal": last & (how == "terminated"), "log_entropy": rng.random(length + 1)}
        np.savez_compressed(folder / f"dreamer/20260101T00000{number}-abc{number}-{length + 1}.npz", **replay)
    np.savez(folder / "flat.npz", **{name: np.concatenate(values) for name, values in flat.items()})


def read(path: Path) -> Iterator[dict[str, Any]]:
    files = [dict(np.load(file)) for file in sorted(path.glob("*.npz"))] if path.is_dir() else [dict(np.load(path))]
    if "episode_starts" in files[0]:
        (flat,) = files
        starts = [*np.flatnonzero(flat.pop("episode_starts")), len(flat["obs"])]
        parts = [slice(*pair) for pair in pairwise(starts)]
        fields = {name: flat.pop(name) for name in list(flat) if len(flat[name]) == len(parts)}
        files = [{name: values[part] for name, values in flat.items()} for part in parts]
        for number, file in enumerate(files):
            file |= {f"episode/{name}": values[number] for name, values in fields.items()}
    for file in files:
        if "is_terminal" in file:
            yield of_dreamer(file)
        elif "actions" in file:
            ends = {"terminated": np.bool_(False), "truncated": np.bool_(True)}
            yield {PARTS.get(name, name): values for name, values in file.items()} | ends
        else:  # an export has the paths of the store
            yield {name: values for name, values in file.items() if name not in ("hidden", "priority")}


def of_dreamer(file: dict[str, np.ndarray]) -> dict[str, Any]:
    terminated = file.pop("is_terminal")[-1]
    found: dict[str, Any] = {"terminated": terminated, "truncated": ~terminated}
    for name, rows in file.items():
        part = name.partition("/")[0]
        if part in ("action", "reward"):
            found[name] = rows[1:]
        elif name.startswith("log_"):
            found[f"extra/{name.removeprefix('log_')}"] = rows[1:]
        elif name not in ("is_first", "is_last", "discount"):
            found["obs" if name == "obs" else f"obs/{name}"] = rows
    return found


if __name__ == "__main__":
    dumps.main(write, read)
