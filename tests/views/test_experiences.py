"""n-step experiences: against published ways to make them, and against `Transitions`."""

import pickle
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay as dr

Step = tuple[Any, ...]
seeds = st.integers(0, 2**32 - 1)
lengths = st.lists(st.integers(1, 9), max_size=5)
gammas = st.sampled_from((0.0, 0.5, 0.9, 1.0))


def stream(lengths: list[int], seed: int, tail: int = 0) -> list[Step]:
    """Make steps of ended episodes, and of one more that goes on; the observation tells episode and step."""
    rng = np.random.default_rng(seed)
    made = []
    for episode, length in enumerate([*lengths, tail]):
        ended = episode < len(lengths)
        for t in range(length):
            made.append(((episode, t), int(rng.integers(9)), float(rng.normal()), ended and t == length - 1))
    return made


def by_step(experiences: Any) -> dict[Any, tuple[int, float, int]]:
    return {
        obs: (action, pytest.approx(ret, rel=1e-12, abs=1e-12), steps) for obs, action, ret, _, steps in experiences
    }


# --- published ways, written down plainly: each yields (obs, action, return, done, steps) ---------------------------


def rolling_window(steps: list[Step], n: int, gamma: float) -> Iterator[Step]:
    """A deque of n steps beside the replay buffer, emptied at the episode's end; done is the newest step's."""
    window: deque[Step] = deque(maxlen=n)
    for step in steps:
        window.append(step)
        if len(window) == n:
            yield (*window[0][:2], sum(gamma**i * s[2] for i, s in enumerate(window)), step[3], n)
        if step[3]:
            if len(window) == n:
                window.popleft()
            while window:
                yield (*window[0][:2], sum(gamma**i * s[2] for i, s in enumerate(window)), True, len(window))
                window.popleft()


def generator(steps: list[Step], n: int, gamma: float) -> Iterator[Step]:
    """An experience source that gives histories of n steps, then the shorter ones behind the last; summed backwards."""
    history: list[Step] = []
    for step in steps:
        history = [*history, step][-n:]
        histories = [history] if len(history) == n else []
        if step[3]:
            histories = [history[i:] for i in range(len(history))]
            history = []
        for one in histories:
            ret = 0.0
            for s in reversed(one):
                ret = s[2] + gamma * ret
            yield (*one[0][:2], ret, one[-1][3], len(one))


def loop_with_horizon(steps: list[Step], n: int, gamma: float) -> Iterator[Step]:
    """Whole episodes: for each step, the sum over min(n, T - t) steps; done is where the horizon was cut short."""
    episode: list[Step] = []
    for step in steps:
        episode.append(step)
        if step[3]:
            for t in range(len(episode)):
                horizon = min(n, len(episode) - t)
                ret = sum(gamma**i * episode[t + i][2] for i in range(horizon))
                yield (*episode[t][:2], ret, horizon < n, horizon)
            episode = []


def vectorised(steps: list[Step], n: int, gamma: float) -> Iterator[Step]:
    """Arrays with done flags: a mask stops the sum behind the first done; the last n - 1 steps are dropped."""
    rewards, dones = np.array([s[2] for s in steps]), np.array([s[3] for s in steps])
    count = len(steps) - n + 1
    if count <= 0:
        return
    going_on, ret, taken = np.ones(count, bool), np.zeros(count), np.zeros(count, int)
    for i in range(n):
        ret += np.where(going_on, gamma**i * rewards[i : i + count], 0)
        taken += going_on
        going_on &= ~dones[i : i + count]
    for t in range(count):
        yield (*steps[t][:2], ret[t], not going_on[t], int(taken[t]))


@pytest.mark.slow
@pytest.mark.parametrize("other", [rolling_window, generator, loop_with_horizon, vectorised])
@given(lengths, st.integers(1, 6), gammas, st.integers(0, 6), seeds)
def test_they_are_those_of_published_formulations(
    other: Any, lengths: list[int], n: int, gamma: float, tail: int, seed: int
) -> None:
    steps = stream(lengths, seed, tail)
    ours = {e.obs: e for e in dr.nstep_experiences(steps, n, gamma)}
    theirs = list(other(steps, n, gamma))
    assert by_step(theirs).items() <= by_step(ours.values()).items()
    full = max(0, tail - n + 1)
    assert len(ours) == sum(lengths) + full
    if other is vectorised:
        assert len(theirs) == max(0, len(steps) - n + 1)
    else:
        assert len(theirs) == sum(lengths) + (0 if other is loop_with_horizon else full)
    for obs, _, _, done, count in theirs:
        # A horizon that was cut short misses the window that reaches the end in exactly n steps.
        assert done == ours[obs].done or (other is loop_with_horizon and ours[obs].done and count == n)


@given(lengths, st.integers(1, 6), gammas, st.integers(0, 6), st.booleans(), seeds)
def test_next_obs_is_the_observation_behind_the_window(
    lengths: list[int], n: int, gamma: float, tail: int, told: bool, seed: int
) -> None:
    steps = stream(lengths, seed, tail)
    if told:
        steps = [(*step, (step[0][0], step[0][1] + 1)) for step in steps]
    for e in dr.nstep_experiences(steps, n, gamma):
        behind = (e.obs[0], e.obs[1] + e.steps)
        is_told = told or any(step[0] == behind for step in steps)
        assert e.next_obs == (behind if is_told else None)


def test_steps_are_taken_one_by_one_as_they_are_needed() -> None:
    taken = []

    def endless(with_next: bool) -> Iterator[Step]:
        t = 0
        while True:
            taken.append(t)
            yield (t, 0, 1.0, False, t + 1) if with_next else (t, 0, 1.0, False)
            t += 1

    for with_next, needed in ((True, 3), (False, 4)):
        taken.clear()
        experiences = dr.nstep_experiences(endless(with_next), 3, 0.5)
        assert taken == []
        first = next(experiences)
        assert (first, first.next_obs, len(taken)) == ((0, 0, 1.75, False, 3), 3, needed)


def test_numbers_of_other_libraries_are_numbers() -> None:
    steps = [(0, 1, np.float32(1), np.bool_(False)), (1, 1, np.array([2.0]).sum(), 1.0)]
    out = list(dr.nstep_experiences(steps, 5, 0.5))
    assert out == [(0, 1, 2.0, True, 2), (1, 1, 2.0, True, 1)]
    assert all(type(e.ret) is float and type(e.done) is bool for e in out)


def test_an_experience_is_a_tuple_of_five_that_pickles_with_its_next_obs() -> None:
    (made,) = dr.nstep_experiences([(0, 1, 2.0, True, 3)], 1, 1.0)
    assert isinstance(made, tuple)
    obs, action, ret, done, steps = made
    assert (obs, action, ret, done, steps) == (0, 1, 2.0, True, 1)
    copy = pickle.loads(pickle.dumps(made))
    assert (copy, copy.next_obs) == (made, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 0, 0.9), "n_step must be an int of at least 1, not 0"),
        (([], 1, 1.1), "gamma must be a number from 0 to 1, not 1.1"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.nstep_experiences(*arguments)


def test_a_step_of_other_values_is_refused() -> None:
    message = "a step is (obs, action, reward, done) or has next_obs, too; this one has 3 values"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        list(dr.nstep_experiences([(0, 0, 0.0)], 1, 1.0))


@pytest.mark.parametrize("done", [0.5, 2, np.nan, -3.7, "yes", None], ids=repr)
def test_a_step_whose_done_is_no_truth_value_is_refused(done: Any) -> None:
    said = re.escape(f"got reward=1.0 and done={done!r}")
    with pytest.raises(ValueError, match=f"^done is one truth value a step, a bool or 0 or 1; {said}$"):
        list(dr.nstep_experiences([(0, 0, 1.0, done)], 1, 1.0))


@pytest.mark.parametrize("done", [True, 1, 1.0, np.float32(1), np.ones(1)], ids=repr)
def test_done_may_be_a_float_of_1_or_0(done: Any) -> None:
    assert [step.done for step in dr.nstep_experiences([(0, 0, 1.0, 0.0), (1, 0, 1.0, done)], 1, 1.0)] == [False, True]


SCHEMA = dr.Schema(obs={"a": dr.Field((2,), "float64")}, action=(dr.Field((), "int64"), dr.Field((1,), "float32")))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3, 20])
def test_those_of_a_store_are_its_transitions(tmp_store: Path, n: int) -> None:
    rng = np.random.default_rng(n)
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        for steps, end in ((1, 1), (7, 1), (12, 2), (5, 3), (4, 0), (9, None)):
            for t in range(steps):
                last = t == steps - 1 and end is not None
                writer.append(
                    {"a": np.full(2, t)}, (t, [t]), rng.normal(), bool(last and end & 1), bool(last and end & 2),
                    {"a": np.full(2, t + 1)},
                )  # fmt: skip
            if end == 0:
                writer.end_episode()
        store.refresh()
        sampler = dr.Sampler(store, dr.Transitions(n, gamma=0.9))
        for episode in store.episodes:
            made = list(dr.nstep_experiences(episode, n, 0.9))
            assert len(made) == (max(0, len(episode) - n + 1) if episode.ended == "open" else len(episode))
            if not made:
                continue
            batch = sampler.gather(episode.ids[: len(made)])
            assert np.float32([e.ret for e in made]).tolist() == batch.reward.tolist()
            assert [e.steps for e in made] == batch.n_steps.tolist()
            assert [e.done for e in made] == (batch.terminated | batch.truncated).tolist()
            assert [e.obs["a"].tolist() for e in made] == batch.obs["a"].tolist()
            assert [e.next_obs["a"].tolist() for e in made] == batch.next_obs["a"].tolist()
            assert [e.action["1"].tolist() for e in made] == batch.action["1"].tolist()
