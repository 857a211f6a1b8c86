"""What trainers and shards send each other."""

from collections.abc import Callable, Sequence
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


class Request(NamedTuple):
    """What a trainer asks of a shard: to take these updates, then to draw parts of these sizes.

    `ids_only`: the trainer reads the store itself. `version` is the sampler's that it reckons with.
    """

    name: str
    version: int
    sizes: Sequence[int]
    updates: Sequence[Update] = ()
    ids_only: bool = False


class Part(NamedTuple):
    """A shard's part of a batch. `within` has the probability of each id in the shard, None where all are alike.

    `mass` and `population` are the shard's when it drew. `leaves` are the fields, apart from index and weight; None
    where only ids were wanted.
    """

    ids: Ints
    within: Floats | None
    mass: float
    population: int
    leaves: list[NDArray[Any]] | None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = [self.ids, *([] if self.within is None else [self.within]), *(self.leaves or [])]
        return sum(array.nbytes for array in arrays)


NOTHING = Part(np.zeros(0, np.int64), None, 0.0, 0, None)


class Reply(NamedTuple):
    """A shard's answer to a request: a part of each size, mass and population of now, and how many ids updates skipped.

    The last parts are missing where there was nothing to draw from.
    """

    parts: list[Part]
    mass: float
    population: int
    skipped: int
    form: Form | None
