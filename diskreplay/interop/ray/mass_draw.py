"""How a batch is drawn from shards in proportion to their masses, and the weights that follow from it."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def split_batch(rng: np.random.Generator, size: int, masses: Floats) -> Ints:
    """Draw how many items of a batch each shard gives, (shards,): one multinomial draw by their masses.

    Masses are finite and at least 0, and not all 0.
    """
    counts: Ints = rng.multinomial(size, masses / masses.sum())
    return counts


def chances(within: Floats, mass: float, total: float) -> Floats:
    """Return the probability with which items of one shard were drawn, (n,).

    `within` is the probability of each in its shard, p over the shard's mass when it drew; `mass` over `total` is that
    of the shard: what the trainer knew of the masses when it split the batch. So this is what really happened, however
    old the masses were.
    """
    found: Floats = within * (mass / total)
    return found


def importance_weights(drawn: Floats, beta: float) -> NDArray[np.float32]:
    """Return (N · P(i)) ** -beta over the largest such weight of the batch (Schaul et al. 2016, section 3.4).

    N cancels. `drawn` has the P(i), all above 0.
    """
    if not len(drawn):
        return np.zeros(0, np.float32)
    found: NDArray[np.float32] = ((drawn.min() / drawn) ** beta).astype(np.float32)
    return found
