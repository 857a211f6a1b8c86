"""Plain twins of the kernels of `kernels.priorities`."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, POSITION_MASK, Floats, Ints, locate
from diskreplay.kernels import frozen, packed, priority_pages
from diskreplay.kernels.frozen import OWN_FOLDER
from diskreplay.kernels.packed import Ints32
from diskreplay.kernels.priorities import PAGE_ROW
from diskreplay.kernels.priority_pages import (
    CHANGED,
    DRAWN,
    DRAWN_IDS,
    DRAWN_PLACES,
    ENTERED,
    FIRST,
    HEIGHTS,
    KNOWN,
    LAST_ROW,
    LEAST,
    NEW,
    ORIGIN,
    PAGE_BITS,
    PAGES,
    RAW,
    SHOWN,
    SLOTS,
    STARTS,
    STRIDE,
    SUMS,
    TREE,
    UNUSED,
    VALUES,
    WANTED,
    lanes_of,
    slots_of,
)
from diskreplay.kernels.sumtree import LARGEST, SMALLEST
from tests.kernels.plain.gathering import row_address
from tests.kernels.plain.ids_at import fractions
from tests.kernels.plain.priority_pages import find_pages_plain, locate_plain
from tests.kernels.plain.sumtree import powers_plain, sumtree_find_plain, sumtree_set_plain


def initial_priorities_plain(ids: Ints, origin: int, lanes: Ints, record: Ints, out: NDArray[np.float64]) -> int:
    """Do what `initial_priorities` does."""
    lane_base, folders, first_rows, *table = (packed.ints(record, i) for i in range(len(record)))
    known, slot, _, lane, row = locate(ids, origin, lanes)
    for i in range(len(ids)):
        out[i] = np.nan
        if not known[i] or table[2][folders[slot[i]]] < 0:
            continue
        first = int(first_rows[lane_base[slot[i]] + lane[i]])
        where = int(folders[slot[i]]), int(lane[i]) if first == OWN_FOLDER else 0, max(first, 0)
        at = row_address(where, int(row[i]), *table, 8)
        if not at:
            return i
        value = ctypes.c_double.from_address(at).value
        out[i] = value if 0 < value < np.inf else np.nan
    return -1


def draw_plain(key: int, strata: int, table: Ints, ids: Ints, chances: Floats) -> None:
    """Do what `draw` does."""
    starts, tree, sums = packed.ints(table, STARTS), packed.floats(table, TREE), packed.floats(table, SUMS)
    pages, some = packed.ints2(table, PAGES), packed.floats(table, VALUES)
    total, size = sums[-1], len(ids)
    chances[:] = (fractions(key, size) + np.arange(size) % strata) * (total / strata)
    places = np.empty(size, np.int64)
    sumtree_find_plain(starts, tree, sums, pages, chances, places, some)
    page = pages[places >> PAGE_BITS]
    ids[:] = page[:, FIRST] + (places & LAST_ROW) * page[:, STRIDE]
    chances /= total
    packed.ints(table, DRAWN_PLACES)[:size] = places
    packed.ints(table, DRAWN_IDS)[:size] = ids
    packed.ints(table, HEIGHTS)[DRAWN] = size


def update_plain(ids: Ints, errors: Floats, eps: float, alpha: float, offered: Ints, table: Ints) -> int:
    """Do what `update` does to what can be drawn, and find each id anew, drawn or not; bounds stay as they are."""
    pages, slots, raw = packed.ints2(table, PAGES), packed.ints32(table, SLOTS), packed.floats(table, RAW)
    tree = packed.ints(table, STARTS), *(packed.floats(table, part) for part in (TREE, SUMS, LEAST))
    values, places = np.abs(errors), np.empty(len(ids), np.int64)
    if not np.isfinite(values).all():
        return -1 - int(np.flatnonzero(~np.isfinite(values))[0])
    locate_plain(ids, int(offered[ORIGIN, 0]), lanes_of(offered), pages, slots, places)
    found = places >= 0
    places, values = places[found], values[found] + eps
    raw[places] = values
    masses = np.empty(len(places))
    powers_plain(values, alpha, SMALLEST, LARGEST, np.empty(len(places)), masses)
    sumtree_set_plain(places, masses, *tree, np.empty(len(places), np.int64))
    return len(ids) - len(places)


def sync_priorities_plain(
    old: Ints, runs: Ints, new: Ints, snapshot: Ints, record: Ints, provisional: int, partially_hidden: int, whole: int,
    alpha: float,
) -> int:  # fmt: skip
    """Do what `sync_priorities` does, and look for the page of each row."""
    pages, slots = packed.ints2(record, priority_pages.PAGES), packed.ints32(record, priority_pages.SLOTS)
    stacks, heights = packed.ints2(record, priority_pages.STACKS), packed.ints(record, priority_pages.HEIGHTS)
    raw, tree = packed.floats(record, priority_pages.RAW), packed.floats(record, priority_pages.TREE)
    sums, least = packed.floats(record, priority_pages.SUMS), packed.floats(record, priority_pages.LEAST)
    starts, head, table = (
        packed.ints(record, priority_pages.STARTS),
        new[:, : priority_pages.RUNS],
        (pages, slots, stacks, heights),
    )
    head[[priority_pages.ENDED, priority_pages.LEFT], 0] = runs.shape[1] - provisional, partially_hidden
    head[[priority_pages.ORIGIN, priority_pages.SLOT_COUNT], 0] = snapshot[[frozen.ORIGIN, frozen.SLOTS]]
    head[priority_pages.LANES_AT, 1] = snapshot[frozen.LANES]
    new[:PAGE_ROW, priority_pages.RUNS :], new[PAGE_ROW, priority_pages.RUNS :] = runs, -1
    heights[priority_pages.DRAWN] = 0
    origin, lanes = int(head[priority_pages.ORIGIN, 0]), priority_pages.lanes_of(new)
    found = [_places_plain(run, True, origin, lanes, *table) for run in runs.T.tolist()]
    if missing := sum(count for _, count in found):
        return missing
    known = [np.zeros(0, np.int64)]
    shown = np.concatenate(known + [places for places, _ in found])
    if whole:
        gone = np.flatnonzero(tree[: len(raw)])
    else:
        old_origin, old_lanes = int(old[priority_pages.ORIGIN, 0]), priority_pages.lanes_of(old)
        old_runs = old[:PAGE_ROW, priority_pages.RUNS + old[priority_pages.ENDED, 0] :].T.tolist()
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
    """Return the places of a run, below 0 without a page, and the number of missing pages; `add` takes unused ones."""
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
    missing = int(np.count_nonzero(page < 0)) if add else 0
    return ((page << PAGE_BITS)[at] + (rows & LAST_ROW)), missing
