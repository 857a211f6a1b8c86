"""Checks the tables of packs, and that the rows of packs agree with them."""

from collections.abc import Mapping

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.ids import EPISODE_VALUES
from diskreplay.integrity.verify.check_attributes import Segment
from diskreplay.integrity.verify.check_rows import blocks, is_episode, is_lost
from diskreplay.integrity.verify.documents import check_content
from diskreplay.integrity.verify.files import read_at
from diskreplay.integrity.verify.pack_tables import Tables
from diskreplay.integrity.verify.row_flags import NO_STEP, START
from diskreplay.segments.documents import layout


def check_tables(segment: Segment, tables: Tables, number: int | None) -> bool:
    files = segment.files
    copy = segment.inside(layout.TABLES_COPY)
    check_content(files, copy, tables.content, "checksum", "is not a copy of the two tables of this pack")
    path, detail = layout.MEMBERS, _wrong_members(segment, tables, number)
    if detail is None:
        path, detail = layout.RUNS, _wrong_runs(segment, tables)
    if detail is not None:
        files.report("counters", segment.inside(f"{path}/c.0.0"), detail)
    return detail is None


def _wrong_members(segment: Segment, tables: Tables, number: int | None) -> str | None:
    numbers, lanes, writers, steps = tables.members.T
    most = layout.MAX_SEGMENTS if number is None else number
    if (np.diff(numbers) <= 0).any() or numbers[0] < 0 or numbers[-1] >= most:
        return "does not list segments older than this pack in ascending order"
    if (lanes < 1).any() or (lanes > layout.MAX_LANES).any() or int(lanes.sum()) != len(tables.runs):
        return f"lists segments whose lanes are not the {len(tables.runs)} that this pack has"
    if (writers < 0).any() or (writers > numbers).any():
        return "lists a writer whose first segment is newer than one of its segments"
    if (steps < 0).any() or int(steps.sum()) != segment.attributes.steps:
        return f"lists segments with {int(steps.sum())} steps, and this pack has {segment.attributes.steps}"
    return None


def _wrong_runs(segment: Segment, tables: Tables) -> str | None:
    lanes = tables.members[:, 1]
    first_rows, rows, numbers, first_values, values = tables.runs.T
    member = np.repeat(np.arange(len(lanes)), lanes)
    if (tables.runs < 0).any() or (rows > layout.POSITION_MASK // lanes[member]).any():
        return "has a lane with an impossible number of rows"
    if (numbers >= layout.MAX_LANES).any():
        return f"has a lane with the number {int(numbers.max())}"
    is_behind = (tables.runs[:, :2] > segment.longest).any()
    if is_behind or (tables.stops[:-1] > first_rows[1:]).any() or tables.stops[-1] != segment.longest:
        return f"has lanes that overlap, or whose last lane does not end at row {segment.longest}, the end of this pack"
    stops = np.cumsum(values)
    if (values > rows).any() or (first_values != stops - values).any() or stops[-1] != sum(segment.attributes.values):
        return "has wrong positions of the values of episodes"
    of_rows = [rows for path, rows in segment.chunk_rows.items() if not layout.is_of_episodes(path)]
    if min(of_rows) < segment.longest + layout.ROWS_BEHIND:
        return f"has {segment.longest} rows, more than fit into a chunk of this pack"
    if len(np.unique(np.stack([member, numbers], axis=1), axis=0)) < len(numbers):
        return "lists a lane of a segment twice"
    return None


def check_indexes(segment: Segment) -> None:
    """Check the shard index at the end of each compressed file, and the copy of these indexes."""
    files, indexes = segment.files, []
    for path, how in sorted(segment.attributes.compressed.items()):
        name, nbytes = segment.chunk(path, 0), 16 * (segment.chunk_rows[path] // how.rows)
        with files.quiet().opened(name, how.nbytes) as fd:
            data = b"" if fd is None else read_at(fd, nbytes + 4, how.nbytes - nbytes - 4)
        if len(data) < nbytes + 4 or int(crc32c(data[:nbytes])) != int.from_bytes(data[nbytes:], "little"):
            return  # the file does not match its checksum, which `check_sums` reports
        indexes.append(data)
        entries = np.frombuffer(data[:nbytes], "<u8").reshape(-1, 2)
        entries = entries[entries[:, 0] != np.uint64(2**64 - 1)]
        stops = np.cumsum(entries[:, 1])
        most = 2 * how.rows * segment.plan.arrays[path].row_bytes + 1024  # zstd adds little to what it cannot compress
        is_wrong = (entries[:, 1] <= 4) | (entries[:, 1] > most) | (entries[:, 0] != stops - entries[:, 1])
        if is_wrong.any():
            files.report("counters", name, "has an index with wrong positions of its inner chunks")
        elif entries.size and stops[-1] != how.nbytes - nbytes - 4:
            files.report("counters", name, "has an index that does not begin where its inner chunks end")
    copy = segment.inside(layout.INDEXES_COPY)
    check_content(files, copy, b"".join(indexes), "checksum", "is not a copy of the indexes of this pack")


def check_runs(segment: Segment, tables: Tables) -> None:
    """Check that each lane of a pack begins with an episode, and that the pack's rows fit its tables.

    The numbers of steps and of values of episode fields in the tables are compared with the rows. Each range of lost
    rows must lie within one lane.
    """
    files, done = segment.files, segment.inside(layout.DONE)
    (steps, values), counted = np.zeros((2, len(tables.runs)), np.int64), tables.runs[:, 1] > 0
    for _, first, _, flags, _ in blocks(segment, layout.DONE, START):
        here = _lines_in(tables, first, first + flags.shape[1])
        begins = tables.first_rows[here][counted[here]] - first
        begins = begins[begins >= 0]
        wrong = begins[flags[0, begins] & layout.FIRST == 0]
        if wrong.size:
            files.report("flags", done, f"row {first + wrong[0]} is the first row of a lane, but not of an episode")
            return
        bounds = np.clip(np.stack([tables.first_rows[here], tables.stops[here]]) - first, 0, flags.shape[1])
        for found, counts in ((steps, flags[0] & NO_STEP == 0), (values, flags[0] & EPISODE_VALUES != 0)):
            before = np.concatenate([[0], np.cumsum(counts)])
            found[here] += before[bounds[1]] - before[bounds[0]]
    is_lost, between = np.zeros(len(tables.runs), np.bool_), {*tables.between}
    for (row, count), lost in zip(segment.attributes.lost, segment.attributes.lost_values, strict=True):
        line = max(0, int(np.searchsorted(tables.first_rows, row, "right")) - 1)
        if (row, row + count) in between:
            continue
        if row + count > tables.stops[line]:
            files.report("flags", done, f"{count} lost rows from row {row} on reach past the end of a lane")
            return
        is_lost[line] = True
        values[line] += lost
    if segment.plan.episode_arrays and (wrong := np.flatnonzero(values != tables.runs[:, 4])).size:
        line = int(wrong[0])
        detail = f"line {line}: {tables.runs[line, 4]} values of episodes, but its rows have {values[line]}"
        files.report("counters", segment.inside(f"{layout.RUNS}/c.0.0"), detail)
    _check_steps(segment, tables, steps, is_lost)


def _lines_in(tables: Tables, first: int, stop: int) -> slice:
    begin = int(np.searchsorted(tables.stops, first, "right"))
    return slice(begin, max(begin, int(np.searchsorted(tables.first_rows, stop))))


def _check_steps(segment: Segment, tables: Tables, steps: NDArray[np.int64], is_lost: NDArray[np.bool_]) -> None:
    line = np.cumsum(tables.members[:, 1]) - tables.members[:, 1]
    found, unknown = np.add.reduceat(steps, line), np.logical_or.reduceat(is_lost, line)
    for at in np.flatnonzero((found != tables.members[:, 3]) & ~unknown)[:1].tolist():
        number, _, _, stated = tables.members[at].tolist()
        detail = f"says {stated} steps of segment {number}, but its rows hold {found[at]}"
        segment.files.report("counters", segment.inside(layout.METADATA), detail)


def check_evicted_members(
    segment: Segment, tables: Tables, number: int, evicted: Mapping[int, list[tuple[int, int]]]
) -> None:
    """Check that each eviction by hand from a segment in the pack has evicted one whole episode.

    ``evicted`` is {segment number: [(position of the first step, number of steps)]}. ``number`` is the number of the
    pack.
    """
    for position, steps in evicted.get(number, []):
        detail = f"{steps} steps from position {position} of {segment.where}, a pack, never existed"
        segment.files.report("eviction", layout.EVICTIONS, detail)
    for number in sorted(tables.first_line.keys() & evicted.keys()):
        line, lanes = tables.first_line[number]
        for position, steps in evicted[number]:
            row, lane = divmod(position, lanes)
            first, rows = tables.runs[line + lane, :2].tolist()
            is_there = row + steps <= rows and is_episode(segment, 0, first + row, first + row + steps, first + rows)
            if not is_there or is_lost(segment, first + row):
                detail = f"{steps} steps from row {row} of lane {lane} of segment {number} are not an episode"
                segment.files.report("eviction", layout.EVICTIONS, f"{detail} in {segment.where}")
