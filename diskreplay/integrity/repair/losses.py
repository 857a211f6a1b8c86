"""What a damaged segment loses when it is rebuilt, and how that is described."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diskreplay.errors import FormatError
from diskreplay.integrity.repair.repair_documents import known_in_segment
from diskreplay.integrity.verify.files import Problem
from diskreplay.segments.damage.damage import Damage, find_damage
from diskreplay.segments.documents import layout
from diskreplay.segments.files.mapping import read_regular
from diskreplay.segments.packs import PackTables, read_tables
from diskreplay.segments.segment import SegmentInfo

_RANGES_TOLD = 3
_OF_A_FILE = ("checksum", "missing", "size", "type", "unreadable")


@dataclass(frozen=True)
class Losses:
    """What a damaged segment loses when it is rebuilt: found by looking, before anything is changed."""

    info: SegmentInfo
    damage: Damage
    tables: PackTables | None = None  # of a pack

    @property
    def steps(self) -> int:
        """How many steps are lost that were not before."""
        return max(0, self.damage.steps_lost - self.info.lost.steps)

    def __str__(self) -> str:
        """Tell what is lost: episodes, steps, ids."""
        if not any(self.damage.more.values()):
            return "no step is lost"
        episodes, steps = self.damage.episodes, self.steps
        count = f"{episodes} episode{'' if episodes == 1 else 's'}"
        if self.damage.flags_damaged:
            count = f"at least {count}" if episodes else "part of an episode, or more"
        ranges = sorted(self._ids())
        ids = ", ".join(
            f"{first} to {last}" if first < last else f"{first}" for first, last, _ in ranges[:_RANGES_TOLD]
        )
        more = f" and {len(ranges) - _RANGES_TOLD} more ranges" if len(ranges) > _RANGES_TOLD else ""
        strides = {stride for _, _, stride in ranges}
        every = f", every {min(strides)}th of each range" if len(strides) == 1 and strides != {1} else ""
        return f"{count}, {steps} step{'' if steps == 1 else 's'} lost, ids {ids}{more}{every}"

    def _ids(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first and the last id of each range of rows that are lost, and how far its ids are apart."""
        base, lanes = self.info.number << layout.POSITION_BITS, len(self.info.lanes)
        for lane, rows in self.damage.more.items():
            for first, stop in rows:
                if self.tables is None:
                    yield base | first * lanes + lane, base | (stop - 1) * lanes + lane, lanes
                    continue
                for begin, count in self.tables.split(first, stop - first):
                    ids = self.tables.ids_of(np.array([begin, begin + count - 1]))
                    member = int(self.tables.places(ids[:1] >> layout.POSITION_BITS)[0])
                    yield int(ids[0]), int(ids[1]), int(self.tables.lanes[member])


def is_of_rows(info: SegmentInfo, where: str, problem: Problem) -> bool:
    """Whether something wrong with a segment, whose folder is ``where``, may follow from damaged rows."""
    if not info.sealed:
        return False
    name = problem.where.removeprefix(f"{where}/")
    if is_of_table(problem, where):
        is_folder = name in layout.EPISODE_FOLDERS
        if problem.kind in ("episodes", "unexpected") or (is_folder and problem.kind != "missing"):
            return True
        return known_in_segment(info, f"{name}/{layout.METADATA}" if is_folder else name) is None
    of_values = ("flags", layout.DONE), ("times", layout.TIME), ("priority", layout.PRIORITY)
    if (problem.kind, name) in (*of_values, ("counters", layout.METADATA)):
        return True
    folder, _, file = name.rpartition("/")
    in_array = folder in info.arrays and file.startswith("c.") and problem.kind in _OF_A_FILE
    others = (*layout.LANE_COUNTERS, *layout.PACK_TABLES)
    is_folder = name in info.blueprint.paths and name not in others and problem.kind in _OF_A_FILE
    is_blocks = name in (layout.BLOCKS, layout.INDEXES_COPY) and known_in_segment(info, name) is None
    return in_array or is_folder or is_blocks


def is_of_table(problem: Problem, where: str) -> bool:
    """Whether something is wrong with the table of episodes of a segment, whose folder is ``where``."""
    name = problem.where.removeprefix(f"{where}/")
    folder, _, file = name.rpartition("/")
    in_table = folder in layout.EPISODE_FOLDERS and file in (layout.METADATA, "c.0")
    return problem.kind == "episodes" or in_table or name in layout.EPISODE_FOLDERS


def find_losses(
    info: SegmentInfo, evicted: Mapping[int, Sequence[tuple[int, int]]], *, is_table_damaged: bool = False
) -> Losses | None:
    """Return what is lost if a segment is rebuilt; None where nothing is left of it, or nothing is known to be damaged.

    ``evicted`` are position and steps of the episodes of each segment that were evicted by hand. ``is_table_damaged``:
    the table of its episodes is, which costs no step.
    """
    counter = known_in_segment(info, f"{layout.COMMITTED}/c.0")
    if counter is None:
        return None
    rows, lanes = np.frombuffer(counter, "<i8"), len(info.lanes)
    if len(rows) != lanes or (rows < 0).any() or int(rows.max()) > layout.POSITION_MASK // lanes:
        return None
    try:
        tables = None if info.packed is None else read_tables(info)
        own = evicted.get(info.number, []) if tables is None else _evicted_of_pack(tables, evicted)
        damage = find_damage(info, rows, own)
    except (OSError, FormatError):
        return None
    is_damaged = bool(damage.parts) or damage.resized or is_table_damaged
    return Losses(info, damage, tables) if is_damaged and damage.steps_kept > 0 else None


def _evicted_of_pack(tables: PackTables, evicted: Mapping[int, Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return row and steps of the episodes of a pack that were evicted by hand."""
    entries = [(n << layout.POSITION_BITS | p, s) for n in tables.numbers.tolist() for p, s in evicted.get(n, [])]
    ids, steps = np.array(entries, np.int64).reshape(-1, 2).T
    lanes = tables.lanes[tables.places(ids >> layout.POSITION_BITS)]
    rows = tables.rows_of(ids)
    # What is no episode is none of the rows of another lane.
    good = tables.ids_of(rows + steps - 1) == ids + (steps - 1) * lanes
    return list(zip(rows[good].tolist(), steps[good].tolist(), strict=True))


def steps_at_stake(info: SegmentInfo | None, segment: Path) -> int:
    """Return how many steps a segment says it has or, where that cannot be believed, the most that it may have."""
    rows = _rows_with_flags(segment)
    # A document that claims more than there is room for is not believed.
    counted = info.steps if info is not None and info.steps and info.steps <= rows else 0
    return counted or _rows_committed(segment, rows)


def _rows_committed(segment: Path, most: int) -> int:
    """Return how many rows a segment says it has, or as many as there can be."""
    with suppress(OSError, FormatError):
        data = read_regular(str(segment / layout.COMMITTED / "c.0"), None, 8 * layout.MAX_LANES)
        rows = np.frombuffer(data[: len(data) & ~7], "<i8").astype(np.float64).clip(0).sum()
        return int(min(rows, most))
    return most


def _rows_with_flags(segment: Path) -> int:
    """Return for how many rows a segment has files; a flag is a byte."""
    with suppress(OSError):
        return sum(entry.lstat().st_size for entry in (segment / layout.DONE).iterdir() if entry.name.startswith("c."))
    return 0
