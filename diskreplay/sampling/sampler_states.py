"""Functions that read and check the states of samplers, and convert them to tensors for `torch.save`."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.bounded_json import parse_json
from diskreplay.distributions.base import Draw
from diskreplay.distributions.population import Order
from diskreplay.distributions.prioritized import Prioritized
from diskreplay.distributions.saved_state import columns, state_of
from diskreplay.views.requested import OF_DRAWS

VERSION = 1

DrawInfo = dict[str, NDArray[Any]]
"""Fields about a batch's draw, (batch,) each; see `views.requested.OF_DRAWS`."""


Change = tuple[object, Mapping[str, Any]]
"""An object, and the new values of its attributes by name."""


class SavedPlan(NamedTuple):
    draw: Draw
    asked: int
    entropy: int | None
    draw_info: DrawInfo
    prepared: list[dict[str, NDArray[np.float64]]] | None


class PlannerState(NamedTuple):
    """A planner's saved state, after checks.

    Attributes
    ----------
    cursors : dict
        The states of distributions that views made (`View.own_distribution`), by `Distribution.key`.
    times : mapping
        How often ids were drawn, for `max_times_sampled`; empty without this limit.
    indices : mapping
        The ids that `max_size` keeps; empty without this limit.
    returned : ndarray of int64
        Ids of dropped plans, to be drawn again.
    refused : list of SavedPlan
        Plans of batches that a limiter refused. Their sizes differ from the sampler's `batch_size`.
    """

    generator: np.random.PCG64
    distribution: str
    view: str
    kind: str
    order: Order
    state: Any
    priorities: Prioritized | None
    cursors: dict[str, dict[str, NDArray[np.int64]]]
    times: Mapping[str, Any]
    indices: Mapping[str, Any]
    returned: NDArray[np.int64]
    plans: list[SavedPlan]
    refused: list[SavedPlan]

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> "PlannerState":
        with state_of("a sampler"):
            generator = np.random.PCG64()
            generator.state = parse_json(state["rng"])
            kept = state["priorities"]
            priorities = None if kept is None else Prioritized(**kept["arguments"])
            if priorities is not None:
                priorities.load_state_dict(kept["state"])
            # Only the shapes are checked here. A distribution checks the values when it loads its state.
            cursors = {
                str(key): dict(zip(map(str, cursor), columns(cursor, cursor), strict=True))
                for key, cursor in state["cursors"].items()
            }
            return cls(
                generator=generator,
                distribution=str(state["distribution"]),
                view=str(state["view"]),
                kind=str(state["kind"]),
                order=Order.loaded(state["order"]),
                state=state["state"],
                priorities=priorities,
                cursors=cursors,
                times=state.get("times") or {},
                indices=state.get("indices") or {},
                returned=np.concatenate(columns({"returned": (), **state}, ["returned"])),
                plans=[_plan(plan) for plan in state["plans"]],
                refused=[_plan(plan) for plan in state.get("refused", [])],
            )


def own_state(state: Any, batch_size: int, store: str) -> dict[str, int]:
    """Return the values of `batch_size`, `paid`, `batches` and `steps` in a sampler's state, by name.

    Raises ValueError if `state` is not a sampler's state, or its version is not `VERSION`, or its store does not have
    the UUID `store`. Also raises ValueError if `state` has undelivered batches and was saved with another `batch_size`.
    """
    if not isinstance(state, Mapping) or not {"version", "planner"} <= state.keys():
        raise ValueError(f"this is not a state of a sampler, but {type(state).__name__}")
    if state["version"] != VERSION:
        raise ValueError(
            f"this state has version {state['version']!r}, this release reads {VERSION}; update diskreplay"
        )
    if (found := state.get("store", store)) != store:
        raise ValueError(f"this is a state of another store ({found!r:.80}) and not of this one ({store})")
    with state_of("a sampler"):
        counts = {name: int(state[name]) for name in ("batch_size", "paid", "batches", "steps")}
        if min(counts.values()) < 0 or not isinstance(state["planner"]["plans"], list):
            raise ValueError(f"counts are {counts}")
    if counts["batch_size"] != batch_size and (state["planner"]["plans"] or state["planner"].get("refused")):
        raise ValueError(
            f"this state has batches drawn ahead with batch_size={counts['batch_size']}, and the sampler's is "
            f"{batch_size}: use the same batch_size"
        )
    return counts


def replace_attributes(changes: Sequence[Change]) -> None:
    """Replace attributes of objects in a single call of a C function, which no signal handler can interrupt."""
    owners, attributes = [vars(owner) for owner, _ in changes], [new for _, new in changes]
    deque(map(dict.update, owners, attributes), maxlen=0)


def _plan(plan: Mapping[str, Any]) -> SavedPlan:
    # The arrays are copied, because the caller may change the state later.
    ids = np.array(plan["ids"], np.int64)
    chances = None if plan["chances"] is None else np.array(plan["chances"], np.float64)
    if ids.ndim != 1 or not (chances is None or chances.shape == ids.shape):
        raise ValueError("a planned batch has ids and probabilities of two shapes")
    draw_info = {name: np.array(plan[name], dtype) for name, dtype in OF_DRAWS.items() if name in plan}
    if any(values.shape != ids.shape for values in draw_info.values()):
        raise ValueError("a planned batch has fields about its draw of another shape than its ids")
    draw = Draw(ids, chances, int(plan["size"]), float(plan["least"]))
    entropy, prepared = plan["entropy"], plan.get("prepared")
    if prepared is not None:
        prepared = [{str(name): np.array(found, np.float64) for name, found in one.items()} for one in prepared]
    entropy = None if entropy is None else int(entropy)
    return SavedPlan(draw, int(plan.get("asked", len(ids))), entropy, draw_info, prepared)


def as_tensors(tree: Any) -> Any:
    """Return a tree with tensors in place of arrays, so that `torch.load` need not unpickle other types."""
    return mapped(tree, np.ndarray, lambda array: torch.from_numpy(np.array(array)))


def as_arrays(tree: Any) -> Any:
    return mapped(tree, torch.Tensor, lambda tensor: tensor.detach().cpu().numpy())


def mapped(tree: Any, kind: type, function: Any) -> Any:
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(below, kind, function) for key, below in tree.items()}
    if isinstance(tree, list | tuple):
        return [mapped(below, kind, function) for below in tree]
    return tree
