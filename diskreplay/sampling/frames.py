"""Transforms of frames: as floats, and randomly shifted."""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from diskreplay.distributions.number_arguments import int_argument, number
from diskreplay.sampling.batch import Batch, Tree
from diskreplay.sampling.transforms import Arrays, Result, Transform, changed_observations, obs_leaves
from diskreplay.schema.schema import Field, Schema
from diskreplay.views.arguments import names, switch
from diskreplay.views.base import View


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
