"""One shard: the store of a node, and the samplers of this store that all trainers share."""

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.interop.ray.messages import Form, Joined, Reply, Request, Target
from diskreplay.interop.ray.shared_sampler import SharedSampler
from diskreplay.interop.ray.supported import check_schema

_logger = logging.getLogger("diskreplay")


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
