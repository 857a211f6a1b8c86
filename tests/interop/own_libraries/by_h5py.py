"""Data sets of D4RL, written and read by h5py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dumps
import h5py
import numpy as np

PARTS = {"observations": "obs", "actions": "action", "rewards": "reward"}


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    parts: dict[str, list[np.ndarray]] = {}
    for length, how in dumps.EPISODES:
        obs, last = rng.normal(size=(length + 1, 5)).astype("f4"), np.arange(length) == length - 1
        rows = {"observations": obs[:-1], "next_observations": obs[1:], "actions": rng.normal(size=(length, 2))}
        rows |= {"rewards": rng.random(length, np.float32), "infos/qpos": rng.random((length, 3))}
        rows |= {"terminals": last & (how == "terminated"), "timeouts": last & (how == "truncated")}
        for name, values in rows.items():
            parts.setdefault(name, []).append(values)
    with h5py.File(folder / "d4rl.hdf5", "w") as file:
        for name, values in parts.items():
            file.create_dataset(name, data=np.concatenate(values), compression="gzip")
        file["metadata/algorithm"] = "random"


def read(path: Path) -> Iterator[dict[str, Any]]:
    rows: dict[str, np.ndarray] = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: rows.update({name: item[()]} if isinstance(item, h5py.Dataset) else {}))
    rows = {name: values for name, values in rows.items() if not name.startswith("metadata")}
    ends = {name: rows.pop(name).astype(bool) for name in ("terminals", "timeouts")}
    after = {name: rows.pop(name) for name in list(rows) if name.startswith("next_observations")}
    count, start = len(rows["rewards"]), 0
    for at in range(count):
        if not (ends["terminals"][at] or ends["timeouts"][at] or at == count - 1):
            continue
        found: dict[str, Any] = {}
        for name, values in rows.items():
            part, _, below = name.partition("/")
            path_in_store = f"{PARTS[part]}/{below}".rstrip("/") if part in PARTS else f"extra/{name}"
            found[path_in_store] = values[start : at + 1]
            if part == "observations" and after:
                found[path_in_store] = np.concatenate([values[start : at + 1], after[f"next_{name}"][at : at + 1]])
        yield found | {"terminated": ends["terminals"][at], "truncated": ends["timeouts"][at]}
        start = at + 1


if __name__ == "__main__":
    dumps.main(write, read)
