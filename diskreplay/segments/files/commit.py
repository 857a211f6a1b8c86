"""The counters that publish data: the words of a store, and three counters for each lane of a segment.

A row is written in full before the counter that shows it. One aligned write of 8 bytes is atomic, and x86-64 keeps the
order of writes. So a reader that sees the new value of the counter also sees the row. On a file system that does not
keep reserved blocks, counters are written by `pwrite`, and not through mapped memory.
"""

import os
import time
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, StorageFull
from diskreplay.folders import BY_PATH, Lookup
from diskreplay.segments.documents import layout
from diskreplay.segments.files.durable import keeps_reservations, storage_error, sync_file, write_at
from diskreplay.segments.files.mapping import map_file, opened, read_with_status

_RETRIES = 200


class CountersByPosition:
    """Counters that are read through a mapping and written by `pwrite`; indexed like an array, ``(count,)`` int64.

    A write may find the disk full. If the counters span several pages, the write may fail after the first pages. The
    remaining counters are called owed: the next call of `store` writes them too, because the rows that they publish are
    already written. If no counter was written, none is owed and StorageFull is raised; with ``late``, all are owed and
    nothing is raised.

    Concurrency: one process writes. The file is opened for each write, so this object need not be closed.
    """

    def __init__(self, path: str, count: int, *, late: bool = False) -> None:
        self._path, self._late = path, late
        self._shown: NDArray[np.int64] = map_file(path, count * 8, writable=True).array("<i8", (count,))
        self._owed: NDArray[np.int64] | None = None
        self._pid = os.getpid()

    @property
    def data(self) -> Self:
        """The object itself, so that ``counters.data[i] = number`` works as for an array."""
        return self

    def copy(self) -> NDArray[np.int64]:
        """Return the values that the file has now; owed values are not in the file yet."""
        return self._shown.copy()

    def tobytes(self) -> bytes:
        return self._shown.tobytes()

    def __getitem__(self, key: Any) -> Any:
        return self._shown[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.store(key, value, late=self._late)

    def store(self, key: Any, value: Any, *, late: bool) -> None:
        """Set the counters at ``key`` to ``value``; also write the counters that an earlier call could not write.

        Raises StorageFull if ``late`` is False and the disk is so full that not one counter was written. In this case,
        no counter is changed.
        """
        wanted = self._shown.copy() if self._owed is None else self._owed.copy()
        wanted[key] = value
        changed = np.flatnonzero(wanted != self._shown)
        if len(changed) == 0:
            return
        first, stop = int(changed[0]), int(changed[-1]) + 1
        try:
            with opened(self._path, self._shown.nbytes, os.O_WRONLY) as fd:
                write_at(fd, wanted[first:stop].tobytes(), first * 8)
        except OSError as error:
            full = storage_error(error, self._path)
            if not isinstance(full, StorageFull):
                raise
            if not late and (wanted[changed] != self._shown[changed]).all():
                raise full from error
            self._owed = wanted
        else:
            self._owed = None

    def store_owed(self, *, late: bool) -> None:
        """Write the counters that `store` could not write; errors as for `store`. A forked child writes nothing."""
        if self._owed is not None and os.getpid() == self._pid:
            self.store([], [], late=late)


Counters = NDArray[np.int64] | CountersByPosition


def open_counters(path: str, count: int, *, late: bool = False) -> Counters:
    if keeps_reservations(path):
        mapped: NDArray[np.int64] = map_file(path, count * 8, writable=True).array("<i8", (count,))
        return mapped
    return CountersByPosition(path, count, late=late)


class StoreCounters:
    """The counters of a store, int64 words of the array ``counters/``, each with its complement.

    Concurrency: any process reads; only a holder of the store lock writes.
    """

    nbytes = 2 * layout.COUNTER_WORDS * 8

    def __init__(self, path: str, *, writable: bool = False) -> None:
        self._file = path
        self._words: Counters
        if writable:
            self._words = open_counters(path, 2 * layout.COUNTER_WORDS)
        else:
            self._words = map_file(path, self.nbytes).array("<i8", (2 * layout.COUNTER_WORDS,))

    def sync(self) -> None:
        sync_file(self._file)

    @staticmethod
    def fresh() -> bytes:
        zeros = np.zeros(layout.COUNTER_WORDS, "<i8")
        return np.concatenate([zeros, ~zeros]).tobytes()

    def read(self) -> NDArray[np.int64]:
        """Return the words, ``(COUNTER_WORDS,)`` int64.

        Raises FormatError if words and complements disagree in a way that a process that died cannot have caused.
        """
        for attempt in range(_RETRIES):
            words = self._words.copy()
            values, before = words[: layout.COUNTER_WORDS], ~words[layout.COUNTER_WORDS :]
            # The word of the boot may differ from its complement: a wrong boot only leaves some segment numbers unused.
            before[layout.BOOT] = values[layout.BOOT]
            changed = np.flatnonzero(values != before)
            # One word may differ from its complement: a process may be between its two writes, or may have died there.
            # In this case, the value of the word counts. But FIRST_LIVE is always taken from its complement, so that a
            # damaged word cannot hide segments. A FIRST_LIVE that is too low does no harm.
            if len(changed) == 0 or (len(changed) == 1 and values[changed[0]] > before[changed[0]]):
                values[layout.FIRST_LIVE] = before[layout.FIRST_LIVE]
                break
            time.sleep(1e-4 * attempt)
        else:
            raise FormatError(f"{self._file}: a counter and its complement disagree; restore this file from a backup")
        if (
            (values < 0).any()
            or (values > layout.MOST_COUNTED).any()
            or not values[layout.FIRST_LIVE] <= values[layout.NEXT_SEGMENT] <= layout.MAX_SEGMENTS
        ):
            raise FormatError(f"{self._file} holds impossible counters {values.tolist()}; restore it from a backup")
        return values

    def raw(self) -> bytes:
        """Return the bytes of the file: comparing them is the cheapest way to detect changes."""
        return self._words.tobytes()

    def peek(self, word: int) -> int:
        """Return one word without checking its complement, for callers that use the word as a hint."""
        return int(self._words[word])

    def evicted_after(self, steps: int) -> int:
        return min(int(self.read()[layout.STEPS_EVICTED]) + steps, layout.MOST_COUNTED)

    def set(self, word: int, value: int) -> None:
        """Write a word and its complement; a word must not decrease.

        Raises StorageFull, and writes nothing, if the file system copies on write and has no room.
        """
        if value < self._words[word]:
            raise ValueError(f"counter {word} would go back from {int(self._words[word])} to {value}")
        if isinstance(self._words, CountersByPosition):
            # a single write: on a full disk, the word and its complement both change, or neither does
            self._words[[word, layout.COUNTER_WORDS + word]] = value, ~value
            return
        self._words[word] = value
        self._words[layout.COUNTER_WORDS + word] = ~value

    def count(self, word: int) -> None:
        self.set(word, min(int(self.read()[word]) + 1, layout.MOST_COUNTED))

    def set_boot(self, value: int) -> None:
        self._words[layout.BOOT] = value
        self._words[layout.COUNTER_WORDS + layout.BOOT] = ~value

    def lower(self, word: int, value: int) -> None:
        """Decrease the number of the first segment, the only word that may decrease.

        The complement is written before the word, because `read` uses only the complement of this word.
        """
        if word != layout.FIRST_LIVE:
            raise ValueError(f"counter {word} never goes back")
        self._words[layout.COUNTER_WORDS + word] = ~value
        self._words[word] = value

    def close(self) -> None:
        """Unmap the file; this object keeps the last values of the words."""
        self._words = self._words.copy()

    def restore_complements(self) -> None:
        """Make each complement agree with its word again, after a process died between its two writes.

        Raises FormatError if a process that died cannot have caused the difference.
        """
        values = self.read()
        self._words[: layout.COUNTER_WORDS] = values
        self._words[layout.COUNTER_WORDS :] = ~values


def map_lane_counter(folder: str, lanes: int) -> NDArray[np.int64]:
    array: NDArray[np.int64] = map_file(os.path.join(folder, "c.0"), lanes * 8).array("<i8", (lanes,))
    return array


def open_lane_counter(folder: str, lanes: int, *, late: bool = False) -> Counters:
    return open_counters(os.path.join(folder, "c.0"), lanes, late=late)


def read_lane_counter(folder: str, lanes: int, name: str = "c.0", lookup: Lookup = BY_PATH) -> NDArray[np.int64]:
    return np.frombuffer(read_with_status(f"{folder}/{name}", lanes * 8, lanes * 8, lookup)[0], "<i8")


def write_lane_counter(folder: str, values: NDArray[np.int64]) -> None:
    """Write a lane counter by `pwrite`, while no other process writes it."""
    with opened(os.path.join(folder, "c.0"), values.nbytes, os.O_WRONLY) as fd:
        write_at(fd, values.tobytes(), 0)
