"""Draws with an equal share for each group of steps: for each episode, or for each value of an episode field."""

import numpy as np

from diskreplay.distributions.base import Draw, Owned
from diskreplay.distributions.population import Changes, Column, Cursor, Population
from diskreplay.errors import NotEnoughData
from diskreplay.ids import Floats, Ints
from diskreplay.kernels.runs import IdRuns, LaneIndex, by_lane, lane_keys, last_ids, numbered, runs_with

# `_Groups` merges `_new` into `_old` when `_new` has more runs than this, and more than a 32nd of the runs in `_old`.
_FEW = 1024


class Stratified(Owned):
    """Draw a group of ids, each group with the same probability, then an id of that group, with replacement.

    Stratified sampling: P(i) = 1 / (G · n), where G is the number of groups, and n is the number of ids in the group of
    i. Thus a long episode is not drawn more often than a short one, and a task with many steps is not drawn more often
    than other tasks.

    A `Stratified` belongs to one sampler.

    Parameters
    ----------
    by : str
        With "episode", each episode is a group. With the path of an episode field, such as "episode/task", all episodes
        with the same value are a group. An episode gets its value when it ends: steps of open episodes and of episodes
        without a value are not drawn. Windows that cross the end of an episode are drawn as soon as no further window
        can start in that episode.

    Raises
    ------
    ValueError
        `by` is invalid.

    Examples
    --------
    >>> sampler = dr.Sampler("cartpole.replay", dr.Transitions(), dr.Stratified("episode"), batch_size=32)
    >>> sampler.sample().batch_size
    32
    """

    def __init__(self, by: str = "episode") -> None:
        if not isinstance(by, str) or by.split("/")[0] != "episode" or by.endswith("/"):
            raise ValueError(f'by must be "episode" or an episode field such as "episode/task", not {by!r}')
        self._by = by
        self.episode_fields = () if by == "episode" else (by,)
        self._groups = _Groups(by)

    def __repr__(self) -> str:
        return f"Stratified(by={self._by!r})"

    @property
    def by(self) -> str:
        """The groups: "episode", or the path of an episode field."""
        return self._by

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty; NotEnoughData if no episode has a value of the field."""
        if not self.episode_fields:
            return Draw(_draw_of_episodes(population, size, rng), None, population.size)
        self._groups.follow(population)
        if not len(self._groups.some):
            raise NotEnoughData(
                f"none of the {population.size} sampleable steps is of an ended episode with a value of {self._by}; "
                "1 is needed, append more"
            )
        return Draw(self._groups.draw(size, rng), None, population.size)

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability of each id, (n,); 0 for an id that cannot be drawn."""
        if not self.episode_fields:
            return _chances_of_episodes(population, ids)
        self._groups.follow(population)
        return self._groups.chances(population, ids)

    def drawable(self, population: Population) -> Ints | None:
        """Return the ids in this rank's share whose episode has a value of `by`; None if all ids can be drawn."""
        if not self.episode_fields:
            return None
        return np.concatenate(
            [np.zeros(0, np.int64), *(ids[self.chances(population, ids) > 0] for ids in population.ids())]
        )


# --- by episode: an episode has a run of ids; a moved sample is a second run (see `Population.find_moved`) ------------


def _draw_of_episodes(population: Population, size: int, rng: np.random.Generator) -> Ints:
    first, stride, count = population.runs()
    found, missing = [], size
    while missing:
        pick, number = rng.random((2, missing))
        run = (pick * len(first)).astype(np.int64)
        moved, is_moved = population.find_moved(run)
        if is_moved.any():  # a moved sample is drawn together with the other run of its episode
            run, moved, number = run[~is_moved], moved[~is_moved], number[~is_moved]
        number = (number * (count[run] + (moved >= 0))).astype(np.int64)
        found.append(np.where(number < count[run], first[run] + number * stride[run], first[moved]))
        missing -= len(run)
    return np.concatenate(found)


def _chances_of_episodes(population: Population, ids: Ints) -> Floats:
    chances, run = np.zeros(len(ids)), population.find_runs(ids)
    there, count = run >= 0, population.runs().count
    every = np.arange(len(count))
    moved, is_moved = population.find_moved(every)
    steps = count + (moved >= 0)
    steps[moved[moved >= 0]] = steps[moved >= 0]
    chances[there] = 1.0 / (np.count_nonzero(~is_moved) * steps[run[there]])
    return chances


# --- by a field ------------------------------------------------------------------------------------------------------


class _Groups:
    """The ids of ended episodes, in groups by the value of an episode field.

    The ids of a group are numbered in the order of arrival of their runs: first the runs in `_old`, then the runs in
    `_new`. The first `_hidden[group]` ids of a group are not drawn, because their runs have hidden ids: steps beyond
    the store's limits. The visible parts of these runs are in `_left`. The ids of `_left` have the last numbers of
    their group. `some` has the numbers of the groups with visible ids, in the order of the groups' values.
    """

    def __init__(self, leaf: str) -> None:
        self._leaf = leaf
        self._cursor = Cursor()
        self._epoch = -1
        self._numbers: dict[bytes, int] = {}  # The number of each group, by the bytes of the group's value.
        self._order: Ints = np.zeros(0, np.int64)  # The numbers of all groups, sorted by the values of the groups.
        self.some = self._total = self._order
        self._clear()

    def _clear(self) -> None:
        self._old, self._new, self._left = (_Runs.none() for _ in range(3))
        # `_group[i]` is the group of run i; runs are numbered in the order in which they were added. The runs before
        # `_first` have hidden ids. Entries from `_end` on are unused.
        self._group: Ints = np.zeros(64, np.int64)
        self._first = self._end = 0
        self._partly = Column()  # the groups of partially hidden runs, by the last id of each run
        self._hidden = np.zeros(0, np.int64)

    def follow(self, population: Population) -> None:
        if self._cursor.is_at(population):
            return
        if self._epoch != population.epoch:  # older runs have moved, and may become hidden in a new order
            self._cursor = Cursor()
        changes = self._cursor.changes(population)
        ended = changes.runs.shape[1] - changes.provisional
        if changes.whole or ended or changes.partially_hidden or len(self._partly.ids) or changes.reached.shape[1]:
            self._take_in(population, changes, ended)
        self._epoch = population.epoch
        self._cursor.reach(population, changes)

    def _take_in(self, population: Population, changes: Changes, ended: int) -> None:
        """Add the new runs of `changes`, and hide the runs in `changes.reached`.

        The first `ended` new runs belong to ended episodes, and never change.
        """
        came, left = changes.runs[:, :ended].copy(), changes.runs[:, ended : ended + changes.partially_hidden].copy()
        group, last = self._groups_of(population, came), last_ids(IdRuns(*left))
        if changes.whole:
            self._clear()
            groups_left = self._groups_of(population, left)
        else:
            groups_left = self._hide(changes.reached).of(last, -1)
        order = np.argsort(last)
        self._partly = Column(last[order], groups_left[order])
        self._add(came, group)
        self._left = _Runs(left, groups_left, len(self._numbers))
        self._count()

    def _groups_of(self, population: Population, runs: Ints) -> Ints:
        """Return the group of each run of an ended episode, -1 for an episode without a value."""
        if not runs.shape[1]:
            return np.zeros(0, np.int64)
        values, known = population.followed.episode_values(self._leaf, runs[0])
        texts = [value.tobytes() for value in values[known]]
        group = np.full(len(known), -1)
        group[known] = [self._numbers.setdefault(text, len(self._numbers)) for text in texts]
        return group

    def _hide(self, reached: Ints) -> Column:
        """Hide the runs `reached`; return a mapping from the last id of each run with hidden ids to the run's group.

        `reached` must be the first runs, in the order of arrival, that are not hidden yet.
        """
        group = self._group[self._first : self._first + reached.shape[1]]
        self._first += len(group)
        some = group >= 0
        np.add.at(self._hidden, group[some], reached[2, some])
        return self._partly.with_others(last_ids(IdRuns(*reached)), group)

    def _add(self, runs: Ints, group: Ints) -> None:
        many = len(self._numbers)
        self._hidden = np.append(self._hidden, np.zeros(many - len(self._hidden), np.int64))
        self._old.grow(many)
        if not len(group):
            self._new.grow(many)
            return
        end = self._end + len(group)
        if end > len(self._group):
            self._group = np.append(self._group, np.zeros(2 * end, np.int64))
        self._group[self._end : end], self._end = group, end
        self._new = self._new.with_more(runs, group, many)
        if len(self._new.group) > max(_FEW, len(self._old.group) // 32):
            self._old, self._new = self._old.with_more(self._new.runs, self._new.group, many), _Runs.none(many)

    def _count(self) -> None:
        self._total = self._old.count + self._new.count + self._left.count - self._hidden
        if len(self._order) < len(self._numbers):
            self._order = np.array([self._numbers[text] for text in sorted(self._numbers)], np.int64)
        self.some = self._order[self._total[self._order] > 0]

    def draw(self, size: int, rng: np.random.Generator) -> Ints:
        pick, number = rng.random((2, size))
        group = self.some[(pick * len(self.some)).astype(np.int64)]
        at = (number * self._total[group]).astype(np.int64) + self._hidden[group]
        found = np.zeros(size, np.int64)
        for runs in (self._old, self._new, self._left):
            here = (at >= 0) & (at < runs.count[group])
            found[here] = runs.take(group[here], at[here])
            at -= runs.count[group]
        return found

    def chances(self, population: Population, ids: Ints) -> Floats:
        drawable = population.contains(ids)
        group, keys = np.full(len(ids), -1), lane_keys(ids, *population.segments)
        for runs in (self._old, self._new, self._left):
            runs.find(ids, keys, population.segments, group)
        there = drawable & (group >= 0)
        chances = np.zeros(len(ids))
        chances[there] = 1.0 / (len(self.some) * self._total[group[there]])
        return chances


class _Runs:
    """Runs of ids (see `IdRuns`), sorted by group, as an array (3, n); `many` is the number of groups.

    `group` has the group of each run, -1 for a run that is left out. `count` is the number of ids of each group.
    """

    def __init__(self, runs: Ints, group: Ints, many: int) -> None:
        order = np.argsort(group, kind="stable")
        order = order[np.count_nonzero(group < 0) :]
        self.runs, self.group = runs[:, order], group[order]
        self.count = np.bincount(self.group, self.runs[2], many).astype(np.int64)
        self._begin = np.cumsum(self.count) - self.count
        self._before = np.cumsum(self.runs[2]) - self.runs[2]
        self._index: LaneIndex | None = None

    @classmethod
    def none(cls, many: int = 0) -> "_Runs":
        return cls(np.zeros((3, 0), np.int64), np.zeros(0, np.int64), many)

    def with_more(self, runs: Ints, group: Ints, many: int) -> "_Runs":
        """Return a copy with more runs, each at the end of its group."""
        return _Runs(np.append(self.runs, runs, axis=1), np.append(self.group, group), many)

    def grow(self, many: int) -> None:
        if many > len(self.count):
            more = np.zeros(many - len(self.count), np.int64)
            self.count, self._begin = np.append(self.count, more), np.append(self._begin, more)

    def take(self, group: Ints, number: Ints) -> Ints:
        return numbered(IdRuns(*self.runs), self._before, self._begin[group] + number)

    def find(self, ids: Ints, keys: Ints, segments: tuple[int, Ints], group: Ints) -> None:
        """Set `group[i]` to the group of `ids[i]` if this object has the id; `keys` are the `lane_keys` of the ids."""
        if not len(self.group):
            return
        if self._index is None:
            self._index = by_lane(self.runs[0], segments)
        run, _, found = runs_with(ids, keys, self._index, IdRuns(*self.runs))
        group[found] = self.group[run[found]]
