"""Deletes segments, out of sight in one step, and what processes that died were making."""

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress

from diskreplay.format import layout
from diskreplay.format.commit import StoreCounters
from diskreplay.format.durable import storage_errors, sync_folder
from diskreplay.format.locks import try_lock
from diskreplay.format.root import Root

# A segment that is being deleted: its number, and what the counter of steps evicted becomes.
_REMOVED = re.compile(r"old-[0-9]{8,9}-([0-9]{1,19})")


def take_out(root: Root, counters: StoreCounters, number: int, steps: int) -> str:
    """Move a segment beside the counters, so that it is never seen half deleted; return where it is now.

    Its steps count as evicted. Their sum is part of the new name: the next opener sets the counter if this process dies
    before it does. The caller holds the store lock. Raises StorageFull where there is no room for the name.
    """
    evicted = counters.evicted_after(steps)
    gone = f"{root.counters_folder}/old-{layout.segment_name(number)}-{evicted}"
    shutil.rmtree(gone, ignore_errors=True)
    with storage_errors(gone):
        os.rename(root.segment_path(number), gone)
    counters.set(layout.STEPS_EVICTED, evicted)
    return gone


def destroy(root: Root, gone: Sequence[str]) -> None:
    """Delete what was taken out."""
    if not gone:
        return
    # After a loss of power a segment must not be back in its place without some of its files. Where the disk refuses
    # to sync, it needs the room all the more.
    with suppress(OSError):
        sync_folder(root.segments_folder)
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)


def finish_removals(root: Root, counters: StoreCounters) -> None:
    """Delete what was left half deleted, and count its steps; the caller holds the store lock."""
    for name in os.listdir(root.counters_folder):
        if name.startswith("old-"):
            if counted := _REMOVED.fullmatch(name):
                now = int(counters.read()[layout.STEPS_EVICTED])
                counters.set(layout.STEPS_EVICTED, max(now, min(int(counted[1]), layout.MOST_COUNTED)))
            shutil.rmtree(root.counters_folder / name, ignore_errors=True)


def remove_dead_draft(path: str, lock_path: str) -> None:
    """Remove what a process was making at ``path`` if that is gone; in it lies the lock which it held.

    The caller holds the store lock.
    """
    *inside, _ = lock_path.split("/")
    if any(os.path.islink("/".join([path, *inside[:depth]])) for depth in range(len(inside) + 1)):
        return  # no process made that, and what is behind it is not ours
    try:
        lock = try_lock(f"{path}/{lock_path}")
    except OSError:
        # It has no place for a lock yet: its maker died, or is just about to make one; then this fails, or that does.
        with suppress(OSError):
            os.rmdir(path)
        # Or it had one until the power went: a place for the lock is made before anything else.
        if os.path.isdir(path) and lock_path.split("/")[0] not in (names := os.listdir(path)) and names:
            shutil.rmtree(path, ignore_errors=True)
        return
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        lock.release()
