"""Verifies a store with an independent reader, which shares no code with the parts that read and write stores."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import StoreNotFound
from diskreplay.folders import OpenFolder, shown_paths
from diskreplay.integrity.verify.check_attributes import read_attributes
from diskreplay.integrity.verify.check_root import (
    COUNTERS_FILE,
    Words,
    check_notes,
    check_root,
    read_evictions,
    read_plan,
    read_words,
    verify_states,
)
from diskreplay.integrity.verify.check_segment import verify_segment
from diskreplay.integrity.verify.documents import Plan, read_object
from diskreplay.integrity.verify.files import Files, Problem, read_at, reason
from diskreplay.integrity.verify.pack_tables import Tables, find_superseded, find_torn, read_tables
from diskreplay.integrity.verify.row_flags import NO_STEP
from diskreplay.segments.documents import layout

__all__ = ["Problem", "check_outside_segments", "segment_numbers", "verify"]

Progress = Callable[[int, int], None]
_NUMBER = re.compile(r"[0-9]{8,9}")


@shown_paths
def verify(
    path: str | os.PathLike[str] | OpenFolder, *, deep: bool = False, progress: Progress | None = None
) -> list[Problem]:
    """Verify a store; other processes may write to the store and evict segments meanwhile.

    Checks that every file of the format is there, has the right size and agrees with the schema. Checks counters, the
    flags of rows, and the checksums of the metadata of sealed segments. Steps in quarantine are problems of the kind
    ``"quarantine"``. Rows that are not committed are not checked. An unsealed segment of a dead writer is not a
    problem: the next process that opens the store with mode "a" seals it.

    The folder of the store may be moved within its file system meanwhile. ``deep``: also read every sealed chunk and
    every saved state of a sampler, and check their checksums. ``progress`` is called with the verified amount and the
    total: bytes on disk with ``deep``, else numbers of segments. The returned list has the problems outside the
    segments first, then the problems of each segment by number. Raises StoreNotFound if there is no store at ``path``,
    or if the store was deleted meanwhile. Raises FormatError if this release does not know the version of the store.
    """
    try:
        home = OpenFolder.of(path)  # a link to the store is followed
    except OSError as error:
        raise StoreNotFound(f"{path} {reason(error)}; diskreplay.create makes a store") from error
    problems = _problems(str(home.path), deep, progress)
    if home.is_deleted():
        raise StoreNotFound(f"{home.name} was deleted, or moved to another file system, while it was verified")
    return problems


def _problems(root: str, deep: bool, progress: Progress | None) -> list[Problem]:
    files = Files(root)
    plan = read_plan(files)
    if plan is None:
        return files.problems
    problems, numbers, words, evicted = check_outside_segments(root, plan, deep)
    packs = read_packs(files, plan, numbers)
    superseded = find_superseded(packs)
    for number, other in find_torn(packs, superseded).items():
        detail = f"is a pack; {layout.segment_folder(other)} has some of its segments, and no pack has the others"
        problems.append(Problem("counters", layout.segment_folder(number), detail))
    following = words.next_segment if words is not None else layout.MAX_SEGMENTS
    there, numbers = numbers, [number for number in numbers if number not in superseded]
    meter = _Meter(progress, [_bytes_on_disk(files, number) if progress and deep else 1 for number in numbers])
    for number in numbers:
        found, is_sealed = verify_segment(
            root, number, plan, deep=deep, evicted=evicted, on_read=meter.add if deep else _ignore
        )
        problems += found
        meter.next()
        is_beyond = number >= following and is_sealed and not found and not _is_just_made(number, packs, there)
        if is_beyond and _can_be_given(files, number):
            detail = f"the next segment is {following}, but {layout.segment_folder(number)} is there"
            problems.append(Problem("counters", COUNTERS_FILE, detail))
    return problems


def _can_be_given(files: Files, number: int) -> bool:
    """Read the counter again, and return whether a new segment could still get the number ``number``.

    A process that makes a segment places its folder first, then increases the counter. The counter may have been read
    before the segment was made, even if the segment is sealed by now.
    """
    words = read_words(files.quiet())
    return words is None or words.next_segment <= number


class _Meter:
    """Calls ``progress`` with the size of the finished segments plus the bytes read of the current segment."""

    def __init__(self, progress: Progress | None, sizes: Sequence[int]) -> None:
        self._progress, self._total = progress, sum(sizes)
        self._sizes, self._done, self._inside = iter(sizes), 0, 0
        self._size = 0
        self.next()

    def next(self) -> None:
        self._done, self._inside, self._size = self._done + self._size, 0, next(self._sizes, 0)
        self._tell()

    def add(self, nbytes: int) -> None:
        """Add bytes read in the current segment, up to the segment's size: a file may be read twice."""
        self._inside = min(self._inside + nbytes, self._size)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._done + self._inside, self._total)


def _ignore(nbytes: int) -> None:
    pass


def _bytes_on_disk(files: Files, number: int) -> int:
    total = 0
    for folder, _, names in os.walk(files.path(layout.segment_folder(number))):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


class OutsideSegments(NamedTuple):
    problems: list[Problem]
    numbers: list[int]
    words: Words | None
    evicted: dict[int, list[tuple[int, int]]]


def check_outside_segments(root: str, plan: Plan, deep: bool) -> OutsideSegments:
    files = Files(root)
    good = check_root(files, plan)
    # Segments are listed before the counters are read, so that a segment made in between is not a problem.
    numbers = segment_numbers(files) if layout.SEGMENTS in good else []
    words = read_words(files) if layout.COUNTERS in good else None
    evicted = read_evictions(files, plan, words) if words and layout.EVICTIONS in good else {}
    if layout.COUNTERS in good:
        check_quarantine(files, words.next_segment if words else None)
        check_notes(files)
    states = verify_states(root, plan.store) if deep and layout.SAMPLERS in good else []
    return OutsideSegments(files.problems + states, numbers, words, evicted)


def segment_numbers(files: Files) -> list[int]:
    """Return the numbers of a store's segments in ascending order; report other names in the folder of segments."""
    names = files.listing(layout.SEGMENTS) or {}
    read = {int(name) for name in names if _NUMBER.fullmatch(name)}
    numbers = {number for number in read if layout.segment_name(number) in names and number < layout.MAX_SEGMENTS}
    files.report_unknown(layout.SEGMENTS, names, set(map(layout.segment_name, numbers)))
    return sorted(numbers)


def read_packs(files: Files, plan: Plan, numbers: Sequence[int]) -> dict[int, Tables]:
    found, quiet = {}, files.quiet()
    for number in numbers:
        where = layout.segment_folder(number)
        if os.path.lexists(files.path(f"{where}/{layout.MEMBERS}")):
            attributes = read_attributes(quiet, where, plan)
            if attributes is not None and attributes.packed is not None:
                tables = read_tables(quiet, where, attributes.packed, attributes.checksums)
                if tables is not None and max(tables.numbers) < number:  # `check_tables` reports a wrong order
                    found[number] = tables
    return found


def _is_just_made(number: int, packs: Mapping[int, Tables], there: Sequence[int]) -> bool:
    """Whether a pack was just made: all its merged segments still exist, as segments or in older packs.

    The pack's number is beyond the store's counter of segments. The process that made the pack is about to increase the
    counter, or died before that. Until the counter is increased, readers use the segments that were merged into the
    pack.
    """
    if number not in packs:
        return False
    before = set(there).union(*(tables.numbers for other, tables in packs.items() if other < number))
    return before.issuperset(packs[number].numbers)


# --- quarantine: steps that do not count until they are restored or dropped ------------------------------------------

_FOLDER = f"{layout.COUNTERS}/quarantine"
_RECORD = ".record.json"
_MOST_BYTES = 1 << 16
_NAME = re.compile(r"([0-9]{8,9})(\.[0-9]+)?")
_PARTS, _ENOUGH_PARTS = {layout.DONE, *layout.LANE_COUNTERS}, 3


def check_quarantine(files: Files, next_segment: int | None) -> None:
    """Report each segment in quarantine that has steps, or has a number that a new segment could get."""
    if not os.path.lexists(files.path(_FOLDER)):
        return
    scratch = files.quiet()  # damage inside the quarantine is not reported
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
            continue  # the folder has single files of a segment, not the whole segment
        _report(files, scratch, f"{where}/{name}", number)
        is_beyond = next_segment is not None and next_segment <= number < layout.MAX_SEGMENTS
        if is_beyond and _can_be_given(files, number):
            detail = f"the next segment is {next_segment}, but {where}/{name} is in quarantine"
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
