"""Verifies a store by an independent reader, which shares no code with those that read and write stores."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from diskreplay.errors import StoreNotFound
from diskreplay.folders import OpenFolder, shown_paths
from diskreplay.integrity.verify.check_attributes import read_attributes
from diskreplay.integrity.verify.check_quarantine import check_quarantine
from diskreplay.integrity.verify.check_root import (
    COUNTERS_FILE,
    Words,
    check_notes,
    check_root,
    read_evictions,
    read_plan,
    read_words,
)
from diskreplay.integrity.verify.check_segment import verify_segment
from diskreplay.integrity.verify.check_states import verify_states
from diskreplay.integrity.verify.documents import Plan
from diskreplay.integrity.verify.files import Files, Problem, reason
from diskreplay.integrity.verify.pack_tables import Tables, find_superseded, find_torn, read_tables
from diskreplay.segments.documents import layout

__all__ = ["Problem", "check_beside", "segment_numbers", "verify"]

Progress = Callable[[int, int], None]
_NUMBER = re.compile(r"[0-9]{8,9}")


@shown_paths()
def verify(
    path: str | os.PathLike[str] | OpenFolder, *, deep: bool = False, progress: Progress | None = None
) -> list[Problem]:
    """Verify a store; it may be written, and segments may be evicted, meanwhile.

    Checks that everything the format names is there, has its size and says what the schema says; that counters are
    possible; that the flags of the rows they count are sequences of episodes; and the checksums of the metadata of
    sealed segments. Steps in quarantine are findings too, of the kind ``"quarantine"``. Rows that a writer has not
    committed are not checked, nor is a segment whose writer died: the next process that opens the store with
    mode "a" seals it.

    Where the folder of the store is moved meanwhile, on its file system, it is followed. ``deep``: read every sealed
    chunk and every saved state of a sampler too, and check their checksums. ``progress`` is called with how much was
    verified, and with how much there is: bytes on disk with ``deep``, else segments. The problems are in the order of
    the store, what it has beside its segments first. Raises StoreNotFound where there is no store at ``path`` or it was
    deleted meanwhile, FormatError where it is of a version that this release does not know.
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
    problems, numbers, words, evicted = check_beside(root, plan, deep)
    packs = read_packs(files, plan, numbers)
    superseded = find_superseded(packs)
    for number, other in find_torn(packs, superseded).items():
        detail = f"is a pack of segments of which {layout.segment_folder(other)} has some, and others are in no pack"
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
        if number >= following and is_sealed and not found and not _is_just_made(number, packs, there):
            detail = f"the next segment is {following}, and {layout.segment_folder(number)} is there"
            problems.append(Problem("counters", COUNTERS_FILE, detail))
    return problems


class _Meter:
    """Tells how much of segments of these sizes was verified: inside of one by what was read, and never too much."""

    def __init__(self, progress: Progress | None, sizes: Sequence[int]) -> None:
        self._progress, self._total = progress, sum(sizes)
        self._sizes, self._done, self._inside = iter(sizes), 0, 0
        self._size = 0
        self.next()

    def next(self) -> None:
        """Begin with the next segment."""
        self._done, self._inside, self._size = self._done + self._size, 0, next(self._sizes, 0)
        self._tell()

    def add(self, nbytes: int) -> None:
        """Note what was read of a segment, which may be read again."""
        self._inside = min(self._inside + nbytes, self._size)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._done + self._inside, self._total)


def _ignore(nbytes: int) -> None:
    pass


def _bytes_on_disk(files: Files, number: int) -> int:
    """Return the bytes that a segment takes on disk; 0 where it is gone."""
    total = 0
    for folder, _, names in os.walk(files.path(layout.segment_folder(number))):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


class Beside(NamedTuple):
    """What was found beside segments: problems, the numbers of segments, counters, and what was evicted by hand."""

    problems: list[Problem]
    numbers: list[int]
    words: Words | None
    evicted: dict[int, list[tuple[int, int]]]


def check_beside(root: str, plan: Plan, deep: bool) -> Beside:
    """Check what a store has beside its segments; ``deep``: the saved states of samplers too."""
    files = Files(root)
    good = check_root(files, plan)
    # Before the counters: a segment that they do not count was made meanwhile, or is invalid.
    numbers = segment_numbers(files) if layout.SEGMENTS in good else []
    words = read_words(files) if layout.COUNTERS in good else None
    evicted = read_evictions(files, plan, words) if words and layout.EVICTIONS in good else {}
    if layout.COUNTERS in good:
        check_quarantine(files, words.next_segment if words else None)
        check_notes(files)
    states = verify_states(root, plan.store) if deep and layout.SAMPLERS in good else []
    return Beside(files.problems + states, numbers, words, evicted)


def segment_numbers(files: Files) -> list[int]:
    """Return the numbers of the segments that are there, lowest first."""
    names = files.listing(layout.SEGMENTS) or {}
    read = {int(name) for name in names if _NUMBER.fullmatch(name)}
    numbers = {number for number in read if layout.segment_name(number) in names and number < layout.MAX_SEGMENTS}
    files.report_unknown(layout.SEGMENTS, names, set(map(layout.segment_name, numbers)))
    return sorted(numbers)


def read_packs(files: Files, plan: Plan, numbers: Sequence[int]) -> dict[int, Tables]:
    """Return the tables of the packs among segments, without those that are damaged; nothing is reported."""
    found, quiet = {}, files.quiet()
    for number in numbers:
        where = layout.segment_folder(number)
        if os.path.lexists(files.path(f"{where}/{layout.MEMBERS}")):
            attributes = read_attributes(quiet, where, plan)
            if attributes is not None and attributes.packed is not None:
                tables = read_tables(quiet, where, attributes.packed, attributes.checksums)
                if tables is not None and max(tables.numbers) < number:  # in whatever order
                    found[number] = tables
    return found


def _is_just_made(number: int, packs: Mapping[int, Tables], there: Sequence[int]) -> bool:
    """Whether what the counters leave out is a pack beside all of its segments, or the packs that these were in.

    Its maker counts it next, or died before that: readers see these, and the next process that opens the store to write
    counts it.
    """
    if number not in packs:
        return False
    before = set(there).union(*(tables.numbers for other, tables in packs.items() if other < number))
    return before.issuperset(packs[number].numbers)
