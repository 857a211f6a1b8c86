"""The store: create it, open it, look at it, write to it."""

import errno
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import ReadOnlyError, ReplayError, SchemaError, StoreExists
from diskreplay.format import layout
from diskreplay.format.root import create_root, read_root
from diskreplay.format.schema import Schema
from diskreplay.store.dropped import seal_dropped
from diskreplay.store.episodes import Episode, EpisodeList
from diskreplay.store.eviction import evict
from diskreplay.store.forks import told_of_forks
from diskreplay.store.index import Index
from diskreplay.store.info import episode_table, store_info
from diskreplay.store.limiter import RateLimiter
from diskreplay.store.recorder import Recorder
from diskreplay.store.retention import Retention
from diskreplay.store.sealer import Sealer
from diskreplay.store.snapshot import Snapshot
from diskreplay.store.vector_writer import VectorWriter
from diskreplay.store.verify import Problem, verify
from diskreplay.store.writer import Durability, Writer, check_durability

PathLike = str | os.PathLike[str]


_alive = told_of_forks(lambda store: store._begin_anew())


class Store:
    """A replay store on disk. Made by `create` and `open`.

    Concurrency: any number of processes and threads may have one store open, and write to it through writers of their
    own. What this object shows changes only by `refresh`; any thread may call it. A forked child may go on using it,
    but not the writers made by its parent. A Store pickles as its path and mode.
    """

    def __init__(self, path: PathLike, mode: Literal["r", "a"] = "r") -> None:
        if mode not in ("r", "a"):
            raise ValueError(f'mode is "r" or "a", not {mode!r}')
        self._root = read_root(Path(path).absolute())
        self._mode = mode
        try:
            self._counters = self._root.counters(writable=mode == "a")
            self._writers: weakref.WeakSet[Any] = weakref.WeakSet()
            self._retention = Retention(self._root, self._counters)
            self._sealer = Sealer(self._root, self._retention.enforce)
            if mode == "a":
                self._seal_dead()
                self._retention.reserve_entries()
        except OSError as error:
            if mode == "r" or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise ReadOnlyError(
                f'{self.path} cannot be written ({error.strerror}: {error.filename}); open it with mode "r", or let '
                "this user write there"
            ) from error
        self._index: Index | None = Index(self._root, self._counters)
        _alive.add(self)

    def _begin_anew(self) -> None:
        """Use nothing, in a forked child, that another thread may have been in the middle of: that is not here."""
        self._retention = Retention(self._root, self._counters)
        self._sealer = Sealer(self._root, self._retention.enforce)
        if self._index is not None:
            self._index.look_anew()

    def _seal_dead(self) -> None:
        while dead := self._retention.dead_segments():
            for number, lock in dead:
                self._sealer.submit(number, lock)

    def __repr__(self) -> str:
        """Say where the store is and how much this object sees of it."""
        steps = "closed" if self._index is None else f"steps={len(self)}"
        return f"Store({str(self.path)!r}, mode={self._mode!r}, {steps})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as path and mode."""
        return Store, (str(self._root.path), self._mode)

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The store's folder."""
        return self._root.path

    @property
    def schema(self) -> Schema:
        """What one step and one episode hold."""
        return self._root.schema

    @property
    def capacity(self) -> int | None:
        """The most steps the store keeps; None: all."""
        return self._root.capacity

    @property
    def mode(self) -> str:
        """How it was opened: "r" or "a"."""
        return self._mode

    @property
    def snapshot(self) -> Snapshot:
        """The frozen state that everything here is read from."""
        return self._open_index().snapshot

    def __len__(self) -> int:
        """Return the number of steps in the current snapshot."""
        return len(self.snapshot)

    @property
    def episodes(self) -> EpisodeList:
        """The episodes of the current snapshot, oldest first, open ones included."""
        return EpisodeList(self.snapshot)

    @property
    def num_episodes(self) -> int:
        """The number of episodes in the current snapshot, open ones included."""
        return len(self.episodes)

    def refresh(self) -> int:
        """Take a new snapshot; return how many steps became visible with it."""
        return self._open_index().refresh()

    def info(self, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Describe the store: what ``diskreplay inspect --json`` prints. Reads every reward once."""
        return store_info(self._root, self._counters, self.snapshot, progress)

    def verify(self, deep: bool = False, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
        """Look for what is wrong with the store on disk; empty where nothing is.

        Structure, sizes, metadata against the schema, flags against counters, and with ``deep`` the checksums of every
        sealed chunk. It may be written meanwhile. See docs/durability.md.
        """
        return verify(self.path, deep=deep, progress=progress)

    def evict(self, where: Callable[[Episode], bool]) -> int:
        """Evict by hand the episodes for which a predicate is true, and return how many steps that were.

        It is asked about every visible episode of a sealed segment: one that no writer appends to any more. What it
        chooses is hidden at once, here and in every process that refreshes, all of it or, where this call fails or its
        process dies, nothing. Bytes are deleted when a whole segment is hidden. Samplers keep the batches that they
        have planned; priorities of evicted steps are gone, and later updates of them are skipped.

        Parameters
        ----------
        where : callable
            ``where(episode)`` is true for what has to leave, such as ``lambda e: e["policy_version"][0] < 10``.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        ValueError
            ``where`` is no function.
        StorageFull
            There is no room for a list of them; nothing is hidden.
        """
        index = self._open_index()
        self._check_writable("evict")
        if not callable(where):
            raise ValueError(f"where must be a function of an episode, not {where!r}")
        return evict(index, self._retention, where)

    def episode_table(self, progress: Callable[[int, int], None] | None = None) -> dict[str, NDArray[Any]]:
        """Return a column of each of the episodes' properties, oldest first: id, segment, lane, length, return, ..."""
        return episode_table(self.snapshot, progress)

    # --- writing -----------------------------------------------------------------------------------------------------

    @overload
    def writer(
        self, num_envs: None = None, *, durability: Durability = "none", limiter: RateLimiter | None = None
    ) -> Writer: ...
    @overload
    def writer(
        self, num_envs: int, *, durability: Durability = "none", limiter: RateLimiter | None = None
    ) -> VectorWriter: ...
    def writer(
        self, num_envs: int | None = None, *, durability: Durability = "none", limiter: RateLimiter | None = None
    ) -> Writer | VectorWriter:
        """Return a writer for one environment, or for ``num_envs`` of them that step together.

        Parameters
        ----------
        num_envs : int, optional
            The number of environments; None: one, whose arrays have no leading axis.
        durability : "none", "episode" or float
            When appended steps are put on the platter: when the system sees fit, at each episode's end, or when at
            least so many seconds have passed at an append. They are visible to all processes at once in any case.
        limiter : RateLimiter, optional
            Makes an append wait while the writers are too far ahead of the samplers with the same limiter.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        """
        self._check_writable("write")
        check_durability(durability)
        lanes = 1 if num_envs is None else num_envs
        if not isinstance(lanes, (int, np.integer)) or isinstance(lanes, bool) or not 1 <= lanes <= layout.MAX_LANES:
            raise ValueError(f"num_envs is from 1 to {layout.MAX_LANES}, not {num_envs!r}")
        attached = None if limiter is None else limiter.attach(self)
        recorder = Recorder(self._root, self._counters, int(lanes), self._retention, self._sealer)
        kind = Writer if num_envs is None else VectorWriter
        writer = kind(self.schema, recorder, durability, self._writer_closed, attached)
        self._writers.add(writer)
        return writer

    def _writer_closed(self, writer: Any) -> None:
        self._writers.discard(writer)
        self._sealer.drain()

    def close(self) -> None:
        """Close the writers it made and wait until their segments are sealed. Closing twice is fine."""
        if self._index is None:
            return
        self._index.close()
        self._index = None
        errors = self._finish([writer.close for writer in list(self._writers)])
        # Else this is a signal's handler in the middle of a call of a writer, which may hold locks: it does the rest.
        if not any(writer.closes_later for writer in self._writers):
            errors += self._finish([seal_dropped, self._sealer.drain])
            self._counters.close()
        if errors:
            raise errors[0]

    @staticmethod
    def _finish(parts: Iterable[Callable[[], None]]) -> list[Exception]:
        """Call each, and return what they raised."""
        errors = []
        for part in parts:
            try:
                part()
            except Exception as error:
                errors.append(error)
        return errors

    def _check_writable(self, verb: str) -> None:
        self._open_index()
        if self._mode != "a":
            raise ReadOnlyError(f'{self.path} was opened with mode "r"; open it with mode "a" to {verb}')

    def _open_index(self) -> Index:
        if self._index is None:
            raise ReplayError(f"this Store of {self._root.path} is closed; open it again")
        return self._index

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()


def create(
    path: PathLike,
    schema: Schema,
    *,
    capacity: int | None = None,
    capacity_bytes: int | None = None,
    max_age_s: float | None = None,
    exist_ok: bool = False,
    chunk_bytes: int = 16 << 20,
    segment_steps: int | Literal["episode"] | None = None,
) -> Store:
    """Make an empty store and open it with mode "a".

    Parameters
    ----------
    path : path
        A folder that does not exist yet, or is empty.
    schema : Schema
        What one step and one episode hold.
    capacity : int, optional
        The most steps to keep; the oldest leave first. None: all of them.
    capacity_bytes : int, optional
        The most bytes that segments may take on disk whenever one is begun or sealed: whole sealed segments leave, the
        oldest first. Between two such moments a writer adds less than two segments. None: no limit.
    max_age_s : float, optional
        Segments leave so many seconds after they were sealed, whenever one is begun or sealed, or `Store.evict` is
        called. None: never.
    exist_ok : bool
        Open the store that is there, if it has the same schema.
    chunk_bytes : int
        Bytes of a chunk file, about. Larger ones make fewer mappings: a reader keeps 30,000.
    segment_steps : int or "episode", optional
        Rows, of all lanes, after which a writer begins a new segment; "episode": one segment an episode. None: chosen
        by size, at most 4 GiB and a sixteenth of either capacity.

    Raises
    ------
    StoreExists
        Something is at ``path``.
    SchemaError
        With ``exist_ok``: the store there has another schema.
    ValueError
        A number is out of its range.
    """
    if not isinstance(schema, Schema):
        raise SchemaError(f"schema is a diskreplay.Schema, not {type(schema).__name__}")
    _check_count("capacity", capacity, 1, None)
    _check_count("capacity_bytes", capacity_bytes, 1, None)
    _check_seconds("max_age_s", max_age_s)
    _check_count("chunk_bytes", chunk_bytes, layout.MIN_CHUNK_BYTES, layout.MAX_CHUNK_BYTES)
    if segment_steps != "episode":
        _check_count("segment_steps", segment_steps, 1, layout.POSITION_MASK >> 4)
    target = Path(path).absolute()
    try:
        if exist_ok and (target / layout.METADATA).exists():
            raise StoreExists(str(target))
        create_root(
            target,
            schema,
            capacity=_as_int(capacity),
            capacity_bytes=_as_int(capacity_bytes),
            max_age_s=None if max_age_s is None else float(max_age_s),
            chunk_bytes=int(chunk_bytes),
            segment_steps=segment_steps if segment_steps == "episode" else _as_int(segment_steps),
        )
    except StoreExists:
        if not exist_ok:
            raise
        store = Store(target, "a")
        if store.schema != schema:
            raise SchemaError(f"the store at {target} has another schema: {store.schema}") from None
        return store
    return Store(target, "a")


def open(path: PathLike, mode: Literal["r", "a"] = "r") -> Store:
    """Open a store. With mode "r" nothing is ever written; with "a" it may be, and dead writers' segments are sealed.

    Raises
    ------
    StoreNotFound
        There is no store at ``path``.
    FormatError
        It is damaged, or of a version that this release does not know.
    ReadOnlyError
        With mode "a", the system lets this process not write there.
    """
    return Store(path, mode)


def _check_count(name: str, value: Any, least: int, most: int | None) -> None:
    if value is None:
        return
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} is a whole number, not {value!r}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}; it must be at least {least}" + (f" and at most {most}" if most else ""))


def _check_seconds(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise ValueError(f"{name} is a number of seconds, not {value!r}")
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} is {value}; it must be more than 0 and finite")


def _as_int(value: Any) -> int | None:
    return None if value is None else int(value)
