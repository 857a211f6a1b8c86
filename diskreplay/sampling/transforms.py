"""What a sampler does to a batch before it is delivered: functions of batches, one after the other."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.saved_state import state_of
from diskreplay.reading.snapshot import Snapshot
from diskreplay.sampling.batch import Batch, Tree, map_paths
from diskreplay.schema.schema import Field, Schema
from diskreplay.views.base import View

Arrays = Mapping[str, NDArray[np.float64]]
Result = Batch | Mapping[str, Tree]
TransformLike = Union["Transform", Callable[[Batch], Result]]


class Transform(ABC):
    """What is done to each batch. Only `apply` must be defined; any thread may call it, several at once.

    What it does may depend on the leaves that `bind` chose, on random numbers, where it is `random`, and where it
    `keeps_state` on what `prepare` said of the store when the batch was drawn. So a batch is the same whichever thread
    makes it, and when.
    """

    random: bool = False
    keeps_state: bool = False

    def bind(self, schema: Schema, view: View) -> Sequence[str]:
        """Return the paths of the leaves that it changes in batches of this view; ValueError where it means nothing."""
        return ()

    @abstractmethod
    def apply(self, batch: Batch, leaves: Sequence[str], prepared: Arrays, entropy: Sequence[int]) -> Result:
        """Return the batch, or only the fields that are new; `entropy` seeds what is `random`."""

    def prepare(self, snapshot: Snapshot) -> Arrays:
        """Return what a batch depends on that is drawn from this snapshot; called in the order of the draws."""
        return {}

    def claim(self, owner: object) -> None:  # noqa: B027  # most have no state
        """Belong to this sampler, where that matters: see `OneOwner`."""

    def stats(self) -> dict[str, float]:
        """Return numbers for `Sampler.stats`, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what later batches depend on, beside the store: arrays, numbers, texts."""
        return {}

    def load_state_dict(self, state: Any) -> None:  # noqa: B027  # as `claim`
        """Go on from what `state_dict` returned; ValueError, and no change, where this is no such state."""


class _Function(Transform):
    """A function of the user's."""

    def __init__(self, function: Callable[[Batch], Result]) -> None:
        self._function = function

    def apply(self, batch: Batch, leaves: Sequence[str], prepared: Arrays, entropy: Sequence[int]) -> Result:
        """Call the function with the batch."""
        found = self._function(batch)
        if isinstance(found, (Batch, Mapping)):
            return found
        raise ValueError(
            f"the transform {self._function!r:.80} returned {type(found).__name__}: it must return a batch, or a dict "
            "of the fields that it changes"
        )


def transform_argument(transform: TransformLike | Sequence[TransformLike] | None) -> tuple[Transform, ...]:
    """Return the transforms of a sampler, or raise ValueError."""
    if transform is None:
        return ()
    # Not any iterable: one that is callable is a transform, such as a torch.nn.Sequential.
    return tuple(map(_one_argument, transform if isinstance(transform, (list, tuple)) else [transform]))


def _one_argument(transform: Any) -> Transform:
    if isinstance(transform, Transform):
        return transform
    if isinstance(transform, type) or not callable(transform):
        raise ValueError(f"transform must be a function of a batch, or several in a list, not {transform!r:.80}")
    return _Function(transform)


class Pipeline:
    """Transforms, each with the leaves that it changes, one after the other. Any thread may `apply`."""

    def __init__(self, steps: Sequence[tuple[Transform, Sequence[str]]] = ()) -> None:
        self._steps = steps

    def prepare(self, snapshot: Snapshot) -> list[Arrays]:
        """Return what transforms say of this snapshot that keep a state; called in the order of the draws."""
        return [transform.prepare(snapshot) for transform, _ in self._steps if transform.keeps_state]

    def apply(self, batch: Batch, prepared: Sequence[Arrays], entropy: int | None) -> Batch:
        """Return what all transforms, one after the other, make of a batch whose weights are all 1."""
        said = iter(prepared)
        for number, (transform, leaves) in enumerate(self._steps):
            seed = () if entropy is None else (entropy, number)
            found = transform.apply(batch, leaves, next(said) if transform.keeps_state else {}, seed)
            batch = found if isinstance(found, Batch) else batch.replaced(found)
        return batch


def transforms_state(transforms: Sequence[Transform]) -> list[dict[str, Any]]:
    """Return the names and states of the transforms that keep one."""
    return [{"name": type(one).__name__, "state": one.state_dict()} for one in transforms if one.keeps_state]


def load_transforms(transforms: Sequence[Transform], states: Any) -> None:
    """Give transforms their states; ValueError where these are not theirs, when some may have taken theirs."""
    keeping = [one for one in transforms if one.keeps_state]
    with state_of("a sampler"):
        names, states = [str(one["name"]) for one in states], [one["state"] for one in states]
    expected = [type(one).__name__ for one in keeping]
    if names != expected:
        raise ValueError(
            f"this is the state of a sampler with the transforms {names or 'none'} that keep a state, and this one has "
            f"{expected or 'none'}: give it the same"
        )
    for one, state in zip(keeping, states, strict=True):
        one.load_state_dict(state)


def obs_leaves(
    schema: Schema, argument: str, names: Sequence[str] | None, fits: Callable[[Field], bool], what: str
) -> dict[str, Field]:
    """Return the observation leaves of these names, or where None those that fit, by path.

    ValueError where there is none, or a name is not one of them. The name of a lone leaf is "obs".
    """
    every = {path: field for path, field in schema.leaves.items() if path.split("/")[0] == "obs"}
    by_name = {path.removeprefix("obs/"): path for path in every}
    known = ", ".join(map(repr, by_name))
    if names is None:
        found = {path: field for path, field in every.items() if fits(field)}
        if not found:
            raise ValueError(f"{argument}: no observation leaf is {what}; name those that are meant, of {known}")
        return found
    for name in names:
        if name not in by_name:
            raise ValueError(f"{argument} names {name!r}; the observation leaves of this store are {known}")
    return {by_name[name]: every[by_name[name]] for name in names}


def changed_observations(
    batch: Batch,
    leaves: Sequence[str],
    change: Callable[[str, Tree], Tree],
    fields: Sequence[str] = ("obs", "next_obs"),
) -> dict[str, Tree]:
    """Return the observations of a batch with what a function of path and tensor returns in place of some leaves."""

    def changed(path: str, leaf: Tree) -> Tree:
        return change(path, leaf) if path in leaves else leaf

    return {name: map_paths(changed, batch[name], "obs") for name in fields if name in batch}
