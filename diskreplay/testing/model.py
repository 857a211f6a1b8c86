"""A model of a store in plain lists. After the same calls, the model has the episodes that the store must have.

The model is slow, and shares no code with the store that it is compared with. Lanes hold episodes, episodes hold steps,
and steps hold arrays. Make the same calls on a `ModelWriter` and on a writer of a store. Then compare the model and the
store with the functions of `checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diskreplay.testing.nested import Flat, flat, pick, same_values


@dataclass
class ModelStep:
    obs: Flat
    action: Flat
    reward: float
    extra: Flat
    priority: float | None = None


@dataclass(eq=False)
class ModelEpisode:
    """Consecutive steps of a lane.

    - `final`: the observation after the last step; None: unknown. An open episode may have a final observation, too.
    - `derived`: True if no row marks the end of the episode. Readers see such an end when another episode follows in
      the lane, or when the segment is sealed.
    - `hidden`: the number of the episode's oldest steps that the store's capacity hides.
    - `evicted`, `discarded`: whether the episode was evicted or discarded. No step of such an episode is visible.
    - `before`: the episode that this episode continues. `before` was cut because its segment was full.
    - `shows_before`: whether the rows of `before` can be read.
    - `left_behind`: True if the episode was cut because its segment was full, and can still be continued.
    """

    writer: int = 0
    lane: int = 0
    steps: list[ModelStep] = field(default_factory=list)
    final: Flat | None = None
    ended: bool = False
    terminated: bool = False
    truncated: bool = False
    cut: bool = False
    derived: bool = False
    values: Flat = field(default_factory=dict)
    hidden: int = 0
    evicted: bool = False
    discarded: bool = False
    before: ModelEpisode | None = None
    shows_before: bool = False
    left_behind: bool = False

    def __len__(self) -> int:
        return 0 if self.evicted or self.discarded else len(self.steps) - self.hidden

    @property
    def num_frames(self) -> int:
        return len(self.steps) + (self.final is not None)

    def frame(self, t: int) -> Flat:
        """Return the observation of step `t`; `t = len(steps)` is the final observation.

        If the rows of `before` can be read, a negative `t` counts back from the end of `before`. Otherwise a negative
        `t` stands for 0.
        """
        if t < 0 and self.before is not None and self.shows_before:
            return self.before.frame(t + len(self.before.steps))
        t = max(t, 0)
        if t == len(self.steps) and self.final is not None:
            return self.final
        return self.steps[t].obs

    @property
    def window_end(self) -> int:
        """The number of the episode's steps that windows may contain.

        The last step is left out if it did not terminate the episode, and no observation after this step is known.
        """
        return len(self.steps) if self.terminated or self.final is not None else len(self.steps) - 1

    def sampleable(self, n_step: int | None) -> list[int]:
        """Return the possible first steps of n-step transitions; `n_step=None`: transitions to the episode's end."""
        if self.ended:
            return list(range(self.hidden, self.window_end))
        return [] if n_step is None else list(range(self.hidden, self.num_frames - n_step))

    def end(self, *, terminated: bool = False, truncated: bool = False, cut: bool = False) -> None:
        self.ended, self.terminated, self.truncated, self.cut = True, terminated, truncated or cut, cut

    def split(self, at: int, *, final: bool = True) -> ModelEpisode:
        """Cut the episode before step `at`, as a writer does if its segment is full.

        Return the steps from `at` on as a new episode. With `final`, the observation of step `at` becomes the final
        observation of the cut episode.
        """
        rest = ModelEpisode(**{**self.__dict__, "steps": self.steps[at:], "before": self})
        self.final = self.steps[at].obs if final else None
        self.steps, self.values, self.derived = self.steps[:at], {}, not final
        self.end(cut=True)
        return rest

    def show_end(self, seen: bool) -> None:
        """If no row marks the end of the episode, show the end to readers if `seen` is true, else hide the end."""
        if self.derived:
            self.ended = self.cut = self.truncated = seen


class ModelLane:
    """One environment's stream of steps, with the rules for continuing, ending and cutting episodes."""

    def __init__(self, writer: int = 0, lane: int = 0) -> None:
        self.writer, self.lane = writer, lane
        self.episodes: list[ModelEpisode] = []
        self.discontinuities = 0
        self.closed = False

    @property
    def open(self) -> ModelEpisode | None:
        last = self.episodes[-1] if self.episodes else None
        return None if last is None or last.ended or last.derived else last

    def show_ends(self) -> None:
        """Show ends that no row marks if the lane is closed or another episode follows, else hide them."""
        for i, episode in enumerate(self.episodes):
            episode.show_end(self.closed or i < len(self.episodes) - 1)

    def append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: bool,
        truncated: bool = False,
        next_obs: Any = None,
        episode: Mapping[str, Any] | None = None,
        priority: float | None = None,
        **extra: Any,
    ) -> ModelStep:
        """Append a step, and return it. If `obs` differs from the previous `next_obs`, cut the open episode first."""
        seen = flat(obs, "obs")
        current = self.open
        if current is not None and current.final is not None:
            if same_values(current.final, seen):
                seen = current.final  # equal values may have different bytes, and a store keeps the bytes of `next_obs`
            else:
                self.discontinuities += 1
                current.end(cut=True)
                current = None
        if current is None:
            last = self.episodes[-1] if self.episodes else None
            continues = last is not None and last.left_behind and (last.final is None or same_values(last.final, seen))
            self._forget_left_behind()
            current = ModelEpisode(self.writer, self.lane, before=last if continues else None)
            self.episodes.append(current)
            self.show_ends()
        given = None if priority is None or np.isnan(priority) else abs(float(priority))
        step = ModelStep(seen, flat(action, "action"), np.asarray(reward).item(), _by_name(extra), given)
        current.steps.append(step)
        current.final = None if next_obs is None else flat(next_obs, "obs")
        if terminated or truncated:
            current.values = _by_name(episode or {})
            current.end(terminated=bool(terminated), truncated=bool(truncated))
        return step

    def append_episode(
        self,
        obs: Any,
        action: Any,
        reward: Sequence[float],
        *,
        terminated: bool,
        truncated: bool = False,
        episode: Mapping[str, Any] | None = None,
        priority: Any = None,
        **extra: Any,
    ) -> None:
        """Cut the open episode, and append a whole episode. The new episode is cut if it has no end flag."""
        self.end_episode()
        length = len(reward)
        frames = len(next(iter(flat(obs, "obs").values())))
        for t in range(length):
            last = t == length - 1
            self.append(
                pick(obs, t),
                pick(action, t),
                reward[t],
                terminated and last,
                truncated and last,
                pick(obs, t + 1) if t + 1 < frames else None,
                episode if last else None,
                None if priority is None else priority[t],
                **pick(extra, t),
            )
        self.end_episode(episode=episode)

    def end_episode(self, final_obs: Any = None, episode: Mapping[str, Any] | None = None) -> None:
        """Cut the open episode, if there is one. If the episode has a final observation, `final_obs` is ignored."""
        current = self.open
        if current is not None:
            if current.final is None and final_obs is not None:
                current.final = flat(final_obs, "obs")
            current.values = _by_name(episode or {})
            current.end(cut=True)
            self.show_ends()
        self._forget_left_behind()

    def discard_episode(self) -> None:
        current = self.open
        if current is None and self.episodes and self.episodes[-1].left_behind:
            current = self.episodes[-1]
        self.end_episode()
        while current is not None:
            current.discarded, current = True, current.before

    def _forget_left_behind(self) -> None:
        for episode in self.episodes[-1:]:
            episode.left_behind = False

    def close(self) -> None:
        self.end_episode()
        self.closed = True
        self.show_ends()


class ModelWriter:
    """The model of a writer of `num_envs` lanes.

    If `num_envs` is None, the writer has one lane, and its arguments have no axis of lanes.
    """

    def __init__(self, number: int = 0, num_envs: int | None = None) -> None:
        self.number, self.num_envs = number, num_envs
        self.lanes = [ModelLane(number, lane) for lane in range(num_envs or 1)]

    @property
    def episodes(self) -> list[ModelEpisode]:
        return [episode for lane in self.lanes for episode in lane.episodes]

    def append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any = False,
        next_obs: Any = None,
        mask: Any = None,
        episode: Mapping[str, Any] | None = None,
        priority: Any = None,
        **extra: Any,
    ) -> None:
        """Append one step to every lane that has True in `mask`; None: to all lanes."""
        if self.num_envs is None:
            self.lanes[0].append(obs, action, reward, terminated, truncated, next_obs, episode, priority, **extra)
            return
        terminated, truncated = (np.broadcast_to(flag, self.num_envs) for flag in (terminated, truncated))
        for i, lane in enumerate(self.lanes):
            if mask is None or mask[i]:
                following = None if next_obs is None else pick(next_obs, i)
                values = None if episode is None else pick(episode, i)
                flags = terminated[i], truncated[i]
                row = pick(obs, i), pick(action, i), pick(reward, i)
                lane.append(
                    *row, *flags, following, values, None if priority is None else priority[i], **pick(extra, i)
                )

    def append_episode(self, *args: Any, **kwargs: Any) -> None:
        """Append a whole episode. If the writer has `num_envs`, the first argument is the index of a lane."""
        lane, args = (0, args) if self.num_envs is None else (args[0], args[1:])
        self.lanes[lane].append_episode(*args, **kwargs)

    def end_episode(self, final_obs: Any = None, mask: Any = None, episode: Mapping[str, Any] | None = None) -> None:
        if self.num_envs is None:
            self.lanes[0].end_episode(final_obs, episode)
            return
        for i, lane in enumerate(self.lanes):
            if mask is None or mask[i]:
                final, values = (None if x is None else pick(x, i) for x in (final_obs, episode))
                lane.end_episode(final, values)

    def discard_episode(self, mask: Any = None) -> None:
        for i, lane in enumerate(self.lanes):
            if mask is None or mask[i]:
                lane.discard_episode()

    def flush(self) -> None:
        """Do nothing: the model has no disk."""

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()


class ModelStore:
    def __init__(self) -> None:
        self.writers: list[ModelWriter] = []
        self._frontier = -1

    def writer(self, num_envs: int | None = None) -> ModelWriter:
        self.writers.append(ModelWriter(len(self.writers), num_envs))
        return self.writers[-1]

    def lanes(self) -> Iterator[ModelLane]:
        for writer in self.writers:
            yield from writer.lanes

    @property
    def episodes(self) -> list[ModelEpisode]:
        return [episode for writer in self.writers for episode in writer.episodes if len(episode)]

    def __len__(self) -> int:
        return sum(len(episode) for episode in self.episodes)

    @property
    def inserted(self) -> int:
        return sum(len(episode.steps) for lane in self.lanes() for episode in lane.episodes)

    def trim(self, capacity: int, order: Mapping[int, int], key: str = "serial") -> None:
        """Hide the oldest steps of the episodes that were not evicted, so that at most `capacity` steps are visible.

        `order` maps a step's value of the extra field `key` to the step's id: the oldest step has the lowest id. If
        `evict` later evicts other episodes, a hidden step stays hidden.
        """
        left = [episode for writer in self.writers for episode in writer.episodes if not episode.evicted]
        ranked = sorted(order[int(step.extra[key])] for episode in left for step in episode.steps)
        if len(ranked) > capacity:
            self._frontier = max(self._frontier, ranked[-capacity])
        for episode in left:
            episode.hidden = sum(order[int(step.extra[key])] < self._frontier for step in episode.steps)

    def evict(self, chosen: Callable[[ModelEpisode], bool]) -> int:
        """Evict the episodes for which `chosen` returns true. Return the number of their steps, also hidden steps."""
        leaving = [episode for episode in self.episodes if chosen(episode)]
        for episode in leaving:
            episode.evicted = True
        return sum(len(episode.steps) for episode in leaving)


def _by_name(values: Mapping[str, Any]) -> Flat:
    return {leaf: x for name, value in values.items() for leaf, x in flat(value, name).items()}
