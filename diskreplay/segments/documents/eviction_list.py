"""Episodes that were evicted by hand: an append-only array of entries, which a counter publishes.

A user may evict episodes to free a full disk, so the chunks for the next entries are written in advance.

The folder of an evicted segment gets a name with the new count of evicted steps. If the process dies before it sets the
store's counter of evicted steps, the next process that opens the store sets this counter from the name.
"""

import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, ReplayError
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import dump, read_object
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.durable import storage_errors, sync_file, sync_folder, write_at, write_atomic, write_file
from diskreplay.segments.files.mapping import opened

ROWS = layout.EVICTION_ROWS
_NBYTES = 16 * ROWS


class EvictionEntries:
    """Reads the entries of episodes that were evicted by hand, and returns each only once. Not thread-safe."""

    def __init__(self, root: Root) -> None:
        self._root = root  # keeps the folder open
        self._folder = str(root.folder / layout.EVICTIONS)
        self.count = 0

    def new(self, count: int) -> NDArray[np.int64]:
        """Return the entries among the first ``count`` entries that were not returned before, ``(n, 2)`` int64.

        Raises FormatError if a chunk file with one of these entries is missing or damaged.
        """
        parts = [np.zeros((0, 2), np.int64)]
        for chunk, inside, rows in layout.split_range(self.count, count, ROWS):
            parts.append(self._read(f"{self._folder}/c.{chunk}.0", inside, rows))
        self.count = max(self.count, count)
        return np.concatenate(parts)

    def steps_by_segment(self, count: int) -> dict[int, int]:
        steps: dict[int, int] = {}
        for first, evicted in self.new(count).tolist():
            number = first >> layout.POSITION_BITS
            steps[number] = steps.get(number, 0) + evicted
        return steps

    def _read(self, path: str, first: int, count: int) -> NDArray[np.int64]:
        try:
            with opened(path, _NBYTES) as fd:
                entries = np.frombuffer(os.pread(fd, 16 * count, 16 * first), "<i8").reshape(-1, 2)
        except (FileNotFoundError, NotADirectoryError):
            raise FormatError(f"{path} is missing; the store is damaged, restore this file") from None
        if (entries[:, 0] < 0).any() or (entries[:, 1] < 1).any():
            raise FormatError(f"{path} has an entry that is not an episode; the store is damaged, restore this file")
        return entries


def evicted_in(root: Root, number: int) -> list[tuple[int, int]]:
    """Return (position of the first step, number of steps) of each of a segment's episodes that were evicted by hand.

    Raises the errors of `EvictionEntries.new`.
    """
    entries = EvictionEntries(root).new(int(root.counters().read()[layout.EVICTION_ENTRIES]))
    own = entries[entries[:, 0] >> layout.POSITION_BITS == number]
    return [(first & layout.POSITION_MASK, steps) for first, steps in own.tolist()]


def evict(root: Root, counters: StoreCounters, episodes: Sequence[tuple[int, int]], hidden_before: int) -> None:
    """Append an entry for each episode and publish the entries together. The caller holds the store lock.

    Each of ``episodes`` is (id of the first step, number of steps). Steps published before the time ``hidden_before``
    are already hidden by the capacity. These steps stay hidden, although the capacity no longer counts the evicted
    steps. If StorageFull is raised, no episode is hidden.
    """
    start = int(counters.read()[layout.EVICTION_ENTRIES])
    stop = start + len(episodes)
    folder = str(root.folder / layout.EVICTIONS)
    with storage_errors(folder):
        _make_room(root, folder, start, stop)
        entries = np.array(episodes, "<i8").reshape(-1, 2)
        for chunk, inside, count in layout.split_range(start, stop, ROWS):
            with opened(f"{folder}/c.{chunk}.0", _NBYTES, os.O_RDWR) as fd:
                write_at(fd, entries[:count].tobytes(), 16 * inside)
                os.fdatasync(fd)
            entries = entries[count:]
        sync_folder(folder)
    # Without this call, publishing the entries would show hidden steps again, because the capacity then counts fewer
    # steps.
    keep_hidden(counters, hidden_before)
    counters.set(layout.EVICTION_ENTRIES, stop)
    counters.sync()
    with suppress(ReplayError, OSError):  # the eviction is done; the next process that opens the store reserves again
        reserve(root, stop)


def keep_hidden(counters: StoreCounters, before: int) -> None:
    if before > counters.peek(layout.FRONTIER):
        counters.set(layout.FRONTIER, min(before, layout.MOST_COUNTED))
        counters.sync()


def has_reserve(root: Root, entries: int) -> bool:
    count = entries + ROWS
    return _rows(root)[0] >= count and os.path.exists(root.folder / layout.EVICTIONS / f"c.{-(-count // ROWS) - 1}.0")


def reserve(root: Root, entries: int) -> None:
    """Write chunks for at least `ROWS` entries after the ``entries`` existing ones. The caller holds the store lock.

    Raises StorageFull if the disk has no room. Raises FormatError if the chunk of the last existing entry is missing.
    """
    folder = str(root.folder / layout.EVICTIONS)
    with storage_errors(folder):
        _make_room(root, folder, entries, entries + ROWS)
        sync_folder(folder)


def _rows(root: Root) -> tuple[int, dict[str, Any]]:
    path = root.folder / layout.EVICTIONS / layout.METADATA
    try:
        document = read_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(f"{path} is missing; diskreplay repair restores it") from None
    try:
        return int(document["shape"][0]), document
    except (KeyError, IndexError, TypeError, ValueError):
        raise FormatError(f"{path} has no shape; diskreplay repair restores it") from None


def _make_room(root: Root, folder: str, entries: int, count: int) -> None:
    """Make the missing chunk files for the first ``count`` entries, and extend the array's shape to these chunks."""
    if entries and not os.path.exists(last := f"{folder}/c.{(entries - 1) // ROWS}.0"):
        # A damaged count must not fill the disk with chunks.
        raise FormatError(f"{last} is missing, but {entries} entries are counted; run diskreplay repair on the store")
    path = root.folder / layout.EVICTIONS / layout.METADATA
    chunks = -(-count // ROWS)
    rows, document = _rows(root)
    if rows < count:
        write_atomic(path, dump({**document, "shape": [chunks * ROWS, 2]}), synced=True)
    # If a chunk exists, all chunks before it exist too.
    for chunk in range(chunks - 1, -1, -1):
        name = f"{folder}/c.{chunk}.0"
        if os.path.exists(name):
            return
        temporary = f"{folder}/.new-{chunk}"
        try:
            write_file(temporary, bytes(_NBYTES))
            sync_file(temporary)  # a power loss could leave an empty file, and later evictions would fail
            os.rename(temporary, name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


# --- folders to be deleted --------------------------------------------------------------------------------------------


PREFIX = "old-"
_NAME = re.compile(PREFIX + r"[0-9]{8,9}-([0-9]{1,19})")


def removed_path(counters_folder: Path, number: int, evicted: int) -> str:
    """Return the new path of a removed segment; ``evicted`` is the new count of evicted steps."""
    return f"{counters_folder}/{PREFIX}{layout.segment_name(number)}-{evicted}"


def discarded_path(path: str) -> str:
    """Return a new path next to ``path`` for a folder to be deleted; the steps in it do not count as evicted."""
    folder, name = os.path.split(path)
    return f"{folder}/{PREFIX}{name}-{os.getpid()}-{time.monotonic_ns()}"


def evicted_by_removals(root: Root) -> int:
    """Return the largest count of evicted steps in the names of removed segments; 0 if there are no such names."""
    try:
        names = os.listdir(root.counters_folder)
    except FileNotFoundError:
        return 0
    found = map(_NAME.fullmatch, names)
    return min(max((int(counted[1]) for counted in found if counted), default=0), layout.MOST_COUNTED)


def destroy(root: Root, gone: Sequence[str]) -> None:
    """Delete the folders ``gone``. No store lock is needed: several processes may delete the same folder."""
    if not gone:
        return
    # The renames are synced before the deletion. After a power loss, a segment must not be back at its old path without
    # some of its files. If the sync fails, the folders are deleted all the same, because a full disk needs the room.
    with suppress(OSError):
        sync_folder(root.segments_folder)
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
