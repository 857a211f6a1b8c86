"""A snapshot over plain arrays: segments are written out from the model's episodes, in chunks of a few rows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr
from diskreplay.distributions.population import Population
from diskreplay.ids import OPEN, POSITION_BITS, POSITION_MASK, EpisodeTable
from diskreplay.kernels import following, frozen
from diskreplay.kernels.gathering import table_line
from diskreplay.kernels.runs import ALL_VISIBLE, IdRuns, Visible, open_episodes
from diskreplay.reading.chunk_budget import MAPPED
from diskreplay.reading.snapshot import SegmentTable
from diskreplay.testing.model import ModelEpisode, ModelStep, flat
from diskreplay.views.base import Block, offsets
from tests.kernels.plain.advance import freeze_plain
from tests.kernels.plain.runs import starting_runs

SCHEMA = dr.Schema(
    obs={"image": dr.Field((2, 3), "uint8"), "state": dr.Field((3,), "float32")},
    action=(dr.Field((), "int64"), dr.Field((2,), "float32")),
    reward=dr.Field((), "float32"),
    extra={"bonus": dr.Field((), "float64"), "hidden": {"h": dr.Field((2,), "float16")}},
)
FLAT_SCHEMA = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"))


@dataclass
class Segment:
    """What the lanes of a segment hold; None in a list of segments is an evicted one."""

    lanes: list[list[ModelEpisode]]
    sealed: bool = False
    chunk_rows: int = 4
    apart: bool = False  # its lanes stand one behind the other in chunks of one line, as in a pack


class Columns:
    """Episodes as a snapshot offers them: here the time of an episode is its first id."""

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, int, int]]) -> EpisodeTable:
        table = np.array(rows, np.int64).reshape(-1, 5)
        return EpisodeTable(np.column_stack([table, table[:, 0]]))


def without(frontier: int, origin: int, lanes: np.ndarray) -> Visible:
    """Hide all steps with an id below a frontier."""
    number = np.repeat(origin + np.arange(len(lanes)), lanes)
    lane_base = np.cumsum(lanes) - lanes
    lane, width = np.arange(lanes.sum()) - np.repeat(lane_base, lanes), np.repeat(lanes, lanes)
    positions = np.clip(frontier - (number << 35), 0, 1 << 35)
    return Visible(frontier, origin, lanes, lane_base, np.maximum(-((lane - positions) // width), 0))


def runs_of(view: Any, episodes: EpisodeTable, visible: Visible = ALL_VISIBLE) -> IdRuns:
    """Return the ids at which the view's samples of these episodes start."""
    return IdRuns(*starting_runs(view.starts, episodes, visible)[:3])


def ids_in(runs: IdRuns) -> list[int]:
    """List the ids of runs."""
    return [int(i + stride * j) for i, stride, count in zip(*runs, strict=True) for j in range(count)]


def lane_starts(lanes: int, room: int) -> list[int]:
    """Return at which rows lanes begin that stand one behind the other, with room for so many rows each."""
    return [lane * (room + 1) for lane in range(lanes)]


class Table:
    """One leaf of all segments; chunks are mapped when `ensure` asks for them."""

    def __init__(self, field: dr.Field) -> None:
        self.dtype, self.shape = field.dtype, field.shape
        self.row_bytes = field.row_bytes
        self.wide = True
        self.first_chunk = self.chunks = self.shift = self.bases = np.zeros(0, np.int64)
        self.holder: list[np.ndarray] = []
        self.first_rows: list[list[int]] = []
        self.ensured = 0

    def add(self, rows: list[list[np.ndarray]], chunk_rows: int, room: int, apart: bool = False) -> None:
        """Add a segment: the rows of each lane, and so many rows more than there are, full of rubbish."""
        count = -(-(len(rows) * (room + 1) if apart else room) // chunk_rows)
        self.first_chunk = np.append(self.first_chunk, len(self.holder))
        self.chunks = np.append(self.chunks, count)
        self.shift = np.append(self.shift, chunk_rows.bit_length() - 1)
        first = lane_starts(len(rows), room) if apart else [frozen.OWN_FOLDER] * len(rows)
        self.first_rows.append(first)
        rubbish = np.random.default_rng(0)
        lines = 1 if apart else len(rows)
        blocks = rubbish.integers(0, 255, (count, lines, chunk_rows, self.row_bytes), np.uint8, endpoint=True)
        self.holder += list(blocks)
        for lane, values in enumerate(rows):
            for i, value in enumerate(values):
                self.row(len(self.chunks) - 1, lane, i)[:] = np.frombuffer(
                    np.asarray(value, self.dtype).tobytes(), np.uint8
                )
        self.bases = np.zeros(len(self.holder), np.int64)
        self.how = np.full(len(self.holder), MAPPED, np.uint8)

    def _where(self, slot: int, lane: int, row: int) -> tuple[int, int, int]:
        """Return the chunk of a row, counted from its segment's first one, the line, and which row of that it is."""
        first = self.first_rows[slot][lane]
        line, row = (lane, row) if first == frozen.OWN_FOLDER else (0, first + row)
        return row >> int(self.shift[slot]), line, row & ((1 << int(self.shift[slot])) - 1)

    def place(self, slot: int, lane: int, row: int) -> int:
        """Return the place of the chunk that holds a row."""
        chunk = self._where(slot, lane, row)[0]
        assert 0 <= chunk < self.chunks[slot], f"chunk {chunk} of slot {slot}"
        return int(self.first_chunk[slot]) + chunk

    def row(self, slot: int, lane: int, row: int) -> np.ndarray:
        """Return the bytes of a row, to be read or written."""
        return self.holder[self.place(slot, lane, row)][self._where(slot, lane, row)[1:]]

    def rows(self, slot: int, lane: int, first: int, stop: int) -> np.ndarray:
        """Return the values of rows of a lane."""
        rows = np.stack([self.row(slot, lane, row) for row in range(first, stop)])
        return rows.view(self.dtype).reshape(-1, *self.shape)

    def values(self, slot: np.ndarray, lane: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return the value at each row."""
        places = zip(slot.tolist(), lane.tolist(), row.tolist(), strict=True)
        return np.concatenate([self.rows(s, of, at, at + 1) for s, of, at in places])

    def ensure(self, slot: np.ndarray, lane: np.ndarray, first: np.ndarray, last: np.ndarray, since: int = 0) -> None:
        self.ensured += 1
        for s, of, begin, end in zip(*(column.tolist() for column in (slot, lane, first, last)), strict=True):
            for place in range(self.place(s, of, begin), self.place(s, of, end) + 1):
                self.bases[place] = self.holder[place].ctypes.data


class MappingGuard:
    """What nobody replaces but a test."""


class Tables:
    """Those of all leaves; see `diskreplay.reading.chunk_table.ChunkTables`."""

    def __init__(self, infos: list[Any], lanes_of: Any, find: Any) -> None:
        self.info, self.lanes_of, self.find = infos.__getitem__, lanes_of, find
        self.leaves: dict[str, Table] = {}
        self.lock = threading.RLock()
        self.held = MappingGuard()

    def addresses(self, leaves: Iterable[str]) -> tuple[MappingGuard, list[tuple[np.ndarray, ...]]]:
        tables = [self.leaves[leaf] for leaf in leaves]
        return self.held, [(table.first_chunk, table.chunks, table.shift, table.bases) for table in tables]

    def lines(self, leaves: Sequence[str]) -> tuple[MappingGuard, list[Any]]:
        held, tables = self.addresses(leaves)
        rows = [self.leaves[leaf].row_bytes for leaf in leaves]
        return held, [(table_line(*arrays, row_bytes), arrays) for arrays, row_bytes in zip(tables, rows, strict=True)]


def frozen_of(
    visible: Visible,
    rows: np.ndarray,
    sealed: np.ndarray,
    still_open: EpisodeTable,
    first_rows: np.ndarray | None = None,
) -> tuple[np.ndarray, Any, EpisodeTable]:
    """Return the record that kernels read of a snapshot, what keeps it alive, and the open episodes in its order.

    `rows` has what is known of all lanes, but for these episodes. All that is not sealed may grow. `first_rows` are
    those of a `ChunkTables`; None: each lane has lines of its own.
    """
    reached, origin, lanes, lane_base, oldest = visible
    slots = np.flatnonzero(~sealed & (lanes > 0))
    listed = np.zeros((len(slots), following.GROWING_COLUMNS), np.int64)
    listed[:, following.SLOT], listed[:, following.LANES] = slots, lanes[slots]
    listed[:, following.PLACE] = lane_base[slots]
    position, width = still_open.first & POSITION_MASK, still_open.stride
    place = lane_base[(still_open.first >> POSITION_BITS) - origin] + position % width
    rows[following.OPEN_START, place], rows[following.OPEN_END, place] = position // width, still_open.end
    rows[following.OPEN_TIME, place] = still_open.time
    columns = {name: None for name in ("schema", "tables", "clocks", "evictions", "generation")}
    first_rows = np.full(lanes.sum(), frozen.OWN_FOLDER) if first_rows is None else first_rows
    where = {"folders": np.arange(len(lanes)), "first_rows": first_rows}
    table = SegmentTable.of(
        listed, origin=origin, lanes=lanes, lane_base=lane_base, sealed=sealed, **where, **columns
    )  # fmt: skip
    record = np.empty(frozen.HEAD + following.LANE_ROWS * len(table.live_places), np.int64)
    freeze_plain(listed, rows, oldest, reached, table.head, record)
    live = record[frozen.HEAD :].reshape(following.LANE_ROWS, -1)
    return record, (visible, rows, table), open_episodes(origin, table.growing, live)


class Segments(list[Segment | None]):
    """What a snapshot knows of segments, of which readers need but the tables."""

    tables: Tables


@dataclass
class Snapshot:
    """As the store's: see `diskreplay.reading.snapshot`. `model` gives the episode and step of every step's id.

    Hidden are the steps below `frontier` or, where `kept` is given, the rows of each lane before that.
    """

    schema: dr.Schema
    segments: list[Segment | None]
    frontier: int = 0
    origin: int = 2
    generation: int = 0
    discovery: np.random.Generator | None = None
    kept: Sequence[int] | None = None
    model: dict[int, tuple[ModelEpisode, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lanes = np.array([len(s.lanes) if s else 0 for s in self.segments], np.int64)
        self.lane_base = np.cumsum(self.lanes) - self.lanes
        self.sealed = np.array([bool(s and s.sealed) for s in self.segments], np.bool_)
        self.committed = np.zeros(self.lanes.sum(), np.int64)
        self.observed = np.zeros(self.lanes.sum(), np.int64)
        # One writer, whose lanes go on from segment to segment.
        infos = [SimpleNamespace(writer=1, lanes=tuple(range(len(s.lanes)))) if s else None for s in self.segments]
        self.segments = Segments(self.segments)
        self.tables = self.segments.tables = Tables(infos, self._lanes_of, self._find)
        fields = {"done": dr.Field((), "uint8"), **self.schema.leaves}
        self.tables.leaves = {leaf: Table(f) for leaf, f in fields.items() if not leaf.startswith("episode/")}
        ended, still_open = [], []
        for slot, segment in enumerate(self.segments):
            if segment is None:
                for table in self.tables.leaves.values():
                    table.add([], 1, 0)
                continue
            rows = [self._write(slot, lane, episodes, ended, still_open) for lane, episodes in enumerate(segment.lanes)]
            room = max((len(r) for r in rows), default=0) + 1
            for leaf, table in self.tables.leaves.items():
                # Rows that are no steps hold zeros in the format; no reader should need them to.
                rubbish = np.full(table.shape, 77, table.dtype)
                values = [[row.get(leaf, rubbish) for row in lane] for lane in rows]
                table.add(values, segment.chunk_rows, room, segment.apart)
        if self.discovery is not None:
            self.discovery.shuffle(ended)
        self.log = Columns.of(ended)
        self.visible = without(self.frontier, self.origin, self.lanes)
        if self.kept is not None:
            oldest = np.array(self.kept, np.int64)
            self.visible = self.visible._replace(reached=1 << 62, oldest=oldest)
        self.reached, self.oldest = self.visible.reached, self.visible.oldest
        rows = np.full((following.LANE_ROWS, self.lanes.sum()), -1, np.int64)
        rows[following.COMMITTED], rows[following.OBSERVED] = self.committed, self.observed
        self.first_rows = np.array([row for rows in self.tables.leaves["done"].first_rows for row in rows], np.int64)
        self.record, self._alive, self.open = frozen_of(
            self.visible, rows, self.sealed, Columns.of(still_open), self.first_rows
        )
        self.steps = 0
        for step_id, (episode, t) in self.model.items():
            if self.is_hidden(step_id):
                episode.hidden = max(episode.hidden, t + 1)
            else:
                self.steps += 1

    def _lanes_of(self, slot: int, origin: int) -> tuple[int, np.ndarray] | None:
        info = self.tables.info(slot)
        return None if info is None else (info.writer, np.array(info.lanes, np.int64))

    def _find(self, slot: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first = self.first_rows[self.lane_base[slot] + lane]
        return slot, np.where(first == frozen.OWN_FOLDER, lane, 0), np.maximum(first, 0)

    def committed_rows(self, slot: np.ndarray, lane: np.ndarray) -> np.ndarray:
        return self.committed[self.lane_base[slot] + lane]

    def is_hidden(self, step_id: int) -> bool:
        return step_id < self.least_ids(np.array([step_id])).item()

    def least_ids(self, ids: np.ndarray) -> np.ndarray:
        return self.visible._replace(reached=1).least_ids(ids)

    def __len__(self) -> int:
        return self.steps

    def _write(
        self, slot: int, lane: int, episodes: list[ModelEpisode], ended: list[Any], still_open: list[Any]
    ) -> list[dict[str, Any]]:
        """Write one lane; committed rows first, then what is only observed."""
        rows: list[dict[str, Any]] = []
        lanes, base = int(self.lanes[slot]), (slot + self.origin) << 35
        observed_only = 0
        for number, episode in enumerate(episodes):
            first = len(rows)
            episode.hidden = 0
            for t, step in enumerate(episode.steps):
                self.model[base | ((first + t) * lanes + lane)] = episode, t
                extra = {f"extra/{leaf}": x for leaf, x in step.extra.items()}
                rows.append({**step.obs, **step.action, "reward": step.reward, **extra, "done": 4 if t == 0 else 0})
            bits = episode.terminated | (episode.truncated << 1) | (episode.cut << 4)
            if episode.ended and not episode.cut:
                rows[-1]["done"] |= bits
            if episode.ended and episode.final is not None:
                rows.append({**episode.final, "done": 8 | (bits if episode.cut else 0)})
            elif episode.cut and (episode.values or (number == len(episodes) - 1 and not self.sealed[slot])):
                rows.append({"done": 32 | bits})
            elif not episode.ended and episode.final is not None:
                observed_only = 1
                rows.append({**episode.final, "done": 255})
            bits |= 8 if episode.final is not None and episode.ended else 0
            bits |= OPEN if not episode.ended else 0
            column = (base | (first * lanes + lane), lanes, len(episode.steps), episode.num_frames, bits)
            (ended if episode.ended else still_open).append(column)
        self.committed[self.lane_base[slot] + lane] = len(rows) - observed_only
        self.observed[self.lane_base[slot] + lane] = len(rows)
        return rows

    @property
    def evictions(self) -> tuple[()]:
        return ()  # nothing is evicted by hand

    def evicted(self, ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(ids), bool)

    def leaf(self, path: str) -> Table:
        return self.tables.leaves[path]

    def episode(self, first_id: int) -> ModelEpisode:
        return self.model[first_id][0]

    def sampleable(self, n_step: int | None, whole: bool = False) -> set[int]:
        """The ids of all steps that a view of `n_step` offers; `whole`: what next_fields need must be there too."""
        found = set()
        for step_id, (episode, t) in self.model.items():
            allowed = t in episode.sampleable(n_step)
            if allowed and whole and not episode.ended:
                allowed = t + (n_step or 0) < len(episode.steps)
            if allowed:
                found.add(step_id)
        return found


def offered(view: Any, snapshot: Snapshot) -> list[int]:
    """List the ids that the view's runs offer."""
    return [i for episodes in (snapshot.log, snapshot.open) for i in ids_in(runs_of(view, episodes, snapshot.visible))]


def followed(view: Any, snapshot: Snapshot) -> list[int]:
    """List the ids that a population offers."""
    population = Population(view)
    population.refresh(snapshot)
    return population.take(np.arange(population.size)).tolist()


def fill(reader: Any, snapshot: Snapshot, ids: Any) -> Block:
    """Gather ids into memory that is full of rubbish."""
    wanted = np.asarray(ids, np.int64)
    leaves = reader.leaves_for(snapshot, wanted)
    block = Block(leaves, len(ids), np.full(offsets(leaves, len(ids))[1], 0xAB, np.uint8))
    reader.fill(snapshot, wanted, block)
    return block


def fields_of(reader: Any, snapshot: Snapshot, ids: Any) -> dict[str, np.ndarray]:
    """Gather ids, and return the fields of the batch by their paths."""
    fields = reader.present([torch.from_numpy(array) for array in fill(reader, snapshot, ids).arrays])
    return {"/".join(path): field.numpy() for path, field in zip(reader.paths, fields, strict=True)}


def gathered(
    view: Any, snapshot: Snapshot, ids: Any, fields: Any = None, *, threads: Any = None, entropy: int | None = None
) -> dict[str, np.ndarray]:
    """Gather ids by a reader of the view, and return the fields of the batch by their paths."""
    reader = view.reader(snapshot.schema, fields)
    reader.threads = threads
    reader.seed(entropy)
    return fields_of(reader, snapshot, ids)


def check_every_id(
    view: Any, snapshot: Snapshot, good: Iterable[int], others: Iterable[int] | None = None, reason: str = ""
) -> None:
    """See that a reader takes these ids and refuses all others: those of other steps, and such as are no step's."""
    reader, good = view.reader(snapshot.schema), set(good)
    if others is None:
        first = [(slot + snapshot.origin) << POSITION_BITS for slot in range(-1, len(snapshot.segments) + 1)]
        others = {start + i for start in first for i in range(12)} | set(snapshot.model) | {-1, -(1 << 40), 1 << 62}
    for step_id in good:
        reader.check(snapshot, np.array([step_id]))
    for step_id in set(others) - good:
        with pytest.raises(dr.InvalidIndex, match=f"^id {step_id} {reason}"):
            reader.check(snapshot, np.array([step_id]))


class Store(dr.Store):
    """A store that shows one snapshot after the other, one at each refresh."""

    uuid = "of a test"

    def __init__(self, snapshot: Snapshot, coming: Sequence[Snapshot] = ()) -> None:
        self._snapshot, self._coming = snapshot, list(coming)

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    @property
    def schema(self) -> dr.Schema:
        return self.snapshot.schema

    def follow_compiled(self, also: Sequence[str] = ()) -> None:
        """There is nothing to follow."""

    def refresh(self) -> int:
        self.newest_snapshot()
        return 0

    def newest_snapshot(self) -> Snapshot:
        if self._coming:
            self._snapshot = self._coming.pop(0)
        return self._snapshot


def random_leaf(f: dr.Field, rng: np.random.Generator) -> np.ndarray:
    if f.dtype.kind == "f":
        return rng.standard_normal(f.shape).astype(f.dtype)
    return rng.integers(0, 200, f.shape).astype(f.dtype)


def episode(schema: dr.Schema, steps: int, end: str, final: bool, rng: np.random.Generator) -> ModelEpisode:
    """Make an episode of random values. `end`: terminated, truncated, both, cut, marked (a cut with values) or open."""

    def part(name: str) -> dict[str, np.ndarray]:
        return {leaf: random_leaf(f, rng) for leaf, f in schema.leaves.items() if leaf.split("/")[0] == name}

    made = ModelEpisode()
    for _ in range(steps):
        extra = {leaf.removeprefix("extra/"): value for leaf, value in part("extra").items()}
        made.steps.append(ModelStep(part("obs"), part("action"), np.float32(rng.normal()).item(), extra))
    made.final = part("obs") if final else None
    if end != "open":
        made.end(terminated=end in ("terminated", "both"), truncated=end in ("truncated", "both"), cut=end in CUTS)
    made.values = flat(1, "seed") if end == "marked" else {}
    return made


CUTS = ("cut", "marked")
ENDS = ("terminated", "truncated", "both", *CUTS)
