"""What is in quarantine: steps that the store holds and does not count, reported until they are restored or dropped."""

import os
import re

import numpy as np
from numpy.typing import NDArray

from diskreplay.integrity.verify.documents import read_object
from diskreplay.integrity.verify.files import Files, read_at
from diskreplay.integrity.verify.row_flags import NO_STEP
from diskreplay.segments.documents import layout

_FOLDER = f"{layout.COUNTERS}/quarantine"
_RECORD = ".record.json"
_MOST_BYTES = 1 << 16
_NAME = re.compile(r"([0-9]{8,9})(\.[0-9]+)?")
_PARTS, _ENOUGH_PARTS = {layout.DONE, *layout.LANE_COUNTERS}, 3


def check_quarantine(files: Files, next_segment: int | None) -> None:
    """Report each segment in quarantine that holds steps, and one whose number could be given again."""
    if not os.path.lexists(files.path(_FOLDER)):
        return
    scratch = files.quiet()  # damage in there is not reported
    if not files.is_folder(_FOLDER):
        return
    where = f"{_FOLDER}/{layout.SEGMENTS}"
    names = scratch.listing(where) or {}
    for name, kind in sorted(names.items()):
        found = _NAME.fullmatch(name)
        if found is None or kind != "folder":
            continue
        number, inside = int(found[1]), scratch.listing(f"{where}/{name}") or {}
        if (
            name + _RECORD not in names
            and layout.METADATA not in inside
            and len(_PARTS & inside.keys()) < _ENOUGH_PARTS
        ):
            continue  # files that were set aside from a segment
        _report(files, scratch, f"{where}/{name}", number)
        if next_segment is not None and next_segment <= number < layout.MAX_SEGMENTS:
            detail = f"the next segment is {next_segment}, and {where}/{name} is in quarantine"
            files.report("counters", f"{layout.COUNTERS}/c.0", detail)


def _report(files: Files, scratch: Files, where: str, number: int) -> None:
    record = read_object(scratch, where + _RECORD, _MOST_BYTES) or {}
    steps, reason = record.get("steps"), record.get("reason")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        steps = None if record else _count_steps(scratch, where)
    if steps == 0:
        return
    attributes = (read_object(scratch, f"{where}/{layout.METADATA}") or {}).get("attributes")
    writer = attributes.get("writer") if isinstance(attributes, dict) else None
    whose = f" of writer {writer}" if isinstance(writer, int) else ""
    held = "an unknown number of steps" if steps is None else f"{steps} steps"
    why = f" ({reason:.200})" if isinstance(reason, str) else ""
    files.report(
        "quarantine",
        where,
        f"{held}{whose} are set aside from segment {number}{why}; diskreplay repair --restore {number} brings it back, "
        f"--drop {number} deletes it",
    )


def _count_steps(files: Files, where: str) -> int | None:
    """Count the steps that a segment's counters claim and its flags have room for; None: they cannot be counted."""
    rows, steps, chunk, per_chunk = _claimed_rows(files, where), 0, 0, 0
    while rows is not None:
        name = f"{where}/{layout.DONE}/{layout.chunk_key(chunk, 0)}"
        if chunk and (chunk * per_chunk >= rows.max() or not os.path.lexists(files.path(name))):
            return steps
        found = len(files.problems)
        with files.opened(name, per_chunk * len(rows) if chunk else None) as fd:
            if fd is None:
                return None
            per_chunk = os.fstat(fd).st_size // len(rows)
            for lane, count in enumerate(np.clip(rows - chunk * per_chunk, 0, per_chunk).tolist()):
                flags = np.frombuffer(read_at(fd, count, lane * per_chunk), np.uint8)
                steps += int(np.count_nonzero(flags & NO_STEP == 0))
        if len(files.problems) > found:
            return None
        chunk += 1
    return None


def _claimed_rows(files: Files, where: str) -> NDArray[np.int64] | None:
    for name in (layout.COMMITTED, layout.DURABLE, layout.OBSERVED):
        data = files.read(f"{where}/{name}/c.0", 8 * layout.MAX_LANES)
        if data and len(data) % 8 == 0:
            rows: NDArray[np.int64] = np.maximum(np.frombuffer(data, "<i8"), 0)
            return rows
    return None
