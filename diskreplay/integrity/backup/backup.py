"""One backup of one store: sealed segments without a lock, then everything as it is at one moment.

A store that others write changes while it is copied. What never changes again, the files of sealed segments, is copied
first, and takes most of the time. Then, under the store lock, nobody makes, evicts or sets aside a segment: what is
beside the segments is copied, and what is committed to each of those that are being written is noted. That is the
moment of the backup. Rows that were committed never change, so they are copied after the lock was released. Should a
segment be evicted, or put into a pack, before it was copied, another moment is chosen; the last one keeps the lock
until all is copied. Segments whose rows are in a pack that is there are not copied.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import ReadOnlyError, StoreLocked
from diskreplay.folders import is_folder
from diskreplay.integrity.backup.account import Account, Backup, Progress
from diskreplay.integrity.backup.beside import Beside
from diskreplay.integrity.backup.live_segments import LiveRows, copy_live, read_live
from diskreplay.integrity.backup.sealed_segments import copy_sealed
from diskreplay.integrity.backup.trees import SegmentVanished, copy_as_it_is, files_below
from diskreplay.integrity.backup.unfinished import full_message, unfinished
from diskreplay.reading.follower import Follower
from diskreplay.reading.step_account import Steps, read_account
from diskreplay.retention.policy import disk_usage
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import evicted_by_removals
from diskreplay.segments.documents.limiters import StepCounter
from diskreplay.segments.documents.metadata import Identity, identify
from diskreplay.segments.documents.root import Root, check_local, read_root
from diskreplay.segments.files.copies import FileCopier, Unreadable
from diskreplay.segments.files.durable import check_written, storage_errors, sync_file_system, write_file
from diskreplay.segments.files.locks import held_lock
from diskreplay.segments.files.numbers import listed_numbers
from diskreplay.segments.marks import shows_live_rows
from diskreplay.segments.packs import current_numbers
from diskreplay.segments.sealing import seal_segments
from diskreplay.segments.segment import DAMAGE, NeverWritten, SegmentInfo, read_segment

# So many moments are chosen at most.
_MOMENTS = 4


def back_up(root: Root, to: os.PathLike[str] | str, *, link: bool = True, progress: Progress | None = None) -> Backup:
    """Make a consistent copy of a store, which others may write; see `Store.backup`."""
    check_local(to)
    target = Path(to).absolute()
    root.counters().read()  # a store without them cannot be backed up, and nothing is made
    with root.still_there(), storage_errors(target, full_message(target)), unfinished(root, target) as folder:
        copying = _Backup(root, read_root(folder), link, progress)
        copying.run()
        made = copying.result(target)
    return made


@dataclass
class _Moment:
    """What a store holds at one moment, beside what was copied before."""

    words: NDArray[np.int64]
    kept: set[int] = field(default_factory=set)  # sealed segments that were copied before, and are still there
    sealed: list[SegmentInfo] = field(default_factory=list)
    live: list[LiveRows] = field(default_factory=list)
    others: dict[int, str] = field(default_factory=dict)  # which prove their rows by marks, or cannot be read, and why


class _Backup:
    def __init__(self, root: Root, copy: Root, link: bool, progress: Progress | None) -> None:
        self._root, self._copy = root, copy
        self._copier = FileCopier(share=link)
        self._account = Account(disk_usage(root.folder)[0], progress)
        self._beside = Beside(root, copy.folder, self._copier, self._account)
        self._done: dict[int, Identity] = {}  # the documents of the sealed segments that were copied

    def run(self) -> None:
        """Copy everything, durably."""
        self._beside.copy_ahead()
        for number in current_numbers(self._root):
            with suppress(SegmentVanished, *DAMAGE):  # each is looked at again under the lock
                if (info := read_segment(self._root, number)).sealed:
                    self._copy_sealed(info)
        for left in reversed(range(_MOMENTS)):
            with self._locked() as lock:
                moment = self._read_moment()
                if left:
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
        """Hold the store lock for a block, which may release it before its end."""
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
        """Copy what is beside the segments, and note what these hold. The caller holds the store lock."""
        # Before the segments: no state of a sampler knows a step, and no limiter counts one, that the backup lacks.
        self._beside.copy()
        words = self._root.counters().read()
        words[layout.STEPS_EVICTED] = max(int(words[layout.STEPS_EVICTED]), evicted_by_removals(self._root))
        moment = _Moment(words)
        # The newest first: where a lane has rows in a segment, those that it had committed to older ones are there.
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
                    self._account.note(where, "type", "", "is no folder; left out")
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
        """Make the copy what the store was at a moment. Raises SegmentVanished where a segment is gone since."""
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
        """Copy the rows of a segment; where that cannot be done, copy its files as they are, and return None."""
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
        """Return what was made, which is to appear at a path."""
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
        """Count the steps of the copy as its readers do, and those in its quarantine."""
        with suppress(*DAMAGE), ExitStack() as opened:
            counters = opened.enter_context(closing(self._copy.counters()))
            # What is damaged is among the problems, and no warning names this folder.
            follower = opened.enter_context(closing(Follower(self._copy, counters, warns=False)))
            _, account = read_account(follower, StepCounter(self._copy))
            return account.total, account.quarantined
        return Steps(), 0
