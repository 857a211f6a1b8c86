"""The pages that views name are those in which the rows lie that they copy."""

from mmap import PAGESIZE
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay as dr
from diskreplay.kernels.huge_pages import whole_pages
from diskreplay.kernels.table import get_kernel
from diskreplay.views import gather_plan
from diskreplay.views.base import NO_PAGES
from tests.kernels.plain import gather as module
from tests.views.fakes import SCHEMA, Snapshot, followed, gathered
from tests.views.strategies import snapshots

VIEWS = (
    dr.Transitions(3, frame_stack=2, next_fields=("action",)),
    dr.Transitions(None),
    dr.Transitions(2, next_fields=("hidden",), next_missing="drop"),
    dr.Sequences(length=5, overlap=2, frame_stack={"image": 3}, start_only=("hidden",)),
    dr.Sequences(length=5, stride=4, pad="drop", align="end"),
    dr.Sequences(length=6, stride=2, frame_stack={"image": 2}, start_only=("hidden",), cross_episodes=True),
    dr.Episodes(max_length=6),
)


def pages_of(starts: Any, sizes: Any) -> set[int]:
    """Number the pages in which ranges of bytes lie."""
    ranges = zip(np.ravel(starts).tolist(), np.ravel(sizes).tolist(), strict=True)
    return {page for start, size in ranges if size for page in range(start // PAGESIZE, -(-(start + size) // PAGESIZE))}


@given(st.lists(st.tuples(st.integers(0, 20 * PAGESIZE), st.integers(0, 3 * PAGESIZE)), max_size=12))
def test_ranges_are_merged_into_whole_pages(ranges: list[tuple[int, int]]) -> None:
    starts, sizes = np.array(ranges, np.int64).reshape(-1, 2).T
    found, nbytes = whole_pages(starts, sizes)
    assert pages_of(found, nbytes) == pages_of(starts, sizes)
    assert not (found % PAGESIZE).any()
    assert not (nbytes % PAGESIZE).any()
    assert (found[1:] > (found + nbytes)[:-1]).all()


def rows_read(monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot, view: Any, ids: np.ndarray) -> set[int]:
    """Return the addresses of all rows that a view copies."""
    found = set()

    def recorded(*args: int) -> int:
        found.add(row_address(*args))
        return row_address(*args)

    row_address, plain = module.row_address, module.gather_plain
    with monkeypatch.context() as patch:
        patch.setattr(gather_plan, "get_kernel", lambda name: plain if name == "gather" else get_kernel(name))
        patch.setattr(module, "row_address", recorded)
        gathered(view, snapshot, ids)
    return found - {0}


def of_leaf(snapshot: Snapshot, leaf: str, addresses: set[int]) -> list[int]:
    """Return those of the addresses that lie in the chunks of a leaf."""
    blocks = [(block.ctypes.data, block.nbytes) for block in snapshot.leaf(leaf).holder]
    return [at for at in addresses if any(start <= at < start + nbytes for start, nbytes in blocks)]


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=str)
@given(drawn=snapshots(), data=st.data())
def test_a_views_pages_are_those_of_the_rows_it_copies(view: Any, drawn: Snapshot, data: Any) -> None:
    snapshot, offered = drawn, followed(view, drawn)
    if not offered:
        return
    ids = np.array(data.draw(st.lists(st.sampled_from(offered), min_size=1, max_size=6)), np.int64)
    narrow = data.draw(st.sampled_from(("obs/image", "action/1", "none")))
    for leaf in (*SCHEMA.leaves, "done"):
        snapshot.leaf(leaf).wide = leaf not in (narrow, "done", "reward")
    with pytest.MonkeyPatch.context() as patch:
        read = rows_read(patch, snapshot, view, ids)
    pages = view.reader(SCHEMA).pages(snapshot, ids)
    tables = {leaf: snapshot.leaf(leaf) for leaf in SCHEMA.leaves}
    wide = [
        (address, table.row_bytes)
        for leaf, table in tables.items()
        if table.wide
        for address in of_leaf(snapshot, leaf, read)
    ]
    assert pages_of(pages.starts, pages.sizes) == pages_of(*zip(*wide, strict=True))


def test_ids_that_are_no_steps_need_no_pages() -> None:
    snapshot = Snapshot(SCHEMA, [None])
    for view in VIEWS:
        assert view.reader(SCHEMA).pages(snapshot, np.array([5])) is NO_PAGES
