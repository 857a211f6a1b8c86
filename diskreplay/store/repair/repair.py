"""Repairs a store: what is damaged is restored, rebuilt or set aside, and segments of dead writers are sealed."""

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path

from diskreplay.errors import DamagedSegmentWarning, FormatError, StorageFull, StoreNotFound
from diskreplay.folders import OpenFolder, is_folder, shown_paths
from diskreplay.format import layout
from diskreplay.format.damaged_copies import Proof, prove_by_blocks
from diskreplay.format.eviction_list import keep_hidden
from diskreplay.format.locks import held_lock, is_locked, try_lock
from diskreplay.format.packs import read_tables
from diskreplay.format.quarantine import QUARANTINE, move_aside, note_change, quarantined_numbers, read_quarantine
from diskreplay.format.rebuild import build_copy, finish_replacements, put_in_place
from diskreplay.format.removals import PREFIX, destroy
from diskreplay.format.root import Root, open_home, read_root
from diskreplay.format.sealing import may_seal
from diskreplay.format.segment import SegmentInfo, is_never_written, read_segment
from diskreplay.format.unproven import WHY, Fate, fate_of
from diskreplay.store.reading.follower import Follower
from diskreplay.store.repair.losses import Losses, find_losses, is_of_rows, is_of_table, steps_at_stake
from diskreplay.store.repair.repair_documents import (
    from_copy,
    known_document,
    known_in_segment,
    repair_words,
    restore_file,
)
from diskreplay.store.repair.repaired import Action, Repaired, without
from diskreplay.store.repair.restore import restore_segment
from diskreplay.store.repair.salvage import salvage
from diskreplay.store.retention.retention import LOCK_OF_DRAFT, Retention
from diskreplay.store.writing.marker import Marker
from diskreplay.store.writing.sealer import Sealer
from diskreplay.verify.check_root import COUNTERS_FILE, GROUPS, read_evictions, read_plan, read_words
from diskreplay.verify.check_segment import verify_folder, verify_segment
from diskreplay.verify.documents import Plan
from diskreplay.verify.files import Files, Problem
from diskreplay.verify.pack_tables import find_superseded
from diskreplay.verify.verify import check_beside, read_packs, segment_numbers, verify

Progress = Callable[[int, int], None]
# A counter that was repaired may show what could not be seen before.
_ROUNDS = 4
_ELSEWHERE = {*GROUPS, layout.METADATA, COUNTERS_FILE, f"{layout.COUNTERS}/{layout.LOCK}"}
# What begins like this is being made or deleted; some have a lock that their maker holds.
_TEMPORARY = {PREFIX: "", "new-": "", **LOCK_OF_DRAFT}
# Longer than a living process takes to put in place what it makes, or to remove it: what then stays was left behind.
_PAUSE_S = 0.05


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

    Small files whose content follows from others are written again. A sealed segment with damaged rows is rebuilt
    with the episodes that are whole, under the same ids, and the damaged one goes into quarantine; so does a segment
    of which nothing is left, or that cannot be read at all, and what has no place in a store. Segments whose writer
    died are sealed. What a living writer holds is left alone. Every sealed chunk is read once, or where it is damaged
    a few times. Readers follow with their next refresh.

    The arguments are those of `Store.repair`. Other processes may use the store meanwhile; where its folder is moved,
    on its file system, it is followed. ``progress`` is called with the bytes that were read of segments, and of
    all of them. Raises what `Store.repair` does, but never ReadOnlyError; ValueError where ``max_lost_steps`` is no
    number of steps, FormatError where the store is of a version that this release does not know.
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
    """One repair of one store: what it has to know, and the list of what it did. Used by one thread."""

    _plan: Plan  # what the root says of every segment

    def __init__(
        self, home: OpenFolder, dry_run: bool, foreign: bool, salvage: bool, max_lost_steps: int | None
    ) -> None:
        self._home, self._root, self._dry_run = home, home.path, dry_run
        self._foreign, self._salvage, self._most = foreign, salvage, max_lost_steps
        self._actions: list[Action] = []

    @cached_property
    def _store(self) -> Root:
        return read_root(self._home.name, self._home)

    @property
    def _files(self) -> Files:
        return Files(str(self._root))

    def run(self, progress: Progress | None) -> Repaired:
        """Repair everything."""
        problems = without(verify(self._home, deep=True, progress=progress), "quarantine")
        plan = read_plan(self._files)
        if plan is None:  # without its own document nothing is known about a store
            data = from_copy(self._root / layout.METADATA, self._root / layout.ROOT_COPY)
            if data is not None:
                self._note("restored", layout.METADATA, f"{problems[0].detail}; from its copy")
            if data is None or self._dry_run:
                return Repaired(self._actions, problems)
            with self._store_lock():
                restore_file(self._root / layout.METADATA, data)
            return self.run(progress)
        self._plan = plan
        if not self._has_lock():
            return Repaired(self._actions, problems)
        with self._store_lock():
            self._repair_damage(problems)
        # Before anything is repaired, the store may be unreadable to what finds dead writers.
        with suppress(FormatError) if self._dry_run else nullcontext():
            self._seal_dead()
            if self._salvage:
                self._actions += salvage(self._store, dry_run=self._dry_run)
        left = problems if self._dry_run else without(verify(self._home), "quarantine")
        return Repaired(self._actions, left, read_quarantine(self._root))

    # --- what can be done --------------------------------------------------------------------------------------------

    def _note(self, what: str, where: str, detail: str, steps: int = 0) -> None:
        self._actions.append(Action(what, where, detail, steps))

    def _store_lock(self) -> AbstractContextManager[None]:
        return nullcontext() if self._dry_run else held_lock(self._root / layout.COUNTERS / layout.LOCK)

    @contextmanager
    def _segment_lock(self, where: str) -> Iterator[bool]:
        """Hold a segment's lock, and yield whether it has no living writer. What is not a folder has no lock."""
        committed = self._root / where / layout.COMMITTED
        path = committed / layout.LOCK
        lock, is_free = None, True
        if not (self._root / where).is_symlink() and not committed.is_symlink() and committed.is_dir():
            try:
                lock = None if self._dry_run else try_lock(path)
                is_free = not is_locked(path) if self._dry_run else lock is not None
            except PermissionError:
                is_free = False
            except (FormatError, OSError):  # a link or a folder: no writer can hold it
                pass
        try:
            yield is_free
        finally:
            if lock is not None:
                lock.release()

    def _read(self, number: int) -> SegmentInfo | None:
        try:
            return read_segment(self._store, number)
        except (FormatError, OSError):
            return None

    def _verify_segment(self, number: int) -> list[Problem]:
        found, _ = verify_segment(str(self._root), number, self._plan, deep=True, evicted={})
        return without(found, "unproven")

    def _set_aside(self, where: str, detail: str, steps: int = 0, *, said: int | None = None) -> None:
        """Move something into quarantine, for which so many steps are lost.

        ``said`` are the steps that a segment's own document tells of; None: they are counted.
        """
        now = f"{QUARANTINE}/{where}" if self._dry_run else move_aside(self._root, where, detail, steps=said)
        self._note("quarantined", where, f"{detail}; now {now}", steps)

    def _may_lose(self, where: str, detail: str, steps: int) -> bool:
        """Whether so many steps more may be set aside; that they may not is noted."""
        left = None if self._most is None else max(0, self._most - Repaired(self._actions).steps_lost)
        if left is None or steps <= left:
            return True
        self._note("refused", where, f"{detail}; {steps} steps would be set aside, and {left} may be", steps)
        return False

    def _restore(self, where: str, data: bytes, detail: str) -> None:
        """Restore a file; a folder in its place is set aside."""
        if is_folder(self._root / where):
            self._set_aside(where, detail)
        if self._dry_run or restore_file(self._root / where, data):
            self._note("restored", where, detail)

    def _make_group(self, name: str) -> None:
        if not self._dry_run:
            (self._root / name).mkdir()
        where = f"{name}/{layout.METADATA}"
        self._restore(where, known_document(self._plan, where, 0) or b"", "was missing")

    # --- beside the segments -----------------------------------------------------------------------------------------

    def _has_lock(self) -> bool:
        """Make the folder of the store lock where it is missing; return whether it is there."""
        folder = self._root / layout.COUNTERS
        if not os.path.lexists(folder):
            self._make_group(layout.COUNTERS)
            if self._dry_run:
                return True
        if not is_folder(folder):
            return False
        lock = folder / layout.LOCK
        if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file()):
            self._set_aside(f"{layout.COUNTERS}/{layout.LOCK}", "is not a regular file")
        return True

    def _repair_damage(self, problems: list[Problem]) -> None:
        """Repair everything but what dead writers left."""
        self._finish_others()
        if not self._dry_run:
            problems = self._still_found(problems)
        for problem in problems:
            if problem.where in GROUPS and problem.where != layout.COUNTERS and problem.kind in ("missing", "type"):
                if problem.kind == "type":
                    self._set_aside(problem.where, problem.detail)
                self._make_group(problem.where)
        numbers = segment_numbers(self._files)
        if any(problem.where in (layout.COUNTERS, COUNTERS_FILE) for problem in problems):
            self._repair_counters(numbers)
        names = {layout.segment_folder(number): number for number in numbers}
        damaged: dict[int, list[Problem]] = {}
        for problem in problems:
            if problem.kind == "unproven":
                continue  # no damage: it is kept where it is
            number = names.get("/".join(problem.where.split("/")[:2]))
            if number is None:
                self._repair_beside(problem)
            else:
                damaged.setdefault(number, []).append(problem)
        # Rows of some of them may have been put into a pack since.
        superseded = find_superseded(read_packs(self._files, self._plan, numbers)) if damaged else set[int]()
        for number, found in sorted(damaged.items()):
            if number in superseded and all(problem.where != layout.segment_folder(number) for problem in found):
                continue
            with self._segment_lock(layout.segment_folder(number)) as is_free:
                if is_free:
                    self._repair_segment(number, found)

    def _still_found(self, problems: list[Problem]) -> list[Problem]:
        """Leave out findings beside the segments that are gone under the lock: the files were just being replaced.

        Segments are looked at again one by one, and counters say themselves whether they are right.
        """
        words = (layout.COUNTERS, COUNTERS_FILE)
        beside = [p for p in problems if not p.where.startswith(f"{layout.SEGMENTS}/") and p.where not in words]
        if not beside:
            return problems
        are_of_states = any(p.where.startswith(f"{layout.SAMPLERS}/") for p in beside)
        still = {(p.kind, p.where) for p in check_beside(str(self._root), self._plan, are_of_states).problems}
        return [p for p in problems if p not in beside or (p.kind, p.where) in still]

    def _repair_counters(self, numbers: list[int]) -> None:
        path = self._root / COUNTERS_FILE
        if is_folder(path):
            self._set_aside(COUNTERS_FILE, "is a folder")
        aside = quarantined_numbers(self._root)
        packs = read_packs(self._files, self._plan, numbers)
        numbers = sorted({*numbers, *(number for tables in packs.values() for number in tables.numbers)})
        detail = "from the segments that are there" if self._dry_run else repair_words(self._root, numbers, aside)
        if detail is not None:
            self._note("recomputed", COUNTERS_FILE, detail)

    def _repair_beside(self, problem: Problem) -> None:
        parts = problem.where.split("/")
        words = read_words(self._files)
        data = known_document(self._plan, problem.where, 0 if words is None else words.evictions, self._root)
        if data is not None:
            self._restore(problem.where, data, problem.detail)
        elif parts[0] == layout.SAMPLERS and len(parts) > 2 and problem.kind != "unexpected":
            if os.path.lexists(self._root / "/".join(parts[:2])):  # else it was moved for another of its files
                self._set_aside("/".join(parts[:2]), f"{'/'.join(parts[2:])} {problem.detail}")
        elif problem.where.startswith(f"{layout.NOTES}/") or (
            problem.kind in ("unexpected", "type") and problem.where not in _ELSEWHERE
        ):
            self._set_aside(problem.where, problem.detail)
        elif parts[0] == layout.LIMITERS and len(parts) == 3:
            self._set_aside("/".join(parts[:2]), problem.detail)

    # --- segments ----------------------------------------------------------------------------------------------------

    def _repair_segment(self, number: int, problems: list[Problem]) -> None:
        """Restore what can be of a damaged segment, else set it aside; one with a living writer is left alone."""
        where = layout.segment_folder(number)
        if not self._dry_run and all(problem.where != where for problem in problems):
            problems = self._verify_segment(number)  # it may have been sealed since, or evicted
        info = self._read(number)
        if info is None and self._restore_document(where, problems):
            if self._dry_run:
                return
            info, problems = self._read(number), self._verify_segment(number)
        if info is not None and not info.sealed and (fate_of(info) is Fate.COPIED or _prove(info) is not None):
            return  # it is sealed, or rebuilt, as far as it is proven
        for _ in range(_ROUNDS):
            if not problems:
                return
            of_rows = [] if info is None else [p for p in problems if is_of_rows(info, where, p)]
            others = [p for p in problems if p not in of_rows]
            if others and not self._repair_files(info, where, others):
                break
            if of_rows and info is not None and (self._dry_run or not others):
                if self._undo_pack(info, where, of_rows) or self._rebuild(info, where, of_rows):
                    return
                break
            if not self._dry_run:
                note_change(self._root)  # readers may have left it out
            problems = [] if self._dry_run else self._verify_segment(number)
        if problems and not (info is not None and self._undo_pack(info, where, problems)):
            detail, steps = _summary(problems, where), steps_at_stake(info, self._root / where)
            if self._may_lose(where, detail, steps):
                said = steps - info.lost.steps if info is not None and info.steps == steps else None
                self._set_aside(where, detail, steps, said=said)

    def _undo_pack(self, info: SegmentInfo, where: str, problems: list[Problem]) -> bool:
        """Set a damaged pack aside if all segments whose rows it has are still there, whole: they count again."""
        if info.packed is None or not self._has_sources(info):
            return False
        detail = f"{_summary(problems, where)}; the segments that were put into it are still there"
        self._set_aside(where, detail, said=0)
        return True

    def _has_sources(self, pack: SegmentInfo) -> bool:
        try:
            wanted = {*read_tables(pack).numbers.tolist()}
        except (OSError, FormatError):
            return False
        files = self._files
        older = [number for number in segment_numbers(files) if number < pack.number]
        holders = {number: {number} for number in older if number in wanted}
        for number, tables in read_packs(files, self._plan, older).items():
            if wanted.issuperset(tables.numbers):
                holders[number] = {*tables.numbers}
        return wanted == set[int]().union(*holders.values()) and not any(map(self._verify_segment, holders))

    def _restore_document(self, where: str, problems: list[Problem]) -> bool:
        """Restore a sealed segment's own document from its copy."""
        path = self._root / where
        data = None if path.is_symlink() else from_copy(path / layout.METADATA, path / layout.DOCUMENT_COPY)
        if data is None:
            return False
        self._restore(f"{where}/{layout.METADATA}", data, f"{_summary(problems, where)}; from its copy")
        return True

    def _repair_files(self, info: SegmentInfo | None, where: str, problems: list[Problem]) -> bool:
        """Repair a segment file by file, if there is a remedy for each; else change nothing and return False."""
        remedies: dict[str, tuple[bytes | None, str]] = {}
        folders = [f"{where}/{name}" for name in (*layout.PACK_TABLES, *layout.EPISODE_FOLDERS)]
        for problem in problems:
            name = problem.where.removeprefix(f"{where}/")
            if info is not None and problem.where in folders and problem.kind == "missing":
                continue  # so are its files
            known = None if info is None else known_in_segment(info, name)
            is_lock = name == f"{layout.COMMITTED}/{layout.LOCK}"  # it may be missing: taking a lock creates it
            if known is None and (name == problem.where or not (problem.kind == "unexpected" or is_lock)):
                return False
            parent = (self._root / problem.where).parent
            if known is not None and not parent.is_dir() and str(parent.relative_to(self._root)) not in folders:
                return False
            remedies[problem.where] = known, problem.detail
        wanted = {str(parent) for file, (known, _) in remedies.items() if known for parent in Path(file).parents}
        for folder in folders if not self._dry_run else ():
            if folder in wanted:
                (self._root / folder).mkdir(exist_ok=True)
        for file, (known, detail) in remedies.items():
            if known is None:
                self._set_aside(file, detail)
            else:
                self._restore(file, known, detail)
        return True

    # --- rebuilding --------------------------------------------------------------------------------------------------

    @cached_property
    def _evicted(self) -> dict[int, list[tuple[int, int]]]:
        """Position and steps of the episodes of each segment that were evicted by hand."""
        files = self._files
        words = read_words(files)
        return {} if words is None else read_evictions(files, self._plan, words)

    def _finish_others(self) -> None:
        """Complete the replacement of damaged segments that a process died in."""
        if self._dry_run:
            return
        with suppress(FormatError):  # the store's counters may have to be repaired first; an opener finishes it then
            for number in finish_replacements(self._store):
                where = layout.segment_folder(number)
                self._note("rebuilt", where, "a process died in the middle of it")

    def _keep_hidden(self) -> None:
        """See that what a capacity hides stays hidden, though fewer steps will be left to count."""
        if self._store.limits.capacity is None:
            return
        counters = self._store.counters(writable=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamagedSegmentWarning)  # it is being repaired
                follower = Follower(self._store, counters)
        except (FormatError, OSError):
            return  # what it hides cannot be read
        hidden_before = follower.snapshot.hidden_before
        follower.close()
        keep_hidden(counters, hidden_before)

    def _rebuild(self, info: SegmentInfo, where: str, problems: list[Problem]) -> bool:
        """Replace a segment by what is whole of it; False where that cannot be done, and nothing was changed."""
        is_table_damaged = any(is_of_table(problem, where) for problem in problems)
        losses = find_losses(info, self._evicted, is_table_damaged=is_table_damaged)
        if losses is None:
            return False
        detail = f"{_summary(problems, where)}; {losses}"
        if not self._may_lose(where, detail, losses.steps):
            return True
        now: str | None = f"{QUARANTINE}/{where}"
        goes = "would go to" if self._dry_run else "is now"
        if not self._dry_run:
            self._keep_hidden()
            now = self._replace(losses, detail)
        if now is not None:
            self._note("rebuilt", where, f"{detail}; the damaged one {goes} {now}", losses.steps)
        return now is not None

    def _replace(self, losses: Losses, reason: str) -> str | None:
        """Rebuild a segment and put it in place of the damaged one; return where that one is now.

        None, and nothing is changed, where what was built is not in order: the segment was damaged before it was
        sealed, or its small files are too. Raises StorageFull where there is no room for it; nothing is changed.
        """
        number = losses.info.number
        try:
            built = build_copy(losses.info, losses.damage)
        except (FormatError, FileNotFoundError, NotADirectoryError):
            return None
        # Rows that do not count, as nothing proves them, are kept as they were.
        found = verify_folder(str(self._root), built, number, self._plan, self._evicted)
        if without(found, "unproven"):
            shutil.rmtree(self._root / built, ignore_errors=True)
            return None
        return put_in_place(self._store, number, built, reason, losses.steps)

    # --- dead writers ------------------------------------------------------------------------------------------------

    def _seal_dead(self) -> None:
        """Seal the segments of dead writers, and delete what was never finished or is half evicted.

        As the next process that opens the store with mode "a" does. It takes the store lock itself.
        """
        unsealed = [info for info in self._unsealed() if self._foreign or may_seal(info)]
        leftovers, lost = self._dead_leftovers(), self._never_written()
        fates = {info.number: fate_of(info) for info in unsealed}
        proofs = {info.number: _prove(info) for info in unsealed}
        # Of what another process has sealed and retention taken out meanwhile, there was nothing to be read.
        unsealed = [info for info in unsealed if info.path.is_dir()]
        if not self._dry_run:
            self._seal(unsealed)
            leftovers -= self._leftovers()
        for where in lost:
            self._note("quarantined", where, f"was not written when the power went; now in {QUARANTINE}")
        for name in sorted(leftovers):
            # A living process deletes without the store lock, which may take long.
            detail = "was being deleted" if name.startswith(PREFIX) else "a process died in the middle of it"
            self._note("removed", f"{layout.COUNTERS}/{name}", detail)
        for info in unsealed:
            self._note_fate(info, fates[info.number], proofs[info.number])

    def _seal(self, unsealed: list[SegmentInfo]) -> None:
        retention = Retention(self._store, self._store.counters(writable=True))
        sealer = Sealer(self._store, partial(_count_sealed, retention), Marker(self._store))
        with suppress(FormatError):  # what a living writer holds may be damaged; that is reported in the end
            while dead := retention.dead_segments():
                for info, lock in dead:
                    sealer.submit(info, lock)
        if self._foreign:
            self._submit_foreign(retention, sealer, unsealed)
        try:
            sealer.drain()
        except (FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            self._give_up(unsealed, error)

    def _note_fate(self, info: SegmentInfo, fate: Fate, proof: Proof | None) -> None:
        """Note what became of a segment of a dead writer, or would; a damaged copy has a ``proof``."""
        now = info if self._dry_run else self._read(info.number)
        where = layout.segment_folder(info.number)
        if self._dry_run and any(action.where == where for action in self._actions):
            return  # it would be gone by now
        kept = None if now is None or now.steps is None else now.steps - now.lost.steps
        if proof and fate is not Fate.REMOVED and (self._dry_run or kept == proof.damage.steps_kept):
            detail = f"a copy with damaged blocks, {proof.damage.steps_kept} steps kept"
            self._note("rebuilt", where, detail, proof.steps_lost)
            return
        if fate not in (Fate.SEALED, Fate.COPIED):
            if self._dry_run or now is None:
                place = f"; now in {QUARANTINE}" if fate is Fate.SET_ASIDE else ""
                self._note(fate.value, where, f"{WHY[fate]}{place}")
            return
        if fate is Fate.COPIED:
            self._note("quarantined", where, f"{WHY[fate]}; a copy is in {QUARANTINE}")
        if now is not None and (self._dry_run or now.sealed):
            steps = "" if now.steps is None else f", {now.steps - now.lost.steps} steps kept"
            self._note("sealed", where, f"its writer is gone{steps}")

    def _never_written(self) -> list[str]:
        """Return the segments that say nothing of themselves since the power went, where no writer holds them."""
        names = [layout.segment_folder(n) for n in segment_numbers(self._files)]
        return [
            name
            for name in names
            if is_never_written(str(self._root / name))
            and not is_locked(self._root / name / layout.COMMITTED / layout.LOCK)
        ]

    def _dead_leftovers(self) -> set[str]:
        """Return what processes that died left; what a living one is just making or removing is gone after a while."""
        found = self._leftovers()
        if found:
            time.sleep(_PAUSE_S)
            found &= self._leftovers()
        return found

    def _leftovers(self) -> set[str]:
        names = self._files.listing(layout.COUNTERS) or {}
        folder = self._root / layout.COUNTERS
        return {
            name
            for name in names
            for beginning, lock in _TEMPORARY.items()
            if name.startswith(beginning) and not (lock and is_locked(folder / name / lock))
        }

    def _unsealed(self) -> list[SegmentInfo]:
        """Return the unsealed segments that no living process of this machine holds."""
        files = self._files
        words = read_words(files)
        found = (self._read(n) for n in segment_numbers(files) if words is None or n < words.next_segment)
        return [info for info in found if info and not info.sealed and not is_locked(info.lock_path)]

    def _give_up(self, unsealed: list[SegmentInfo], error: Exception) -> None:
        """Set aside what cannot be sealed: no row of it was safe, or verify would have found what is missing."""
        with held_lock(self._store.lock_path):
            for info in unsealed:
                where = layout.segment_folder(info.number)
                now = self._read(info.number)
                with self._segment_lock(where) as is_free:
                    if is_free and now is not None and not now.sealed:
                        self._set_aside(where, f"cannot be sealed: {error}")

    def _submit_foreign(self, retention: Retention, sealer: Sealer, unsealed: list[SegmentInfo]) -> None:
        gone: list[str] = []
        with held_lock(self._store.lock_path):
            for info in unsealed:
                if may_seal(info) or (lock := try_lock(info.lock_path)) is None:
                    continue
                if retention.has_to_be_sealed(info, gone):
                    sealer.submit(info, lock)
                else:
                    lock.release()
        destroy(self._store, gone)


def _prove(info: SegmentInfo) -> Proof | None:
    with suppress(FormatError, OSError):
        return prove_by_blocks(info)
    return None


def _summary(problems: list[Problem], where: str) -> str:
    """Return what is wrong with a segment: the first of it."""
    name = problems[0].where.removeprefix(f"{where}/")
    return problems[0].detail if name == where else f"{name} {problems[0].detail}"


def _count_sealed(retention: Retention) -> None:
    """Notify readers; where that fails, they check by themselves once a second."""
    with suppress(FormatError, StorageFull):
        retention.count_sealed()
