"""Plain twins of the kernels of `kernels.offer`."""

import numpy as np

from diskreplay.ids import POSITION_BITS, POSITION_MASK
from diskreplay.kernels import frozen, packed, pages as paging
from diskreplay.kernels.offer import PAGE_ROW, Ints, Ints32
from diskreplay.kernels.pages import (
    CHANGED,
    ENTERED,
    FIRST,
    KNOWN,
    LAST_ROW,
    NEW,
    PAGE_BITS,
    SHOWN,
    STRIDE,
    UNUSED,
    WANTED,
    slots_of,
)
from diskreplay.kernels.powers import LARGEST, SMALLEST
from tests.kernels.plain.pages import find_pages_plain
from tests.kernels.plain.powers import powers_plain
from tests.kernels.plain.sumtree import sumtree_set_plain


def offer_plain(
    old: Ints, runs: Ints, new: Ints, snapshot: Ints, record: Ints, loose: int, left: int, whole: int, alpha: float
) -> int:
    """Do what `offer` does, and look for the page of each row."""
    pages, slots = packed.ints2(record, paging.PAGES), packed.ints32(record, paging.SLOTS)
    stacks, heights = packed.ints2(record, paging.STACKS), packed.ints(record, paging.HEIGHTS)
    raw, tree = packed.floats(record, paging.RAW), packed.floats(record, paging.TREE)
    sums, least = packed.floats(record, paging.SUMS), packed.floats(record, paging.LEAST)
    starts, head, table = packed.ints(record, paging.STARTS), new[:, : paging.RUNS], (pages, slots, stacks, heights)
    head[[paging.ENDED, paging.LEFT], 0] = runs.shape[1] - loose, left
    head[[paging.ORIGIN, paging.SLOT_COUNT], 0] = snapshot[[frozen.ORIGIN, frozen.SLOTS]]
    head[paging.LANES_AT, 1] = snapshot[frozen.LANES]
    new[:PAGE_ROW, paging.RUNS :], new[PAGE_ROW, paging.RUNS :] = runs, -1
    heights[paging.DRAWN] = 0
    origin, lanes = int(head[paging.ORIGIN, 0]), paging.lanes_of(new)
    found = [_places_plain(run, True, origin, lanes, *table) for run in runs.T.tolist()]
    if lacking := sum(missing for _, missing in found):
        return lacking
    known = [np.zeros(0, np.int64)]
    shown = np.concatenate(known + [places for places, _ in found])
    if whole:
        gone = np.flatnonzero(tree[: len(raw)])
    else:
        old_origin, old_lanes = int(old[paging.ORIGIN, 0]), paging.lanes_of(old)
        old_runs = old[:PAGE_ROW, paging.RUNS + old[paging.ENDED, 0] :].T.tolist()
        gone = np.concatenate(known + [_places_plain(run, False, old_origin, old_lanes, *table)[0] for run in old_runs])
    gone, shown = np.setdiff1d(gone[gone >= 0], shown), shown[tree[shown] == 0]
    page, bit = shown >> PAGE_BITS, np.int64(1) << (shown & LAST_ROW)
    is_new = pages[page, KNOWN] & bit == 0
    taken = np.setdiff1d(np.flatnonzero(tree[: len(raw)]), gone)
    raw[shown[is_new]] = -1.0
    raw[shown[is_new]] = -raw[np.append(taken, shown)].max(initial=0.0) or -1.0
    entered = page[is_new]
    entered = entered[np.sort(np.unique(entered, return_index=True)[1])]
    pages[entered, ENTERED] = 0
    np.bitwise_or.at(pages[:, ENTERED], page[is_new], bit[is_new])
    stacks[CHANGED, : len(entered)], heights[NEW] = entered, len(entered)
    np.bitwise_and.at(pages[:, SHOWN], gone >> PAGE_BITS, ~(np.int64(1) << (gone & LAST_ROW)))
    for column in (SHOWN, KNOWN):
        np.bitwise_or.at(pages[:, column], page, bit)
    pages[:, WANTED] = pages[:, SHOWN]
    masses = np.zeros(len(shown) + len(gone))
    powers_plain(np.abs(raw[shown]), alpha, SMALLEST, LARGEST, np.empty(len(shown)), masses[: len(shown)])
    places = np.concatenate([shown, gone])
    sumtree_set_plain(places, masses, starts, tree, sums, least, places.copy())
    return 0


def _places_plain(
    run: list[int], add: bool, origin: int, lanes: Ints,
    pages: Ints, slots: Ints32, stacks: Ints, heights: Ints,
) -> tuple[Ints, int]:  # fmt: skip
    """Return the places of a run, below 0 without a page, and how many pages are lacking; one may `add` some."""
    first, stride, count = run
    width = int(lanes[(first >> POSITION_BITS) - origin])
    rows = (first & POSITION_MASK) // width + np.arange(count) * (stride // width)
    starts, at = np.unique(rows & ~LAST_ROW, return_inverse=True)
    firsts = first + (starts - rows[:1]) * width
    page = find_pages_plain(firsts, pages, slots)
    some = np.flatnonzero(page < 0)[: heights[UNUSED] if add else 0]
    heights[UNUSED] -= len(some)
    page[some] = stacks[UNUSED, heights[UNUSED] : heights[UNUSED] + len(some)][::-1]
    for first_id, number in zip(firsts[some].tolist(), page[some].tolist(), strict=True):
        pages[number, FIRST], pages[number, STRIDE] = first_id, width
        slot = int(slots_of(np.array([first_id]), slots)[0])
        while slots[slot]:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot] = number + 1
    lacking = int(np.count_nonzero(page < 0)) if add else 0
    return ((page << PAGE_BITS)[at] + (rows & LAST_ROW)), lacking
