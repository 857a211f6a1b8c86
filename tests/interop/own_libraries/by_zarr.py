"""Data sets as those of diffusion_policy, written and read by zarr, version 2 or 3."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dumps
import numpy as np
import zarr


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = [length for length, _ in dumps.EPISODES]
    count = sum(lengths)
    arrays = {
        "data/action": rng.normal(size=(count, 2)).astype("f4"),
        "data/state": rng.normal(size=(count, 5)),
        "data/img": dumps.smooth(rng, count, 16, 24, 3).astype("f4"),
        "data/n_contacts": rng.integers(9, size=(count, 1)),
        "meta/episode_ends": np.cumsum(lengths),
    }
    root = zarr.open_group(str(folder / "steps"), mode="w")
    for name, values in arrays.items():
        create = root.create_array if hasattr(root, "create_array") else root.create_dataset  # of 3, and of 2
        create(name, shape=values.shape, chunks=(7, *values.shape[1:]), dtype=values.dtype)[:] = values


def read(folder: Path) -> Iterator[dict[str, Any]]:
    root = zarr.open_group(str(folder), mode="r")
    data, meta = ({name: root[part][name][:] for name in root[part]} for part in ("data", "meta"))
    obs = [name for name in data if name not in ("action", "reward")]
    for number, end in enumerate(meta["episode_ends"]):
        part = slice(meta["episode_ends"][number - 1] if number else 0, end)
        found = {name: rows[part] for name, rows in data.items() if name not in obs}
        found.setdefault("reward", np.zeros(len(found["action"]), np.float32))
        for name in obs:
            rows = data[name][part]
            if "has_final_obs" in meta and meta["has_final_obs"][number]:
                rows = np.concatenate([rows, meta[f"final_{name}"][number : number + 1]])
            found[name if name == "obs" else f"obs/{name}"] = rows
        found["terminated"] = np.bool_(meta["terminated"][number] if "terminated" in meta else False)
        found["truncated"] = np.bool_(meta["truncated"][number] if "truncated" in meta else True)
        yield found


if __name__ == "__main__":
    dumps.main(write, read)
