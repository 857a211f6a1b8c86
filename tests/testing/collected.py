"""A store that two writers append to in turn, its model, and what plain loops over the model say of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diskreplay import Field, Schema, Store
from diskreplay.testing.model import ModelEpisode, ModelStore

SCHEMA = Schema(
    obs=Field((1,), "float32"),
    action=Field((), "int64"),
    extra={"serial": Field((), "int64"), "value": Field((), "float32"), "bonus": Field((), "float64")},
    episode={"seed": Field((), "int64"), "task": {"name": Field((3,), "uint8"), "weight": Field((), "float32")}},
)
LANES = (2, None)


class Collected:
    """A store and its model; each step's `serial` tells it from all others.

    Serials count the steps in the order of their times: by the call that published them and, of one call, by lane.
    """

    def __init__(self, store: Store, rng: np.random.Generator) -> None:
        self.store, self.model, self._rng, self._serial = store, ModelStore(), rng, 0
        self._writers = [(store.writer(num_envs=n), self.model.writer(n)) for n in LANES]
        self._at: dict[int, int] = {}  # ids by serial, of all that was ever seen
        self._obs = {() if n is None else (n,): np.zeros((1,) if n is None else (n, 1), "f4") for n in LANES}

    def append(self, steps: int) -> None:
        """Append so many steps to each lane; some end episodes, and give values of these or not."""
        for _ in range(steps):
            for pair, lanes in zip(self._writers, LANES, strict=True):
                self._append(pair, () if lanes is None else (lanes,))
        self.refresh()

    def _append(self, pair: tuple[Any, Any], shape: tuple[int, ...]) -> None:
        rng, lanes = self._rng, max(shape, default=1)
        ends, cut = rng.random(shape) < 0.06, rng.random(shape) < 0.03
        serial = self._serial + np.arange(lanes).reshape(shape)
        self._serial += lanes
        obs, after = self._obs[shape], rng.standard_normal((*shape, 1)).astype("f4")
        self._obs[shape] = after
        task = {"name": rng.integers(0, 255, (*shape, 3), np.uint8), "weight": rng.random(shape).astype("f4")}
        given = rng.random() > 0.3 and (ends | cut).any()
        values = {"seed": serial * 7, "task": task} if given else None
        extra = {"serial": serial, "value": serial * 0.0, "bonus": rng.random(shape)}
        reward = rng.standard_normal(shape).astype("f4")
        next_obs = after if rng.random() < 0.3 else None
        priority = np.where(rng.random(shape) < 0.4, np.nan, rng.normal(0, 3, shape))
        priority = priority if shape else None if np.isnan(priority) else float(priority)
        for writer in pair:
            writer.append(obs, serial, reward, ends, cut & ~ends, next_obs, episode=values, priority=priority, **extra)

    def refresh(self) -> None:
        """Follow the store."""
        self.store.refresh()
        for episode in self.store.episodes:
            self._at |= zip(episode["serial"].tolist(), episode.ids.tolist(), strict=True)

    def trim(self, capacity: int) -> None:
        """Hide of the model what the store's capacity hides, if it is full: the oldest."""
        if len(self.store) == capacity:
            self.model.trim(capacity, {serial: serial for serial in range(self._serial)})

    def ids(
        self, starts: Callable[[ModelEpisode], list[int]], counts: Callable[[ModelEpisode], bool] = lambda episode: True
    ) -> list[int]:
        """List the ids of these steps of the model's episodes that count, oldest first."""
        chosen = [e for e in self.model.episodes if counts(e)]
        serials = {int(e.steps[t].extra["serial"]) for e in chosen for t in starts(e)}
        return [self._at[serial] for serial in sorted(serials)]

    def facts(self, gamma: float, weights: Mapping[str, float] | None = None, discount: str | None = None) -> Any:
        """Return what is known of each visible step, by its id: a dict of fields, and its place in its episode."""
        visible = {
            int(step.extra["serial"]): (episode, t)
            for episode in self.model.episodes
            for t, step in enumerate(episode.steps)
            if t >= episode.hidden
        }
        newest_first = sorted(visible, reverse=True)
        found = {}
        for age, serial in enumerate(newest_first):
            episode, t = visible[serial]
            values = episode.values if episode.ended else {}
            fields = {
                "step": t,
                "priority": np.nan if episode.steps[t].priority is None else episode.steps[t].priority,
                "age": age,
                "return_to_go": _return(episode, t, 1.0, weights, None),
                "discounted_return_to_go": _return(episode, t, gamma, weights, discount),
                "episode_known": bool(values),
                "episode/seed": values.get("seed", np.int64(0)),
                "episode/task/name": values.get("task/name", np.zeros(3, np.uint8)),
                "episode/task/weight": values.get("task/weight", np.float32(0)),
            }
            found[self._at[serial]] = fields
        return found

    def close(self) -> None:
        """Close the writers, which cuts what is open."""
        for pair in self._writers:
            for writer in pair:
                writer.close()
        self.refresh()


def _return(
    episode: ModelEpisode, t: int, gamma: float, weights: Mapping[str, float] | None, discount: str | None
) -> np.float32:
    total = 0.0
    for step in reversed(episode.steps[t:]):
        numbers = {"reward": step.reward, **step.extra}
        reward = sum(float(numbers[name]) * weight for name, weight in (weights or {"reward": 1.0}).items())
        total = reward + gamma * (1.0 if discount is None else float(numbers[discount])) * total
    return np.float32(total)
