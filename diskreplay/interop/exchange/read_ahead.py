"""Reading in a thread, while what was read before is used."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def read_ahead(reads: Iterable[Callable[[], T]]) -> Generator[T, None, None]:
    """Yield what each call returns, or raise what it raises, in order; a thread makes the next one meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        before: Future[T] | None = None
        for read in reads:
            ahead = thread.submit(read)
            if before is not None:
                yield before.result()
            before = ahead
        if before is not None:
            yield before.result()
