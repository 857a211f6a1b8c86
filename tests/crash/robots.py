"""A robot with a camera, the loop that records it, and a check that a data set of LeRobot has every step of it.

Each value is a function of the run, the number of the episode in it, and the step. The state begins with these three
numbers. So a frame says by itself which step it is, and its other values can be computed again.
"""

import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
from PIL import Image

import diskreplay as dr
from tests.crash.injection import in_child

FPS, TASK = 20, "put the cube into the box"
HEIGHT, WIDTH = 24, 32
STATE, ACTION = 6, 3
CAMERA, FILM = "observation.images.front", "videos/observation.images.front"
# H.264 keeps colours at half the resolution, and rounds. Consecutive frames differ by 24 or more.
MOST_ERROR, MOST_MEAN_ERROR = 12, 2.0
LONGEST = 40
LONGEST_S = 0.3  # between the first message of a run and its kill

Key = tuple[int, int, int]
"""The run, the episode in it, and the step."""

Row = dict[str, Any]
"""A frame of a data set by feature."""


class Plan(NamedTuple):
    """The number of steps of an episode, and how it ends: "terminated", "truncated", or "reset" by the operator."""

    steps: int
    end: str


class Robot(gym.Env[Any, Any]):
    """A robot that plays back one run."""

    observation_space = gym.spaces.Dict(
        {
            "images": gym.spaces.Dict({"front": gym.spaces.Box(0, 255, (HEIGHT, WIDTH, 3), np.uint8)}),
            "state": gym.spaces.Box(-np.inf, np.inf, (STATE,), np.float32),
        }
    )
    action_space = gym.spaces.Box(-np.inf, np.inf, (ACTION,), np.float32)

    def __init__(self, run: int = 0) -> None:
        self._run, self._episode, self._t = run, -1, 0

    @property
    def key(self) -> Key:
        """The step that comes next."""
        return self._run, self._episode, self._t

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode of the run."""
        super().reset(seed=seed)
        self._episode, self._t = self._episode + 1, 0
        return observation(self.key), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move on to the next step; the action must be the one of this step."""
        np.testing.assert_array_equal(action, action_of(self.key))
        reward, plan = reward_of(self.key), plan_of(self.key)
        self._t += 1
        ended = self._t == plan.steps
        return (
            observation(self.key),
            reward,
            ended and plan.end == "terminated",
            ended and plan.end == "truncated",
            {},
        )


def plan_of(key: Key) -> Plan:
    """Return how the episode of a step ends."""
    rng = np.random.default_rng(key[:2])
    return Plan(int(rng.integers(1, LONGEST + 1)), str(rng.choice(["terminated", "truncated", "reset"])))


def observation(key: Key) -> dict[str, Any]:
    """Return the observation before a step."""
    state = np.concatenate([np.float32(key), np.random.default_rng(key).normal(size=STATE - 3).astype(np.float32)])
    return {"images": {"front": image_of(key)}, "state": state}


def image_of(key: Key) -> np.ndarray:
    """Return the image of the camera before a step: a slope of colours, whose brightness depends on the step."""
    run, episode, t = key
    brightness = 20 + 24 * ((t + 3 * episode + 5 * run) % 7)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    slope = np.stack([rows, columns, (rows + columns) // 2], axis=-1)
    return (brightness + slope).astype(np.uint8)


def action_of(key: Key) -> np.ndarray:
    """Return the action of a step."""
    return np.random.default_rng((*key, 1)).normal(size=ACTION).astype(np.float32)


def reward_of(key: Key) -> float:
    """Return the reward of a step, which float32 holds exactly."""
    return key[2] - 0.25 * key[1]


def record(path: Path, run: int, tell: Callable[[Any], None]) -> None:
    """Record a run until the process is killed, and tell the key of every step whose append has returned."""
    if run % 2:
        tell(None)  # the moment of the kill counts from here, or from the first reset
    with dr.open(path, "a") as store:
        robot = Robot(run)
        env = dr.RecordEpisodes(robot, store)
        for _ in itertools.count():
            env.reset()
            tell(None)
            for _ in range(plan_of(robot.key).steps):
                key = robot.key
                env.step(action_of(key))
                tell(key)


def record_and_kill(path: Path, kills: int) -> list[Key]:
    """Record into a new store, with a kill at a random moment of each run; return the steps that were told.

    The episode that the last kill left open is cut, as by the next writer.
    """
    rng, told = np.random.default_rng(kills), []
    dr.create(path, dr.Schema.from_env(Robot())).close()
    for run in range(kills):
        death = in_child(partial(record, path, run), kill_after_s=rng.uniform(0, LONGEST_S))
        assert death.died
        told += [key_of(key) for key in death.told if key is not None]
    dr.open(path, "a").close()
    return told


# --- the data set ----------------------------------------------------------------------------------------------------


def check_data_set(root: Path, told: Iterable[Key], *, video: bool) -> None:
    """Check that a data set has each step of a list, and that its tables agree."""
    read = list(read_rows(root))
    rows = check_rows(read, told, video=video)
    info = json.loads((root / "meta/info.json").read_text())
    lines = [line for path in sorted(root.glob("meta/episodes/*/*")) for line in pq.read_table(path).to_pylist()]
    assert len(rows) == info["total_frames"] == sum(line["length"] for line in lines)
    assert len(lines) == info["total_episodes"]
    assert {tuple(line["tasks"]) for line in lines} == {(TASK,)}
    assert len({(*key[:2], row["episode_index"]) for key, row in rows.items()}) == len(lines)


def check_rows(read: Sequence[Row], told: Iterable[Key], *, video: bool) -> dict[Key, Row]:
    """Check that frames are the steps that were told, each once and with all its values; return them by step.

    Of each run there may be one step more: the process died between the end of the append and the message.
    """
    rows = {key_of(row["observation.state"]): row for row in read}
    assert len(rows) == len(read)
    expected = set(told)
    assert expected - rows.keys() == set()
    more = [key[0] for key in rows.keys() - expected]
    assert len(more) == len(set(more))
    for key, row in rows.items():
        check_row(key, row, last=following(key) not in rows, video=video)
    return rows


def following(key: Key) -> Key:
    """Return the next step of an episode."""
    return *key[:2], key[2] + 1


def key_of(state: Any) -> Key:
    """Return the step that a state was seen before."""
    run, episode, t = (int(value) for value in state[:3])
    return run, episode, t


def check_row(key: Key, row: Row, *, last: bool, video: bool) -> None:
    """Check all values of one frame of a data set; `last` if no later frame of its episode is there."""
    before, t = observation(key), key[2]
    np.testing.assert_array_equal(np.float32(row["observation.state"]), before["state"])
    np.testing.assert_array_equal(np.float32(row["action"]), action_of(key))
    assert row["next.reward"] == reward_of(key)
    assert (row["frame_index"], row["timestamp"]) == (t, np.float32(t / FPS))
    plan = plan_of(key)
    end = plan.end if t + 1 == plan.steps else "cut or not at its end"
    assert row["next.done"] == (end in ("terminated", "truncated"))
    # A data set has these two columns if an episode was truncated; else `next.done` says which were terminated.
    assert row.get("next.terminated", row["next.done"]) == (end == "terminated")
    assert row.get("next.truncated", False) == (end == "truncated")
    assert last or t + 1 < plan.steps
    error = np.abs(row[CAMERA].astype(int) - before["images"]["front"])
    assert error.max() <= (MOST_ERROR if video else 0)
    assert error.mean() <= MOST_MEAN_ERROR


def read_rows(root: Path) -> Iterator[Row]:
    """Yield the frames of a data set of LeRobot in order, with their images, read by pyarrow, pillow and av alone."""
    films = itertools.chain.from_iterable(map(read_film, sorted(root.glob(f"{FILM}/*/*.mp4"))))
    tasks = pq.read_table(root / "meta/tasks.parquet").to_pylist()
    assert tasks == [{"task_index": 0, "task": TASK}]
    count = 0
    for path in sorted(root.glob("data/*/*.parquet")):
        for row in pq.read_table(path).to_pylist():
            assert (row["index"], row["task_index"]) == (count, 0)
            count += 1
            image = row.get(CAMERA)
            row[CAMERA] = next(films) if image is None else np.asarray(Image.open(io.BytesIO(image["bytes"])))
            yield row
    assert next(films, None) is None


def read_film(path: Path) -> Iterator[np.ndarray]:
    """Yield the frames of a video."""
    with av.open(str(path)) as film:
        for frame in film.decode(film.streams.video[0]):
            yield frame.to_ndarray(format="rgb24")
