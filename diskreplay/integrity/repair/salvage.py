"""Salvages steps that no mark proves: those kept behind the rows of a segment count from then on."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.ids import Ints
from diskreplay.integrity.repair.remedies import Action
from diskreplay.integrity.verify.row_flags import START, first_wrong
from diskreplay.segments.damage.quarantine import note_change
from diskreplay.segments.damage.unproven import claimed_rows
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import read_lane_counter
from diskreplay.segments.files.locks import held_lock, try_lock
from diskreplay.segments.files.numbers import live_numbers
from diskreplay.segments.marks import proven_rows, shows_live_rows
from diskreplay.segments.sealing import count_steps_in, seal_segments
from diskreplay.segments.segment import SegmentInfo, read_segment, write_unsealed


def salvage(root: Root, *, dry_run: bool) -> Iterator[Action]:
    """Take the unproven steps of each segment as far as its flags are a sequence of episodes; yield what was taken.

    Rows whose time is before that of the previous row were not written whole, and end that as well.

    Their bytes may be torn all the same: that is why they do not count by themselves. Segments of living writers are
    left alone.
    """
    for number in live_numbers(root, root.counters().read()):
        try:
            info = read_segment(root, number)
            if info.claimed is not None or not shows_live_rows(info):
                yield from _salvage(info, dry_run)
        except (FileNotFoundError, FormatError):
            continue  # evicted meanwhile, or damaged, which is another matter


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
                with held_lock(root.lock_path):  # nobody evicts it meanwhile
                    info = _unseal(info)
            seal_segments(root, [info], {info.number: rows})
            with held_lock(root.lock_path):
                note_change(root.folder)
        if most > before:
            taken = f"{after - before} steps that no mark proves count now" if after > before else "no step is whole"
            where = layout.segment_folder(info.number)
            yield Action("salvaged", where, f"{taken}, {most - after} are left behind")
    finally:
        lock.release()


def _counted_rows(info: SegmentInfo) -> Ints:
    if info.sealed:
        return read_lane_counter(f"{info.path}/{layout.COMMITTED}", len(info.lanes))
    return proven_rows(info)


def _whole_rows(info: SegmentInfo, lane: int, first: int, stop: int) -> int:
    """Return up to which row a lane's flags are a sequence of episodes and its times rise; they are up to ``first``."""
    flags = _rows(info, layout.DONE, lane, max(0, first - 1), stop)
    before = np.array([START], np.uint8) if first == 0 else flags[:1]
    rows = flags[None, min(first, 1) :]
    wrong = first_wrong(rows, before, np.array([rows.shape[1]]))
    stop = stop if wrong is None else first + wrong[1]
    times = _rows(info, layout.TIME, lane, max(0, first - 1), stop)
    times = times if first else np.append(1, times)  # a clock is past 0
    falls = np.flatnonzero(np.diff(times) < 0)
    return first + int(falls[0]) if len(falls) else stop


def _rows(info: SegmentInfo, leaf: str, lane: int, first: int, stop: int) -> NDArray[Any]:
    """Return the rows ``[first, stop)`` of a lane, of flags or times."""
    parts = [np.zeros(0, info.arrays[leaf].dtype)]
    for chunk, inside, count in layout.split_range(first, stop, info.chunk_rows[leaf]):
        parts.append(info.map_numbers(leaf, chunk)[lane, inside : inside + count])
    return np.concatenate(parts)


def _unseal(info: SegmentInfo) -> SegmentInfo:
    """Mark a sealed segment as unsealed; if this process dies before it is sealed again, the next opener seals it."""
    os.stat(info.path)  # an evicted one does not come back
    write_unsealed(info)
    return dataclasses.replace(info, sealed=False)
