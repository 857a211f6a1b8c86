"""The inner names that fixtures for tests of all folders patch or call."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

from diskreplay.reading import known_segments
from diskreplay.segments import shards
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.limiters import StepCounter
from diskreplay.segments.documents.root import read_root
from diskreplay.writing.lifetime import seal_dropped

wait_for_dropped: Callable[[], None] = seal_dropped
"""Return when writers that nobody closed are sealed."""


def forget_warnings() -> None:
    """Have the next reader of a damaged segment warn of it again."""
    known_segments._warned.clear()


def step_counter(path: Path) -> Callable[[], int]:
    """Return what counts the steps ever inserted, as limiters do. It opens no store: that would repair it."""
    counter = StepCounter(read_root(path))
    return lambda: counter.read().ever


def tables_of_few_rows() -> AbstractContextManager[int]:
    """Have every segment that this process seals keep a table of its episodes, however few rows it has."""
    return mock.patch.object(layout, "LEAST_TABLE_ROWS", 0)


def compressed_rows_of(least_bytes: int) -> AbstractContextManager[int]:
    """Have fields of so few bytes a row compressed."""
    return mock.patch.object(shards, "LEAST_ROW_BYTES", least_bytes)
