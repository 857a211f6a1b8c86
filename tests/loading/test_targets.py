"""n-step targets inside windows, against a loop in float64."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import diskreplay as dr
from diskreplay.loading.targets import nstep_targets


def loop(reward: Any, terminated: Any, values: Any, n: int, gamma: float, mask: Any, truncated: Any) -> np.ndarray:
    """Compute the targets step by step."""
    batch, length = reward.shape
    found = np.zeros((batch, length))
    for b in range(batch):
        for t in range(length):
            if not mask[b, t]:
                continue
            k, total, bootstraps = 0, 0.0, True
            while k < n and t + k < length and mask[b, t + k]:
                total += gamma**k * float(reward[b, t + k])
                k += 1
                if terminated[b, t + k - 1] or truncated[b, t + k - 1]:
                    bootstraps = not terminated[b, t + k - 1]
                    break
            found[b, t] = total + (gamma**k * float(values[b, t + k]) if bootstraps else 0.0)
    return found


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw windows: real steps, then padding; or flags and holes anywhere."""
    batch, length = draw(st.integers(0, 5)), draw(st.integers(0, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    reward, values = rng.standard_normal((batch, length)), rng.standard_normal((batch, length + 1))
    if draw(st.booleans()):
        real = rng.integers(1, length + 1, batch) if length else np.zeros(batch, int)
        mask = np.arange(length) < real[:, None]
        ends = np.arange(length) == real[:, None] - 1
        terminated, truncated = (ends & (rng.random((batch, 1)) < 0.5) for _ in range(2))
    else:
        mask, terminated, truncated = (rng.random((batch, length)) < p for p in (0.9, 0.2, 0.2))
    return reward, terminated, values, mask, truncated


@given(batches(), st.integers(1, 15), st.sampled_from((0.0, 0.9, 1.0)), st.booleans(), st.booleans())
def test_targets_equal_the_loop(batch: Any, n: int, gamma: float, with_mask: bool, with_truncated: bool) -> None:
    reward, terminated, values, mask, truncated = batch
    if not with_mask:
        mask = np.ones_like(mask)
    if not with_truncated:
        truncated = np.zeros_like(truncated)
    tensors = [torch.from_numpy(array) for array in (reward, terminated, values)]
    found = nstep_targets(
        *tensors, n, gamma,
        mask=torch.from_numpy(mask) if with_mask else None,
        truncated=torch.from_numpy(truncated) if with_truncated else None,
    )  # fmt: skip
    assert found.dtype == torch.float64
    np.testing.assert_allclose(
        found.numpy(), loop(reward, terminated, values, n, gamma, mask, truncated), rtol=1e-12, atol=1e-12
    )


def test_a_window_inside_an_episode_bootstraps_from_its_last_next_obs() -> None:
    values = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])
    found = nstep_targets(torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.bool), values, 3, 0.5)
    assert found.tolist() == [[1.75 + 3 / 8, 1.75 + 4 / 8, 1.5 + 4 / 4, 1 + 4 / 2]]
    assert found.dtype == torch.float32


def test_a_truncated_episode_bootstraps_from_its_final_observation_with_or_without_the_flag() -> None:
    mask = torch.tensor([[True, True, False, False]])
    values = torch.tensor([[9.0, 9.0, 4.0, float("nan"), float("nan")]])
    reward = torch.tensor([[1.0, 1.0, float("nan"), float("nan")]])
    none = torch.zeros(1, 4, dtype=torch.bool)
    for truncated in (None, torch.tensor([[False, True, False, False]])):
        found = nstep_targets(reward, none, values, 3, 0.5, mask=mask, truncated=truncated)
        assert found.tolist() == [[2.5, 3.0, 0.0, 0.0]]


def test_a_step_both_terminated_and_truncated_has_no_bootstrap_even_where_the_value_is_nan() -> None:
    ends = torch.tensor([[0.0, 1.0]])
    values = torch.tensor([[5.0, 5.0, float("nan")]])
    assert nstep_targets(torch.ones(1, 2), ends, values, 2, 0.5, truncated=ends).tolist() == [[1.5, 1.0]]


def test_a_loss_mask_of_burn_in_steps_gives_the_same_targets_behind_it() -> None:
    rng = torch.Generator().manual_seed(0)
    reward, values = torch.randn(3, 8, generator=rng), torch.randn(3, 9, generator=rng)
    none, mask = torch.zeros(3, 8), torch.arange(8).expand(3, 8) >= 3
    whole, behind = (nstep_targets(reward, none, values, 4, 0.9, mask=m) for m in (None, mask))
    assert torch.equal(whole[:, 3:], behind[:, 3:])
    assert not behind[:, :3].any()


def test_gradients_reach_the_values_that_bootstrap_and_no_others() -> None:
    values = torch.zeros(1, 5, requires_grad=True)
    terminated = torch.tensor([[False, False, False, True]])
    nstep_targets(torch.ones(1, 4), terminated, values, 2, 0.5).sum().backward()
    assert values.grad.tolist() == [[0.0, 0.0, 0.25, 0.25, 0.0]]
    assert not nstep_targets(torch.ones(1, 4), terminated, values.detach(), 2, 0.5).requires_grad


@pytest.mark.parametrize(
    ("changed", "message"),
    [
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
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(changed: Any, message: str) -> None:
    arguments = {
        "reward": torch.ones(2, 3), "terminated": torch.zeros(2, 3), "values": torch.ones(2, 4), "n": 2, "gamma": 0.9
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        nstep_targets(**{**arguments, **changed})


def test_it_is_a_public_name() -> None:
    assert dr.nstep_targets is nstep_targets
