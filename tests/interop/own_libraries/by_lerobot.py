"""Data sets of LeRobot, written and read by LeRobot."""

import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dumps
import numpy as np

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
import torch

# Torchvision from PyPI has its operators for CUDA alone, and fails to import without them. Data sets need none.
OPERATORS = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

COUNTERS = ("timestamp", "frame_index", "episode_index", "index", "task_index", "task")
FLAGS = ("next.done", "next.terminated", "next.truncated")


def features(kind: str) -> dict[str, Any]:
    axes = ["height", "width", "channels"]
    numbers = {
        "observation.state": ("float32", (3,)),
        "action": ("float32", (2,)),
        "next.reward": ("float32", (1,)),
        "next.done": ("bool", (1,)),
        "next.success": ("bool", (1,)),
        "matrix": ("float64", (2, 3)),
        "level": ("int64", (1,)),
        "bytes": ("uint8", (4,)),
        "words": ("string", (1,)),
    }
    return {
        "observation.images.top": {"dtype": kind, "shape": (64, 96, 3), "names": axes},
        "observation.images.wrist": {"dtype": kind, "shape": (96, 64, 3), "names": axes},
        **{name: {"dtype": dtype, "shape": shape, "names": None} for name, (dtype, shape) in numbers.items()},
    }


def write(folder: Path) -> None:
    for kind in ("image", "video"):
        made = LeRobotDataset.create(f"made/{kind}", 10, features(kind), folder / kind, use_videos=kind == "video")
        rng = np.random.default_rng(0)
        for number, (length, how) in enumerate(dumps.EPISODES[:3]):  # its statistics fail for one step
            for at in range(length):
                frame = {
                    "observation.images.top": dumps.smooth(rng, 64, 96, 3),
                    "observation.images.wrist": dumps.smooth(rng, 96, 64, 3),
                    "observation.state": rng.normal(size=3).astype("f4"),
                    "action": rng.normal(size=2).astype("f4"),
                    "next.reward": rng.normal(size=1).astype("f4"),
                    "next.done": np.array([at == length - 1 and how == "terminated"]),
                    "next.success": rng.random(1) < 0.5,
                    "matrix": rng.normal(size=(2, 3)),
                    "level": rng.integers(1 << 62, size=1),
                    "bytes": rng.integers(256, size=4, dtype=np.uint8),
                    "words": ["reach", "grasp, ä"][at % 2],
                }
                task = ["pick", "place it"][number % 2]
                if "task" in inspect.signature(made.add_frame).parameters:
                    made.add_frame(frame, task)
                else:
                    made.add_frame({**frame, "task": task})
            made.save_episode()
        if hasattr(made, "finalize"):
            made.finalize()


def opened(folder: Path) -> Any:
    """Open a data set; without its cameras, if it has none of their films."""
    info = json.loads((folder / "meta/info.json").read_text())
    films = [name for name, each in info["features"].items() if each["dtype"] == "video"]
    if films and not (folder / "videos").exists():
        copy = Path(tempfile.mkdtemp(dir=Path.cwd())) / "copy"
        shutil.copytree(folder, copy, copy_function=shutil.copyfile)
        copy.chmod(0o755)
        (copy / "meta").chmod(0o755)
        for name in films:
            del info["features"][name]
        (copy / "meta/info.json").write_text(json.dumps(info))
        folder = copy
    return LeRobotDataset("made/it", root=folder, video_backend="pyav")


def value(name: str, dtype: str, shape: tuple[int, ...], read: Any) -> Any:
    if dtype in ("image", "video"):
        pixels = (read * 255).round().to(torch.uint8)
        return (pixels if shape[0] in (1, 3) and shape[2] not in (1, 3) else pixels.permute(1, 2, 0)).numpy()
    if dtype == "string":
        return read
    found = np.asarray(read.numpy()).astype(dtype)  # integers are int64 as tensors
    in_parts = name.startswith(("observation", "action"))
    return found.reshape(shape if in_parts or shape != (1,) else ())


def read(folder: Path) -> Iterator[dict[str, Any]]:
    made = opened(folder)
    features = made.meta.features
    paths = {name: name for name in features if name not in COUNTERS}
    for part, prefix in (("obs", "observation"), ("action", "action")):
        inside = [name for name in paths if name == prefix or name.startswith(f"{prefix}.")]
        for name in inside:
            below = name.removeprefix(prefix).replace(".", "/")
            paths[name] = part if len(inside) == 1 else part + below
    for name in paths:
        if paths[name] == name and name not in ("action", *FLAGS):
            paths[name] = "reward" if name == "next.reward" else f"extra/{name}"
    # As tensors they are rounded to float32.
    doubles = [name for name in paths if features[name]["dtype"] == "float64"]
    exact = made.hf_dataset.with_format(None).select_columns(["index", *doubles])
    rows: dict[int, list[dict[str, Any]]] = {}
    for number in range(len(made)):
        row = made[number]
        row |= {name: torch.tensor(exact[number][name], dtype=torch.float64) for name in doubles}
        rows.setdefault(int(row["episode_index"]), []).append(row)
    for episode in rows.values():
        found: dict[str, Any] = {"task": np.array([row["task"] for row in episode])}
        for name, path in paths.items():
            dtype, shape = features[name]["dtype"], tuple(features[name]["shape"])
            found[path] = np.array([value(name, dtype, shape, row[name]) for row in episode])
        ends = {name: found.pop(name) for name in FLAGS if name in found}
        found.setdefault("reward", np.zeros(len(episode), np.float32))
        found["terminated"] = np.bool_(ends.get("next.terminated", ends.get("next.done", [False]))[-1])
        found["truncated"] = np.bool_(ends.get("next.truncated", [False])[-1])
        yield found


if __name__ == "__main__":
    dumps.main(write, read)
