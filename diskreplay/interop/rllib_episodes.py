"""Episodes of RLlib whose steps are in a store. A step is read when RLlib uses it."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.closing import Kept

with dr.MissingExtra.raised_for("a replay buffer of RLlib", "rllib"):
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

Array = NDArray[Any]
Path = tuple[str, ...]
Ids = array  # of int64


class StepReader:
    """Reads steps by their ids.

    A window is consecutive steps of an episode with all their fields. The reader keeps the last two windows, since
    RLlib reads one field after the other, each in the same steps.
    """

    def __init__(self, store: dr.Store, info_fields: tuple[str, ...], kept: Kept) -> None:
        self.schema, self.info_fields = store.schema, info_fields
        self.outputs = {name: tree for name, tree in self.schema.extra.items() if name not in info_fields}
        trees = {"obs": self.schema.obs, "next_obs": self.schema.obs, "action": self.schema.action, **self.schema.extra}
        self._paths = [path for name, tree in trees.items() for path in _paths(tree, (name,))]
        self._store = store
        # The sampler does not refresh the store, because `read` and `ids` refresh it if steps were added.
        self._sampler = dr.Sampler(store, dr.Transitions(n_step=1), fields=tuple(trees), seed=0, refresh=False)
        kept.append(self._sampler)
        self._windows: deque[tuple[bytes, dict[Path, Array]]] = deque(maxlen=2)
        self.outdated = False  # true if steps were added since the last refresh
        self.longest: int | None = None

    @contextmanager
    def at_most(self, steps: int | None) -> Iterator[None]:
        """In the ``with`` block, limit slices of a `Column` to `steps` steps; None: no limit.

        RLlib reads an episode to its end, but uses only the first steps.
        """
        self.longest = steps
        try:
            yield
        finally:
            self.longest = None

    def refresh(self) -> None:
        if self.outdated:
            self._store.refresh()
            self.outdated = False

    def ids(self) -> NDArray[np.int64]:
        self.refresh()
        return self._sampler.ids()

    def has_read(self, ids: "Ids[int]") -> bool:
        return any(known == ids.tobytes() for known, _ in self._windows)

    def read(self, path: Path, ids: "Ids[int]") -> Array:
        """Return the values of the field at ``path`` in the steps ``ids``, ``(len(ids), *shape)``."""
        key = ids.tobytes()
        for known, window in self._windows:
            if known == key:
                return window[path]
        self.refresh()
        batch = self._sampler.gather(np.asarray(ids, np.int64))
        # Copy the values: RLlib keeps samples for long, and later batches reuse the memory of this batch.
        window = {each: _below(batch, each).numpy().copy() for each in self._paths}
        self._windows.append((key, window))
        return window[path]


def _paths(tree: Any, path: Path) -> Iterator[Path]:
    if isinstance(tree, dr.Field):
        yield path
    else:
        for name, part in _parts(tree):
            yield from _paths(part, (*path, name))


def _parts(tree: Any) -> list[tuple[str, Any]]:
    return list(tree.items()) if isinstance(tree, Mapping) else [(str(i), part) for i, part in enumerate(tree)]


def _below(tree: Any, path: Path) -> Any:
    for name in path:
        tree = tree[name]
    return tree


class Steps:
    __slots__ = ("ids", "reader", "rewards")

    def __init__(self, reader: StepReader, ids: Any, rewards: Any) -> None:
        self.reader, self.ids, self.rewards = reader, array("q", ids), array("d", rewards)


class Column:
    """A field of an episode's steps. RLlib uses a column like an array. Indexing reads the rows."""

    __slots__ = ("_field", "_path", "_steps")
    more = 0  # rows of the column in addition to one row per step

    def __init__(self, steps: Steps, field: dr.Field | None = None, path: Path = ()) -> None:
        self._steps, self._field, self._path = steps, field, path

    def __len__(self) -> int:
        return len(self._steps.ids) + self.more

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            positions = range(len(self))[index]
            longest = self._steps.reader.longest
            if longest is not None:
                positions = positions[: longest + self.more]
            low, high = min(positions, default=0), max(positions, default=-1)
            return self._rows(low, high + 1)[:: positions.step]
        position = range(len(self))[index]
        return self._rows(position, position + 1)[0]

    def _rows(self, start: int, stop: int) -> Any:
        if start == stop:
            assert self._field is not None
            return np.empty((0, *self._field.shape), self._field.dtype)
        return self._steps.reader.read(self._path, self._steps.ids[start:stop])


class Observations(Column):
    __slots__ = ()
    more = 1

    def _rows(self, start: int, stop: int) -> Any:
        ids, reader = self._steps.ids, self._steps.reader
        if stop - start == 1:
            # This observation is also the next observation of the step before. That step may be in a kept window.
            before = ids[start - 1 : start]
            if start < len(ids) and not (start and reader.has_read(before)):
                return super()._rows(start, stop)
            return reader.read(("next_obs", *self._path[1:]), before)
        if stop == start:
            return super()._rows(start, stop)
        first, after = (reader.read((name, *self._path[1:]), ids[start : stop - 1]) for name in ("obs", "next_obs"))
        return np.concatenate([first, after[-1:]])


class Rewards(Column):
    __slots__ = ()

    def _rows(self, start: int, stop: int) -> Any:
        return np.array(self._steps.rewards[start:stop])


class Infos(Column):
    """Infos with the stored fields, one dict for each observation. The dict of the first observation is empty."""

    __slots__ = ()
    more = 1

    def _rows(self, start: int, stop: int) -> Any:
        reader = self._steps.reader
        infos: list[dict[str, Any]] = [{} for _ in range(start, stop)]
        ids = self._steps.ids[max(start - 1, 0) : max(stop - 1, 0)]
        for name in reader.info_fields if ids else ():
            for info, value in zip(infos[-len(ids) :], reader.read((name,), ids), strict=True):
                info[name] = value
        return infos


def _columns(kind: Callable[..., Column], steps: Steps, tree: Any, path: Path) -> Any:
    if isinstance(tree, dr.Field):
        return kind(steps, tree, path)
    parts = {name: _columns(kind, steps, part, (*path, name)) for name, part in _parts(tree)}
    return parts if isinstance(tree, Mapping) else tuple(parts.values())


class StoredEpisode(SingleAgentEpisode):  # type: ignore[misc]
    """A `SingleAgentEpisode`, or a chunk of an episode, with ids and rewards in memory and all other data in a store.

    `ids` and `rewards`, ``(T,)``, have an item for each step. ``kwargs`` are the arguments of `SingleAgentEpisode`
    other than the data of steps.
    """

    t: int
    is_terminated: bool
    is_truncated: bool

    def __init__(self, reader: StepReader, ids: Any, rewards: Any, **kwargs: Any) -> None:
        self._steps = steps = Steps(reader, ids, rewards)
        schema = reader.schema
        super().__init__(
            observations=InfiniteLookbackBuffer(_columns(Observations, steps, schema.obs, ("obs",))),
            infos=InfiniteLookbackBuffer(Infos(steps)),
            actions=InfiniteLookbackBuffer(_columns(Column, steps, schema.action, ("action",))),
            rewards=InfiniteLookbackBuffer(Rewards(steps, schema.reward)),
            extra_model_outputs={
                name: InfiniteLookbackBuffer(_columns(Column, steps, tree, (name,)))
                for name, tree in reader.outputs.items()
            },
            **kwargs,
        )

    @property
    def ids(self) -> NDArray[np.int64]:
        return np.array(self._steps.ids, np.int64)

    def concat_episode(self, other: Self) -> None:
        self._steps.ids.extend(other._steps.ids)
        self._steps.rewards.extend(other._steps.rewards)
        self.t, self.is_terminated, self.is_truncated = other.t, other.is_terminated, other.is_truncated
        self.custom_data.update(other.custom_data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the episode itself. RLlib's buffer copies each added episode, but nothing else uses the original."""
        return self

    def get_state(self) -> dict[str, Any]:
        """Return the ids and rewards of the steps, and RLlib's attributes. Other values of steps are in the store."""
        return {
            "id_": self.id_,
            "ids": self.ids,
            "rewards": np.array(self._steps.rewards),
            "agent_id": self.agent_id,
            "module_id": self.module_id,
            "t_started": self.t_started,
            "terminated": self.is_terminated,
            "truncated": self.is_truncated,
        }
