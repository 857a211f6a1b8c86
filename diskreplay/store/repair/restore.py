"""The ways out of quarantine: a segment is brought back, or deleted when somebody asks for it by name."""

import os
from pathlib import Path

from diskreplay.errors import FormatError, ReplayError
from diskreplay.folders import is_folder, shown, shown_paths
from diskreplay.format import layout
from diskreplay.format.locks import held_lock
from diskreplay.format.quarantine import QUARANTINE, Quarantined, bring_back, delete, read_quarantine
from diskreplay.format.root import Root, open_home
from diskreplay.format.segment import read_segment
from diskreplay.verify.check_root import read_plan
from diskreplay.verify.check_segment import verify_segment
from diskreplay.verify.documents import Plan
from diskreplay.verify.files import Files


def find_segment(root: Path, number: int) -> Quarantined:
    """Return a segment in quarantine, of several with this number the one that was set aside last.

    Raises ReplayError where there is none.
    """
    found = [entry for entry in read_quarantine(root) if entry.segment == number]
    if not found:
        raise ReplayError(f"segment {number} is not in {shown(root / QUARANTINE)}; diskreplay inspect lists what is")
    return max(found, key=lambda entry: entry.since)


def restore_segment(store: Root, plan: Plan, number: int, *, dry_run: bool) -> Quarantined:
    """Bring a segment back from quarantine, if it is whole and has a place; return what it was there.

    Readers see it with their next refresh. The caller holds the store lock. Raises ReplayError where it is not there,
    is still damaged, lies where retention would delete it at once, or another one with its number is among the
    segments.
    """
    root = store.folder
    entry = find_segment(root, number)
    place = f"{layout.SEGMENTS}/{layout.segment_name(number)}"
    if os.path.lexists(root / place):
        raise ReplayError(f"{place} is there; set it aside before {entry.where} is brought back")
    found, _ = verify_segment(str(root), number, plan, deep=True, hidden=[], where=entry.where)
    if problems := [problem for problem in found if problem.kind != "unproven"]:
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
    if not dry_run:
        bring_back(root, entry)
    return entry


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
        raise FormatError(f"{shown(root / layout.COUNTERS)} is no folder; diskreplay repair makes a new one")
    entry = find_segment(root, number)
    if dry_run:
        return entry
    with held_lock(root / layout.COUNTERS / layout.LOCK):
        entry = find_segment(root, number)
        delete(root, entry)
    return entry
