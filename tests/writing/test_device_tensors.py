"""Writers take tensors of a device as they are; what does not need a device runs on a stand-in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr
from tests.testing.device import Device

LANES, STEPS = 3, 12
SCHEMA = dr.Schema(
    obs={"image": dr.Field((2, 2), "uint8"), "at": dr.Field((5,), "float32")},
    action=(dr.Field((), "int64"), dr.Field((2,), "float32")),
    extra={"value": dr.Field((), "float64"), "flag": dr.Field((), "bool")},
    episode={"seed": dr.Field((), "int64")},
)
ToDevice = Callable[[np.ndarray], Any]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", device.current)
    return device


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=GPU)])
def to_device(request: pytest.FixtureRequest) -> ToDevice:
    if request.param == "cuda":
        return lambda array: torch.from_numpy(array.copy()).cuda()
    return request.getfixturevalue("device").tensor


def mapped(function: ToDevice, value: Any) -> Any:
    """Return nested values with a function's result for each array."""
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(mapped(function, item) for item in value)
    return function(value)


def rows(rng: np.random.Generator, *leading: int) -> dict[str, Any]:
    """Return the fields of steps that no end belongs to."""
    return {
        "obs": observations(rng, *leading),
        "action": (rng.integers(2, 9, leading), rng.standard_normal((*leading, 2)).astype("f4")),
        "reward": rng.standard_normal(leading),
        "value": rng.standard_normal(leading),
        "flag": rng.random(leading) < 0.5,
    }


def observations(rng: np.random.Generator, *leading: int) -> dict[str, np.ndarray]:
    image = rng.integers(2, 255, (*leading, 2, 2), np.uint8)
    return {"image": image, "at": rng.standard_normal((*leading, 5)).astype("f4")}


def vector_steps(seed: int = 0) -> list[dict[str, Any]]:
    """Return the arguments of appends: episodes end, lanes are left out, and all that is optional is there."""
    rng = np.random.default_rng(seed)
    steps = []
    for t in range(STEPS):
        step = rows(rng, LANES)
        step["terminated"], step["truncated"] = rng.random((2, LANES)) < 0.3
        step["next_obs"], step["mask"] = observations(rng, LANES), rng.random(LANES) < 0.8
        step["priority"] = rng.random(LANES)
        step["episode"] = {"seed": np.arange(LANES) + 10 * t}
        steps.append(step)
    return steps


def contents(store: dr.Store) -> list[tuple[Any, ...]]:
    store.refresh()
    paths = [*store.schema.step_leaves]
    found = []
    for episode in store.episodes:
        obs = {key: episode.obs[key].tolist() for key in ("image", "at")}
        rest = [np.asarray(part).tolist() for part in (episode.reward, episode["value"], episode["flag"])]
        ends = episode.terminated, episode.truncated, episode["seed"]
        found.append((len(paths), obs, [part.tolist() for part in episode.action], rest, ends))
    return found


@pytest.mark.filterwarnings("ignore:an appended obs differs from the next_obs")
def test_a_vector_writes_tensors_of_a_device_as_arrays(tmp_path: Path, to_device: ToDevice) -> None:
    with (
        dr.create(tmp_path / "arrays", SCHEMA) as expected,
        dr.create(tmp_path / "tensors", SCHEMA) as store,
        expected.writer(num_envs=LANES) as of_arrays,
        store.writer(num_envs=LANES) as writer,
    ):
        for step in vector_steps():
            of_arrays.append(**step)
            tensors = mapped(to_device, step)
            writer.append(**tensors)
            mapped(lambda tensor: tensor.zero_(), tensors)  # the caller may change them
            assert writer.last_ids.tolist() == of_arrays.last_ids.tolist()
            store.refresh()
            expected.refresh()
            assert len(store) == len(expected)  # the newest step is there
        assert contents(store) == contents(expected)
        assert len(contents(store)) > LANES


@pytest.mark.parametrize("num_envs", [None, LANES])
def test_whole_episodes_of_a_device_are_those_of_arrays(
    tmp_path: Path, to_device: ToDevice, num_envs: int | None
) -> None:
    lane = () if num_envs is None else (1,)
    with dr.create(tmp_path / "arrays", SCHEMA) as expected, dr.create(tmp_path / "tensors", SCHEMA) as store:
        with expected.writer(num_envs) as of_arrays, store.writer(num_envs) as writer:
            for seed in range(3):
                episode = rows(np.random.default_rng(seed), 7)
                episode["terminated"], episode["episode"] = np.array(seed == 1), {"seed": np.array(seed)}
                of_arrays.append_episode(*lane, **episode)
                tensors = mapped(to_device, episode)
                writer.append_episode(*lane, **tensors)
                mapped(lambda tensor: tensor.zero_(), tensors)
        assert contents(store) == contents(expected)


def test_a_call_waits_once_for_all_its_tensors(tmp_store: Path, device: Device) -> None:
    (step,) = vector_steps()[:1]
    with dr.create(tmp_store, SCHEMA) as store:
        with store.writer(num_envs=LANES) as writer:
            writer.append(**mapped(device.tensor, step))
            assert device.stream.waits == 1
            writer.append_episode(0, **mapped(device.tensor, rows(np.random.default_rng(0), 7)), terminated=True)
            assert device.stream.waits == 2
        with store.writer() as lone:
            lone.append_episode(**mapped(device.tensor, rows(np.random.default_rng(0), 7)), terminated=True)
            assert device.stream.waits == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reward", np.zeros(LANES + 1), "reward: got float64 of shape (4,), needs float32 of shape (3,)"),
        ("terminated", np.full(LANES, 0.5), "terminated needs shape (3,), one truth value a lane, bools or 0 and 1"),
        ("priority", np.full(LANES, np.inf), "priority[0] is inf"),
    ],
)
def test_a_call_that_is_refused_writes_nothing(
    tmp_store: Path, to_device: ToDevice, name: str, value: np.ndarray, message: str
) -> None:
    (step,) = vector_steps()[:1]
    del step["mask"]
    with dr.create(tmp_store, SCHEMA) as store, store.writer(num_envs=LANES) as writer:
        with pytest.raises(dr.SchemaError) as refusal:
            writer.append(**mapped(to_device, step | {name: value}))
        assert message in str(refusal.value)
        assert writer.last_ids.tolist() == [-1] * LANES
        assert store.refresh() == 0
        writer.append(**mapped(to_device, step))
        assert store.refresh() == LANES
