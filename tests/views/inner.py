"""The inner names that tests of views patch; the others go by public names, or by `tests.views.fakes`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import diskreplay as dr
from diskreplay.sampling import normalize
from diskreplay.views import requested, successors


@contextmanager
def few_at_once() -> Iterator[None]:
    """Have fields on request take few steps at once, and sort episodes that came before there are many."""
    with (
        mock.patch.object(successors, "_FEW", 3),
        mock.patch.object(requested, "_AT_ONCE", 4),
        mock.patch.object(requested, "_PAIRS_AT_ONCE", 50),
    ):
        yield


@contextmanager
def times_read() -> Iterator[list[int]]:
    """Note of how many steps the times are read, call by call, to tell ages."""
    read, times_of = list[int](), requested.Ages._times_of

    def noted(self: requested.Ages, snapshot: Any, ids: Any) -> Any:
        read.append(len(ids))
        return times_of(self, snapshot, ids)

    with mock.patch.object(requested.Ages, "_times_of", noted):
        yield read


@contextmanager
def moments_read_in_pieces(nbytes: int) -> Iterator[list[int]]:
    """Have statistics read pieces of so many bytes; note of how many steps each is."""
    read, place = list[int](), normalize.place

    def noted(snapshot: Any, ids: Any) -> Any:
        read.append(len(ids))
        return place(snapshot, ids)

    with mock.patch.object(normalize, "place", noted), mock.patch.object(normalize, "PIECE_BYTES", nbytes):
        yield read


@contextmanager
def moments_of_gone_segments() -> Iterator[None]:
    """Have the segments of new steps be gone when statistics read them."""
    with mock.patch.object(normalize, "place", mock.Mock(side_effect=dr.SegmentGone("gone"))):
        yield
