"""Functions and classes that change batches before delivery."""

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
    """Changes each batch of a sampler. Only `apply` must be defined; several threads may call `apply` at once.

    The result of `apply` may depend only on its arguments and the transform's parameters, and not on the thread or the
    time. Transforms that draw random numbers (`random`) get `entropy`. Transforms that keep a state (`keeps_state`) get
    the result that `prepare` returned when the batch was drawn.
    """

    random: bool = False
    keeps_state: bool = False

    def bind(self, schema: Schema, view: View) -> Sequence[str]:
        """Return the paths of the leaves to change in this view's batches.

        Raises ValueError if the transform does not fit the schema or the view.
        """
        return ()

    @abstractmethod
    def apply(self, batch: Batch, leaves: Sequence[str], prepared: Arrays, entropy: Sequence[int]) -> Result:
        """Return the new batch, or a dict of the new fields. `entropy` seeds the random numbers."""

    def prepare(self, snapshot: Snapshot) -> Arrays:
        """Return the arrays that `apply` needs for a batch from this snapshot. Batches are prepared in draw order."""
        return {}

    def claim(self, owner: object) -> None:  # noqa: B027  # most have no state
        """If this transform keeps a state, make the sampler `owner` its only owner; see `OneOwner`."""

    def stats(self) -> dict[str, float]:
        """Return numbers for `Sampler.stats`, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later batches depend on: arrays, numbers and texts."""
        return {}

    def load_state_dict(self, state: Any) -> None:  # noqa: B027  # as `claim`
        """Continue from a result of `state_dict`. Raises ValueError, and changes nothing, if `state` is invalid."""


class _Function(Transform):
    def __init__(self, function: Callable[[Batch], Result]) -> None:
        self._function = function

    def apply(self, batch: Batch, leaves: Sequence[str], prepared: Arrays, entropy: Sequence[int]) -> Result:
        found = self._function(batch)
        if isinstance(found, (Batch, Mapping)):
            return found
        raise ValueError(
            f"the transform {self._function!r:.80} returned {type(found).__name__}: it must return a batch, or a dict "
            "of the fields that it changes"
        )


def transform_argument(transform: TransformLike | Sequence[TransformLike] | None) -> tuple[Transform, ...]:
    if transform is None:
        return ()
    # Only lists and tuples are sequences of transforms: another iterable may be a transform, such as
    # torch.nn.Sequential.
    return tuple(map(_one_argument, transform if isinstance(transform, (list, tuple)) else [transform]))


def _one_argument(transform: Any) -> Transform:
    if isinstance(transform, Transform):
        return transform
    if isinstance(transform, type) or not callable(transform):
        raise ValueError(f"transform must be a function of a batch, or several in a list, not {transform!r:.80}")
    return _Function(transform)


class Pipeline:
    """A chain of transforms, each with the leaves that it changes. Any thread may call `apply`."""

    def __init__(self, steps: Sequence[tuple[Transform, Sequence[str]]] = ()) -> None:
        self._steps = steps

    def prepare(self, snapshot: Snapshot) -> list[Arrays]:
        return [transform.prepare(snapshot) for transform, _ in self._steps if transform.keeps_state]

    def apply(self, batch: Batch, prepared: Sequence[Arrays], entropy: int | None) -> Batch:
        """Apply all transforms in order. The weights of the given batch are 1."""
        states = iter(prepared)
        for place, (transform, leaves) in enumerate(self._steps):
            seed = () if entropy is None else (entropy, place)
            found = transform.apply(batch, leaves, next(states) if transform.keeps_state else {}, seed)
            batch = found if isinstance(found, Batch) else batch.replaced(found)
        return batch


def transforms_state(transforms: Sequence[Transform]) -> list[dict[str, Any]]:
    return [{"name": type(one).__name__, "state": one.state_dict()} for one in transforms if one.keeps_state]


def load_transforms(transforms: Sequence[Transform], states: Any) -> None:
    """Load the transforms' states. After a ValueError, some transforms may have loaded their states."""
    keeping = [one for one in transforms if one.keeps_state]
    with state_of("a sampler"):
        names, states = [str(one["name"]) for one in states], [one["state"] for one in states]
    expected = [type(one).__name__ for one in keeping]
    if names != expected:
        raise ValueError(
            f"this is the state of a sampler with the transforms {names or 'none'} that keep a state, and this one has "
            f"{expected or 'none'}: use the same transforms"
        )
    for one, state in zip(keeping, states, strict=True):
        one.load_state_dict(state)


class Rollback:
    """The states of a distribution and of transforms, to be restored if the load of other states fails."""

    def __init__(self, distribution: Distribution, transforms: Sequence[Transform]) -> None:
        self._distribution, self._place = distribution, distribution.place()
        self._transforms, self._states = transforms, transforms_state(transforms)

    def go_back(self) -> None:
        """Restore the kept states. After an interrupt, call this again."""
        self._distribution.go_back(self._place)
        load_transforms(self._transforms, self._states)


def obs_leaves(
    schema: Schema, argument: str, names: Sequence[str] | None, fits: Callable[[Field], bool], described: str
) -> dict[str, Field]:
    """Return, by path, the observation leaves with these names; if `names` is None, all leaves that fit.

    If the observation is one array, its name is "obs". Error messages describe the fitting leaves by ``described``,
    such as "of uint8".
    """
    every = {path: field for path, field in schema.leaves.items() if path.split("/")[0] == "obs"}
    by_name = {path.removeprefix("obs/"): path for path in every}
    known = ", ".join(map(repr, by_name))
    if names is None:
        found = {path: field for path, field in every.items() if fits(field)}
        if not found:
            raise ValueError(f"{argument}: no observation leaf is {described}; name the leaves to use, of {known}")
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
    """Return the observation fields of a batch, with `change(path, tensor)` in place of each leaf in `leaves`."""

    def changed(path: str, leaf: Tree) -> Tree:
        return change(path, leaf) if path in leaves else leaf

    return {name: map_paths(changed, batch[name], "obs") for name in fields if name in batch}


class ToFloat(Transform):
    """Convert frames to floats: uint8 observations times `scale`.

    Parameters
    ----------
    scale : float
        The number by which each value is multiplied.
    fields : sequence of str or None
        Names of observation leaves, such as "image" or "camera/left" ("obs" if the observation is one array). None: all
        uint8 leaves.
    dtype : torch.dtype
        The dtype of the result.

    Raises
    ------
    ValueError
        An argument is invalid. The sampler also raises ValueError if `fields` names a leaf that the store lacks.

    Examples
    --------
    >>> schema = dr.Schema(dr.Field((8, 8), "uint8"), dr.Field((), "int64"))
    >>> frames = np.full((6, 8, 8), 255, "uint8")
    >>> with dr.create("frames.replay", schema) as store, store.writer() as writer:
    ...     writer.append_episode(frames, np.zeros(5, int), np.ones(5), terminated=False, truncated=True)
    ...     dr.Sampler(store, dr.Transitions(), transform=dr.ToFloat(), batch_size=2).sample().obs.max()
    tensor(1.)
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
        """Return the paths of the leaves to convert."""
        return [*obs_leaves(schema, "fields", self._fields, lambda field: field.dtype == np.uint8, "of uint8")]

    def apply(self, batch: Batch, leaves: Sequence[str], prepared: Arrays, entropy: Sequence[int]) -> Result:
        """Return the observations as floats."""
        return changed_observations(batch, leaves, lambda _, frames: (frames * self._scale).to(self._dtype))


class RandomShift(Transform):
    """Shift frames at random by up to `pad` pixels along each axis: DrQ (Kostrikov et al. 2021, section 3.1).

    Each item is padded on every side by `pad` pixels that repeat its border, and then cropped at a random place to its
    original size. All frames of a stack, and all steps of a window, have the same shift. Each leaf has its own shift.
    Shifts depend only on the sampler's seed and the batch. Frames keep their dtype.

    Parameters
    ----------
    pad : int
        The largest shift in pixels.
    fields : sequence of str or None
        Names of observation leaves, such as "image" or "camera/left" ("obs" if the observation is one array). None: all
        uint8 leaves with at least two axes a step.
    channels_last : bool
        Whether frames are (height, width, channels). False: height and width are the last two axes.
    shared : bool
        Whether `obs` and `next_obs` have the same shifts. False: `next_obs` has its own shifts, as in DrQ-v2 (Yarats et
        al. 2021).

    Raises
    ------
    ValueError
        An argument is invalid. The sampler also raises ValueError if `fields` names a leaf that the store lacks, or a
        leaf is too small for the shifts.

    Examples
    --------
    >>> schema = dr.Schema(dr.Field((8, 8), "uint8"), dr.Field((), "int64"))
    >>> frames = np.zeros((11, 8, 8), "uint8")
    >>> with dr.create("pixels.replay", schema) as store, store.writer() as writer:
    ...     writer.append_episode(frames, np.zeros(10, int), np.ones(10), terminated=False, truncated=True)
    ...     store.refresh()
    ...     sampler = dr.Sampler(store, dr.Transitions(frame_stack=3), transform=dr.RandomShift(2), batch_size=4)
    ...     sampler.sample().obs.shape
    10
    torch.Size([4, 3, 8, 8])
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
        """Return the paths of the leaves to shift."""
        found = obs_leaves(schema, "fields", self._fields, _is_frame, "of uint8 with two axes or more")
        for path, field in found.items():
            sides = field.shape[-3:-1] if self._last else field.shape[-2:]
            if len(sides) < 2 or min(sides) <= 2 * self._pad:
                raise ValueError(
                    f"{path}, {field.shape} with channels_last={self._last}, has no frames that could be shifted by "
                    f"{self._pad} pixels; name the leaves to shift in fields"
                )
        return [*found]

    def apply(self, batch: Batch, leaves: Sequence[str], prepared: Arrays, entropy: Sequence[int]) -> Result:
        """Return the shifted observations."""
        rng = np.random.Generator(np.random.PCG64(entropy))
        items = batch["index"].shape
        # Shifts are always drawn for both `obs` and `next_obs`, so that they do not depend on the sampler's `fields`.
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
        """Shift each item of `frames` by its own numbers of pixels, `down` and `right`.

        The leading axes of `frames` are the items.
        """
        if self._last:
            frames = frames.movedim(-1, -3)
        height, width = frames.shape[-2:]
        padded = frames.reshape(len(down), -1, height, width)
        for axis in (-1, -2):
            size = padded.shape[axis]
            before, behind = padded.narrow(axis, 0, 1), padded.narrow(axis, size - 1, 1)
            padded = torch.cat([*[before] * self._pad, padded, *[behind] * self._pad], axis)
        # All padded frames are flattened to one axis. A row of a shifted frame is `width` pixels of this axis, from
        # index `frame + row` on.
        items, channels, lines, columns = padded.shape
        frame = torch.arange(items * channels, device=down.device).view(items, channels, 1) * (lines * columns)
        row = (torch.arange(height, device=down.device) + down[:, None])[:, None] * columns + right[:, None, None]
        found = padded.reshape(-1).unfold(0, width, 1).index_select(0, (frame + row).view(-1)).view(frames.shape)
        return found.movedim(-3, -1).contiguous() if self._last else found


def _is_frame(field: Field) -> bool:
    return field.dtype == np.uint8 and len(field.shape) >= 2
