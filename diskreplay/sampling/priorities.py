"""A table of priorities by id: it follows a population, and is drawn from in proportion.

What is kept of an id is its raw priority |td| + eps, at a place that `Extents` gives it; the place's leaf in the tree
holds raw ** alpha while the id can be drawn, else 0. Ids that a view does not offer at the moment keep their raw
priority. Where places lie is part of the saved state: which id a random number means depends on it.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels.runs import ALL_VISIBLE, IdRuns, keep, lane_keys
from diskreplay.kernels.table import chosen
from diskreplay.sampling.extents import Extents, ragged, room_for
from diskreplay.sampling.memory import zeros
from diskreplay.sampling.population import Changes, Mark, Population
from diskreplay.sampling.sumtree import SumTree

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FIRST_CAPACITY = 1024
# Places that are shown or hidden at a time.
_BLOCK = 1024

_NOTHING_DRAWN = (np.zeros(0, np.int64), np.zeros(0, np.int64))


class PriorityTable:
    """The priorities of one kind of id. Not thread-safe.

    Parameters
    ----------
    alpha : float
        Exponent of the priorities.
    least : bool
        Whether to know the smallest of them.

    Attributes
    ----------
    tree : SumTree
        The masses, by place.
    """

    tree: SumTree
    _raw: Floats
    _owner: NDArray[np.int32]  # the extent of each place, whatever where no id was ever shown

    def __init__(self, alpha: float, least: bool = False) -> None:
        # Here and not above: it loads numba, which nobody needs to make a distribution.
        from diskreplay.kernels import prioritized, sumtree

        self._powers, self._show_or_hide = chosen("powers"), chosen("show")
        self._draw = chosen("draw")
        self._limits = prioritized.SMALLEST, prioritized.LARGEST
        self._alpha, self._least = alpha, least
        self._extents = Extents()
        self._largest = np.ones(1)
        # Memory for kernels: some numbers; places that are shown or hidden; ids of an update.
        self._some = np.empty(sumtree.SOME)
        self._block = np.empty((2, _BLOCK), np.int64), np.empty((3, _BLOCK))
        self._batch = np.empty((4, 0), np.int64), np.empty((3, 0))
        self._unindexed = False
        self._follow_anew()
        self._resize(FIRST_CAPACITY)

    @property
    def largest(self) -> float:
        """The largest raw priority so far, 1 at first: that of new ids."""
        return float(self._largest[0])

    def _follow_anew(self) -> None:
        self._population: Any = lambda: None  # a weak reference
        self._version = -1
        self._mark: Mark | None = None
        # The population's loose runs: extents, numbers there of their first ids, and these ids.
        self._loose = self._loose_number = self._loose_first = np.zeros(0, np.int64)
        self._visible = ALL_VISIBLE

    def _resize(self, capacity: int) -> None:
        """Make room for so many places, all that are in use among them."""
        end = self._extents.end
        masses, raw, owner = zeros((SumTree.room(capacity), np.float64), (capacity, np.float64), (capacity, np.int32))
        tree = SumTree(capacity, self._least, masses)
        if end:
            owner[:end], raw[:end] = self._owner[:end], self._raw[:end]
            tree.fill(self.tree.masses[:end])
        self._owner, self._raw, self.tree = owner, raw, tree

    def set_alpha(self, alpha: float) -> None:
        """Change the exponent; costs as much as there are priorities, unless it is the same."""
        if alpha != self._alpha:
            self._alpha = alpha
            end = self._extents.end
            drawable = self.tree.masses[:end] > 0
            self.tree.fill(np.where(drawable, self._powered(self._raw[:end]), 0.0))

    def _powered(self, raw: Floats) -> Floats:
        powered = np.empty(len(raw))
        self._powers(raw, self._alpha, *self._limits, np.empty(len(raw)), powered)
        return powered

    # --- following a population --------------------------------------------------------------------------------------

    def follow(self, population: Population) -> None:
        """Offer exactly the population's ids; costs what is new."""
        same = self._population() is population
        if same and self._version == population.version:
            return
        if self._unindexed:
            self._index_loaded(population.segments)
        changes, reached = self._changes(population, self._mark if same else None)
        self._mark = None  # until the rest is done: an error below starts afresh
        if not self._grow(changes, reached):
            self._renew(population, changes, reached)
        if not same:
            self._population = weakref.ref(population)
        self._version, self._mark, self._visible = population.version, changes.mark, population.visible
        self._prepare(population)

    def _prepare(self, population: Population) -> None:
        """Gather what the kernels take beside a batch: no array is replaced but by following."""
        tree, extents = self.tree, self._extents
        self._drawn: dict[int, tuple[Ints, Ints]] = {}  # by their first ids; places may have changed
        self._for_draw = (tree.starts, tree.tree, tree.sums, self._owner, extents.table, self._some)
        arrays = tree.starts, tree.tree, tree.sums, tree.smallest, self._raw, self._largest
        self._for_update = (*population.segments, *extents.indexes, extents.table, *arrays)

    def _grow(self, changes: Changes, reached: Ints) -> bool:
        """Show new ids at the end of open episodes, if that is all there is and they have room; tell whether it was."""
        extent, first = self._loose, changes.runs.first
        if changes.whole or len(reached) or len(first) != changes.loose or not np.array_equal(first, self._loose_first):
            return False
        extents = self._extents
        start, stop = extents.high[extent], self._loose_number + changes.runs.count
        grown = stop - start
        if grown.min(initial=0) < 0 or (extents.room[extent] - stop).min(initial=0) < 0:
            return False
        self._change(extent, start, grown, shown=True)
        extents.known[extent] = np.maximum(extents.known[extent], stop)
        extents.high[extent] = stop
        return True

    def _renew(self, population: Population, changes: Changes, reached: Ints) -> None:
        """Follow changes of any sort."""
        segments = population.segments
        extent, number = self._extents.locate(changes.runs.first, segments)
        while self._reserve(population, self._needed(changes.runs, extent, number)):
            changes, reached = population.changes(None), reached[:0]
            extent, number = self._extents.locate(changes.runs.first, segments)
        self._place(changes.runs, extent, number, segments)
        self._show(changes, reached, extent, number)
        loose = slice(len(extent) - changes.loose, None)
        self._loose, self._loose_number = extent[loose], number[loose]
        self._loose_first = changes.runs.first[loose].copy()

    def _changes(self, population: Population, mark: Mark | None) -> tuple[Changes, Ints]:
        """Return the population's changes, and the extents of the runs that the frontier has reached."""
        changes = population.changes(mark)
        if not len(changes.reached.first):
            return changes, changes.reached.first
        reached, _ = self._extents.locate(changes.reached.first, population.segments)
        if (reached < 0).any():  # their segment is gone, and with it the way to find them
            return population.changes(None), reached[:0]
        return changes, reached

    def _needed(self, runs: IdRuns, extent: Ints, number: Ints) -> int:
        """Return how many places the runs take that are new or outgrow their room."""
        new = int(runs.count[extent < 0].sum())
        return new + sum(room_for(int(number[i] + runs.count[i])) for i in self._outgrown(runs, extent, number))

    def _outgrown(self, runs: IdRuns, extent: Ints, number: Ints) -> list[int]:
        """Return the runs that have outgrown the room of their extents, in the order of their ids."""
        outgrown = np.flatnonzero((extent >= 0) & (number + runs.count > self._extents.room[extent]))
        in_order: list[int] = outgrown[np.argsort(runs.first[outgrown])].tolist()
        return in_order

    def _reserve(self, population: Population, needed: int) -> bool:
        """Make room for more places; tell whether the extents were renumbered for it."""
        capacity, extents = self.tree.capacity, self._extents
        if extents.end + needed <= capacity:
            return False
        alive = self._alive(population)
        known = int(extents.known[: extents.size][alive].sum())
        if 4 * (known + needed) <= 3 * capacity:
            self._compact(alive)
            return True
        # By little when it is large: what is not in use yet counts, too.
        more = max(capacity // 8, min(capacity // 2, 1 << 16))
        self._resize(max(extents.end + needed, capacity + more))
        return False

    def _alive(self, population: Population) -> NDArray[np.bool_]:
        """Tell which extents have ids that can be drawn, or that another view could offer."""
        first, stride, known, low, high = (
            getattr(self._extents, name)[: self._extents.size] for name in ("first", "stride", "known", "low", "high")
        )
        last = first + (known - 1) * stride
        episodes = population.episodes()
        episodes = keep(episodes, episodes.count > 0)
        if not len(episodes.first):
            return high > low
        keys, sought = lane_keys(episodes.first, *population.segments), lane_keys(last, *population.segments)
        order = np.argsort(keys)
        at = order[np.maximum(np.searchsorted(keys[order], sought, "right") - 1, 0)]
        behind = (last - episodes.first[at]) // episodes.stride[at]
        return (high > low) | ((sought >= 0) & (sought >= keys[at]) & (behind >= 0) & (behind < episodes.count[at]))

    def _compact(self, alive: NDArray[np.bool_]) -> None:
        extents = self._extents
        source = ragged(extents.base[: extents.size][alive], extents.known[: extents.size][alive])
        raw, masses = self._raw[source], np.zeros(extents.end)
        masses[: len(raw)] = self.tree.masses[source]
        extents.keep_only(alive)
        self._owner[: len(raw)] = np.repeat(np.arange(extents.size), extents.known[: extents.size])
        self._raw[: len(raw)] = raw
        self.tree.fill(masses)

    def _place(self, runs: IdRuns, extent: Ints, number: Ints, segments: tuple[int, Ints]) -> None:
        """Give places to all that have none, in the order of ids, whatever the population's."""
        extents = self._extents
        for i in self._outgrown(runs, extent, number):
            moved = int(extent[i])
            low, high, known = int(extents.low[moved]), int(extents.high[moved]), int(extents.known[moved])
            old = extents.move(moved, int(number[i] + runs.count[i]))
            base = int(extents.base[moved])
            self._raw[base : base + known] = self._raw[old : old + known]
            self.tree.set(np.arange(old + low, old + high), np.zeros(high - low))
            extents.low[moved] = extents.high[moved] = 0
        new = np.flatnonzero(extent < 0)
        if len(new):
            new = new[np.argsort(runs.first[new], kind="stable")]
            found = IdRuns(runs.first[new], runs.stride[new], runs.count[new])
            extent[new] = extents.add(found, lane_keys(found.first, *segments))

    def _show(self, changes: Changes, reached: Ints, extent: Ints, number: Ints) -> None:
        """Let exactly those ids be drawn that the population has."""
        extents = self._extents
        touched = np.arange(extents.size) if changes.whole else np.concatenate([self._loose, reached, extent])
        extents.want_low[touched] = extents.want_high[touched] = 0
        extents.want_low[extent], extents.want_high[extent] = number, number + changes.runs.count
        low, high = extents.low[touched], extents.high[touched]
        to_low, to_high = extents.want_low[touched], extents.want_high[touched]
        changed = (low != to_low) | (high != to_high)
        touched, low, high, to_low, to_high = (a[changed] for a in (touched, low, high, to_low, to_high))
        self._hide_places(touched, *_difference(low, high, to_low, to_high))
        self._show_places(touched, to_high, *_difference(to_low, to_high, low, high))
        extents.low[touched], extents.high[touched] = to_low, to_high

    def _hide_places(self, extent: Ints, part: Ints, start: Ints, count: Ints) -> None:
        if len(part):
            self._change(extent[part], start, count, shown=False)

    def _show_places(self, extent: Ints, high: Ints, part: Ints, start: Ints, count: Ints) -> None:
        if len(part):
            self._change(extent[part], start, count, shown=True)
            self._extents.known[extent] = np.maximum(self._extents.known[extent], high)

    def _change(self, extent: Ints, start: Ints, count: Ints, shown: bool) -> None:
        tree = self.tree
        self._show_or_hide(
            extent, start, count, shown, self._alpha, self._extents.table, self._owner, self._raw, self.largest,
            tree.starts, tree.tree, tree.sums, tree.smallest, *self._block,
        )  # fmt: skip

    # --- priorities --------------------------------------------------------------------------------------------------

    def places(self, population: Population, ids: Ints) -> Ints:
        """Return the place of each id, -1 where it cannot be drawn."""
        extent, number = self._extents.locate(ids, population.segments, shown=True)
        return np.where(extent >= 0, self._extents.base[extent] + number, -1)

    def ids(self, places: Ints) -> Ints:
        """Return the id at each place, which must have one."""
        extents, owner = self._extents, self._owner[places]
        ids: Ints = extents.first[owner] + (places - extents.base[owner]) * extents.stride[owner]
        return ids

    def draw(self, fractions: Floats, strata: int, batch: int) -> tuple[Ints, Floats]:
        """Return the ids at random fractions of the total, each 0 to below 1, and the chance of each.

        The total is cut into `strata` equal parts: the first fraction is one of the first part, and so on, from the
        first part again behind the last. Of each `batch` ids the places are remembered for their update.
        """
        size = len(fractions)
        places, ids, chances = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size)
        self._draw(fractions, strata, *self._for_draw, places, ids, chances)
        starts = range(0, size, max(batch, 1))
        self._drawn = {ids.item(i): (ids[i : i + batch], places[i : i + batch]) for i in starts}
        return ids, chances

    def update(self, ids: Ints, errors: Floats, eps: float) -> int:
        """Set raw priorities |error| + eps of ids that can be drawn; return how many of them cannot.

        If error i is not finite, nothing is changed and -1 - i is returned.
        """
        if self._batch[0].shape[1] != len(ids):
            self._batch = np.empty((4, len(ids)), np.int64), np.empty((3, len(ids)))
        drawn = self._drawn.get(ids.item(0), _NOTHING_DRAWN) if len(ids) else _NOTHING_DRAWN
        skipped: int = chosen("update")(ids, errors, eps, self._alpha, *drawn, *self._for_update, *self._batch)
        return skipped

    # --- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return arrays and numbers from which `loaded` makes the same table: 8 bytes an id, and its runs."""
        extents = self._extents
        first, stride, known = extents.first[: extents.size], extents.stride[: extents.size], extents.known
        last = first + (known[: extents.size] - 1) * stride
        kept = np.flatnonzero(last >= self._visible.least_ids(last))
        free = [(room, base) for room, bases in extents.free.items() for base in bases]
        return {
            "first": first[kept],
            "stride": stride[kept],
            "count": known[kept],
            "base": extents.base[kept],
            "room": extents.room[kept],
            "values": self._raw[ragged(extents.base[kept], known[kept])],
            "free": np.array(free, np.int64).reshape(-1, 2),
            "end": extents.end,
            "capacity": self.tree.capacity,
            "largest": self.largest,
        }

    @classmethod
    def loaded(cls, state: Mapping[str, Any], alpha: float, least: bool = False) -> "PriorityTable":
        """Make a table from its state.

        Raises
        ------
        ValueError
            This is the state of no table.
        """
        columns, free, values, end, capacity, largest = _checked(state)
        table = cls(alpha, least)
        extents, size = table._extents, len(columns["first"])
        extents.add(IdRuns(columns["first"], columns["stride"], columns["count"]), np.full(size, -1))
        extents.known[:size], extents.room[:size] = columns["count"], columns["room"]
        extents.base[:size] = columns["base"]
        extents.end = 0  # nothing to copy
        table._resize(capacity)
        extents.end = end
        for room, base in free.tolist():
            extents.free.setdefault(room, []).append(base)
        table._raw[ragged(columns["base"], columns["count"])] = values
        table._largest[0] = largest
        table._unindexed = True
        return table

    def _index_loaded(self, segments: tuple[int, Ints]) -> None:
        self._extents.index(lane_keys(self._extents.first[: self._extents.size], *segments))
        self._unindexed = False


def _difference(low: Ints, high: Ints, other_low: Ints, other_high: Ints) -> tuple[Ints, Ints, Ints]:
    """Return low to high - 1 without other_low to other_high - 1, as parts: which of the ranges, start, count."""
    start = np.concatenate([low, np.maximum(low, other_high)])
    count = np.concatenate([np.minimum(high, other_low), high]) - start
    part = np.flatnonzero(count > 0)
    return part % max(len(low), 1), start[part], count[part]


def _checked(state: Mapping[str, Any]) -> tuple[dict[str, Ints], Ints, Floats, int, int, float]:
    """Check what a state must be for the table to stay inside its arrays."""
    names = ("first", "stride", "count", "base", "room")
    try:
        columns = {name: np.ascontiguousarray(state[name], np.int64) for name in names}
        free = np.ascontiguousarray(state["free"], np.int64).reshape(-1, 2)
        values = np.ascontiguousarray(state["values"], np.float64)
        end, capacity, largest = int(state["end"]), int(state["capacity"]), float(state["largest"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no saved table of priorities: {error!r}") from None
    first, stride, count, base, room = columns.values()
    good = all(column.shape == first.shape and column.ndim == 1 for column in columns.values())
    good = good and bool(((first >= 0) & (stride > 0) & (count > 0) & (count <= room) & (base >= 0)).all())
    good = good and 0 <= end <= capacity and bool((room <= end - base).all()) and count.sum() == len(values)
    good = good and bool((free >= 0).all() and (free.sum(axis=1) <= end).all()) and values.ndim == 1
    if not good or not (values > 0).all() or not np.isfinite(values).all() or not 0 < largest < np.inf:
        raise ValueError("this saved table of priorities contradicts itself: it is damaged")
    return columns, free, values, end, capacity, largest
