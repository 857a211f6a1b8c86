"""The counters that publish data: the store's words, and three numbers a lane in every segment.

Data first, commit second: a row is written in full before the counter that shows it is stored. One aligned 8-byte
store is atomic, and x86-64 keeps the order of stores, so a reader that sees the counter sees the row.
"""

import os
import time

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.folders import shown
from diskreplay.format.layout import (
    BOOT,
    COUNTER_WORDS,
    FIRST_LIVE,
    MAX_SEGMENTS,
    MOST_COUNTED,
    NEXT_SEGMENT,
    STEPS_EVICTED,
)
from diskreplay.format.mapping import map_file, open_regular

_RETRIES = 200


class StoreCounters:
    """The words of ``counters/``, each beside its complement.

    Concurrency: any process reads; only who holds the store lock writes.
    """

    nbytes = 2 * COUNTER_WORDS * 8

    def __init__(self, path: str, *, writable: bool = False) -> None:
        self.path = shown(path)
        self._words: NDArray[np.int64] = map_file(path, self.nbytes, writable=writable).array(
            "<i8", (2 * COUNTER_WORDS,)
        )

    @staticmethod
    def fresh() -> bytes:
        """Return the file of a store with no segment yet."""
        zeros = np.zeros(COUNTER_WORDS, "<i8")
        return np.concatenate([zeros, ~zeros]).tobytes()

    def read(self) -> NDArray[np.int64]:
        """Return the words, ``(COUNTER_WORDS,)`` int64.

        Raises
        ------
        FormatError
            Words and their complements disagree in a way that no process leaves, not even one that dies.
        """
        for attempt in range(_RETRIES):
            words = self._words.copy()
            values, before = words[:COUNTER_WORDS], ~words[COUNTER_WORDS:]
            before[BOOT] = values[BOOT]  # which of the two is newer does not matter: another one only costs numbers
            changed = np.flatnonzero(values != before)
            # A process is between the two stores of one word, or died there: the word is what counts. The older first
            # segment is as good, and no flipped bit can hide segments in it.
            if len(changed) == 0 or (len(changed) == 1 and values[changed[0]] > before[changed[0]]):
                values[FIRST_LIVE] = before[FIRST_LIVE]
                return self._checked(values)
            time.sleep(1e-4 * attempt)
        raise FormatError(f"{self.path}: a counter and its complement disagree; restore this file from a backup")

    def _checked(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        if (
            (words < 0).any()
            or (words > MOST_COUNTED).any()
            or not words[FIRST_LIVE] <= words[NEXT_SEGMENT] <= MAX_SEGMENTS
        ):
            raise FormatError(f"{self.path} holds impossible counters {words.tolist()}; restore it from a backup")
        return words

    def raw(self) -> bytes:
        """Return the bytes of the file: the cheapest way to see that nothing changed."""
        return self._words.tobytes()

    def peek(self, word: int) -> int:
        """Return one word without the check against its complement; good for a hint."""
        return int(self._words[word])

    def evicted_after(self, steps: int) -> int:
        """Return how many steps are evicted when so many more are; where the word ends, it counts no further."""
        return min(int(self.read()[STEPS_EVICTED]) + steps, MOST_COUNTED)

    def set(self, word: int, value: int) -> None:
        """Store a word and its complement. The caller holds the store lock; a word never goes back."""
        if value < self._words[word]:
            raise ValueError(f"counter {word} would go back from {int(self._words[word])} to {value}")
        self._words[word] = value
        self._words[COUNTER_WORDS + word] = ~value

    def set_boot(self, value: int) -> None:
        """Store which boot, and which file, numbers are given in. The caller holds the store lock."""
        self._words[BOOT] = value
        self._words[COUNTER_WORDS + BOOT] = ~value

    def lower(self, word: int, value: int) -> None:
        """Let the first segment that may exist go back; no other word ever does. The caller holds the store lock.

        The complement is stored first: whoever reads in between, or after this process dies there, finds the older
        first segment, as after any other death between the two stores.
        """
        if word != FIRST_LIVE:
            raise ValueError(f"counter {word} never goes back")
        self._words[COUNTER_WORDS + word] = ~value
        self._words[word] = value

    def close(self) -> None:
        """Unmap the file; the words stay as they were read last."""
        self._words = self._words.copy()

    def mend(self) -> None:
        """Make complements agree again after a writer died between the two stores. The caller holds the store lock.

        Raises
        ------
        FormatError
            They disagree for another reason.
        """
        values = self.read()
        self._words[:COUNTER_WORDS] = values
        self._words[COUNTER_WORDS:] = ~values


def map_lane_counter(folder: str, lanes: int, *, writable: bool = False) -> NDArray[np.int64]:
    """Map one of a segment's arrays of a number a lane, ``(lanes,)`` int64."""
    array: NDArray[np.int64] = map_file(os.path.join(folder, "c.0"), lanes * 8, writable=writable).array(
        "<i8", (lanes,)
    )
    return array


def read_lane_counter(folder: str, lanes: int, name: str = "c.0") -> NDArray[np.int64]:
    """Return what one of a segment's arrays of a number a lane holds now, ``(lanes,)`` int64."""
    fd = open_regular(f"{folder}/{name}", lanes * 8)
    try:
        return np.frombuffer(os.pread(fd, lanes * 8, 0), "<i8")
    finally:
        os.close(fd)


def write_lane_counter(folder: str, values: NDArray[np.int64]) -> None:
    """Write one of a segment's arrays of a number a lane that no other process may be reading."""
    fd = open_regular(os.path.join(folder, "c.0"), values.nbytes, os.O_WRONLY)
    try:
        os.pwrite(fd, values.tobytes(), 0)
    finally:
        os.close(fd)
