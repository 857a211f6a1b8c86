"""Repairs one damaged segment: restores its files, rebuilds it from undamaged episodes, or moves it to quarantine."""

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diskreplay.errors import DamagedSegmentWarning, FormatError
from diskreplay.integrity.repair.remedies import Remedies, prove, without
from diskreplay.integrity.repair.repair_documents import from_copy, known_in_segment
from diskreplay.integrity.verify.check_segment import verify_folder
from diskreplay.integrity.verify.files import Problem
from diskreplay.integrity.verify.verify import read_packs, segment_numbers
from diskreplay.reading.follower import Follower
from diskreplay.segments.damage.damage import Damage, find_damage
from diskreplay.segments.damage.quarantine import QUARANTINE, note_change
from diskreplay.segments.damage.unproven import Fate, fate_of
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import keep_hidden
from diskreplay.segments.files.mapping import read_regular
from diskreplay.segments.packs import PackTables, read_tables
from diskreplay.segments.rebuild import build_copy, put_in_place
from diskreplay.segments.segment import SegmentInfo

_RANGES_SHOWN = 3
_OF_A_FILE = ("checksum", "missing", "size", "type", "unreadable")


@dataclass(frozen=True)
class Losses:
    """The steps that a damaged segment loses if it is rebuilt from its undamaged episodes."""

    info: SegmentInfo
    damage: Damage
    tables: PackTables | None = None  # None: the segment is not a pack

    @property
    def steps(self) -> int:
        """The number of lost steps, without the steps that the segment had lost earlier."""
        return max(0, self.damage.steps_lost - self.info.lost.steps)

    def __str__(self) -> str:
        if not any(self.damage.more.values()):
            return "no step is lost"
        episodes, steps = self.damage.episodes, self.steps
        count = f"{episodes} episode{'' if episodes == 1 else 's'}"
        if self.damage.flags_damaged:
            count = f"at least {count}" if episodes else "part of an episode, or more"
        ranges = sorted(self._ids())
        ids = ", ".join(
            f"{first} to {last}" if first < last else f"{first}" for first, last, _ in ranges[:_RANGES_SHOWN]
        )
        more = f" and {len(ranges) - _RANGES_SHOWN} more ranges" if len(ranges) > _RANGES_SHOWN else ""
        strides = {stride for _, _, stride in ranges}
        every = f", every {min(strides)}th of each range" if len(strides) == 1 and strides != {1} else ""
        return f"{count}, {steps} step{'' if steps == 1 else 's'} lost, ids {ids}{more}{every}"

    def _ids(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first id, the last id and the stride of each range of lost rows."""
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
    """Whether a problem of the segment in the folder ``where`` may come from damaged rows.

    Such a problem is gone when the segment has been rebuilt from its undamaged episodes.
    """
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
    name = problem.where.removeprefix(f"{where}/")
    folder, _, file = name.rpartition("/")
    in_table = folder in layout.EPISODE_FOLDERS and file in (layout.METADATA, "c.0")
    return problem.kind == "episodes" or in_table or name in layout.EPISODE_FOLDERS


def find_losses(
    info: SegmentInfo, evicted: Mapping[int, Sequence[tuple[int, int]]], *, is_table_damaged: bool
) -> Losses | None:
    """Return what a segment loses if it is rebuilt; None: it cannot be rebuilt, or no damage was found.

    A segment cannot be rebuilt if no step would remain, if its row counters are damaged, or if a table of a pack is
    damaged. ``evicted`` has the episodes evicted by hand: {segment number: [(position of the first step, number of
    steps)]}. ``is_table_damaged`` is True if the table of episodes is damaged. Such damage loses no step.
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
    """Return (first row, number of steps) of each episode that was evicted by hand from a pack."""
    entries = [(n << layout.POSITION_BITS | p, s) for n in tables.numbers.tolist() for p, s in evicted.get(n, [])]
    ids, steps = np.array(entries, np.int64).reshape(-1, 2).T
    lanes = tables.lanes[tables.places(ids >> layout.POSITION_BITS)]
    rows = tables.rows_of(ids)
    # An invalid eviction must not remove rows of another lane.
    good = tables.ids_of(rows + steps - 1) == ids + (steps - 1) * lanes
    return list(zip(rows[good].tolist(), steps[good].tolist(), strict=True))


def steps_at_stake(info: SegmentInfo | None, segment: Path) -> int:
    """Return the number of steps that a segment's zarr.json states, or else the number of its committed rows.

    The stated number is not used if the segment's files have no room for so many steps.
    """
    rows = _rows_with_flags(segment)
    counted = info.steps if info is not None and info.steps and info.steps <= rows else 0
    return counted or _rows_committed(segment, rows)


def _rows_committed(segment: Path, most: int) -> int:
    with suppress(OSError, FormatError):
        data = read_regular(str(segment / layout.COMMITTED / "c.0"), None, 8 * layout.MAX_LANES)
        rows = np.frombuffer(data[: len(data) & ~7], "<i8").astype(np.float64).clip(0).sum()
        return int(min(rows, most))
    return most


def _rows_with_flags(segment: Path) -> int:
    """Return the size of a segment's files of flags: one byte for each row of each lane."""
    with suppress(OSError):
        return sum(entry.lstat().st_size for entry in (segment / layout.DONE).iterdir() if entry.name.startswith("c."))
    return 0


# --- the repair of a segment ------------------------------------------------------------------------------------------


# The maximum number of rounds of a repair: after a file is restored, the check may find more damage.
_ROUNDS = 4


class SegmentRepair:
    """Repairs damaged segments one by one; the caller holds the locks of the store and of the segment."""

    def __init__(self, remedies: Remedies) -> None:
        self._remedies = remedies
        self._root, self._dry_run = remedies.root, remedies.dry_run

    def repair(self, number: int, problems: list[Problem]) -> None:
        remedies, where = self._remedies, layout.segment_folder(number)
        if not self._dry_run and all(problem.where != where for problem in problems):
            problems = remedies.verify_segment(number)  # the segment may have been sealed or evicted meanwhile
        info = remedies.read(number)
        if info is None and self._restore_document(where, problems):
            if self._dry_run:
                return
            info, problems = remedies.read(number), remedies.verify_segment(number)
        if info is not None and not info.sealed and (fate_of(info) is Fate.COPIED or prove(info) is not None):
            return  # `DeadWriters` seals or rebuilds this segment with its proven rows
        problems = self._repair_in_place(number, info, problems)
        if problems and not (info is not None and self._undo_pack(info, where, problems)):
            detail, steps = _summary(problems, where), steps_at_stake(info, self._root / where)
            if remedies.may_lose(where, detail, steps):
                document_steps = steps - info.lost.steps if info is not None and info.steps == steps else None
                remedies.set_aside(where, detail, steps, document_steps=document_steps)

    def _repair_in_place(self, number: int, info: SegmentInfo | None, problems: list[Problem]) -> list[Problem]:
        where = layout.segment_folder(number)
        for _ in range(_ROUNDS):
            if not problems:
                break
            of_rows = [] if info is None else [p for p in problems if is_of_rows(info, where, p)]
            others = [p for p in problems if p not in of_rows]
            if others and not self._repair_files(info, where, others):
                return problems
            if of_rows and info is not None and (self._dry_run or not others):
                is_done = self._undo_pack(info, where, of_rows) or self._rebuild(info, where, of_rows)
                return [] if is_done else problems
            if not self._dry_run:
                note_change(self._root)  # readers that left out the damaged segment read the repaired one
            problems = [] if self._dry_run else self._remedies.verify_segment(number)
        return problems

    # --- files -------------------------------------------------------------------------------------------------------

    def _restore_document(self, where: str, problems: list[Problem]) -> bool:
        path = self._root / where
        data = None if path.is_symlink() else from_copy(path / layout.METADATA, path / layout.DOCUMENT_COPY)
        if data is None:
            return False
        self._remedies.restore(f"{where}/{layout.METADATA}", data, f"{_summary(problems, where)}; from its copy")
        return True

    def _repair_files(self, info: SegmentInfo | None, where: str, problems: list[Problem]) -> bool:
        """Repair each damaged file; if a file cannot be repaired, change nothing and return False."""
        folders = [f"{where}/{name}" for name in (*layout.PACK_TABLES, *layout.EPISODE_FOLDERS)]
        found = self._find_contents(info, where, problems, folders)
        if found is None:
            return False
        wanted = {str(parent) for file, (known, _) in found.items() if known for parent in Path(file).parents}
        for folder in folders if not self._dry_run else ():
            if folder in wanted:
                (self._root / folder).mkdir(exist_ok=True)
        for file, (known, detail) in found.items():
            if known is None:
                self._remedies.set_aside(file, detail)
            else:
                self._remedies.restore(file, known, detail)
        return True

    def _find_contents(
        self, info: SegmentInfo | None, where: str, problems: list[Problem], folders: list[str]
    ) -> dict[str, tuple[bytes | None, str]] | None:
        """Return {damaged file: (right content, problem in words)}; None: a file cannot be repaired.

        A content of None means that the file does not belong to the segment. ``folders`` lists the folders that can be
        made again.
        """
        found: dict[str, tuple[bytes | None, str]] = {}
        for problem in problems:
            name = problem.where.removeprefix(f"{where}/")
            if info is not None and problem.where in folders and problem.kind == "missing":
                continue  # each file of a missing folder has its own problem
            known = None if info is None else known_in_segment(info, name)
            is_lock = name == f"{layout.COMMITTED}/{layout.LOCK}"  # a lock may be missing: its first use makes it
            if known is None and (name == problem.where or not (problem.kind == "unexpected" or is_lock)):
                return None
            parent = (self._root / problem.where).parent
            if known is not None and not parent.is_dir() and str(parent.relative_to(self._root)) not in folders:
                return None
            found[problem.where] = known, problem.detail
        return found

    # --- rows --------------------------------------------------------------------------------------------------------

    def _undo_pack(self, info: SegmentInfo, where: str, problems: list[Problem]) -> bool:
        """Move a damaged pack to quarantine if its merged segments still exist undamaged; else return False."""
        if info.packed is None or not self._has_sources(info):
            return False
        detail = f"{_summary(problems, where)}; the segments that were put into it are still there"
        self._remedies.set_aside(where, detail, document_steps=0)
        return True

    def _has_sources(self, pack: SegmentInfo) -> bool:
        try:
            wanted = {*read_tables(pack).numbers.tolist()}
        except (OSError, FormatError):
            return False
        files = self._remedies.files
        older = [number for number in segment_numbers(files) if number < pack.number]
        holders = {number: {number} for number in older if number in wanted}
        for number, tables in read_packs(files, self._remedies.plan, older).items():
            if wanted.issuperset(tables.numbers):
                holders[number] = {*tables.numbers}
        return wanted == set[int]().union(*holders.values()) and not any(map(self._remedies.verify_segment, holders))

    def _rebuild(self, info: SegmentInfo, where: str, problems: list[Problem]) -> bool:
        """Replace a segment by a copy of its undamaged episodes; if that is impossible, return False.

        Also returns True if the replacement is refused because it would lose more steps than allowed.
        """
        is_table_damaged = any(is_of_table(problem, where) for problem in problems)
        losses = find_losses(info, self._remedies.evicted, is_table_damaged=is_table_damaged)
        if losses is None:
            return False
        detail = f"{_summary(problems, where)}; {losses}"
        if not self._remedies.may_lose(where, detail, losses.steps):
            return True
        now: str | None = f"{QUARANTINE}/{where}"
        goes = "would go to" if self._dry_run else "is now"
        if not self._dry_run:
            self._keep_hidden()
            now = self._replace(losses, detail)
        if now is not None:
            self._remedies.note("rebuilt", where, f"{detail}; the damaged one {goes} {now}", losses.steps)
        return now is not None

    def _keep_hidden(self) -> None:
        """Keep hidden steps hidden: with the lost steps gone, the store's capacity would hide fewer steps."""
        store = self._remedies.store
        if store.limits.capacity is None:
            return
        counters = store.counters(writable=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamagedSegmentWarning)  # this repair handles the damage
                follower = Follower(store, counters)
        except (FormatError, OSError):
            return  # the hidden steps are unknown
        hidden_before = follower.snapshot.hidden_before
        follower.close()
        keep_hidden(counters, hidden_before)

    def _replace(self, losses: Losses, reason: str) -> str | None:
        """Put a rebuilt segment in place of the damaged one, and return the new path of the damaged one.

        Returns None and changes nothing if the new segment cannot be built or fails verification: the segment was
        damaged before it was sealed, or its small files are damaged, too. Raises StorageFull and changes nothing if the
        disk is full.
        """
        number = losses.info.number
        try:
            built = build_copy(losses.info, losses.damage)
        except (FormatError, FileNotFoundError, NotADirectoryError):
            return None
        # Unproven rows stay unproven in the new segment.
        found = verify_folder(str(self._root), built, number, self._remedies.plan, self._remedies.evicted)
        if without(found, "unproven"):
            shutil.rmtree(self._root / built, ignore_errors=True)
            return None
        return put_in_place(self._remedies.store, number, built, reason, losses.steps)


def _summary(problems: list[Problem], where: str) -> str:
    name = problems[0].where.removeprefix(f"{where}/")
    return problems[0].detail if name == where else f"{name} {problems[0].detail}"
