"""The folders of a segment: their documents, their chunk files, and what has no place in them."""

import os
import re
import stat

from diskreplay.format import layout
from diskreplay.verify.check_attributes import Segment
from diskreplay.verify.documents import (
    MAX_DOCUMENT_BYTES,
    Document,
    array_mismatch,
    is_whole,
    parse,
    shaped,
)
from diskreplay.verify.files import Files, reason


def check_folders(segment: Segment) -> dict[str, set[int]]:
    """Check every folder and its document; return the chunks that are there of each array with rows."""
    present: dict[str, set[int]] = {}
    bad: set[str] = set()
    for path in ("", *segment.plan.folders):
        above = path.rsplit("/", 1)[0] if "/" in path else ""
        if above in bad:
            bad.add(path)  # said already
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
    counter = path in layout.LANE_COUNTERS
    own = {layout.METADATA, "c.0", layout.LOCK} if counter else {layout.METADATA}
    if path == layout.DURABLE:
        own |= {name.removeprefix(f"{path}/") for name in (layout.MARKS, layout.BLOCKS, layout.DOCUMENT_COPY)}
    if counter and layout.LOCK in names:
        files.check_lock(f"{base}/{layout.LOCK}")
    known = {p.rsplit("/", 1)[-1] for p in segment.plan.folders if (p.rsplit("/", 1)[0] if "/" in p else "") == path}
    for name, kind in sorted(names.items()):
        where = f"{base}/{name}"
        if kind in ("link", "other"):
            if name not in known and name not in (
                layout.METADATA,
                layout.LOCK,
                "c.0",
            ):  # these are reported where they are read
                files.report("type", where, "is a symbolic link" if kind == "link" else "is no file or folder")
        elif name in own or name.startswith("."):
            continue
        elif name not in known and (counter or kind == "file" or not _is_node(files, where)):
            files.report("unexpected", where, "has no place in a store")
    if path:
        data = files.read(f"{base}/{layout.METADATA}", MAX_DOCUMENT_BYTES)
        if data is None:
            return
        template = segment.plan.templates[path]
        lanes = [len(segment.rows)]
        expected = shaped(template, lanes, lanes) if counter else template
        document = parse(files, f"{base}/{layout.METADATA}", data)
        if document is not None and document != expected:
            files.report("metadata", f"{base}/{layout.METADATA}", "is not what the root's segment_metadata says")


def _is_node(files: Files, where: str) -> bool:
    """Whether a folder is a group or an array that another tool put there."""
    try:
        return stat.S_ISREG(os.stat(f"{files.path(where)}/{layout.METADATA}", follow_symlinks=False).st_mode)
    except OSError:
        return False


def _check_array(segment: Segment, path: str, names: dict[str, str]) -> set[int]:
    files, array = segment.files, segment.plan.arrays[path]
    base = segment.inside(path)
    form = re.compile(r"c\.0\.(0|[1-9][0-9]{0,17})" + r"\.0" * len(array.shape))
    chunks = set()
    for name, kind in sorted(names.items()):
        if kind in ("link", "other"):
            files.report("type", f"{base}/{name}", f"is a {kind} and not a file")
        elif (match := form.fullmatch(name)) and kind == "file":
            chunks.add(int(match[1]))
        elif name != layout.METADATA and not name.startswith("."):
            files.report("unexpected", f"{base}/{name}", "has no place in a store")
    where = f"{base}/{layout.METADATA}"
    data = files.read(where, MAX_DOCUMENT_BYTES)
    document = None if data is None else parse(files, where, data)
    if document is None:
        return chunks
    mismatch = _mismatch(segment, path, document, chunks)
    if mismatch is not None:
        files.report("metadata", where, mismatch)
    return chunks


def _mismatch(segment: Segment, path: str, document: Document, chunks: set[int]) -> str | None:
    """Say what keeps a document from being that of an array of this segment, whose chunks are there."""
    array, rows = segment.plan.arrays[path], segment.attributes.chunk_rows[path]
    lanes, longest, shape = segment.attributes.lanes, segment.longest, document.get("shape")
    length = longest
    if not segment.attributes.sealed and isinstance(shape, list) and len(shape) > 1 and is_whole(shape[1]):
        length = shape[1]
    template = segment.plan.templates[path]
    if document != shaped(template, [lanes, length, *array.shape], [lanes, rows, *array.shape]):
        told = array_mismatch(document, array, 2)
        return told or f"is not that of {lanes} lanes, {longest} rows and chunks of {rows}"
    covered = max(longest, max(chunks) * rows + 1 if chunks else 0)
    if segment.attributes.claimed or not (segment.attributes.sealed or segment.attributes.in_place):
        # Behind the rows there may be others that nothing proves, or chunks whose number a loss of power took back.
        covered = longest
    return f"has {length} rows, and its chunks {covered}" if length < covered else None


def check_chunks(segment: Segment, present: dict[str, set[int]]) -> set[str]:
    """Check that every chunk with rows is there and has its size, and no other; return the arrays of which it is so."""
    files, longest, good = segment.files, segment.longest, set()
    for path, chunks in present.items():
        before = len(files.problems)
        array, rows = segment.plan.arrays[path], segment.attributes.chunk_rows[path]
        needed = -(-longest // rows)
        key = ".0" * len(array.shape)
        there = {chunk for chunk in chunks if chunk < needed}
        if len(there) < needed:
            first = next(chunk for chunk in range(needed) if chunk not in there)
            more = f", nor are {needed - len(there) - 1} after it" if needed - len(there) > 1 else ""
            files.report("missing", segment.inside(f"{path}/c.0.{first}{key}"), f"is not there{more}")
        nbytes = segment.attributes.lanes * rows * array.row_bytes
        for chunk in sorted(chunks):
            name = segment.inside(f"{path}/c.0.{chunk}{key}")
            if (
                chunk >= max(needed, -(-max(segment.attributes.claimed, default=0) // rows))
                and segment.attributes.sealed
            ):
                files.report("unexpected", name, f"lies behind the {longest} rows of a sealed segment")
                continue
            _check_size(files, name, nbytes)
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
