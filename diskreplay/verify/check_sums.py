"""The checksums of a sealed segment: every file has one, and it fits."""

import os

from diskreplay.format import layout
from diskreplay.verify.check_attributes import Segment
from diskreplay.verify.check_blocks import Blocks
from diskreplay.verify.crc import checksum
from diskreplay.verify.documents import MAX_DOCUMENT_BYTES
from diskreplay.verify.files import reason


def check_sums(segment: Segment, present: dict[str, set[int]], *, deep: bool) -> None:
    """Check that every file of a sealed segment has its checksum, and with ``deep`` that it fits."""
    files, sums = segment.files, segment.attributes.checksums
    plan, longest = segment.plan, segment.kept_rows
    wanted = {f"{path}/{layout.METADATA}" for path in plan.folders}
    wanted |= {f"{name}/c.0" for name in layout.LANE_COUNTERS} | {layout.BLOCKS}
    for path, chunks in present.items():
        needed = -(-longest // segment.attributes.chunk_rows[path])
        dimensions = len(plan.arrays[path].shape)
        wanted |= {f"{path}/{layout.chunk_key(chunk, dimensions)}" for chunk in chunks if chunk < needed}
    for name in sorted(wanted - sums.keys()):
        files.report("checksum", segment.inside(name), "has no checksum in the sealed segment")
    reported = {problem.where for problem in files.problems}
    links: dict[str, bool] = {}
    blocks = Blocks(segment)
    for name in sorted(sums):
        folder = name.rpartition("/")[0]
        if not _is_safe(name):
            files.report("metadata", segment.inside(layout.METADATA), f"a checksum of {name!r:.80}, outside of it")
        elif segment.inside(name) in reported or (folder in plan.folders and name not in wanted):
            continue  # said already
        elif (deep or not _is_chunk(name)) and not _is_behind_link(segment, folder, links):
            _check_sum(segment, name, sums[name], blocks)
    _check_copy(segment)
    if deep and segment.inside(layout.BLOCKS) not in {problem.where for problem in files.problems}:
        blocks.check()


def _check_copy(segment: Segment) -> None:
    """Check that the copy of the segment's own document, which it can be restored from, is one."""
    copy = segment.files.read(segment.inside(layout.DOCUMENT_COPY), MAX_DOCUMENT_BYTES)
    if copy is not None and copy != segment.files.read(segment.inside(layout.METADATA), MAX_DOCUMENT_BYTES):
        segment.files.report("checksum", segment.inside(layout.DOCUMENT_COPY), "is no copy of the segment's zarr.json")


def _is_chunk(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return file != layout.METADATA and folder not in layout.LANE_COUNTERS


def _is_safe(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def _is_behind_link(segment: Segment, folder: str, known: dict[str, bool]) -> bool:
    """Whether a folder, or one above it, is a link, and lies elsewhere."""
    if folder and folder not in known:
        known[folder] = os.path.islink(segment.files.path(segment.inside(folder))) or _is_behind_link(
            segment, folder.rpartition("/")[0], known
        )
    return bool(folder) and known[folder]


def _check_sum(segment: Segment, name: str, expected: int, blocks: Blocks) -> None:
    files, where = segment.files, segment.inside(name)
    fd = files.open(where)
    if fd is None:
        return
    try:
        if checksum(fd) != expected:
            which = blocks.damage(name, fd) if name in blocks.sums else ""
            files.report("checksum", where, f"does not fit the checksum that it was sealed with{which}")
    except OSError as error:
        files.report("unreadable", where, reason(error))
    finally:
        os.close(fd)
