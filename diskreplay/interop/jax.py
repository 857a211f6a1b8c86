"""Conversion of a batch to JAX arrays that share the memory of the batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import diskreplay as dr

with dr.MissingExtra.raised_for("a batch of JAX arrays", "jax"):
    import jax


def to_jax(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a batch as JAX arrays on the batch's device, a pytree for `jax.jit`.

    Dicts and tuples of fields stay dicts and tuples. The arrays share memory with the batch's tensors. The memory is
    freed when no array and no computation uses it any longer. Do not change a shared tensor, since JAX assumes that
    arrays are constant. Fields that are not contiguous are copied, such as `obs` and `next_obs` of `Sequences`: these
    two are views of one array.

    `index` is left out: ids need 64 bits, and integers of JAX have 32 bits by default. Pass `batch.index` to
    `Sampler.update_priorities`; the TD errors may be a JAX array. Without ``jax_enable_x64``, fields of 64 bits are
    copied to 32 bits: floats are rounded, and integers must fit.

    Parameters
    ----------
    batch : Batch
        A batch on the CPU, or on a device that JAX uses.

    Raises
    ------
    ValueError
        JAX does not use the device or a dtype of the batch, or an integer does not fit into 32 bits.
    """
    return {name: _to_jax(name, batch[name]) for name in batch if name != "index"}


def _to_jax(path: str, tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _to_jax(f"{path}/{name}", below) for name, below in tree.items()}
    if isinstance(tree, tuple):  # make a plain tuple, because `jax.tree` takes a subclass of tuple for a leaf
        return tuple(_to_jax(f"{path}/{number}", below) for number, below in enumerate(tree))
    try:
        array = jax.dlpack.from_dlpack(tree.detach().contiguous())
    except Exception as error:  # the class of the error depends on the version of JAX
        what = f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)} on {tree.device}"
        raise ValueError(f"JAX cannot take the field {path!r}, {what}: {type(error).__name__}: {error}") from error
    if array.dtype.itemsize < tree.itemsize and array.dtype.kind in "iu":
        _check_fit(path, tree.numpy(force=True), np.iinfo(array.dtype))
    return array


def _check_fit(path: str, values: np.ndarray, bounds: np.iinfo) -> None:
    """Raise ValueError for values outside of ``bounds``: JAX would silently keep only their lowest bits."""
    outside = values[(values < bounds.min) | (values > bounds.max)]
    if len(outside):
        raise ValueError(
            f"field {path!r} has {outside[0]}, which does not fit into {bounds.dtype}: call "
            'jax.config.update("jax_enable_x64", True) at the start of the program, or leave the field out of `fields`'
        )
