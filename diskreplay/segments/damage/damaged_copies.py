"""Copies of sealed segments that have to prove their rows, and which checksums of blocks prove more than marks do.

Chunk files of such a copy may be written, and some do not fit their checksums: they were copied before they were
sealed, or are damaged. Who opens the store to write rebuilds it. Readers, who write nothing, show its rows meanwhile.
"""

import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from diskreplay.errors import FormatError
from diskreplay.ids import NO_STEP, Ints
from diskreplay.segments.blocks import sealed_chunks
from diskreplay.segments.damage.damage import Damage, Range, find_damage
from diskreplay.segments.damage.unproven import rows_with_files
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import evicted_in
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import read_lane_counter
from diskreplay.segments.marks import proven_rows
from diskreplay.segments.sealing import count_steps_in
from diskreplay.segments.segment import Lost, SegmentInfo, read_as_sealed, read_segment

# The most copies whose rows are remembered, by the state of their files.
_MOST_KNOWN = 1024


class Proof(NamedTuple):
    """The proof of a copy by checksums of blocks: its attributes as a sealed one, the rows of its lanes, its damage.

    ``marked`` are the rows of each lane that marks prove. They are whole, but an episode that they end in may be lost.
    """

    sealed: SegmentInfo
    rows: Ints
    damage: Damage
    marked: Ints

    @property
    def steps_lost(self) -> int:
        """How many steps are lost that were not before."""
        return max(0, self.damage.steps_lost - self.sealed.lost.steps)


def prove_by_blocks(info: SegmentInfo) -> Proof | None:
    """Return what checksums of blocks prove of a segment that has to prove its rows, or None where marks count.

    None where it is no copy of a sealed one, or no more steps are proven than by marks. Every chunk is read. Raises
    FormatError or OSError where small files do not fit their checksums either.
    """
    if info.sealed or info.boot or (sealed := read_as_sealed(info)) is None:
        return None
    rows = read_lane_counter(f"{info.path}/{layout.COMMITTED}", len(info.lanes))
    if crc32c(rows.tobytes()) != sealed.checksums.get(f"{layout.COMMITTED}/c.0"):
        return None
    marked = proven_rows(info)
    damage = find_damage(sealed, rows, evicted_in(info.root, info.number), marked)
    if damage.steps_kept <= count_steps_in(info, marked):
        return None
    return Proof(sealed, rows, damage, marked)


# --- what readers show ------------------------------------------------------------------------------------------------


class _Shown(NamedTuple):
    """What readers show of a copy: rows of each lane, and which of them are lost."""

    rows: tuple[int, ...]
    lost: Lost


_known: dict[tuple[object, ...], _Shown | None] = {}


def read_shown(root: Root, number: int) -> SegmentInfo:
    """Read a segment's attributes as `read_segment` does, for who shows its rows and changes nothing.

    Checksums of blocks may prove more of a copy than marks do. Then `SegmentInfo.shown` are the rows to show. `lost`
    has the damaged episodes among them, each alone, as its flags are there. Raises as `read_segment`.
    """
    info = read_segment(root, number)
    if info.sealed or info.boot:
        return info
    try:
        shown = _shown(info)
    except (OSError, FormatError):
        return info  # marks count
    if shown is None:
        return info
    return replace(info, shown=shown.rows, lost=shown.lost)


def _shown(info: SegmentInfo) -> _Shown | None:
    """Return the rows to show. They are found once, and again after any file of the copy was replaced or changed."""
    sealed = read_as_sealed(info)
    if sealed is None:
        return None
    files = (f"{info.path}/{name}" for name in (layout.METADATA, layout.MARKS, *sealed.checksums))
    key = len(evicted_in(info.root, info.number)), *map(_state, files)
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        proof = prove_by_blocks(info)
        _known[key] = None if proof is None else _show(proof)
    return _known[key]


def _state(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _show(proof: Proof) -> _Shown | None:
    """Leave damaged episodes out. A lane ends before the first one that has damaged flags or times, or lacks a file.

    Flags and times of hidden rows are read too. A damaged episode at the end of a lane is cut off: it may look open.
    """
    sealed, damage, lanes = proof.sealed, proof.damage, len(proof.rows)
    unreadable, most, rows = _unreadable(sealed, damage), rows_with_files(sealed), proof.rows.copy()
    ranges, steps = list(sealed.lost.ranges), sealed.lost.steps
    for lane, count in enumerate(proof.rows.tolist()):
        for first, stop in damage.more.get(lane, []):
            if stop > min(most, count - 1) or any(a < stop and first < b for a, b in unreadable.get(lane, [])):
                rows[lane] = first
                break
            found = list(_episodes(sealed, lane, first, stop))
            ranges += [(row * lanes + lane, length) for row, length in found]
            steps += sum(length for _, length in found)
        rows[lane] = min(rows[lane], most)
    ranges = sorted((position, length) for position, length in ranges if position // lanes < rows[position % lanes])
    # Damaged episodes have their flags, which tell of their values.
    values = {(position, rows): count for position, rows, count in sealed.lost.entries}
    steps = min(steps, sum(length for _, length in ranges))
    lost = Lost(tuple(ranges), steps, tuple(values.get(entry, 0) for entry in ranges))
    shown = replace(sealed, lost=lost)
    kept = count_steps_in(shown, rows) - lost.steps
    if kept <= count_steps_in(sealed, proof.marked) - sealed.lost.steps:
        return None
    return _Shown(tuple(rows.tolist()), lost)


def _unreadable(sealed: SegmentInfo, damage: Damage) -> dict[int, list[Range]]:
    """Return by lane the rows whose flags or times are damaged."""
    found: dict[int, list[Range]] = {}
    for chunk in sealed_chunks(sealed):
        if chunk.array.path not in (layout.DONE, layout.TIME):
            continue
        per_chunk, row_bytes = sealed.chunk_rows[chunk.array.path], chunk.array.row_bytes
        for start, stop in damage.parts.get(chunk.name, []):
            for lane, inside, count in layout.split_range(start // row_bytes, -(-stop // row_bytes), per_chunk):
                row = chunk.number * per_chunk + inside
                found.setdefault(lane, []).append((row, row + count))
    return found


def _episodes(info: SegmentInfo, lane: int, first: int, stop: int) -> list[tuple[int, int]]:
    """Return the first row and the steps of each episode in some rows of a lane whose flags are whole."""
    parts = [
        info.map_numbers(layout.DONE, chunk)[lane, inside : inside + count]
        for chunk, inside, count in layout.split_range(first, stop, info.chunk_rows[layout.DONE])
    ]
    flags = np.concatenate(parts)
    starts = np.flatnonzero(flags & layout.FIRST)
    steps = np.add.reduceat(flags & NO_STEP == 0, starts, dtype=np.int64)
    has_steps = steps > 0  # a part that was discarded may have none
    return list(zip((starts + first)[has_steps].tolist(), steps[has_steps].tolist(), strict=True))
