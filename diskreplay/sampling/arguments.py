"""Checks of the arguments of samplers."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.arguments import check_where
from diskreplay.distributions.base import Distribution, Uniform
from diskreplay.distributions.number_arguments import int_argument
from diskreplay.distributions.population import Share
from diskreplay.distributions.restricted import REMOVERS
from diskreplay.errors import InvalidIndex
from diskreplay.store.store import Store
from diskreplay.views.base import INT64, View


def drawing_arguments(
    where: Any, rank: Any, world_size: Any, max_times_sampled: Any, max_size: Any, remover: Any
) -> dict[str, Any]:
    """Return the keyword arguments of `Planner` that decide which ids can be drawn.

    Raises ValueError if an argument is invalid.
    """
    world_size, rank = int_argument("world_size", world_size), int_argument("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank must be less than world_size, {world_size}, not {rank}")
    if max_times_sampled is not None:
        max_times_sampled = int_argument("max_times_sampled", max_times_sampled)
    if remover not in REMOVERS:
        raise ValueError(f'remover must be "oldest", "lowest_priority" or "random", not {remover!r}')
    if max_size is not None:
        max_size = int_argument("max_size", max_size)
    elif remover != "oldest":
        raise ValueError(f"remover={remover!r} needs max_size: give both, or leave it out")
    if where is not None:
        check_where(where)
    limits = {"max_times_sampled": max_times_sampled, "max_size": max_size, "remover": remover}
    return {"where": where, "share": Share(rank, world_size), **limits}


def device_argument(device: Any) -> torch.device:
    try:
        found = torch.device("cpu" if device is None else device)
        if found.type != "cpu":
            torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        known = ", ".join(['"cpu"', *(f'"cuda:{number}"' for number in range(count))])
        raise ValueError(f"torch cannot use device={device!r} here; choose one of {known}, or leave it out") from error
    return found


def store_argument(store: Any) -> Store:
    if not isinstance(store, Store):
        raise ValueError(f"store must be a Store or its path, not {store!r}")
    return store


def view_argument(view: Any) -> View:
    if isinstance(view, type) or not isinstance(view, View):
        raise ValueError(f"view must be a view such as Transitions(), not {view!r}")
    return view


def distribution_argument(distribution: Any) -> Distribution:
    if distribution is None:
        return Uniform()
    if not isinstance(distribution, Distribution):
        raise ValueError(f"distribution must be a distribution such as Uniform(), not {distribution!r}")
    return distribution


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    # Calls of torch are slow, because torch's code is seldom in the processor's caches. Most tensors need only this one
    # call.
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):  # the tensor has a gradient, is on a device, or has a dtype that numpy lacks
        found = tensor.detach().cpu()
        return (found.double() if found.is_floating_point() else found).numpy(force=True)


def ids_argument(ids: Any) -> NDArray[np.int64]:
    """Return `ids` as a contiguous int64 array, (n,). Raises InvalidIndex if `ids` are not integers with one axis."""
    given = np.asarray(_array(ids) if isinstance(ids, torch.Tensor) else ids, order="C")
    if given.dtype == INT64 and given.ndim == 1:
        return given
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidIndex(f"ids must be integers with one axis, not {given.dtype}{list(given.shape)}")
    if given.dtype.kind == "u" and given.size and int(given.max()) > np.iinfo(np.int64).max:
        raise InvalidIndex(f"id {given.max()} never existed")
    return given.astype(np.int64)


def errors_argument(td_error: Any, count: int) -> NDArray[np.float64]:
    """Return `td_error` as a contiguous float64 array, (count,) or (count, length); (count, 1) becomes (count,)."""
    given = _array(td_error) if isinstance(td_error, torch.Tensor) else td_error
    errors = np.asarray(given, np.float64, order="C")
    if errors.ndim == 2 and errors.shape[1] == 1:
        errors = errors.reshape(-1)
    if errors.ndim not in (1, 2) or len(errors) != count:
        raise ValueError(f"td_error must have one row for each of {count} ids, not shape {list(errors.shape)}")
    return errors


def kind_argument(kind: Any) -> tuple[Any, ...]:
    if not isinstance(kind, tuple):
        raise ValueError(f'kind must be the kind of a batch or view, such as ("transitions",), not {kind!r}')
    return kind


def check_meaning(distribution: Distribution, view: View, batch_size: int | None, beta: float | None) -> None:
    """Raise ValueError for arguments of `Sampler.sample` that the distribution or the view does not use."""
    if beta is not None and not distribution.weighted:
        raise ValueError(f"beta means nothing to {distribution}, whose weights are all 1: leave it out")
    if batch_size is not None and not distribution.sized:
        raise ValueError(f"the size of a batch of {view} is its number of steps times lanes: leave batch_size out")
