"""Verifies a store by an independent reader, which shares no code with those that read and write stores."""

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from diskreplay.errors import StoreNotFound
from diskreplay.folders import OpenFolder, shown_paths
from diskreplay.format import layout
from diskreplay.verify.check_quarantine import check_quarantine
from diskreplay.verify.check_root import (
    COUNTERS_FILE,
    Words,
    check_notes,
    check_root,
    read_hidden,
    read_plan,
    read_words,
)
from diskreplay.verify.check_segment import verify_segment
from diskreplay.verify.check_states import verify_states
from diskreplay.verify.documents import Plan
from diskreplay.verify.files import Files, Problem, reason

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
    chunk and every saved state of a sampler too, and check their checksums. ``progress`` is called with the number of
    segments that were verified, and of all of them. The problems are in the order of the store, what it has beside its
    segments first. Raises StoreNotFound where there is no store at ``path`` or it was deleted meanwhile, FormatError
    where it is of a version that this release does not know.
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
    problems, numbers, words, hidden = check_beside(root, plan, deep)
    for done, number in enumerate(numbers):
        if progress is not None:
            progress(done, len(numbers))
        found, is_sealed = verify_segment(root, number, plan, deep=deep, hidden=hidden.get(number, []))
        problems += found
        if words is not None and not found and (problem := _misplaced(number, words, is_sealed)):
            problems.append(problem)
    if progress is not None:
        progress(len(numbers), len(numbers))
    return problems


class Beside(NamedTuple):
    """What was found beside segments: problems, the numbers of segments, counters, and what was evicted by hand."""

    problems: list[Problem]
    numbers: list[int]
    words: Words | None
    hidden: dict[int, list[tuple[int, int]]]


def check_beside(root: str, plan: Plan, deep: bool) -> Beside:
    """Check what a store has beside its segments; ``deep``: the saved states of samplers too."""
    files = Files(root)
    good = check_root(files, plan)
    # Before the counters: a segment that they do not count was made meanwhile, or is invalid.
    numbers = segment_numbers(files) if layout.SEGMENTS in good else []
    words = read_words(files) if layout.COUNTERS in good else None
    hidden = read_hidden(files, plan, words) if words and layout.HIDDEN in good else {}
    if layout.COUNTERS in good:
        check_quarantine(files, words.next_segment if words else None)
        check_notes(files)
    states = verify_states(root, plan.store) if deep and layout.SAMPLERS in good else []
    return Beside(files.problems + states, numbers, words, hidden)


def segment_numbers(files: Files) -> list[int]:
    """Return the numbers of the segments that are there, lowest first."""
    names = files.listing(layout.SEGMENTS) or {}
    read = {int(name) for name in names if _NUMBER.fullmatch(name)}
    numbers = {number for number in read if layout.segment_name(number) in names and number < layout.MAX_SEGMENTS}
    files.report_unknown(layout.SEGMENTS, names, set(map(layout.segment_name, numbers)))
    return sorted(numbers)


def _misplaced(number: int, words: Words, is_sealed: bool) -> Problem | None:
    """Return what is wrong with a whole segment that the store's counters leave out."""
    detail = f"the next segment is {words.next_segment}, and {layout.segment_folder(number)} is there"
    return Problem("counters", COUNTERS_FILE, detail) if number >= words.next_segment and is_sealed else None
