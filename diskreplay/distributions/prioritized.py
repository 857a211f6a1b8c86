"""Prioritized replay: ids are drawn in proportion to powers of their last errors."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.base import Draw, Owned, check_enough
from diskreplay.distributions.number_arguments import Schedule, beta_argument, number
from diskreplay.distributions.population import Population
from diskreplay.distributions.priorities import PriorityTable
from diskreplay.distributions.saved_state import kind_of
from diskreplay.ids import Floats, Ints
from diskreplay.kernels.table import get_kernel

_TINY = 5e-324


class Prioritized(Owned):
    """Draw ids in proportion to |td| ** alpha: proportional prioritization, Schaul et al. 2016 (sections 3.3 and 3.4).

    P(i) = p_i / Σ p with p = (|td| + eps) ** alpha. New ids enter with the initial priority of their step, if the
    collector gave one (Horgan et al. 2018, section 3; for sequences see `eta`). Other new ids enter with the largest
    priority that an update or a collector gave to an id that can still be drawn, or with 1 if there is no such id. The
    weight of a drawn id is (N · P(i)) ** -beta, divided by the largest weight. N is the number of ids that can be
    drawn.

    The priorities belong to one sampler, which calls the distribution under the sampler's lock. Each kind of id has its
    own table: all transitions share one table, and all sequences of the same (length, overlap, pad) share another
    table. The first draw of each kind makes the table of this kind. The tables stay when the view of the sampler is
    replaced.

    Parameters
    ----------
    alpha : float
        Exponent of the priorities, at least 0; 0 is uniform. It may be set at run time.
    beta : float or schedule
        Exponent of the weights, at least 0; a schedule such as `Linear(0.4, 1.0, 1_000_000)` is counted in delivered
        batches.
    eps : float
        Number above 0 that is added to each |td|, so that every id can be drawn.
    eta : float
        Priorities of sequences are eta · max |td| + (1 - eta) · mean |td| (Kapturowski et al. 2019, section 2.3).
    normalize : {"batch", "store"}
        Weights are divided by the largest weight of the batch, or of all ids that can be drawn.
    stratified : bool
        True divides the total priority into `batch_size` equal parts and draws one id from each (Schaul et al. 2016,
        section B.2.1). False draws ids independently.

    Raises
    ------
    ValueError
        An argument is invalid.

    Examples
    --------
    >>> distribution = dr.Prioritized(alpha=0.6, beta=dr.Linear(0.4, 1.0, 100_000))
    >>> sampler = dr.Sampler("cartpole.replay", dr.Transitions(), distribution, batch_size=32)
    >>> batch = sampler.sample()
    >>> sampler.update_priorities(batch.index, np.random.default_rng(0).normal(size=32))
    0
    """

    weighted = True

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float | Schedule = 0.4,
        eps: float = 1e-6,
        eta: float = 0.9,
        normalize: str = "batch",
        stratified: bool = True,
    ) -> None:
        self._alpha = number("alpha", alpha, 0.0)
        self._beta = beta_argument(beta)
        self._eps = number("eps", eps, above=0.0)
        self._eta = number("eta", eta, 0.0, 1.0)
        if normalize not in ("batch", "store"):
            raise ValueError(f'normalize must be "batch" or "store", not {normalize!r}')
        if not isinstance(stratified, bool | np.bool_):
            raise ValueError(f"stratified must be True or False, not {stratified!r}")
        self._normalize, self._stratified = normalize, bool(stratified)
        self._tables: dict[tuple[Any, ...], PriorityTable] = {}
        self._scratch = np.empty((3, 0))

    @property
    def alpha(self) -> float:
        """Exponent of the priorities; the next draw applies a new value, at the cost of a pass over all priorities."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._alpha = number("alpha", alpha, 0.0)

    @property
    def beta(self) -> float | Schedule:
        """Exponent of the weights, or a schedule; it may be set at run time."""
        return self._beta

    @beta.setter
    def beta(self, beta: float | Schedule) -> None:
        self._beta = beta_argument(beta)

    @property
    def eps(self) -> float:
        """The number that is added to each |td|."""
        return self._eps

    @property
    def eta(self) -> float:  # type: ignore[override]  # it cannot be set
        """The weight of the largest |td| in the priority of a sequence; the mean |td| has the weight 1 - eta."""
        return self._eta

    @property
    def normalize(self) -> str:
        """Weights are divided by the largest weight of the "batch" or of the "store"."""
        return self._normalize

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the constructor by name, except beta."""
        names = ("alpha", "eps", "eta", "normalize", "stratified")
        return {name: getattr(self, f"_{name}") for name in names}

    @property
    def is_new(self) -> bool:
        """Whether the distribution has no priorities yet."""
        return not self._tables

    def __repr__(self) -> str:
        beta = self._beta if callable(self._beta) else f"{self._beta:g}"
        return f"Prioritized(alpha={self._alpha:g}, beta={beta})"

    def _followed(self, population: Population) -> PriorityTable:
        table = self._tables.get(population.kind)
        if table is None:
            table = self._tables[population.kind] = PriorityTable(self._alpha, self._normalize == "store")
        table.set_alpha(self._alpha)
        table.follow(population, self._eps, self._eta)
        return table

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty."""
        table = self._followed(population)
        ids, chances = table.draw(rng.bit_generator.random_raw() >> 1, size, size if self._stratified else 1)
        least = max(table.tree.least / table.tree.total, _TINY) if self._normalize == "store" else 0.0
        return Draw(ids, chances, population.size, least)

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability of each id, (n,); 0 for an id that cannot be drawn."""
        table = self._followed(population)
        return table.masses_of(ids) / (table.tree.total or 1.0)

    def share_chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability that `draw_share` draws each id, (n,); all ids must be in the population's share."""
        table = self._followed(population)
        return table.masses_of(ids) / (table.total_of(population.share) or 1.0)

    def priorities(self, population: Population, ids: Ints) -> Floats:
        """Return the priority |td| + eps of each id, (n,); 0 for an id that cannot be drawn."""
        return self._followed(population).raw(ids)

    def priority_sum(self, population: Population) -> float:
        """Return the sum of the priorities p = (|td| + eps) ** alpha of the population's share."""
        return self._followed(population).total_of(population.share)

    def mixing_error(self) -> str | None:
        """Return None if weights are normalized over the batch, else why no `Mixture` can contain the distribution."""
        if self._normalize == "batch":
            return None
        return 'must have normalize="batch": the largest weight of a store is not known to a mixture'

    def weigh(self, draw: Draw, beta: float | Schedule | None, batches: int = 0) -> NDArray[np.float32]:
        """Return the importance weight of each drawn id, at most 1.

        Parameters
        ----------
        draw : Draw
            A result of `draw`.
        beta : float or schedule or None
            Exponent of this batch's weights; None: the distribution's own beta.
        batches : int
            Number of batches delivered before this one, the argument of a schedule.
        """
        exponent = self._beta if beta is None else beta_argument(beta)
        if callable(exponent):
            exponent = number("beta", exponent(batches), 0.0)
        assert draw.chances is not None
        chances = np.ascontiguousarray(draw.chances, np.float64)
        weights = np.empty(len(chances), np.float32)
        if self._scratch.shape[1:] != chances.shape:
            if chances.ndim != 1:
                raise ValueError(f"chances must have one axis, not shape {list(chances.shape)}")
            self._scratch = np.empty((3, len(chances)))
        # N is not needed: it cancels out in the division by the largest weight. The smallest chance has the largest
        # weight.
        least = draw.least if self._normalize == "store" else 0.0
        get_kernel("weights")(chances, least, exponent, self._scratch, weights)
        return weights

    def update(self, population: Population, ids: Ints, errors: Floats) -> int:
        """Set the priorities of ids from their errors; if the call raises, nothing changes.

        Parameters
        ----------
        population : Population
            The population of the ids; it must have been refreshed at least once.
        ids : (n,) int64
            Ids, a contiguous array. If an id is repeated, its last error counts.
        errors : (n,) float64
            Errors of either sign, a contiguous array. For sequences, see `sequence_error`.

        Returns
        -------
        int
            The number of ids that cannot be drawn: they were evicted, or the view does not offer them.

        Raises
        ------
        ValueError
            `errors` has another shape than `ids`, or a value that is not finite.
        """
        if errors.shape != ids.shape:
            raise ValueError(f"td_error must have one value for each of {len(ids)} ids, not shape {list(errors.shape)}")
        skipped = self._followed(population).update(ids, errors, self._eps)
        if skipped < 0:
            raise ValueError(f"td_error[{-1 - skipped}] is {errors[-1 - skipped]}, not finite: nothing was updated")
        return skipped

    def place(self) -> dict[tuple[Any, ...], PriorityTable]:
        """Return the tables of priorities by kind; `load_state_dict` makes new tables and does not change these."""
        return self._tables

    def go_back(self, place: dict[tuple[Any, ...], PriorityTable]) -> None:
        """Restore tables that `place` returned."""
        self._tables = place

    def state_dict(self) -> dict[str, Any]:
        """Return a dict of the states of all tables of priorities; a key is a table's kind of id as JSON."""
        return {json.dumps(kind): table.state_dict() for kind, table in self._tables.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`.

        Ids without a priority in the state count as new, and evicted ids are dropped. Raises ValueError, and changes
        nothing, if `state` is invalid.
        """
        least = self._normalize == "store"
        tables = {kind_of(kind): PriorityTable.loaded(table, self._alpha, least) for kind, table in state.items()}
        self._tables = tables


class PrioritizedOfEnough(Prioritized):
    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        check_enough(population, size)
        return super().draw(population, size, rng)


def sequence_error(td_error: Any, loss_mask: Any, eta: float) -> Floats:
    """Return one error per sequence, eta · max |td| + (1 - eta) · mean |td| (Kapturowski et al. 2019, section 2.3).

    `td_error` is (batch, length) float. `loss_mask`, (batch, length) bool, selects steps. The result is (batch,)
    float64, 0 for a sequence without a selected step. Raises ValueError if the shapes differ, or if a selected error is
    not finite.
    """
    counts = np.asarray(loss_mask, bool)
    error = np.abs(np.asarray(td_error, np.float64))
    if error.ndim != 2 or error.shape != counts.shape:
        raise ValueError(
            f"td_error must have the shape (batch, length) of loss_mask, {list(counts.shape)}, not {list(error.shape)}"
        )
    error = np.where(counts, error, 0.0)
    if not np.isfinite(error).all():
        row, step = np.argwhere(~np.isfinite(error))[0]
        raise ValueError(f"td_error[{row}, {step}] is {error[row, step]}, not finite: nothing was updated")
    largest = error.max(axis=1, initial=0.0)
    mean = error.sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
    found: Floats = eta * largest + (1.0 - eta) * mean
    return found
