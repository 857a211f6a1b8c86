"""Repairs of one damaged segment: its files are restored, or it is rebuilt from what is whole, or set aside."""

import shutil
import warnings
from pathlib import Path

from diskreplay.errors import DamagedSegmentWarning, FormatError
from diskreplay.integrity.repair.losses import Losses, find_losses, is_of_rows, is_of_table, steps_at_stake
from diskreplay.integrity.repair.remedies import Remedies, prove
from diskreplay.integrity.repair.repair_documents import from_copy, known_in_segment
from diskreplay.integrity.repair.repaired import without
from diskreplay.integrity.verify.check_segment import verify_folder
from diskreplay.integrity.verify.files import Problem
from diskreplay.integrity.verify.verify import read_packs, segment_numbers
from diskreplay.reading.follower import Follower
from diskreplay.segments.damage.quarantine import QUARANTINE, note_change
from diskreplay.segments.damage.unproven import Fate, fate_of
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import keep_hidden
from diskreplay.segments.packs import read_tables
from diskreplay.segments.rebuild import build_copy, put_in_place
from diskreplay.segments.segment import SegmentInfo

# A file that was restored may show what could not be seen before.
_ROUNDS = 4


class SegmentRepair:
    """Repairs damaged segments one by one. The caller holds the store lock, and the segment's. Used by one thread."""

    def __init__(self, remedies: Remedies) -> None:
        self._remedies = remedies
        self._root, self._dry_run = remedies.root, remedies.dry_run

    def repair(self, number: int, problems: list[Problem]) -> None:
        """Restore what can be of a damaged segment, else set it aside."""
        remedies, where = self._remedies, layout.segment_folder(number)
        if not self._dry_run and all(problem.where != where for problem in problems):
            problems = remedies.verify_segment(number)  # it may have been sealed since, or evicted
        info = remedies.read(number)
        if info is None and self._restore_document(where, problems):
            if self._dry_run:
                return
            info, problems = remedies.read(number), remedies.verify_segment(number)
        if info is not None and not info.sealed and (fate_of(info) is Fate.COPIED or prove(info) is not None):
            return  # it is sealed, or rebuilt, as far as it is proven
        problems = self._repair_in_place(number, info, problems)
        if problems and not (info is not None and self._undo_pack(info, where, problems)):
            detail, steps = _summary(problems, where), steps_at_stake(info, self._root / where)
            if remedies.may_lose(where, detail, steps):
                said = steps - info.lost.steps if info is not None and info.steps == steps else None
                remedies.set_aside(where, detail, steps, said=said)

    def _repair_in_place(self, number: int, info: SegmentInfo | None, problems: list[Problem]) -> list[Problem]:
        """Restore the files of a segment and rebuild its rows; return the problems that have no remedy."""
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
                note_change(self._root)  # readers may have left it out
            problems = [] if self._dry_run else self._remedies.verify_segment(number)
        return problems

    # --- files -------------------------------------------------------------------------------------------------------

    def _restore_document(self, where: str, problems: list[Problem]) -> bool:
        """Restore a sealed segment's own document from its copy."""
        path = self._root / where
        data = None if path.is_symlink() else from_copy(path / layout.METADATA, path / layout.DOCUMENT_COPY)
        if data is None:
            return False
        self._remedies.restore(f"{where}/{layout.METADATA}", data, f"{_summary(problems, where)}; from its copy")
        return True

    def _repair_files(self, info: SegmentInfo | None, where: str, problems: list[Problem]) -> bool:
        """Repair a segment file by file, if there is a remedy for each; else change nothing and return False."""
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
        """Return the right content of each file that is wrong, and the reason; None: one of them has no remedy.

        A file without content does not belong there. ``folders`` are those that can be made again.
        """
        found: dict[str, tuple[bytes | None, str]] = {}
        for problem in problems:
            name = problem.where.removeprefix(f"{where}/")
            if info is not None and problem.where in folders and problem.kind == "missing":
                continue  # so are its files
            known = None if info is None else known_in_segment(info, name)
            is_lock = name == f"{layout.COMMITTED}/{layout.LOCK}"  # it may be missing: taking a lock creates it
            if known is None and (name == problem.where or not (problem.kind == "unexpected" or is_lock)):
                return None
            parent = (self._root / problem.where).parent
            if known is not None and not parent.is_dir() and str(parent.relative_to(self._root)) not in folders:
                return None
            found[problem.where] = known, problem.detail
        return found

    # --- rows --------------------------------------------------------------------------------------------------------

    def _undo_pack(self, info: SegmentInfo, where: str, problems: list[Problem]) -> bool:
        """Set a damaged pack aside if all segments whose rows it has are still there, whole: they count again."""
        if info.packed is None or not self._has_sources(info):
            return False
        detail = f"{_summary(problems, where)}; the segments that were put into it are still there"
        self._remedies.set_aside(where, detail, said=0)
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
        """Replace a segment by what is whole of it; False where that cannot be done, and nothing was changed."""
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
        """See that what a capacity hides stays hidden, though fewer steps will be left to count."""
        store = self._remedies.store
        if store.limits.capacity is None:
            return
        counters = store.counters(writable=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamagedSegmentWarning)  # it is being repaired
                follower = Follower(store, counters)
        except (FormatError, OSError):
            return  # what it hides cannot be read
        hidden_before = follower.snapshot.hidden_before
        follower.close()
        keep_hidden(counters, hidden_before)

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
        found = verify_folder(str(self._root), built, number, self._remedies.plan, self._remedies.evicted)
        if without(found, "unproven"):
            shutil.rmtree(self._root / built, ignore_errors=True)
            return None
        return put_in_place(self._remedies.store, number, built, reason, losses.steps)


def _summary(problems: list[Problem], where: str) -> str:
    """Return what is wrong with a segment: the first of it."""
    name = problems[0].where.removeprefix(f"{where}/")
    return problems[0].detail if name == where else f"{name} {problems[0].detail}"
