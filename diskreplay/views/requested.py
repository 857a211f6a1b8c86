"""Fields that a batch has on request, beside the times of its steps: which there are, and how they are made.

A field of the store with the name of one of these is that which is meant.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import EPISODE_VALUES, EpisodeTable, Floats, Ints, is_end_with_values
from diskreplay.kernels import gathering as cols
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema
from diskreplay.views.ages import Ages
from diskreplay.views.base import BOOL, EPISODE_KNOWN, FLOAT32, INT64, Block, Leaf, Path
from diskreplay.views.episode_finder import EpisodeFinder
from diskreplay.views.gather_plan import row_plan
from diskreplay.views.successors import place
from diskreplay.views.windows import TIME, Windows

_Dtypes = Mapping[str, np.dtype[Any]]
FLOAT64 = np.dtype("float64")

# Rewards of an episode that are read together.
_AT_ONCE = 1024

# One value for each step, and one for each item.
RETURNS = ("return_to_go", "discounted_return_to_go")
PRIORITY = "priority"
_OF_STEPS: _Dtypes = {
    "step": INT64,
    "return_to_go": FLOAT32,
    "discounted_return_to_go": FLOAT32,
    PRIORITY: FLOAT64,
}
_OF_ITEMS: _Dtypes = {"age": INT64}
# What is known of a draw, and of no step.
OF_DRAWS: _Dtypes = {"probability": FLOAT64, "population": INT64, "priority_sum": FLOAT64}


def each_step(schema: Schema) -> list[Leaf]:
    """Return the fields on request that have a value for each step."""
    return [TIME, *_leaves(schema, _OF_STEPS)]


def each_item(schema: Schema, drawn: bool = True) -> list[Leaf]:
    """Return those that have one for each item; with what is known of a draw, if batches are `drawn` by chance."""
    values = {path: field for path, field in schema.leaves.items() if path.startswith("episode/")}
    episode = [Leaf(tuple(path.split("/")), field.dtype, field.shape) for path, field in values.items()]
    known = [Leaf((EPISODE_KNOWN,), BOOL)] if episode else []
    return [*_leaves(schema, {**_OF_ITEMS, **(OF_DRAWS if drawn else {})}), *episode, *known]


def _leaves(schema: Schema, dtypes: _Dtypes) -> list[Leaf]:
    return [Leaf((name,), dtype) for name, dtype in dtypes.items() if name not in schema.extra]


class Requested:
    """Makes the fields on request that follow from the episode of each item. Not thread-safe.

    `places` has the arrays of a block for all of a batch's fields, `rewards` path, dtype and weight of what is summed.
    `gamma` discounts it, times the discounts of the environment where `discount` is the path and dtype of these.
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
        """Return it if the batch has any of these fields, else None."""
        return self if self._at or self._values else None

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block, real: Ints | None = None) -> None:
        """Make the fields of the items that begin at these ids; of windows, `real` says how many steps each has."""
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
        """Write R_t = r_t + gamma_t R_t+1 of the first steps of each item, 0 behind the `rest` of its episode.

        `sums` are arrays, (items, steps). Numbers are float64, and rounded as they are written.
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
        """Return rewards and discounts of `count` steps from row `own` on, (count, items), 0 from row `after` on."""
        # A few widths, for which the memory is used again.
        self._numbers.set_lengths(min(_AT_ONCE, 1 << (count - 1).bit_length()))
        found = [array[:, :count].T.astype(np.float64) for array in self._numbers.rows(snapshot, steps)]
        discounts = found.pop() * self._gamma if self._has_discount else np.full(count, self._gamma)
        reward = np.zeros((count, steps.size))
        for array, weight in zip(found, self._weights, strict=True):
            reward += array * weight
        return reward, discounts

    def _read_values(
        self, snapshot: Snapshot, episodes: EpisodeTable, block: Block, known: NDArray[np.bool_] | None
    ) -> None:
        """Read the values of each item's episode, zeros where it has none, and say which have."""
        # As `Snapshot.episode_values` does, which reads segment by segment: too slow for every batch.
        last = place(snapshot, episodes.first)
        last.own[:] = last.row + episodes.steps
        last.own_stop[:] = snapshot.committed_rows(last.slot, last.lane)
        flags = self._flags.rows(snapshot, last)[0][:, 0]
        last.own[:] -= ~is_end_with_values(flags)
        given = (episodes.end & EPISODE_VALUES) != 0
        if self._values:
            places = last.slot[given], last.lane[given], last.own[given]
            last.own[given] = snapshot.value_rows(*places)
            last.floor[:] = last.own  # it may be below 0
        last.own_stop[:] = last.own + given
        if known is not None:
            known[:] = given
        if self._values:
            for at, found in zip(self._values.values(), self._episode.rows(snapshot, last), strict=True):
                block.arrays[at][:] = found[:, 0]


def _of_windows(array: NDArray[Any]) -> NDArray[Any]:
    """Return a field of steps as that of windows, (items, steps)."""
    return array if array.ndim == 2 else array[:, None]
