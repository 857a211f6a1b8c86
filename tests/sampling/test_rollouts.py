"""Rollouts of stores that are written meanwhile: each step once, in order, with the advantages of a plain loop."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import diskreplay as dr

FLOAT = dr.Field((), "float32")
SCHEMA = dr.Schema(
    obs=dr.Field((2,), "float64"),
    action=dr.Field((), "int64"),
    extra={"value": FLOAT, "following": FLOAT, "bonus": dr.Field((), "float64")},
)
GAMMA, LAMBDA = 0.9, 0.8


def value_of(obs: Any) -> Any:
    """The value function of these tests; 0 for no observation that is ever seen."""
    return 0.25 * obs[..., 0] + 3


class Source:
    """A sampler of rollouts that keeps what its value function was called with."""

    def __init__(self, store: Any, view: dr.Rollouts, **kwargs: Any) -> None:
        self.view, self.calls = view, list[torch.Tensor]()
        called = view if view.value_fn is None else replace(view, value_fn=self._value)
        self.sample = dr.Sampler(store, called, debug=True, **kwargs).sample

    def _value(self, obs: torch.Tensor) -> Any:
        assert not torch.is_grad_enabled()
        self.calls.append(obs.clone())
        return self.view.value_fn(obs)


# --- a collector whose every step is remembered ----------------------------------------------------------------------


@dataclass
class Step:
    """What was appended, and what is known to follow it."""

    serial: int
    obs: np.ndarray
    reward: float
    value: float
    following: float
    terminated: bool = False
    truncated: bool = False
    next_obs: np.ndarray | None = None  # where the store knows it
    next: Step | None = None  # of the same episode, however often that was cut for its length
    ended: bool = False
    given: bool = False


@dataclass
class Lane:
    """One environment: its steps in order, and the observation it is at."""

    rng: np.random.Generator
    steps: list[Step] = field(default_factory=list)
    obs: np.ndarray | None = None

    @property
    def open(self) -> Step | None:
        return self.steps[-1] if self.steps and not self.steps[-1].ended else None

    def act(self, serial: int, with_next: bool, ends: tuple[float, float], seen: bool) -> tuple[Step, np.ndarray]:
        """Make a step and the observation it leads to; with `seen` it is truncated only if that is recorded."""
        before = self.open
        obs = self.rng.standard_normal(2) if before is None or self.obs is None else self.obs
        numbers = self.rng.standard_normal(3).astype(np.float32).tolist()
        terminated, truncated = (self.rng.random(2) < ends).tolist()
        step = Step(serial, obs, *numbers, terminated, truncated and (with_next or not seen))
        if before is not None:
            before.next, before.next_obs = step, obs
        following = self.rng.standard_normal(2)
        step.ended = step.terminated or step.truncated
        step.next_obs = following if with_next else None
        self.steps.append(step)
        self.obs = None if step.ended else following
        return step, following

    def cut(self, final: np.ndarray | None) -> None:
        if self.open is not None:
            if self.open.next_obs is None:
                self.open.next_obs = final
            self.open.ended = True


class Collector:
    """A writer, vector or not, that steps a random selection of its lanes.

    With `seen` it records the final observation of each episode that it truncates or cuts, unless it closes.
    """

    serials = 0

    def __init__(
        self,
        store: Any,
        num_envs: int | None,
        seed: int,
        ends: tuple[float, float],
        cuts: float,
        segment: Any = None,
        seen: bool = False,
    ) -> None:
        self.segment_an_episode, self.seen = segment == "episode", seen
        self.writer, self.num_envs = store.writer(num_envs), num_envs
        self.rng = np.random.default_rng(seed)
        self.lanes = [Lane(self.rng) for _ in range(num_envs or 1)]
        self.ends, self.cuts = ends, cuts
        self.closed = False

    @property
    def lanes_known(self) -> list[Lane]:
        """The lanes that a reader knows of: all from the first step, or each from its own, with its first segment."""
        if self.segment_an_episode:
            return [lane for lane in self.lanes if lane.steps]
        return self.lanes if any(lane.steps for lane in self.lanes) else []

    def step(self) -> None:
        mask = self.rng.random(len(self.lanes)) < (1 if self.num_envs is None else 0.8)
        # What the store knows of the next observation cannot be unknown to one lane alone.
        with_next = bool(self.rng.random() < 0.5)
        rows, following = [], []
        for lane, chosen in zip(self.lanes, mask, strict=True):
            if chosen:
                Collector.serials += 1
                step, after = lane.act(Collector.serials, with_next, self.ends, self.seen)
            else:
                step, after = Step(0, np.zeros(2), 0, 0, 0), np.zeros(2)
            rows.append(step)
            following.append(after)
        if not mask.any():
            return
        columns = [
            np.array([getattr(s, name) for s in rows])
            for name in ("obs", "serial", "reward", "terminated", "truncated", "value", "following")
        ]
        obs, serial, reward, terminated, truncated, value, after = columns
        extra = {"value": value.astype("f4"), "following": after.astype("f4"), "bonus": np.sin(serial)}
        next_obs = np.array(following) if with_next else None
        if self.num_envs is None:
            obs, serial, reward, terminated, truncated = (column[0] for column in columns[:5])
            extra = {name: column[0] for name, column in extra.items()}
            next_obs = None if next_obs is None else next_obs[0]
            self.writer.append(obs, serial, reward, terminated, truncated, next_obs, **extra)
        else:
            self.writer.append(obs, serial, reward, terminated, truncated, next_obs, mask, **extra)
        if self.rng.random() < self.cuts:
            self.cut(self.seen or self.rng.random() < 0.5)

    def cut(self, final: bool) -> None:
        finals = np.array([lane.obs if lane.open else np.zeros(2) for lane in self.lanes])
        self.writer.end_episode((finals[0] if self.num_envs is None else finals) if final else None)
        for lane, obs in zip(self.lanes, finals, strict=True):
            lane.cut(obs if final else None)

    def close(self) -> None:
        self.writer.close()
        self.closed = True
        for lane in self.lanes:
            lane.cut(None)


def can_be_given(step: Step, view: dr.Rollouts) -> bool:
    """Whether a step is ever part of a rollout: not the last one where a value_fn lacks the observation behind it."""
    return view.value_fn is None or view.next_value is not None or step.terminated or step.next_obs is not None


def check(batch: dr.Batch, collectors: list[Collector], view: dr.Rollouts) -> None:
    """Compare a rollout with what was appended, and mark its steps as given."""
    fields = batch.numpy()
    steps = view.num_steps
    expected_lanes = []
    for collector in collectors:
        for lane in collector.lanes_known:
            left = [s for s in lane.steps if not s.given and can_be_given(s, view)]
            if not collector.closed or len(left) >= steps:
                expected_lanes.append(left[:steps])
    assert fields["action"].T.tolist() == [[s.serial for s in column] for column in expected_lanes]
    for n, column in enumerate(expected_lanes):
        behind = 0.0
        for t in reversed(range(steps)):
            step = column[t]
            chained = t + 1 < steps and step.next is column[t + 1]
            if step.terminated:
                following = 0.0
            elif not chained and view.value_fn is not None and step.next_obs is not None:
                following = float(value_of(step.next_obs))
            elif view.next_value is not None:
                following = step.following
            else:
                following = step.next.value
            gamma = GAMMA if view.discount is None else GAMMA * np.sin(step.serial)
            delta = step.reward + gamma * following - step.value
            behind = delta + (gamma * LAMBDA * behind if chained else 0.0)
            assert fields["advantage"][t, n] == pytest.approx(behind, rel=1e-5, abs=1e-6)
            assert fields["ret"][t, n] == pytest.approx(behind + step.value, rel=1e-5, abs=1e-6)
            assert fields["value"][t, n] == np.float32(step.value)
            assert fields["reward"][t, n] == np.float32(step.reward)
            assert fields["obs"][t, n].tolist() == step.obs.tolist()
            assert fields["terminated"][t, n] == step.terminated
            if t + 1 < steps:
                assert fields["truncated"][t, n] == (step.truncated or not (chained or step.terminated))
            elif step.truncated or step.next is not None:
                assert fields["truncated"][t, n] == step.truncated
            step.given = True


VIEWS = {
    "stored": dr.Rollouts(3, GAMMA, LAMBDA),
    "field": dr.Rollouts(3, GAMMA, LAMBDA, next_value="following"),
    "function": dr.Rollouts(3, GAMMA, LAMBDA, value_fn=value_of),
    "both": dr.Rollouts(3, GAMMA, LAMBDA, value_fn=value_of, next_value="following"),
    "discounted": dr.Rollouts(3, GAMMA, LAMBDA, value_fn=value_of, next_value="following", discount="bonus"),
}


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize("kind", VIEWS)
@settings(max_examples=10)
@given(
    st.lists(st.none() | st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from((None, 4, 9, "episode")),
    st.integers(0, 2**32 - 1),
)
@example([2], "episode", 299)  # a rollout is taken before the second lane's first step
def test_every_step_is_given_once_with_its_advantage(kind: str, writers: list[Any], segment: Any, seed: int) -> None:
    view, rng = VIEWS[kind], np.random.default_rng(seed)
    # A truncation or a cut without a value behind it is refused: see below.
    ends, cuts = ((0.15, 0.0), 0.0) if kind == "stored" else ((0.1, 0.1), 0.05)
    with TemporaryDirectory() as folder, dr.create(Path(folder) / "s", SCHEMA, segment_steps=segment) as store:
        collectors = [
            Collector(store, n, int(rng.integers(1 << 32)), ends, cuts, segment, kind == "function") for n in writers
        ]
        with dr.open(store.path) as reader:
            source = Source(reader, view)
            for _ in range(60):
                collectors_left = [c for c in collectors if not c.closed]
                if collectors_left:
                    rng.choice(collectors_left).step()
                if kind != "stored" and rng.random() < 0.02 and collectors_left:
                    rng.choice(collectors_left).close()
                if rng.random() < 0.4:
                    attempt(source, by_first_segment(collectors))
            for collector in collectors:
                if kind == "stored":
                    finish(collector)
                collector.close()
            while attempt(source, by_first_segment(collectors)):
                pass
            for collector in collectors:
                for lane in collector.lanes:
                    assert sum(can_be_given(s, view) and not s.given for s in lane.steps) < view.num_steps


def by_first_segment(collectors: list[Collector]) -> list[Collector]:
    """Order collectors as the store does: by their first step."""
    return sorted(collectors, key=lambda c: min((lane.steps[0].serial for lane in c.lanes if lane.steps), default=0))


def finish(collector: Collector) -> None:
    """End all open episodes with terminated steps."""
    collector.ends = (1.0, 0.0)
    while any(lane.open for lane in collector.lanes):
        collector.step()


def attempt(source: Source, collectors: list[Collector]) -> bool:
    """Take a rollout if there is one; where there is none, a lane must lack steps."""
    try:
        batch = source.sample()
    except dr.NotEnoughData:
        left = [
            sum(can_be_given(s, source.view) and not s.given for s in lane.steps)
            for collector in collectors
            if not collector.closed
            for lane in collector.lanes_known
        ]
        # The newest step of a lane may wait for what follows it.
        assert not left or min(left) <= source.view.num_steps
        return False
    check(batch, collectors, source.view)
    return True


# --- one rule at a time ----------------------------------------------------------------------------------------------


def append(writer: Any, first: int, steps: int, end: str = "", known: bool = True) -> None:
    """Append numbered steps; the observation, the value and the field `following` tell the number too."""
    for serial in range(first, first + steps):
        last = serial == first + steps - 1
        writer.append(
            np.full(2, serial, float), serial, 1.0, last and end == "terminated", last and end == "truncated",
            np.full(2, serial + 1, float) if known else None, value=serial, following=-serial, bonus=0.5,
        )  # fmt: skip


def given(batch: dr.Batch) -> list[list[int]]:
    return batch.action.T.tolist()


@pytest.mark.parametrize("how", ["in few segments", "across segments", "sealed", "with a capacity"])
def test_the_rollouts_of_a_crowd_of_lanes_are_what_was_appended(tmp_store: Path, how: str) -> None:
    lanes, steps, num_steps = 700, 18, 6
    rng = np.random.default_rng(len(how))
    obs, following, final = rng.standard_normal((3, steps, lanes, 2))
    following[:-1] = obs[1:]
    action, bonus = rng.integers(0, 9, (steps, lanes)), rng.standard_normal((steps, lanes))
    reward, value = rng.standard_normal((2, steps, lanes)).astype("f4")
    terminated, truncated = rng.random((2, steps, lanes)) < 0.1
    ended = terminated | truncated
    following[ended] = final[ended]
    deltas = np.where(terminated, 0, value_of(following))
    stored_next = np.append(value[1:], value[-1:], axis=0).astype(float)
    shown_truncated = truncated & ~terminated
    if how == "sealed":
        shown_truncated[-1] = ~terminated[-1]  # by the writer that closed
    options = {"segment_steps": 7 * lanes if how == "across segments" else None}
    if how == "with a capacity":
        options["capacity"] = 7 * lanes
    view = dr.Rollouts(num_steps, GAMMA, LAMBDA, value_fn=value_of)
    with dr.create(tmp_store, SCHEMA, chunk_bytes=1 << 16, **options) as store:
        source, grids = (Source(store, view) if how != "sealed" else None), []
        with store.writer(num_envs=lanes) as writer:
            for t in range(steps):
                more = {"value": value[t], "following": value[t], "bonus": bonus[t]}
                ends = terminated[t], truncated[t] & ~terminated[t]
                writer.append(obs[t], action[t], reward[t], *ends, next_obs=following[t], **more)
                if source is not None and t % num_steps == num_steps - 1:
                    grids.append(source.sample())
        store.refresh()
        source = source or Source(store, view)
        while len(grids) < steps // num_steps:
            grids.append(source.sample())
        for number, batch in enumerate(grids):
            part = slice(number * num_steps, (number + 1) * num_steps)
            shown = {"obs": obs, "action": action, "reward": reward, "value": value, "terminated": terminated}
            for name, array in shown.items():
                np.testing.assert_array_equal(batch[name], array[part], name)
            stops = ended[part].copy()
            stops[-1] = True
            np.testing.assert_array_equal(batch["truncated"], shown_truncated[part], "truncated")
            after = np.where(stops, deltas[part], stored_next[part])
            run = np.zeros(lanes)
            for t in reversed(range(num_steps)):
                run = reward[part][t] + GAMMA * after[t] - value[part][t] + GAMMA * LAMBDA * np.where(stops[t], 0, run)
                np.testing.assert_allclose(batch["advantage"][t], run, rtol=1e-5, atol=1e-5)


def test_a_lane_that_is_too_short_is_named_and_nothing_is_given(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as one, store.writer(2) as two:
        source = Source(store, dr.Rollouts(4))
        with pytest.raises(dr.NotEnoughData, match="^the store has 0 steps, 0 of them sampleable as Rollouts"):
            source.sample()
        append(one, 0, 9)
        for t in range(4):
            numbers = np.full(2, t, "f4")
            mask = [True, t < 3]
            two.append(
                np.zeros((2, 2)), np.full(2, 100 + t), numbers, [False] * 2, [False] * 2, np.zeros((2, 2)), mask,
                value=numbers, following=numbers, bonus=numbers,
            )  # fmt: skip
        message = (
            "^lane 1 of writer 1 has 2 steps that were not given yet; 4 are needed of each lane, append more or clo"
        )
        for _ in range(2):
            with pytest.raises(dr.NotEnoughData, match=message):
                source.sample()
        two.close()
        # Its lanes have left: what they lack will never come.
        assert given(source.sample()) == [[0, 1, 2, 3]]
        assert given(source.sample()) == [[4, 5, 6, 7]]
        append(one, 9, 4)
        assert given(source.sample()) == [[8, 9, 10, 11]]


def test_a_truncation_without_a_value_behind_it_is_refused_until_there_is_one(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        append(writer, 0, 3, "truncated")
        append(writer, 3, 3)
        refused = Source(store, dr.Rollouts(4))
        message = "^step 2 was truncated, and the value of its next observation is not known: give Rollouts value_fn, "
        for _ in range(2):
            with pytest.raises(dr.ReplayError, match=f"{message}which computes it, or next_value, the name of a field"):
                refused.sample()
        behind = [1.0, 2.0, -2.0, 4.0]
        batch = Source(store, dr.Rollouts(4, 1.0, 0.0, next_value="following")).sample()
        assert (batch.ret.T - 1).tolist() == [[-0.0, -1.0, -2.0, -3.0]]
        source = Source(store, dr.Rollouts(4, 1.0, 0.0, value_fn=lambda obs: 10 * obs[:, :1]))
        assert (source.sample().ret.T - 1).tolist() == [[*behind[:2], 30.0, 40.0]]
        assert [call.tolist() for call in source.calls] == [[[3.0, 3.0], [4.0, 4.0]]]


def test_a_truncation_without_a_final_observation_is_refused_or_bootstraps_from_the_field(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        append(writer, 0, 3, "truncated", known=False)
        append(writer, 3, 4)
        refused = Source(store, dr.Rollouts(4, value_fn=lambda obs: obs[:, 0]))
        with pytest.raises(dr.ReplayError, match="^step 2 was truncated, .* value_fn .* next_value$"):
            refused.sample()
        both = Source(store, dr.Rollouts(4, 1.0, 0.0, value_fn=lambda obs: obs[:, 0], next_value="following"))
        batch = both.sample()
        assert given(batch) == [[0, 1, 2, 3]]
        assert batch.ret[2].item() - 1 == -2.0


@pytest.mark.parametrize("known", [{}, {"value_fn": lambda obs: obs[:, 0]}], ids=["nothing", "value_fn"])
def test_a_cut_that_nothing_is_known_behind_is_refused_or_left_out_where_the_lane_ends(
    tmp_store: Path, known: dict[str, Any]
) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        append(writer, 0, 4, known=False)
        writer.end_episode()
        source = Source(store, dr.Rollouts(3, 1.0, 0.0, **known))
        assert given(source.sample()) == [[0, 1, 2]]
        with pytest.raises(dr.NotEnoughData):
            source.sample()
        append(writer, 4, 4, known=False)
        for _ in range(2):
            with pytest.raises(dr.ReplayError, match="^step 3 was truncated, .* value_fn.* next_value"):
                source.sample()
        both = Source(store, dr.Rollouts(5, next_value="following", **known))
        batch = both.sample()
        assert given(batch) == [[0, 1, 2, 3, 4]]
        assert batch.truncated.T.tolist() == [[False, False, False, True, False]]


def test_a_terminated_step_has_nothing_behind_it_even_where_it_was_truncated_too(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        writer.append(np.zeros(2), 0, 2.0, True, True, np.ones(2), value=7.0, following=9.0, bonus=0.0)
        source = Source(store, dr.Rollouts(1, value_fn=lambda obs: obs[:, 0]))
        batch = source.sample()
        assert batch.ret.tolist() == [[2.0]]
        assert batch.advantage.tolist() == [[-5.0]]
        assert batch.terminated.item()
        assert batch.truncated.item()
        assert source.calls == []


def test_a_value_function_of_the_wrong_shape_is_refused_and_nothing_is_given(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        append(writer, 0, 3)
        source = Source(store, dr.Rollouts(2, value_fn=lambda obs: obs))
        message = "value_fn gave shape (1, 2) for 1 observations; it must be (1,) or (1, 1)"
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                source.sample()


def test_fields_stacks_and_weighted_rewards(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        append(writer, 0, 3, "terminated")
        append(writer, 3, 6)
        view = dr.Rollouts(6, frame_stack=3, reward={"reward": 2.0, "bonus": 4.0})
        batch = Source(store, view).sample()
        names = "obs action reward terminated truncated value advantage ret index following bonus"
        assert list(batch.keys()) == names.split()
        assert all(batch[name].shape[:2] == (6, 1) for name in batch)
        stacks = [[0, 0, 0], [0, 0, 1], [0, 1, 2], [3, 3, 3], [3, 3, 4], [3, 4, 5]]
        assert batch.obs[:, 0, :, 0].tolist() == stacks
        assert batch.reward.unique().tolist() == [4.0]
        assert list(Source(store, view, fields=("reward", "ret")).sample()) == ["reward", "ret", "index"]
        stacked = Source(store, dr.Rollouts(6, 1.0, 0.0, frame_stack=3, value_fn=lambda obs: obs.sum((1, 2))))
        assert (stacked.sample().ret[-1] - 1).item() == 2 * (4 + 5 + 6)


@pytest.mark.parametrize("fields", [None, ("bonus", "value"), ("value", "bonus"), ("bonus",), ("value",)])
def test_the_field_of_the_values_keeps_its_own_name_too(tmp_store: Path, fields: tuple[str, ...] | None) -> None:
    schema = dr.Schema(SCHEMA.obs, SCHEMA.action, extra={"bonus": FLOAT, "value": FLOAT})
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        for t in range(5):
            writer.append(np.zeros(2), t, 1.0, False, False, np.zeros(2), bonus=float(t), value=-1.0)
        sampler = dr.Sampler(store, dr.Rollouts(2, value="bonus"), fields=fields, debug=True)
        for first in (0, 2):
            batch = sampler.sample()
            for name in {"bonus", "value"}.intersection(batch):
                assert batch[name].T.tolist() == [[first, first + 1]]


def test_ids_and_observations_may_be_kept_anywhere(tmp_store: Path) -> None:
    """Ids may be every second number of an array, and a value function may keep its observations."""
    kept: list[torch.Tensor] = []
    view = dr.Rollouts(2, 1.0, 0.0, value_fn=lambda obs: (kept.append(obs), obs[:, 0])[1])
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        append(writer, 0, 5)
        sampler = dr.Sampler(store, view)
        ids = sampler.ids()[:4]
        shown = [sampler.gather(np.repeat(some, 2)[::2]) for some in (ids[:2], ids[2:])]
        assert [batch.action.T.tolist() for batch in shown] == [[[0, 1]], [[2, 3]]]
        assert [obs[:, 0].tolist() for obs in kept] == [[2.0], [4.0]]


def test_what_was_evicted_is_passed_over(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA, capacity=30, segment_steps=10) as store, store.writer() as writer:
        source = Source(store, dr.Rollouts(4))
        append(writer, 0, 6, "terminated")
        assert given(source.sample()) == [[0, 1, 2, 3]]
        for first in range(6, 96, 6):
            append(writer, first, 6, "terminated")
        store.refresh()
        oldest = int(store.episodes[0].action[0])
        assert len(store) == 30
        assert oldest > 4
        assert given(source.sample()) == [[oldest, oldest + 1, oldest + 2, oldest + 3]]
        while True:
            try:
                last = given(source.sample())[0]
            except dr.NotEnoughData:
                break
        assert last[-1] >= 92


def test_lanes_are_shared_by_rank(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store:
        collector = Collector(store, 5, 0, (0.0, 0.0), 0.0)
        for _ in range(30):
            collector.step()
        shares = [given(Source(store, VIEWS["field"], rank=rank, world_size=2).sample()) for rank in (0, 1)]
        lanes = [[step.serial for step in lane.steps[:3]] for lane in collector.lanes]
        assert shares == [lanes[::2], lanes[1::2]]
        collector.close()


def test_a_state_goes_on_where_the_last_delivered_rollout_ended(tmp_store: Path) -> None:
    interrupts: list[KeyboardInterrupt] = []

    def value(obs: torch.Tensor) -> torch.Tensor:
        if interrupts:
            raise interrupts.pop()
        return obs[:, 0]

    with dr.create(tmp_store, SCHEMA) as store:
        with store.writer() as writer:
            append(writer, 0, 40, "terminated")
        one, other, third = (dr.Sampler(store, dr.Rollouts(5, value_fn=value)) for _ in range(3))
        assert given(one.sample()) == [[0, 1, 2, 3, 4]]
        interrupts.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            one.sample()  # which is drawn, and not delivered
        state = one.state_dict()
        ((key, cursor),) = state["planner"]["cursors"].items()
        assert cursor["next_ids"].tolist() == [store.episodes[0].ids[5]]
        assert len(state["planner"]["plans"]) == 1
        other.load_state_dict(state)
        third.load_state_dict({**state, "planner": {**state["planner"], "plans": []}})
        one.distribution = dr.Uniform()  # which drops what was drawn
        for sampler in (one, other, third):
            assert [given(sampler.sample())[0][0] for _ in range(7)] == [5, 10, 15, 20, 25, 30, 35]
            with pytest.raises(dr.NotEnoughData):
                sampler.sample()
        state["planner"]["cursors"][key] = {"lanes": [3, 2], "next_ids": [1, 1]}
        with pytest.raises(ValueError, match="^this is not a state of rollouts"):
            other.load_state_dict(state)


def test_only_admitted_episodes_are_given(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store:
        with store.writer() as writer:
            for first in range(0, 40, 4):
                append(writer, first, 4, "terminated")
        source = Source(store, dr.Rollouts(6), where=lambda ep: ep.action[0] % 8 == 0)
        assert given(source.sample()) == [[0, 1, 2, 3, 8, 9]]


def test_a_writer_that_died_counts_as_closed(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        append(writer, 0, 20)
        dead = store.writer()
        append(dead, 20, 7)
        source = Source(store, dr.Rollouts(5))
        assert given(source.sample()) == [[0, 1, 2, 3, 4], [20, 21, 22, 23, 24]]
        with pytest.raises(dr.NotEnoughData, match="^lane 0 of writer 1 has 1 steps"):
            source.sample()
        for segment in dead._episode_writer.rotation.open:  # what the system does to the lock of a process that is gone
            segment.lock.release()
        assert given(source.sample()) == [[5, 6, 7, 8, 9]]


def test_ids_that_are_no_grid_are_refused(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        append(writer, 0, 6, "terminated")
        store.refresh()
        ids, sampler = store.episodes[0].ids, dr.Sampler(store, dr.Rollouts(2))
        for wrong in (ids[:3], ids[:0]):
            with pytest.raises(dr.InvalidIndex, match=f"^{len(wrong)} ids do not form a grid of 2 steps a column"):
                sampler.gather(wrong)
        for wrong in (ids[-1] + 1, -1, 1 << 60):
            with pytest.raises(dr.InvalidIndex, match=f"^id {wrong} "):
                sampler.gather([ids[0], wrong])
        # Any grid will do: chains stop where a column does not go on.
        batch = sampler.gather(ids[[0, 3, 4, 4]])
        assert batch.action.tolist() == [[0, 3], [4, 4]]
        assert batch.truncated.tolist() == [[True, False], [False, False]]
