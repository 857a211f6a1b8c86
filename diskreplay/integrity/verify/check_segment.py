"""Verifies one segment, again while a finding may be a writer's work in progress."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from diskreplay.integrity.verify.check_arrays import check_chunks, check_folders
from diskreplay.integrity.verify.check_attributes import (
    Segment,
    has_marks,
    read_attributes,
    read_counters,
    was_lost,
)
from diskreplay.integrity.verify.check_episodes import check_episodes
from diskreplay.integrity.verify.check_marks import count_unproven, proven_rows
from diskreplay.integrity.verify.check_packs import check_evicted_members, check_indexes, check_runs, check_tables
from diskreplay.integrity.verify.check_rows import check_evicted, check_flags, check_priorities, check_times
from diskreplay.integrity.verify.check_sums import check_sums
from diskreplay.integrity.verify.documents import Plan
from diskreplay.integrity.verify.files import Files, Problem
from diskreplay.integrity.verify.pack_tables import read_tables
from diskreplay.integrity.verify.values import count_values
from diskreplay.segments.documents import layout

EntriesBySegment = Mapping[int, list[tuple[int, int]]]
"""Position and steps of the episodes that were evicted by hand, by the number of their segment."""

# A segment that changes is verified again before anything is reported.
_ATTEMPTS = 5
_PAUSE_S = 0.02


def verify_segment(
    root: str,
    number: int,
    plan: Plan,
    *,
    deep: bool,
    evicted: EntriesBySegment,
    where: str = "",
    on_read: Callable[[int], None] = lambda nbytes: None,
) -> tuple[list[Problem], bool]:
    """Return what is wrong with a segment, and whether it is sealed. An evicted one has no problems.

    ``where`` is its folder if that is not its place; ``on_read`` as for `Files`.
    """
    where = where or layout.segment_folder(number)
    found: list[Problem] = []
    for attempt in range(_ATTEMPTS):
        files = Files(root, on_read)
        sealed = _verify_once(files, where, number, plan, deep, evicted)
        problems = files.problems
        if not problems or not os.path.lexists(os.path.join(root, where)):
            return [], bool(sealed)
        if sealed is not False:
            return problems, bool(sealed)
        # A writer or the process that seals it may be at work: only what stays is a problem.
        keys = {(problem.kind, problem.where) for problem in problems}
        found = [p for p in found if (p.kind, p.where) in keys] if attempt else problems
        if not found:
            return [], False
        time.sleep(_PAUSE_S * attempt)
    return found, False


def verify_folder(root: str, where: str, number: int, plan: Plan, evicted: EntriesBySegment) -> list[Problem]:
    """Return what is wrong with a segment that no process changes, in any folder of the store. See `verify_segment`."""
    files = Files(root)
    _verify_once(files, where, number, plan, True, evicted)
    return files.problems


def _verify_once(
    files: Files, where: str, number: int, plan: Plan, deep: bool, evicted: EntriesBySegment
) -> bool | None:
    """Verify a segment once; return whether it is sealed, None where that is unknown: nobody is changing that."""
    if not files.is_folder(where):
        return None
    if was_lost(files, where):
        return False  # the machine went down before anything was durable: no file has to be whole
    attributes = read_attributes(files, where, plan)
    if attributes is None:
        return None
    plan = plan.of(attributes.chunk_rows, attributes.packed, attributes.compressed, attributes.episodes)
    segment = Segment(files, where, plan, attributes, np.zeros(attributes.lanes, np.int64))
    must_prove = not attributes.sealed and not attributes.in_place
    if must_prove and not has_marks(files.quiet(), where):
        _prove(segment)
        return False  # nothing was durable before: no file has to be whole
    counters = read_counters(files, where, attributes)
    if counters is None:
        return attributes.sealed
    segment = _with_values(replace(segment, rows=_prove(segment) if must_prove else counters))
    if attributes.claimed and not must_prove:
        _report_unproven(segment, attributes.unproven_steps)
    present = check_folders(segment)
    whole = check_chunks(segment, present)
    if attributes.packed is not None:
        segment = _with_tables(segment, number)
    if attributes.compressed:
        check_indexes(segment)
    if layout.TIME in whole:
        check_times(segment)
    if layout.PRIORITY in whole:
        check_priorities(segment)
    are_episodes = layout.DONE in whole and _check_episodes_of_rows(segment, number, evicted)
    if attributes.sealed:
        check_sums(segment, present, deep=deep)
        if are_episodes:
            check_episodes(segment, deep=deep)
    return attributes.sealed


def _check_episodes_of_rows(segment: Segment, number: int, evicted: EntriesBySegment) -> bool:
    """Check flags, and what names episodes: evictions and the tables of a pack. Return whether the flags are right."""
    are_episodes = check_flags(segment)
    if segment.attributes.packed is None:
        check_evicted(segment, evicted.get(number, []))
    if segment.tables is not None:
        check_runs(segment, segment.tables)
        check_evicted_members(segment, segment.tables, number, evicted)
    return are_episodes


def _with_values(segment: Segment) -> Segment:
    """Return a segment with its values of episodes: as it says, or by flags if it is not sealed."""
    attributes = segment.attributes
    values = np.array(attributes.values, np.int64) if attributes.values else count_values(segment, segment.rows)
    if (values > segment.rows).any():
        where, detail = segment.inside(layout.METADATA), "names more values of episodes than rows"
        segment.files.report("counters", where, detail)
        values = np.minimum(values, segment.rows)
    claimed = np.array(attributes.claimed, np.int64)
    kept = int(count_values(segment, claimed).max()) if attributes.claimed else 0
    return replace(segment, values=values, kept_values=kept)


def _with_tables(segment: Segment, number: int) -> Segment:
    """Return a pack with its tables, if they are whole."""
    assert segment.attributes.packed is not None
    # Folders that are missing were reported.
    tables = read_tables(segment.files.quiet(), segment.where, segment.attributes.packed, segment.attributes.checksums)
    return replace(segment, tables=tables) if tables is not None and check_tables(segment, tables, number) else segment


def _prove(segment: Segment) -> NDArray[np.int64]:
    """Return the rows that the marks prove, and report how many steps are behind them."""
    proven = proven_rows(segment)
    if steps := count_unproven(segment, proven):
        _report_unproven(segment, steps)
    return proven


def _report_unproven(segment: Segment, steps: int) -> None:
    what = f"up to {steps} steps of writer {segment.attributes.writer} behind the last mark that fits do not count"
    if segment.attributes.was_sealed:
        what += ", unless checksums of blocks prove them: files do not fit their checksums"
    segment.files.report("unproven", segment.where, f"{what}; repair --salvage takes what is whole")
