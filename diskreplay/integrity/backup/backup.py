"""Makes a consistent copy of a store while other processes may write."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, ReadOnlyError, StoreExists, StoreLocked
from diskreplay.folders import hidden_sibling, is_folder
from diskreplay.integrity.backup.copying import Account, Backup, Progress, SegmentVanished, copy_as_it_is, files_below
from diskreplay.integrity.backup.segments import LiveRows, copy_live, copy_sealed, read_live
from diskreplay.integrity.backup.store_files import StoreFiles, write_root_document
from diskreplay.reading.follower import Follower
from diskreplay.reading.step_account import Steps, read_account
from diskreplay.retention.policy import disk_usage
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import evicted_by_removals
from diskreplay.segments.documents.limiters import StepCounter
from diskreplay.segments.documents.metadata import Identity, identify, read_verified
from diskreplay.segments.documents.root import Root, check_local, read_root
from diskreplay.segments.files.copies import FileCopier, Unreadable
from diskreplay.segments.files.durable import (
    check_written,
    storage_errors,
    sync_file_system,
    sync_folder,
    write_file,
)
from diskreplay.segments.files.locks import held_lock, try_lock
from diskreplay.segments.files.numbers import listed_numbers
from diskreplay.segments.marks import shows_live_rows
from diskreplay.segments.packs import current_numbers
from diskreplay.segments.sealing import seal_segments
from diskreplay.segments.segment import DAMAGE, NeverWritten, SegmentInfo, read_segment

# The maximum number of attempts; each attempt copies the state of a later moment.
_MOMENTS = 4


def back_up(root: Root, to: os.PathLike[str] | str, *, link: bool = True, progress: Progress | None = None) -> Backup:
    check_local(to)
    target = Path(to).absolute()
    root.counters().read()  # invalid counters raise an error before a folder is made
    with root.still_there(), storage_errors(target, full_message(target)), unfinished(root, target) as folder:
        copying = _Backup(root, read_root(folder), link, progress)
        copying.run()
        made = copying.result(target)
    return made


@dataclass
class _Moment:
    """The counters of a store at one moment, and the segments that are still to be copied."""

    words: NDArray[np.int64]
    kept: set[int] = field(default_factory=set)  # sealed segments that were copied before this moment and still exist
    sealed: list[SegmentInfo] = field(default_factory=list)
    live: list[LiveRows] = field(default_factory=list)
    # The segments that are copied file by file: {number: damage in words, or "" if there is none to report}.
    others: dict[int, str] = field(default_factory=dict)


class _Backup:
    """Copies the sealed segments of a store without a lock, then all other files as they are at one moment.

    The files of sealed segments never change. Copying these files takes most of the time. It is done first, without the
    lock. While the backup holds the store lock, no process makes, evicts or quarantines a segment. Under the lock, the
    backup copies the files outside the segments, and records how many rows of each lane of a live (unsealed) segment
    are committed. Committed rows never change, so the backup copies these rows after it has released the lock. If a
    segment is evicted or merged into a pack before the segment is copied, the backup takes the lock again, and copies
    the state of this later moment. The last attempt keeps the lock until everything is copied. Segments that were
    merged into a pack are not copied.
    """

    def __init__(self, root: Root, copy: Root, link: bool, progress: Progress | None) -> None:
        self._root, self._copy = root, copy
        self._copier = FileCopier(share=link)
        self._account = Account(disk_usage(root.folder)[0], progress)
        self._store_files = StoreFiles(root, copy.folder, self._copier, self._account)
        self._done: dict[int, Identity] = {}  # {number of a copied segment: identity of its zarr.json}

    def run(self) -> None:
        self._store_files.copy_ahead()
        for number in current_numbers(self._root):
            with suppress(SegmentVanished, *DAMAGE):  # a damaged or vanished segment is read again under the lock
                if (info := read_segment(self._root, number)).sealed:
                    self._copy_sealed(info)
        for retries in reversed(range(_MOMENTS)):
            with self._locked() as lock:
                moment = self._read_moment()
                if retries:
                    lock.close()
                with suppress(SegmentVanished):
                    self._complete(moment)
                    break
        else:
            raise StoreLocked(f"segments of {self._root.path} were moved while they were copied; try again")
        sync_file_system(self._copy.folder)
        for folder, names in files_below(self._copy.folder):
            for name in names:
                check_written(folder / name)
        self._account.finish()

    @contextmanager
    def _locked(self) -> Iterator[ExitStack]:
        """Hold the store lock until the `with` block ends or closes the yielded `ExitStack`."""
        with ExitStack() as lock:
            try:
                lock.enter_context(held_lock(self._root.lock_path))
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                raise ReadOnlyError(
                    f"a backup takes the lock of the store for a moment, and this user may not "
                    f"({error.strerror}: {self._root.lock_path}); let this user write that file, or copy the folder "
                    "with `cp -a`, which may leave out the newest seconds"
                ) from error
            yield lock

    # --- the moment --------------------------------------------------------------------------------------------------

    def _read_moment(self) -> _Moment:
        """Copy the files outside the segments, and list the segments to copy; the caller holds the store lock."""
        # These files are copied before the segments are read, so that no saved state or limiter counts a step that the
        # copy lacks.
        self._store_files.copy()
        words = self._root.counters().read()
        words[layout.STEPS_EVICTED] = max(int(words[layout.STEPS_EVICTED]), evicted_by_removals(self._root))
        moment = _Moment(words)
        # Newer segments are read first, so that no lane in the copy has a gap. A lane continues in a newer segment only
        # after its rows in older segments are committed.
        for number in reversed(current_numbers(self._root)):
            path, where = self._root.segment_path(number), layout.segment_folder(number)
            if number in self._done and identify(path / layout.METADATA) == self._done[number]:
                moment.kept.add(number)
                continue
            self._account.begin(where)
            try:
                self._note_segment(moment, read_segment(self._root, number))
            except NeverWritten:
                moment.others[number] = ""
            except DAMAGE as error:
                if is_folder(path):
                    moment.others[number] = str(error)
                elif os.path.lexists(path):
                    self._account.note(where, "type", "", "is not a folder; left out")
        return moment

    def _note_segment(self, moment: _Moment, info: SegmentInfo) -> None:
        if info.sealed:
            moment.sealed.append(info)
        elif not shows_live_rows(info):
            moment.others[info.number] = ""
        elif (live := read_live(info)).observed.any():
            moment.live.append(live)

    # --- copying -----------------------------------------------------------------------------------------------------

    def _complete(self, moment: _Moment) -> None:
        """Copy the segments of ``moment``; raises SegmentVanished if one of them was removed or replaced meanwhile."""
        for number in listed_numbers(self._copy):
            if number not in moment.kept:
                self._done.pop(number, None)
                self._account.begin(layout.segment_folder(number))
                shutil.rmtree(self._copy.segment_path(number))
        for info in moment.sealed:
            self._copy_sealed(info)
        for number, reason in moment.others.items():
            self._copy_other(number, reason)
        copies = [copy for live in moment.live if (copy := self._copy_live(live)) is not None]
        words = np.concatenate([moment.words, ~moment.words]).astype("<i8")
        write_file(f"{self._copy.counters_folder}/c.0", words.tobytes())
        if copies:
            seal_segments(self._copy, copies)

    def _copy_sealed(self, info: SegmentInfo) -> None:
        copy_sealed(info, self._copy.segment_path(info.number), self._copier, self._account)
        self._done[info.number] = info.document

    def _copy_live(self, live: LiveRows) -> SegmentInfo | None:
        """Return the copy of a live segment; None: its rows cannot be read, and its files were copied as they are."""
        try:
            return copy_live(live, self._copy, self._account)
        except (Unreadable, *DAMAGE) as error:
            self._copy_other(live.info.number, str(error))
            return None

    def _copy_other(self, number: int, reason: str) -> None:
        where = layout.segment_folder(number)
        self._account.begin(where)
        source, target = self._root.segment_path(number), self._copy.segment_path(number)
        copy_as_it_is(source, target, where, self._copier, self._account)
        if reason:
            self._account.note(where, "metadata", "", f"{reason}; copied as it is")

    # --- the result --------------------------------------------------------------------------------------------------

    def result(self, path: Path) -> Backup:
        total, quarantined = self._count_steps()
        nbytes = disk_usage(self._copy.folder)[0]
        shared = min(self._copier.shared, nbytes)
        return Backup(
            path=path,
            segments=len(listed_numbers(self._copy)),
            **total.by_key(),
            steps_in_quarantine=quarantined,
            bytes=nbytes,
            bytes_shared=shared,
            bytes_copied=max(0, nbytes - shared - self._account.kept),
            problems=self._account.problems,
        )

    def _count_steps(self) -> tuple[Steps, int]:
        with suppress(*DAMAGE), ExitStack() as opened:
            counters = opened.enter_context(closing(self._copy.counters()))
            # A warning would name the hidden folder of the backup. `Backup.problems` lists the damage instead.
            follower = opened.enter_context(closing(Follower(self._copy, counters, warns=False)))
            _, account = read_account(follower, StepCounter(self._copy))
            return account.total, account.quarantined
        return Steps(), 0


# --- the hidden folder of a backup, until it is complete and appears at its path --------------------------------------


def unfinished_path(to: Path) -> Path:
    return hidden_sibling(to, ".backup")


@contextmanager
def unfinished(root: Root, to: Path) -> Iterator[Path]:
    """Make and lock the hidden folder of an unfinished backup, and yield its path.

    The folder may hold files of an earlier, interrupted call. At the end of the `with` block, the folder is renamed to
    ``to``; if the block raises, the folder stays. Raises StoreExists if ``to`` exists or the hidden folder is not a
    backup of this store. Raises StoreLocked if another process makes a backup in the hidden folder. Raises StorageFull
    if the disk is full, and ValueError if ``to`` is inside the store.
    """
    folder = unfinished_path(to)
    _check(root, to, folder)
    above = [parent for parent in folder.parents if not parent.exists()]
    with storage_errors(folder, full_message(to)):
        (folder / layout.COUNTERS).mkdir(parents=True, exist_ok=True)
    lock = try_lock(folder / layout.COUNTERS / layout.LOCK)
    if lock is None:
        raise StoreLocked(f"another process is making a backup in {folder}; wait for it, or choose another path")
    try:
        _check(root, to, folder)  # another process may have completed the backup, and released the lock
        write_root_document(root, folder)
        yield folder
        try:
            os.rename(folder, to)
        except OSError as error:
            if os.path.lexists(to):
                raise _exists(to) from error
            raise
        for made in [to, *above]:
            sync_folder(made.parent)
    finally:
        lock.release()


def full_message(to: Path) -> str:
    return (
        f"no space for the backup at {to}; free some and make the backup again, which resumes, or delete "
        f"{unfinished_path(to)}"
    )


def _exists(to: Path) -> StoreExists:
    return StoreExists(f"{to} exists already; give the path of a new store")


def _check(root: Root, to: Path, folder: Path) -> None:
    """Raise an error unless a backup of ``root`` may be made in ``folder`` and then be renamed to ``to``."""
    if os.path.lexists(to):
        raise _exists(to)
    if root.path.resolve() in to.resolve().parents:
        raise ValueError(f"{to} is inside the store {root.path}; give a path outside of it")
    if not os.path.lexists(folder):
        return
    refused = "; delete it, or choose another path"
    if not is_folder(folder):
        raise StoreExists(f"{folder} is in the way of the backup{refused}")
    try:
        found = read_verified(folder / layout.METADATA).get("uuid")
    except (OSError, FormatError):
        if all(name == layout.COUNTERS or name.startswith(".") for name in os.listdir(folder)):
            return  # an earlier call had just begun this backup
        raise StoreExists(f"{folder} is not an unfinished backup of {root.path}{refused}") from None
    if found != root.uuid:
        raise StoreExists(f"{folder} is an unfinished backup of another store ({found}){refused}")
