"""What repair does about writers that died: their segments are sealed, and what was never finished is deleted."""

import time
from contextlib import suppress
from functools import partial

from diskreplay.errors import FormatError, StorageFull
from diskreplay.format import layout
from diskreplay.format.locks import held_lock, is_locked, try_lock
from diskreplay.format.quarantine import QUARANTINE
from diskreplay.format.sealing import may_seal
from diskreplay.format.segment import SegmentInfo
from diskreplay.format.unproven import WHY, Fate, fate_of
from diskreplay.format.unsynced import is_never_written
from diskreplay.store.repair.repaired import Action
from diskreplay.store.repair.salvage import salvage
from diskreplay.store.repair.tools import RepairTools
from diskreplay.store.retention.retention import Retention
from diskreplay.store.writing.sealer import Sealer
from diskreplay.verify.check_root import read_words
from diskreplay.verify.files import Files
from diskreplay.verify.verify import segment_numbers

# What begins like this is being made or deleted; some have a lock that their maker holds.
_TEMPORARY = {"old-": "", "new-": "", "next-": f"{layout.COMMITTED}/{layout.LOCK}", "state-": layout.LOCK}

_PAUSE_S = 0.05


class DeadWriters(RepairTools):
    """What dead writers left in one store. It takes the store lock itself."""

    def seal_dead(self, foreign: bool) -> None:
        """Seal the segments of dead writers, and delete what was never finished or is half evicted."""
        root = self._store
        unsealed = [info for info in self._unsealed() if foreign or may_seal(root, info)]
        leftovers, lost = self._dead_leftovers(), self._never_written()
        # As the next process that opens the store with mode "a" does.
        fates = {info.number: fate_of(root, info) for info in unsealed}
        # Of what another process has sealed and retention taken out meanwhile, there was nothing to be read.
        unsealed = [info for info in unsealed if info.path.is_dir()]
        if not self._dry_run:
            retention = Retention(root, root.counters(writable=True))
            sealer = Sealer(root, partial(_count_sealed, retention))
            with suppress(FormatError):  # what a living writer holds may be damaged; it is told in the end
                while dead := retention.dead_segments():
                    for info, lock in dead:
                        sealer.submit(info, lock)
            if foreign:
                self._submit_foreign(retention, sealer, unsealed)
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
            fate = fates[info.number]
            now = info if self._dry_run else self._read(info.number)
            where = f"{layout.SEGMENTS}/{layout.segment_name(info.number)}"
            if self._dry_run and any(action.where == where for action in self.actions):
                continue  # it would be gone by now
            if fate not in (Fate.SEALED, Fate.COPIED):
                if self._dry_run or now is None:
                    place = f"; now in {QUARANTINE}" if fate is Fate.SET_ASIDE else ""
                    self.actions.append(Action(fate.value, where, f"{WHY[fate]}{place}"))
                continue
            if fate is Fate.COPIED:
                self.actions.append(Action("quarantined", where, f"{WHY[fate]}; a copy is in {QUARANTINE}"))
            if now is not None and (self._dry_run or now.sealed):
                steps = "" if now.steps is None else f", {now.steps} steps kept"
                self.actions.append(Action("sealed", where, f"its writer is gone{steps}"))

    def salvage(self) -> None:
        """Take what no mark proves, as far as it is whole by its flags."""
        for taken in salvage(self._store, dry_run=self._dry_run):
            where = f"{layout.SEGMENTS}/{layout.segment_name(taken.number)}"
            detail = f"{taken.steps} steps that no mark proves count now" if taken.steps else "no step is whole"
            self.actions.append(Action("salvaged", where, f"{detail}, {taken.left} are left behind"))

    def _never_written(self) -> list[str]:
        """Return the segments that say nothing of themselves since the power went, where no writer holds them."""
        names = [f"{layout.SEGMENTS}/{layout.segment_name(n)}" for n in segment_numbers(Files(str(self._root)))]
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

    def _submit_foreign(self, retention: Retention, sealer: Sealer, unsealed: list[SegmentInfo]) -> None:
        with held_lock(self._store.lock_path):
            for info in unsealed:
                if may_seal(self._store, info) or (lock := try_lock(info.lock_path)) is None:
                    continue
                if retention.has_to_be_sealed(info):
                    sealer.submit(info, lock)
                else:
                    lock.release()


def _count_sealed(retention: Retention) -> None:
    """Let readers know; repair does not fail for want of that, as they look by themselves once a second."""
    with suppress(FormatError, StorageFull):
        retention.count_sealed()
