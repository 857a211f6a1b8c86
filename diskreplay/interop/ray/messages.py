"""What trainers and shards send each other."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.interop.ray.batch_form import Form

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TOLD = ("probability", "population", "priority_sum")
"""Fields of batches that say how they were drawn. Shards tell the trainer, who makes those of all shards of them."""


class Target(NamedTuple):
    """What one name's sampler draws, and what a batch of it holds; for `fields` and `where` see `Sampler`.

    View and distribution have no common public class.
    """

    view: Any
    distribution: Any
    fields: tuple[str, ...] | None
    where: Callable[[dr.Episode], bool] | None


class Joined(NamedTuple):
    """A shard's answer to a trainer: its store, where it is, and which run and version its sampler is of."""

    uuid: str
    schema: dr.Schema
    node: str
    run: str
    version: int
    mass: float
    population: int


class Update(NamedTuple):
    """Ids of one shard and their errors, (n,) or (n, length), of ids of one kind."""

    ids: Ints
    errors: Floats
    kind: tuple[Any, ...] | None


def joined_updates(updates: Sequence[Update]) -> list[Update]:
    """Return the same updates in as few as may be: of those of one kind and length, in their order, one is made."""
    found: list[Update] = []
    alike = groupby(updates, key=lambda update: (update.kind, update.errors.shape[1:]))
    for (kind, _), group in alike:
        ids, errors, _ = zip(*group, strict=True)
        found.append(Update(np.concatenate(ids), np.concatenate(errors), kind))
    return found


class Request(NamedTuple):
    """What a trainer asks of a shard: to take these updates, then to draw parts of batches of these sizes.

    `ids_only`: the trainer reads the store itself. `version` is the sampler's that it reckons with.
    """

    name: str
    version: int
    sizes: Sequence[int]
    updates: Sequence[Update] = ()
    ids_only: bool = False


class Part(NamedTuple):
    """What a shard gave. `within` has the probability of each id in the shard, None where all are alike.

    `mass` and `population` are the shard's when it drew. `leaves` are the fields, apart from index and weight, and
    `form` how they are put together; None where only ids were wanted.
    """

    ids: Ints
    within: Floats | None
    mass: float
    population: int
    leaves: list[NDArray[Any]] | None = None
    form: Form | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = [self.ids, *([] if self.within is None else [self.within]), *(self.leaves or [])]
        return sum(array.nbytes for array in arrays)

    def cut(self, start: int, stop: int) -> "Part":
        """Return some of its items, without a copy."""
        return self._replace(
            ids=self.ids[start:stop],
            within=None if self.within is None else self.within[start:stop],
            leaves=None if self.leaves is None else [leaf[start:stop] for leaf in self.leaves],
        )


class Reply(NamedTuple):
    """A shard's answer to a request: the parts of all batches, one behind the other, and mass and population of then.

    `part` is None where nothing was asked for, or there was nothing to draw from. `skipped` counts ids of updates.
    """

    part: Part | None
    mass: float
    population: int
    skipped: int
