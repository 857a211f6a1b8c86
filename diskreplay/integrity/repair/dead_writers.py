"""Seals the segments of dead writers, deletes their unfinished files, and salvages unproven steps.

No mark proves that an unproven step was written completely. A salvaged step counts like any other step.
"""

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, StorageFull
from diskreplay.ids import Ints
from diskreplay.integrity.repair.remedies import Action, Remedies, prove
from diskreplay.integrity.verify.check_root import read_words
from diskreplay.integrity.verify.row_flags import START, first_wrong
from diskreplay.integrity.verify.verify import segment_numbers
from diskreplay.retention.retention import LOCK_OF_DRAFT, Retention
from diskreplay.segments.damage.quarantine import QUARANTINE, note_change
from diskreplay.segments.damage.unproven import REASONS, Fate, claimed_rows, fate_of
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import PREFIX, destroy
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import read_lane_counter
from diskreplay.segments.files.locks import held_lock, is_locked, try_lock
from diskreplay.segments.files.numbers import live_numbers
from diskreplay.segments.marks import proven_rows, shows_live_rows
from diskreplay.segments.rebuild import Proof
from diskreplay.segments.sealing import count_steps_in, may_seal, seal_segments
from diskreplay.segments.segment import SegmentInfo, is_never_written, read_segment, write_unsealed
from diskreplay.writing.marker import Marker
from diskreplay.writing.sealer import Sealer

# Prefixes of the names of temporary files and folders: {prefix: path of the lock inside the folder, or "" if there is
# no lock}. The process that made such a folder holds the folder's lock.
_TEMPORARY = {PREFIX: "", "new-": "", **LOCK_OF_DRAFT}
# A living process deletes its temporary file within this time. A temporary file that is older was left by a dead
# process.
_PAUSE_S = 0.05


class DeadWriters:
    """Finishes the work of dead writers, as opening the store with mode "a" does.

    Not thread-safe. With ``foreign``, segments that another machine wrote are sealed, too.
    """

    def __init__(self, remedies: Remedies, foreign: bool) -> None:
        self._remedies, self._foreign = remedies, foreign
        self._root, self._dry_run = remedies.root, remedies.dry_run

    def seal(self) -> None:
        """Seal segments of dead writers, and delete their temporary files; the caller must not hold the store lock."""
        unsealed = [info for info in self._unsealed() if self._foreign or may_seal(info)]
        leftovers, lost = self._dead_leftovers(), self._never_written()
        fates = {info.number: fate_of(info) for info in unsealed}
        proofs = {info.number: prove(info) for info in unsealed}
        # Another process may have sealed and evicted a segment meanwhile.
        unsealed = [info for info in unsealed if info.path.is_dir()]
        if not self._dry_run:
            self._seal(unsealed)
            leftovers -= self._leftovers()
        for where in lost:
            self._remedies.note("quarantined", where, f"was lost when the power failed; now in {QUARANTINE}")
        for name in sorted(leftovers):
            # "was being deleted" does not say that a process died: a living process may be deleting this file, even
            # without the store lock.
            detail = "was being deleted" if name.startswith(PREFIX) else "was left by a process that died"
            self._remedies.note("removed", f"{layout.COUNTERS}/{name}", detail)
        for info in unsealed:
            self._note_fate(info, fates[info.number], proofs[info.number])

    # --- segments ----------------------------------------------------------------------------------------------------

    def _unsealed(self) -> list[SegmentInfo]:
        files = self._remedies.files
        words = read_words(files)
        numbers = (n for n in segment_numbers(files) if words is None or n < words.next_segment)
        found = map(self._remedies.read, numbers)
        return [info for info in found if info and not info.sealed and not is_locked(info.lock_path)]

    def _never_written(self) -> list[str]:
        names = [layout.segment_folder(n) for n in segment_numbers(self._remedies.files)]
        return [
            name
            for name in names
            if is_never_written(str(self._root / name))
            and not is_locked(self._root / name / layout.COMMITTED / layout.LOCK)
        ]

    def _seal(self, unsealed: list[SegmentInfo]) -> None:
        store = self._remedies.store
        retention = Retention(store, store.counters(writable=True))
        sealer = Sealer(store, partial(_count_sealed, retention), Marker(store))
        with suppress(FormatError):  # a living writer's segment may be damaged; the last verification reports this
            while dead := retention.dead_segments(evicts=False):
                for info, lock in dead:
                    sealer.submit(info, lock)
        if self._foreign:
            self._submit_foreign(retention, sealer, unsealed)
        try:
            sealer.drain()
        except (FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            self._give_up(unsealed, error)

    def _submit_foreign(self, retention: Retention, sealer: Sealer, unsealed: list[SegmentInfo]) -> None:
        gone: list[str] = []
        with held_lock(self._remedies.store.lock_path):
            for info in unsealed:
                if may_seal(info) or (lock := try_lock(info.lock_path)) is None:
                    continue
                if retention.has_to_be_sealed(info, gone):
                    sealer.submit(info, lock)
                else:
                    lock.release()
        destroy(self._remedies.store, gone)

    def _give_up(self, unsealed: list[SegmentInfo], error: Exception) -> None:
        """Move to quarantine the segments that could not be sealed.

        These segments have no durable row: `verify` has reported each segment with damaged durable rows, and the
        segment was repaired before this call.
        """
        with held_lock(self._remedies.store.lock_path):
            for info in unsealed:
                where = layout.segment_folder(info.number)
                now = self._remedies.read(info.number)
                with self._remedies.segment_lock(where) as is_free:
                    if is_free and now is not None and not now.sealed:
                        self._remedies.set_aside(where, f"cannot be sealed: {error}")

    def _note_fate(self, info: SegmentInfo, fate: Fate, proof: Proof | None) -> None:
        """Add an action that tells what became of a dead writer's segment.

        ``proof`` is given for a copied segment if checksums of blocks prove more of its steps than its marks do.
        """
        now = info if self._dry_run else self._remedies.read(info.number)
        where, note = layout.segment_folder(info.number), self._remedies.note
        if self._dry_run and any(action.where == where for action in self._remedies.actions):
            return  # an earlier action already says what happens to the segment
        kept = None if now is None or now.steps is None else now.steps - now.lost.steps
        if proof and fate is not Fate.REMOVED and (self._dry_run or kept == proof.damage.steps_kept):
            detail = f"a copy with damaged blocks, {proof.damage.steps_kept} steps kept"
            note("rebuilt", where, detail, proof.steps_lost)
            return
        if fate not in (Fate.SEALED, Fate.COPIED):
            if self._dry_run or now is None:
                place = f"; now in {QUARANTINE}" if fate is Fate.SET_ASIDE else ""
                note(fate.value, where, f"{REASONS[fate]}{place}")
            return
        if fate is Fate.COPIED:
            note("quarantined", where, f"{REASONS[fate]}; a copy is in {QUARANTINE}")
        if now is not None and (self._dry_run or now.sealed):
            steps = "" if kept is None else f", {kept} steps kept"
            note("sealed", where, f"its writer is gone{steps}")

    # --- unfinished files --------------------------------------------------------------------------------------------

    def _dead_leftovers(self) -> set[str]:
        found = self._leftovers()
        if found:
            time.sleep(_PAUSE_S)
            found &= self._leftovers()
        return found

    def _leftovers(self) -> set[str]:
        names = self._remedies.files.listing(layout.COUNTERS) or {}
        folder = self._root / layout.COUNTERS
        return {
            name
            for name in names
            for beginning, lock in _TEMPORARY.items()
            if name.startswith(beginning) and not (lock and is_locked(folder / name / lock))
        }


def _count_sealed(retention: Retention) -> None:
    """Tell readers that a segment was sealed.

    If this fails, readers notice the sealed segment by themselves within a second.
    """
    with suppress(FormatError, StorageFull):
        retention.count_sealed()


# --- steps that no mark proves ----------------------------------------------------------------------------------------


def salvage(root: Root, *, dry_run: bool) -> Iterator[Action]:
    """Count unproven steps as proven, up to the first incomplete row of each lane; yield the actions.

    A row is incomplete if its flags cannot follow those of the previous row, or if its time is earlier than the time of
    the previous row. Nothing proves that the bytes of a salvaged row are right. Segments of living writers are left
    alone.
    """
    for number in live_numbers(root, root.counters().read()):
        try:
            info = read_segment(root, number)
            if info.claimed is not None or not shows_live_rows(info):
                yield from _salvage(info, dry_run)
        except (FileNotFoundError, FormatError):
            continue  # the segment was evicted meanwhile; or it is damaged, and `SegmentRepair` repairs it


def _salvage(info: SegmentInfo, dry_run: bool) -> Iterator[Action]:
    root, lock = info.root, try_lock(info.lock_path)
    if lock is None:
        return
    try:
        counted = _counted_rows(info)
        claimed = claimed_rows(info, counted)
        bounds = zip(counted.tolist(), claimed.tolist(), strict=True)
        rows = np.array([_whole_rows(info, lane, *rows) for lane, rows in enumerate(bounds)])
        before, after, most = (count_steps_in(info, some) for some in (counted, rows, claimed))
        if after > before and not dry_run:
            if info.sealed:
                with held_lock(root.lock_path):  # while this lock is held, no process evicts the segment
                    info = _unseal(info)
            seal_segments(root, [info], {info.number: rows})
            with held_lock(root.lock_path):
                note_change(root.folder)
        if most > before:
            taken = f"{after - before} unproven steps were recovered" if after > before else "no step is whole"
            where = layout.segment_folder(info.number)
            yield Action("salvaged", where, f"{taken}, {most - after} are left behind")
    finally:
        lock.release()


def _counted_rows(info: SegmentInfo) -> Ints:
    if info.sealed:
        return read_lane_counter(f"{info.path}/{layout.COMMITTED}", len(info.lanes))
    return proven_rows(info)


def _whole_rows(info: SegmentInfo, lane: int, first: int, stop: int) -> int:
    """Return the first of the rows ``[first, stop)`` whose flags or time are invalid; ``stop`` if there is none."""
    flags = _rows(info, layout.DONE, lane, max(0, first - 1), stop)
    before = np.array([START], np.uint8) if first == 0 else flags[:1]
    rows = flags[None, min(first, 1) :]
    wrong = first_wrong(rows, before, np.array([rows.shape[1]]))
    stop = stop if wrong is None else first + wrong[1]
    times = _rows(info, layout.TIME, lane, max(0, first - 1), stop)
    times = times if first else np.append(1, times)  # the times of rows are at least 1
    falls = np.flatnonzero(np.diff(times) < 0)
    return first + int(falls[0]) if len(falls) else stop


def _rows(info: SegmentInfo, leaf: str, lane: int, first: int, stop: int) -> NDArray[Any]:
    parts = [np.zeros(0, info.arrays[leaf].dtype)]
    for chunk, inside, count in layout.split_range(first, stop, info.chunk_rows[leaf]):
        parts.append(info.map_numbers(leaf, chunk)[lane, inside : inside + count])
    return np.concatenate(parts)


def _unseal(info: SegmentInfo) -> SegmentInfo:
    """Mark a sealed segment as unsealed in its zarr.json.

    If this process dies, the next process that opens the store with mode "a" seals the segment again.
    """
    # Raise an error if the segment was evicted: `write_unsealed` would make the segment's folder again.
    os.stat(info.path)
    write_unsealed(info)
    return dataclasses.replace(info, sealed=False)
