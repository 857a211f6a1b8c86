"""Reading in a thread, while what was read before is used."""

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import TypeVar

from diskreplay.workers import Job, Workers

T = TypeVar("T")


def read_ahead(reads: Iterable[Callable[[], T]]) -> Generator[T, None, None]:
    """Yield what each call returns, or raise what it raises, in order; a thread makes the next one meanwhile."""
    with closing(Workers(1, "diskreplay-import")) as thread:
        before: Job[T] | None = None
        for read in reads:
            ahead = thread.begin(Job(read))
            if before is not None:
                yield before.result()
            before = ahead
        if before is not None:
            yield before.result()
