"""Transforms of batches before a sampler delivers them: functions of batches, and transforms of frames."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Union

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.distributions.base import Distribution
from diskreplay.distributions.number_arguments import int_argument, number
from diskreplay.distributions.saved_state import state_of
from diskreplay.reading.snapshot import Snapshot
from diskreplay.sampling.batch import Batch, Tree, map_paths
from diskreplay.schema.schema import Field, Schema
from diskreplay.views.arguments import names, switch
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
        for place, (transform, leaves) in enumerate(self._steps):
            seed = () if entropy is None else (entropy, place)
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


class Rollback:
    """Restores a distribution and transforms as they were when this was made, if a load of a state fails."""

    def __init__(self, distribution: Distribution, transforms: Sequence[Transform]) -> None:
        self._distribution, self._place = distribution, distribution.place()
        self._transforms, self._states = transforms, transforms_state(transforms)

    def go_back(self) -> None:
        """Have them go back; it may be repeated."""
        self._distribution.go_back(self._place)
        load_transforms(self._transforms, self._states)


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


class ToFloat(Transform):
    """Turn frames into floats: observations of uint8, times `scale`.

    Parameters
    ----------
    scale : float
        What each value is multiplied by.
    fields : sequence of str or None
        Observation leaves by name, such as "image" or "camera/left" ("obs" for a lone array); None: all of uint8.
    dtype : torch.dtype
        Of the result.

    Raises
    ------
    ValueError
        An argument is invalid; by the sampler also where `fields` names what the store has not.
    """

    def __init__(
        self, scale: float = 1 / 255, fields: Sequence[str] | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self._scale = number("scale", scale)
        self._fields = None if fields is None else names("fields", fields)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating point dtype of torch, not {dtype!r}")
        self._dtype = dtype

    def __repr__(self) -> str:
        return f"ToFloat(scale={self._scale:g})"

    def bind(self, schema: Schema, view: View) -> list[str]:
        """Return the leaves that become floats."""
        return [*obs_leaves(schema, "fields", self._fields, lambda field: field.dtype == np.uint8, "of uint8")]

    def apply(self, batch: Batch, leaves: Sequence[str], prepared: Arrays, entropy: Sequence[int]) -> Result:
        """Return the observations with floats."""
        return changed_observations(batch, leaves, lambda _, frames: (frames * self._scale).to(self._dtype))


class RandomShift(Transform):
    """Shift frames by up to `pad` pixels in both directions, at random: DrQ (Kostrikov et al. 2021, section 3.1).

    Each item is padded by `pad` pixels on every side, which repeat those of its border, and cropped to its size at a
    random place. All frames of a stack, and all steps of a window, are shifted alike; several leaves each by their own
    shift. Shifts are a function of the sampler's seed and the batch. Whatever dtype frames have, they keep it.

    Parameters
    ----------
    pad : int
        Pixels.
    fields : sequence of str or None
        Observation leaves by name, such as "image" or "camera/left" ("obs" for a lone array); None: all of uint8 with
        two axes or more a step.
    channels_last : bool
        Whether frames are (height, width, channels); if not, height and width are the last two axes.
    shared : bool
        Whether `next_obs` is shifted as `obs` is. If not, by shifts of its own, as in DrQ-v2 (Yarats et al. 2021).

    Raises
    ------
    ValueError
        An argument is invalid; by the sampler also where `fields` names what the store has not, or what is too small to
        be a frame.
    """

    random = True

    def __init__(
        self, pad: int = 4, fields: Sequence[str] | None = None, *, channels_last: bool = False, shared: bool = False
    ) -> None:
        self._pad = int_argument("pad", pad)
        self._fields = None if fields is None else names("fields", fields)
        self._last, self._shared = switch("channels_last", channels_last), switch("shared", shared)

    def __repr__(self) -> str:
        return f"RandomShift(pad={self._pad})"

    def bind(self, schema: Schema, view: View) -> list[str]:
        """Return the leaves that are shifted."""
        found = obs_leaves(schema, "fields", self._fields, _is_frame, "of uint8 with two axes or more")
        for path, field in found.items():
            sides = field.shape[-3:-1] if self._last else field.shape[-2:]
            if len(sides) < 2 or min(sides) <= 2 * self._pad:
                raise ValueError(
                    f"{path}, {field.shape} with channels_last={self._last}, has no frames that could be shifted by "
                    f"{self._pad} pixels; fields names those that are meant"
                )
        return [*found]

    def apply(self, batch: Batch, leaves: Sequence[str], prepared: Arrays, entropy: Sequence[int]) -> Result:
        """Return the observations with shifted frames."""
        rng = np.random.Generator(np.random.PCG64(entropy))
        items = batch["index"].shape
        # Drawn whether the batch has both or not: `fields` of a sampler changes no shift.
        shifts = torch.from_numpy(rng.integers(0, 2 * self._pad + 1, (2, len(leaves), 2, prod(items))))
        found: dict[str, Tree] = {}
        for which, name in enumerate(("obs", "next_obs")):
            of = dict(zip(leaves, shifts[0 if self._shared else which], strict=True))

            def shifted(path: str, frames: torch.Tensor, of: dict[str, torch.Tensor] = of) -> torch.Tensor:
                down, right = of[path].to(frames.device)
                return self._shifted(frames, down, right)

            found |= changed_observations(batch, leaves, shifted, [name])
        return found

    def _shifted(self, frames: torch.Tensor, down: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return frames, whose leading axes are those of items, each item shifted by its own `down` and `right`."""
        if self._last:
            frames = frames.movedim(-1, -3)
        height, width = frames.shape[-2:]
        padded = frames.reshape(len(down), -1, height, width)
        for axis in (-1, -2):
            size = padded.shape[axis]
            before, behind = padded.narrow(axis, 0, 1), padded.narrow(axis, size - 1, 1)
            padded = torch.cat([*[before] * self._pad, padded, *[behind] * self._pad], axis)
        # Where each row of the result begins in the padded frames: rows are copied whole.
        items, channels, lines, columns = padded.shape
        frame = torch.arange(items * channels, device=down.device).view(items, channels, 1) * (lines * columns)
        row = (torch.arange(height, device=down.device) + down[:, None])[:, None] * columns + right[:, None, None]
        found = padded.reshape(-1).unfold(0, width, 1).index_select(0, (frame + row).view(-1)).view(frames.shape)
        return found.movedim(-3, -1).contiguous() if self._last else found


def _is_frame(field: Field) -> bool:
    return field.dtype == np.uint8 and len(field.shape) >= 2
