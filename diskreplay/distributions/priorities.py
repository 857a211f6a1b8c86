"""A table of priorities by id, which follows a population and draws ids in proportion to powers of their priorities.

Each id has a place in the table: the index of its raw priority |td| + eps and of a leaf of the sum tree. The leaf has
the mass raw ** alpha while the id can be drawn, else 0. A page has the places of 64 successive rows of a lane; see
`kernels.priority_pages`. If the view stops offering an id, the id keeps its raw priority. New ids enter with the
largest raw priority that an update or a writer gave to an id that can be drawn. When no page is free, pages whose steps
are all gone are used again. The numbers of the pages are part of the saved state, because they decide which id a random
number draws.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.population import Cursor, InitialErrors, Population, Share
from diskreplay.distributions.saved_state import bits, columns, masks, state_of
from diskreplay.ids import POSITION_MASK, Floats, Ints, places_of
from diskreplay.kernels import frozen, priority_pages, sumtree
from diskreplay.kernels.huge_pages import zeros
from diskreplay.kernels.packed import pack
from diskreplay.kernels.runs import lane_keys
from diskreplay.kernels.table import get_kernel

FIRST_PAGES = 16
# The numbers a and b: a table from a saved state has at most max(a, b · n) pages if n pages are in use.
_MOST_EMPTY = 1 << 16, 64
# Scratch memory has room for at least this number of ids, so that small draws and updates need no new memory.
_BLOCK = 4096
_PAGES_AT_ONCE = 64
_NO_RECORD, _NO_LANES = np.zeros(frozen.HEAD, np.int64), np.zeros(0, np.int64)  # for a population without a snapshot


class _Shared(NamedTuple):
    """The places of a priority table that belong to ids of `share`, a rank's part of all ids.

    `mine`, (number of pages, 64), is 1.0 for a place whose id is in the share, else 0.0. `pages`, (number of pages, 2),
    has the first id and the stride that each page had when its line of `mine` was computed.
    """

    share: Share
    pages: Ints
    mine: Floats


class SumTree:
    """A tree that draws leaves in proportion to their masses; all masses are 0 at first.

    Not thread-safe. The leaves are 0 to `capacity` - 1. With the argument `least`, the tree tracks the smallest nonzero
    mass. `memory` is an array of float64 zeros for the tree; its length is the last number of
    `sumtree.tree_starts(capacity)`. `starts`, `tree`, `sums` and `smallest` are the arrays of `kernels.sumtree`.
    """

    def __init__(self, capacity: int, least: bool, memory: Floats) -> None:
        self._set, self.capacity = get_kernel("sumtree_set"), capacity
        self.starts, self.tree, self.sums, self.smallest = sumtree.tree_arrays(capacity, least, sumtree.TOP, memory)

    @property
    def total(self) -> float:
        return float(self.sums[-1])

    @property
    def least(self) -> float:
        return float(self.smallest[-1]) or math.inf

    @property
    def masses(self) -> Floats:
        """The mass of each leaf, in the tree's memory: change masses only by `set` and `fill`."""
        return self.tree[: self.capacity]

    def set(self, leaves: Ints, masses: Floats) -> None:
        """Set the masses of leaves, (n,) finite and not negative; if a leaf is repeated, its last mass counts."""
        self._set(leaves, masses, self.starts, self.tree, self.sums, self.smallest, np.empty(len(leaves), np.int64))

    def fill(self, masses: Floats) -> None:
        """Set the masses of the first leaves; the masses of all other leaves must be 0."""
        self.tree[: len(masses)] = masses
        # A call that sets one leaf of a node sums the node from all of its leaves.
        leaves = np.arange(0, len(masses), sumtree.FAN_OUT)
        self.set(leaves, self.tree[leaves])


class PriorityTable:
    """The priorities of one kind of id.

    Not thread-safe. `alpha` is the exponent of the priorities. With `least`, the table tracks the smallest mass. Leaf i
    of `tree` has the mass of the id at place i; see the module's docstring.
    """

    tree: SumTree
    _raw: Floats
    _bounds: Floats
    _pages: Ints
    _slots: NDArray[np.int32]
    _stacks: Ints
    _heights: Ints
    _table: Ints

    def __init__(self, alpha: float, least: bool = False) -> None:
        self._powers, self._sync = get_kernel("powers"), get_kernel("sync_priorities")
        self._draw, self._update = get_kernel("draw"), get_kernel("update")
        self._alpha, self._least = alpha, least
        self._bounds = np.zeros(0)
        self._shared: _Shared | None = None
        self._cursor = Cursor()
        # The table `new` of the last `follow`, see `priority_pages.ENDED`, and the number of lanes of each segment. The
        # second array is kept here, because the table has only the address of this array.
        self._offered = np.zeros((4, priority_pages.RUNS), np.int64), _NO_LANES
        self._pages = np.zeros((0, priority_pages.COLUMNS), np.int64)
        self._ints, self._floats = np.empty((4, _BLOCK), np.int64), np.empty((3, _BLOCK))
        self._resize(FIRST_PAGES)
        self._list_pages()

    @property
    def largest(self) -> float:
        """The largest raw priority that an update or a writer gave to an id that can be drawn, or 0 without such an id.

        New ids enter with this priority, or with 1 if it is 0.
        """
        return float(get_kernel("largest_given")(self._pages, self._raw, self._bounds))

    def _resize(self, count: int) -> None:
        """Make room for `count` pages, and keep the pages in use; the caller must then call `_list_pages`."""
        width, size, old = priority_pages.PAGE, priority_pages.COLUMNS, self._pages
        slots = 1 << (4 * count - 1).bit_length()
        masses, raw, pages, found = zeros(
            (int(sumtree.tree_starts(count * width)[-1]), np.float64),
            (count * width, np.float64),
            (count * size, np.int64),
            (slots, np.int32),
        )
        tree, end = SumTree(count * width, self._least, masses), len(old) and self._end
        if end:
            pages[: end * size] = old[:end].reshape(-1)
            raw[: end * width] = self._raw[: end * width]
            tree.fill(self.tree.masses[: end * width])
        pages, bounds = pages.reshape(count, size), priority_pages.bounds_of(count, self._bounds)
        stacks, heights = np.empty((2, count), np.int64), np.zeros(4, np.int64)
        # The arrays are in the order of `kernels.priority_pages.PAGES`.
        table = pack(
            pages, found, stacks, heights, raw, bounds, tree.starts, tree.tree, tree.sums, tree.smallest,
            *self._ints, *self._floats,
        )  # fmt: skip
        changed = {"_pages": pages, "_slots": found, "_stacks": stacks, "_heights": heights, "_raw": raw}
        # This is one operation: an interrupt between two operations could leave a record with addresses of freed
        # memory.
        vars(self).update(changed, _bounds=bounds, tree=tree, _table=table)

    @property
    def _end(self) -> int:
        """One more than the number of the last page in use, or 0 if no page is in use."""
        in_use = np.flatnonzero(self._pages[:, priority_pages.STRIDE])
        return int(in_use[-1]) + 1 if len(in_use) else 0

    def _list_pages(self) -> None:
        pages = self._pages
        priority_pages.index_pages(pages, self._slots)
        pages[:, priority_pages.TOUCHED] = 0
        pages[:, priority_pages.WANTED] = pages[:, priority_pages.SHOWN]
        unused = np.flatnonzero(pages[:, priority_pages.STRIDE] == 0)
        self._stacks[0, : len(unused)] = unused[::-1]
        self._heights[:] = len(unused), 0, 0, 0

    def set_alpha(self, alpha: float) -> None:
        if alpha != self._alpha:
            self._alpha = alpha
            end = self._end * priority_pages.PAGE
            powered = np.empty(end)
            self._powers(np.abs(self._raw[:end]), alpha, sumtree.SMALLEST, sumtree.LARGEST, np.empty(end), powered)
            self.tree.fill(np.where(self.tree.masses[:end] > 0, powered, 0.0))

    # --- following a population --------------------------------------------------------------------------------------

    def follow(self, population: Population, eps: float = 1e-6, eta: float = 0.9) -> None:
        """Make exactly the population's ids drawable; this takes time only for ids that have come or left.

        `eps` and `eta`, see `Prioritized`, apply to new ids whose steps have initial priorities.
        """
        if self._cursor.is_at(population):
            return
        changes, snapshot = self._cursor.changes(population), population.snapshot
        record, lanes = (_NO_RECORD, _NO_LANES) if snapshot is None else (snapshot.record, snapshot.lanes)
        old, runs = self._offered[0], changes.runs
        if changes.reached.shape[1]:
            old = self._with_reached(changes.reached)
        new = np.empty((4, priority_pages.RUNS + runs.shape[1]), np.int64)
        numbers = changes.provisional, changes.partially_hidden, changes.whole, self._alpha
        while self._sync(old, runs, new, record, self._table, *numbers):
            self._make_room(population)
        self._offered = new, lanes
        read = population.initial_errors
        if read is not None and snapshot is not None and self._heights[priority_pages.NEW] and snapshot.has_priorities:
            self._set_initial(population, read, eps, eta)
        self._cursor.reach(population, changes)

    def _set_initial(self, population: Population, read: InitialErrors, eps: float, eta: float) -> None:
        """Set the raw priorities of new ids from the initial priorities of their steps.

        A new id without an initial priority gets the largest priority so far, including the initial priorities of
        earlier new ids.
        """
        pages = self._stacks[priority_pages.CHANGED, : self._heights[priority_pages.NEW]]
        # The order of the pages must depend only on the ids, so that a loaded sampler continues like the saved one.
        pages = pages[self._pages[pages, priority_pages.FIRST].argsort()]
        for at in range(0, len(pages), _PAGES_AT_ONCE):
            lines = self._pages[pages[at : at + _PAGES_AT_ONCE]]
            page, row = np.nonzero(bits(lines[:, priority_pages.ENTERED].copy()))
            ids = lines[page, priority_pages.FIRST] + row * lines[page, priority_pages.STRIDE]
            initial = read(population.snapshot, ids, eta) + eps
            is_given = ~np.isnan(initial)
            largest = np.maximum.accumulate(np.append(self.largest, np.where(is_given, initial, 0.0)))[1:]
            self.update(ids[is_given], initial[is_given], 0.0)
            self._enter(ids[~is_given], np.where(largest > 0.0, largest, 1.0)[~is_given])

    def _enter(self, ids: Ints, raw: Floats) -> None:
        """Set the priorities of ids to `raw`, and `_raw` to -`raw`: no update or writer gave these priorities."""
        places, masses = self.places(ids), np.empty(len(ids))
        self._powers(raw, self._alpha, sumtree.SMALLEST, sumtree.LARGEST, np.empty(len(ids)), masses)
        self._raw[places] = -raw
        self.tree.set(places, masses)

    def _with_reached(self, reached: Ints) -> Ints:
        """Return the table `new` of the last `follow` without its final runs, and with the runs `reached`.

        The runs `reached` are inserted after the partially hidden runs.
        """
        runs = self._offered[0]
        ended, left = runs[[priority_pages.ENDED, priority_pages.LEFT], 0].tolist()
        start, end = priority_pages.RUNS + ended, priority_pages.RUNS + ended + left
        known = np.append(reached, np.full((1, reached.shape[1]), -1), axis=0)
        more = np.concatenate([runs[:, : priority_pages.RUNS], runs[:, start:end], known, runs[:, end:]], axis=1)
        more[[priority_pages.ENDED, priority_pages.LEFT], 0] = 0, left + reached.shape[1]
        return more

    def _make_room(self, population: Population) -> None:
        in_use, is_alive, needed = self._alive(population)
        gone, width = in_use[~is_alive], priority_pages.PAGE
        if len(gone):
            places = (gone[:, None] * width + np.arange(width)).reshape(-1)
            self.tree.set(places, np.zeros(len(places)))
            self._pages[gone] = 0
        if 4 * needed > 3 * len(self._pages):
            self._resize(2 * needed)
        self._list_pages()

    def _alive(self, population: Population) -> tuple[Ints, NDArray[np.bool_], int]:
        """Return the pages in use, whether each page has visible steps, and how many pages all visible steps need."""
        width = priority_pages.PAGE
        episodes = population.episodes()
        keys = lane_keys(episodes.first, *population.segments)
        there = (keys >= 0) & (episodes.count > 0)
        (first, stride, count), keys = (column[there] for column in episodes), keys[there]
        row = (first & POSITION_MASK) // stride
        # The `lane_keys` of the first row of each page that has visible steps.
        start, pages = keys - row % width, (row % width + count - 1) // width + 1
        alive = np.unique(np.repeat(start, pages) + width * places_of(np.zeros_like(pages), pages))
        in_use = np.flatnonzero(self._pages[:, priority_pages.STRIDE])
        sought = lane_keys(self._pages[in_use, priority_pages.FIRST], *population.segments)
        return in_use, np.isin(sought, alive), len(alive)

    # --- priorities --------------------------------------------------------------------------------------------------

    def places(self, ids: Ints) -> Ints:
        """Return the place of each id: its index in `_raw` and its leaf; -1 for an id that cannot be drawn."""
        places = np.empty(len(ids), np.int64)
        offered, lanes = self._offered
        get_kernel("locate")(ids, offered[priority_pages.ORIGIN, 0], lanes, self._pages, self._slots, places)
        return places

    def masses_of(self, ids: Ints) -> Floats:
        places = self.places(ids)
        return np.where(places >= 0, self.tree.masses[places], 0.0)

    def total_of(self, share: Share) -> float:
        """Return the sum of the masses of a share; with several ranks, this takes a pass over all masses."""
        if share.world_size == 1:
            return self.tree.total
        now = self._pages[:, [priority_pages.FIRST, priority_pages.STRIDE]]
        if self._shared is None or self._shared.share != share or len(self._shared.pages) != len(now):
            self._shared = _Shared(share, np.full_like(now, -1), np.zeros((len(now), priority_pages.PAGE)))
        _, pages, mine = self._shared
        other = np.flatnonzero((pages != now).any(axis=1))
        first, stride = now[other].T
        ids = first[:, None] + stride[:, None] * np.arange(priority_pages.PAGE)
        mine[other], pages[other] = share.contains(ids.reshape(-1)).reshape(ids.shape), now[other]
        # BLAS is not used, because its threads wait for each other on busy processors.
        return float(np.einsum("i,i", self.tree.masses, mine.reshape(-1)))

    def raw(self, ids: Ints) -> Floats:
        places = self.places(ids)
        return np.where(places >= 0, np.abs(self._raw[places]), 0.0)

    def draw(self, key: int, size: int, strata: int) -> tuple[Ints, Floats]:
        """Return `size` random ids in proportion to their masses, and the probability of each id.

        The total mass is divided into `strata` equal parts: id i is from part i modulo `strata`. `key`, a number of 63
        bits, seeds the random numbers.
        """
        self._fit(size)
        ids, chances = np.empty(size, np.int64), np.empty(size)
        self._draw(key, strata, self._table, ids, chances)
        return ids, chances

    def update(self, ids: Ints, errors: Floats, eps: float) -> int:
        """Set the raw priorities |error| + eps of ids; return the number of ids that cannot be drawn.

        If error i is not finite, nothing changes and the result is -1 - i.
        """
        self._fit(len(ids))
        skipped: int = self._update(ids, errors, eps, self._alpha, self._offered[0], self._table)
        return skipped

    def _fit(self, count: int) -> None:
        """Make the scratch memory large enough for `count` ids, but at most four times as large as needed."""
        wanted = max(count, _BLOCK)
        if not wanted <= self._ints.shape[1] <= 4 * wanted:
            ints, floats, table = np.empty((4, wanted), np.int64), np.empty((3, wanted)), self._table.copy()
            table[priority_pages.DRAWN_PLACES :] = pack(*ints, *floats)
            self._heights[priority_pages.DRAWN] = 0
            vars(self).update(_ints=ints, _floats=floats, _table=table)  # one operation, as in `_resize`

    # --- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `loaded`, as arrays and numbers: 8 bytes per id, and a few numbers per page of 64 rows.

        `known` and `given` have one bit per row of a page. A bit of `known` says whether the row has a priority. A bit
        of `given` says whether an update or a writer gave this priority.
        """
        population = self._cursor.population()
        number = np.flatnonzero(self._pages[:, priority_pages.STRIDE])
        first, stride, known = self._pages[number][
            :, [priority_pages.FIRST, priority_pages.STRIDE, priority_pages.KNOWN]
        ].T.copy()
        if population is not None and population.snapshot is not None:
            known[~self._alive(population)[1]] = 0
        raw, is_known = self._raw.reshape(-1, priority_pages.PAGE)[number], bits(known)
        return {
            "page": number,
            "first": first,
            "stride": stride,
            "known": known,
            "given": masks(is_known & (raw > 0.0)),
            "values": np.abs(raw[is_known]),
            "pages": len(self._pages),
        }

    @classmethod
    def loaded(cls, state: Mapping[str, Any], alpha: float, least: bool = False) -> "PriorityTable":
        """Make a table from a `state_dict`; ValueError if `state` is invalid.

        States of earlier versions have no `given`. In these versions, new ids often entered with exactly 1, so a
        priority of 1 counts as not given.
        """
        with state_of("a table of priorities"):
            every = {"given": state["known"], **state}
            number, first, stride, known, given = columns(every, ("page", "first", "stride", "known", "given"))
            values, count = np.ascontiguousarray(state["values"], np.float64), int(state["pages"])
        # The conditions below keep all accesses of kernels inside the arrays.
        good = count > 0 and bool(((number >= 0) & (number < count) & (first >= 0) & (stride > 0)).all())
        good = good and bool(all(len(np.unique(column)) == len(column) for column in (number, first)))
        good = good and bool(((first & POSITION_MASK) // stride % priority_pages.PAGE == 0).all())
        good = good and values.shape == (np.count_nonzero(bits(known)),) and not (given & ~known).any()
        if not good or not (values > 0).all() or not np.isfinite(values).all():
            raise ValueError("this saved table of priorities is damaged: its pages and values do not fit together")
        if count > (room := max(_MOST_EMPTY[0], _MOST_EMPTY[1] * len(number))):
            count, number = room, np.arange(len(number))  # any numbering of the pages is valid
        table = cls(alpha, least)
        table._resize(count)
        for column, of_pages in (
            (priority_pages.FIRST, first),
            (priority_pages.STRIDE, stride),
            (priority_pages.KNOWN, known),
        ):
            table._pages[number, column] = of_pages
        page, row = np.nonzero(bits(known))
        is_given = bits(given)[page, row] if "given" in state else values != 1.0
        table._raw[number[page] * priority_pages.PAGE + row] = np.where(is_given, values, -values)
        table._list_pages()
        return table
