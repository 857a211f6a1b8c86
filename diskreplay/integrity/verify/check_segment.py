"""Verifies one segment, and repeats the checks while a problem may be a writer's unfinished work."""

import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from diskreplay.integrity.verify.check_attributes import (
    Segment,
    has_marks,
    read_attributes,
    read_counters,
    was_lost,
)
from diskreplay.integrity.verify.check_marks import count_unproven, proven_rows
from diskreplay.integrity.verify.check_packs import check_evicted_members, check_indexes, check_runs, check_tables
from diskreplay.integrity.verify.check_rows import (
    check_episodes,
    check_evicted,
    check_flags,
    check_priorities,
    check_times,
)
from diskreplay.integrity.verify.check_sums import check_sums
from diskreplay.integrity.verify.documents import Document, Plan, array_mismatch, is_whole, read_object, shaped
from diskreplay.integrity.verify.files import Files, Problem, reason
from diskreplay.integrity.verify.pack_tables import read_tables
from diskreplay.segments.documents import layout

EntriesBySegment = Mapping[int, list[tuple[int, int]]]
"""Episodes evicted by `Store.evict`: {segment number: [(position of the first step, number of steps)]}."""

# A segment that is being changed is verified at most this many times before its problems are reported.
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
    """Return the problems of a segment, and whether it is sealed; an evicted segment has no problems.

    ``where`` is the segment's folder; "" means the usual folder of segment ``number``. ``on_read`` is passed to
    `Files`.
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
        # A writer or a sealing process may be at work: a problem counts only if every attempt finds it.
        keys = {(problem.kind, problem.where) for problem in problems}
        found = [p for p in found if (p.kind, p.where) in keys] if attempt else problems
        if not found:
            return [], False
        time.sleep(_PAUSE_S * attempt)
    return found, False


def verify_folder(root: str, where: str, number: int, plan: Plan, evicted: EntriesBySegment) -> list[Problem]:
    """Return the problems of a segment that no process changes; all checksums are checked."""
    files = Files(root)
    _verify_once(files, where, number, plan, True, evicted)
    return files.problems


def _verify_once(
    files: Files, where: str, number: int, plan: Plan, deep: bool, evicted: EntriesBySegment
) -> bool | None:
    """Return whether the segment is sealed; None: its zarr.json cannot be used."""
    if not files.is_folder(where):
        return None
    if was_lost(files, where):
        return False  # the machine went down before anything was durable: damage is expected
    attributes = read_attributes(files, where, plan)
    if attributes is None:
        return None
    plan = plan.of(attributes.chunk_rows, attributes.packed, attributes.compressed, attributes.episodes)
    segment = Segment(files, where, plan, attributes, np.zeros(attributes.lanes, np.int64))
    must_prove = not attributes.sealed and not attributes.in_place
    if must_prove and not has_marks(files.quiet(), where):
        _prove(segment)
        return False  # nothing was durable: damage is expected
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
    are_episodes = check_flags(segment)
    if segment.attributes.packed is None:
        check_evicted(segment, evicted.get(number, []))
    if segment.tables is not None:
        check_runs(segment, segment.tables)
        check_evicted_members(segment, segment.tables, number, evicted)
    return are_episodes


def _with_values(segment: Segment) -> Segment:
    attributes = segment.attributes
    values = np.array(attributes.values, np.int64) if attributes.values else segment.count_values(segment.rows)
    if (values > segment.rows).any():
        where, detail = segment.inside(layout.METADATA), "has more values of episodes than rows"
        segment.files.report("counters", where, detail)
        values = np.minimum(values, segment.rows)
    claimed = np.array(attributes.claimed, np.int64)
    kept = int(segment.count_values(claimed).max()) if attributes.claimed else 0
    return replace(segment, values=values, kept_values=kept)


def _with_tables(segment: Segment, number: int) -> Segment:
    assert segment.attributes.packed is not None
    # `check_folders` has already reported missing folders.
    tables = read_tables(segment.files.quiet(), segment.where, segment.attributes.packed, segment.attributes.checksums)
    return replace(segment, tables=tables) if tables is not None and check_tables(segment, tables, number) else segment


def _prove(segment: Segment) -> NDArray[np.int64]:
    proven = proven_rows(segment)
    if steps := count_unproven(segment, proven):
        _report_unproven(segment, steps)
    return proven


def _report_unproven(segment: Segment, steps: int) -> None:
    detail = f"up to {steps} steps of writer {segment.attributes.writer} after the last mark that matches do not count"
    if segment.attributes.was_sealed:
        detail += ", unless checksums of blocks prove them: files do not match their checksums"
    segment.files.report("unproven", segment.where, f"{detail}; repair --salvage adds those that are whole")


# --- folders of a segment: zarr.json and chunk files, and unexpected files --------------------------------------------


def check_folders(segment: Segment) -> dict[str, set[int]]:
    """Check every folder and its zarr.json; return {array with rows: indices of its existing chunks}."""
    present: dict[str, set[int]] = {}
    bad: set[str] = set()
    for path in ("", *segment.plan.folders):
        above = path.rsplit("/", 1)[0] if "/" in path else ""
        if above in bad:
            bad.add(path)  # the problem of the parent folder was reported
            continue
        where = segment.inside(path) if path else segment.where
        names = segment.files.listing(where)
        if names is None:
            bad.add(path)
        elif path in segment.plan.arrays:
            present[path] = _check_array(segment, path, names)
        else:
            _check_names(segment, path, names)
    return present


def _check_names(segment: Segment, path: str, names: dict[str, str]) -> None:
    files, base = segment.files, segment.inside(path) if path else segment.where
    is_counter = path in layout.LANE_COUNTERS
    if is_counter and layout.LOCK in names:
        files.check_lock(f"{base}/{layout.LOCK}")
    files.report_unknown(base, names, _known_names(segment, path, names))
    if not path:
        return
    where, template = f"{base}/{layout.METADATA}", segment.plan.templates[path]
    lanes = [len(segment.rows)]
    document = read_object(files, where)
    if document is not None and document != (shaped(template, lanes, lanes) if is_counter else template):
        is_table = path in segment.plan.tables
        other = "does not describe a table of this pack" if is_table else "differs from the root's segment_metadata"
        files.report("metadata", where, other)


def _known_names(segment: Segment, path: str, names: dict[str, str]) -> set[str]:
    base = segment.inside(path) if path else segment.where
    counter, table = path in layout.LANE_COUNTERS, path in segment.plan.tables
    column = path in segment.plan.columns
    has_chunk = counter or (column and segment.attributes.episodes)
    known = {p.rpartition("/")[2] for p in segment.plan.folders if p.rpartition("/")[0] == path}
    # If one of these files is a folder or a link, the function that reads the file reports this.
    known |= {layout.METADATA, *(("c.0",) if has_chunk else ("c.0.0",) if table else ())}
    known |= {layout.LOCK} if counter else set()
    if path == layout.DURABLE:
        known |= {name for name in _names_beside_durable(segment) if names.get(name) in ("file", "folder")}
    if not (counter or table or column):  # another tool may have put a group or an array into this folder
        folders = [name for name, kind in names.items() if kind == "folder" and name not in known]
        known |= {name for name in folders if _is_node(segment.files, f"{base}/{name}")}
    return known


def _names_beside_durable(segment: Segment) -> list[str]:
    of_packs = (layout.TABLES_COPY, layout.INDEXES_COPY) if segment.plan.tables else ()
    own = (layout.MARKS, layout.BLOCKS, layout.DOCUMENT_COPY, *of_packs)
    return [name.rpartition("/")[2] for name in own]


def _is_node(files: Files, where: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(f"{files.path(where)}/{layout.METADATA}", follow_symlinks=False).st_mode)
    except OSError:
        return False


def _check_array(segment: Segment, path: str, names: dict[str, str]) -> set[int]:
    files, array, base = segment.files, segment.plan.arrays[path], segment.inside(path)
    numbers = {name: array.chunk_number(name) for name, kind in names.items() if kind == "file"}
    chunks = {number for number in numbers.values() if number is not None}
    files.report_unknown(base, names, {name for name, number in numbers.items() if number is not None})
    where = f"{base}/{layout.METADATA}"
    document = read_object(files, where)
    if document is not None and (mismatch := _mismatch(segment, path, document, chunks)) is not None:
        files.report("metadata", where, mismatch)
    return chunks


def _mismatch(segment: Segment, path: str, document: Document, chunks: set[int]) -> str | None:
    """Return why a zarr.json does not describe an array with these chunks; None: it does."""
    array, rows = segment.plan.arrays[path], segment.chunk_rows[path]
    lanes, longest, shape = segment.lanes, segment.longest_of(path), document.get("shape")
    length = longest
    if not segment.attributes.sealed and isinstance(shape, list) and len(shape) > 1 and is_whole(shape[1]):
        length = shape[1]
    template = segment.plan.templates[path]
    if document != shaped(template, [lanes, length, *array.shape], [lanes, rows, *array.shape]):
        other = f"does not describe an array of {lanes} lanes and {longest} rows, in chunks of {rows} rows"
        return array_mismatch(document, array, 2) or other
    covered = max(longest, max(chunks) * rows + 1 if chunks else 0)
    if segment.attributes.claimed or not (segment.attributes.sealed or segment.attributes.in_place):
        # The last chunks may have only unproven rows. A power failure may have lost a newer zarr.json with a longer
        # shape.
        covered = longest
    return f"has {length} rows, but its chunks have {covered}" if length < covered else None


def check_chunks(segment: Segment, present: dict[str, set[int]]) -> set[str]:
    """Check that all chunks with rows exist, and the sizes of chunks; return the paths of arrays without problems.

    A sealed segment must have no chunks without rows.
    """
    files, good = segment.files, set()
    for path, chunks in present.items():
        before, rows, longest = len(files.problems), segment.chunk_rows[path], segment.longest_of(path)
        needed = -(-longest // rows)
        missing = needed - sum(chunk < needed for chunk in chunks)
        if missing:
            first = next(chunk for chunk in range(needed) if chunk not in chunks)
            more = f", nor are {missing - 1} after it" if missing > 1 else ""
            files.report("missing", segment.chunk(path, first), f"is not there{more}")
        kept = -(-segment.kept_of(path) // rows)
        for chunk in sorted(chunks):
            if chunk >= kept and segment.attributes.sealed:
                where = segment.chunk(path, chunk)
                files.report("unexpected", where, f"lies after the {longest} rows of a sealed segment")
            else:
                _check_size(files, segment.chunk(path, chunk), segment.chunk_bytes(path))
        if len(files.problems) == before:
            good.add(path)
    return good


def _check_size(files: Files, where: str, nbytes: int) -> None:
    try:
        size = os.stat(files.path(where), follow_symlinks=False).st_size
    except OSError as error:
        files.report("missing" if isinstance(error, FileNotFoundError) else "unreadable", where, reason(error))
        return
    if size != nbytes:
        files.report("size", where, f"has {size} bytes and not {nbytes}")
