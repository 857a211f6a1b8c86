"""Targets inside windows, against loops in float64 that sum forwards, as the papers write them, and against a peer."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import diskreplay as dr


class Chain(NamedTuple):
    """The steps that a sum from one step on may hold, and whether the value behind the last of them counts."""

    steps: range
    bootstraps: bool


class Windows(NamedTuple):
    """A batch in numpy; `gamma` is (batch, length), and `q`, `greedy` and `log_rho` are for those that use them."""

    reward: np.ndarray
    terminated: np.ndarray
    values: np.ndarray
    mask: np.ndarray
    truncated: np.ndarray
    gamma: np.ndarray
    q: np.ndarray
    greedy: np.ndarray
    log_rho: np.ndarray
    next_values: np.ndarray

    def chain(self, b: int, t: int) -> Chain:
        end = t
        while not (self.terminated[b, end] or self.truncated[b, end]):
            if end + 1 == self.reward.shape[1] or not self.mask[b, end + 1]:
                break
            end += 1
        return Chain(range(t, end + 1), not self.terminated[b, end])

    def nstep(self, b: int, t: int, n: int) -> float:
        """Sum the discounted rewards of n steps of the chain, or all, and the value behind them."""
        chain = self.chain(b, t)
        steps = chain.steps[:n]
        total, discount = 0.0, 1.0
        for s in steps:
            total += discount * float(self.reward[b, s])
            discount *= float(self.gamma[b, s])
        if len(steps) < len(chain.steps) or chain.bootstraps:
            total += discount * float(self.next_values[b, steps[-1]])
        return total

    def mean_of_nsteps(self, b: int, t: int, lambda_: float, longest: int) -> float:
        """Weigh the n-step targets up to the longest one (Sutton & Barto, 2nd ed., equation 12.3)."""
        weighed = sum((1 - lambda_) * lambda_ ** (n - 1) * self.nstep(b, t, n) for n in range(1, longest))
        return weighed + lambda_ ** (longest - 1) * self.nstep(b, t, longest)

    def lambda_return(self, b: int, t: int, lambda_: float) -> float:
        return self.mean_of_nsteps(b, t, lambda_, len(self.chain(b, t).steps))

    def q_lambda(self, b: int, t: int, lambda_: float) -> float:
        later = self.chain(b, t).steps[1:]
        explored = [n for n, s in enumerate(later, 1) if not self.greedy[b, s]]
        return self.mean_of_nsteps(b, t, lambda_, min([*explored, len(later) + 1]))

    def following(self, b: int, s: int) -> float:
        return 0.0 if self.terminated[b, s] else float(self.next_values[b, s])

    def retrace(self, b: int, t: int, lambda_: float) -> float:
        """Sum the errors as Munos et al. 2016, section 2."""
        total, scale = float(self.q[b, t]), 1.0
        for s in self.chain(b, t).steps:
            if s > t:
                scale *= lambda_ * min(1.0, math.exp(self.log_rho[b, s]))
            error = self.reward[b, s] + self.gamma[b, s] * self.following(b, s) - self.q[b, s]
            total += scale * error
            scale *= self.gamma[b, s]
        return total

    def vtrace(self, b: int, t: int, lambda_: float, rho_bar: float, c_bar: float) -> tuple[float, float]:
        """Sum as equation 1 of Espeholt et al. 2018; the advantage is of section 4.2."""
        total, scale, value = float(self.values[b, t]), 1.0, self.values[b]
        steps = self.chain(b, t).steps
        for s in steps:
            weight = math.exp(self.log_rho[b, s])
            error = self.reward[b, s] + self.gamma[b, s] * self.following(b, s) - value[s]
            total += scale * min(rho_bar, weight) * error
            scale *= self.gamma[b, s] * lambda_ * min(c_bar, weight)
        behind = self.vtrace(b, t + 1, lambda_, rho_bar, c_bar)[0] if len(steps) > 1 else self.following(b, t)
        advantage = self.reward[b, t] + self.gamma[b, t] * behind - value[t]
        return total, min(rho_bar, math.exp(self.log_rho[b, t])) * advantage

    def each(self, target: Callable[[int, int], Any]) -> np.ndarray:
        """Compute the targets step by step; those of steps that are not real are 0."""
        batch, length = self.reward.shape
        found = [[target(b, t) if self.mask[b, t] else None for t in range(length)] for b in range(batch)]
        parts = [x for row in found for x in row if x is not None]
        result = np.zeros((batch, length, *np.shape(parts[0])) if parts else (batch, length))
        result[self.mask] = parts
        return result

    def tensors(self) -> "Windows":
        return Windows(*map(torch.from_numpy, self))


def drawn(batch: int, length: int, padded: bool, rng: np.random.Generator) -> Windows:
    """Draw windows: real steps, then padding; or flags and holes anywhere. What nobody needs is NaN."""
    reward, q, log_rho = rng.standard_normal((3, batch, length))
    values = rng.standard_normal((batch, length + 1))
    if padded:
        real = rng.integers(1, length + 1, batch) if length else np.zeros(batch, int)
        mask = np.arange(length) < real[:, None]
        ends = np.arange(length) == real[:, None] - 1
        terminated, truncated = (ends & (rng.random((batch, 1)) < 0.5) for _ in range(2))
        values[:, 1:][~mask | terminated] = np.nan
        values[:, :-1][mask & ~np.isfinite(values[:, :-1])] = 0.5
        for array in (reward, q, log_rho):
            array[~mask] = np.nan
    else:
        mask, terminated, truncated = (rng.random((batch, length)) < p for p in (0.9, 0.2, 0.2))
    gamma, greedy = rng.random((batch, length)), rng.random((batch, length)) < 0.7
    return Windows(reward, terminated, values, mask, truncated, gamma, q, greedy, log_rho, values[:, 1:].copy())


@st.composite
def batches(draw: st.DrawFn) -> Windows:
    """Draw windows; with one gamma or one a step, and perhaps without a mask and truncated."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = drawn(draw(st.integers(0, 5)), draw(st.integers(0, 12)), draw(st.booleans()), rng)
    gamma = draw(st.none() | st.sampled_from((0.0, 0.9, 1.0)))
    return found if gamma is None else found._replace(gamma=np.full_like(found.gamma, gamma))


lambdas = st.sampled_from((0.0, 0.3, 0.95, 1.0))


def close(found: torch.Tensor, want: np.ndarray) -> None:
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), want.reshape(found.shape), rtol=1e-11, atol=1e-11)


@given(batches(), st.integers(1, 15), st.sampled_from((None, 0.0, 0.9, 1.0)), st.booleans(), st.booleans())
def test_nstep_targets_equal_the_loop(
    batch: Windows, n: int, gamma: float | None, with_mask: bool, with_truncated: bool
) -> None:
    if gamma is not None:
        batch = batch._replace(gamma=np.full_like(batch.gamma, gamma))
    if not with_mask:
        batch = batch._replace(mask=np.ones_like(batch.mask), reward=np.nan_to_num(batch.reward))
        batch = batch._replace(values=np.nan_to_num(batch.values), next_values=np.nan_to_num(batch.next_values))
    if not with_truncated:
        batch = batch._replace(truncated=np.zeros_like(batch.truncated))
    tensors = batch.tensors()
    found = dr.nstep_targets(
        tensors.reward, tensors.terminated, tensors.values, n, tensors.gamma if gamma is None else gamma,
        mask=tensors.mask if with_mask else None, truncated=tensors.truncated if with_truncated else None,
    )  # fmt: skip
    close(found, batch.each(lambda b, t: batch.nstep(b, t, n)))


@given(batches(), lambdas)
def test_lambda_returns_are_the_mean_of_nstep_targets(batch: Windows, lambda_: float) -> None:
    x = batch.tensors()
    found = dr.lambda_returns(x.reward, x.terminated, x.values, lambda_, x.gamma, x.mask, x.truncated)
    close(found, batch.each(lambda b, t: batch.lambda_return(b, t, lambda_)))


@given(batches(), lambdas)
def test_q_lambda_targets_stop_before_an_action_that_explores(batch: Windows, lambda_: float) -> None:
    x = batch.tensors()
    found = dr.q_lambda_targets(x.reward, x.terminated, x.values, x.greedy, lambda_, x.gamma, x.mask, x.truncated)
    close(found, batch.each(lambda b, t: batch.q_lambda(b, t, lambda_)))


@given(batches(), lambdas)
def test_retrace_targets_equal_the_sum_of_the_paper(batch: Windows, lambda_: float) -> None:
    x = batch.tensors()
    found = dr.retrace_targets(x.reward, x.terminated, x.values, x.q, x.log_rho, lambda_, x.gamma, x.mask, x.truncated)
    close(found, batch.each(lambda b, t: batch.retrace(b, t, lambda_)))


@given(batches(), lambdas, st.sampled_from((0.0, 0.5, 1.0, 2.0, math.inf)), st.sampled_from((0.0, 0.8, 1.0, math.inf)))
def test_vtrace_targets_equal_the_sum_of_the_paper(
    batch: Windows, lambda_: float, rho_bar: float, c_bar: float
) -> None:
    x = batch.tensors()
    limits = {"lambda_": lambda_, "rho_bar": rho_bar, "c_bar": c_bar}
    found = dr.vtrace_targets(x.reward, x.terminated, x.values, x.log_rho, x.gamma, x.mask, x.truncated, **limits)
    want = batch.each(lambda b, t: batch.vtrace(b, t, **limits))
    for tensor, array in zip(found, np.moveaxis(want, -1, 0) if want.ndim == 3 else (want, want), strict=True):
        close(tensor, array)


@pytest.mark.slow
def test_4800_targets_equal_torchrls() -> None:
    peer = pytest.importorskip("torchrl.objectives.value.functional")
    rng = np.random.default_rng(3)
    shape = (60, 40)
    reward, log_pi, log_mu = (torch.from_numpy(rng.standard_normal(shape)) for _ in range(3))
    values = torch.from_numpy(rng.standard_normal((60, 41)))
    terminated, truncated = (torch.from_numpy(rng.random(shape) < p) for p in (0.05, 0.05))
    done = terminated | truncated

    def columns(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor[..., None] for tensor in tensors]

    # The peer keeps some of these in float32, where they are exact.
    gamma, limits = 0.96875, {"rho_bar": 1.25, "c_bar": 0.875}
    found = dr.lambda_returns(reward, terminated, values, 0.9, gamma, truncated=truncated)
    for estimate, atol in ((peer.td_lambda_return_estimate, 1e-12), (peer.vec_td_lambda_return_estimate, 2e-6)):
        want = estimate(gamma, 0.9, *columns(values[:, 1:], reward, done, terminated))[..., 0]
        torch.testing.assert_close(found, want, rtol=0, atol=atol)
    advantages, targets = peer.vtrace_advantage_estimate(
        gamma, *columns(log_pi, log_mu, values[:, :-1], values[:, 1:], reward, done, terminated), *limits.values()
    )
    found = dr.vtrace_targets(reward, terminated, values, log_pi - log_mu, gamma, truncated=truncated, **limits)
    torch.testing.assert_close(found, (targets[..., 0], advantages[..., 0]), rtol=0, atol=1e-12)
    assert found[0].numel() + want.numel() == 4_800


def test_windows_across_episodes_bootstrap_from_final_observations() -> None:
    rng, compared = np.random.default_rng(5), 0
    batch = drawn(60, 25, False, rng)
    # The value of the observation behind a step is that of the next step, unless the episode ends there.
    finals = batch.truncated | batch.terminated
    finals[:, -1] = True
    batch = batch._replace(
        mask=np.ones_like(batch.mask),
        next_values=np.where(finals, rng.standard_normal((60, 25)), batch.values[:, 1:]),
    )
    batch.next_values[batch.terminated] = np.nan
    x = batch.tensors()
    first, behind = (x.reward, x.terminated, None), (x.gamma, None, x.truncated, x.next_values)
    vtrace = dr.vtrace_targets(x.reward, x.terminated, x.values[:, :-1], x.log_rho, *behind)
    for found, target in (
        (dr.nstep_targets(*first, 4, *behind), lambda b, t: batch.nstep(b, t, 4)),
        (dr.lambda_returns(*first, 0.9, *behind), lambda b, t: batch.lambda_return(b, t, 0.9)),
        (dr.q_lambda_targets(*first, x.greedy, 0.9, *behind), lambda b, t: batch.q_lambda(b, t, 0.9)),
        (dr.retrace_targets(*first, x.q, x.log_rho, 0.9, *behind), lambda b, t: batch.retrace(b, t, 0.9)),
        (vtrace[0], lambda b, t: batch.vtrace(b, t, 1.0, 1.0, 1.0)[0]),
        (vtrace[1], lambda b, t: batch.vtrace(b, t, 1.0, 1.0, 1.0)[1]),
    ):
        close(found, batch.each(target))
        compared += found.numel()
    assert compared == 6 * 1_500


def test_with_every_action_greedy_and_on_policy_all_are_lambda_returns() -> None:
    x = drawn(50, 20, True, np.random.default_rng(1)).tensors()
    first, behind = (x.reward, x.terminated, x.values), (x.gamma, x.mask, x.truncated)
    want = dr.lambda_returns(*first, 0.8, *behind)
    every, none = torch.ones_like(x.mask), torch.zeros_like(x.reward)
    same = [
        dr.q_lambda_targets(*first, every, 0.8, *behind),
        dr.retrace_targets(*first, x.values[:, :-1], none, 0.8, *behind),
        dr.vtrace_targets(*first, none, *behind, lambda_=0.8)[0],
    ]
    for found in same:
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dr.lambda_returns(*first, 0.0, *behind), dr.nstep_targets(*first, 1, *behind))
    torch.testing.assert_close(dr.lambda_returns(*first, 1.0, *behind), dr.nstep_targets(*first, 20, *behind))


def test_a_window_inside_an_episode_bootstraps_from_its_last_next_obs() -> None:
    values = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])
    found = dr.nstep_targets(torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.bool), values, 3, 0.5)
    assert found.tolist() == [[1.75 + 3 / 8, 1.75 + 4 / 8, 1.5 + 4 / 4, 1 + 4 / 2]]
    assert found.dtype == torch.float32


def test_a_truncated_episode_bootstraps_from_its_final_observation_with_or_without_the_flag() -> None:
    mask = torch.tensor([[True, True, False, False]])
    values = torch.tensor([[9.0, 9.0, 4.0, float("nan"), float("nan")]])
    reward = torch.tensor([[1.0, 1.0, float("nan"), float("nan")]])
    none = torch.zeros(1, 4, dtype=torch.bool)
    for truncated in (None, torch.tensor([[False, True, False, False]])):
        found = dr.nstep_targets(reward, none, values, 3, 0.5, mask=mask, truncated=truncated)
        assert found.tolist() == [[2.5, 3.0, 0.0, 0.0]]


def test_a_step_both_terminated_and_truncated_has_no_bootstrap_even_where_the_value_is_nan() -> None:
    ends = torch.tensor([[0.0, 1.0]])
    values = torch.tensor([[5.0, 5.0, float("nan")]])
    assert dr.nstep_targets(torch.ones(1, 2), ends, values, 2, 0.5, truncated=ends).tolist() == [[1.5, 1.0]]


def test_a_loss_mask_of_burn_in_steps_gives_the_same_targets_behind_it() -> None:
    rng = torch.Generator().manual_seed(0)
    reward, values = torch.randn(3, 8, generator=rng), torch.randn(3, 9, generator=rng)
    none, mask = torch.zeros(3, 8), torch.arange(8).expand(3, 8) >= 3
    whole, behind = (dr.nstep_targets(reward, none, values, 4, 0.9, mask=m) for m in (None, mask))
    assert torch.equal(whole[:, 3:], behind[:, 3:])
    assert not behind[:, :3].any()


def test_gradients_reach_the_values_that_bootstrap_and_no_others() -> None:
    values = torch.zeros(1, 5, requires_grad=True)
    terminated = torch.tensor([[False, False, False, True]])
    dr.nstep_targets(torch.ones(1, 4), terminated, values, 2, 0.5).sum().backward()
    assert values.grad.tolist() == [[0.0, 0.0, 0.25, 0.25, 0.0]]
    assert not dr.nstep_targets(torch.ones(1, 4), terminated, values.detach(), 2, 0.5).requires_grad


ARGUMENTS = {
    "reward": torch.ones(2, 3), "terminated": torch.zeros(2, 3), "values": torch.ones(2, 4), "gamma": 0.9,
    "n": 2, "lambda_": 0.9, "greedy": torch.ones(2, 3), "q": torch.ones(2, 3), "log_rho": torch.ones(2, 3),
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "changed", "message"),
    [
        *(
            (dr.nstep_targets, changed, message)
            for changed, message in (
                ({"n": 0}, "n must be an int of at least 1, not 0"),
                ({"gamma": 1.5}, "gamma must be a number from 0 to 1, not 1.5"),
                ({"reward": torch.ones(3)}, "reward must be (batch, length), not (3,)"),
                ({"reward": [[1.0]]}, "reward must be a tensor, not list"),
                ({"values": torch.ones(2, 3)}, "values must be (2, 4), one more than the steps of reward, not (2, 3)"),
                ({"values": torch.ones(2, 4, dtype=torch.int64)}, "values must be floats, not torch.int64"),
                ({"terminated": None}, "terminated must be a tensor, not NoneType"),
                ({"terminated": torch.zeros(2, 4)}, "terminated must have the shape of reward, (2, 3), not (2, 4)"),
                ({"mask": torch.zeros(2)}, "mask must have the shape of reward, (2, 3), not (2,)"),
                ({"truncated": torch.zeros(3, 2)}, "truncated must have the shape of reward, (2, 3), not (3, 2)"),
                ({"values": None}, "values must be a tensor, not NoneType"),
                (
                    {"next_values": torch.ones(2, 3)},
                    "values must be None if next_values is given, which replaces it",
                ),
                (
                    {"values": None, "next_values": torch.ones(2, 4)},
                    "next_values must have the shape of reward, (2, 3), not (2, 4)",
                ),
                (
                    {"values": None, "next_values": torch.ones(2, 3, dtype=torch.int32)},
                    "next_values must be floats, not torch.int32",
                ),
            )
        ),
        *(
            (function, changed, message)
            for function in (dr.lambda_returns, dr.q_lambda_targets, dr.retrace_targets, dr.vtrace_targets)
            for changed, message in (
                ({"lambda_": 1.5}, "lambda_ must be a number from 0 to 1, not 1.5"),
                ({"gamma": -0.1}, "gamma must be a number from 0 to 1, not -0.1"),
                ({"gamma": torch.ones(2)}, "gamma must have the shape of reward, (2, 3), not (2,)"),
                ({"truncated": torch.ones(2)}, "truncated must have the shape of reward, (2, 3), not (2,)"),
            )
        ),
        (
            dr.q_lambda_targets,
            {"greedy": torch.ones(3, 3)},
            "greedy must have the shape of reward, (2, 3), not (3, 3)",
        ),
        (dr.retrace_targets, {"q": torch.ones(2, 4)}, "q must have the shape of reward, (2, 3), not (2, 4)"),
        (dr.retrace_targets, {"log_rho": None}, "log_rho must be a tensor, not NoneType"),
        (
            dr.vtrace_targets,
            {"next_values": torch.ones(2, 3)},
            "values must have the shape of reward, (2, 3), not (2, 4)",
        ),
        (dr.vtrace_targets, {"log_rho": 0.0}, "log_rho must be a tensor, not float"),
        (
            dr.vtrace_targets,
            {"rho_bar": -1.0},
            "rho_bar must be a number of at least 0, or math.inf for no limit, not -1.0",
        ),
        (
            dr.vtrace_targets,
            {"c_bar": math.nan},
            "c_bar must be a number of at least 0, or math.inf for no limit, not nan",
        ),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(function: Any, changed: Any, message: str) -> None:
    takes = inspect.signature(function).parameters
    arguments = {name: value for name, value in {**ARGUMENTS, **changed}.items() if name in takes}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        function(**arguments)


def test_what_is_rounded_is_the_float64_sum() -> None:
    # 1 + 2^-24 + 2^-24 rounds to 1 if each sum is rounded, and to 1 + 2^-23 if their end is.
    reward, none = torch.tensor([[1.0, 2.0**-24, 2.0**-24]]), torch.zeros(1, 3)
    values = torch.zeros(1, 4)
    found = [
        dr.nstep_targets(reward, none, values, 3, 1.0),
        dr.lambda_returns(reward, none, values, 1.0, 1.0),
        dr.q_lambda_targets(reward, none, values, torch.ones(1, 3), 1.0, 1.0),
        dr.retrace_targets(reward, none, values, none, none, 1.0, 1.0),
        *dr.vtrace_targets(reward, none, values, none, 1.0),
    ]
    assert [targets[0, 0].item() for targets in found] == [1 + 2.0**-23] * 6
    assert {targets.dtype for targets in found} == {torch.float32}


def test_gradients_of_lambda_returns_are_those_of_the_weights_of_the_values() -> None:
    values = torch.zeros(1, 4, requires_grad=True)
    dr.lambda_returns(torch.ones(1, 3), torch.zeros(1, 3), values, 0.5, 0.5)[0, 0].backward()
    assert values.grad.tolist() == [[0.0, 0.25, 0.0625, 0.03125]]
