"""Repairs a store: restores, rebuilds or sets aside damaged files, and seals the segments of dead writers."""

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress

from diskreplay.errors import FormatError, StoreNotFound
from diskreplay.folders import OpenFolder, is_folder, shown_paths
from diskreplay.integrity.repair.dead_writers import DeadWriters, salvage
from diskreplay.integrity.repair.remedies import Remedies, Repaired, without
from diskreplay.integrity.repair.repair_documents import from_copy, known_document, repair_words, restore_file
from diskreplay.integrity.repair.restore import restore_segment
from diskreplay.integrity.repair.segment_repair import SegmentRepair
from diskreplay.integrity.verify.check_root import COUNTERS_FILE, GROUPS, read_plan, read_words
from diskreplay.integrity.verify.files import Problem
from diskreplay.integrity.verify.pack_tables import find_superseded
from diskreplay.integrity.verify.verify import check_outside_segments, read_packs, segment_numbers, verify
from diskreplay.segments.damage.quarantine import quarantined_numbers, read_quarantine
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import open_home
from diskreplay.segments.rebuild import finish_replacements

Progress = Callable[[int, int], None]
_ELSEWHERE = {*GROUPS, layout.METADATA, COUNTERS_FILE, f"{layout.COUNTERS}/{layout.LOCK}"}


@shown_paths
def repair(
    path: str | os.PathLike[str] | OpenFolder,
    *,
    dry_run: bool = False,
    foreign: bool = False,
    salvage: bool = False,
    restore: int | None = None,
    max_lost_steps: int | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Repair a store without deleting any data: files that cannot be repaired are moved to ``counters/quarantine``.

    `Store.repair` describes the arguments. A damaged small file is written again if its content can be computed from
    other files. A sealed segment with damaged rows is rebuilt from its undamaged episodes, with the same ids, and the
    damaged segment goes into quarantine. A segment also goes into quarantine if it cannot be read, or has no undamaged
    episode. A file that does not belong in a store goes into quarantine, too. Segments of dead writers are sealed, and
    segments of living writers are left alone. Readers see the repaired segments with their next refresh.

    Other processes may use the store meanwhile. The store's folder may be moved within its file system. ``progress`` is
    called with the number of bytes read so far, and the number of bytes of all segments. Raises the errors of
    `Store.repair` except ReadOnlyError. Also raises ValueError if ``max_lost_steps`` is not a number of steps, and
    FormatError if this release does not know the version of the store.
    """
    if max_lost_steps is not None and (type(max_lost_steps) is not int or max_lost_steps < 0):
        raise ValueError(f"max_lost_steps is a number of steps, or None for no limit, not {max_lost_steps!r}")
    home = open_home(path)
    try:
        if restore is not None:
            return restore_segment(home, restore, dry_run=dry_run)
        return _Repair(home, dry_run, foreign, salvage, max_lost_steps).run(progress)
    except OSError as error:
        if isinstance(error, StoreNotFound) or not home.is_deleted():
            raise
        gone = f"{home.name} was deleted, or moved to another file system, while it was repaired"
        raise StoreNotFound(gone) from error


class _Repair:
    def __init__(
        self, home: OpenFolder, dry_run: bool, foreign: bool, salvage: bool, max_lost_steps: int | None
    ) -> None:
        self._remedies = Remedies(home, dry_run, max_lost_steps)
        self._home, self._root, self._dry_run = home, home.path, dry_run
        self._foreign, self._salvage = foreign, salvage

    def run(self, progress: Progress | None) -> Repaired:
        problems = without(verify(self._home, deep=True, progress=progress), "quarantine")
        plan = read_plan(self._remedies.files)
        if plan is None:  # only the store's zarr.json describes the layout of its segments
            data = from_copy(self._root / layout.METADATA, self._root / layout.ROOT_COPY)
            if data is not None:
                self._remedies.note("restored", layout.METADATA, f"{problems[0].detail}; from its copy")
            if data is None or self._dry_run:
                return Repaired(self._remedies.actions, problems)
            with self._remedies.store_lock():
                restore_file(self._root / layout.METADATA, data)
            return self.run(progress)
        self._remedies.plan = plan
        if not self._has_lock():
            return Repaired(self._remedies.actions, problems)
        with self._remedies.store_lock():
            self._repair_damage(problems)
        # In a dry run, the store is still damaged, so the search for dead writers may fail to read it.
        with suppress(FormatError) if self._dry_run else nullcontext():
            DeadWriters(self._remedies, self._foreign).seal()
            if self._salvage:
                self._remedies.actions += salvage(self._remedies.store, dry_run=self._dry_run)
        left = problems if self._dry_run else without(verify(self._home), "quarantine")
        return Repaired(self._remedies.actions, left, read_quarantine(self._root))

    # --- outside the segments ----------------------------------------------------------------------------------------

    def _has_lock(self) -> bool:
        folder = self._root / layout.COUNTERS
        if not os.path.lexists(folder):
            self._remedies.make_group(layout.COUNTERS)
            if self._dry_run:
                return True
        if not is_folder(folder):
            return False
        lock = folder / layout.LOCK
        if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file()):
            self._remedies.set_aside(f"{layout.COUNTERS}/{layout.LOCK}", "is not a regular file")
        return True

    def _repair_damage(self, problems: list[Problem]) -> None:
        self._finish_others()
        if not self._dry_run:
            problems = self._still_found(problems)
        self._repair_groups(problems)
        numbers = segment_numbers(self._remedies.files)
        if any(problem.where in (layout.COUNTERS, COUNTERS_FILE) for problem in problems):
            self._repair_counters(numbers)
        names = {layout.segment_folder(number): number for number in numbers}
        damaged: dict[int, list[Problem]] = {}
        for problem in problems:
            if problem.kind == "unproven":
                continue  # unproven rows are not damage
            number = names.get("/".join(problem.where.split("/")[:2]))
            if number is None:
                self._repair_outside_segments(problem)
            else:
                damaged.setdefault(number, []).append(problem)
        self._repair_segments(damaged, numbers)

    def _repair_groups(self, problems: list[Problem]) -> None:
        for problem in problems:
            if problem.where in GROUPS and problem.where != layout.COUNTERS and problem.kind in ("missing", "type"):
                if problem.kind == "type":
                    self._remedies.set_aside(problem.where, problem.detail)
                self._remedies.make_group(problem.where)

    def _repair_segments(self, damaged: dict[int, list[Problem]], numbers: list[int]) -> None:
        if not damaged:
            return
        # Another process may have merged some of these segments into a pack since they were verified.
        superseded = find_superseded(read_packs(self._remedies.files, self._remedies.plan, numbers))
        segments = SegmentRepair(self._remedies)
        for number, found in sorted(damaged.items()):
            where = layout.segment_folder(number)
            if number in superseded and all(problem.where != where for problem in found):
                continue
            with self._remedies.segment_lock(where) as is_free:
                if is_free:
                    segments.repair(number, found)

    def _still_found(self, problems: list[Problem]) -> list[Problem]:
        """Check files outside the segments again under the store lock, and return the problems that remain.

        If a problem is gone, another process was replacing the file during the first check. Problems of segments and of
        the counters are returned unchecked: the repair of a segment or of the counters begins with a check.
        """
        words = (layout.COUNTERS, COUNTERS_FILE)
        outside = [p for p in problems if not p.where.startswith(f"{layout.SEGMENTS}/") and p.where not in words]
        if not outside:
            return problems
        are_of_states = any(p.where.startswith(f"{layout.SAMPLERS}/") for p in outside)
        still = {
            (p.kind, p.where)
            for p in check_outside_segments(str(self._root), self._remedies.plan, are_of_states).problems
        }
        return [p for p in problems if p not in outside or (p.kind, p.where) in still]

    def _repair_counters(self, numbers: list[int]) -> None:
        path = self._root / COUNTERS_FILE
        if is_folder(path):
            self._remedies.set_aside(COUNTERS_FILE, "is a folder")
        aside = quarantined_numbers(self._root)
        packs = read_packs(self._remedies.files, self._remedies.plan, numbers)
        numbers = sorted({*numbers, *(number for tables in packs.values() for number in tables.numbers)})
        detail = "from the segments that are there" if self._dry_run else repair_words(self._root, numbers, aside)
        if detail is not None:
            self._remedies.note("recomputed", COUNTERS_FILE, detail)

    def _repair_outside_segments(self, problem: Problem) -> None:
        parts = problem.where.split("/")
        words = read_words(self._remedies.files)
        data = known_document(self._remedies.plan, problem.where, 0 if words is None else words.evictions, self._root)
        if data is not None:
            self._remedies.restore(problem.where, data, problem.detail)
        elif parts[0] == layout.SAMPLERS and len(parts) > 2 and problem.kind != "unexpected":
            state = self._root / "/".join(parts[:2])
            if os.path.lexists(state):  # the repair of another file may have moved the state
                self._remedies.set_aside("/".join(parts[:2]), f"{'/'.join(parts[2:])} {problem.detail}")
        elif problem.where.startswith(f"{layout.NOTES}/") or (
            problem.kind in ("unexpected", "type") and problem.where not in _ELSEWHERE
        ):
            self._remedies.set_aside(problem.where, problem.detail)
        elif parts[0] == layout.LIMITERS and len(parts) == 3:
            self._remedies.set_aside("/".join(parts[:2]), problem.detail)

    def _finish_others(self) -> None:
        """Complete the replacements of damaged segments that another process began before it died."""
        if self._dry_run:
            return
        with suppress(FormatError):  # the next process that opens the store completes the replacements
            for number in finish_replacements(self._remedies.store):
                self._remedies.note("rebuilt", layout.segment_folder(number), "a process that died had begun this")
