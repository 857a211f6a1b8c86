"""Reads data sets by LeRobot's own loader, in an environment that has LeRobot and neither this package nor its tests.

    python own_loader.py FRAMES ROOT FRAMES ROOT ...

Each FRAMES is a file of NumPy to be written: all features of all frames of the data set at the ROOT behind it.
"""

import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.library

# The compiled part of torchvision cannot be loaded where torch is a build without CUDA, and the package is. LeRobot
# uses the other part only, which declares something of these operators.
try:
    import torchvision
except RuntimeError:
    sys.modules.pop("torchvision", None)
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401

from lerobot.datasets.lerobot_dataset import LeRobotDataset

ROWS_AHEAD = 3
"""Actions of so many frames are asked for with each frame, as a policy does that predicts several."""


def read(root: str) -> dict[str, np.ndarray]:
    """Return all frames of a data set by feature."""
    fps = LeRobotDataset("own/set", root=root).fps
    ahead = [k / fps for k in range(ROWS_AHEAD)]
    found = LeRobotDataset("own/set", root=root, delta_timestamps={"action": ahead}, video_backend="torchcodec")
    frames = [as_arrays(found[i]) for i in range(len(found))]
    return {name: np.stack([frame[name] for frame in frames]) for name in frames[0]}


def as_arrays(frame: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return a frame as arrays: images as bytes with their channels behind rows and columns."""
    made = {}
    for name, value in frame.items():
        if isinstance(value, torch.Tensor) and value.ndim == 3:
            made[name] = (value * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        else:
            made[name] = np.asarray(value)
    return made


for frames, root in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    np.savez(frames, **read(root))
print(version("lerobot"))
