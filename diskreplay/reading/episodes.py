"""The public classes `Episode` and `EpisodeList`, which read the mapped rows, and their HTML for notebooks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from diskreplay import markup
from diskreplay.errors import MissingExtra, ReplayError, SchemaError
from diskreplay.ids import (
    CONTINUES,
    CUT,
    EPISODE_VALUES,
    OPEN,
    POSITION_BITS,
    POSITION_MASK,
    TERMINATED,
    TRUNCATED,
    EpisodeTable,
    places_of,
)
from diskreplay.markup import Html
from diskreplay.pictures import as_images, is_image, png, smaller, spread, strip
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema
from diskreplay.segments.documents.layout import LEAST_PRIORITY, PRIORITY, TIME
from diskreplay.segments.episode_table import add_rewards

ENDS_SHOWN = 5  # a notebook shows the first 5 and the last 5 episodes of a long list


def sums_between(rewards: NDArray[Any], bounds: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the float64 sum of rewards in each range of rows ``[first, stop)``; ``bounds`` is ``(n, 2)`` int64.

    A sum depends only on the rewards in its range, so all callers get the same sum of an episode, to the last bit.
    """
    found, steps = np.zeros(len(bounds)), bounds[:, 1] - bounds[:, 0]
    add_rewards(found, np.repeat(np.arange(len(bounds)), steps), rewards[places_of(bounds[:, 0], steps)])
    return found


class Episode:
    """One episode of a snapshot, with all its ``T = len(episode)`` steps, hidden steps included.

    Arrays are read-only views of the store if the rows lie in one uncompressed chunk. All other arrays are copies.
    Thread-safe.

    Examples
    --------
    >>> episode = dr.open("cartpole.replay").episodes[0]
    >>> episode.obs.shape[0] == len(episode) + 1  # with the final observation
    True
    >>> episode.total_reward == len(episode), episode.terminated
    (True, True)
    """

    __slots__ = ("_end", "_first", "_obs_rows", "_snapshot", "_steps", "_stride")

    def __init__(self, snapshot: Snapshot, position: int, episodes: EpisodeTable | None = None) -> None:
        # The episode is line `position` of the table `episodes`, which may be the table of an earlier snapshot of the
        # store.
        episodes = snapshot.episodes if episodes is None else episodes
        self._snapshot = snapshot
        self._first, self._stride = int(episodes.first[position]), int(episodes.stride[position])
        self._steps, self._obs_rows = int(episodes.steps[position]), int(episodes.obs_rows[position])
        self._end = int(episodes.end[position])

    def __len__(self) -> int:
        return self._steps

    @property
    def length(self) -> int:
        """The number of steps: ``len(episode)``."""
        return self._steps

    @property
    def hidden_steps(self) -> int:
        """The number of steps at the episode's start that a limit of the store hides: samplers do not draw them."""
        return int(self._snapshot.hidden_steps(self._table)[0])

    @property
    def continues(self) -> bool:
        """Whether the episode continues an episode that was cut for its length, without a reset of the environment."""
        return bool(self._end & CONTINUES)

    @property
    def continued(self) -> bool:
        """Whether the episode was cut for its length, and the snapshot has the episode that continues it."""
        return bool(self._snapshot.continued(self._table)[0])

    @property
    def _table(self) -> EpisodeTable:
        return EpisodeTable.of([self._first], [self._stride], [self._steps], [self._obs_rows], [self._end])

    def __repr__(self) -> str:
        return f"Episode(id={self._first}, length={self._steps}, {self.ended})"

    def _repr_html_(self) -> str:
        return episode_html(self, self._snapshot.schema)

    @property
    def ended(self) -> str:
        """How the episode ended: "terminated", "truncated" or "cut"; "open" if it has not ended."""
        if self._end & OPEN:
            return "open"
        if self._end & TERMINATED:
            return "terminated"
        return "cut" if self._end & CUT else "truncated"

    @property
    def terminated(self) -> bool:
        """Whether the environment reached a terminal state."""
        return bool(self._end & TERMINATED)

    @property
    def truncated(self) -> bool:
        """Whether the episode ended for a reason outside its Markov decision process: a time limit, or a cut."""
        return bool(self._end & TRUNCATED)

    @property
    def cut(self) -> bool:
        """Whether diskreplay ended the episode, and not the environment."""
        return bool(self._end & CUT)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The ids of the steps, ``(T,)`` int64."""
        return self._first + np.arange(self._steps, dtype=np.int64) * self._stride

    @property
    def segment(self) -> int:
        """The number of the segment that has the episode."""
        return self._first >> POSITION_BITS

    @property
    def lane(self) -> int:
        """The index of the episode's lane in the segment."""
        return (self._first & POSITION_MASK) % self._stride

    @property
    def obs(self) -> Any:
        """Observations, ``(T + 1, ...)`` if there is a final observation, else ``(T, ...)``; nested like the space."""
        return self._read("obs", self._obs_rows)

    @property
    def has_final_obs(self) -> bool:
        """Whether there is an observation after the last step."""
        return self._obs_rows > self._steps

    @property
    def action(self) -> Any:
        """Actions, ``(T, ...)``; nested like the space.

        A Tuple space gives tuples, whose items can also be read by the keys "0", "1", ...
        """
        return self._read("action", self._steps)

    @property
    def reward(self) -> NDArray[Any]:
        """Rewards, ``(T,)``."""
        return self._snapshot.rows("reward", self._first, self._steps)

    @property
    def times(self) -> NDArray[np.float64]:
        """The time of each step's publication, ``(T,)`` float64, in seconds since the epoch.

        Times never decrease. The times of all episodes written in one boot of a machine are comparable, because they
        come from a clock that cannot be set.
        """
        times = self._snapshot.rows(TIME, self._first, self._steps)
        seconds: NDArray[np.float64] = (times + self._snapshot.clocks[self.segment - self._snapshot.origin]) / 1e9
        return seconds

    @property
    def total_reward(self) -> float:
        """The undiscounted return, summed in float64."""
        sums, are_known = self._snapshot.kept_reward_sums(self._table)
        return float((sums if are_known[0] else sums_between(self.reward, np.array([[0, self._steps]])))[0])

    def rows(self, path: str, first: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return rows of one leaf of the steps, ``(stop - first, ...)``, without reading other rows or leaves.

        Parameters
        ----------
        path : str
            A path of `Schema.step_leaves`: "reward", "obs/image", "extra/log_prob".
        first, stop : int
            The range of rows ``[first, stop)``; with ``stop=None``, the range ends with the last row. Observations have
            one row more than the steps if the episode has a final observation.

        Raises
        ------
        SchemaError
            The schema has no such leaf.
        IndexError
            The episode has no such rows.
        """
        leaves = self._snapshot.schema.step_leaves
        if path not in leaves:
            raise SchemaError(f"the steps of this store have no leaf {path!r}; they have {', '.join(leaves)}")
        count = self._obs_rows if path.split("/")[0] == "obs" else self._steps
        stop = count if stop is None else stop
        if not 0 <= first <= stop <= count:
            raise IndexError(f"{path} of this episode has the rows 0 to {count - 1}, not {first} to {stop - 1}")
        return self._snapshot.rows(path, self._first + first * self._stride, stop - first)

    def __getitem__(self, name: str) -> Any:
        """Return a field by name.

        A field of the steps has the shape ``(T, ...)``. An episode field has one value, or is None if the episode was
        given no values. If only some episode fields were given, the other episode fields are zeros.

        "priority" is the priority that each step was appended with, ``(T,)`` float64. A step without a priority has
        NaN.

        Raises
        ------
        SchemaError
            The schema has no such field, or the name is not a string: ``episode[3]`` is ambiguous.
        """
        schema = self._snapshot.schema
        if not isinstance(name, str):
            raise SchemaError(
                f"an episode is indexed by the name of a field, not {name!r:.80}: episode.reward[3] is the reward of "
                "step 3, store.episodes[3] the fourth episode"
            )
        if name in ("obs", "action", "reward"):
            return getattr(self, name)
        if name == PRIORITY:
            return self._priorities()
        if name in schema.extra:
            return self._read(f"extra/{name}", self._steps)
        if name not in schema.episode:
            known = ["obs", "action", "reward", *schema.extra, *schema.episode]
            raise SchemaError(f"no field {name!r} in this store; it has {', '.join(known)}")
        if not self._end & EPISODE_VALUES:
            return None
        (slot,), (lane,), (row,) = (place.tolist() for place in self._snapshot.value_places(self._table))
        return self._map(f"episode/{name}", lambda leaf: self._snapshot.leaf(leaf).rows(slot, lane, row, row + 1)[0])

    def _priorities(self) -> NDArray[np.float64]:
        snapshot = self._snapshot
        table = snapshot.tables.priorities
        if table is None or not table.has_rows(self.segment - snapshot.origin):
            return np.full(self._steps, np.nan)
        stored = snapshot.rows(PRIORITY, self._first, self._steps)
        return np.where(stored > LEAST_PRIORITY, stored, np.where(stored > 0, 0.0, np.nan))

    def _read(self, root: str, count: int) -> Any:
        return self._map(root, lambda leaf: self._snapshot.rows(leaf, self._first, count))

    def _map(self, root: str, read: Any) -> Any:
        schema = self._snapshot.schema
        part, *name = root.split("/", 1)
        leaves = {leaf: read(leaf) for leaf in schema.leaves if leaf == root or leaf.startswith(f"{root}/")}
        nested = schema.unflatten(part, leaves)
        return nested[name[0]] if name else nested


class EpisodeList(Sequence[Episode]):
    """The episodes of a snapshot, oldest first. Immutable and thread-safe."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __repr__(self) -> str:
        return f"EpisodeList({len(self)} episodes)"

    def _repr_html_(self) -> str:
        ends = [*range(len(self))[:ENDS_SHOWN], *range(max(ENDS_SHOWN, len(self) - ENDS_SHOWN), len(self))]
        return episodes_html(len(self), [(at, self[at]) for at in ends])

    def __len__(self) -> int:
        return len(self._snapshot.episodes)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...
    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        if isinstance(index, slice):
            return [Episode(self._snapshot, i) for i in range(*index.indices(len(self)))]
        if isinstance(index, str) or not hasattr(index, "__index__"):
            raise TypeError(
                f'episodes are indexed by their number or a slice, not {index!r:.80}: store.episodes[0]["reward"] is a '
                "field of the first episode"
            )
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(
                f"there is no episode {index}: the snapshot has {len(self)}, numbered from 0; store.refresh() shows "
                "the episodes appended since"
            )
        return Episode(self._snapshot, at)


FRAMES, WIDEST = 8, 96  # the number of frames in a notebook, and their largest width in pixels
MOST_FIELDS, MOST_TEXT = 20, 120
# Notebooks do not sum the rewards of an episode with more than MOST_STEPS steps. Notebooks do not show frames if FRAMES
# frames take more than MOST_BYTES bytes.
MOST_STEPS, MOST_BYTES = 1_000_000, 1 << 24


def episode_html(episode: Episode, schema: Schema) -> Html:
    title, values = markup.element("strong", markup.text("Episode")), [*schema.episode][:MOST_FIELDS]
    facts = {
        "id": markup.text(episode.ids[0]),
        "length": markup.text(f"{len(episode):,}"),
        "total_reward": _total_reward(episode),
        "ended": markup.text(episode.ended),
        **{name: _guarded(partial(_field, episode, name)) for name in values},
    }
    return markup.element("div", title, markup.facts(facts), _guarded(lambda: _strip(episode, schema)))


def episodes_html(total: int, shown: Sequence[tuple[int, Episode]]) -> Html:
    rows = [
        [markup.text(at), markup.text(f"{len(episode):,}"), _total_reward(episode), markup.text(episode.ended)]
        for at, episode in shown
    ]
    title = markup.element("strong", markup.text(f"EpisodeList of {total:,} episodes"))
    return markup.element("div", title, markup.table([">index", ">length", ">total_reward", "ended"], rows, total))


def _guarded(read: Callable[[], Html]) -> Html:
    """Return the HTML that ``read()`` returns, or the message of its error: the store may change during the call."""
    try:
        return read()
    except MissingExtra:
        return markup.NOTHING
    except (ReplayError, OSError) as error:
        return markup.element("em", markup.text(error))


def _total_reward(episode: Episode) -> Html:
    if len(episode) > MOST_STEPS:
        return markup.text("not summed")
    return _guarded(lambda: markup.text(f"{episode.total_reward:.6g}"))


def _field(episode: Episode, name: str) -> Html:
    with np.printoptions(threshold=8, edgeitems=3, precision=4):
        said = str(episode[name])
    return markup.text(said if len(said) <= MOST_TEXT else f"{said[: MOST_TEXT - 3]}...")


def _strip(episode: Episode, schema: Schema) -> Html:
    leaves = {path: leaf for path, leaf in schema.step_leaves.items() if is_image(leaf)}
    path = next(iter(leaves), None)
    if path is None or leaves[path].row_bytes > MOST_BYTES // FRAMES:
        return markup.NOTHING
    at = spread(len(episode), FRAMES)
    frames = np.concatenate([episode.rows(path, t, t + 1) for t in at])
    return markup.image(png(strip(smaller(as_images(frames), WIDEST))), f"{path} of {len(at)} steps")
