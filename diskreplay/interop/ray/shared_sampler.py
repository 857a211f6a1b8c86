"""The sampler of one name in one shard, which all trainers with this name share."""

import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.interop.ray.messages import TOLD, Form, Part, Target, Update, take_apart

_ATTEMPTS = 100  # an attempt fails if a drawn id is evicted before its fields are gathered
_SKIPPED_DRAWS = 256


class SharedSampler:
    """Draws items, and reports the shard's mass and population with each draw. Only `prioritized` is thread-safe.

    A private `Sampler` gathers fields, and draws ids uniformly. `prioritized` is a second `Sampler`: it draws ids by
    priorities and gathers nothing, since trainers on the same node need only ids. `prioritized` is None until a target
    has a distribution by priorities, and keeps the priorities even if a later target draws uniformly.

    `run` is a random text from the first trainer of a run. A shard compares this text with the text of saved
    priorities: in a later run, the two differ. `version` counts changes of view and distribution, and `updates` counts
    updates of priorities.
    """

    def __init__(self, store: dr.Store, target: Target, run: str, seed: int) -> None:
        self._store, self._target, self._seed = store, target, seed
        self.run, self.version, self.updates = run, 0, 0
        fields = ("...", "population") if target.fields is None else (*target.fields, "population")
        self._gathering = dr.Sampler(store, target.view, fields=fields, where=target.where, seed=seed)
        self.prioritized: dr.Sampler | None = None
        self._draw_by(target)

    def _draw_by(self, target: Target) -> None:
        view, distribution, _, where = target
        if not distribution.weighted:
            return
        if self.prioritized is None:
            self.prioritized = dr.Sampler(self._store, view, distribution, fields=TOLD, where=where, seed=self._seed)
        else:
            self.prioritized.distribution = distribution

    @property
    def sampler(self) -> dr.Sampler:
        return self.prioritized if self.prioritized is not None and self._weighted else self._gathering

    @property
    def _weighted(self) -> bool:
        return bool(self._target.distribution.weighted)

    def difference(self, target: Target) -> str | None:
        """Return the first field that differs from ``target``, with this sampler's value; None if no field differs."""
        for field in ("view", "distribution", "fields"):
            own = getattr(self._target, field)
            if _described(own) != _described(getattr(target, field)):
                return f"{field} {own}"
        return None

    def set_target(self, target: Target) -> int:
        self._gathering.view = target.view
        if self.prioritized is not None:
            self.prioritized.view = target.view
        self._draw_by(target)
        self._target = target
        self.version += 1
        self.updates += 1
        return self.version

    def load(self, saved: str) -> None:
        """Load the priorities that were saved under a name. Raises StoreNotFound if nothing was saved."""
        if self.prioritized is None:
            return
        self.prioritized.load(saved)
        # Skip a random number of draws. Otherwise the sampler would draw again the batches that followed the save.
        if self.prioritized.sampleable:
            for _ in range(1 + secrets.randbelow(_SKIPPED_DRAWS)):
                self.prioritized.sample(1)

    def save(self, saved: str) -> None:
        if self.prioritized is not None:
            self.prioritized.save(saved)

    def update(self, update: Update) -> int:
        self.updates += 1
        sampler = self.sampler if self.prioritized is None else self.prioritized
        return sampler.update_priorities(update.ids, update.errors, update.kind)

    def mass(self) -> tuple[float, int]:
        """Return the shard's mass and the number of drawable ids.

        The mass is the number of drawable ids or, if ids are drawn by priorities, the sum of their priorities.
        """
        count = self.sampler.sampleable
        return (self.sampler.stats()["priority_sum"] if self._weighted and count else float(count)), count

    def draw(self, sizes: Sequence[int], ids_only: bool) -> Part:
        """Draw a part for each size in ``sizes``, and return the parts joined as one.

        Raises NotEnoughData if no id can be drawn.
        """
        for _ in range(_ATTEMPTS):
            batch = self.sampler.sample(sum(sizes))
            try:
                return self._part(batch, len(sizes) > 1, ids_only)
            except (dr.InvalidIndex, dr.SegmentGone):
                continue
        raise dr.SegmentGone(f"steps were evicted faster than they could be read, {_ATTEMPTS} times")

    def _part(self, batch: dr.Batch, several: bool, ids_only: bool) -> Part:
        ids, population = batch["index"].numpy(), int(batch["population"][0])
        if not self._weighted:
            form, leaves = self._apart(batch)
            return Part(ids, None, float(population), population, leaves, form)
        within, mass = batch["probability"].numpy(), float(batch["priority_sum"][0])
        if several:
            # A stratified draw returns sorted items, so shuffle the items before they are divided among batches. The
            # ids seed the shuffle, so that a loaded state continues with the same batches.
            order = np.random.Generator(np.random.PCG64(int(np.bitwise_xor.reduce(ids)))).permutation(len(ids))
            ids, within = ids[order], within[order]
        part = Part(ids, within, mass, population)
        if ids_only:
            return part
        form, leaves = self.gather(ids)
        return part._replace(form=form, leaves=leaves)

    def gather(self, ids: NDArray[np.int64]) -> tuple[Form, list[NDArray[Any]]]:
        return self._apart(self._gathering.gather(ids))

    def _apart(self, batch: dr.Batch) -> tuple[Form, list[NDArray[Any]]]:
        return take_apart(batch, TOLD, windows=isinstance(self._target.view, dr.Sequences))

    def close(self) -> None:
        self._gathering.close()
        if self.prioritized is not None:
            self.prioritized.close()


def _described(value: object) -> str:
    """Return the repr without memory addresses: functions of the same name are taken as equal."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
