"""Plain twins of the kernels of `kernels.priority_pages`."""

import numpy as np

from diskreplay.distributions.saved_state import bits
from diskreplay.ids import POSITION_BITS, POSITION_MASK, Floats, Ints
from diskreplay.kernels.priority_pages import FIRST, KNOWN, LAST_ROW, PAGE, PAGE_BITS, SHOWN, WANTED, Ints32, slots_of


def locate_plain(ids: Ints, origin: int, lanes: Ints, pages: Ints, slots: Ints32, places: Ints) -> None:
    """Do what `locate` does."""
    slot = (ids >> POSITION_BITS) - origin
    known = (slot >= 0) & (slot < len(lanes))
    width = np.append(lanes, 0)[np.where(known, slot, len(lanes))]
    within = (ids & POSITION_MASK) // np.maximum(width, 1) & LAST_ROW
    page = np.full(len(ids), -1)
    page[width > 0] = find_pages_plain((ids - within * width)[width > 0], pages, slots)
    shown = (page >= 0) & ((pages[page, SHOWN] >> within) & 1 > 0)
    places[:] = np.where(shown, (page << PAGE_BITS) + within, -1)


def find_pages_plain(first: Ints, pages: Ints, slots: Ints32) -> Ints:
    """Return the page of each first id, -1 where there is none."""
    at = slots_of(first, slots)
    page = slots[at].astype(np.int64) - 1
    while len(left := np.flatnonzero((page >= 0) & (pages[page, FIRST] != first))):
        at[left] = (at[left] + 1) & (len(slots) - 1)
        page[left] = slots[at[left]] - 1
    return page


def largest_given_plain(pages: Ints, raw: Floats, bounds: Floats) -> float:
    """Do what `largest_given` does, without bounds."""
    return float(raw.reshape(-1, PAGE)[bits(pages[:, WANTED] & pages[:, KNOWN])].max(initial=0.0))
