"""Shards in this process, in place of actors of Ray: calls are answered at once, or never.

`ShardedSampler` is the public class: its public name needs Ray.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import diskreplay as dr
from diskreplay.interop.ray.shard import JoinNeeded, Shard
from diskreplay.interop.ray.shard_group import Lost as Lost, ShardGroup
from diskreplay.interop.ray.sharded_sampler import ShardedSampler as ShardedSampler

SCHEMA = dr.Schema(obs=dr.Field((3,), "float32"), action=dr.Field((), "int64"))
NODE = "this node"


class Answer:
    """What a call returned or raised. A call of a silent shard waits until it answers again."""

    def __init__(self, handle: Handle, call: Callable[[], Any]) -> None:
        self._handle, self._call = handle, call
        self._done = False
        self.value: Any = None
        self.error: Exception | None = None
        self.there  # noqa: B018  # which makes the call

    @property
    def there(self) -> bool:
        if not self._done and not self._handle.silent:
            self._done = True
            try:
                self.value = self._call()
            except Exception as error:
                self.error = error
        return self._done


class Calls:
    """Tells answers apart as `RayCalls` does. `waits` are the timeouts of the waits that were in vain."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def wait(self, refs: Sequence[Answer], timeout_s: float) -> list[Answer]:
        ready = [ref for ref in refs if ref.there]
        if len(ready) < len(refs) and timeout_s:
            self.waits.append(timeout_s)
        return ready

    def answer(self, ref: Answer, timeout_s: float) -> Any:
        if not ref.there:
            raise Lost(f"no answer in {timeout_s:g} s")
        if isinstance(ref.error, JoinNeeded):
            raise Lost(str(ref.error)) from None
        if ref.error is not None:
            raise ref.error
        return ref.value

    def node(self) -> str:
        return NODE


class Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *arguments: Any) -> Answer:
        handle, sent = self._handle, copy.deepcopy(arguments)  # as what is sent is another object
        return Answer(handle, lambda: handle.call(self._name, sent))


class Handle:
    def __init__(self, shard: Shard) -> None:
        self.shard: Shard | None = shard
        self.silent, self.calls = False, 0

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self.shard is None:
            raise Lost("the actor died")
        self.calls += 1
        return getattr(self.shard, name)(*arguments)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class InProcess(ShardGroup):
    """Shards over stores at these paths. One that was killed is made again by `renew`, as Ray restarts an actor."""

    def __init__(self, paths: Sequence[Path], save_s: float = 3600.0, node: str = "another node") -> None:
        self._save_s, self._node = save_s, node
        self.handles: dict[int, Handle] = {}
        self.down: set[int] = set()  # shards whose nodes do not answer, whatever is started there
        super().__init__([(str(path), f"address {i}") for i, path in enumerate(paths)], Calls())

    def make_actor(self, shard: int) -> Any:
        handle = self.handles.get(shard)
        if handle is None or handle.shard is None:
            handle = self.handles[shard] = Handle(Shard(self.places[shard][0], self._save_s, self._node))
        handle.silent = shard in self.down
        return handle

    def answer_again(self, shard: int) -> None:
        """End the silence of a shard, and of its node."""
        self.down.discard(shard)
        self.handles[shard].silent = False

    def kill(self, shard: int) -> None:
        """End a shard as SIGKILL does: nothing is saved."""
        handle = self.handles[shard]
        assert handle.shard is not None
        handle.shard._saver._followed.clear()
        handle.shard.close()
        handle.shard = None

    def close(self) -> None:
        super().close()
        for handle in self.handles.values():
            if handle.shard is not None:
                handle.shard.close()


def make_stores(folder: Path, steps: Sequence[int]) -> list[Path]:
    """Make a store with so many steps for each shard: obs are the number of the shard, and rewards that of the step."""
    paths = []
    for shard, count in enumerate(steps):
        paths.append(folder / f"shard{shard}")
        with dr.create(paths[-1], SCHEMA, segment_steps="episode"):
            pass
        if count:
            append(paths[-1], shard, count)
    return paths


def append(path: Path, shard: int, count: int) -> None:
    """Append an episode of so many steps."""
    with dr.open(path, "a") as store, store.writer() as writer:
        obs = np.full((count + 1, 3), shard, np.float32)
        writer.append_episode(obs, np.arange(count), np.arange(count, dtype=np.float32), terminated=True)
