"""The inner names that tests of samplers patch or derive from; the others go by public names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import diskreplay as dr
from diskreplay.distributions.base import Distribution
from diskreplay.sampling import gatherer

WARM_BATCHES: int = gatherer.WARM_BATCHES
"""So many batches without a read from disk end the asking for pages."""


class DiskReads:
    """What is asked of the disk, in bytes a batch, and how many blocks the process has read so far."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.blocks = 0


@contextmanager
def disk_reads() -> Iterator[DiskReads]:
    """Note for which pages the disk is asked; a test says how many blocks were read."""
    found, ask = DiskReads(), gatherer.Pages.ask

    def count() -> int:
        return found.blocks

    def noted(pages: Any) -> None:
        found.asked.append(int(pages.sizes.sum()))
        ask(pages)

    with (
        mock.patch.object(gatherer, "blocks_read", count),
        mock.patch.object(gatherer.Pages, "ask", noted),
    ):
        yield found


class Untold(dr.Uniform):
    """A distribution of a user's that does not tell the chances of its ids."""

    chances = Distribution.chances

    def draw(self, *args: Any) -> Any:
        return super().draw(*args)
