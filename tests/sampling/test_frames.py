"""Frames are shifted as a plain loop pads and crops them, and scaled to floats."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr

FIRST, LAST, GREY = (3, 11, 14), (12, 10, 4), (13, 12)
SCHEMA = dr.Schema(
    obs={
        "first": dr.Field(FIRST, "uint8"),
        "last": dr.Field(LAST, "uint8"),
        "grey": dr.Field(GREY, "uint8"),
        "state": dr.Field((4,), "float32"),
    },
    action=dr.Field((), "int64"),
    extra={"value": dr.Field((), "float32")},
)
PAD = 2


def observe(rng: np.random.Generator) -> dict[str, Any]:
    frames = {name: rng.integers(0, 256, shape, np.uint8) for name, shape in zip(NAMES, SHAPES, strict=True)}
    return {**frames, "state": rng.standard_normal(4, np.float32)}


NAMES, SHAPES = ("first", "last", "grey"), (FIRST, LAST, GREY)


@pytest.fixture
def store(tmp_store: Path) -> Iterator[dr.Store]:
    rng = np.random.default_rng(0)
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        obs = observe(rng)
        for t in range(90):
            following = observe(rng)
            writer.append(obs, t, 0.0, t % 30 == 29, next_obs=following, value=0.0)
            obs = observe(rng) if t % 30 == 29 else following
        writer.flush()
        store.refresh()
        yield store


def crops(frames: np.ndarray, axes: tuple[int, int]) -> dict[tuple[int, int], np.ndarray]:
    """Pad with what is at the border, and crop at every place: DrQ's augmentation, one item at a time."""
    widths = [(0, 0)] * frames.ndim
    height, width = (frames.shape[axis] for axis in axes)
    for axis in axes:
        widths[axis] = (PAD, PAD)
    padded = np.pad(frames, widths, "edge")
    found = {}
    for down in range(2 * PAD + 1):
        for right in range(2 * PAD + 1):
            rows = np.take(padded, range(down, down + height), axes[0])
            found[down, right] = np.take(rows, range(right, right + width), axes[1])
    return found


def shift_of(found: np.ndarray, frames: np.ndarray, axes: tuple[int, int]) -> tuple[int, int]:
    """Return the one shift that makes an item out of all its frames."""
    places = [place for place, crop in crops(frames, axes).items() if np.array_equal(crop, found)]
    assert len(places) == 1
    return places[0]


def batches(store: dr.Store, view: Any, transform: Any, count: int = 6, **kwargs: Any) -> Iterator[Any]:
    """Yield batches, and what is stored of their ids."""
    with dr.Sampler(store, view, batch_size=16, seed=3, transform=transform, **kwargs) as sampler:
        for _ in range(count):
            batch = sampler.sample()
            yield batch.numpy(), sampler.gather(batch.index).numpy()


def shifts(
    store: dr.Store, view: Any, transform: Any, leaf: str, axes: tuple[int, int], **kwargs: Any
) -> tuple[list[Any], list[Any]]:
    """Return the shifts of all items of some batches, of obs and of next_obs."""
    found: tuple[list[Any], list[Any]] = [], []
    for batch, stored in batches(store, view, transform, **kwargs):
        for shifted, name in zip(found, ("obs", "next_obs"), strict=True):
            for item, frames in zip(batch[name][leaf], stored[name][leaf], strict=True):
                if frames.any():  # there may be no next observation
                    shifted.append(shift_of(item, frames, axes))
        np.testing.assert_array_equal(batch["obs"]["state"], stored["obs"]["state"])
    return found


VIEWS = [
    dr.Transitions(),
    dr.Transitions(n_step=2, frame_stack={"first": 3, "grey": 3, "last": 2}),
    dr.Sequences(length=4, overlap=2),
    dr.Sequences(length=4, overlap=2, frame_stack=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize(("leaf", "last"), [("first", False), ("grey", False), ("last", True)])
def test_every_item_is_padded_and_cropped_at_one_place(store: dr.Store, view: Any, leaf: str, last: bool) -> None:
    transform = dr.RandomShift(PAD, [leaf], channels_last=last)
    obs, following = shifts(store, view, transform, leaf, (-3, -2) if last else (-2, -1))
    assert len(obs) == 96
    assert len(following) >= 80
    for found in (obs, following):
        assert len(set(found)) > 18  # of 25


def test_each_step_of_a_rollout_has_a_shift_of_its_own(store: dr.Store) -> None:
    transform = dr.RandomShift(PAD, ["grey"])
    with dr.Sampler(store, dr.Rollouts(30), seed=0, transform=transform) as sampler:
        batch = sampler.sample()
        stored = sampler.gather(batch.index.flatten())
        pairs = zip(batch.obs["grey"][:, 0].numpy(), stored.obs["grey"][:, 0].numpy(), strict=True)
        found = [shift_of(item, frames, (-2, -1)) for item, frames in pairs]
        assert len(found) == 30
        assert len(set(found)) > 10


@pytest.mark.slow
def test_shifts_are_even(store: dr.Store) -> None:
    places = shifts(store, dr.Transitions(), dr.RandomShift(PAD, ["grey"]), "grey", (-2, -1), count=60)[0]
    counts = np.bincount([5 * down + right for down, right in places], minlength=25)
    expected = len(places) / 25
    assert len(places) == 960
    assert ((counts - expected) ** 2 / expected).sum() < 51.2  # chi-square, 24 degrees of freedom, p = 0.001


@pytest.mark.parametrize("shared", [False, True])
def test_next_obs_has_shifts_of_its_own_unless_shared(store: dr.Store, shared: bool) -> None:
    inside = dr.Transitions(n_step=1)
    found = shifts(store, inside, dr.RandomShift(PAD, ["grey"], shared=shared), "grey", (-2, -1))
    pairs = list(zip(*found, strict=True))
    assert len(pairs) == 96
    assert sum(one == other for one, other in pairs) == 96 if shared else sum(a == b for a, b in pairs) < 20


@pytest.mark.slow
def test_by_default_all_frames_are_shifted_each_leaf_by_its_own_shift(tmp_store: Path) -> None:
    schema = dr.Schema(obs=(dr.Field(GREY, "uint8"), dr.Field(GREY, "uint8"), dr.Field((3,), "uint8")), action=F32)
    rng = np.random.default_rng(0)
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        for t in range(20):
            writer.append((*rng.integers(0, 256, (2, *GREY), np.uint8), np.zeros(3, np.uint8)), 0.0, 0.0, t == 19)
        differ = 0
        for batch, stored in batches(store, dr.Transitions(), dr.RandomShift(PAD)):
            for item in range(16):
                pair = [shift_of(batch["obs"][n][item], stored["obs"][n][item], (-2, -1)) for n in (0, 1)]
                differ += pair[0] != pair[1]
        assert differ > 80


F32 = dr.Field((), "float32")


@pytest.mark.usefixtures("threads_make_all")
@pytest.mark.parametrize("ahead", [0, 3])
def test_shifts_are_a_function_of_seed_and_batch(store: dr.Store, ahead: int) -> None:
    def drawn(**kwargs: Any) -> list[bytes]:
        found = batches(store, dr.Transitions(), dr.RandomShift(PAD, ["grey"]), **kwargs)
        return [batch["obs"]["grey"].tobytes() for batch, _ in found]

    assert drawn() == drawn(prefetch=ahead)
    # Which fields a batch has changes no shift.
    assert drawn() == drawn(fields=("obs/grey",))


@pytest.mark.slow
def test_the_device_that_a_batch_is_on_does_not_matter(store: dr.Store) -> None:
    transform = [dr.RandomShift(PAD, ["grey"]), dr.ToFloat(fields=["grey"])]
    with dr.Sampler(store, dr.Transitions(), batch_size=8, device="meta", transform=transform, seed=0) as sampler:
        batch = sampler.sample()
        assert batch.obs["grey"].device.type == "meta"
        assert batch.obs["grey"].shape == (8, *GREY)
        assert batch.obs["grey"].dtype is torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("view", VIEWS[:3], ids=str)
def test_to_float_scales_all_of_uint8(store: dr.Store, view: Any, dtype: torch.dtype) -> None:
    compared = 0
    with dr.Sampler(store, view, batch_size=16, seed=3, transform=dr.ToFloat(dtype=dtype)) as sampler:
        for _ in range(3):
            batch = sampler.sample()
            stored = sampler.gather(batch.index)
            for name in ("obs", "next_obs"):
                for leaf in NAMES:
                    assert batch[name][leaf].dtype is dtype
                    expected = torch.from_numpy(stored[name][leaf].numpy() * np.float32(1 / 255)).to(dtype)
                    assert torch.equal(batch[name][leaf], expected)
                    compared += expected.numel()
                assert torch.equal(batch[name]["state"], stored[name]["state"])
    assert compared > 100_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dr.RandomShift(0), "pad must be an int of at least 1, not 0"),
        (lambda: dr.RandomShift(1, "image"), "fields must be a sequence of field names"),
        (lambda: dr.RandomShift(1, channels_last=1), "channels_last must be True or False, not 1"),
        (lambda: dr.ToFloat(scale=np.inf), "scale must be a finite number, not inf"),
        (lambda: dr.ToFloat(dtype=torch.uint8), "dtype must be a floating point dtype of torch, not torch.uint8"),
    ],
)
def test_arguments_that_are_invalid_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            dr.RandomShift(2, ["grey", "depth"]),
            "fields names 'depth'; the observation leaves of this store are 'first'",
        ),
        (dr.RandomShift(2, ["state"]), r"obs/state, \(4,\) with channels_last=False, has no frames"),
        (
            dr.RandomShift(2),
            r"obs/last, \(12, 10, 4\) with channels_last=False, has no frames that could be shifted by 2",
        ),
        (dr.RandomShift(6, ["first"]), r"obs/first, \(3, 11, 14\) .* shifted by 6 pixels"),
        (dr.ToFloat(fields=["depth"]), "fields names 'depth'"),
    ],
)
def test_leaves_that_are_no_frames_are_refused_by_name(store: dr.Store, transform: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        dr.Sampler(store, dr.Transitions(), transform=transform)


def test_a_store_without_frames_is_refused(tmp_store: Path) -> None:
    with dr.create(tmp_store, dr.Schema(F32, F32)) as store:
        for transform in (dr.RandomShift(), dr.ToFloat()):
            with pytest.raises(ValueError, match="^fields: no observation leaf is of uint8.*, of 'obs'$"):
                dr.Sampler(store, dr.Transitions(), transform=transform)
