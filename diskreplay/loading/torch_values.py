"""Values of observations, computed by a function of tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def torch_values(value_fn: Callable[[Any], Any], device: torch.device) -> Callable[[Any], NDArray[Any]]:
    """Return the function over arrays that calls one over tensors on a device, without gradients."""

    def evaluate(observations: Any) -> NDArray[Any]:
        with torch.no_grad():
            values = value_fn(_tensors(observations, device))
        if isinstance(values, torch.Tensor):
            values = values.to("cpu", torch.float64).numpy()
        return np.asarray(values)

    return evaluate


def _tensors(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, dict):
        return {name: _tensors(below, device) for name, below in tree.items()}
    return torch.from_numpy(tree).to(device)
