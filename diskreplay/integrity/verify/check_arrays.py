"""The folders of a segment: their documents, their chunk files, and what has no place in them."""

import os
import stat

from diskreplay.integrity.verify.check_attributes import Segment
from diskreplay.integrity.verify.documents import Document, array_mismatch, is_whole, read_object, shaped
from diskreplay.integrity.verify.files import Files, reason
from diskreplay.segments.documents import layout


def check_folders(segment: Segment) -> dict[str, set[int]]:
    """Check every folder and its document; return the chunks that are there of each array with rows."""
    present: dict[str, set[int]] = {}
    bad: set[str] = set()
    for path in ("", *segment.plan.folders):
        above = path.rsplit("/", 1)[0] if "/" in path else ""
        if above in bad:
            bad.add(path)  # reported already
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
    """Check a group's folder, or that of a counter of lanes."""
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
        other = "is not that of a table of this pack" if is_table else "is not what the root's segment_metadata says"
        files.report("metadata", where, other)


def _known_names(segment: Segment, path: str, names: dict[str, str]) -> set[str]:
    """Return the names that may be in a group's folder, or in that of a counter of lanes; ``names`` are there."""
    base = segment.inside(path) if path else segment.where
    counter, table = path in layout.LANE_COUNTERS, path in segment.plan.tables
    column = path in segment.plan.columns
    has_chunk = counter or (column and segment.attributes.episodes)
    known = {p.rpartition("/")[2] for p in segment.plan.folders if p.rpartition("/")[0] == path}
    # What these are is reported where they are read.
    known |= {layout.METADATA, *(("c.0",) if has_chunk else ("c.0.0",) if table else ())}
    known |= {layout.LOCK} if counter else set()
    if path == layout.DURABLE:
        known |= {name for name in _names_beside_durable(segment) if names.get(name) in ("file", "folder")}
    if not (counter or table or column):  # another tool may have put a group or an array there
        folders = [name for name, kind in names.items() if kind == "folder" and name not in known]
        known |= {name for name in folders if _is_node(segment.files, f"{base}/{name}")}
    return known


def _names_beside_durable(segment: Segment) -> list[str]:
    """Return the names of files that lie beside the counter of durable rows."""
    of_packs = (layout.TABLES_COPY, layout.INDEXES_COPY) if segment.plan.tables else ()
    own = (layout.MARKS, layout.BLOCKS, layout.DOCUMENT_COPY, *of_packs)
    return [name.rpartition("/")[2] for name in own]


def _is_node(files: Files, where: str) -> bool:
    """Whether a folder is a group or an array that another tool put there."""
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
    """Say what keeps a document from being that of an array of this segment, whose chunks are there."""
    array, rows = segment.plan.arrays[path], segment.chunk_rows[path]
    lanes, longest, shape = segment.lanes, segment.longest_of(path), document.get("shape")
    length = longest
    if not segment.attributes.sealed and isinstance(shape, list) and len(shape) > 1 and is_whole(shape[1]):
        length = shape[1]
    template = segment.plan.templates[path]
    if document != shaped(template, [lanes, length, *array.shape], [lanes, rows, *array.shape]):
        other = f"is not that of {lanes} lanes, {longest} rows and chunks of {rows}"
        return array_mismatch(document, array, 2) or other
    covered = max(longest, max(chunks) * rows + 1 if chunks else 0)
    if segment.attributes.claimed or not (segment.attributes.sealed or segment.attributes.in_place):
        # Behind the rows there may be others that nothing proves, or chunks whose number a loss of power took back.
        covered = longest
    return f"has {length} rows, and its chunks {covered}" if length < covered else None


def check_chunks(segment: Segment, present: dict[str, set[int]]) -> set[str]:
    """Check that every chunk with rows is there and has its size, and no other; return the arrays of which it is so."""
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
                files.report("unexpected", where, f"lies behind the {longest} rows of a sealed segment")
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
