"""n-step experiences one by one, from an episode or from a stream of steps that was never stored."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from diskreplay.distributions.number_arguments import fraction, int_argument
from diskreplay.reading.episodes import Episode
from diskreplay.schema.schema import TupleRecord
from diskreplay.writing.casting import as_flag


class _Values(NamedTuple):
    obs: Any
    action: Any
    ret: float
    done: bool
    steps: int


class NStepExperience(_Values):
    """What began with one step: a tuple of obs, action, ret, done and steps, with `next_obs` beside it.

    Attributes
    ----------
    obs, action
        Of the first step, as they were given.
    ret : float
        The discounted sum of the rewards of `steps` steps.
    done : bool
        Whether the last of them ended its episode.
    steps : int
        How many: n_step, or fewer at an episode's end.
    next_obs
        The observation behind the last of them; None where none is known.
    """

    next_obs: Any


class _Step(NamedTuple):
    obs: Any
    action: Any
    reward: float
    done: bool
    next_obs: Any


def nstep_experiences(episode_or_iterable: Any, n_step: int, gamma: float) -> Iterator[NStepExperience]:
    """Turn steps into n-step experiences, in order, one for each step of an ended episode.

    ``ret = r_t + gamma r_{t+1} + ... + gamma^(k-1) r_{t+k-1}``, k = n_step, or fewer where the episode ends first
    (Sutton & Barto, Reinforcement Learning, 2nd ed., 7.1). The windows at an episode's end, which are shorter and
    shorter, are flushed there. Steps whose window is not full when the stream stops without `done`, or in an episode
    that is still open, give nothing. Sums are in float64, as those of `Transitions`, which rounds them to float32.

    Parameters
    ----------
    episode_or_iterable : Episode or iterable
        An episode of a store, or steps (obs, action, reward, done) or (obs, action, reward, done, next_obs) of any
        number of episodes, taken one by one as they are needed. Without `next_obs`, an experience waits for the step
        behind its window, whose obs is its `next_obs`.
    n_step : int
        Steps of the return.
    gamma : float
        Discount a step, 0 to 1.

    Returns
    -------
    iterator of NStepExperience

    Raises
    ------
    ValueError
        `n_step` or `gamma` is out of range, a step has not four or five values, or `done` is no truth value.
    """
    n_step, gamma = int_argument("n_step", n_step), fraction("gamma", gamma)
    steps = _of_episode(episode_or_iterable) if isinstance(episode_or_iterable, Episode) else episode_or_iterable
    return _windows(_checked(steps), n_step, gamma)


def _windows(steps: Iterator[_Step], n: int, gamma: float) -> Iterator[NStepExperience]:
    window: deque[_Step] = deque()
    for step in steps:
        if len(window) == n:  # it has waited for this step's obs
            yield _experience(window, gamma, step.obs)
            window.popleft()
        window.append(step)
        if step.done:
            while window:
                yield _experience(window, gamma, step.next_obs)
                window.popleft()
        elif len(window) == n and step.next_obs is not None:
            yield _experience(window, gamma, step.next_obs)
            window.popleft()
    if len(window) == n:
        yield _experience(window, gamma, None)


def _experience(window: deque[_Step], gamma: float, next_obs: Any) -> NStepExperience:
    total, scale = 0.0, 1.0
    for step in window:
        total += scale * step.reward
        scale *= gamma
    first, last = window[0], window[-1]
    made = NStepExperience(first.obs, first.action, total, last.done, len(window))
    made.next_obs = next_obs
    return made


def _checked(steps: Iterable[Any]) -> Iterator[_Step]:
    for step in steps:
        values = tuple(step)
        if len(values) not in (4, 5):
            raise ValueError(
                f"a step is (obs, action, reward, done) or these and next_obs; one of {len(values)} values came"
            )
        obs, action, reward, done = values[:4]
        ends = as_flag(done, "done", reward, floats=True)
        yield _Step(obs, action, float(reward), ends, values[4] if len(values) == 5 else None)


def _of_episode(episode: Episode) -> Iterator[tuple[Any, ...]]:
    """Yield the steps of an episode; of an open one only those whose next observation is there."""
    obs, action, reward = episode.obs, episode.action, episode.reward
    steps, is_open = len(episode), episode.ended == "open"
    frames = _rows(obs)
    for t in range(steps):
        following = _at(obs, t + 1) if t + 1 < frames else None
        if is_open and following is None:
            return
        yield _at(obs, t), _at(action, t), reward[t], t == steps - 1 and not is_open, following


def _rows(tree: Any) -> int:
    while isinstance(tree, (dict, TupleRecord)):
        tree = next(iter(tree.values()))
    return len(tree)


def _at(tree: Any, t: int) -> Any:
    if isinstance(tree, dict):
        return {name: _at(below, t) for name, below in tree.items()}
    if isinstance(tree, TupleRecord):
        return TupleRecord(_at(below, t) for below in tree)
    return tree[t]
