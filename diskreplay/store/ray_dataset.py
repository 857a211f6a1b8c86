"""The steps of a snapshot as a dataset of Ray Data, and the tasks that read them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray.data
from numpy.typing import NDArray
from ray.data.block import BlockAccessor, BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from diskreplay.errors import SchemaError, StoreNotFound
from diskreplay.ids import POSITION_BITS, TERMINATED, TRUNCATED, EpisodeTable, Ints
from diskreplay.reading.episodes import Episode
from diskreplay.reading.follower import Follower
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema
from diskreplay.segments.documents.layout import TIME
from diskreplay.segments.documents.root import Root, read_root
from diskreplay.store.tables import column_name, hidden_column, joined

Where = Callable[[Episode], bool]

# The number of bytes of a block of Ray Data. With larger blocks, fewer blocks would fit into memory at once. With
# smaller blocks, Ray's cost per block would be too large.
BLOCK_BYTES = 32 << 20
NEXT_OBS = "next_obs"
_EVERY = "..."
# The columns that have properties of a step; other columns have fields of the schema.
_PROPERTIES: dict[str, Any] = {
    "episode": np.dtype(np.int64),
    "step": np.dtype(np.int64),
    "id": np.dtype(np.int64),
    "time": np.dtype(np.float64),
    "terminated": np.dtype(np.bool_),
    "truncated": np.dtype(np.bool_),
}


def to_ray_dataset(
    snapshot: Snapshot, root: Root, where: Where | None, fields: Sequence[str] | None
) -> "ray.data.Dataset":
    source = StoreDatasource(root, snapshot, where, chosen_columns(root.schema, fields))
    return ray.data.read_datasource(source)


@dataclass(frozen=True)
class Column:
    """A column of the dataset; ``leaf`` is the path of the schema's leaf, or None for a property of the step."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    leaf: str | None = None

    @property
    def is_next(self) -> bool:
        return self.leaf is not None and self.name.split(".")[0] == NEXT_OBS

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def chosen_columns(schema: Schema, fields: Sequence[str] | None) -> tuple[Column, ...]:
    """Return the columns that ``fields`` names; None names all columns except "next_obs".

    Raises SchemaError if a named column does not exist.
    """
    if isinstance(fields, str):  # a str is a sequence, too, and each letter would count as a name
        raise ValueError(f'fields must be a sequence of columns, such as ("obs",), not {fields!r}')
    properties = {**_PROPERTIES, hidden_column(schema): np.dtype(np.bool_)}
    columns = [Column(name, (), dtype) for name, dtype in properties.items()]
    leaves = schema.step_leaves.items()
    columns += [Column(column_name(path, properties), leaf.shape, leaf.dtype, path) for path, leaf in leaves]
    usual = set(columns)
    of_obs = [(path, leaf) for path, leaf in leaves if path.split("/")[0] == "obs"]
    columns += [Column(f"next_{column_name(path)}", leaf.shape, leaf.dtype, path) for path, leaf in of_obs]
    chosen: set[Column] = set()
    for name in (_EVERY,) if fields is None else fields:
        found = {each for each in columns if each.name == name or each.name.startswith(f"{name}.")}
        if not found and name != _EVERY:
            known = ", ".join(dict.fromkeys(each.name for each in columns))
            raise SchemaError(f"there is no column {name!r}; the dataset has {known}")
        chosen |= usual if name == _EVERY else found
    return tuple(column for column in columns if column in chosen)


class StoreDatasource(Datasource):  # type: ignore[misc]
    def __init__(self, root: Root, snapshot: Snapshot, where: Where | None, columns: tuple[Column, ...]) -> None:
        super().__init__()
        episodes = snapshot.episodes
        self._hidden = snapshot.hidden_steps(episodes)
        self._path, self._uuid = str(root.path), root.uuid
        self._episodes, self._where, self._columns = episodes, where, columns
        self._steps = episodes.steps
        if any(column.is_next for column in columns):
            self._steps = np.minimum(self._steps, episodes.obs_rows - 1)

    def get_name(self) -> str:
        return "Store"

    @property
    def supports_distributed_reads(self) -> bool:
        """False, because a store belongs to one machine, so tasks cannot run on other nodes."""
        return False

    def estimate_inmemory_data_size(self) -> int:
        return int(self._steps.sum()) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return sum(column.row_bytes for column in self._columns)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[Any]:
        """Return about ``parallelism`` tasks, each for the episodes of several segments or of a part of one segment."""
        cuts = segment_cuts(self._episodes.first >> POSITION_BITS, self._steps, parallelism)
        # The schema comes from a block with one row, because Ray cannot make a tensor without rows.
        row = [np.zeros((1, *column.shape), column.dtype) for column in self._columns]
        schema = BlockAccessor.for_block(_block(self._columns, [row])).schema()
        tasks = []
        for start, stop in pairwise(cuts):
            some = slice(start, stop)
            episodes, steps, hidden = self._episodes.select(some), self._steps[some], self._hidden[some]
            rows = int(steps.sum())
            metadata = BlockMetadata(
                num_rows=None if self._where else rows,
                size_bytes=None if self._where else rows * self._row_bytes,
                exec_stats=None,
                input_files=None,
            )
            read = ReadSteps(self._path, self._uuid, start, episodes, steps, hidden, self._where, self._columns)
            tasks.append(ReadTask(read, metadata, schema=schema, per_task_row_limit=per_task_row_limit))
        return tasks


def segment_cuts(segments: Ints, steps: Ints, parts: int) -> list[int]:
    """Return the indices at which to cut episodes into about ``parts`` parts with similar numbers of steps.

    The episodes are sorted by segment. A part ends where a segment ends, unless the segment is larger than a part.
    """
    count, ends = len(steps), np.cumsum(steps)
    if not count:
        return [0]
    most = max(1, -(-int(ends[-1]) // max(parts, 1)))
    cuts = [0]
    for behind in [*(np.flatnonzero(np.diff(segments)) + 1).tolist(), count]:
        done = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        while ends[behind - 1] - done >= 2 * most:
            cut = int(np.searchsorted(ends, done + most)) + 1
            if cut >= behind:
                break
            cuts.append(cut)
            done = int(ends[cut - 1])
        if ends[behind - 1] - done >= most or behind == count:
            cuts.append(behind)
    return cuts


@dataclass(frozen=True, eq=False)
class ReadSteps:
    """A task of Ray Data that reads the steps of some episodes when Ray calls it.

    ``number`` is the index of the first of these episodes among all episodes of the dataset. ``steps`` has the number
    of steps to read of each episode. ``hidden`` has the number of steps of each episode that were hidden when the
    dataset was made.
    """

    path: str
    uuid: str
    number: int
    episodes: EpisodeTable
    steps: Ints
    hidden: Ints
    where: Where | None
    columns: tuple[Column, ...]

    def __call__(self) -> Iterator[Any]:
        snapshot = _follower(self.path, self.uuid).refresh()[0]
        most = max(1, BLOCK_BYTES // max(1, sum(column.row_bytes for column in self.columns)))
        pieces: list[list[NDArray[Any]]] = []
        rows = 0
        for at in range(len(self.episodes)):
            if self.where is not None and not self.where(Episode(snapshot, at, self.episodes)):
                continue
            start, steps = 0, int(self.steps[at])
            while start < steps:
                stop = min(steps, start + most - rows)
                pieces.append([self._rows(snapshot, at, column, start, stop) for column in self.columns])
                rows += stop - start
                start = stop
                if rows == most:
                    yield _block(self.columns, pieces)
                    pieces, rows = [], 0
        if rows:
            yield _block(self.columns, pieces)

    def _rows(self, snapshot: Snapshot, at: int, column: Column, start: int, stop: int) -> NDArray[Any]:
        episodes = self.episodes
        ids: Ints = episodes.first[at] + np.arange(start, stop) * episodes.stride[at]
        if column.leaf is not None:
            first = int(ids[0]) + (int(episodes.stride[at]) if column.is_next else 0)
            return snapshot.rows(column.leaf, first, stop - start)
        match column.name:
            case "episode":
                return np.full(stop - start, self.number + at, np.int64)
            case "step":
                return np.arange(start, stop)
            case "id":
                return ids
            case "hidden" | "is_hidden":
                hidden: NDArray[np.bool_] = np.arange(start, stop) < self.hidden[at]
                return hidden
            case "time":
                times = snapshot.rows(TIME, int(ids[0]), stop - start)
                clock = snapshot.clocks[(int(ids[0]) >> POSITION_BITS) - snapshot.origin]
                seconds: NDArray[np.float64] = (times + clock) / 1e9
                return seconds
        flag = TERMINATED if column.name == "terminated" else TRUNCATED
        ends = np.zeros(stop - start, np.bool_)
        ends[-1] = stop == episodes.steps[at] and bool(episodes.end[at] & flag)
        return ends


def _block(columns: tuple[Column, ...], pieces: list[list[NDArray[Any]]]) -> Any:
    rows = sum(len(piece[0]) for piece in pieces)
    found = zip(columns, zip(*pieces, strict=True), strict=True)
    return BlockAccessor.batch_to_block(
        {column.name: joined((rows, *column.shape), column.dtype, part) for column, part in found}
    )


@lru_cache(maxsize=1)
def _follower(path: str, uuid: str) -> Follower:
    """Return a follower of the store, cached because a worker process of Ray runs many tasks for one store."""
    root = read_root(Path(path))
    if root.uuid != uuid:
        raise StoreNotFound(f"the store at {path} was replaced since the dataset was made: make the dataset again")
    return Follower(root, root.counters())
