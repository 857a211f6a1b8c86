import io

import numpy as np
import pytest
from PIL import Image, ImageSequence

import diskreplay as dr
from diskreplay.pictures import as_images, gif, is_image, mp4, png, smaller, strip


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((7, 9), (7, 9)),
        ((7, 9, 1), (7, 9)),
        ((1, 7, 9), (7, 9)),
        ((7, 9, 3), (7, 9, 3)),
        ((3, 7, 9), (7, 9, 3)),
        ((7, 9, 4), (7, 9)),
        ((4, 7, 9), (7, 9)),
    ],
)
def test_channels_and_stacks_lie_on_either_side(shape: tuple[int, ...], shown: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype("u1")
    images = as_images(rows)
    assert images.shape == (2, *shown)
    if shape[:1] == (4,):
        np.testing.assert_array_equal(images, rows[:, 3])
    if shape == (3, 7, 9):
        np.testing.assert_array_equal(images, rows.transpose(0, 2, 3, 1))


def test_other_numbers_are_shown_between_their_least_and_greatest() -> None:
    rows = np.array([[[-1.0, 0.0], [1.0, np.nan]]], np.float32)
    assert as_images(rows).tolist() == [[[0, 128], [255, 0]]]
    assert as_images(np.array([[[False, True]]])).tolist() == [[[0, 255]]]
    assert as_images(np.full((1, 2, 2), 7)).tolist() == [[[0, 0], [0, 0]]]
    assert as_images(np.full((1, 2, 2), np.nan)).tolist() == [[[0, 0], [0, 0]]]


def test_vectors_are_no_images() -> None:
    shapes = [(), (4,), (1, 4), (2, 1, 4), (1, 1, 9), (2, 2), (3, 84, 84), (2, 2, 2, 2)]
    assert [is_image(dr.Field(shape, "uint8")) for shape in shapes] == [
        *(False, False, False),
        *(True, False, True, True, False),
    ]


@pytest.mark.parametrize("shape", [(3, 8, 12), (3, 8, 12, 3)])
def test_pictures_are_read_back_from_png_and_gif(shape: tuple[int, ...]) -> None:
    frames = (np.random.default_rng(0).random(shape) < 0.5).astype("u1") * 255
    with Image.open(io.BytesIO(png(frames[0]))) as image:
        np.testing.assert_array_equal(np.asarray(image), frames[0])
    with Image.open(io.BytesIO(gif(frames, 20))) as image:
        assert (image.info["duration"], image.info["loop"]) == (50, 0)
        found = [
            np.asarray(frame.convert("RGB" if len(shape) == 4 else "L")) for frame in ImageSequence.Iterator(image)
        ]
    np.testing.assert_array_equal(found, frames)


@pytest.mark.parametrize("shape", [(5, 20, 24), (5, 21, 25, 3), (1, 1, 1, 3)])
def test_pictures_are_read_back_from_an_mp4(shape: tuple[int, ...]) -> None:
    av = pytest.importorskip("av", reason="needs PyAV")
    y, x = np.mgrid[: shape[1], : shape[2]]
    grey = np.stack([np.clip(40 * t + 2 * x + 3 * y, 0, 255) for t in range(shape[0])]).astype("u1")
    frames = grey if len(shape) == 3 else np.stack([grey, grey // 2, 255 - grey], -1)
    with av.open(io.BytesIO(mp4(frames, 12.5))) as film:
        assert float(film.streams.video[0].average_rate) == 12.5
        found = np.stack([frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]).astype(int)
    assert found.shape == (shape[0], shape[1] + shape[1] % 2, shape[2] + shape[2] % 2, 3)
    expected = frames if frames.ndim == 4 else np.repeat(frames[..., None], 3, -1)
    assert np.abs(found[:, : shape[1], : shape[2]] - expected).mean() < 4
    assert np.abs(found[:, shape[1] :] - found[:, shape[1] - 1 : shape[1]]).mean() < 4 if shape[1] % 2 else True


def test_an_encoder_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av")
    monkeypatch.setattr(av, "codecs_available", frozenset({"gif"}))
    with pytest.raises(dr.ReplayError, match=r"^this PyAV has no encoder of libx264, .*mpeg4: .* a GIF instead$"):
        mp4(np.zeros((2, 4, 4), np.uint8), 10)


def test_frames_lie_eight_in_a_row() -> None:
    sheet = strip(np.zeros((9, 4, 5, 3), np.uint8))
    assert sheet.shape == (2 * 5 - 1, 8 * 6 - 1, 3)
    assert strip(np.zeros((2, 4, 5), np.uint8)).shape == (4, 11)
    assert (sheet[4] == 255).all()


def test_large_pictures_are_made_smaller_by_means_of_blocks() -> None:
    images = np.arange(2 * 5 * 9 * 3).reshape(2, 5, 9, 3).astype("u1")
    found = smaller(images, 4)
    assert found.shape == (2, 1, 3, 3)
    np.testing.assert_array_equal(found[1, 0, 2], images[1, :3, 6:9].reshape(9, 3).mean(0).round())
    assert smaller(images, 9) is images
    assert smaller(np.zeros((1, 2, 1000), np.uint8), 100).shape == (1, 2, 1000)  # a line cannot be made smaller
