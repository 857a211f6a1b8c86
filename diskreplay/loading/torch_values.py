"""Values of observations, computed by a function of tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.loading.batch import map_tree


def torch_values(value_fn: Callable[[Any], Any], device: torch.device) -> Callable[[Any], NDArray[Any]]:
    """Return the function over arrays that calls one over tensors on a device, without gradients."""

    def evaluate(observations: Any) -> NDArray[Any]:
        with torch.no_grad():
            values = value_fn(map_tree(lambda array: torch.from_numpy(array).to(device), observations))
        if isinstance(values, torch.Tensor):
            values = values.to("cpu", torch.float64).numpy()
        return np.asarray(values)

    return evaluate
