"""Prioritized replay: ids in proportion to the errors that they last gave."""

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
from diskreplay.kernels.table import chosen

_TINY = 5e-324  # for what is above 0, however little


class Prioritized(Owned):
    """Draw ids in proportion to |td| ** alpha: proportional prioritization, Schaul et al. 2016 (sections 3.3 and 3.4).

    P(i) = p_i / Σ p with p = (|td| + eps) ** alpha. New ids begin with the priority that their steps were appended with
    (Horgan et al. 2018, section 3; of sequences see `eta`). Other new ids begin with the largest priority that an
    update or such a step gave to an id that can still be drawn, 1 before any. A priority that an id began with by
    this rule does not count. The weight of a drawn id is (N · P(i)) ** -beta over the largest such weight, where N
    counts the ids that can be drawn.

    It holds priorities, and so belongs to one sampler, under whose lock it is called. Each kind of id has a table of
    its own: all transitions share one, sequences of each (length, overlap, pad) have another. A table is made when its
    kind is first drawn from, and kept while the view is switched.

    Parameters
    ----------
    alpha : float
        Exponent of the priorities, at least 0; 0 is uniform. It may be set at run time.
    beta : float or schedule
        Exponent of the weights, at least 0; a schedule such as `Linear(0.4, 1.0, 1_000_000)` is counted in delivered
        batches.
    eps : float
        What is added to each |td|, above 0, so that every id is drawn now and then.
    eta : float
        Priorities of sequences are eta · max |td| + (1 - eta) · mean |td| (Kapturowski et al. 2019, section 2.3).
    normalize : {"batch", "store"}
        Over what the largest weight is taken: the batch, or all that can be drawn.
    stratified : bool
        Whether one id is drawn from each of as many equal parts of the total as the batch has items (section B.2.1);
        False draws them independently.

    Raises
    ------
    ValueError
        An argument is invalid.
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
        """Exponent of the priorities. Setting it counts from the next draw on, which then costs as much as a pass."""
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
        """What is added to each |td|."""
        return self._eps

    @property
    def eta(self) -> float:  # type: ignore[override]  # it cannot be set
        """The share of the largest error in the priority of a sequence."""
        return self._eta

    @property
    def normalize(self) -> str:
        """Over what the largest weight is taken: "batch" or "store"."""
        return self._normalize

    @property
    def arguments(self) -> dict[str, Any]:
        """What makes another one like it, apart from beta and the priorities."""
        names = ("alpha", "eps", "eta", "normalize", "stratified")
        return {name: getattr(self, f"_{name}") for name in names}

    @property
    def is_new(self) -> bool:
        """Whether it holds no priorities yet."""
        return not self._tables

    def __repr__(self) -> str:
        beta = self._beta if callable(self._beta) else f"{self._beta:g}"
        return f"Prioritized(alpha={self._alpha:g}, beta={beta})"

    def _followed(self, population: Population) -> PriorityTable:
        """Return the table of the population's kind, up to date with it."""
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
        """Return the probability with which each id is drawn, (n,); 0 where it cannot be."""
        table = self._followed(population)
        return table.masses_of(ids) / (table.tree.total or 1.0)

    def share_chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability with which `draw_share` draws each id of the population's share, (n,)."""
        table = self._followed(population)
        return table.masses_of(ids) / (table.total_of(population.share) or 1.0)

    def priorities(self, population: Population, ids: Ints) -> Floats:
        """Return the priority |td| + eps of each id, (n,), 0 where it cannot be drawn."""
        return self._followed(population).raw(ids)

    def priority_sum(self, population: Population) -> float:
        """Return the sum of the priorities p of the population's share."""
        return self._followed(population).total_of(population.share)

    def mixing_error(self) -> str | None:
        """Return None where weights are normalized over the batch."""
        if self._normalize == "batch":
            return None
        return 'must have normalize="batch": the largest weight of a store is not known'

    def weigh(self, draw: Draw, beta: float | Schedule | None, batches: int = 0) -> NDArray[np.float32]:
        """Return the importance weight of each drawn id, at most 1.

        Parameters
        ----------
        draw : Draw
            What `draw` returned.
        beta : float or schedule or None
            Exponent of this batch's weights; None is the distribution's own.
        batches : int
            Batches delivered before this one, for a schedule.
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
        # N cancels against the largest weight, which is that of the smallest chance.
        least = draw.least if self._normalize == "store" else 0.0
        chosen("weights")(chances, least, exponent, self._scratch, weights)
        return weights

    def update(self, population: Population, ids: Ints, errors: Floats) -> int:
        """Set the priorities of ids from their errors; nothing is changed if it raises.

        Parameters
        ----------
        population : Population
            What can be drawn now, refreshed at least once.
        ids : (n,) int64
            Which ids, in one piece of memory; the last error counts where one is named twice.
        errors : (n,) float64
            Errors of either sign, in one piece of memory; of sequences, see `sequence_error`.

        Returns
        -------
        int
            How many of the ids cannot be drawn: they were evicted, or the view does not offer them.

        Raises
        ------
        ValueError
            Another shape, or a value that is not finite.
        """
        if errors.shape != ids.shape:
            raise ValueError(f"td_error must have one value for each of {len(ids)} ids, not shape {list(errors.shape)}")
        skipped = self._followed(population).update(ids, errors, self._eps)
        if skipped < 0:
            raise ValueError(f"td_error[{-1 - skipped}] is {errors[-1 - skipped]}: nothing was updated")
        return skipped

    def place(self) -> dict[tuple[Any, ...], PriorityTable]:
        """Return the tables: another state has others."""
        return self._tables

    def go_back(self, place: dict[tuple[Any, ...], PriorityTable]) -> None:
        """Go back to tables."""
        self._tables = place

    def state_dict(self) -> dict[str, Any]:
        """Return the tables: by kind, written as JSON, dicts of arrays and numbers."""
        return {json.dumps(kind): table.state_dict() for kind, table in self._tables.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned: ids that are gone are dropped, those not in it are new.

        ValueError, and no change, where this is no such state.
        """
        least = self._normalize == "store"
        tables = {kind_of(kind): PriorityTable.loaded(table, self._alpha, least) for kind, table in state.items()}
        self._tables = tables


class PrioritizedOfEnough(Prioritized):
    """`Prioritized`, for batches of no more items than there are ids."""

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids; NotEnoughData where the population has fewer."""
        check_enough(population, size)
        return super().draw(population, size, rng)


def sequence_error(td_error: Any, loss_mask: Any, eta: float) -> Floats:
    """Return one error a sequence, eta · max |td| + (1 - eta) · mean |td| (Kapturowski et al. 2019, section 2.3).

    `td_error` is (batch, length) float; `loss_mask`, (batch, length) bool, tells which steps count. The result is
    (batch,) float64, 0 for a sequence of which no step counts. ValueError where the shapes differ, or an error that
    counts is not finite.
    """
    counts = np.asarray(loss_mask, bool)
    error = np.abs(np.asarray(td_error, np.float64))
    if error.ndim != 2 or error.shape != counts.shape:
        raise ValueError(
            f"td_error must be (batch, length) as loss_mask, {list(counts.shape)}, not {list(error.shape)}"
        )
    error = np.where(counts, error, 0.0)
    if not np.isfinite(error).all():
        row, step = np.argwhere(~np.isfinite(error))[0]
        raise ValueError(f"td_error[{row}, {step}] is {error[row, step]}: nothing was updated")
    largest = error.max(axis=1, initial=0.0)
    mean = error.sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
    found: Floats = eta * largest + (1.0 - eta) * mean
    return found
