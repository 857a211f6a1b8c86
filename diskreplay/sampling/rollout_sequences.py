"""Which steps of a rollout make up its sequences, in minibatches for recurrent networks."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Windows(NamedTuple):
    """Sequences, padded to one length: `rows`, (B, L), are their steps in the flat rollout where `mask` is true."""

    rows: Ints
    mask: Bools


def find_sequences(ends: Bools, length: int | None) -> tuple[Ints, Ints]:
    """Return where the sequences of columns of steps begin, (n,), and how many steps they have, (n,).

    `ends`, (steps, columns), tells which steps nothing follows; no sequence goes on behind one of them, or has more
    than `length` steps. Places count column by column: column * steps + step.
    """
    first = np.ones(ends.shape, np.bool_)
    first[1:] = ends[:-1]
    if length is not None:
        step = np.arange(len(ends))[:, None]
        begun = np.maximum.accumulate(np.where(first, step, 0))
        first |= (step - begun) % length == 0
    places = np.flatnonzero(first.T)
    return places, np.diff(places, append=first.size)


def shuffled_sequences(
    ends: Bools, size: int, epochs: int, rng: np.random.Generator, length: int | None
) -> Iterator[Windows]:
    """Yield the sequences of columns of steps in random order, `size` at a time, in another order each epoch.

    They are padded to `length`, or where that is None, to the longest of each minibatch.
    """
    steps, columns = ends.shape
    places, counts = find_sequences(ends, length)
    for _ in range(epochs):
        order = rng.permutation(len(places))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            column, first = np.divmod(places[chosen, None], steps)
            offset = np.arange(counts[chosen].max() if length is None else length)
            mask = offset < counts[chosen, None]
            yield Windows((first + np.where(mask, offset, 0)) * columns + column, mask)
