"""Draw batches from all shards that answer.

The mass of a shard is its number of drawable ids or, if ids are drawn by priorities, the sum of their priorities. A
batch is divided among the shards in proportion to their masses, and each shard draws its part. A round is one or more
batches that are requested together, in one message to each shard. If a shard does not answer, the other shards draw
the part of this shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.interop.ray.messages import Part, Target, put_together
from diskreplay.interop.ray.shard_group import Calls
from diskreplay.interop.ray.shard_link import Asked, ShardLink

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def split_batch(rng: np.random.Generator, size: int, masses: Floats) -> Ints:
    """Return the number of items that each shard draws for a batch, (shards,): one multinomial draw by `masses`.

    Each mass is finite and at least 0, and at least one mass is above 0.
    """
    counts: Ints = rng.multinomial(size, masses / masses.sum())
    return counts


def chances(within: Floats, mass: float, total: float) -> Floats:
    """Return the probability of each item of one shard among the items of all shards, (n,).

    `within` is the probability of each item among the shard's own ids when the shard drew. `mass` is the mass of the
    shard, and `total` the sum of all masses, when the trainer divided the batch. The result is exact even if these
    masses are old, since the trainer divided the batch by these masses.
    """
    found: Floats = within * (mass / total)
    return found


def importance_weights(drawn: Floats, beta: float) -> NDArray[np.float32]:
    """Return (N · P(i)) ** -beta, divided by the largest weight of the batch (Schaul et al. 2016, section 3.4).

    `drawn`, (n,), has the probability P(i) of each item, above 0. The number of ids N cancels out.
    """
    if not len(drawn):
        return np.zeros(0, np.float32)
    found: NDArray[np.float32] = ((drawn.min() / drawn) ** beta).astype(np.float32)
    return found


# Each answer of a shard reports the mass. If the reported mass is older than this number of seconds, the mass is
# requested again.
MASS_AGE_S = 0.1
_PAUSE_S = 0.01
_ATTEMPTS = 100  # an attempt fails if a shard is lost or emptied during the draw


class Given(NamedTuple):
    """One shard's part of a batch. `mass` was the shard's mass when the batch was divided."""

    shard: int
    mass: float
    part: Part


class Drawn(NamedTuple):
    """The shards' parts of one batch. `total` is the sum of all shards' masses when the batch was divided."""

    given: list[Given]
    total: float


@dataclass(eq=False)
class Round:
    """One or more batches that are requested together.

    `counts`, (batches, shards), has the number of items that each shard draws for each batch. `masses`, (shards,), has
    the masses by which the batches were divided. `asked` has the requests without an answer, by shard number. `parts`
    has each shard's answer, by shard number: the shard's parts of all batches, joined as one part. `next` is the
    number of the next batch in the round, from 0.
    """

    masses: NDArray[np.float64]
    counts: NDArray[np.int64]
    asked: dict[int, Asked] = field(default_factory=dict)
    parts: dict[int, Part | None] = field(default_factory=dict)
    next: int = 0


class DrawRounds:
    """Draws batches of a `Target` from shards. Not thread-safe: the sampler holds its lock during each call.

    A shard that does not answer within `deadline_s` is left out until it answers again. The other shards draw the
    missing part of a batch. This part is divided in proportion to the masses by which the batch was divided. So the
    probability of an item is the same as if the whole batch had been divided among the shards that answer. If no shard
    answers, a draw waits up to `patience_s` for an answer.
    """

    def __init__(
        self, links: Sequence[ShardLink], calls: Calls, target: Target, seed: Any, deadline_s: float, patience_s: float
    ) -> None:
        self.links, self._calls, self.target = links, calls, target
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self._deadline_s, self._patience_s = deadline_s, patience_s
        self.nbytes = self.redrawn = 0
        self.seconds_waiting = 0.0

    def poll(self) -> None:
        """Handle the answers that arrived, try to join missing shards, and request masses older than `MASS_AGE_S`."""
        now = monotonic()
        for link in self.links:
            link.poll(self.target, self._deadline_s)
            if link.lost is None and now - link.heard > MASS_AGE_S:
                link.ask_mass()

    def refresh(self) -> None:
        """Request the masses of all shards, and wait up to `deadline_s` for the answers."""
        self.poll()
        for link in self.links:
            if link.lost is None:
                link.ask_mass()
        until = monotonic() + self._deadline_s
        while any(link.pinged for link in self.links) and monotonic() < until:
            sleep(_PAUSE_S / 10)
            for link in self.links:
                link.poll(self.target, self._deadline_s)

    def begin(self, sizes: Sequence[int]) -> Round:
        masses = self._masses()
        found = Round(masses, np.stack([split_batch(self.rng, size, masses) for size in sizes]))
        self._ask(found)
        return found

    def _masses(self) -> NDArray[np.float64]:
        """Return each shard's mass, (shards,); 0 for a missing shard.

        Raises NotEnoughData if the shards that answer have no drawable ids, and ReplayError if no shard answers for
        `patience_s`.
        """
        until = monotonic() + self._patience_s
        while True:
            masses = np.array([link.mass for link in self.links])
            if masses.any():
                return masses
            self.refresh()
            if any(link.mass for link in self.links):
                continue
            reasons = [link.lost for link in self.links if link.lost is not None]
            if len(reasons) < len(self.links):
                missing = f", and {len(reasons)} more do not answer" if reasons else ""
                raise dr.NotEnoughData(
                    f"{len(self.links) - len(reasons)} shards have 0 steps sampleable as {self.target.view}{missing}; "
                    "1 is needed"
                )
            if monotonic() > until:
                raise dr.ReplayError(
                    f"no shard has answered for {self._patience_s:g} s; the error of the first shard: {reasons[0]}"
                )
            sleep(_PAUSE_S)

    def _ask(self, found: Round) -> None:
        for shard in np.flatnonzero(found.counts.any(axis=0)).tolist():
            link = self.links[shard]
            if link.lost is None and not (link.local is not None and link.local.draws):
                found.asked[shard] = link.ask(found.counts[:, shard].tolist())

    def drop(self, found: Round) -> None:
        self._collect(found)

    def _collect(self, found: Round) -> None:
        """Wait for the answers to a round, and put them into `found.parts`.

        A shard that does not answer within `deadline_s` is left out of later draws.
        """
        if not found.asked:
            return
        started = monotonic()
        refs = {asked.ref: shard for shard, asked in found.asked.items()}
        # Do not wait for shards that are known to be missing.
        lost = [ref for ref, shard in refs.items() if self.links[shard].lost is not None]
        ready = self._calls.wait(lost, 0.0) if lost else []
        if len(lost) < len(refs):
            ready = [*ready, *self._calls.wait([ref for ref in refs if ref not in lost], self._deadline_s)]
        self.seconds_waiting += monotonic() - started
        for ref in ready:
            shard = refs[ref]
            reply = self.links[shard].take(found.asked[shard])
            if reply is not None:
                self.nbytes += 0 if reply.part is None else reply.part.nbytes
                found.parts[shard] = self._read(shard, reply.part)
        for ref in refs.keys() - set(ready):
            link = self.links[refs[ref]]
            link.lose(f"silent for {self._deadline_s:g} s")
            link.updates_lost += found.asked[refs[ref]].updated
        found.asked.clear()

    def next(self, found: Round) -> Drawn:
        """Return the next batch of a round, or a new batch if other shards cannot draw the part of a lost shard."""
        at = found.next
        found.next += 1
        self._collect(found)
        drawn = self._completed(found, at)
        size = int(found.counts[at].sum())
        for _ in range(_ATTEMPTS):
            if drawn is not None:
                return drawn
            again = self.begin([size])
            self._collect(again)
            drawn = self._completed(again, 0)
        raise dr.ReplayError(f"shards were lost faster than a batch could be drawn, {_ATTEMPTS} times")

    def _completed(self, found: Round, at: int) -> Drawn | None:
        """Return batch number `at` of a round. Other shards draw the parts of lost shards.

        Return None if the other shards cannot draw these parts. Then the whole batch must be drawn again.
        """
        given = self._given(found, at)
        gave = {one.shard for one in given}
        wanted = set(np.flatnonzero(found.counts[at]).tolist())
        out = [shard for shard in range(len(self.links)) if shard in wanted - gave]
        masses = found.masses.copy()
        masses[out] = 0.0
        rest = int(found.counts[at].sum()) - sum(len(one.part.ids) for one in given)
        if rest:
            masses[[link.lost is not None and link.shard not in gave for link in self.links]] = 0.0
            if not masses.any():
                return None
            self.redrawn += rest
            more = Round(masses, split_batch(self.rng, rest, masses)[None])
            self._ask(more)
            self._collect(more)
            others = self._given(more, 0)
            if sum(len(one.part.ids) for one in others) < rest:
                return None
            given += others
        return Drawn(sorted(given, key=lambda one: one.shard), float(masses.sum()))

    def _given(self, found: Round, at: int) -> list[Given]:
        given = []
        for shard in np.flatnonzero(found.counts[at]).tolist():
            part = self._part(found, at, shard)
            if part is not None:
                given.append(Given(shard, float(found.masses[shard]), part))
        return given

    def _part(self, found: Round, at: int, shard: int) -> Part | None:
        link = self.links[shard]
        if link.local is not None and link.local.draws:
            try:
                part = link.local.draw(int(found.counts[at, shard]))
            except dr.NotEnoughData:
                return None
            link.hear(part.mass, part.population)
            return part
        whole = found.parts.get(shard)
        if whole is None:
            return None
        start = int(found.counts[:at, shard].sum())
        return whole.cut(start, start + int(found.counts[at, shard]))

    def _read(self, shard: int, part: Part | None) -> Part | None:
        """Return a part with its fields; None if an id was evicted.

        If the shard sent only ids, read the fields here.
        """
        local = self.links[shard].local
        if part is None or part.leaves is not None or local is None:
            return part
        try:
            form, leaves = local.gather(part.ids)
        except (dr.InvalidIndex, dr.SegmentGone):  # an id was evicted: other shards draw this part
            return None
        return part._replace(form=form, leaves=leaves)

    def to_batch(self, drawn: Drawn, beta: float | None, told: Sequence[str], *, pinned: bool) -> dr.Batch:
        given, sizes = drawn.given, [len(one.part.ids) for one in drawn.given]
        probability = np.concatenate(
            [
                chances(_within(one.part.within, one.part.population, size), one.mass, drawn.total)
                for one, size in zip(given, sizes, strict=True)
            ]
        )
        index = np.empty((sum(sizes), 2), np.int64)
        index[:, 0] = np.repeat([one.shard for one in given], sizes)
        index[:, 1] = np.concatenate([one.part.ids for one in given])
        weight = np.ones(len(index), np.float32) if beta is None else importance_weights(probability, beta)
        form = next(one.part.form for one in given if one.part.form is not None)
        fields = put_together(form, [one.part.leaves or [] for one in given], pinned)
        known = {"probability": probability, **(self._totals(given, len(index)) if told else {})}
        fields |= {"index": index, "weight": weight, **{name: known[name] for name in told}}
        return dr.Batch(fields, ("sharded", *self.target.view.kind))

    def _totals(self, given: Sequence[Given], size: int) -> dict[str, NDArray[Any]]:
        parts = {one.shard: (one.part.mass, one.part.population) for one in given}
        known = [parts.get(link.shard, (link.mass, link.population)) for link in self.links]
        total = sum(mass for mass, _ in known) if self.target.distribution.weighted else np.nan
        return {"population": np.full(size, sum(count for _, count in known)), "priority_sum": np.full(size, total)}


def _within(probabilities: NDArray[np.float64] | None, count: int, size: int) -> NDArray[np.float64]:
    return np.full(size, 1.0 / count) if probabilities is None else probabilities
