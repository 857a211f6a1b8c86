"""The recorder term of `examples/isaac_lab.py`, by a stand-in for Isaac Lab that calls it as the real one does."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.crash.injection import in_child
from tests.testing.calls import calls
from tests.testing.support import REPOSITORY

torch = pytest.importorskip("torch")
pytest.importorskip("gymnasium")

STAND_IN = Path(__file__).with_name("stand_in")
EXAMPLE = REPOSITORY / "examples/isaac_lab.py"
STEPS = 60


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example, which imports the stand-in."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    yield import_module("examples.isaac_lab")
    for name in [name for name in sys.modules if name.split(".")[0] == "isaaclab" or name == "examples.isaac_lab"]:
        del sys.modules[name]


def make_env(example: ModuleType, path: Path, num_envs: int, **options: Any) -> Any:
    """Return an environment that is recorded into a store."""
    envs = import_module("isaaclab.envs")
    recorders = example.StoreRecorderManagerCfg()
    recorders.store.path = str(path)
    return envs.ManagerBasedRLEnv(envs.ManagerBasedRLEnvCfg(recorders=recorders, num_envs=num_envs, **options))


def actions_of(env: Any, step: int) -> Any:
    rng = torch.Generator().manual_seed(step)
    return torch.rand(env.num_envs, 2, generator=rng) - 0.5


def episodes_in(log: list[Any], num_envs: int) -> list[list[dict[str, Any]]]:
    """Return the episodes of each environment by the log: the values of their steps, and how they ended."""
    done: list[list[dict[str, Any]]] = [[] for _ in range(num_envs)]
    running: list[dict[str, Any] | None] = [None] * num_envs

    def end(i: int, how: dict[str, bool], final: Any, success: Any) -> None:
        episode = running[i]
        if episode is not None:
            leaves = leaves_of(final)
            obs = {name: np.stack([*rows, leaves[name][i]]) for name, rows in episode["obs"].items()}
            rest = {name: np.stack(episode[name]) for name in ("action", "reward")}
            done[i].append({"obs": obs, **rest, **how, "success": success})
            running[i] = None

    for kind, *entry in log:
        if kind == "reset":
            numbers, obs, success = entry
            for i in numbers:
                end(i, {"terminated": False, "truncated": True, "cut": True}, obs, bool(success[i]))
            continue
        before, action, reward, terminated, truncated, after, success = entry
        leaves = leaves_of(before)
        for i in range(num_envs):
            if running[i] is None:
                running[i] = {"obs": {name: [] for name in leaves}, "action": [], "reward": []}
            for name, values in leaves.items():
                running[i]["obs"][name].append(values[i])
            running[i]["action"].append(action[i].numpy())
            running[i]["reward"].append(reward[i].numpy())
            if terminated[i] or truncated[i]:
                how = {"terminated": bool(terminated[i]), "truncated": bool(truncated[i]), "cut": False}
                end(i, how, after, bool(success[i]))
    return done


def leaves_of(obs: Any) -> dict[str, np.ndarray]:
    return {
        "policy": obs["policy"].numpy(),
        **{f"critic/{name}": values.numpy() for name, values in obs["critic"].items()},
    }


def check_episode(found: dr.Episode, expected: dict[str, Any], with_success: bool) -> None:
    for name, rows in leaves_of_episode(found).items():
        np.testing.assert_array_equal(rows, expected["obs"][name], err_msg=name, strict=True)
    np.testing.assert_array_equal(found.action, expected["action"], strict=True)
    np.testing.assert_array_equal(found.reward, expected["reward"], strict=True)
    ends = {name: getattr(found, name) for name in ("terminated", "truncated", "cut")}
    assert ends == {name: expected[name] for name in ends}
    if with_success:
        assert bool(found["success"]) == expected["success"]


def leaves_of_episode(episode: dr.Episode) -> dict[str, np.ndarray]:
    return {
        "policy": episode.obs["policy"],
        **{f"critic/{name}": values for name, values in episode.obs["critic"].items()},
    }


@pytest.mark.parametrize("ids_as_lists", [True, False], ids=["lists of ids", "tensors and slices"])
@pytest.mark.parametrize("with_success", [True, False], ids=["success", "no success"])
def test_every_value_is_recorded_across_resets_of_ended_and_of_running_environments(
    example: ModuleType, tmp_path: Path, ids_as_lists: bool, with_success: bool
) -> None:
    env = make_env(example, tmp_path / "store", 7, ids_as_lists=ids_as_lists, with_success=with_success)
    env.reset()
    for t in range(STEPS):
        env.step(actions_of(env, t))
        if t in (15, 45):
            env.reset()
        if t in (25, 26):
            env.reset(torch.tensor([1, 4, 5]))
        if t == 35:
            env.reset([2])
    env.reset()  # so that no episode is left open
    log = env.log
    env.close()
    expected = episodes_in(log, 7)
    with dr.open(tmp_path / "store") as store:
        found: list[list[dr.Episode]] = [[] for _ in range(7)]
        for episode in store.episodes:
            found[episode.obs["critic"]["where"][0, 0]].append(episode)
        for lane in found:
            lane.sort(key=lambda episode: episode.obs["critic"]["where"][0, 1])
        assert [len(lane) for lane in found] == [len(lane) for lane in expected]
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                check_episode(one, other, with_success)
        ends = {(each["terminated"], each["truncated"], each["cut"]) for lane in expected for each in lane}
        assert len(ends) == 4, "terminated, truncated, both and cut ones"
        assert len(store) == STEPS * 7
        assert store.verify(deep=True) == []


def test_a_step_of_thousands_of_environments_has_no_call_for_each_of_them(example: ModuleType, tmp_path: Path) -> None:
    made = {}
    for num_envs in (16, 4096):
        env = make_env(example, tmp_path / str(num_envs), num_envs)
        env.reset()
        counts = [calls(partial(env.step, actions_of(env, t))).total() for t in range(8)]
        ends = [int((entry[4] | entry[5]).sum()) for entry in env.log]
        # The first steps make the segment, and others reserve rows in it.
        made[num_envs] = min(count for count, ended in zip(counts, ends, strict=True) if ended)
        env.close()
    assert max(ends) > 400 > max(made.values()), made


@pytest.mark.slow
def test_steps_whose_call_returned_survive_a_kill_of_the_simulator(example: ModuleType, tmp_path: Path) -> None:
    def run(tell: Any) -> None:
        env = make_env(example, tmp_path / "store", 16)
        env.reset()
        for t in range(10**9):
            env.step(actions_of(env, t))
            tell(16)

    told = 0
    for _ in range(3):
        death = in_child(run, kill_after_s=0.05)
        assert death.died
        told += sum(death.told)
    dr.open(tmp_path / "store", "a").close()  # ends the episodes that the last kill left open
    with dr.open(tmp_path / "store") as store:
        assert told <= len(store) <= told + 3 * 16
        assert all(episode.ended != "open" for episode in store.episodes)
        assert store.verify(deep=True) == []


def test_the_store_is_closed_with_the_environment(example: ModuleType, tmp_path: Path) -> None:
    env = make_env(example, tmp_path / "store", 2)
    env.reset()
    env.step(actions_of(env, 0))
    env.close()
    gc.collect()
    with dr.open(tmp_path / "store") as store:
        assert [writer["state"] for writer in store.info()["writers"]] == ["closed"]
        assert len(store) == 2


@pytest.mark.slow
def test_the_example_runs_as_a_script_of_isaac_lab(tmp_path: Path) -> None:
    options = ["--task", "Isaac-Stand-In-v0", "--num_envs", "16", "--steps", "40", "--path", "s"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, STAND_IN)))}
    done = subprocess.run(
        [sys.executable, EXAMPLE, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    with dr.open(tmp_path / "s") as store:
        assert len(store) == 16 * 40
        assert done.stdout.splitlines() == [f"recorded 640 steps of {store.num_episodes} episodes"]
