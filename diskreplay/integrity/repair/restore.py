"""Brings segments back from quarantine, or deletes them for good."""

import os
import shutil
from pathlib import Path

from diskreplay.errors import FormatError, ReplayError
from diskreplay.folders import OpenFolder, is_folder, shown, shown_paths
from diskreplay.integrity.repair.remedies import Remedies, Repaired, without
from diskreplay.integrity.verify.check_root import read_plan
from diskreplay.integrity.verify.check_segment import verify_segment
from diskreplay.integrity.verify.documents import Plan
from diskreplay.integrity.verify.files import Files
from diskreplay.integrity.verify.verify import verify
from diskreplay.segments.damage.quarantine import QUARANTINE, Quarantined, bring_back, read_quarantine, take_out
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root, open_home
from diskreplay.segments.files.locks import held_lock
from diskreplay.segments.marks import proven_rows
from diskreplay.segments.packs import read_packs, read_tables
from diskreplay.segments.rebuild import exchange, finish_replacements
from diskreplay.segments.sealing import count_steps_in
from diskreplay.segments.segment import SegmentInfo, read_segment


def restore_segment(home: OpenFolder, number: int, *, dry_run: bool) -> Repaired:
    """Bring a segment back from quarantine if it is undamaged; a segment in its place goes to quarantine.

    If several segments in quarantine have the number, the segment set aside last is tried first. Readers see the
    segment with their next refresh.

    Raises ReplayError if no segment in quarantine has the number, or if the segment in its place has a living writer.
    Also raises ReplayError if none of the segments can be brought back. A segment cannot be brought back if it is still
    damaged, would be evicted at once, has fewer steps than the segment in its place, or shares rows with other
    segments. Raises FormatError if the store's zarr.json is damaged.
    """
    remedies, place = Remedies(home, dry_run, None), layout.segment_folder(number)
    store, plan = remedies.store, read_plan(remedies.files)
    if plan is None:
        raise FormatError(f"{home.name}: its zarr.json is damaged; run diskreplay repair first")
    remedies.plan = plan
    with remedies.store_lock(), remedies.segment_lock(place) as is_free:
        if not dry_run and number in finish_replacements(store):
            remedies.note("restored", place, "a process that died had begun this")
        elif not is_free:
            raise ReplayError(f"{place} has a living writer; close the writer, then restore the segment")
        else:
            remedies.note("restored", place, _bring_back(remedies, number))
    left = [] if dry_run else without(verify(home), "quarantine")
    return Repaired(remedies.actions, left, read_quarantine(home.path))


def _bring_back(remedies: Remedies, number: int) -> str:
    """Bring a segment back, and return a description; the caller holds the locks of the store and the segment."""
    entry, info = _find_whole(remedies, number)
    root, place = remedies.root, layout.segment_folder(number)
    detail = f"from {entry.where}" + ("" if entry.steps is None else f", {entry.steps} steps")
    now, is_taken = None, os.path.lexists(root / place)
    if not remedies.dry_run and is_taken:
        reason = "another copy of it was brought back from quarantine"
        now = exchange(remedies.store, entry, _members(info), reason)
    elif not remedies.dry_run:
        bring_back(root, entry, _members(info))
    if is_taken:
        detail += f"; the one in its place is now {now}" if now else "; the one in its place would go to quarantine"
    return detail


def _find_whole(remedies: Remedies, number: int) -> tuple[Quarantined, SegmentInfo]:
    """Return the entry and the attributes of the quarantined segment to bring back.

    If several segments may be brought back, the segment set aside last is chosen. Raises ReplayError if no segment may
    be brought back.
    """
    refused: list[ReplayError] = []
    for entry in _find_segments(remedies.root, number):
        try:
            return entry, _check_whole(remedies.store, remedies.plan, entry)
        except ReplayError as error:
            refused.append(error)
    raise refused[0]


def _find_segments(root: Path, number: int) -> list[Quarantined]:
    found = [entry for entry in read_quarantine(root) if entry.segment == number]
    if not found:
        raise ReplayError(
            f"segment {number} is not in {shown(root / QUARANTINE)}; diskreplay inspect lists the segments there"
        )
    return sorted(found, key=lambda entry: entry.since, reverse=True)


def _check_whole(store: Root, plan: Plan, entry: Quarantined) -> SegmentInfo:
    root, number = store.folder, entry.segment or 0
    found, _ = verify_segment(str(root), number, plan, deep=True, evicted={}, where=entry.where)
    if problems := without(found, "unproven"):
        where = problems[0].where.removeprefix(f"{QUARANTINE}/")
        raise ReplayError(
            f"segment {number} is still damaged: {where} {problems[0].detail}; put a good copy of that file into its "
            f"place below {QUARANTINE}, then restore the segment"
        )
    info, words = read_segment(store, number, root / entry.where), store.counters().read()
    if store.has_horizon and info.came_before(int(words[layout.HORIZON])):
        raise ReplayError(
            f"segment {number} has no step newer than the last eviction: it would be evicted at once; copy the wanted "
            f"files from {entry.where}"
        )
    _check_place(store, entry, info)
    return info


def _check_place(store: Root, entry: Quarantined, info: SegmentInfo) -> None:
    """Raise ReplayError if a restored segment would duplicate steps, or replace a segment that has more steps."""
    place, members = layout.segment_folder(info.number), _members(info)
    packs = ((pack.number, tables) for pack, tables in read_packs(store) if pack.number != info.number)
    packed = {one: pack for pack, tables in packs for one in tables.numbers.tolist()}
    there = next((one for one in (info.number, *members) if one in packed), None)
    if there is not None:
        folder = layout.segment_folder(packed[there])
        raise ReplayError(f"segment {there} was merged into {folder}; {entry.where} stays as it is")
    if not os.path.lexists(store.folder / place):
        there = next((one for one in members if os.path.lexists(store.segment_path(one))), None)
        if there is not None:
            raise ReplayError(
                f"{layout.segment_folder(there)} is in the store, and a part of {entry.where}, which stays as it is"
            )
        return
    try:
        present = read_segment(store, info.number)
    except (OSError, FormatError):
        return  # the segment in its place is damaged
    if present.uuid != info.uuid:
        raise ReplayError(f"{place} is a different segment from {entry.where}; move it out of the store first")
    if _steps_of(present) > _steps_of(info):
        raise ReplayError(f"{place} has more steps than {entry.where}; diskreplay repair replaces it if it is damaged")


def _members(info: SegmentInfo) -> list[int]:
    return [] if info.packed is None else read_tables(info).numbers.tolist()


def _steps_of(info: SegmentInfo) -> int:
    if info.sealed:
        return (info.steps or 0) - info.lost.steps
    return count_steps_in(info, proven_rows(info))


@shown_paths
def drop_segment(path: Path, number: int, *, dry_run: bool = False) -> Quarantined:
    """Delete a segment in quarantine for good, and return its entry; its steps count as evicted.

    If several segments in quarantine have the number, the segment set aside last is deleted. A dry run deletes nothing.
    Raises StoreNotFound if there is no store at ``path``, and FormatError if the folder of its counters is a link or a
    file. Raises ReplayError if the segment is not in quarantine, and StoreLocked if another process held the store's
    lock for a minute.
    """
    home = open_home(path)
    root = home.path
    read_plan(Files(str(root)))  # raises an error if there is no store
    if not is_folder(root / layout.COUNTERS):
        raise FormatError(f"{shown(root / layout.COUNTERS)} is not a folder; diskreplay repair makes a new one")
    entry = _find_segments(root, number)[0]
    if dry_run:
        return entry
    with held_lock(root / layout.COUNTERS / layout.LOCK):
        entry = _find_segments(root, number)[0]
        gone = take_out(root, entry)
    shutil.rmtree(gone, ignore_errors=True)
    return entry
