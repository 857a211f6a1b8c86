"""The actions of a repair on the files of a store, and the result of a repair."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property

from diskreplay.errors import FormatError
from diskreplay.folders import OpenFolder, is_folder
from diskreplay.integrity.repair.repair_documents import known_document, restore_file
from diskreplay.integrity.verify.check_root import read_evictions, read_words
from diskreplay.integrity.verify.check_segment import verify_segment
from diskreplay.integrity.verify.documents import Plan
from diskreplay.integrity.verify.files import Files, Problem
from diskreplay.segments.damage.quarantine import QUARANTINE, Quarantined, move_aside
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root, read_root
from diskreplay.segments.files.locks import held_lock, is_locked, try_lock
from diskreplay.segments.rebuild import Proof, prove_by_blocks
from diskreplay.segments.segment import SegmentInfo, read_segment


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a repair, or of its dry run.

    Attributes
    ----------
    what : str
        ``"sealed"``, ``"salvaged"``, ``"quarantined"``, ``"rebuilt"``, ``"restored"``, ``"recomputed"``,
        ``"removed"``, or ``"refused"`` if the action would have set aside more steps than allowed.
    where : str
        The path of the file or folder, relative to the store.
    detail : str
        The reason of the action, or the new path of the file or folder.
    steps : int
        The number of steps that the action set aside (moved to quarantine) or, if it was refused, would have set aside.
    """

    what: str
    where: str
    detail: str
    steps: int = 0


@dataclass
class Repaired:
    """The actions of a repair, the problems that remain, and the segments in quarantine."""

    actions: list[Action] = field(default_factory=list)
    left: list[Problem] = field(default_factory=list)
    quarantine: list[Quarantined] = field(default_factory=list)

    @property
    def steps_lost(self) -> int:
        """The number of steps that were set aside or, after a dry run, would be set aside."""
        return sum(action.steps for action in self.actions if action.what != "refused")

    @property
    def steps_refused(self) -> int:
        return sum(action.steps for action in self.actions if action.what == "refused")


def without(problems: list[Problem], kind: str) -> list[Problem]:
    return [problem for problem in problems if problem.kind != kind]


# --- the actions ------------------------------------------------------------------------------------------------------


class Remedies:
    """Restores files of a store or moves them to quarantine; a dry run only lists the actions.

    Not thread-safe. ``plan`` has the layout of the segments. It is set after the store's zarr.json was found undamaged.
    """

    plan: Plan

    def __init__(self, home: OpenFolder, dry_run: bool, max_lost_steps: int | None) -> None:
        self.home, self.root, self.dry_run = home, home.path, dry_run
        self._most = max_lost_steps
        self.actions: list[Action] = []

    @cached_property
    def store(self) -> Root:
        return read_root(self.home.name, self.home)

    @property
    def files(self) -> Files:
        """A new `Files` of the store; its problems are not reported."""
        return Files(str(self.root))

    @cached_property
    def evicted(self) -> dict[int, list[tuple[int, int]]]:
        """The episodes evicted by hand: {segment number: [(position of the first step, number of steps)]}."""
        files = self.files
        words = read_words(files)
        return {} if words is None else read_evictions(files, self.plan, words)

    def note(self, what: str, where: str, detail: str, steps: int = 0) -> None:
        self.actions.append(Action(what, where, detail, steps))

    def store_lock(self) -> AbstractContextManager[None]:
        return nullcontext() if self.dry_run else held_lock(self.root / layout.COUNTERS / layout.LOCK)

    @contextmanager
    def segment_lock(self, where: str) -> Iterator[bool]:
        """Hold a segment's lock for a `with` block, and yield True; yield False if a living writer may hold the lock.

        A dry run checks the lock without taking it. Without a lock file, no writer can hold the lock, and True is
        yielded.
        """
        committed = self.root / where / layout.COMMITTED
        path = committed / layout.LOCK
        lock, is_free = None, True
        if not (self.root / where).is_symlink() and not committed.is_symlink() and committed.is_dir():
            try:
                lock = None if self.dry_run else try_lock(path)
                is_free = not is_locked(path) if self.dry_run else lock is not None
            except PermissionError:
                is_free = False
            except (FormatError, OSError):  # the lock is a link or a folder: no writer can hold it
                pass
        try:
            yield is_free
        finally:
            if lock is not None:
                lock.release()

    def read(self, number: int) -> SegmentInfo | None:
        try:
            return read_segment(self.store, number)
        except (FormatError, OSError):
            return None

    def verify_segment(self, number: int) -> list[Problem]:
        found, _ = verify_segment(str(self.root), number, self.plan, deep=True, evicted={})
        return without(found, "unproven")

    def set_aside(self, where: str, detail: str, steps: int = 0, *, document_steps: int | None = None) -> None:
        """Move a file or folder to quarantine, and count ``steps`` as lost.

        ``document_steps`` is the number of steps to record for a segment in quarantine; None: the steps are counted.
        """
        now = f"{QUARANTINE}/{where}" if self.dry_run else move_aside(self.root, where, detail, steps=document_steps)
        self.note("quarantined", where, f"{detail}; now {now}", steps)

    def may_lose(self, where: str, detail: str, steps: int) -> bool:
        allowed = None if self._most is None else max(0, self._most - Repaired(self.actions).steps_lost)
        if allowed is None or steps <= allowed:
            return True
        self.note("refused", where, f"{detail}; {steps} steps would be set aside, but only {allowed} may be", steps)
        return False

    def restore(self, where: str, data: bytes, detail: str) -> None:
        if is_folder(self.root / where):
            self.set_aside(where, detail)
        if self.dry_run or restore_file(self.root / where, data):
            self.note("restored", where, detail)

    def make_group(self, name: str) -> None:
        if not self.dry_run:
            (self.root / name).mkdir()
        where = f"{name}/{layout.METADATA}"
        self.restore(where, known_document(self.plan, where, 0) or b"", "was missing")


def prove(info: SegmentInfo) -> Proof | None:
    with suppress(FormatError, OSError):
        return prove_by_blocks(info)
    return None
