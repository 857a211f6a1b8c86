"""A robot is recorded, its process is killed again and again, and the published data set has every step."""

from pathlib import Path

import pytest

import diskreplay as dr

pytest.importorskip("gymnasium")
pytest.importorskip("pyarrow")
pytest.importorskip("av")
pytest.importorskip("PIL")

from diskreplay.__main__ import main
from tests.crash import robots


def check_published(folder: Path, kills: int) -> None:
    path = folder / "robot.replay"
    told = robots.record_and_kill(path, kills)
    assert len(told) > kills
    options = ["--option", f"fps={robots.FPS}", "--option", f"task={robots.TASK}"]
    for video in (False, True):
        root = folder / ("films" if video else "images")
        assert main(["export", str(path), f"lerobot:{root}", *options, *["--video"] * video]) == 0
        robots.check_data_set(root, told, video=video)
    with dr.open(path) as store:
        assert store.verify(deep=True) == []
        assert all(episode.ended != "open" for episode in store.episodes)


def test_a_robot_that_is_killed_while_it_records_loses_no_frame_of_the_published_data_set(tmp_path: Path) -> None:
    check_published(tmp_path, kills=3)


@pytest.mark.slow(turns=4)
@pytest.mark.timeout(1800)
def test_a_robot_that_is_killed_200_times_loses_no_frame_of_the_published_data_set(tmp_path: Path) -> None:
    check_published(tmp_path, kills=200)
