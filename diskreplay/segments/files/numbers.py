"""Lists the existing segment numbers, and reserves new ones. No number is used twice, not even after a power loss.

The counter of the next number is in memory like all counters, and a power loss may set it back. So numbers are reserved
in groups, and a reservation is durable before its first number is used. In a new boot, the first number comes after all
reserved numbers.
"""

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError, ReplayError
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.durable import storage_errors
from diskreplay.segments.files.machine import boot_id

# Up to this many segment numbers are looked up one by one: most stores have fewer segments. For a longer range, listing
# the folder of segments is cheaper.
_FEW = 256


def next_number(root: Root, counters: StoreCounters) -> int:
    """Durably reserve a number for a new segment, and return the number. The caller holds the store lock.

    When the segment has been made, the caller sets the counter of the next number. Raises ReplayError if all numbers
    are used, StorageFull if the disk has no room.
    """
    words = counters.read()
    number, reserved = int(words[layout.NEXT_SEGMENT]), int(words[layout.RESERVED])
    here = _hashed(boot_id())
    if words[layout.BOOT] != here:
        number = max(number, reserved)
        counters.set(layout.NEXT_SEGMENT, number)
    # The number may belong to a segment whose writer died after moving it into the store and before setting the
    # counter.
    while os.path.lexists(root.segment_path(number)):
        number += 1
    if number >= layout.MAX_SEGMENTS:
        raise ReplayError(f"{root.path} has used all {layout.MAX_SEGMENTS} segment numbers")
    if number >= reserved or words[layout.BOOT] != here:
        counters.set(layout.RESERVED, max(reserved, number + layout.RESERVED_AT_ONCE))
        counters.set_boot(here)
        with storage_errors(f"{root.counters_folder}/c.0"):
            counters.sync()
    return number


@lru_cache(maxsize=4)
def _hashed(text: str) -> int:
    """Return a hash of a boot's id, as a positive int64."""
    data = text.encode()
    return 1 + (crc32c(data) << 29 | crc32c(data[::-1]) >> 3)


def segment_numbers(root: Root, start: int, end: int) -> Sequence[int]:
    """Return the numbers from ``start`` to ``end - 1`` that may have a segment.

    A short range is returned whole. A long range may come from damaged counters, so only numbers of existing segments
    are returned.
    """
    if end - start <= _FEW:
        return range(start, end)
    return sorted(number for number in listed_numbers(root) if start <= number < end)


def live_numbers(root: Root, words: NDArray[np.int64]) -> Sequence[int]:
    return segment_numbers(root, int(words[layout.FIRST_LIVE]), int(words[layout.NEXT_SEGMENT]))


def present_segments(root: Root, numbers: Sequence[int]) -> Iterable[int]:
    """Return the numbers of the existing segments among ``numbers``, or of all existing segments if this is faster."""
    if len(numbers) > _FEW:
        return listed_numbers(root)
    return [number for number in numbers if os.path.exists(root.segment_path(number))]


def listed_numbers(root: Root) -> list[int]:
    """Return the numbers of all existing segments, unsorted, whatever the store's counters say.

    Raises FormatError if the folder of the segments is missing.
    """
    try:
        names = os.listdir(root.segments_folder)
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(f"{root.segments_folder} is missing; the store is damaged, restore this folder") from None
    return [int(name) for name in names if name.isdecimal() and len(name) < 10]
