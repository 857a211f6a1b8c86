"""Messages between trainers and shards, and conversion of batches to the arrays that messages carry."""

from collections.abc import Callable, Collection, Sequence
from itertools import count, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.interop.step_values import leaves_of, map_leaves

Array = NDArray[Any]
_DRAWN = ("index", "weight")


class Form(NamedTuple):
    """The structure of a batch's fields. `numbered` is the nested dict of fields, with numbers in place of arrays.

    In some pairs of arrays, such as obs and next_obs, the windows of the later array begin one step after the windows
    of the earlier array. Only the earlier array is sent, with windows that are one step longer. `later` maps the number
    of each later array to the number of its earlier array.
    """

    numbered: dict[str, Any]
    later: dict[int, int]


def take_apart(batch: dr.Batch, without: Collection[str], windows: bool) -> tuple[Form, list[Array]]:
    """Return the `Form` and the arrays of a batch on the CPU, without index, weight and the fields in `without`.

    `windows` is true if each item is a window of steps. Then next_obs is obs one step later.
    """
    fields = {name: batch[name] for name in batch if name not in _DRAWN and name not in without}
    tensors, numbers = leaves_of(fields), count()
    numbered = map_leaves(lambda _: next(numbers), fields)
    later: dict[int, int] = {}
    if windows and {"obs", "next_obs"} <= fields.keys():
        later = dict(zip(leaves_of(numbered["next_obs"]), leaves_of(numbered["obs"]), strict=True))
    arrays = [tensor.numpy() for tensor in tensors]
    for at, of in later.items():
        arrays[of] = _a_step_longer(tensors[of], tensors[at])
    return Form(numbered, later), [np.ascontiguousarray(a) for at, a in enumerate(arrays) if at not in later]


def _a_step_longer(earlier: torch.Tensor, later: torch.Tensor) -> Array:
    """Return the windows of `earlier`. Each window ends with one more step: the last step of this window in `later`.

    The result shares memory with `earlier` if each window of `later` begins at the second step of the window in
    `earlier`.
    """
    if earlier.data_ptr() + earlier.stride(1) * earlier.element_size() == later.data_ptr():
        size = (earlier.shape[0], earlier.shape[1] + 1, *earlier.shape[2:])
        return earlier.as_strided(size, earlier.stride()).numpy()
    return np.concatenate([earlier[:, :1].numpy(), later.numpy()], axis=1)


def put_together(form: Form, parts: Sequence[Sequence[Array]], pinned: bool) -> dict[str, Any]:
    """Join the arrays of a batch's parts, in the order of `parts`, and return the batch's fields.

    If `pinned` is true, the result is in pinned memory. A copy from pinned memory to a CUDA device is fastest.
    """
    values: dict[int, Any] = {}
    arrays = (_joined([part[at] for part in parts], pinned) for at in range(len(parts[0])))
    for at in range(len(parts[0]) + len(form.later)):
        if at not in form.later:
            values[at] = next(arrays)
    for at, of in form.later.items():
        values[at], values[of] = values[of][:, 1:], values[of][:, :-1]
    fields: dict[str, Any] = map_leaves(values.__getitem__, form.numbered)
    return fields


def _joined(arrays: Sequence[Array], pinned: bool) -> Array | torch.Tensor:
    if not pinned:
        return np.concatenate(arrays)
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    found = torch.empty(shape, dtype=torch.from_numpy(np.empty(0, arrays[0].dtype)).dtype, pin_memory=True)
    np.concatenate(arrays, out=found.numpy())
    return found


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TOLD = ("probability", "population", "priority_sum")
"""Names of batch fields that describe the draw. The trainer computes these fields from the values of all shards."""


class Target(NamedTuple):
    """The arguments of `Sampler` that all trainers with the same sampler name share."""

    view: Any
    distribution: Any
    fields: tuple[str, ...] | None
    where: Callable[[dr.Episode], bool] | None


class Joined(NamedTuple):
    """The result of `Shard.join`.

    `uuid` and `schema` belong to the store. `node` is the id of the shard's node. For `run` and `version` see
    `SharedSampler`; for `mass` and `population` see `Part`.
    """

    uuid: str
    schema: dr.Schema
    node: str
    run: str
    version: int
    mass: float
    population: int


class Update(NamedTuple):
    """Ids of one shard and one kind, (n,), and the TD error of each id, (n,).

    For sequences, TD errors are (n, length).
    """

    ids: Ints
    errors: Floats
    kind: tuple[Any, ...] | None


def joined_updates(updates: Sequence[Update]) -> list[Update]:
    """Join successive updates that have the same kind and window length. The order of the updates is kept."""
    found: list[Update] = []
    alike = groupby(updates, key=lambda update: (update.kind, update.errors.shape[1:]))
    for (kind, _), group in alike:
        ids, errors, _ = zip(*group, strict=True)
        found.append(Update(np.concatenate(ids), np.concatenate(errors), kind))
    return found


class Request(NamedTuple):
    """A trainer's request to a shard: apply `updates`, then draw a part of each of several batches.

    `sizes` has the number of items in each part. `name` is the name of the sampler, and `version` is the version of the
    sampler that the trainer knows. `ids_only` is true if the trainer reads the fields from the store itself.
    """

    name: str
    version: int
    sizes: Sequence[int]
    updates: Sequence[Update] = ()
    ids_only: bool = False


class Part(NamedTuple):
    """A shard's part of a batch. `within` is each id's probability in the shard, or None if all ids are equally likely.

    `population` is the number of drawable ids when the shard drew. `mass` is the same number or, if ids are drawn by
    priorities, the sum of the priorities. `leaves` has the arrays of all fields except index and weight, and `form` is
    the structure of these fields. `leaves` and `form` are None if only ids were requested.
    """

    ids: Ints
    within: Floats | None
    mass: float
    population: int
    leaves: list[NDArray[Any]] | None = None
    form: Form | None = None

    @property
    def nbytes(self) -> int:
        arrays = [self.ids, *([] if self.within is None else [self.within]), *(self.leaves or [])]
        return sum(array.nbytes for array in arrays)

    def cut(self, start: int, stop: int) -> "Part":
        return self._replace(
            ids=self.ids[start:stop],
            within=None if self.within is None else self.within[start:stop],
            leaves=None if self.leaves is None else [leaf[start:stop] for leaf in self.leaves],
        )


class Reply(NamedTuple):
    """A shard's answer to a request. `part` joins the shard's parts of all requested batches, one after the other.

    `part` is None if no item was requested, or if no id could be drawn. `mass` and `population` are as in `Part`.
    `skipped` is the number of ids whose priorities were not updated, for example because the ids were evicted.
    """

    part: Part | None
    mass: float
    population: int
    skipped: int
