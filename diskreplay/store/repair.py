"""Mends what can be mended of a store: damaged segments are set aside, and those of dead writers sealed."""

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from diskreplay.errors import FormatError
from diskreplay.format import layout
from diskreplay.format.durable import Lock, held_lock, is_locked, try_lock
from diskreplay.format.mending import (
    QUARANTINE,
    add_evicted,
    known_document,
    known_in_segment,
    mend_words,
    move_aside,
    restore,
)
from diskreplay.format.root import Root, read_root
from diskreplay.format.sealing import may_seal
from diskreplay.format.segment import SegmentInfo, read_segment
from diskreplay.format.unwritten import has_no_durable_row, is_never_written
from diskreplay.format.verify_documents import Plan
from diskreplay.format.verify_files import Files, Problem
from diskreplay.format.verify_root import COUNTERS_FILE, GROUPS, read_plan, read_words
from diskreplay.format.verify_segment import verify_segment
from diskreplay.store.retention import Retention
from diskreplay.store.sealer import Sealer
from diskreplay.store.verify import segment_numbers, verify

Progress = Callable[[int, int], None]
# Mending a counter may show what could not be seen before.
_ROUNDS = 3
_ELSEWHERE = {*GROUPS, layout.METADATA, COUNTERS_FILE, f"{layout.COUNTERS}/{layout.LOCK}"}
# What begins like this is being made or deleted; some have a lock that their maker holds.
_TEMPORARY = {"old-": "", "new-": "", "next-": f"{layout.COMMITTED}/{layout.LOCK}", "state-": layout.LOCK}


@dataclass(frozen=True, slots=True)
class Action:
    """Something that repair did, or would do.

    Attributes
    ----------
    what : str
        ``"sealed"``, ``"quarantined"``, ``"restored"``, ``"mended"`` or ``"removed"``.
    where : str
        The file or folder, relative to the store.
    detail : str
        Why, or what became of it.
    """

    what: str
    where: str
    detail: str


@dataclass
class Repaired:
    """What a repair did, and what is wrong after it."""

    actions: list[Action] = field(default_factory=list)
    left: list[Problem] = field(default_factory=list)


def repair(
    path: str | os.PathLike[str], *, dry_run: bool = False, foreign: bool = False, progress: Progress | None = None
) -> Repaired:
    """Mend a store without losing a byte: what is damaged beyond that is moved to ``counters/quarantine``.

    Small files whose right bytes follow from others are written anew. A damaged segment, and what has no place in a
    store, goes into quarantine, from where it can be moved back. Segments whose writer died are sealed. What a living
    writer holds is left alone. Every sealed chunk is read once.

    Parameters
    ----------
    path : path
        The folder of the store; other processes may use it meanwhile.
    dry_run : bool
        Change nothing, only tell what would be done.
    foreign : bool
        Seal also segments that another machine wrote, whose writer must be dead: that cannot be seen from here.
    progress : callable, optional
        Called with the number of segments that were looked at, and of all of them.

    Raises
    ------
    StoreNotFound
        There is no store at ``path``.
    FormatError
        It is of a version that this release does not know.
    StoreLocked
        Another process held the store's lock for a minute.
    """
    problems = verify(path, deep=True, progress=progress)
    root = Path(os.path.realpath(path))
    plan = read_plan(Files(str(root)))
    if plan is None:
        return Repaired(left=problems)  # without its own document nothing is known about a store
    mender = _Mender(root, plan, dry_run)
    if not mender.has_lock():
        return Repaired(mender.actions, problems)
    with nullcontext() if dry_run else held_lock(root / layout.COUNTERS / layout.LOCK):
        mender.mend(problems)
    # Before anything is mended, the store may be unreadable to what looks for dead writers.
    with suppress(FormatError) if dry_run else nullcontext():
        mender.seal_dead(foreign)
    return Repaired(mender.actions, problems if dry_run else verify(path))


class _Mender:
    """One repair of one store. `mend` needs the store lock."""

    def __init__(self, root: Path, plan: Plan, dry_run: bool) -> None:
        self._root, self._plan, self._dry_run = root, plan, dry_run
        self.actions: list[Action] = []

    @cached_property
    def _store(self) -> Root:
        return read_root(self._root)

    # --- the ways to mend --------------------------------------------------------------------------------------------

    def _set_aside(self, where: str, detail: str) -> None:
        now = f"{QUARANTINE}/{where}" if self._dry_run else move_aside(self._root, where)
        self.actions.append(Action("quarantined", where, f"{detail}; now {now}"))

    def _restore(self, where: str, data: bytes, detail: str) -> None:
        if (self._root / where).is_dir() and not (self._root / where).is_symlink():
            self._set_aside(where, detail)
        if self._dry_run or restore(self._root / where, data):
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
        if folder.is_symlink() or not folder.is_dir():
            return False
        lock = folder / layout.LOCK
        if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file()):
            self._set_aside(f"{layout.COUNTERS}/{layout.LOCK}", "is no regular file")
        return True

    def mend(self, problems: list[Problem]) -> None:
        """Mend everything but what dead writers left."""
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
            number = names.get("/".join(problem.where.split("/")[:2]))
            if number is None:
                self._mend_beside(problem)
            else:
                damaged.setdefault(number, []).append(problem)
        for number, found in sorted(damaged.items()):
            self._mend_segment(number, found)

    def _mend_counters(self, numbers: list[int]) -> None:
        path = self._root / COUNTERS_FILE
        if path.is_dir() and not path.is_symlink():
            self._set_aside(COUNTERS_FILE, "is a folder")
        detail = "from the segments that are there" if self._dry_run else mend_words(self._root, numbers)
        if detail is not None:
            self.actions.append(Action("mended", COUNTERS_FILE, detail))

    def _mend_beside(self, problem: Problem) -> None:
        parts = problem.where.split("/")
        words = read_words(Files(str(self._root)))
        data = known_document(self._plan, problem.where, 0 if words is None else words.hidden)
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
            for _ in range(_ROUNDS):
                if not problems:
                    return
                if not self._mend_inside(info, where, problems):
                    break
                problems = [] if self._dry_run else self._look(number)
            if problems:
                name = problems[0].where.removeprefix(f"{where}/")
                rows = _rows_with_flags(self._root / where)
                self._set_aside(where, problems[0].detail if name == where else f"{name} {problems[0].detail}")
                # A document that claims more than there is room for is not believed.
                if info is not None and info.steps and info.steps <= rows and not self._dry_run:
                    add_evicted(self._root, info.steps)
        finally:
            if lock is not None:
                lock.release()

    def _lock(self, where: str) -> tuple[Lock | None, bool]:
        """Return a segment's lock, and whether it has no living writer. One that is no folder has no lock."""
        committed = self._root / where / layout.COMMITTED
        path = committed / layout.LOCK
        if (self._root / where).is_symlink() or committed.is_symlink() or not committed.is_dir():
            return None, True
        if self._dry_run:
            return None, not is_locked(path)
        try:
            lock = try_lock(path)
        except PermissionError:
            return None, False
        except (FormatError, OSError):  # a link or a folder: no writer can hold it
            return None, True
        return lock, lock is not None

    def _look(self, number: int) -> list[Problem]:
        return verify_segment(str(self._root), number, self._plan, deep=True, hidden=[])[0]

    def _read(self, number: int) -> SegmentInfo | None:
        try:
            return read_segment(self._store, number)
        except (FormatError, OSError):
            return None

    def _mend_inside(self, info: SegmentInfo | None, where: str, problems: list[Problem]) -> bool:
        """Mend a segment file by file, if there is a remedy for each; else change nothing and tell so."""
        remedies: dict[str, bytes | None] = {}
        for problem in problems:
            name = problem.where.removeprefix(f"{where}/")
            known = None if info is None else known_in_segment(info, self._plan, name)
            is_lock = name == f"{layout.COMMITTED}/{layout.LOCK}"  # as good as none: who takes it makes it
            if known is None and (name == problem.where or not (problem.kind == "unexpected" or is_lock)):
                return False
            remedies[problem.where] = known
        details = {problem.where: problem.detail for problem in problems}
        for file, known in remedies.items():
            if known is None:
                self._set_aside(file, details[file])
            else:
                self._restore(file, known, details[file])
        return True

    # --- what died ---------------------------------------------------------------------------------------------------

    def seal_dead(self, foreign: bool) -> None:
        """Seal the segments of dead writers, and remove what was never finished or is half deleted."""
        root = self._store
        unsealed = [info for info in self._unsealed() if foreign or may_seal(info)]
        leftovers, lost = self._leftovers(), self._never_written()
        # As the next process that opens the store with mode "a" does.
        removed = [info for info in unsealed if not info.shows_live_rows and has_no_durable_row(str(info.path))]
        if not self._dry_run:
            retention, sealer = Retention(root, root.counters(writable=True)), Sealer(root, lambda: None)
            with suppress(FormatError):  # what a living writer holds may be damaged; it is told in the end
                while dead := retention.dead_segments():
                    for info, lock in dead:
                        sealer.submit(info, lock)
            if foreign:
                self._submit_foreign(root, sealer, unsealed)
            try:
                sealer.drain()
            except (FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                self._give_up(unsealed, error)
            leftovers -= self._leftovers()
        for where in lost:
            self.actions.append(
                Action("quarantined", where, f"was not written when the power went; now in {QUARANTINE}")
            )
        for name in sorted(leftovers):
            self.actions.append(Action("removed", f"{layout.COUNTERS}/{name}", "a process died in the middle of it"))
        for info in unsealed:
            now = info if self._dry_run else self._read(info.number)
            where = f"{layout.SEGMENTS}/{layout.segment_name(info.number)}"
            if info in removed and (self._dry_run or now is None):
                self.actions.append(Action("removed", where, "no row of it was durable when its machine went down"))
            elif now is not None and (self._dry_run or now.sealed):
                steps = "" if now.steps is None else f", {now.steps} steps kept"
                self.actions.append(Action("sealed", where, f"its writer is gone{steps}"))

    def _never_written(self) -> list[str]:
        """Return the segments that say nothing of themselves since the power went, where no writer holds them."""
        names = [f"{layout.SEGMENTS}/{layout.segment_name(n)}" for n in segment_numbers(Files(str(self._root)))]
        return [
            name
            for name in names
            if is_never_written(str(self._root / name))
            and not is_locked(self._root / name / layout.COMMITTED / layout.LOCK)
        ]

    def _leftovers(self) -> set[str]:
        names = Files(str(self._root)).listing(layout.COUNTERS) or {}
        folder = self._root / layout.COUNTERS
        return {
            name
            for name in names
            for beginning, lock in _TEMPORARY.items()
            if name.startswith(beginning) and not (lock and is_locked(folder / name / lock))
        }

    def _unsealed(self) -> list[SegmentInfo]:
        """Return the unsealed segments that no living process of this machine holds."""
        files = Files(str(self._root))
        words = read_words(files)
        found = (self._read(n) for n in segment_numbers(files) if words is None or n < words.next_segment)
        return [info for info in found if info and not info.sealed and not is_locked(info.lock_path)]

    def _give_up(self, unsealed: list[SegmentInfo], error: Exception) -> None:
        """Set aside what cannot be sealed: no row of it was safe, or verify would have found what is missing."""
        with held_lock(self._store.lock_path):
            for info in unsealed:
                where = f"{layout.SEGMENTS}/{layout.segment_name(info.number)}"
                now = self._read(info.number)
                lock, is_free = self._lock(where)
                if is_free and now is not None and not now.sealed:
                    self._set_aside(where, f"cannot be sealed: {error}")
                if lock is not None:
                    lock.release()

    def _submit_foreign(self, root: Root, sealer: Sealer, unsealed: list[SegmentInfo]) -> None:
        with held_lock(root.lock_path):
            for info in unsealed:
                if not may_seal(info) and (lock := try_lock(info.lock_path)) is not None:
                    sealer.submit(info, lock)


def _rows_with_flags(segment: Path) -> int:
    """Return for how many rows a segment has files; a flag is a byte."""
    with suppress(OSError):
        return sum(entry.lstat().st_size for entry in (segment / layout.DONE).iterdir() if entry.name.startswith("c."))
    return 0
