from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

import diskreplay as dr
from tests.cli.conftest import small_episode


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_a_strip_has_the_frames_of_an_episode_eight_in_a_row(run: Callable, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "strip.png"
    assert run("frames", small, 1, "--out", out) == (0, f"saved 61 frames of obs/image  {out}\n", "")
    sheet, frames = pixels(out), small_episode(1)["obs"]["image"]
    assert sheet.shape == (8 * 5 - 1, 8 * 5 - 1)
    for at, frame in enumerate(frames):
        top, left = at // 8 * 5, at % 8 * 5
        np.testing.assert_array_equal(sheet[top : top + 4, left : left + 4], frame)


def test_some_steps_of_an_episode_found_by_id_scaled(run: Callable, small: Path, tmp_path: Path) -> None:
    with dr.open(small) as store:
        step = int(store.episodes[3].ids[4])
    out = tmp_path / "strip.png"
    done = run("frames", small, step, "--id", "--steps", "1:3", "--scale", 3, "--out", out)
    assert (done.code, done.err) == (0, "")
    frames = small_episode(3)["obs"]["image"][1:3]
    sheet = pixels(out)
    assert sheet.shape == (12, 25)
    for left, frame in zip((0, 13), frames.repeat(3, 1).repeat(3, 2), strict=True):
        np.testing.assert_array_equal(sheet[:, left : left + 12], frame)
    assert run("frames", small, -1, "--steps", "-1", "--out", out).code == 0
    np.testing.assert_array_equal(pixels(out), small_episode(5)["obs"]["image"][-1])


def test_a_gif_has_a_frame_a_step(run: Callable, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "episode.gif"
    assert run("frames", small, 0, "--fps", 10, "--out", out).out == f"saved 4 frames of obs/image  {out}\n"
    with Image.open(out) as image:
        found = [np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(image)]
        assert image.info["duration"] == 100
    np.testing.assert_array_equal(found, small_episode(0)["obs"]["image"])


def test_an_mp4_has_a_frame_a_step(run: Callable, small: Path, tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="needs PyAV")
    out = tmp_path / "episode.mp4"
    assert run("frames", small, 0, "--fps", 60, "--scale", 4, "--out", out).out == (
        f"saved 4 frames of obs/image  {out}\n"
    )
    with av.open(str(out)) as film:
        found = [frame.to_ndarray(format="gray").astype(int) for frame in film.decode(video=0)]
    expected = small_episode(0)["obs"]["image"].repeat(4, 1).repeat(4, 2)
    assert np.abs(np.stack(found) - expected).mean() < 20  # noise is what it keeps least of


def test_a_strip_of_a_long_episode_has_64_frames(run: Callable, tmp_store: Path, tmp_path: Path) -> None:
    schema = dr.Schema(dr.Field((6, 5, 3), "uint8"), dr.Field((), "int64"))
    frames = np.random.default_rng(0).integers(0, 256, (1001, 6, 5, 3)).astype("u1")
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        writer.append_episode(frames, np.zeros(1000, int), np.zeros(1000), terminated=True)
    out = tmp_path / "strip.png"
    assert run("frames", tmp_store, 0, "--out", out).out == f"saved 64 frames of obs  {out}\n"
    sheet = pixels(out)
    assert sheet.shape == (8 * 7 - 1, 8 * 6 - 1, 3)
    np.testing.assert_array_equal(sheet[:6, :5], frames[0])
    np.testing.assert_array_equal(sheet[-6:, -5:], frames[1000])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([0, "--field", "action"], "action has no images; these have: obs/image"),
        ([9], "no episode 9: the store has 6 episodes"),
        ([0, "--steps", "90:"], "--steps 90: selects no step of the 3 steps"),
        ([0, "--out", "a.gif", "--fps", 60], "a GIF has at most 50 frames a second, not --fps 60; use .mp4"),
        ([0, "--out", "a.avi"], "--out must end in .png, .gif or .mp4, not a.avi"),
    ],
)
def test_what_has_no_frames_takes_one_line(
    run: Callable, small: Path, tmp_path: Path, arguments: list[object], message: str
) -> None:
    done = run("frames", small, "--out", tmp_path / "strip.png", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "strip.png").exists()
