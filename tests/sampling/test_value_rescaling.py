"""R2D2's rescaling of values, against the formulas as they are published."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import diskreplay as dr

PAGE = Path(dr.__file__).parents[1] / "docs/recurrent.md"

EPS = (0.0, 1e-3, 1e-2, 1.0)


def published(x: float, eps: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + eps * x


def published_inverse(y: float, eps: float) -> float:
    """The inverse in the appendix of Pohlen et al. 2018; eps must not be 0."""
    root = (math.sqrt(1 + 4 * eps * (abs(y) + 1 + eps)) - 1) / (2 * eps)
    return math.copysign(root * root - 1, y)


def test_20000_values_of_all_sizes_equal_the_formulas() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(20_000) * 10.0 ** rng.uniform(-6, 8, 20_000)
    for eps in EPS:
        found = dr.rescale_value(torch.from_numpy(x), eps)
        np.testing.assert_allclose(found.numpy(), [published(a, eps) for a in x], rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(dr.unscale_value(found, eps).numpy(), x, rtol=1e-13)
        if eps:
            # The published form of the inverse cancels near 0.
            want = [published_inverse(a, eps) for a in x]
            np.testing.assert_allclose(dr.unscale_value(torch.from_numpy(x), eps).numpy(), want, rtol=1e-9, atol=1e-11)


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.sampled_from(EPS))
def test_the_inverse_gives_back_float32_values_but_for_their_rounding(x: float, eps: float) -> None:
    values = torch.tensor([x])
    back = dr.unscale_value(dr.rescale_value(values, eps), eps)
    assert back.dtype == torch.float32
    torch.testing.assert_close(back, values, rtol=4e-7, atol=1e-44)


def test_shape_and_dtype_stay_and_gradients_are_those_of_h() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.linspace(-3, 3, 6, dtype=dtype).reshape(2, 3)
        for function in (dr.rescale_value, dr.unscale_value):
            assert (function(x).dtype, function(x).shape) == (dtype, x.shape)
    at = torch.tensor([-3.0, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    (h,) = torch.autograd.grad(dr.rescale_value(at, 0.1).sum(), at)
    assert h.tolist() == pytest.approx([0.35, 0.6, 0.35])
    y = dr.rescale_value(at.detach(), 0.1).requires_grad_()
    (inverse,) = torch.autograd.grad(dr.unscale_value(y, 0.1).sum(), y)
    assert inverse.tolist() == pytest.approx([1 / 0.35, 1 / 0.6, 1 / 0.35])


@pytest.mark.parametrize("function", [dr.rescale_value, dr.unscale_value])
@pytest.mark.parametrize(
    ("values", "eps", "message"),
    [
        (torch.ones(2, dtype=torch.int64), 0.1, "values must be a tensor of floats, not torch.int64"),
        ([1.0], 0.1, "values must be a tensor of floats, not list"),
        (torch.ones(2), -0.1, "eps must be a finite number of at least 0, not -0.1"),
        (torch.ones(2), math.inf, "eps must be a finite number of at least 0, not inf"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(function: Any, values: Any, eps: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        function(values, eps)


def test_the_documented_targets_of_r2d2_equal_a_loop_over_episodes(tmp_store: Path) -> None:
    rng, schema = np.random.default_rng(0), dr.Schema(dr.Field((3,), "float32"), dr.Field((), "int64"))
    online, target = (torch.from_numpy(rng.standard_normal((3, 4))) for _ in range(2))
    with dr.create(tmp_store, schema) as store:
        with store.writer() as writer:
            for steps in (3, 8, 20, 33):
                obs, reward = rng.standard_normal((steps + 1, 3)), rng.standard_normal(steps) * 50
                ends = {"terminated": steps % 2 == 0, "truncated": steps % 2 == 1}
                writer.append_episode(obs.astype("f4"), np.zeros(steps, int), reward.astype("f4"), **ends)
        batch = dr.Sampler(store, dr.Sequences(length=10, overlap=5), batch_size=32, seed=0).sample()
        values: dict[tuple[int, int], float] = {}  # of the n steps from an id on, h(sum + gamma^n * h^-1(Q))
        for episode in store.episodes:
            for t, step_id in enumerate(episode.ids.tolist()):
                for end in range(t + 1, min(t + 5, len(episode)) + 1):
                    total = sum(0.997**i * float(r) for i, r in enumerate(episode.reward[t:end]))
                    q = episode.obs[end].astype(float)
                    best = (q @ online.numpy()).argmax()
                    if not (episode.terminated and end == len(episode)):
                        total += 0.997 ** (end - t) * published_inverse(float((q @ target.numpy())[best]), 1e-3)
                    values[step_id, end - t] = published(total, 1e-3)
        names = {
            "torch": torch, "dr": dr, "batch": batch,
            "online": lambda obs: obs.double() @ online, "target": lambda obs: obs.double() @ target,
        }  # fmt: skip
        (code,) = re.findall(r"^online, target = .*\n(with torch.no_grad.*?)```", PAGE.read_text(), re.S | re.M)
        exec(code, names)
        compared = 0
        for i, first in enumerate(batch.index.tolist()):
            real = int(batch.mask[i].sum())
            for j in range(real):
                assert names["targets"][i, j].item() == pytest.approx(values[first + j, min(5, real - j)], rel=1e-9)
                compared += 1
        assert compared == batch.mask.sum() > 250
