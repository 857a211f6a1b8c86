"""Replay buffers, dumped and loaded by TorchRL."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dumps
import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, ReplayBuffer

FLAGS = ("done", "terminated", "truncated")


def transitions(kind: str) -> TensorDict:
    rng, parts = np.random.default_rng(0), []
    for number, (length, how) in enumerate(dumps.EPISODES):
        obs = {"observation": torch.tensor(rng.normal(size=(length + 1, 3)))}
        if kind == "images":
            obs["pixels"] = torch.tensor(dumps.smooth(rng, length + 1, 16, 24, 3))
            obs["inner"] = TensorDict({"level": torch.tensor(rng.integers(9, size=(length + 1, 1)))}, [length + 1])
        last = torch.arange(length)[:, None] == length - 1
        following = {name: rows[1:] for name, rows in obs.items()}
        following["reward"] = torch.tensor(rng.random((length, 1), np.float32))
        following |= {"terminated": last & (how == "terminated"), "truncated": last & (how == "truncated")}
        step = {name: rows[:-1] for name, rows in obs.items()}
        step |= {
            "action": torch.tensor(rng.random((length, 2), np.float32)),
            "log_prob": torch.tensor(rng.random(length)),
        }
        step |= {"next": TensorDict({**following, "done": last}, [length])}
        step["collector"] = TensorDict({"traj_ids": torch.full((length,), number)}, [length])
        parts.append(TensorDict(step, [length]))
    return torch.cat(parts)


def write(folder: Path) -> None:
    for kind in ("vectors", "images"):
        made = transitions(kind)
        buffer = ReplayBuffer(storage=LazyMemmapStorage(len(made)))
        buffer.extend(made)
        buffer.dumps(folder / kind)


def flat(tree: Any) -> dict[str, np.ndarray]:
    return {
        "/".join([name] if isinstance(name, str) else name): value.numpy()
        for name, value in tree.items(include_nested=True, leaves_only=True)
    }


def read(folder: Path) -> Iterator[dict[str, Any]]:
    (length,) = [json.loads((folder / "storage/storage_metadata.json").read_text())["len"]]
    buffer = ReplayBuffer(storage=LazyMemmapStorage(length))
    buffer.loads(folder)
    root, trajectories = flat(buffer[:]), []
    ids = root.pop("collector/traj_ids").reshape(-1)
    for first in sorted({int(np.argmax(ids == each)) for each in ids}):
        trajectories.append(np.flatnonzero(ids == ids[first]))
    obs = [name for name in root if f"next/{name}" in root and name not in FLAGS]
    for steps in trajectories:
        rows = {name: values[steps] for name, values in root.items()}
        found = {}
        for name in obs:
            path = "obs" if len(obs) == 1 else f"obs/{name}"
            found[path] = np.concatenate([rows.pop(name), rows.pop(f"next/{name}")[-1:]])
        found |= {name: rows.pop(name) for name in list(rows) if name.partition("/")[0] == "action"}
        found["reward"] = rows.pop("next/reward").reshape(-1)
        found |= {name: np.bool_(rows.pop(f"next/{name}")[-1].any()) for name in ("terminated", "truncated")}
        rest = {
            name.removeprefix("next/"): values for name, values in rows.items() if name not in ("next/done", *FLAGS)
        }
        yield {**found, **{f"extra/{name.removeprefix('next/')}": values for name, values in rest.items()}}


if __name__ == "__main__":
    dumps.main(write, read)
