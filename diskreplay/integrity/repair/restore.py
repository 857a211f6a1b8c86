"""Takes segments out of quarantine: back to their place, or deleted for good."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

from diskreplay.errors import FormatError, ReplayError
from diskreplay.folders import OpenFolder, is_folder, shown, shown_paths
from diskreplay.integrity.repair.repaired import Action, Repaired, without
from diskreplay.integrity.verify.check_root import read_plan
from diskreplay.integrity.verify.check_segment import verify_segment
from diskreplay.integrity.verify.documents import Plan
from diskreplay.integrity.verify.files import Files
from diskreplay.integrity.verify.verify import verify
from diskreplay.segments.damage.quarantine import QUARANTINE, Quarantined, bring_back, read_quarantine, take_out
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root, open_home, read_root
from diskreplay.segments.files.locks import held_lock
from diskreplay.segments.packs import read_packs, read_tables
from diskreplay.segments.segment import read_segment


def find_segment(root: Path, number: int) -> Quarantined:
    """Return a segment in quarantine, of several with this number the one that was set aside last.

    Raises ReplayError where there is none.
    """
    found = [entry for entry in read_quarantine(root) if entry.segment == number]
    if not found:
        raise ReplayError(f"segment {number} is not in {shown(root / QUARANTINE)}; diskreplay inspect lists what is")
    return max(found, key=lambda entry: entry.since)


def restore_segment(home: OpenFolder, number: int, *, dry_run: bool) -> Repaired:
    """Bring a segment back from quarantine, if it is whole and has a place.

    Readers see it with their next refresh. Raises ReplayError where it is not there, is still damaged, lies where
    retention would delete it at once, or its rows, or another one with its number, are among the segments; FormatError
    where the store's own document is damaged.
    """
    root = home.path
    store, plan = read_root(home.name, home), read_plan(Files(str(root)))
    if plan is None:
        raise FormatError(f"{home.name}: its zarr.json is damaged; restore that first")
    with nullcontext() if dry_run else held_lock(store.lock_path):
        entry = find_segment(root, number)
        _check_whole(store, plan, entry)
        members = _check_not_packed(store, entry)
        if not dry_run:
            bring_back(root, entry, members)
    steps = "" if entry.steps is None else f", {entry.steps} steps"
    action = Action("restored", layout.segment_folder(number), f"from {entry.where}{steps}")
    return Repaired([action], [] if dry_run else without(verify(home), "quarantine"), read_quarantine(root))


def _check_whole(store: Root, plan: Plan, entry: Quarantined) -> None:
    """Check that a segment may be brought back; errors as for `restore_segment`."""
    root, number = store.folder, entry.segment or 0
    place = layout.segment_folder(number)
    if os.path.lexists(root / place):
        raise ReplayError(f"{place} is there; set it aside before {entry.where} is brought back")
    found, _ = verify_segment(str(root), number, plan, deep=True, evicted={}, where=entry.where)
    if problems := without(found, "unproven"):
        where = problems[0].where.removeprefix(f"{QUARANTINE}/")
        raise ReplayError(
            f"segment {number} is still damaged: {where} {problems[0].detail}; put a good copy of that file in its "
            f"place below {QUARANTINE}, then restore it"
        )
    words = store.counters().read()
    if store.has_horizon and read_segment(store, number, root / entry.where).came_before(int(words[layout.HORIZON])):
        raise ReplayError(
            f"segment {number} has nothing newer than what retention has deleted already: it would be evicted at once; "
            f"copy what is wanted from {entry.where}"
        )


def _check_not_packed(store: Root, entry: Quarantined) -> list[int]:
    """Check that the rows of a segment in quarantine are not there already; return which segments it is a pack of."""
    number = entry.segment or 0
    info = read_segment(store, number, store.folder / entry.where)
    members = [] if info.packed is None else read_tables(info).numbers.tolist()
    packed = {one: pack.number for pack, tables in read_packs(store) for one in tables.numbers.tolist()}
    there = next((one for one in (number, *members) if one in packed), None)
    if there is not None:
        raise ReplayError(f"segment {there} is in {layout.segment_folder(packed[there])} by now; drop {entry.where}")
    there = next((one for one in members if os.path.lexists(store.segment_path(one))), None)
    if there is not None:
        raise ReplayError(f"{layout.segment_folder(there)} is there, and in {entry.where} too; drop that")
    return members


@shown_paths()
def drop_segment(path: Path, number: int, *, dry_run: bool = False) -> Quarantined:
    """Delete a segment in quarantine for good, and return what it was. Its steps count as evicted.

    Raises StoreNotFound where there is no store at ``path``, FormatError where a link or a file is where its counters
    have to be, ReplayError where the segment is not in quarantine, StoreLocked where another process held the store's
    lock for a minute.
    """
    home = open_home(path)
    root = home.path
    read_plan(Files(str(root)))  # raises where there is no store
    if not is_folder(root / layout.COUNTERS):
        raise FormatError(f"{shown(root / layout.COUNTERS)} is not a folder; diskreplay repair makes a new one")
    entry = find_segment(root, number)
    if dry_run:
        return entry
    with held_lock(root / layout.COUNTERS / layout.LOCK):
        entry = find_segment(root, number)
        gone = take_out(root, entry)
    shutil.rmtree(gone, ignore_errors=True)
    return entry
