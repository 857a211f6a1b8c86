"""One shard: the store of a node, and the samplers of this store that all trainers share."""

import logging
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.interop.ray.messages import TOLD, Form, Joined, Part, Reply, Request, Target, Update, take_apart
from diskreplay.interop.ray.supported import check_schema

_logger = logging.getLogger("diskreplay")

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


class PrioritySaver:
    """Saves updated priorities every `every_s` seconds in a thread. The first call of `follow` starts this thread.

    Other threads may use the samplers and the store during a save. A failed save does not stop draws. The error is
    logged, and the next call of `follow` or `close` raises it.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s, self._end = every_s, threading.Event()
        self._followed: dict[str, tuple[SharedSampler, int]] = {}
        self._thread: threading.Thread | None = None
        self._saving = threading.Lock()
        self._failed: Exception | None = None

    def follow(self, store: dr.Store, saved: str, shared: SharedSampler) -> None:
        """Begin to save the priorities of a sampler in the store, under the name ``saved``.

        If the same run of training has saved priorities under this name, they are loaded. Saved priorities of another
        run are deleted. The store's note ``{saved}.run`` names the run of training that saved the priorities.
        """
        self._raise()
        if saved in self._followed:
            return
        note = f"{saved}.run"
        if store.read_note(note) == {"run": shared.run}:
            try:
                shared.load(saved)
            except dr.StoreNotFound:
                pass  # the priorities have never been saved
        else:
            try:
                store.delete_sampler_state(saved)
            except dr.StoreNotFound:
                pass
            store.write_note(note, {"run": shared.run})
        self._followed[saved] = shared, shared.updates
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="diskreplay-priorities", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            try:
                self.save()
            except Exception as error:
                _logger.error("priorities were not saved, and would be lost if this shard died: %s", error)
                self._failed = error

    def save(self) -> None:
        with self._saving:
            self._save()

    def _save(self) -> None:
        for saved, (shared, updates) in list(self._followed.items()):
            now = shared.updates
            if now != updates:
                shared.save(saved)
                self._followed[saved] = shared, now

    def _raise(self) -> None:
        if (error := self._failed) is not None:
            self._failed = None
            raise error

    def close(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self.save()
        self._raise()


_Found = TypeVar("_Found")


class JoinNeeded(dr.ReplayError):
    """The shard was restarted, or another trainer changed the sampler: the trainer must join the shard again."""


class Shard:
    """Draws from one store for trainers, one call at a time.

    A shard holds one `SharedSampler` for each sampler name, so all trainers with the same name share the priorities.
    The priorities are saved in the store, as `samplers/ray-NAME`, at most about `save_s` seconds after an update. An
    actor that dies loses only the updates after the last save.
    """

    def __init__(self, path: str, save_s: float = 10.0, node: str = "") -> None:
        self._path, self._node = path, node
        self._store: dr.Store | None = None
        self._shared: dict[str, SharedSampler] = {}
        self._saver = PrioritySaver(save_s)

    def join(self, name: str, target: Target, run: str, seed: int) -> Joined:
        """Open the store, and make the sampler of this name if it does not exist.

        A new sampler continues with the priorities that the same `run` has saved under this name. Saved priorities of
        another run are deleted.
        """
        store = self._opened()
        shared = self._shared.get(name)
        if shared is None:
            shared = SharedSampler(store, target, run, seed)
            self._follow(store, name, shared)
            self._shared[name] = shared
        elif (found := shared.difference(target)) is not None:
            raise ValueError(
                f"the sampler {name!r} of {self._path} has {found}: give yours another name, or the same arguments"
            )
        return Joined(store.uuid, store.schema, self._node, shared.run, shared.version, *shared.mass())

    def _follow(self, store: dr.Store, name: str, shared: SharedSampler) -> None:
        if shared.prioritized is not None:
            self._saver.follow(store, f"ray-{name}", shared)

    def _opened(self) -> dr.Store:
        if self._store is None:
            store = dr.open(self._path, "a")
            check_schema(store.schema)
            self._store = store
        return self._store

    def draw(self, request: Request) -> Reply:
        shared = self._of(request.name, request.version)
        skipped = sum(shared.update(update) for update in request.updates)
        try:
            part = shared.draw(request.sizes, request.ids_only) if any(request.sizes) else None
        except dr.NotEnoughData:
            part = None
        mass, population = shared.mass() if part is None else (part.mass, part.population)
        return Reply(part, mass, population, skipped)

    def gather(self, name: str, ids: NDArray[np.int64]) -> tuple[Form, list[NDArray[Any]]]:
        return self._of(name).gather(ids)

    def set_target(self, name: str, target: Target) -> int:
        """Change the view or distribution of a sampler for all its trainers. Return the sampler's new version."""
        shared = self._of(name)
        version = shared.set_target(target)
        self._follow(self._opened(), name, shared)
        self._saver.save()  # a restarted shard loads these priorities, so they must belong to the new view
        return version

    def with_sampler(self, name: str, function: Callable[[dr.Sampler], _Found]) -> _Found:
        return function(self._of(name).sampler)

    def with_store(self, function: Callable[[dr.Store], _Found]) -> _Found:
        store = self._opened()
        store.refresh()
        return function(store)

    def close(self) -> None:
        self._saver.close()
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _of(self, name: str, version: int | None = None) -> SharedSampler:
        shared = self._shared.get(name)
        if shared is None or (version is not None and version != shared.version):
            raise JoinNeeded(f"the sampler {name!r} of {self._path} is new or was changed: join it again")
        return shared
