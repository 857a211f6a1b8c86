"""A group of shards, and the interface of the library that calls the shards, such as Ray."""

from collections.abc import Sequence
from typing import Any, Protocol, Self

import diskreplay as dr

_START_S = 120.0  # seconds to wait for an answer: a new process first imports torch


class Lost(Exception):
    """A shard does not answer; the message says why."""


class Calls(Protocol):
    """Waits for the results of calls to shards. A call returns a reference: ``ref = actor.method.remote(...)``."""

    def wait(self, refs: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return the references whose results arrive within `timeout_s`."""
        ...

    def answer(self, ref: Any, timeout_s: float) -> Any:
        """Return the result of a call, or raise the call's error. Raise Lost if no result arrives in `timeout_s`."""
        ...

    def node(self) -> str: ...


class ShardGroup:
    """The shards, numbered from 0: the path of each store, the address of its node, and its actor."""

    calls: Calls

    def __init__(self, places: Sequence[tuple[str, str]], calls: Calls) -> None:
        self._places, self.calls = list(places), calls
        self._schema: dr.Schema | None = None
        self._actors = [self.make_actor(shard) for shard in range(len(self._places))]

    def make_actor(self, shard: int) -> Any:
        """Return the actor of a shard; make it if it does not exist."""
        raise NotImplementedError(f"{type(self).__name__} must define make_actor")

    def actor(self, shard: int) -> Any:
        if not self._actors:
            raise dr.Closed("this store is closed; make another")
        return self._actors[shard]

    def renew(self, shard: int) -> None:
        """Replace the kept handle of a shard's actor by a new one, since the old actor may be dead."""
        found = self.make_actor(shard)
        # If the actor is the same, keep the first handle: Ray ends an actor when its first handle is deleted, even if
        # other handles exist.
        if found != self._actors[shard]:
            self._actors[shard] = found

    @property
    def places(self) -> list[tuple[str, str]]:
        """The path and the node address of each shard, by shard number."""
        return list(self._places)

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self._places)

    @property
    def schema(self) -> dr.Schema:
        """The schema of the stores. Only the first use of this attribute calls a shard."""
        if self._schema is None:
            (self._schema,) = self._asked(lambda store: store.schema, [0])
        return self._schema

    def __len__(self) -> int:
        """Return the number of steps in all shards. This calls every shard."""
        return sum(self._asked(len, range(self.num_shards)))

    def __bool__(self) -> bool:
        """Return True, even if there are no steps."""
        return True

    def info(self) -> list[dict[str, Any]]:
        """Return `Store.info()` of each shard's store."""
        return self._asked(lambda store: store.info(), range(self.num_shards))

    def _asked(self, function: Any, shards: Sequence[int]) -> list[Any]:
        refs = [self.actor(shard).with_store.remote(function) for shard in shards]
        try:
            return [self.calls.answer(ref, _START_S) for ref in refs]
        except Lost as error:
            raise dr.ReplayError(f"a shard does not answer: {error}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[f'{address}:{path}' for path, address in self._places]})"

    def close(self) -> None:
        """Release the actors of the shards."""
        self._actors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
