"""Format version 1: names, flags, ids and chunk geometry. Read this file before writing another reader.

docs/format.md describes the whole layout in words; this module defines its numbers.
"""

import sys
from collections.abc import Iterable, Iterator
from mmap import PAGESIZE
from typing import Final

import numpy as np

from diskreplay.ids import (
    CUT as CUT,
    DISCARD as DISCARD,
    END_MARKER as END_MARKER,
    EPISODE_VALUES as EPISODE_VALUES,
    FIRST as FIRST,
    OBSERVATION_ONLY as OBSERVATION_ONLY,
    POSITION_BITS as POSITION_BITS,
    POSITION_MASK as POSITION_MASK,
    TERMINATED as TERMINATED,
    TRUNCATED as TRUNCATED,
    Ints,
)

FORMAT = "diskreplay"
FORMAT_VERSION = 1

# --- names of groups and arrays -------------------------------------------------------------------------------------
COUNTERS = "counters"
EVICTIONS = "evictions"
LIMITERS = "limiters"
SEGMENTS = "segments"
SAMPLERS = "samplers"
DONE = "done"
TIME = "time"  # the time at which each row was published, in nanoseconds since the machine's boot
PRIORITY = "priority"  # the initial priority of each step; 0: not given. Only in segments whose writer gave priorities
COMMITTED = "committed"
OBSERVED = "observed"
DURABLE = "durable"
LANE_COUNTERS = (COMMITTED, OBSERVED, DURABLE)
BLOCKS = f"{DURABLE}/blocks"  # checksums of the blocks of a sealed segment's chunks
DOCUMENT_COPY = f"{DURABLE}/document"  # a copy of a sealed segment's own zarr.json
ROOT_COPY = f"{EVICTIONS}/document"  # a copy of the root's zarr.json
METADATA = "zarr.json"
MARKS = f"{DURABLE}/marks"
LOCK = "lock"
# The two int64 tables of a pack: MEMBERS has a line for each merged segment, and RUNS has a line for each lane of these
# segments.
PACK_TABLES = MEMBERS, RUNS = "members", "runs"
# The chunks of a pack have room for this many rows after the last row, because flags are read in words of 8 bytes.
ROWS_BEHIND = 8
TABLES_COPY = f"{DURABLE}/tables"  # a copy of both tables, concatenated
# The maximum size of a table in bytes, so that a forged table cannot fill the memory.
MAX_TABLE_BYTES = 1 << 30
INDEXES_COPY = f"{DURABLE}/indexes"  # a copy of the indexes of compressed arrays, concatenated
MEMBER_COLUMNS = ("segment", "lanes", "writer", "steps")
RUN_COLUMNS = ("first_row", "rows", "lane", "first_value", "values")
PACK_COLUMNS = MEMBER_COLUMNS, RUN_COLUMNS
EPISODES = "episodes"
EPISODE_COLUMNS = {"position": "<i8", "steps": "<i4", "end": "|u1", "time": "<i8", "total_reward": "<f8"}
# A segment with fewer rows than this has no table of episodes, because reading its rows is as fast. The table would be
# a large part of the segment's bytes.
LEAST_TABLE_ROWS = 1 << 14
# A segment with more rows than this has no table of episodes either. Checking a table reads all rows, and this would
# take too long in huge files of holes.
MOST_TABLE_ROWS = 1 << 25
EPISODE_FOLDERS = EPISODES, *(f"{EPISODES}/{name}" for name in EPISODE_COLUMNS)
AUTO: Final = "auto"
MANUAL: Final = "manual"
COMPACTIONS = AUTO, MANUAL  # whether writers merge segments in the background
ZSTD_LEVELS = 1, 22
# The group of the episode fields: their arrays have one row for each row of a lane with the flag EPISODE_VALUES.
VALUES = "episode"
PACKS, ZSTD = "packs", "zstd"  # names of features, in `requires` of segments
EPISODE_TABLES = "episode-tables"  # a feature that the root requires
DISCARDS = "discards"  # a feature that roots required before the format was released
# The end of the message for a root without EPISODE_TABLES; the message begins with the path of the store.
BEFORE_RELEASE = (
    "was written before the format was released, and this release does not read it: export it with the version that "
    "wrote it, and import the export here"
)
NOTES = f"{COUNTERS}/notes"  # the folder of JSON documents, NAME.json, that a store keeps for its users
NOTE_SUFFIX = ".json"

# --- the store's counters: words of counters/; the complement of each comes 16 words later ---------------------------
NEXT_SEGMENT = 0
FIRST_LIVE = 1
HORIZON = 2  # a capacity hides steps that were published before this time, in nanoseconds since the epoch
STEPS_EVICTED = 3
EVICTION_ENTRIES = 4
FRONTIER = 5  # steps that were published before this time, in nanoseconds since the epoch, are hidden
RESERVED = 6  # segment numbers below this may have been used, even if a power loss took the value of NEXT_SEGMENT
CHANGES = 7  # how often a segment was quarantined, returned or replaced; after a change, readers read all segments
BOOT = 8  # a hash of the boot in which segment numbers were last reserved; 0: no number was reserved yet
SEALED = 9  # how often a segment was sealed, or got priorities; after a change, readers check their growing segments
COUNTER_WORDS = 16
RESERVED_AT_ONCE = 64
MOST_COUNTED = 1 << 62

# In an array's zarr.json, the number of rows is padded with spaces to this width, so that a new number can overwrite it
# in place.
ROWS_WIDTH = 12

# --- ids -------------------------------------------------------------------------------------------------------------
MAX_SEGMENTS = 1 << (63 - POSITION_BITS)

SEGMENT_BYTES = 4 << 30
MIN_CHUNK_BYTES = 64
VALUE_CHUNK_BYTES = 256 << 10  # the maximum size of a chunk of an episode field
MAX_CHUNK_BYTES = 1 << 31
# The maximum sizes of an index of a compressed array, and of an inner chunk of several rows before compression: a
# forged zarr.json cannot fill the memory.
MAX_INDEX_BYTES, MAX_INNER_BYTES = 1 << 28, 1 << 20
# To begin, seal and delete a segment takes as long as writing this many bytes.
SMALL_SEGMENT_BYTES = 1 << 20
MAX_LANES = 1 << 20
EVICTION_ROWS = 4096  # the number of entries in a chunk of evictions/
LIMITER_SLOTS = 64
# With more than CLOSE_LANES lanes, chunks have fewer rows (CLOSE_ROWS for all lanes together, but at least
# LEAST_CLOSE_ROWS per lane), so that lanes share pages. In larger chunks, each lane would write to a page of its own in
# every field.
CLOSE_LANES, CLOSE_ROWS, LEAST_CLOSE_ROWS = 512, 1 << 17, 16
# Rows of at least this size are written with pwrite, because the first write to a page through a mapping takes three
# times as long.
WIDE_ROW_BYTES = 4096

# An initial priority below this value, such as 0, is written as this value: in the array, 0 means "not given".
LEAST_PRIORITY = sys.float_info.min

# The maximum size of a block: a block is a part of a chunk file, and has its own checksum. The number of rows in a
# block is a power of two, like a lane's number of rows in a chunk. So a block has rows of one lane only, or all rows of
# several lanes.
BLOCK_BYTES = 64 << 10
BLOCK_ROWS = 512


def chunk_key(chunk: int, ndim: int) -> str:
    """Return the file name of the chunk with this number along the row axis; ``ndim`` axes follow the row axis."""
    return f"c.0.{chunk}" + ".0" * ndim


def episode_chunk(column: str) -> str:
    return f"{EPISODES}/{column}/c.0"


def segment_name(number: int) -> str:
    return f"{number:08d}"


def segment_folder(number: int) -> str:
    return f"{SEGMENTS}/{segment_name(number)}"


def floor_power_of_two(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)


VALIDATIONS = ("finite", "space")


def ceil_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    ordered = np.array(sorted(ranges), np.int64).reshape(-1, 2)
    return join_ranges(ordered[:, 0], np.maximum.accumulate(ordered[:, 1]))


def join_ranges(firsts: Ints, stops: Ints) -> list[tuple[int, int]]:
    """Return the ranges (first, stop) in ascending order; ranges that touch or overlap are joined.

    ``firsts`` and ``stops`` are each in ascending order. Empty ranges are left out. The arguments are arrays for speed:
    one call may join the ranges of thousands of lanes.
    """
    is_some = firsts < stops
    firsts, stops = firsts[is_some], stops[is_some]
    if not len(firsts):
        return []
    gaps = np.flatnonzero(firsts[1:] > stops[:-1])
    return list(zip(firsts[np.append(0, gaps + 1)].tolist(), stops[np.append(gaps, -1)].tolist(), strict=True))


def subtract_ranges(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    left = list(ranges)
    for first, stop in others:
        left = [part for a, b in left for part in ((a, min(b, first)), (max(a, stop), b)) if part[0] < part[1]]
    return left


def split_range(first: int, stop: int, length: int, most: int = MAX_CHUNK_BYTES) -> Iterator[tuple[int, int, int]]:
    """Split a range at the multiples of ``length``, as the rows of a lane are split into chunks of ``length`` rows.

    A block has ``length`` items. Yield (block, start, count) for each part: ``count`` items of block number ``block``,
    from index ``start`` of the block on. No part has more than ``most`` items.
    """
    while first < stop:
        block, inside = divmod(first, length)
        count = min(stop - first, length - inside, most)
        yield block, inside, count
        first += count


def chunk_rows(row_bytes: int, lanes: int, chunk_bytes: int, most_rows: int, least_bytes: int) -> int:
    """Return the number of rows of each lane in a chunk file: a power of two, as large as ``chunk_bytes`` allows.

    The result is at most ``most_rows``, or the number of rows that fit into ``least_bytes`` if this number is larger.
    """
    row_of_lanes = max(1, lanes * row_bytes)
    of_least_bytes = floor_power_of_two(least_bytes // row_of_lanes)
    return min(floor_power_of_two(chunk_bytes // row_of_lanes), max(most_rows, of_least_bytes))


def value_chunk_rows(row_bytes: int, lanes: int, chunk_bytes: int, most_rows: int) -> int:
    """Return the number of rows of each lane in a chunk file of an episode field.

    The number is small, so that the files take little room. With several lanes the number is even smaller, because a
    lane with few ended episodes leaves its part of a chunk empty.
    """
    row_of_lanes = max(1, lanes * row_bytes)
    rows = min(floor_power_of_two(min(chunk_bytes, VALUE_CHUNK_BYTES) // row_of_lanes), max(1, most_rows))
    if lanes == 1:
        return rows
    return min(rows, max(most_rows // 32, floor_power_of_two(PAGESIZE // row_of_lanes)))


def is_of_episodes(leaf: str) -> bool:
    return leaf.startswith(f"{VALUES}/")


def target_rows(
    lanes: int, step_bytes: int, capacity: int | None, capacity_bytes: int | None, segment_steps: int | str | None
) -> int:
    """Return the number of rows, summed over all lanes, after which a writer begins its next segment."""
    most = most_lane_rows(lanes) * lanes
    if isinstance(segment_steps, int):
        return min(segment_steps, most)
    rows = SEGMENT_BYTES // max(1, step_bytes)
    if capacity is not None:
        rows = min(rows, max(capacity // 16, min(capacity // 4, SMALL_SEGMENT_BYTES // max(1, step_bytes))))
    if capacity_bytes is not None:
        rows = min(rows, capacity_bytes // 16 // max(1, step_bytes))
    return min(max(1024 * lanes, rows), most)


def most_lane_rows(lanes: int) -> int:
    """Return the number of rows of one lane at which a segment is full, even if its other lanes have fewer rows.

    Open episodes may still add many rows to a full segment, so the result is a 64th of the rows whose positions fit
    into ids.
    """
    return max(1, (POSITION_MASK // lanes) // 64)
