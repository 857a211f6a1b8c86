"""Repairs what can be repaired of a store: damaged segments are rebuilt or set aside, those of dead writers sealed."""

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import NamedTuple

from diskreplay.errors import FormatError, StoreNotFound
from diskreplay.folders import OpenFolder, is_folder, shown_paths
from diskreplay.format import layout
from diskreplay.format.locks import held_lock
from diskreplay.format.quarantine import note_change, quarantined_numbers, read_quarantine
from diskreplay.format.root import open_home, read_root
from diskreplay.format.segment import SegmentInfo
from diskreplay.format.unproven import Fate, fate_of
from diskreplay.store.repair.dead_writers import DeadWriters
from diskreplay.store.repair.rebuilding import Rebuilder, is_of_rows, steps_at_stake, told
from diskreplay.store.repair.repair_documents import (
    from_copy,
    known_document,
    known_in_segment,
    mend_words,
    restore as write_anew,
)
from diskreplay.store.repair.repaired import Action, Repaired
from diskreplay.store.repair.restore import restore_segment
from diskreplay.store.repair.tools import RepairTools
from diskreplay.verify.check_quarantine import check_quarantine
from diskreplay.verify.check_root import COUNTERS_FILE, GROUPS, check_root, read_hidden, read_plan, read_words
from diskreplay.verify.check_segment import verify_segment
from diskreplay.verify.check_states import verify_states
from diskreplay.verify.documents import Plan
from diskreplay.verify.files import Files, Problem
from diskreplay.verify.verify import segment_numbers, verify

__all__ = ["Action", "Repaired", "repair", "without_quarantine"]

Progress = Callable[[int, int], None]
# Mending a counter may show what could not be seen before.
_ROUNDS = 4
_ELSEWHERE = {*GROUPS, layout.METADATA, COUNTERS_FILE, f"{layout.COUNTERS}/{layout.LOCK}"}


@shown_paths()
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
    """Repair a store without deleting anything: what cannot be repaired is moved to ``counters/quarantine``.

    Small files whose right bytes follow from others are written anew. A sealed segment with damaged rows is rebuilt
    with the episodes that are whole, under the same ids, and the damaged one goes into quarantine; so does a segment
    of which nothing is left, or that cannot be read at all, and what has no place in a store. Segments whose writer
    died are sealed. What a living writer holds is left alone. Every sealed chunk is read once, or where it is damaged
    a few times. Readers follow with their next refresh.

    The arguments are those of `Store.repair`. Other processes may use the store meanwhile; where its folder is moved,
    on its file system, it is followed. ``progress`` is called with the number of segments that were looked at, and of
    all of them. Raises what `Store.repair` does, but never ReadOnlyError; ValueError where ``max_lost_steps`` is no
    number of steps, FormatError where the store is of a version that this release does not know.
    """
    if max_lost_steps is not None and (type(max_lost_steps) is not int or max_lost_steps < 0):
        raise ValueError(f"max_lost_steps is a number of steps, or None for no limit, not {max_lost_steps!r}")
    home = open_home(path)
    how = _How(dry_run, foreign, salvage, max_lost_steps, progress)
    try:
        return _repair(home, how) if restore is None else _restore(home, restore, dry_run)
    except OSError as error:
        if isinstance(error, StoreNotFound) or not home.is_deleted():
            raise
        gone = f"{home.name} was deleted, or moved to another file system, while it was repaired"
        raise StoreNotFound(gone) from error


class _How(NamedTuple):
    """The arguments of `repair`."""

    dry_run: bool
    foreign: bool
    salvage: bool
    max_lost_steps: int | None
    progress: Progress | None


def _repair(home: OpenFolder, how: _How) -> Repaired:
    root, dry_run = home.path, how.dry_run
    problems = without_quarantine(verify(home, deep=True, progress=how.progress))
    plan = read_plan(Files(str(root)))
    if plan is None:  # without its own document nothing is known about a store
        data = from_copy(root / layout.METADATA, root / layout.ROOT_COPY)
        if data is None:
            return Repaired(left=problems)
        restored = Action("restored", layout.METADATA, f"{problems[0].detail}; from its copy")
        if dry_run:
            return Repaired([restored], problems)
        with held_lock(root / layout.COUNTERS / layout.LOCK):
            write_anew(root / layout.METADATA, data)
        done = _repair(home, how)
        return Repaired([restored, *done.actions], done.left, done.quarantine)
    mender = _Mender(home, plan, dry_run, how.max_lost_steps)
    if not mender.has_lock():
        return Repaired(mender.actions, problems)
    with nullcontext() if dry_run else held_lock(root / layout.COUNTERS / layout.LOCK):
        mender.mend(problems)
    # Before anything is mended, the store may be unreadable to what looks for dead writers.
    with suppress(FormatError) if dry_run else nullcontext():
        dead = DeadWriters(home, dry_run, mender.actions)
        dead.seal_dead(how.foreign)
        if how.salvage:
            dead.salvage()
    left = problems if dry_run else without_quarantine(verify(home))
    return Repaired(mender.actions, left, read_quarantine(root))


def without_quarantine(problems: list[Problem]) -> list[Problem]:
    """Return the findings but those of what is in quarantine: there is nothing to repair about it."""
    return [problem for problem in problems if problem.kind != "quarantine"]


def _restore(home: OpenFolder, number: int, dry_run: bool) -> Repaired:
    root = home.path
    store, plan = read_root(home.name, home), read_plan(Files(str(root)))
    if plan is None:
        raise FormatError(f"{home.name}: its zarr.json is damaged; restore that first")
    with nullcontext() if dry_run else held_lock(store.lock_path):
        entry = restore_segment(store, plan, number, dry_run=dry_run)
    steps = "" if entry.steps is None else f", {entry.steps} steps"
    where = f"{layout.SEGMENTS}/{layout.segment_name(number)}"
    left = [] if dry_run else without_quarantine(verify(home))
    return Repaired([Action("restored", where, f"from {entry.where}{steps}")], left, read_quarantine(root))


class _Mender(RepairTools):
    """One repair of one store. `mend` needs the store lock."""

    def __init__(self, home: OpenFolder, plan: Plan, dry_run: bool, max_lost_steps: int | None) -> None:
        super().__init__(home, dry_run, [])
        self._plan = plan
        self._rebuilder = Rebuilder(home, plan, dry_run, max_lost_steps, self.actions)

    # --- the ways to mend --------------------------------------------------------------------------------------------

    def _restore(self, where: str, data: bytes, detail: str) -> None:
        if is_folder(self._root / where):
            self._set_aside(where, detail)
        if self._dry_run or write_anew(self._root / where, data):
            self.actions.append(Action("restored", where, detail))

    def _make_group(self, name: str) -> None:
        if not self._dry_run:
            (self._root / name).mkdir()
        where = f"{name}/{layout.METADATA}"
        self._restore(where, known_document(self._plan, where, 0) or b"", "was missing")

    # --- beside the segments -----------------------------------------------------------------------------------------

    def has_lock(self) -> bool:
        """Make the folder of the store lock where it is missing, and tell whether it is there."""
        folder = self._root / layout.COUNTERS
        if not os.path.lexists(folder):
            self._make_group(layout.COUNTERS)
            if self._dry_run:
                return True
        if not is_folder(folder):
            return False
        lock = folder / layout.LOCK
        if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file()):
            self._set_aside(f"{layout.COUNTERS}/{layout.LOCK}", "is no regular file")
        return True

    def mend(self, problems: list[Problem]) -> None:
        """Mend everything but what dead writers left."""
        self._rebuilder.finish_others()
        if not self._dry_run:
            problems = self._still_found(problems)
        for problem in problems:
            if problem.where in GROUPS and problem.where != layout.COUNTERS and problem.kind in ("missing", "type"):
                if problem.kind == "type":
                    self._set_aside(problem.where, problem.detail)
                self._make_group(problem.where)
        numbers = segment_numbers(Files(str(self._root)))
        if any(problem.where in (layout.COUNTERS, COUNTERS_FILE) for problem in problems):
            self._mend_counters(numbers)
        names = {f"{layout.SEGMENTS}/{layout.segment_name(number)}": number for number in numbers}
        damaged: dict[int, list[Problem]] = {}
        for problem in problems:
            if problem.kind == "unproven":
                continue  # no damage: it is kept where it is
            number = names.get("/".join(problem.where.split("/")[:2]))
            if number is None:
                self._mend_beside(problem)
            else:
                damaged.setdefault(number, []).append(problem)
        for number, found in sorted(damaged.items()):
            self._mend_segment(number, found)

    def _still_found(self, problems: list[Problem]) -> list[Problem]:
        """Leave out what was found beside the segments while it was being replaced: nobody does that under the lock.

        Segments are looked at again one by one, and counters say themselves whether they are right.
        """
        words = (layout.COUNTERS, COUNTERS_FILE)
        beside = [p for p in problems if not p.where.startswith(f"{layout.SEGMENTS}/") and p.where not in words]
        if not beside:
            return problems
        files = Files(str(self._root))
        good = check_root(files, self._plan)
        counters = read_words(files) if layout.COUNTERS in good else None
        if counters is not None and layout.HIDDEN in good:
            read_hidden(files, self._plan, counters)
        if layout.COUNTERS in good:
            check_quarantine(files, None)
        found = files.problems
        for name in {p.where.split("/")[1] for p in beside if p.where.startswith(f"{layout.SAMPLERS}/")}:
            found += verify_states(str(self._root), name)
        gone = set(beside) - {p for p in beside if any((p.kind, p.where) == (f.kind, f.where) for f in found)}
        return [problem for problem in problems if problem not in gone]

    def _mend_counters(self, numbers: list[int]) -> None:
        path = self._root / COUNTERS_FILE
        if is_folder(path):
            self._set_aside(COUNTERS_FILE, "is a folder")
        aside = quarantined_numbers(self._root)
        detail = "from the segments that are there" if self._dry_run else mend_words(self._root, numbers, aside)
        if detail is not None:
            self.actions.append(Action("mended", COUNTERS_FILE, detail))

    def _mend_beside(self, problem: Problem) -> None:
        parts = problem.where.split("/")
        words = read_words(Files(str(self._root)))
        data = known_document(self._plan, problem.where, 0 if words is None else words.hidden, self._root)
        if data is not None:
            self._restore(problem.where, data, problem.detail)
        elif parts[0] == layout.SAMPLERS and len(parts) > 2 and problem.kind != "unexpected":
            if os.path.lexists(self._root / "/".join(parts[:2])):  # else it was moved for another of its files
                self._set_aside("/".join(parts[:2]), f"{'/'.join(parts[2:])} {problem.detail}")
        elif problem.kind in ("unexpected", "type") and problem.where not in _ELSEWHERE:
            self._set_aside(problem.where, problem.detail)
        elif parts[0] == layout.LIMITERS and len(parts) == 3:
            self._set_aside("/".join(parts[:2]), problem.detail)

    # --- segments ----------------------------------------------------------------------------------------------------

    def _mend_segment(self, number: int, problems: list[Problem]) -> None:
        """Restore what can be of a damaged segment, else set it aside; one with a living writer is left alone."""
        where = f"{layout.SEGMENTS}/{layout.segment_name(number)}"
        lock, is_free = self._lock(where)
        if not is_free:
            return
        try:
            if not self._dry_run and all(problem.where != where for problem in problems):
                problems = self._look(number)  # it may have been sealed since, or evicted
            info = self._read(number)
            if info is None and self._restore_document(where, problems):
                if self._dry_run:
                    return
                info, problems = self._read(number), self._look(number)
            if info is not None and not info.sealed and fate_of(self._store, info) is Fate.COPIED:
                return  # it is sealed as far as it is proven
            for _ in range(_ROUNDS):
                if not problems:
                    return
                of_rows = [p for p in problems if is_of_rows(info, self._plan, p.where.removeprefix(f"{where}/"), p)]
                others = [p for p in problems if p not in of_rows]
                if others and not self._mend_inside(info, where, others):
                    break
                if of_rows and info is not None and (self._dry_run or not others):
                    if self._rebuilder.rebuild(info, where, of_rows):
                        return
                    break
                if not self._dry_run:
                    note_change(self._root)  # readers may have left it out
                problems = [] if self._dry_run else self._look(number)
            if problems:
                detail, steps = told(problems, where), steps_at_stake(info, self._root / where)
                if self._rebuilder.may_lose(where, detail, steps):
                    said = steps - info.lost.steps if info is not None and info.steps == steps else None
                    self._set_aside(where, detail, steps, said=said)
        finally:
            if lock is not None:
                lock.release()

    def _restore_document(self, where: str, problems: list[Problem]) -> bool:
        """Restore a sealed segment's own document from its copy."""
        path = self._root / where
        data = None if path.is_symlink() else from_copy(path / layout.METADATA, path / layout.DOCUMENT_COPY)
        if data is None:
            return False
        self._restore(f"{where}/{layout.METADATA}", data, f"{told(problems, where)}; from its copy")
        return True

    def _look(self, number: int) -> list[Problem]:
        found = verify_segment(str(self._root), number, self._plan, deep=True, hidden=[])[0]
        return [problem for problem in found if problem.kind != "unproven"]

    def _mend_inside(self, info: SegmentInfo | None, where: str, problems: list[Problem]) -> bool:
        """Mend a segment file by file, if there is a remedy for each; else change nothing and tell so."""
        remedies: dict[str, bytes | None] = {}
        for problem in problems:
            name = problem.where.removeprefix(f"{where}/")
            known = None if info is None else known_in_segment(info, self._plan, name)
            is_lock = name == f"{layout.COMMITTED}/{layout.LOCK}"  # as good as none: who takes it makes it
            if known is None and (name == problem.where or not (problem.kind == "unexpected" or is_lock)):
                return False
            if known is not None and not (self._root / problem.where).parent.is_dir():
                return False
            remedies[problem.where] = known
        details = {problem.where: problem.detail for problem in problems}
        for file, known in remedies.items():
            if known is None:
                self._set_aside(file, details[file])
            else:
                self._restore(file, known, details[file])
        return True
