"""A trainer's link to one shard."""

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.interop.ray.messages import Form, Joined, Part, Reply, Request, Target, Update, joined_updates
from diskreplay.interop.ray.shard import SharedSampler
from diskreplay.interop.ray.shard_group import Lost, ShardGroup


class LocalShard:
    """Reads the store of a shard on the trainer's own node, without the shard's actor.

    `draws` is True if this object also draws ids. It draws uniformly, because only the actor has the priorities.
    """

    def __init__(self, store: dr.Store, target: Target, seed: int) -> None:
        self._store, self._seed = store, seed
        self.draws, self._reading = self._read_by(target)

    @classmethod
    def opened(cls, path: str, uuid: str, target: Target, seed: int) -> Self | None:
        """Open the store at a path. Return None if the store cannot be opened or has another UUID."""
        try:
            store = dr.open(path)
        except (OSError, dr.ReplayError):
            return None
        if store.uuid != uuid:
            store.close()
            return None
        return cls(store, target, seed)

    def set_target(self, target: Target) -> None:
        self._reading.close()
        self.draws, self._reading = self._read_by(target)

    def _read_by(self, target: Target) -> tuple[bool, SharedSampler]:
        draws = not target.distribution.weighted
        uniform = target._replace(distribution=dr.Uniform(), where=target.where if draws else None)
        return draws, SharedSampler(self._store, uniform, run="", seed=self._seed)

    def mass(self) -> tuple[float, int]:
        """Return the mass and the population: twice the same number of drawable ids."""
        return self._reading.mass()

    def draw(self, size: int) -> Part:
        return self._reading.draw([size], ids_only=False)

    def gather(self, ids: NDArray[np.int64]) -> tuple[Form, list[NDArray[Any]]]:
        return self._reading.gather(ids)

    def close(self) -> None:
        self._reading.close()
        self._store.close()


_RETRY_S = 0.25
_CALL_S = 120.0  # The seconds that a shard may take to save, load or gather.
_FETCH_S = 10.0  # The seconds that the copy of an answer from another node may take.

_Found = TypeVar("_Found")


class Asked(NamedTuple):
    """A request to a shard. `ref` refers to the answer. `updated` is the number of ids in the request's updates."""

    ref: Any
    sent: float
    updated: int


class ShardLink:
    """One trainer's link to one shard. Not thread-safe: the sampler holds its lock during each call.

    `mass` and `population` are the last values that the shard reported, and 0 while the shard is missing. `heard` is
    the time of the last report. `local` reads the shard's store directly; `local` is None if the store is on another
    node. `lost` is the reason why the shard is missing, and None while the shard answers. A ping is a request without
    items. It sends the waiting updates of priorities, and the answer reports the mass.
    """

    def __init__(self, group: ShardGroup, shard: int, name: str, run: str, seed: int, direct: bool) -> None:
        self.shard, self.place = shard, group.places[shard]
        self._group, self._name, self._run, self._seed, self._direct = group, name, run, seed, direct
        self._calls = group.calls
        self.mass, self.population, self.heard = 0.0, 0, 0.0
        self.lost: str | None = "it was not joined yet"
        self.since = monotonic()
        self.joined: Joined | None = None
        self.local: LocalShard | None = None
        self._joining: Any = None
        self._next_attempt = 0.0
        self._pings: deque[Asked] = deque()
        self._pending: list[Update] = []
        self.messages = self.updates_sent = self.updates_lost = self.skipped = 0
        self._pending_since = 0.0
        self.oldest_update_s = 0.0

    # --- joining -----------------------------------------------------------------------------------------------------

    def begin_join(self, target: Target) -> None:
        """Call `Shard.join` without waiting for the answer."""
        self._joining = self._actor.join.remote(self._name, target, self._run, self._seed)
        self.messages += 1

    def end_join(self, target: Target, timeout_s: float) -> None:
        """Wait for the answer to `begin_join`. Raises the shard's error, or Lost if no answer comes in time."""
        joining, self._joining = self._joining, None
        joined: Joined = self._calls.answer(joining, timeout_s)
        if self.joined is not None and self.joined.uuid != joined.uuid:
            raise Lost(f"{self.place[0]} is no longer the same store")
        if self.joined is None and self._direct and joined.node == self._calls.node():
            self.local = LocalShard.opened(self.place[0], joined.uuid, target, self._seed)
        self.joined, self._run, self.lost = joined, joined.run, None
        self.hear(joined.mass, joined.population)

    def poll(self, target: Target, deadline_s: float) -> None:
        """Handle the answers to pings that arrived, and try to join a missing shard again, without waiting."""
        while self._pings and self._is_there(self._pings[0].ref):
            self.take(self._pings.popleft())
        now = monotonic()
        if self._pings and now - self._pings[0].sent > deadline_s:
            self.lose(f"silent for {deadline_s:g} s")
        if self.lost is None:
            return
        if self._joining is not None and self._is_there(self._joining):
            try:
                self.end_join(target, _FETCH_S)
            except Exception as error:
                self.lost = str(error)
                self._next_attempt = now + _RETRY_S
        elif self._joining is None and now >= self._next_attempt:
            self._group.renew(self.shard)
            self.begin_join(target)

    def lose(self, reason: str) -> None:
        """Leave the shard out of draws until the link joins the shard again.

        Updates of priorities are lost if they still wait for a request, or if their ping has no answer yet.
        """
        if self.lost is None:
            self.lost, self.since = reason, monotonic()
            self.mass, self.population = 0.0, 0
            self._next_attempt = 0.0
        self.updates_lost += sum(asked.updated for asked in self._pings)
        self.updates_lost += sum(len(update.ids) for update in self._pending)
        self._pings.clear()
        self._pending.clear()

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, sizes: list[int]) -> Asked:
        assert self.joined is not None
        updates, self._pending = joined_updates(self._pending), []
        now = monotonic()
        if updates:
            self.oldest_update_s = max(self.oldest_update_s, now - self._pending_since)
        request = Request(self._name, self.joined.version, sizes, updates, self.local is not None)
        self.messages += 1
        updated = sum(len(update.ids) for update in updates)
        return Asked(self._actor.draw.remote(request), now, updated)

    def ask_mass(self) -> None:
        """Read the shard's mass from `local`, or request the mass by a ping if no earlier ping waits for its answer."""
        if self.local is not None and self.local.draws:
            self.hear(*self.local.mass())
        elif not self._pings:
            self.send_updates()

    def send_updates(self) -> None:
        self._pings.append(self.ask([]))

    def hear(self, mass: float, population: int) -> None:
        self.mass, self.population, self.heard = mass, population, monotonic()

    @property
    def pinged(self) -> bool:
        return bool(self._pings)

    def take(self, asked: Asked) -> Reply | None:
        """Return the answer to a request, and record the reported mass. Return None if the shard does not answer."""
        try:
            reply: Reply = self._calls.answer(asked.ref, _FETCH_S)
        except Lost as error:
            self.updates_lost += asked.updated
            self.lose(str(error))
            return None
        if self.lost is None:
            self.hear(reply.mass, reply.population)
        self.updates_sent += asked.updated
        self.skipped += reply.skipped
        return reply

    def gather(self, ids: NDArray[np.int64]) -> tuple[Form, list[NDArray[Any]]]:
        if self.local is not None:
            return self.local.gather(ids)
        found: tuple[Form, list[NDArray[Any]]] = self._waited(self._actor.gather.remote(self._name, ids))
        return found

    def set_target(self, target: Target) -> None:
        """Change the view or distribution in the shard. A missing shard gets the new target when it is joined again."""
        if self.local is not None:
            self.local.set_target(target)
        if self.lost is None and self.joined is not None:
            version = self._waited(self._actor.set_target.remote(self._name, target))
            self.joined = self.joined._replace(version=version)

    def with_sampler(self, function: Callable[[dr.Sampler], _Found]) -> _Found:
        """Return the result of ``function(sampler)`` in the shard. Raises ReplayError if the shard does not answer."""
        found: _Found = self._waited(self._actor.with_sampler.remote(self._name, function))
        return found

    def with_store(self, function: Callable[[dr.Store], _Found]) -> _Found:
        found: _Found = self._waited(self._actor.with_store.remote(function))
        return found

    @property
    def _actor(self) -> Any:
        return self._group.actor(self.shard)

    def _waited(self, ref: Any) -> Any:
        self.messages += 1
        try:
            return self._calls.answer(ref, _CALL_S)
        except Lost as error:
            self.lose(str(error))
            raise dr.ReplayError(
                f"shard {self.shard} ({self.place[0]} on {self.place[1]}) does not answer: {error}"
            ) from None

    def stats(self) -> dict[str, Any]:
        path, address = self.place
        found = {
            "path": path,
            "address": address,
            "mass": self.mass,
            "population": self.population,
            "missing": self.lost,
        }
        return found if self.lost is None else {**found, "missing_s": monotonic() - self.since}

    # --- updates -----------------------------------------------------------------------------------------------------

    def update(self, update: Update) -> None:
        """Keep an update for the next request. If the shard is missing, count the update's ids as lost."""
        if self.lost is not None:
            self.updates_lost += len(update.ids)
            return
        if not self._pending:
            self._pending_since = monotonic()
        self._pending.append(update)

    def update_age(self) -> float:
        """Return how long the oldest update of priorities has waited, in seconds; 0 if no update waits."""
        return monotonic() - self._pending_since if self._pending else 0.0

    def close(self) -> None:
        if self._pending and self.lost is None:
            try:
                self._waited(self.ask([]).ref)
            except dr.ReplayError:
                pass  # the updates are lost with the shard
        if self.local is not None:
            self.local.close()
            self.local = None

    def _is_there(self, ref: Any) -> bool:
        return bool(self._calls.wait([ref], 0.0))
