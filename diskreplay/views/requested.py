"""Fields of batches that are computed on request, and the layout of batches of windows.

A field on request is in a batch only if the sampler's `fields` names it. If the store has a field of the same name, the
name means the store's field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import EPISODE_VALUES, EpisodeTable, Floats, Ints, is_end_with_values, locate, places_of
from diskreplay.kernels import gathering as cols
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema
from diskreplay.views.arguments import weighed
from diskreplay.views.base import BOOL, EPISODE_KNOWN, FLOAT32, INT64, Block, Leaf, Path, select
from diskreplay.views.gather_plan import row_plan
from diskreplay.views.successors import EpisodeFinder, EpisodeTables, place
from diskreplay.views.windows import TIME, TIME_SOURCE, StepField, Windows, step_fields

_Dtypes = Mapping[str, np.dtype[Any]]
FLOAT64 = np.dtype("float64")

# The largest number of steps of an episode whose rewards are read in one call.
_AT_ONCE = 1024

# Fields on request: those in `_OF_STEPS` have a value for each step, those in `_OF_ITEMS` a value for each item.
RETURNS = ("return_to_go", "discounted_return_to_go")
PRIORITY = "priority"
_OF_STEPS: _Dtypes = {
    "step": INT64,
    "return_to_go": FLOAT32,
    "discounted_return_to_go": FLOAT32,
    PRIORITY: FLOAT64,
}
_OF_ITEMS: _Dtypes = {"age": INT64}
# Fields on request about the draw of an item, such as its probability.
OF_DRAWS: _Dtypes = {"probability": FLOAT64, "population": INT64, "priority_sum": FLOAT64}


def each_step(schema: Schema) -> list[Leaf]:
    return [TIME, *_leaves(schema, _OF_STEPS)]


def each_item(schema: Schema, drawn: bool = True) -> list[Leaf]:
    """Return the fields on request with one value for each item; with `drawn`, also the fields about an item's draw."""
    values = {path: field for path, field in schema.leaves.items() if path.startswith("episode/")}
    episode = [Leaf(tuple(path.split("/")), field.dtype, field.shape) for path, field in values.items()]
    known = [Leaf((EPISODE_KNOWN,), BOOL)] if episode else []
    return [*_leaves(schema, {**_OF_ITEMS, **(OF_DRAWS if drawn else {})}), *episode, *known]


def _leaves(schema: Schema, dtypes: _Dtypes) -> list[Leaf]:
    return [Leaf((name,), dtype) for name, dtype in dtypes.items() if name not in schema.extra]


# The largest number of pairs to search in one call. A pair is a given step and an episode that may have newer steps.
_PAIRS_AT_ONCE = 1 << 18


class _ByTime(NamedTuple):
    """Episodes, sorted by `begin`, the time of each episode's first step.

    `end` has the time of each episode's last step. `begin` and `end` are in nanoseconds since the epoch. `first` has
    the id of each episode's first step. `stride` has the difference between the ids of successive steps.
    `latest[i]` is the largest number in `end[: i + 1]`. `from_here[i]` is the sum of `steps[i:]`; its last number is 0.
    """

    first: Ints
    stride: Ints
    steps: Ints
    begin: Ints
    end: Ints
    latest: Ints
    from_here: Ints


class Ages:
    """Counts the steps that are newer than given steps. Not thread-safe: it keeps sorted tables.

    Steps are ordered by time of publication, then by id. The steps of an episode are in this order. If an episode began
    after a given step, all its steps are newer. If an episode ended before the given step, all its steps are older. At
    most one episode per lane has both newer and older steps: a binary search of the times finds where the newer steps
    begin.
    """

    def __init__(self) -> None:
        self._times = row_plan([TIME_SOURCE])
        self._tables = EpisodeTables(self._by_time)

    def of(self, snapshot: Snapshot, ids: Ints) -> Ints:
        """Return, for each id, how many steps of the snapshot are newer than the id's step."""
        times, found = self._times_of(snapshot, ids), np.zeros(len(ids), np.int64)
        for table in self._tables.of(snapshot):
            stop = np.searchsorted(table.begin, times, "right")
            found += table.from_here[stop]
            start = np.minimum(np.searchsorted(table.latest, times), stop)
            pairs = np.cumsum(stop - start)
            bounds = np.searchsorted(pairs, np.arange(_PAIRS_AT_ONCE, pairs[-1] if len(pairs) else 0, _PAIRS_AT_ONCE))
            for items in np.split(np.arange(len(ids)), bounds):
                found[items] += self._inside(snapshot, table, ids[items], times[items], start[items], stop[items])
        return found

    def _inside(self, snapshot: Snapshot, table: _ByTime, ids: Ints, times: Ints, start: Ints, stop: Ints) -> Ints:
        """Return, for each step, the number of newer steps in the episodes `start` to `stop` - 1 of the table."""
        item = np.repeat(np.arange(len(ids)), stop - start)
        number = places_of(start, stop - start)
        going_on = table.end[number] >= times[item]
        item, number = item[going_on], number[going_on]
        first, stride, steps = table.first[number], table.stride[number], table.steps[number]
        # The first `low` steps of an episode are not newer than the given step; the steps from `high` on are newer.
        low, high = np.zeros(len(item), np.int64), steps.copy()
        while len(left := np.flatnonzero(low < high)):
            middle = (low[left] + high[left]) // 2
            probe, of = first[left] + middle * stride[left], item[left]
            at = self._times_of(snapshot, probe)
            is_newer = (at > times[of]) | ((at == times[of]) & (probe > ids[of]))
            high[left] = np.where(is_newer, middle, high[left])
            low[left] = np.where(is_newer, low[left], middle + 1)
        newer = np.zeros(len(ids), np.int64)
        np.add.at(newer, item, steps - low)
        return newer

    def _by_time(self, snapshot: Snapshot, episodes: EpisodeTable, before: _ByTime | None) -> _ByTime:
        """Return a table of the episodes.

        The times of episodes in the previous table `before` are copied: the segments of these episodes may be gone.
        """
        episodes = episodes.without_discarded()
        # The log may still have episodes of evicted segments. The steps of these episodes are older than all visible
        # steps, and are not counted.
        episodes = episodes.select(locate(episodes.first, snapshot.origin, snapshot.lanes)[0])
        first, stride, steps = episodes.first, episodes.stride, episodes.steps
        begin, end = np.zeros((2, len(first)), np.int64)
        new = np.ones(len(first), np.bool_)
        if before is not None and len(before.first):
            by_id = np.argsort(before.first)
            at = by_id[np.minimum(np.searchsorted(before.first, first, sorter=by_id), len(by_id) - 1)]
            new = before.first[at] != first
            begin, end = before.begin[at], before.end[at]
        begin[new] = self._times_of(snapshot, first[new])
        end[new] = self._times_of(snapshot, (first + (steps - 1) * stride)[new])
        order = np.argsort(begin, kind="stable")
        first, stride, steps, begin, end = (column[order] for column in (first, stride, steps, begin, end))
        from_here = np.append(np.cumsum(steps[::-1])[::-1], 0)
        return _ByTime(first, stride, steps, begin, end, np.maximum.accumulate(end), from_here)

    def _times_of(self, snapshot: Snapshot, ids: Ints) -> Ints:
        """Return each step's time of publication in ns since the epoch, with one kernel call."""
        if not len(ids):
            return np.zeros(0, np.int64)
        windows = place(snapshot, ids)
        times: Ints = self._times.rows(snapshot, windows)[0][:, 0] + snapshot.clocks[windows.slot]
        return times


class Requested:
    """Computes the fields on request that depend on the episode of each item. Not thread-safe.

    `places` maps the fields of a batch to positions in `Block.arrays`. `rewards` are path, dtype and weight of each
    field in the reward. Returns are discounted by `gamma` per step. `discount` is path and dtype of the field with the
    environment's discounts, or None. These discounts multiply `gamma`.
    """

    def __init__(
        self,
        schema: Schema,
        places: Mapping[Path, int],
        rewards: Sequence[tuple[str, np.dtype[Any], np.float64]],
        gamma: float,
        discount: tuple[str, np.dtype[Any]] | None = None,
    ) -> None:
        names = [*_leaves(schema, {**_OF_STEPS, **_OF_ITEMS}), Leaf((EPISODE_KNOWN,), BOOL)]
        self._at = {leaf.path[0]: places[leaf.path] for leaf in names if leaf.path in places}
        self._values = {path: at for path, at in places.items() if path[0] == "episode"}
        self._gamma = gamma
        self._weights = [weight for _, _, weight in rewards]
        self._has_discount = discount is not None
        self._finder, self._ages = EpisodeFinder(), Ages()
        numbers = [*(leaf for leaf, *_ in rewards), *([] if discount is None else discount[:1])]
        self._numbers = row_plan(numbers, cols.OWN, cols.AFTER)
        self._flags = row_plan(["done"], cols.OWN, cols.OWN_STOP)
        self._episode = row_plan(["/".join(path) for path in self._values], cols.OWN, cols.OWN_STOP)

    def if_any(self) -> "Requested | None":
        return self if self._at or self._values else None

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block, real: Ints | None = None) -> None:
        """Write the fields of the items that start at these ids to the block.

        `real` has the number of steps of each window without its padding; None: windows have no padding. The values of
        padding are 0.
        """
        arrays = {name: block.arrays[at] for name, at in self._at.items()}
        episodes = self._finder.find(snapshot, ids)
        step = (ids - episodes.first) // episodes.stride
        if "step" in arrays:
            _of_windows(arrays["step"])[:] = step[:, None] + np.arange(_of_windows(arrays["step"]).shape[1])
        if PRIORITY in arrays:
            priority, last = _of_windows(arrays[PRIORITY]), episodes.first + (episodes.steps - 1) * episodes.stride
            of_steps = np.minimum(ids[:, None] + np.arange(priority.shape[1]) * episodes.stride[:, None], last[:, None])
            priority[:] = snapshot.priorities(of_steps.ravel()).reshape(priority.shape)
        if "age" in arrays:
            arrays["age"][:] = self._ages.of(snapshot, ids)
        sums = {name: _of_windows(arrays[name]) for name in RETURNS if name in arrays}
        if sums:
            with np.errstate(over="ignore"):
                self._sum(snapshot, ids, episodes.steps - step, sums)
        if self._values or EPISODE_KNOWN in arrays:
            self._read_values(snapshot, episodes, block, arrays.get(EPISODE_KNOWN))
        if real is not None:
            for name in arrays.keys() & _OF_STEPS.keys():
                arrays[name][np.arange(arrays[name].shape[1]) >= real[:, None]] = 0

    def _sum(self, snapshot: Snapshot, ids: Ints, rest: Ints, sums: Mapping[str, NDArray[Any]]) -> None:
        """Write the returns R_t = r_t + gamma_t R_{t+1} of each item's steps, and 0 for steps after the episode's end.

        `rest` has the number of steps from each item's first step to the end of its episode. `sums` has the array to
        write for each field, (items, steps). For the field `return_to_go`, gamma_t is 1. Sums are in float64 and
        rounded when they are written.
        """
        steps, totals = place(snapshot, ids), {name: np.zeros(len(ids)) for name in sums}
        for out in sums.values():
            out[:] = 0
        longest = int(rest.max(initial=0))
        for start in reversed(range(0, longest, _AT_ONCE)):
            items = np.flatnonzero(rest > start)
            some, end = steps.select(items), rest[items]
            some.own[:], some.after[:] = some.row + start, some.row + end
            reward, discounts = self._read_numbers(snapshot, some, min(_AT_ONCE, longest - start))
            for name, out in sums.items():
                total, gammas = totals[name][items], discounts if name != "return_to_go" else np.ones(len(reward))
                for j in reversed(range(len(reward))):
                    total = reward[j] + gammas[j] * total
                    if start + j < out.shape[1]:
                        out[items, start + j] = total
                totals[name][items] = total

    def _read_numbers(self, snapshot: Snapshot, steps: Windows, count: int) -> tuple[Floats, Floats]:
        """Return the rewards and the discounts of `count` steps of each item.

        Rewards are (count, items); discounts are (count, items) or (count,). `steps.own` has the row of each item's
        first step. Rewards from the row `steps.after` on are 0.
        """
        # The number of rows is rounded up to a power of two, so that calls with similar counts reuse scratch memory.
        self._numbers.set_lengths(min(_AT_ONCE, 1 << (count - 1).bit_length()))
        found = [array[:, :count].T for array in self._numbers.rows(snapshot, steps)]
        discounts = np.full(count, self._gamma)
        if self._has_discount:
            discounts = found.pop().astype(np.float64) * self._gamma
        return weighed(found, self._weights), discounts

    def _read_values(
        self, snapshot: Snapshot, episodes: EpisodeTable, block: Block, known: NDArray[np.bool_] | None
    ) -> None:
        """Write each item's episode fields to the block, and to `known` whether the item's episode has values.

        If the episode has no values, the episode fields are zeros.
        """
        # `Snapshot.episode_values` reads one segment after the other: this is too slow for every batch.
        last = place(snapshot, episodes.first)
        last.own[:] = last.row + episodes.steps
        last.own_stop[:] = snapshot.committed_rows(last.slot, last.lane)
        flags = self._flags.rows(snapshot, last)[0][:, 0]
        last.own[:] -= ~is_end_with_values(flags)
        given = (episodes.end & EPISODE_VALUES) != 0
        if self._values:
            places = last.slot[given], last.lane[given], last.own[given]
            last.own[given] = snapshot.value_rows(*places)
            # For a pack, `value_rows` may return numbers below 0. `floor` must not be greater than these numbers.
            last.floor[:] = last.own
        last.own_stop[:] = last.own + given
        if known is not None:
            known[:] = given
        if self._values:
            for at, found in zip(self._values.values(), self._episode.rows(snapshot, last), strict=True):
                block.arrays[at][:] = found[:, 0]


def write_fields(block: Block, places: Mapping[Path, int], made: Mapping[str, Any]) -> None:
    for name, values in made.items():
        if (name,) in places:
            block.arrays[places[name,]][:] = values


def _of_windows(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.ndim == 2 else array[:, None]


FLAGS = ("terminated", "truncated", "is_first", "mask", "loss_mask")


class ShownField(NamedTuple):
    """The rule that makes the field `path` of a batch from leaf number `leaf`.

    With `stack` 0, the field is the leaf itself. If `stack` is above 0, the leaf has successive frames, and the field
    has a stack of `stack` frames for each step. The first stack begins with frame number `offset`: 0 for `obs`, and 1
    for `next_obs`.
    """

    path: Path
    leaf: int
    stack: int = 0
    offset: int = 0

    def of(self, tensor: Any) -> Any:
        if self.stack == 0:
            return tensor
        length = tensor.shape[1] - self.stack
        frames = tensor[:, self.offset : self.offset + length + self.stack - 1]
        if self.stack == 1:
            return frames
        return frames.unfold(1, self.stack, 1).movedim(-1, 2)


class WindowLeaf(NamedTuple):
    value: Leaf  # The path, dtype and shape of one value.
    source: str | None = None  # The leaf of the store from which values are copied; None: no leaf.
    each_step: bool = True  # Whether each step has a value; False: each item has one value.
    stack: int = 0  # The depth of the stacks if successive steps share frames, else 0.
    frames: int = 1  # The number of frames in one value.

    def leaf(self, length: int) -> Leaf:
        value = self.value
        return replace(value, shape=(length + self.stack, *value.shape)) if self.each_step else value


def window_layout(
    schema: Schema,
    fields: Sequence[str] | None,
    frame_stack: int | Mapping[str, int],
    start_only: Sequence[str],
    shares_frames: bool = True,
) -> tuple[list[WindowLeaf], list[ShownField]]:
    """Return the leaves to gather for a batch of windows, and the fields of the batch in their order.

    With `shares_frames`, the observations of a window are gathered as one array of successive frames. Without
    `shares_frames`, each step has frames of its own, and `next_obs` is a field on request.
    """
    steps = step_fields(schema, frame_stack)
    _check_start_only(start_only, steps)
    of_steps, of_items = each_step(schema), each_item(schema)
    paths = _paths(steps)
    by_default = [Leaf(path, BOOL) for path in paths if shares_frames or path[0] != "next_obs"]
    on_request = [] if shares_frames else [Leaf(path, BOOL) for path in paths if path[0] == "next_obs"]
    wanted = {leaf.path for leaf in select(by_default, fields, on_request=[*on_request, *of_steps, *of_items])}
    others = [
        *(WindowLeaf(field.leaf, field.source, field.path[0] not in start_only) for field in _no_observations(steps)),
        *(WindowLeaf(Leaf((name,), BOOL)) for name in FLAGS),
        *(WindowLeaf(leaf, TIME_SOURCE if leaf is TIME else None) for leaf in of_steps),
        *(
            WindowLeaf(leaf, each_step=False)
            for leaf in (*of_items, Leaf(("index",), INT64), Leaf(("weight",), FLOAT32))
        ),
    ]
    kinds = _observations(steps["obs"], wanted, shares_frames)
    kinds += [kind for kind in others if kind.value.path in wanted]
    shown = _shown(kinds, steps["obs"] if shares_frames else [])
    return kinds, [shown[path] for path in [*paths, *(leaf.path for leaf in (*of_steps, *of_items))] if path in wanted]


def _no_observations(steps: Mapping[str, Sequence[StepField]]) -> list[StepField]:
    return [field for name, fields in steps.items() if name != "obs" for field in fields]


def _shown(kinds: Sequence[WindowLeaf], sharing: Sequence[StepField]) -> dict[Path, ShownField]:
    """Return all fields by path. For observations in `sharing`, `next_obs` is made from the leaf of `obs`."""
    shown = {kind.value.path: ShownField(kind.value.path, at, kind.stack) for at, kind in enumerate(kinds)}
    for field in sharing:
        if field.path in shown:
            following = _following(field.path)
            shown[following] = shown[field.path]._replace(path=following, offset=1)
    return shown


def _observations(fields: Sequence[StepField], wanted: set[Path], shares_frames: bool) -> list[WindowLeaf]:
    if shares_frames:
        shown = [field for field in fields if {field.path, _following(field.path)} & wanted]
        return [WindowLeaf(field._replace(stack=1).leaf, field.source, stack=field.stack) for field in shown]
    return [
        WindowLeaf(replace(field.leaf, path=path), field.source, frames=field.stack)
        for field in fields
        for path in (field.path, _following(field.path))
        if path in wanted
    ]


def _following(path: Path) -> Path:
    return ("next_obs", *path[1:])


def _paths(steps: Mapping[str, Sequence[StepField]]) -> list[Path]:
    paths = {name: [field.path for field in below] for name, below in steps.items()}
    obs, action, reward = (paths.pop(name) for name in ("obs", "action", "reward"))
    following = [_following(path) for path in obs]
    own = [(name,) for name in (*FLAGS, "index", "weight")]
    return [*obs, *following, *action, *reward, *own, *(path for below in paths.values() for path in below)]


def _check_start_only(names: Sequence[str], steps: Mapping[str, Any]) -> None:
    extra = [name for name in steps if name not in ("obs", "action", "reward")]
    for name in names:
        if name not in extra:
            known = ", ".join(extra) or "none"
            raise ValueError(f"start_only names {name!r}; the extra fields of this store are {known}")
