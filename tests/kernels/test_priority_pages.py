"""Pages of places: found by the ids of their rows, and never for another one."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from diskreplay.ids import POSITION_BITS
from diskreplay.kernels import priority_pages
from tests.kernels.pairs import KERNELS
from tests.kernels.plain.priority_pages import find_pages_plain

seeds = st.integers(0, 2**32 - 1)
kinds = [pytest.param(1, id="plain"), pytest.param(0, id="compiled")]


def some_pages(rng: np.random.Generator, count: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Return the first segment, the lanes of segments, pages of some of their rows, and slots that are rather full."""
    origin, lanes = int(rng.integers(0, 3)), rng.integers(0, 4, 6)
    lanes[0] = 2
    pages = np.zeros((count + 3, priority_pages.COLUMNS), np.int64)
    segment = rng.choice(np.flatnonzero(lanes), count)
    width = lanes[segment]
    first = (segment + origin << POSITION_BITS) + rng.integers(0, 40, count) * priority_pages.PAGE * width
    first += rng.integers(0, width)
    _, which = np.unique(first, return_index=True)
    number = rng.permutation(count + 3)[: len(which)]
    pages[number, priority_pages.FIRST], pages[number, priority_pages.STRIDE] = first[which], width[which]
    pages[number, priority_pages.SHOWN] = rng.integers(-(2**63), 2**63 - 1, len(which))
    slots = np.zeros(1 << int(count + 3).bit_length(), np.int32)
    priority_pages.index_pages(pages, slots)
    return origin, lanes, pages, slots


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds)
@given(st.integers(1, 200), seeds)
def test_every_id_that_can_be_drawn_has_a_place_and_no_other(kind: int, count: int, seed: int) -> None:
    origin, lanes, pages, slots = some_pages(np.random.default_rng(seed), count)
    want = {}
    for number in np.flatnonzero(pages[:, priority_pages.STRIDE]).tolist():
        first, stride, shown = pages[number, : priority_pages.SHOWN + 1].tolist()
        places = range(number * priority_pages.PAGE, (number + 1) * priority_pages.PAGE)
        ids = range(first, first + priority_pages.PAGE * stride, stride)
        want |= {i: place for row, (i, place) in enumerate(zip(ids, places, strict=True)) if shown >> row & 1}
    near = {i + d for i in want for d in (-64, -1, 0, 1, 64)}
    ids = np.array([*near, -1, 1 << 60, (1 << 62) + 5, origin - 1 << POSITION_BITS], np.int64)
    places = np.full(len(ids), -7)
    KERNELS["locate"][kind](ids, origin, lanes, pages, slots, places)
    assert places.tolist() == [want.get(i, -1) for i in ids.tolist()]
    KERNELS["locate"][kind](ids, origin, lanes[:0], pages, slots, places)
    assert (places == -1).all()


@given(st.integers(1, 200), seeds)
def test_every_page_in_use_is_found_by_its_first_id_and_no_other(count: int, seed: int) -> None:
    _, _, pages, slots = some_pages(np.random.default_rng(seed), count)
    in_use = np.flatnonzero(pages[:, priority_pages.STRIDE])
    assert np.count_nonzero(slots) == len(in_use)
    assert find_pages_plain(pages[in_use, priority_pages.FIRST], pages, slots).tolist() == in_use.tolist()
    assert (find_pages_plain(pages[in_use, priority_pages.FIRST] + 7, pages, slots) < 0).all()
