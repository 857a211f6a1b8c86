"""Steps of environments whose values say which they are."""

from typing import Any

import numpy as np

import diskreplay as dr


def stream(count: int, start: int = 0) -> list[dr.Experience]:
    """Steps of one endless episode; everything about step t follows from t."""
    return [
        dr.Experience(np.full(3, t, "f4"), t, t / 2, np.full(3, t + 1, "f4"), False)
        for t in range(start, start + count)
    ]


def few(steps: int, size: int) -> str:
    return f"^the buffer has {steps} steps that can be sampled, and a batch of {size} needs {size}$"


def serials(batch: Any) -> list[int]:
    return batch.states[:, 0].int().tolist()
