"""One segment, looked at until what is found cannot be the work of a writer."""

import os
import time

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.verify.check_arrays import check_chunks, check_folders
from diskreplay.verify.check_attributes import (
    Attributes,
    Segment,
    has_marks,
    read_attributes,
    read_counters,
    was_lost,
)
from diskreplay.verify.check_marks import Rows, count_unproven, proven_rows
from diskreplay.verify.check_rows import check_flags, check_hidden, check_times
from diskreplay.verify.check_sums import check_sums
from diskreplay.verify.documents import Plan
from diskreplay.verify.files import Files, Problem

# A segment that changes is looked at again before anything is said of it.
_LOOKS = 5
_PAUSE_S = 0.02


def verify_segment(
    root: str, number: int, plan: Plan, *, deep: bool, hidden: list[tuple[int, int]], where: str = ""
) -> tuple[list[Problem], bool]:
    """Return what is wrong with a segment, and whether it is sealed. Nothing is wrong with one that was evicted.

    ``hidden`` are its entries in the store's list: position and steps of episodes evicted by hand. ``where`` is its
    folder if that is not its place.
    """
    where = where or f"{layout.SEGMENTS}/{layout.segment_name(number)}"
    found: list[Problem] = []
    for look in range(_LOOKS):
        files = Files(root)
        sealed = _look_at(files, where, plan, deep, hidden)
        problems = files.problems
        if not problems or not os.path.lexists(os.path.join(root, where)):
            return [], bool(sealed)
        if sealed is not False:
            return problems, bool(sealed)
        # A writer or the process that seals it was in the middle of something: what stays is wrong.
        keys = {(problem.kind, problem.where) for problem in problems}
        found = [p for p in found if (p.kind, p.where) in keys] if look else problems
        if not found:
            return [], False
        time.sleep(_PAUSE_S * look)
    return found, False


def verify_folder(root: str, where: str, plan: Plan, hidden: list[tuple[int, int]]) -> list[Problem]:
    """Return what is wrong with a segment that nobody changes, wherever in the store it is. See `verify_segment`."""
    files = Files(root)
    _look_at(files, where, plan, True, hidden)
    return files.problems


def _look_at(files: Files, where: str, plan: Plan, deep: bool, hidden: list[tuple[int, int]]) -> bool | None:
    """Look at a segment once; tell whether it is sealed, or None where it does not say: nobody is changing that."""
    if not files.is_folder(where):
        return None
    if was_lost(files, where):
        return False  # the machine went down before anything was durable: no file has to be whole
    attributes = read_attributes(files, where, plan)
    if attributes is None:
        return None
    if not attributes.sealed and not attributes.in_place and not has_marks(Files(files.root), where):
        _prove(files, where, plan, attributes)
        return False  # nothing was brought to the disk before: no file has to be whole
    counters = read_counters(files, where, attributes)
    if counters is None:
        return attributes.sealed
    if not attributes.sealed and not attributes.in_place:
        counters = _prove(files, where, plan, attributes)
    elif attributes.claimed:
        _report_unproven(files, where, attributes.unproven_steps, attributes.writer)
    segment = Segment(files, where, plan, attributes, counters)
    present = check_folders(segment)
    whole = check_chunks(segment, present)
    if layout.TIME in whole:
        check_times(segment)
    if layout.DONE in whole:
        check_flags(segment)
        check_hidden(segment, hidden)
    if attributes.sealed:
        check_sums(segment, present, deep=deep)
    return attributes.sealed


def _prove(files: Files, where: str, plan: Plan, attributes: Attributes) -> NDArray[np.int64]:
    """Return the rows that the marks prove, and report how many steps are behind them."""
    rows = Rows(files, where, plan, attributes.lanes, attributes.chunk_rows)
    proven = proven_rows(rows)
    if steps := count_unproven(rows, proven):
        _report_unproven(files, where, steps, attributes.writer)
    return proven


def _report_unproven(files: Files, where: str, steps: int, writer: int) -> None:
    what = f"up to {steps} steps of writer {writer} behind the last mark that fits do not count"
    detail = f"{what}; repair --salvage takes what is whole"
    files.report("unproven", where, detail)
