"""Plans of episodes and writers, and functions that make the planned calls with random arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from diskreplay.schema.schema import Field, Schema
from diskreplay.testing.nested import pick

When = Literal["never", "always", "sometimes"]


@dataclass(frozen=True)
class EpisodePlan:
    """The plan of one episode: its length, its end, and how it is appended.

    - `end`: "terminated", "truncated", "both", "cut" or "open".
    - `final`: whether the final observation is given.
    - `breaks`: whether one `next_obs`, in the middle of the episode, differs from the observation of the next step.
    - `whole`: whether one call of `append_episode` appends all steps.
    - `values`: whether the episode fields have values.
    """

    steps: int
    end: str = "terminated"
    final: bool = True
    breaks: bool = False
    whole: bool = False
    values: bool = False


@dataclass(frozen=True)
class WriterPlan:
    """The plan of one writer: the episodes of each lane, and how the writer is called.

    - `next_obs`, `priority`: whether calls of `append` have these arguments: "never", "always" or "sometimes".
    - `masked`: whether some calls skip random lanes.
    - `close`: whether the writer is closed at the end.
    """

    num_envs: int | None
    lanes: tuple[tuple[EpisodePlan, ...], ...]
    next_obs: When = "always"
    masked: bool = False
    close: bool = True
    seed: int = 0
    priority: When = "never"


def random_values(tree: Any, rng: np.random.Generator, leading: tuple[int, ...] = ()) -> Any:
    """Return random arrays for a tree of fields; some floats are NaN, infinite or the largest number.

    The axes in `leading` precede the shape of each field.
    """
    if isinstance(tree, tuple):
        return tuple(random_values(child, rng, leading) for child in tree)
    if isinstance(tree, dict):
        return {key: random_values(child, rng, leading) for key, child in tree.items()}
    shape, dtype = leading + tree.shape, tree.dtype
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return rng.integers(bounds.min, bounds.max, shape, dtype=dtype, endpoint=True)
    values = np.asarray(rng.standard_normal(shape)).astype(dtype)
    odd = np.asarray([np.nan, np.inf, -0.0, np.finfo(dtype).max], dtype)
    return np.where(rng.random(shape) < 0.02, rng.choice(odd, shape), values).astype(dtype)


def random_rewards(field: Field, rng: np.random.Generator, count: int) -> np.ndarray:
    values = rng.normal(0, 8, count) * (rng.random(count) < 0.7)
    return (np.abs(values) if field.dtype.kind == "u" else values).astype(field.dtype)


@dataclass
class Script:
    """One planned episode with its arrays. `obs` has one row more than the episode has steps."""

    plan: EpisodePlan
    obs: Any
    action: Any
    reward: np.ndarray
    extra: dict[str, Any]
    values: dict[str, Any]

    def flags(self, t: int) -> tuple[bool, bool]:
        last = t == self.plan.steps - 1
        return last and self.plan.end in ("terminated", "both"), last and self.plan.end in ("truncated", "both")

    def row(self, t: int) -> dict[str, Any]:
        broken = self.plan.breaks and t == self.plan.steps // 2 - 1
        return {
            "obs": pick(self.obs, t),
            "next_obs": pick(self.obs, self.plan.steps if broken else t + 1),
            "action": pick(self.action, t),
            "reward": self.reward[t],
            "flags": self.flags(t),
            "extra": pick(self.extra, t),
        }


def script(schema: Schema, plan: EpisodePlan, rng: np.random.Generator, first_serial: int) -> Script:
    """Return a planned episode with random arrays. The field "serial" numbers the steps from `first_serial` on."""
    extra = random_values(schema.extra, rng, (plan.steps,))
    if "serial" in extra:
        extra["serial"] = np.arange(first_serial, first_serial + plan.steps)
    obs, action = random_values(schema.obs, rng, (plan.steps + 1,)), random_values(schema.action, rng, (plan.steps,))
    rewards = random_rewards(schema.reward, rng, plan.steps)
    return Script(plan, obs, action, rewards, extra, random_values(schema.episode, rng) if plan.values else {})


def play(plan: WriterPlan, schema: Schema, writers: Sequence[Any], first_serial: int = 0) -> int:
    """Make the planned calls on each of ``writers``, for example on a `ModelWriter` and a real writer.

    Return the first unused serial number.
    """
    rng = np.random.default_rng(plan.seed)
    lanes: list[list[Script]] = []
    for episodes in plan.lanes:
        lanes.append([])
        for episode in episodes:
            lanes[-1].append(script(schema, episode, rng, first_serial))
            first_serial += episode.steps
    calls = _calls(plan, lanes[0], rng) if plan.num_envs is None else _vector_calls(plan, schema, lanes, rng)
    for verb, args, kwargs in calls:
        for writer in writers:
            getattr(writer, verb)(*args, **kwargs)
    if plan.close:
        for writer in writers:
            writer.close()
    return first_serial


Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def _given(when: When, rng: np.random.Generator) -> bool:
    return when == "always" or (when == "sometimes" and bool(rng.random() < 0.5))


def _calls(plan: WriterPlan, scripts: list[Script], rng: np.random.Generator) -> Iterator[Call]:
    for script in scripts:
        if script.plan.whole:
            yield _whole(script, (), _priorities(plan, rng, script.plan.steps))
            continue
        for t in range(script.plan.steps):
            row = script.row(t)
            given = script.plan.final if any(row["flags"]) else _given(plan.next_obs, rng)
            ending = {"episode": script.values} if any(row["flags"]) and script.values else {}
            following = {"next_obs": row["next_obs"] if given else None, **_priorities(plan, rng)}
            yield (
                "append",
                (row["obs"], row["action"], row["reward"], *row["flags"]),
                {
                    **following,
                    **ending,
                    **row["extra"],
                },
            )
        if script.plan.end == "cut":
            final = pick(script.obs, script.plan.steps) if script.plan.final else None
            yield "end_episode", (), {"final_obs": final, "episode": script.values or None}
        if rng.random() < 0.1:
            yield "flush", (), {}


def random_priorities(rng: np.random.Generator, count: int | None = None) -> Any:
    return rng.normal(0, 8, count) * (rng.random(count) < 0.8)


def _priorities(plan: WriterPlan, rng: np.random.Generator, count: int | None = None) -> dict[str, Any]:
    return {"priority": random_priorities(rng, count)} if _given(plan.priority, rng) else {}


def _whole(script: Script, lane: tuple[int, ...], priorities: dict[str, Any]) -> Call:
    flags = dict(zip(("terminated", "truncated"), script.flags(script.plan.steps - 1), strict=True))
    obs = script.obs if script.plan.final else pick(script.obs, slice(script.plan.steps))
    kwargs = {**flags, "episode": script.values or None, **priorities, **script.extra}
    return "append_episode", (*lane, obs, script.action, script.reward), kwargs


def _vector_calls(
    plan: WriterPlan, schema: Schema, lanes: list[list[Script]], rng: np.random.Generator
) -> Iterator[Call]:
    width, at = len(lanes), [0] * len(lanes)
    while any(lanes):
        for i, scripts in enumerate(lanes):
            while at[i] == 0 and scripts and scripts[0].plan.whole:
                whole = scripts.pop(0)
                yield _whole(whole, (i,), _priorities(plan, rng, whole.plan.steps))
        mask = np.array([bool(scripts) and not (plan.masked and rng.random() < 0.3) for scripts in lanes])
        row = _random_row(schema, width, rng)
        done, cut = [], np.zeros(width, bool)
        for i in np.flatnonzero(mask).tolist():
            script = lanes[i][0]
            _put(row, i, script.row(at[i]))
            at[i] += 1
            if at[i] == script.plan.steps:
                done.append(lanes[i].pop(0))
                at[i], cut[i] = 0, script.plan.end == "cut"
        given = _given(plan.next_obs, rng)
        values = {"episode": random_values(schema.episode, rng, (width,))} if any(s.plan.values for s in done) else {}
        priorities = _priorities(plan, rng, width)
        for array in priorities.values():
            array[rng.random(width) < 0.3] = np.nan
        yield (
            "append",
            (row["obs"], row["action"], row["reward"], *row["flags"]),
            {
                "next_obs": row["next_obs"] if given else None,
                "mask": None if mask.all() else mask,
                **values,
                **priorities,
                **row["extra"],
            },
        )
        if cut.any():
            # If next_obs was given, the episode has a final observation already.
            final = row["next_obs"] if given or rng.random() < 0.5 else None
            yield "end_episode", (), {"final_obs": final, "mask": cut, **values}
        if rng.random() < 0.05:
            yield "flush", (), {}


def _random_row(schema: Schema, width: int, rng: np.random.Generator) -> dict[str, Any]:
    trees = {"obs": schema.obs, "next_obs": schema.obs, "action": schema.action, "extra": schema.extra}
    row: dict[str, Any] = {name: random_values(tree, rng, (width,)) for name, tree in trees.items()}
    row["reward"] = random_rewards(schema.reward, rng, width)
    row["flags"] = (np.zeros(width, bool), np.zeros(width, bool))
    return row


def _put(rows: Any, index: int, row: Any) -> None:
    items = rows.items() if isinstance(rows, dict) else enumerate(rows)
    for key, below in items:
        if isinstance(below, np.ndarray):
            below[index] = row[key]
        else:
            _put(below, index, row[key])
