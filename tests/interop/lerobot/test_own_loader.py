"""LeRobot's own loader, in an environment of its own, reads data sets that were recorded and exported here."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr

pytest.importorskip("gymnasium")
pytest.importorskip("av")
pytest.importorskip("pyarrow")

from diskreplay.interop.lerobot import export_dataset
from tests.crash import robots
from tests.tiers import NIGHTLY

OLDEST, NEWEST = "lerobot==0.4.0", "lerobot"
"""The first version that reads data sets of version 3.0, and the newest that the Python here can run."""

TORCHCODEC = "0.13.0"  # later builds for Linux need CUDA, earlier ones another torch
FFMPEG = "avcodec", "avdevice", "avfilter", "avformat", "avutil", "swresample", "swscale"
# Packages that the loader does not import: some have to be compiled, and others take hundreds of megabytes.
UNUSED = "cmake", "diffusers", "evdev", "imageio", "pynput", "pyserial", "rerun-sdk", "wandb"


def make_environment(folder: Path, requirement: str) -> Path:
    """Make an environment with LeRobot, and return its Python."""
    environments = pytest.importorskip("tools.environments")  # an sdist has none
    folder.mkdir()
    minor = int(environments.pins()["torch"].split(".")[1])
    overrides = f"torchvision==0.{minor + 15}.*", f"torchcodec=={TORCHCODEC}"  # the one for this version of torch
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env/bin/python"
    environments.Resolver(folder, overrides).install(python, [requirement], environments.NEWEST, without=UNUSED)
    return python


def link_ffmpeg(python: Path, folder: Path) -> None:
    """Link the libraries of FFmpeg that PyAV brings by the names that torchcodec asks for."""
    folder.mkdir()
    (libraries,) = python.parents[1].glob("lib/python*/site-packages/av.libs")
    for name in FFMPEG:
        (library,) = libraries.glob(f"lib{name}-*.so.*")
        major = re.fullmatch(r".+\.so\.(\d+)\..+", library.name)
        assert major is not None
        (folder / f"lib{name}.so.{major[1]}").symlink_to(library)


@pytest.fixture(params=[OLDEST, NEWEST], ids=["oldest", "newest"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The Python of an environment with LeRobot, which takes more than a gigabyte as long as the test runs."""
    yield make_environment(tmp_path / "lerobot", request.param)
    shutil.rmtree(tmp_path / "lerobot")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not NIGHTLY, reason="installs LeRobot: tools/nightly runs it")
def test_lerobots_own_loader_reads_every_frame_that_a_killed_robot_had_recorded(python: Path, tmp_path: Path) -> None:
    told = robots.record_and_kill(tmp_path / "robot.replay", kills=10)
    sets = [(video, tmp_path / f"{kind}.npz", tmp_path / kind) for video, kind in ((False, "images"), (True, "films"))]
    for video, _, root in sets:
        export_dataset(tmp_path / "robot.replay", root, fps=robots.FPS, task=robots.TASK, video=video)
    link_ffmpeg(python, tmp_path / "ffmpeg")
    command = [python, Path(__file__).with_name("own_loader.py"), *(path for each in sets for path in each[1:])]
    hidden = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "LD_LIBRARY_PATH": str(tmp_path / "ffmpeg")}
    done = subprocess.run(
        [str(part) for part in command], cwd=tmp_path, env=os.environ | hidden,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    for video, frames, _ in sets:
        with np.load(frames) as loaded:
            check_frames(dict(loaded), told, video=video)
    with dr.open(tmp_path / "robot.replay") as store:
        assert store.num_episodes > 10


def check_frames(loaded: dict[str, np.ndarray], told: list[robots.Key], *, video: bool) -> None:
    """Check the frames that the loader gave, and the actions ahead of each."""
    count = len(loaded["index"])
    assert loaded["index"].tolist() == list(range(count))
    assert set(loaded["task"]) == {robots.TASK}
    ahead, is_pad = loaded.pop("action"), loaded.pop("action_is_pad")
    rows = [{name: values[i] for name, values in loaded.items()} | {"action": ahead[i, 0]} for i in range(count)]
    by_key = robots.check_rows(rows, told, video=video)
    for row, actions, pads in zip(rows, ahead, is_pad, strict=True):
        key = robots.key_of(row["observation.state"])
        for action, pad in zip(actions, pads, strict=True):
            assert pad == (key not in by_key)
            if not pad:
                np.testing.assert_array_equal(action, robots.action_of(key))
            key = robots.following(key)
